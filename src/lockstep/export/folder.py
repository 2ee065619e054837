"""Exports a trained network as a folder that needs only torch, and timm for a timm network."""

import ast
import inspect
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torch import Tensor, nn

from lockstep.checkpoints.content import DATA, network_of, read
from lockstep.checkpoints.weights import load_into
from lockstep.config.instantiate import target_of
from lockstep.config.signatures import accepted
from lockstep.data import transforms
from lockstep.errors import UserError
from lockstep.export import exported
from lockstep.machine.files import replacing
from lockstep.models.network import network
from lockstep.tasks import Classification

IMAGES = ("image_size", "mean", "std", "channels")
TIMM = "lockstep.models.from_timm"
ALLOWED = {"torch", "torchvision", "timm", "numpy"}  # importable by an exported network, besides Python's own


def export(path: Path, folder: Path) -> Path:
    """Writes the model of the checkpoint `path` to `folder`, which must not exist yet.

    Raises:
        UserError: the folder exists, it does not classify images, or the network's file needs more than torch and timm.
    """
    if folder.exists():
        raise UserError(f"{folder} exists. Type another folder, or remove it.")
    content = read(path)
    task, about = content["config"]["task"]["_target_"], content.get(DATA, {}).get("about", {})
    if not classifies_images(target_of(task, "task"), about):
        raise UserError(
            f"{path} was trained on {task}; only classifiers of images can be exported. "
            f'lockstep.load_model("{path}") returns the network of any task with its weights; save what you need of it.'
        )
    model = dict(content["config"]["model"])
    weights = {name: tensor.contiguous() for name, tensor in network_of(content).items()}
    net = network(model, content["network"], with_weights=False)
    load_into(net.state_dict(), weights, path)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replacing(folder) as part:
        part.mkdir()
        write_all(part, content, about, net, weights)
    return folder


def classifies_images(task: Any, about: dict[str, Any]) -> bool:
    """Whether `load.py` can use the network: on images, as Classification does."""
    known = isinstance(task, type) and issubclass(task, Classification) and task.outputs is Classification.outputs
    return known and {"classes", *IMAGES} <= about.keys()


def write_all(
    part: Path,
    content: dict[str, Any],
    about: dict[str, Any],
    net: nn.Module,
    weights: dict[str, Tensor],
) -> None:
    from safetensors.torch import save_file

    write_network(part, dict(content["config"]["model"]), content["network"], net)
    save_file({name: tensor.clone() for name, tensor in weights.items()}, part / "model.safetensors")
    write(part / "classes.json", about["classes"])
    write(part / "preprocessing.json", {key: about[key] for key in IMAGES})
    (part / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(dict(content["config"]))))
    shutil.copyfile(inspect.getfile(transforms), part / "preprocess.py")
    shutil.copyfile(inspect.getfile(exported), part / "load.py")


def write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def write_network(folder: Path, model: dict[str, Any], offered: dict[str, Any], net: nn.Module) -> None:
    """Writes model.json, which says how to create the network, and network.py, the file of its class unless timm's."""
    target = model.pop("_target_")
    if target == TIMM:
        name = model.pop("name")
        arguments = {key: value for key, value in model.items() if key not in ("pretrained", "checkpoint_path")}
        arguments |= {"in_chans": offered["in_channels"], "num_classes": offered["num_classes"]}
        if vars(net)["pretrained_cfg"].get("fixed_input_size"):
            arguments.setdefault("img_size", offered["image_size"])
        write(folder / "model.json", {"timm": name, "class": None, "arguments": arguments})
        return
    source = Path(inspect.getfile(type(net)))
    foreign = imported(source) - ALLOWED - sys.stdlib_module_names
    if foreign:
        raise UserError(
            f"{source.name} imports {', '.join(sorted(foreign))}: an exported network's file may import only torch, torchvision, timm and "
            "numpy. Put other code that it needs into the file itself."
        )
    own = {key: value for key, value in model.items() if key != "name"}
    write(
        folder / "model.json",
        {"timm": None, "class": type(net).__name__, "arguments": {**accepted(target, offered), **own}},
    )
    shutil.copyfile(source, folder / "network.py")


def imported(source: Path) -> set[str]:
    """The packages that a file imports; a relative import counts as the project's own."""
    found = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0] if not node.level else "lockstep")
    return found
