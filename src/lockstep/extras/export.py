"""Exports a trained network as a folder that needs only torch and Pillow, and timm for a timm network."""

import inspect
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from copy import deepcopy as copied
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from lockstep.checkpoints.finding import DATA, Checkpoint, leaves, mapped
from lockstep.checkpoints.saving import Position
from lockstep.checkpoints.weights import load_into, read
from lockstep.config.compose import as_overrides
from lockstep.config.instantiate import WEIGHTS, create, create_data, network
from lockstep.config.settings import Settings, model_title, title
from lockstep.config.targets import accepted, nodes, parameters, target_of
from lockstep.config.words import warn
from lockstep.data import dataset, pixels
from lockstep.data.dataset import Batch, DataSet, samples_of
from lockstep.data.images import FRAMING, NEEDED, Images
from lockstep.data.loaders import Reader
from lockstep.errors import UserError, raise_problems
from lockstep.extras import export_parts as parts
from lockstep.extras import exported
from lockstep.extras.tables import input_files
from lockstep.machine.files import remove, replacing
from lockstep.reporting.render import MARKDOWN
from lockstep.run import RunFolder, tested, versions
from lockstep.training.invariance import same_random_numbers
from lockstep.training.losses import samples_at
from lockstep.training.task import Task

# B batch · C channel · H W pixel


TIMM = "lockstep.models.from_timm"
COMPARED, COMPARED_IN_TRIAL = 100, 6  # samples that the files are compared on


