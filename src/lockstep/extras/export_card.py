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
from lockstep.config.run_files import read_report
from lockstep.config.words import shown
from lockstep.reporting.recorder import evaluated, versions
from lockstep.tasks import Task

SHOWN = 50  # names of classes
OUTPUTS = {
    "softmax": "probabilities of the {names}",
    "sigmoid": "a probability for each of the {names}",
    "identity": "a number for each of the {names}",
}
NOT_SETTINGS = ("run", "runs_dir", "resume", "init_from", "logger", "callbacks", "hydra", "experiment", "debug")
LOAD = """## Load it

```bash
python load.py <folder or images>                     # prints a line per image
python load.py <folder or images> --csv <file>        # writes a table
```

```python
from load import load

model = load("<this folder>")
model.predict(image_BCHW)         # uint8 images of any size
```

It needs {packages}. `preprocess.py` resizes and normalises; `decode.py` opens files as in training.
"""
ONNX = """
`model.onnx` takes `image`, uint8 of shape (batch, {channels}, height, width), any batch and any size, and gives `{output}`; the
preprocessing is inside:

```python
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
(outputs,) = session.run(None, {{"image": images}})
```
"""
PT2 = """
`model.pt2` is the same graph for torch: `torch.export.load("model.pt2").module()(images)`.
"""


def card(
    path: Path, content: Mapping[str, Any], task: Task, net: nn.Module, part: Path, found: dict[str, float], images: int
) -> str:
    cfg = OmegaConf.create(dict(content["config"]))
    assert isinstance(cfg, DictConfig)
    about, names = task.about, list(task.about[task.names])
    what = OUTPUTS[str(task.activation)].format(names=f"{len(names)} {task.names}")
    output = "values" if task.activation == "identity" else "probabilities"
    sections = [
        f"# {model_title(cfg)}, trained on {title(cfg.data)}",
        f"A network with {sum(p.numel() for p in net.parameters()):,} parameters for {title(cfg.task).replace('_', ' ')}. It takes images "
        f"of {about['channels']} channel{'s' if about['channels'] > 1 else ''}, resized to {about['image_size']} x {about['image_size']} "
        f"pixels, and gives {what}. Exported from `{path.name}` of the run `{cfg.run}`, after {content['global_step']:,} steps.",
        data(content[DATA], task.names, names),
        figures(path),
        compared(found, images),
        LOAD.format(packages=packages(part)),
        ONNX.format(channels=about["channels"], output=output) if (part / "model.onnx").is_file() else "",
        PT2 if (part / "model.pt2").is_file() else "",
        settings(cfg),
        f"## Versions\n\n{versions()}.",
        licence(part),
    ]
    return "\n\n".join(section.strip() for section in sections if section) + "\n"


def packages(part: Path) -> str:
    about = json.loads((part / "model.json").read_text())
    library = "timm" if about["timm"] else str(about["target"]).partition(".")[0]
    return ", ".join(["torch", "safetensors", "Pillow", *([library] if library in ("timm", "torchvision") else [])])


def data(data: Mapping[str, Any], kind: str, names: list[str]) -> str:
    listed = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else "")
    samples = f"{data['train']:,} training and validation samples, {data['test']:,} test samples"
    return f"## Data\n\n- source: {data['source']}, {samples}\n- sha256: `{data['sha256']}`\n- {kind}: {listed}"


def figures(path: Path) -> str:
    """The test figures of the run's report, if it tested this checkpoint."""
    run = path.resolve().parents[1]
    report = read_report(run)
    tested = report.get("checkpoint") and (run / str(report["checkpoint"])).resolve() == path.resolve()
    found = {name: report[name] for name in evaluated(report) if name != "test/count"} if tested else {}
    if not found:
        return "## Figures\n\nThis checkpoint was not tested."
    lines = ["## Figures\n", f"| figure | value | {report.get('unit', 'samples')} |", "| --- | ---: | ---: |"]
    for name, value in found.items():
        lines.append(
            f"| {name} | {f'{value:.4f}' if isinstance(value, float) else value} | {report.get('test/count', 0):,} |"
        )
    return "\n".join(lines)


def compared(found: Mapping[str, float], images: int) -> str:
    how = f"The outputs were compared with those of the trained network on {images} images, in batches of 1 and 5."
    lines = [f"{how} Largest difference:\n", *(f"- `{name}`: {difference:.1e}" for name, difference in found.items())]
    return "\n".join(lines) if found else ""


def settings(cfg: DictConfig) -> str:
    """The config as differences from the defaults; `config.yaml` has all of it."""
    try:
        defaults = dotted(OmegaConf.to_container(compose_config("train", []), resolve=True))
    except CONFIG_ERRORS:
        defaults = {}
    own = dotted(OmegaConf.to_container(cfg, resolve=True)).items()
    changed = {key: v for key, v in own if key.partition(".")[0] not in NOT_SETTINGS and defaults.get(key) != v}
    lines = ["## Settings\n", "What differs from the defaults; `config.yaml` has all settings.\n"]
    return "\n".join([*lines, *(f"- `{key}={shown(value)}`" for key, value in changed.items())])


def licence(part: Path) -> str:
    own = [name for name in ("network.py", "source") if (part / name).exists()]
    return (
        "## Licence\n\n`load.py`, `preprocess.py` and `decode.py` are part of Lockstep (MIT). "
        + (f"`{own[0]}` has the licence of the project that it comes from. " if own else "")
        + "The licence of the training data, and so of the weights, is not known here: ask whoever provided the data."
    )
