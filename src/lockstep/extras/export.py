"""Exports a trained network as a folder that needs only torch and Pillow, and timm for a timm network."""

import ast
import importlib.util
import inspect
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from lockstep.checkpoints.finding import DATA, Checkpoint
from lockstep.checkpoints.weights import load_into, read
from lockstep.config.compose import CONFIG_ERRORS, compose_config, dotted
from lockstep.config.instantiate import WEIGHTS, create, create_data, network
from lockstep.config.run_config import model_title, title
from lockstep.config.targets import accepted, nodes, parameters, target_of
from lockstep.config.words import shown
from lockstep.data import pixels
from lockstep.data.dataset import samples_of
from lockstep.data.images import find_inputs
from lockstep.errors import UserError, raise_problems
from lockstep.extras import export_graphs, exported
from lockstep.extras.tables import NEEDED, InputFiles
from lockstep.machine.files import remove, replacing
from lockstep.reporting.render import ENVIRONMENT
from lockstep.run.folder import RunFolder
from lockstep.run.report import tested, versions
from lockstep.tasks import Task

# --- The source files that a network needs: its own, and those of its package that it imports, directly or through others ---

ALLOWED = {"torch", "torchvision", "timm", "numpy", "safetensors"}  # importable besides Python's own


def source_of(module: str) -> Path | None:
    """The file of a module; None if there is no such module or it is not Python's."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, AttributeError, ValueError):
        return None
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


def needed(module: str) -> dict[str, Path]:
    """The modules of its package that a module needs, itself first, with their files.

    Raises:
        UserError: one of them imports a package that the folder may not need.
    """
    package, found, foreign = module.partition(".")[0], dict[str, Path](), dict[str, set[str]]()
    left = [module]
    while left:
        name = left.pop(0)
        if name in found:
            continue
        path = source_of(name)
        assert path is not None, name
        found[name] = path
        names = imported(path, name)
        own = {each for each in names if each.partition(".")[0] == package}
        if others := {each.partition(".")[0] for each in names - own} - ALLOWED - sys.stdlib_module_names:
            foreign[path.name] = others
        left += sorted(each for each in own if source_of(each))
    if package == "lockstep" and len(found) > 1:
        foreign[found[module].name] = {"lockstep"}
    if foreign:
        which = "; ".join(f"{file} imports {', '.join(sorted(names))}" for file, names in foreign.items())
        raise UserError(
            f"{which}: the files of an exported network may import only torch, torchvision, timm, numpy and each other. "
            "Put other code that they need into your package."
        )
    return found


def imported(path: Path, module: str) -> set[str]:
    """The modules that a file imports, in full; without those for type checkers."""
    inside = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), inside)
            inner = {f"{base}.{alias.name}" for alias in node.names}
            modules = {name for name in inner if name.partition(".")[0] == module.partition(".")[0] and source_of(name)}
            found |= modules | ({base} if len(modules) < len(inner) else set())
    return found


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes except those under `if TYPE_CHECKING`."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield from walk(child)


def copy(modules: dict[str, Path], folder: Path) -> None:
    """Writes the modules into `folder` as packages; an __init__.py that no other needs is empty."""
    for name, path in modules.items():
        *above, last = name.split(".")
        for depth in range(1, len(above) + 1):
            init = folder.joinpath(*above[:depth], "__init__.py")
            init.parent.mkdir(parents=True, exist_ok=True)
            init.touch()
        place = folder.joinpath(*above, last)
        target = place / "__init__.py" if path.name == "__init__.py" else place.with_suffix(".py")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())


# --- Exports a trained network as a folder that needs only torch and Pillow, and timm for a timm network ---

# B batch · C channel · H W pixel


TIMM = "lockstep.models.from_timm"
IMAGES = 100  # that the files are compared on


def export(path: Path, folder: Path, formats: Sequence[str] = (), images: str | None = None) -> Path:
    """Writes the model of the checkpoint `path` to `folder`, which must not exist yet.

    `formats`: onnx, pt2, beside the weights. What was written is compared with the network on `images` (as predict.py's
    `input`), or on the test images of the run's data, before the folder is there.

    Raises:
        UserError: the folder exists, the network does not take images, its files need more than torch and timm, a format is not
            possible, or its outputs differ.
    """
    exists = [f"{folder} exists. Type another folder, or remove it."] if folder.exists() else []
    raise_problems([*exists, *export_graphs.missing(list(formats))])
    checkpoint = read(path)
    task, content = exportable_task(checkpoint), checkpoint.values
    weights = {name: tensor.contiguous() for name, tensor in checkpoint.weights.items()}
    net = network(dict(content["config"]["model"]), content["network"], with_weights=False)
    load_into(net.state_dict(), weights, path)
    image_BCHW, prepared = compared_images(content, task.about, images, needed=bool(formats))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replacing(folder) as part:
        part.mkdir()
        write_all(part, content, task, net, weights)
        model = exported.load(part)
        runners: dict[str, Callable[[Tensor], Tensor]] = {"load.py": model.outputs}
        runners |= export_graphs.write_graphs(model, list(formats), part)
        activate = exported.ACTIVATIONS[str(task.activation)]
        found: dict[str, float] = {}
        if image_BCHW is not None:
            found = export_graphs.compared(runners, lambda x: activate(net.eval()(prepared(x))), image_BCHW)
        for compiled in list(part.rglob("__pycache__")):  # of what was loaded to compare
            remove(compiled)
        (part / "README.md").write_text(card(path, content, task, net, part, found, len(image_BCHW) if found else 0))  # type: ignore[arg-type]
    return folder


def exportable_task(checkpoint: Checkpoint) -> Task:
    """The task of a checkpoint. Raises UserError if load.py could not say what it says."""
    node, about, path = checkpoint.config["task"], checkpoint.metadata, checkpoint.path
    kind: Any = target_of(node["_target_"], "task")
    why = ""
    if not (isinstance(kind, type) and issubclass(kind, Task)):
        why = "a LightningModule, which makes its own network"
    elif kind.outputs is not Task.outputs or not kind.activation or not together(kind, "predictions", "activation"):
        why = "a task whose predictions are not an activation of the network's outputs (`activation` of lockstep.tasks.Task)"
    elif missing := [key for key in NEEDED if not about.get(key)]:
        why = f"for data without images: {', '.join(missing)} is not in its `about`"
    if why:
        raise UserError(
            f"{path} was trained on {node['_target_']}, {why}; only networks that take images can be exported. "
            f'lockstep.load_model("{path}") returns the network of any task with its weights; save what you need of it.'
        )
    task: Task = create(node, "task")
    task.bind(about)
    return task


def together(kind: type, *names: str) -> bool:
    """Whether one class defines all these attributes which `kind` inherits."""
    base = next(base for base in kind.__mro__ if vars(base).keys() & set(names))
    return vars(base).keys() >= set(names)


def compared_images(
    content: dict[str, Any], about: Any, images: str | None, *, needed: bool
) -> tuple[Tensor | None, Callable[[Tensor], Tensor]]:
    """uint8 images to compare on, and how the network's own data prepares them.

    Raises:
        UserError: they cannot be read, and are `needed`.
    """
    given = {key: about[key] for key in ("image_size", "mean", "std")}
    if images is not None:
        files = InputFiles(find_inputs(images), channels=about["channels"], size=about["image_size"])
        read_images = files[np.arange(min(IMAGES, len(files)))]
        good = [not problem for problem in read_images["problem"]]
        if not any(good):
            raise UserError(f"--images {images}: no file can be read: {read_images['problem'][0]}.")
        return torch.from_numpy(read_images["input"][good]), pixels.Preprocess(**given)
    cfg = OmegaConf.create(content["config"])
    assert isinstance(cfg, DictConfig)
    try:
        dataset = create_data(cfg)
        if dataset is None:
            raise UserError("it has its own dataloaders")
        dataset.prepare()
        samples = samples_of(dataset.test)
        image_BCHW = torch.as_tensor(np.asarray(samples[np.arange(min(IMAGES, len(samples)))]["input"]))
    except (UserError, OSError) as e:
        if needed:
            raise UserError(
                f"the files are compared on images of the run's own data before they are kept, and it cannot be read: {e} "
                "Type --images <folder of images>."
            ) from None
        why = f"the run's data cannot be read. {e}"
        print(f"WARNING: the folder was not compared with the network: {why}", file=sys.stderr)
        return None, pixels.Preprocess(**given)
    if image_BCHW.dtype != torch.uint8 or image_BCHW.dim() != 4:
        raise UserError(
            f"the run's data has {image_BCHW.dtype} of shape {tuple(image_BCHW.shape)}, no images of bytes (uint8, BCHW)."
        )
    return image_BCHW, lambda x: dataset.preprocess({"input": x})["input"]


def write_all(part: Path, content: dict[str, Any], task: Task, net: nn.Module, weights: dict[str, Tensor]) -> None:
    from safetensors.torch import save

    output = {"activation": task.activation, "threshold": getattr(task, "threshold", None)}
    write(part / "model.json", {**write_network(part, content, net), **output})
    # as bytes, because save_file makes a file that only its owner can read, whatever the umask
    (part / "model.safetensors").write_bytes(save({name: tensor.clone() for name, tensor in weights.items()}))
    write(part / "classes.json", task.about[task.names])
    write(part / "preprocessing.json", {key: task.about[key] for key in NEEDED})
    (part / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(dict(content["config"]))))
    for name, source in {"preprocess.py": pixels, "load.py": exported}.items():
        shutil.copyfile(inspect.getfile(source), part / name)


def write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def write_network(folder: Path, content: dict[str, Any], net: nn.Module) -> dict[str, Any]:
    """Copies the source files of the network, unless a library has it; returns how to make it."""
    model, offered = dict(content["config"]["model"]), content["network"]
    target = model.pop("_target_")
    if target == TIMM:
        name = model.pop("name")
        arguments = {key: value for key, value in model.items() if key not in WEIGHTS}
        arguments |= {"in_chans": offered["in_channels"], "num_classes": offered["num_classes"]}
        if vars(net)["pretrained_cfg"].get("fixed_input_size"):
            arguments.setdefault("img_size", offered["image_size"])
        return {"timm": name, "target": None, "arguments": arguments}
    if any(place != "model" for place, _ in nodes(model, "model")):
        raise UserError(
            "the `model` of this run has objects within its keys; only plain values can be exported. Make them in the class."
        )
    named = parameters(target) or {}
    own = {key: value for key, value in model.items() if key != "name" or "name" in named}
    own |= {key: False if isinstance(own[key], bool) else None for key in WEIGHTS if key in own}
    made = {"timm": None, "arguments": {**accepted(target, offered), **own}}
    where: Any = target_of(target, "model")
    home, name = where.__module__, where.__qualname__
    if home.partition(".")[0] in ALLOWED:
        return {**made, "target": target}
    modules = needed(home)
    if len(modules) == 1:
        shutil.copyfile(modules[home], folder / "network.py")
        return {**made, "target": f"network.{name}"}
    copy(modules, folder / "source")
    return {**made, "target": f"{home}.{name}"}


# --- The README.md of an exported folder: what the network is, what it learned from, how good it is, how to load it ---

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