@dataclass(frozen=True)
class Exported:
    """What is exported: a network, what its task and data say of it, and samples to compare it on. Raises UserError: it cannot be."""

    config: Mapping[str, Any]
    offered: Mapping[str, Any]  # arguments of the network
    task: Task
    net: nn.Module
    data: DataSet  # of the run, or one for files
    batch: Batch

    @cached_property
    def takes_images(self) -> bool:
        sample = self.batch["input"]  # texts are lists
        images = isinstance(sample, Tensor) and sample.dtype == torch.uint8 and sample.dim() == 4
        return images and all(self.task.about.get(key) for key in NEEDED)

    @cached_property
    def activation(self) -> str:
        """What makes predictions of the network's outputs; `none` if its task has other ones than these."""
        names = {"predictions", "activation"}
        owner = next(base for base in type(self.task).__mro__ if vars(base).keys() & names)
        known = vars(owner).keys() >= names and self.call(self.data.preprocess(self.batch))[3]
        return str((known and self.task.activation) or "none")

    @torch.inference_mode()
    def call(self, batch: Batch) -> tuple[parts.Inputs, list[str], Any, bool]:
        """What the task gives to the network for a prepared batch, the names of the last of these arguments, the network's outputs, and
        whether the task's are the same."""
        calls: list[tuple[parts.Inputs, list[str], Any]] = []

        def recorded(*inputs: Any, **named: Any) -> Any:
            calls.append(((*inputs, *named.values()), list(named), self.net(*inputs, **named)))
            return calls[-1][2]

        result = self.task.outputs(recorded, batch)
        passed = leaves([(inputs, output) for inputs, _, output in calls])
        odd = [value for _, value in passed if not isinstance(value, Tensor)]
        if len(calls) != 1 or odd:
            why = f"calls it {len(calls)} times" if len(calls) != 1 else f"uses {type(odd[0]).__name__} besides tensors"
            raise UserError(
                f"the network cannot be exported: {type(self.task).__name__} {why} for a batch. Call it once in the task's `outputs`, with "
                "tensors (in dicts, lists and tuples), and return tensors from it."
            )
        return *calls[0], result is calls[0][2]

    def original(self, batch: Batch) -> tuple[parts.Inputs, Any]:
        """What an exported file gets for samples of the data, and what it has to return."""
        inputs, _, output, _ = self.call(self.data.preprocess(batch))
        return (batch["input"],) if self.takes_images else inputs, exported.ACTIVATIONS[self.activation](output)

    def examples(self) -> list[parts.Inputs]:
        """Arguments of a file for two batches that differ in what may vary."""
        if self.takes_images:
            channels, side = self.task.about["channels"], self.task.about["image_size"]
            return [(torch.zeros(n, channels, side + n + 1, side + 2 * n, dtype=torch.uint8),) for n in (2, 3)]
        count = len(self.batch["index"])
        return [self.original(samples_at(self.batch, [place % count for place in range(n)], count))[0] for n in (2, 3)]

    def signature(self) -> dict[str, Any]:
        """The arguments of the network as names of a batch's values, and the class that reads files for it, if one can."""
        if self.takes_images:
            return {"inputs": None, "named": [], "reader": None}
        batch = self.data.preprocess(self.batch)
        inputs, named, _, _ = self.call(batch)
        names = {id(value): name for name, value in batch.items()}
        tree = mapped(list(inputs), lambda place, value: names.get(id(value), "_".join(map(str, place))))
        own = type(self.data).read is not DataSet.read and not isinstance(self.data, Images)
        reads = own and {name for _, name in leaves(tree)} <= batch.keys()
        target = f"{type(self.data).__module__}.{type(self.data).__qualname__}"
        return {"inputs": tree, "named": named, "reader": target if reads else None}

    def write_network(self, folder: Path) -> dict[str, Any]:
        """Copies the source files of the network, unless a library has it; returns how to make it."""
        model = dict(self.config["model"])
        target = model.pop("_target_")
        if target == TIMM:
            name = model.pop("name")
            arguments = {key: value for key, value in model.items() if key not in WEIGHTS}
            arguments |= {"in_chans": self.offered["in_channels"], "num_classes": self.offered["num_classes"]}
            if vars(self.net)["pretrained_cfg"].get("fixed_input_size"):
                arguments.setdefault("img_size", self.offered["image_size"])
            return {"target": "timm.create_model", "arguments": {"model_name": name, **arguments}}
        if any(place != "model" for place, _ in nodes(model, "model")):
            raise UserError(
                "keys of the run's `model` hold objects; only plain values are exported. Make them in the class."
            )
        named = parameters(target) or {}
        own = {key: value for key, value in model.items() if key != "name" or "name" in named}
        own |= {key: False if isinstance(own[key], bool) else None for key in WEIGHTS if key in own}
        where: Any = target_of(target, "model")
        home, name = where.__module__, where.__qualname__
        content = {"target": target, "arguments": {**accepted(target, self.offered), **own}}
        if home.partition(".")[0] in parts.ALLOWED:
            return content
        modules = parts.needed(home)
        if len(modules) == 1:
            shutil.copyfile(modules[home], folder / "network.py")
            return {**content, "target": f"network.{name}"}
        parts.copy(modules, folder / "source")
        return {**content, "target": f"{home}.{name}"}

    def write(self, part: Path, formats: Sequence[str]) -> dict[str, float]:
        """Writes all but the card into a folder; returns, by file, the largest difference of its outputs from the network's."""
        from safetensors.torch import save

        task, content = self.task, {**self.write_network(part), **self.signature()}
        if content["reader"]:
            try:
                # `preprocess` may need what only `__init__` sets
                type(self.data).for_files(task.about).preprocess(dict(self.batch))
                parts.copy(parts.needed(type(self.data).__module__, parts.OFFERED), part / "source")
                files: dict[str, Any] = {"lockstep.data": dataset, "lockstep.errors": UserError}
                parts.copy({name: Path(inspect.getfile(file)) for name, file in files.items()}, part / "standin")
            except (UserError, AttributeError) as e:
                warn(f"load.py of the folder cannot read files: {e}")
                content["reader"] = None
        content |= {"activation": self.activation, "threshold": getattr(task, "threshold", None)}
        needed = [key for key in (*NEEDED, *FRAMING) if key in task.about] if self.takes_images else task.about
        numbers = {key: task.about[key] for key in needed}
        files = {"model": content, "classes": list(task.value_names), "preprocessing": numbers}
        for name, values in files.items():
            (part / f"{name}.json").write_text(json.dumps(values, indent=1) + "\n")
        # as bytes, because save_file makes a file that only its owner can read, whatever the umask; cloned, because some are tied
        weights = {name: tensor.detach().contiguous().clone() for name, tensor in self.net.state_dict().items()}
        (part / "model.safetensors").write_bytes(save(weights))
        (part / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(dict(self.config))))
        for name, source in {"preprocess.py": pixels, "load.py": exported}.items():
            shutil.copyfile(inspect.getfile(source), part / name)
        model = exported.load(part)
        runners: dict[str, Any] = {"load.py": model.outputs}
        if formats:
            runners |= parts.write_graphs(model, formats, part, self.examples())
        found = parts.compared(runners, self.original, self.batch)
        for compiled in list(part.rglob("__pycache__")):  # of what was loaded to compare
            remove(compiled)
        return found


class Exportable(pl.Callback):
    """Rejects a run before its first step if scripts/export.py could not export its network in these `formats`: exports it on trial."""

    def __init__(self, *, formats: Sequence[str] = ("pt2",)) -> None:
        self.formats = formats
        raise_problems(parts.missing(formats))

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        config = next(each.config for each in trainer.callbacks if isinstance(each, Position))  # type: ignore[attr-defined]
        refuse_custom_module(config, "callbacks.exportable")
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        batch = data.raw("train", np.arange(COMPARED_IN_TRIAL) % len(data.dataset.train))
        with same_random_numbers(torch.device("cpu")), TemporaryDirectory() as folder:
            net, task = (each.cpu().eval() for each in (copied(pl_module.net), pl_module.copied()))
            what = Exported(config, pl_module.parts.network_arguments, task, net, data.evaluated, batch)
            what.write(Path(folder), self.formats)


