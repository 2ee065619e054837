"""The README.md of an exported folder: what the network is, what it learned from, how good it is, how to load it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch import nn

from lockstep.checkpoints.finding import DATA
from lockstep.config.compose import CONFIG_ERRORS, compose_config, dotted
from lockstep.config.identity import model_title, title
from lockstep.config.words import shown
from lockstep.reporting.render import ENVIRONMENT
from lockstep.run.folder import RunFolder
from lockstep.run.report import tested, versions
from lockstep.tasks import Task

OUTPUTS = {
    "softmax": "probabilities of the {names}",
    "sigmoid": "a probability for each of the {names}",
    "identity": "a number for each of the {names}",
}
NOT_SETTINGS = ("run", "runs_dir", "resume", "init_from", "logger", "callbacks", "hydra", "experiment", "debug")


def card(
    path: Path, content: Mapping[str, Any], task: Task, net: nn.Module, part: Path, found: dict[str, float], images: int
) -> str:
    """`found`: by file, the largest difference of its outputs from the trained network's, on so many `images`."""
    cfg: Any = OmegaConf.create(dict(content["config"]))
    report = report_of(path)
    about, names = task.about, list(task.about[task.names])
    values = {
        "model": model_title(cfg),
        "data_name": title(cfg.data),
        "parameters": sum(p.numel() for p in net.parameters()),
        "task": title(cfg.task).replace("_", " "),
        "about": about,
        "output": OUTPUTS[str(task.activation)].format(names=f"{len(names)} {task.names}"),
        "file": path.name,
        "run": cfg.run,
        "steps": content["global_step"],
        "data": content[DATA],
        "kind": task.names,
        "names": names,
        "metrics": {name: report[name] for name in tested(report) if name != "test/count"},
        "count": report.get("test/count", 0),
        "unit": report.get("unit", "samples"),
        "differences": found,
        "images": images,
        "packages": packages(part),
        "files": [each.name for each in part.iterdir()],
        "onnx_output": "values" if task.activation == "identity" else "probabilities",
        "settings": settings(cfg),
        "versions": versions(),
    }
    return ENVIRONMENT.get_template("card.md.j2").render(values) + "\n"


def packages(part: Path) -> list[str]:
    about = json.loads((part / "model.json").read_text())
    library = "timm" if about["timm"] else str(about["target"]).partition(".")[0]
    return ["torch", "safetensors", "Pillow", *([library] if library in ("timm", "torchvision") else [])]


def report_of(path: Path) -> dict[str, Any]:
    """The report of the checkpoint's run; empty if the run tested a different checkpoint."""
    run = path.resolve().parents[1]
    report = RunFolder(run).report()
    return report if report.get("checkpoint") and (run / report["checkpoint"]).resolve() == path.resolve() else {}


def settings(cfg: DictConfig) -> dict[str, str]:
    """What differs from the defaults."""
    try:
        defaults = dotted(OmegaConf.to_container(compose_config("train", []), resolve=True))
    except CONFIG_ERRORS:
        defaults = {}
    own = dotted(OmegaConf.to_container(cfg, resolve=True)).items()
    return {k: shown(v) for k, v in own if k.partition(".")[0] not in NOT_SETTINGS and defaults.get(k) != v}
