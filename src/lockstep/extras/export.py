"""Exports a trained network as a folder that needs only torch and Pillow, and timm for a timm network."""

import inspect
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from copy import deepcopy as copied
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from lockstep.build import load_module
from lockstep.checkpoints.finding import DATA, Checkpoint, leaves, mapped
from lockstep.checkpoints.saving import Position
from lockstep.checkpoints.weights import load_into, read
from lockstep.config.draft import as_yaml
from lockstep.config.instantiate import WEIGHTS, create, create_data
from lockstep.config.instantiate import network as make_network
from lockstep.config.renames import overrides_of
from lockstep.config.run_config import Component, RunConfig
from lockstep.config.settings import Settings
from lockstep.config.targets import accepted, nodes, parameters, target_of
from lockstep.config.words import warn
from lockstep.data import dataset, pixels
from lockstep.data.dataset import Batch, DataSet, samples_of
from lockstep.data.images import FRAMING, NEEDED, Images
from lockstep.data.loaders import Reader
from lockstep.errors import UserError, did_you_mean, raise_problems
from lockstep.extras import export_parts as parts
from lockstep.extras import exported
from lockstep.extras.render import MARKDOWN
from lockstep.extras.tables import input_files
from lockstep.launch.resuming import config_of
from lockstep.machine.files import remove, replacing
from lockstep.run import RunFolder, tested, versions
from lockstep.training.invariance import same_random_numbers
from lockstep.training.losses import samples_at
from lockstep.training.task import Task

# B batch · C channel · H W pixel


TIMM = "lockstep.models.from_timm"
COMPARED, COMPARED_IN_TRIAL = 100, 6  # samples that the files are compared on
SHOWN = 20  # names of networks in a message


@dataclass
class Call:
    """A call of a network for a batch."""

    inputs: parts.Inputs
    names: list[Any]  # of the batch's values, in place of these inputs; of others, their place
    named: list[str]  # the last inputs are passed by these names
    output: Any = None
    is_result: bool = False  # whether the task's outputs are these