def refuse_custom_module(config: Mapping[str, Any], what: str) -> None:
    """Raises UserError: the task is a LightningModule."""
    kind: Any = target_of(config["task"]["_target_"], "task")
    if not (isinstance(kind, type) and issubclass(kind, Task)):
        raise UserError(
            f"{what}: {config['task']['_target_']} is a LightningModule, which makes its own network, and cannot be exported. "
            "lockstep.load_model(<run>) returns it with its weights; save what you need of it."
        )


def export(path: Path, folder: Path, formats: Sequence[str] = (), files: str | None = None) -> Path:
    """Writes the model of the checkpoint `path` to `folder`, which must not exist yet.

    `formats`: onnx, pt2, beside the weights. What was written is compared with the network on `files` (as predict.py's
    `input`), or on test samples of the run's data, before the folder is there.

    Raises:
        UserError: the folder exists, the network cannot be exported, its files need more than torch and timm, a format is not
            possible, or its outputs differ.
    """
    exists = [f"{folder} exists. Pass another folder, or remove it."] if folder.exists() else []
    raise_problems([*exists, *parts.missing(formats)])
    checkpoint = read(path)
    config, about, offered = checkpoint.config, checkpoint.metadata, checkpoint.network or {}
    refuse_custom_module(config, str(path))
    task: Task = create(config["task"], "task")
    task.bind(about)
    net = network(config["model"], offered, with_weights=False).eval()
    load_into(net.state_dict(), checkpoint.weights, path)
    data, batch = samples_to_compare(config, about, files)
    what = Exported(config, offered, task, net, data, batch)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replacing(folder) as part:
        part.mkdir()
        found = what.write(part, formats)
        (part / "README.md").write_text(card(checkpoint, what, part, found))
    return folder


def samples_to_compare(config: Mapping[str, Any], about: Mapping[str, Any], files: str | None) -> tuple[DataSet, Batch]:
    """Samples to compare on, as they are stored, and the data set that prepares them. Raises UserError: they cannot be read."""
    cfg: Any = OmegaConf.create(dict(config))
    if files is not None:
        inputs = input_files(files, cfg.data, about, "remove --files: the run's own data is used")
        batch = Reader(inputs, seed=0)(np.arange(min(COMPARED, len(inputs))))
        good = [place for place, problem in enumerate(batch.pop("problem")) if not problem]
        return inputs.reader, samples_at(batch, good, len(batch["index"]))
    try:
        if Settings.of(cfg).own_loaders:
            raise UserError("it has its own dataloaders.")
        data: DataSet = create_data(cfg.data, evaluates=True)
        data.prepare()
        samples = samples_of(data.evaluated.test)
        return data.evaluated, Reader(samples, seed=0)(np.arange(min(COMPARED, len(samples))))
    except Exception as e:  # the user's own data sets may raise anything
        raise UserError(f"the run's data, to compare with, cannot be read: {e} Pass --files <folder>.") from None


# --- The README.md of an exported folder: what the network is, what it learned from, how good it is, how to load it ---


def card(checkpoint: Checkpoint, what: Exported, part: Path, found: dict[str, float]) -> str:
    """`found`: by file, the largest difference of its outputs from the trained network's."""
    cfg: Any = OmegaConf.create(dict(checkpoint.config))
    run = checkpoint.path.resolve().parent.parent
    report = RunFolder(run).report()
    if report.get("checkpoint") != os.path.relpath(checkpoint.path.resolve(), run):
        report = {}  # the run tested a different checkpoint
    model = json.loads((part / "model.json").read_text())
    inputs = []
    for _, x in () if what.takes_images else leaves(what.examples()[0]):
        shape = ", ".join(["batch", *map(str, x.shape[1:])])
        inputs.append(f"{x.dtype} of shape ({shape})".removeprefix("torch."))
    values = {
        "model": model_title(cfg),
        "data_name": title(cfg.data),
        "parameters": sum(p.numel() for p in what.net.parameters()),
        "task_name": title(cfg.task).replace("_", " "),
        "what": what,
        "checkpoint": checkpoint,
        "data": checkpoint.values[DATA],
        "inputs": inputs,
        "reader": model["reader"],
        "metrics": {name: report[name] for name in tested(report) if name != "test/count"},
        "count": report.get("test/count", 0),
        "differences": found,
        "library": model["target"].partition(".")[0],
        "files": [each.name for each in part.iterdir()],
        "settings": as_overrides(cfg),
        "versions": versions(),
    }
    return MARKDOWN.get_template("card.md.j2").render(values) + "\n"