@dataclass(frozen=True)
class Exported:
    """What is exported: a network, what its task and data say of it, and samples to compare it on. Raises UserError: it cannot be."""

    config: RunConfig
    offered: Mapping[str, Any]  # arguments of the network
    task: Task
    whole: nn.Module  # what the task calls
    data: DataSet  # of the run, or one for files
    batch: Batch
    network: str = ""  # the one within it that is exported; empty: itself
    made: str = ""  # the one within it that `model` of the config makes; empty: itself

    def __post_init__(self) -> None:
        if self.network and self.network not in (names := self.called()):
            there = self.network in dict(self.whole.named_modules(remove_duplicate=False))
            why = f"is not called when {type(self.whole).__name__} runs on a batch" if there else "does not exist"
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            raise UserError(
                f"--network={self.network} {why}{did_you_mean(self.network, names)}. Pass the name of a network that is called: "
                f"{', '.join(names[:SHOWN])}{more}."
            )

    @property
    def net(self) -> nn.Module:
        return self.whole.get_submodule(self.network)

    @torch.no_grad()
    def called(self) -> list[str]:
        """The names of the networks within it that are called for a batch, the outer ones first."""
        found = set[nn.Module]()
        with register_module_forward_pre_hook(lambda module, _: found.add(module)):
            self.task.outputs(self.whole, self.data.preprocess(self.batch))
        modules = self.whole.named_modules(remove_duplicate=False)
        return sorted((name for name, module in modules if name and module in found), key=lambda name: name.count("."))

    @cached_property
    def takes_images(self) -> bool:
        sample = self.batch["input"]  # texts are lists
        images = isinstance(sample, Tensor) and sample.dtype == torch.uint8 and sample.dim() == 4
        images = images and all(self.task.about.get(key) for key in NEEDED)
        return images and (not self.network or self.call(self.data.preprocess(self.batch)).names == ["input"])

    @cached_property
    def activation(self) -> str:
        """What makes predictions of the network's outputs; `none` if its task has other ones than these."""
        names = {"predictions", "activation"}
        owner = next(base for base in type(self.task).__mro__ if vars(base).keys() & names)
        known = not self.network and vars(owner).keys() >= names
        known = known and self.call(self.data.preprocess(self.batch)).is_result
        return str((known and self.task.activation) or "none")

    @torch.no_grad()
    def call(self, batch: Batch) -> Call:
        """How the task calls the network for a prepared batch; of one within it, the first call."""
        known = {id(value): name for name, value in batch.items()}
        calls: list[Call] = []

        def before(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            values = [*inputs, *named.values()]
            names = mapped(values, lambda place, value: known.get(id(value), "_".join(map(str, place))))
            calls.append(Call(tuple(parts.cloned(values)), names, list(named)))

        def after(_: nn.Module, __: Any, output: Any) -> None:
            calls[-1].output = parts.cloned(output) if self.network else output

        with self.net.register_forward_pre_hook(before, with_kwargs=True), self.net.register_forward_hook(after):
            result = self.task.outputs(self.whole, batch)
        passed = leaves([(call.inputs, call.output) for call in calls[:1]])
        odd = [value for _, value in passed if not isinstance(value, Tensor)]
        if odd or not calls or (len(calls) > 1 and not self.network):
            why = f"uses {type(odd[0]).__name__} besides tensors" if odd else f"calls it {len(calls)} times"
            what = f"the network {self.network}".rstrip()
            caller, how = (self.whole, "") if self.network else (self.task, " once in the task's `outputs`,")
            raise UserError(
                f"{what} cannot be exported: {type(caller).__name__} {why} for a batch. Call it{how} with tensors (in dicts, lists "
                "and tuples), and return tensors from it."
            )
        calls[0].is_result = result is calls[0].output
        return calls[0]

    def original(self, batch: Batch) -> tuple[parts.Inputs, Any]:
        """What an exported file gets for samples of the data, and what it has to return."""
        call = self.call(self.data.preprocess(batch))
        inputs = (batch["input"],) if self.takes_images else call.inputs
        return inputs, exported.ACTIVATIONS[self.activation](call.output)

    def examples(self) -> list[parts.Inputs]:
        """Arguments of a file for two batches that differ in what may vary."""
        if self.takes_images:
            channels, side = self.task.about["channels"], self.task.about["image_size"]
            return [(torch.zeros(n, channels, side + n + 1, side + 2 * n, dtype=torch.uint8),) for n in (2, 3)]
        count = len(self.batch["index"])
        return [self.original(samples_at(self.batch, [place % count for place in range(n)], count))[0] for n in (2, 3)]

    def signature(self) -> dict[str, Any]:
        """The arguments of the network as names of a batch's values, and the class that reads files for it, if one can."""
        batch = self.data.preprocess(self.batch)
        call = self.call(batch)
        if self.takes_images:
            return {"inputs": None, "named": call.named, "reader": None}
        own = type(self.data).read is not DataSet.read and not isinstance(self.data, Images)
        reads = own and {name for _, name in leaves(call.names)} <= batch.keys()
        target = f"{type(self.data).__module__}.{type(self.data).__qualname__}"
        return {"inputs": call.names, "named": call.named, "reader": target if reads else None}

    def write_network(self, folder: Path) -> dict[str, Any]:
        """Copies the source files of the network, unless a library has it; returns how to make it."""
        target, model = self.config.model.target, dict(self.config.model.kwargs)
        if target == TIMM:
            name = model.pop("name")
            given = (*WEIGHTS, "in_channels", "num_classes", "image_size")
            arguments = {key: value for key, value in model.items() if key not in given}
            arguments |= {"in_chans": self.offered["in_channels"], "num_classes": self.offered["num_classes"]}
            if vars(self.whole.get_submodule(self.made))["pretrained_cfg"].get("fixed_input_size"):
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
        content["network"] = self.network.removeprefix(self.made).removeprefix(".")
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
        files = {"model": content, "classes": [] if self.network else list(task.value_names), "preprocessing": numbers}
        for name, values in files.items():
            (part / f"{name}.json").write_text(json.dumps(values, indent=1) + "\n")
        # as bytes, because save_file makes a file that only its owner can read, whatever the umask; cloned, because some are tied
        weights = {name: tensor.detach().contiguous().clone() for name, tensor in self.net.state_dict().items()}
        (part / "model.safetensors").write_bytes(save(weights))
        (part / "config.yaml").write_text(as_yaml(self.config))
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
        if not is_task(config):
            raise UserError(
                f"callbacks.exportable: {config.task.target} is a LightningModule, which cannot be exported as a whole. Remove the "
                "callback. scripts/export.py <run> --network=<name> exports one of its networks."
            )
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        batch = data.raw("train", np.arange(COMPARED_IN_TRIAL) % len(data.dataset.train))
        with same_random_numbers(torch.device("cpu")), TemporaryDirectory() as folder:
            net, task = (each.cpu().eval() for each in (copied(pl_module.net), pl_module.copied()))
            what = Exported(config, pl_module.parts.network_arguments, task, net, data.evaluated, batch)
            what.write(Path(folder), self.formats)


def is_task(config: RunConfig) -> bool:
    kind: Any = target_of(config.task.target, "task")
    return isinstance(kind, type) and issubclass(kind, Task)


class OfModule(Task):
    """Stands for a LightningModule: its `forward` gets the samples, or the network of an `argument` if it has none."""

    def __init__(self, argument: str) -> None:
        super().__init__()
        self.argument = argument

    def outputs(self, net: Any, batch: Mapping[str, Any]) -> Any:
        own = type(net).forward is not pl.LightningModule.forward
        try:
            return (net if own else net.get_submodule(self.argument))(batch["input"])
        except Exception as e:  # it may want anything
            raise UserError(
                f"--network={self.argument}: {type(net).__name__}{'.forward' if own else ''} does not run on the input of this data ({e!s:.300}), "
                "so what the network gets is not known. Define a `forward(input)` that calls it."
            ) from e


def network_of_module(config: RunConfig, path: Path, network: str) -> tuple[Task, nn.Module, str]:
    """A LightningModule with its weights, a task that stands for it, and the argument that makes the network, which the folder has to
    make again without Lightning. Raises UserError: no argument does."""
    argument = network.partition(".")[0]
    known = [
        name
        for name, each in config.task.kwargs.items()
        if isinstance(each, Mapping) and "_target_" in each and not each.get("_partial_")
    ]
    module = load_module(config.task, path).eval()
    kept = [name for name in known if isinstance(getattr(module, name, None), nn.Module)]
    if argument not in kept:
        raise UserError(
            f"{path}: {config.task.target} is a LightningModule, which cannot be exported as a whole. --network=<name> exports a network "
            f"that its config makes, by a `_target_`, and that it keeps under the argument's name, as self.net = net"
            f"{did_you_mean(argument, kept)}: {', '.join(kept) or 'it has none'}. lockstep.load_model(<run>) returns the module with its weights."
        )
    return OfModule(argument), module, argument


def export(path: Path, folder: Path, formats: Sequence[str] = (), files: str | None = None, network: str = "") -> Path:
    """Writes the model of the checkpoint `path` to `folder`, which must not exist yet.

    `formats`: onnx, pt2, beside the weights. What was written is compared with the network on `files` (as predict.py's
    `input`), or on test samples of the run's data, before the folder is there. `network`: the dotted name of one network of several.

    Raises:
        UserError: the folder exists, the network cannot be exported, its files need more than torch and timm, a format is not
            possible, or its outputs differ.
    """
    exists = [f"{folder} exists. Pass another folder, or remove it."] if folder.exists() else []
    raise_problems([*exists, *parts.missing(formats)])
    checkpoint = read(path)
    config = config_of(checkpoint)
    about, offered, made = checkpoint.metadata, checkpoint.network or {}, ""
    if is_task(config):
        task: Task = create(config.task, "task")
        net = make_network(config.model, offered, with_weights=False).eval()
        load_into(net.state_dict(), checkpoint.weights, path)
    else:
        task, net, made = network_of_module(config, path, network)
        offered = config.task.get(made)
        config = replace(config, model=Component.of(offered))
    task.bind(about)
    data, batch = samples_to_compare(config, about, files)
    what = Exported(config, offered, task, net, data, batch, network, made)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replacing(folder) as part:
        part.mkdir()
        found = what.write(part, formats)
        (part / "README.md").write_text(card(checkpoint, what, part, found))
    return folder


def samples_to_compare(config: RunConfig, about: Mapping[str, Any], files: str | None) -> tuple[DataSet, Batch]:
    """Samples to compare on, as they are stored, and the data set that prepares them. Raises UserError: they cannot be read."""
    if files is not None:
        inputs = input_files(files, config.data, about, "remove --files: the run's own data is used")
        batch = Reader(inputs, seed=0)(np.arange(min(COMPARED, len(inputs))))
        good = [place for place, problem in enumerate(batch.pop("problem")) if not problem]
        return inputs.reader, samples_at(batch, good, len(batch["index"]))
    try:
        if (loader := Settings.of(config).loader) is None:
            raise UserError("it has its own dataloaders.")
        data: DataSet = create_data(config.data, loader)
        data.evaluates = True
        data.prepare()
        samples = samples_of(data.evaluated.test)
        return data.evaluated, Reader(samples, seed=0)(np.arange(min(COMPARED, len(samples))))
    except Exception as e:  # the user's own data sets may raise anything
        raise UserError(f"the run's data, to compare with, cannot be read: {e} Pass --files <folder>.") from None


# --- The README.md of an exported folder: what the network is, what it learned from, how good it is, how to load it ---


def card(checkpoint: Checkpoint, what: Exported, part: Path, found: dict[str, float]) -> str:
    """`found`: by file, the largest difference of its outputs from the trained network's."""
    config = config_of(checkpoint)
    run = checkpoint.path.resolve().parent.parent
    report = RunFolder(run).report()
    overrides = overrides_of(report) or ()
    if report.get("checkpoint") != os.path.relpath(checkpoint.path.resolve(), run):
        report = {}  # the run tested a different checkpoint
    model = json.loads((part / "model.json").read_text())
    inputs = []
    for _, x in () if what.takes_images else leaves(what.examples()[0]):
        shape = ", ".join(["batch", *map(str, x.shape[1:])])
        inputs.append(f"{x.dtype} of shape ({shape})".removeprefix("torch."))
    values = {
        "run": config.run,
        "model": (config.model or config.task).title,
        "data_name": config.data.title,
        "parameters": sum(p.numel() for p in what.net.parameters()),
        "task_name": config.task.title.replace("_", " "),
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
        "settings": overrides,
        "versions": versions(),
    }
    return MARKDOWN.get_template("card.md.j2").render(values) + "\n"
