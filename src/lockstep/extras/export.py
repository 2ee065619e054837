"""Exports a trained network as a folder that needs only the few packages in its requirements.txt, and not Lockstep."""

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
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from lockstep.build import load_module
from lockstep.checkpoints.finding import Checkpoint, leaves, map_leaves
from lockstep.checkpoints.saving import Position
from lockstep.checkpoints.weights import read
from lockstep.config.draft import as_yaml
from lockstep.config.formatting import warn
from lockstep.config.instantiate import WEIGHTS, create_data
from lockstep.config.run_config import RunConfig
from lockstep.config.settings import Settings
from lockstep.config.targets import matching_kwargs, nodes, parameters, target_of
from lockstep.data.dataset import Batch, DataSet, join_names
from lockstep.data.parts import batch_of
from lockstep.errors import UserError, did_you_mean, raise_problems
from lockstep.extras import export_parts as parts
from lockstep.extras import exported
from lockstep.extras.render import MARKDOWN
from lockstep.extras.tables import input_files
from lockstep.kit import pixels
from lockstep.kit.images import FRAMING, NEEDED, Images
from lockstep.kit.task import Task
from lockstep.launch.resuming import config_of
from lockstep.machine.files import atomic_replace, remove, to_json, write_text
from lockstep.machine.process import seeded_and_restored
from lockstep.run import RunFolder, metrics_of_test, overrides_of, versions
from lockstep.training.losses import samples_at

# B batch · C channel · H W pixel


TIMM = "lockstep.kit.timm.from_timm"
COMPARED, COMPARED_IN_TRIAL = 100, 6  # samples on which files and network are compared


@dataclass
class Call:
    """A call of a network on a batch."""

    inputs: parts.Inputs
    names: list[Any]  # for each input, its name in the batch, or else its position
    named: list[str]  # keyword names of the last inputs
    output: Any = None
    is_result: bool = False  # whether the task returns this output


@dataclass(frozen=True)
class NetworkToExport:
    """The network to export, with its task, its data, and samples to compare on. Raises UserError: it cannot be exported."""

    config: RunConfig
    offered: Mapping[str, Any]  # arguments of the network
    task: Task
    whole: nn.Module  # the module that the task calls
    data: DataSet  # of the run, or one that reads files
    batch: Batch
    network: str = ""  # the submodule to export; empty: all of `whole`
    made: str = ""  # the submodule that the config's `model` creates; empty: `whole`

    def __post_init__(self) -> None:
        if self.network and self.network not in (names := self.called()):
            raise UserError(
                f"--network={self.network} is not called when {type(self.whole).__name__} runs on a batch{did_you_mean(self.network, names)}. Pass the name of a network that is called: {join_names(names)}."
            )

    @property
    def net(self) -> nn.Module:
        return self.whole.get_submodule(self.network)

    @torch.no_grad()
    def called(self) -> list[str]:
        """The names of the submodules that are called for a batch, the outer ones first."""
        called = set[nn.Module]()
        with register_module_forward_pre_hook(lambda module, _: called.add(module)):
            self.task.outputs(self.whole, self.data.preprocess(self.batch))
        modules = self.whole.named_modules(remove_duplicate=False)
        return sorted((name for name, module in modules if name and module in called), key=lambda name: name.count("."))

    @cached_property
    def takes_images(self) -> bool:
        sample = self.batch["input"]  # a list for texts
        images = isinstance(sample, Tensor) and sample.dtype == torch.uint8 and sample.dim() == 4
        images = images and all(map(self.task.metadata.get, NEEDED))
        return images and (not self.network or self.first_call.names == ["input"])

    @cached_property
    def first_call(self) -> Call:
        return self.call(self.data.preprocess(self.batch))

    @cached_property
    def activation(self) -> str:
        """What turns the network's outputs into predictions; `none` if the task computes predictions from other values."""
        names = {"predictions", "activation"}
        owner = next(base for base in type(self.task).__mro__ if vars(base).keys() & names)
        is_known = not self.network and vars(owner).keys() >= names and self.first_call.is_result
        return str((is_known and self.task.activation) or "none")

    @torch.no_grad()
    def call(self, batch: Batch) -> Call:
        """How the task calls the network on a prepared batch; for a submodule, its first call."""
        name_of = {id(value): name for name, value in batch.items()}
        calls: list[Call] = []

        def pre_hook(_: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            values = [*inputs, *kwargs.values()]
            names = map_leaves(values, lambda path, value: name_of.get(id(value), "_".join(map(str, path))))
            calls.append(Call(tuple(parts.cloned(values)), names, list(kwargs)))

        def hook(_: nn.Module, __: Any, output: Any) -> None:
            calls[-1].output = parts.cloned(output) if self.network else output

        with self.net.register_forward_pre_hook(pre_hook, with_kwargs=True), self.net.register_forward_hook(hook):
            result = self.task.outputs(self.whole, batch)
        others = [x for call in calls[:1] for _, x in leaves([call.inputs, call.output]) if not isinstance(x, Tensor)]
        if others or not calls or (len(calls) > 1 and not self.network):
            reason = f"uses {type(others[0]).__name__} besides tensors" if others else f"calls it {len(calls)} times"
            caller, hint = (self.whole, "") if self.network else (self.task, " once per batch in the task's `outputs`,")
            raise UserError(
                f"the network {self.network or 'of the task'} cannot be exported: {type(caller).__name__} {reason}. Call it{hint} with tensors (in dicts, lists and tuples), and return tensors from it."
            )
        calls[0].is_result = result is calls[0].output
        return calls[0]

    def original(self, batch: Batch) -> tuple[parts.Inputs, Any]:
        """The arguments of an exported file for raw samples, and the outputs that it must return."""
        call = self.call(self.data.preprocess(batch))
        inputs = (batch["input"],) if self.takes_images else call.inputs
        return inputs, exported.ACTIVATIONS[self.activation](call.output)

    def examples(self) -> list[parts.Inputs]:
        """Arguments of a file for two batches, which differ in every size that may vary."""
        if self.takes_images:
            channels, side = self.task.metadata["channels"], self.task.metadata["image_size"]
            return [(torch.zeros(n, channels, side + n + 1, side + 2 * n, dtype=torch.uint8),) for n in (2, 3)]
        count = len(self.batch["index"])
        return [self.original(samples_at(self.batch, [index % count for index in range(n)], count))[0] for n in (2, 3)]

    def write_reader(self, folder: Path) -> str | None:
        """Copies the source files of the data set's class; returns its name, or None if it does not read files for the network."""
        kind, names = type(self.data), {name for _, name in leaves(self.first_call.names)}
        reads = kind.read is not DataSet.read and not isinstance(self.data, Images)
        if self.takes_images or not reads or not names <= self.data.preprocess(self.batch).keys():
            return None
        try:
            # fails if `preprocess` needs an attribute that only `__init__` sets
            kind.for_files(self.task.metadata).preprocess(dict(self.batch))
            parts.copy(parts.required_modules(kind.__module__, parts.OFFERED), folder / "source")
        except (UserError, AttributeError) as e:
            warn(f"the exported load.py cannot read files: {e}")
            return None
        parts.write_standin(folder / "standin")
        return f"{kind.__module__}.{kind.__qualname__}"

    def write_network(self, folder: Path) -> dict[str, Any]:
        """Copies the source files of the network, unless it comes from an allowed library; returns how to create it."""
        target, model = self.config.model.target, self.config.model.kwargs
        if target == TIMM:
            excluded = ("name", *WEIGHTS, "in_channels", "num_classes", "image_size")
            arguments = {key: value for key, value in model.items() if key not in excluded}
            arguments |= {"in_chans": self.offered["in_channels"], "num_classes": self.offered["num_classes"]}
            if vars(self.whole.get_submodule(self.made))["pretrained_cfg"].get("fixed_input_size"):
                arguments.setdefault("img_size", self.offered["image_size"])
            return {"target": "timm.create_model", "arguments": {"model_name": model["name"], **arguments}}
        if any(path != "model" for path, _ in nodes(model, "model")):
            raise UserError(
                "keys of the run's `model` contain objects; only plain values can be exported. Create the objects in the class."
            )
        arguments = {**matching_kwargs(target, self.offered), **model}
        if "name" not in (parameters(target) or {}):
            arguments.pop("name", None)
        arguments |= {key: False if isinstance(model[key], bool) else None for key in WEIGHTS if key in model}
        factory: Any = target_of(target, "model")
        module = factory.__module__
        if module.partition(".")[0] not in parts.ALLOWED:
            modules = parts.required_modules(module)
            if len(modules) == 1:
                shutil.copyfile(modules[module], folder / "network.py")
                module = "network"
            else:
                parts.copy(modules, folder / "source")
            target = f"{module}.{factory.__qualname__}"
        return {"target": target, "arguments": arguments}

    def write(self, folder: Path, formats: Sequence[str]) -> dict[str, float]:
        """Writes all files except the model card; returns, by file, the largest difference of its outputs from the network's."""
        from safetensors.torch import save

        task = self.task
        content = self.write_network(folder) | {
            "inputs": None if self.takes_images else self.first_call.names,
            "named": self.first_call.named,
            "reader": self.write_reader(folder),
            "network": self.network.removeprefix(self.made).removeprefix("."),
            "activation": self.activation,
            "threshold": getattr(task, "threshold", None),
        }
        settings = {n: v for n, v in task.metadata.items() if not self.takes_images or n in (*NEEDED, *FRAMING)}
        classes = [] if self.network else list(task.value_names)
        for name, values in {"model": content, "classes": classes, "preprocessing": settings}.items():
            write_text(folder / f"{name}.json", to_json(values) + "\n")
        # as bytes, because save_file ignores the umask; cloned, because some are tied
        weights = {name: tensor.contiguous().clone() for name, tensor in self.net.state_dict().items()}
        (folder / "model.safetensors").write_bytes(save(weights))
        write_text(folder / "config.yaml", as_yaml(self.config))
        shutil.copyfile(pixels.__file__, folder / "preprocess.py")
        shutil.copyfile(exported.__file__, folder / "load.py")
        write_text(folder / "requirements.txt", parts.requirements(folder, content["target"], formats))
        model = exported.load(folder)
        runners: dict[str, Any] = {"load.py": model.outputs}
        if formats:
            runners |= parts.write_graphs(model, formats, folder, self.examples())
        differences = parts.compare_outputs(runners, self.original, self.batch)
        for cache in list(folder.rglob("__pycache__")):  # of the code that the comparison loaded
            remove(cache)
        return differences


class Exportable(pl.Callback):
    """Exports the network on trial, and rejects a run before its first step if scripts/export.py could not export it in `formats`."""

    def __init__(self, *, formats: Sequence[str] = ("pt2",)) -> None:
        self.formats = formats
        raise_problems(parts.missing(formats))

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        position = next(callback for callback in trainer.callbacks if isinstance(callback, Position))  # type: ignore[attr-defined]
        if not isinstance(pl_module, Task):
            argument_of(position.config, pl_module, "")  # raises: no network is named
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        batch = data.raw("train", np.arange(COMPARED_IN_TRIAL) % len(data.dataset.train))
        with seeded_and_restored(0), TemporaryDirectory() as folder:
            net = copied(pl_module.net).cpu().eval()
            task = copied(pl_module, {id(pl_module.net): net, id(pl_module.evaluated): {}}).cpu().eval()
            candidate = NetworkToExport(position.config, position.made_for["network"], task, net, data.evaluated, batch)
            candidate.write(Path(folder), self.formats)


class LightningModuleTask(Task):
    """Stands in for a LightningModule: the samples go to its `forward`, or without one, to the network `argument`."""

    def __init__(self, argument: str, module: nn.Module, metadata: Mapping[str, Any]) -> None:
        super().__init__(net=module, optimizer=None, scheduler=None, metadata=metadata)  # type: ignore[arg-type]
        self.argument = argument

    def outputs(self, net: Any, batch: Mapping[str, Any]) -> Any:
        has_forward = type(net).forward is not pl.LightningModule.forward
        try:
            return (net if has_forward else net.get_submodule(self.argument))(batch["input"])
        except Exception as e:  # it may expect any arguments
            raise UserError(
                f"--network={self.argument}: {type(net).__name__}{'.forward' if has_forward else ''} does not run on the input of this data ({e!s:.300}), so the network's input is unknown. Define a `forward(input)` that calls it."
            ) from e


def argument_of(config: RunConfig, module: nn.Module, network: str) -> str:
    """The argument of a LightningModule that creates the network: the exported folder creates it again, without Lightning.

    Raises UserError: no argument creates it.
    """
    argument = network.partition(".")[0]
    networks = [
        name
        for name, node in config.task.kwargs.items()
        if isinstance(node, Mapping)
        and "_target_" in node
        and not node.get("_partial_")
        and isinstance(getattr(module, name, None), nn.Module)
    ]
    if argument not in networks:
        raise UserError(
            f"{config.task.target} is a LightningModule, which cannot be exported as a whole: remove callbacks.exportable. scripts/export.py <run> --network=<name> exports a network that its config creates with a `_target_` and that it stores under the argument's name, as in self.net = net{did_you_mean(argument, networks)}: {', '.join(networks) or 'it has none'}. lockstep.load_model(<run>) returns the module with its weights."
        )
    return argument


def export(path: Path, folder: Path, formats: Sequence[str] = (), files: str | None = None, network: str = "") -> Path:
    """Writes the model of the checkpoint `path` to `folder`, which must not exist yet.

    `formats`: onnx, pt2, in addition to the weights. `network`: the dotted name of one network of several. Before the folder is
    kept, its files are compared with the network on `files` (as predict.py's `input`), or on test samples of the run's data.

    Raises:
        UserError: the folder exists, the network cannot be exported, its files need more than torch and timm, a format is not
            available, or its outputs differ.
    """
    if folder.exists():
        raise UserError(f"{folder} exists. Pass a different folder, or remove it.")
    raise_problems(parts.missing(formats))
    checkpoint = read(path)
    config, module = config_of(checkpoint), load_module(checkpoint)
    if isinstance(module, Task):
        task, net, offered, argument = module, module.net, checkpoint.network or {}, ""
    else:
        argument = argument_of(config, module, network)
        task, net = LightningModuleTask(argument, module, checkpoint.metadata), module
        offered = config.task.get(argument)
        config = config.replace({"model": offered})
    data, batch = samples_to_compare(config, checkpoint.metadata, files)
    candidate = NetworkToExport(config, offered, task, net, data, batch, network, argument)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_replace(folder) as new_folder:
        new_folder.mkdir()
        differences = candidate.write(new_folder, formats)
        write_text(new_folder / "README.md", card(checkpoint, candidate, new_folder, differences) + "\n")
    return folder


def samples_to_compare(config: RunConfig, metadata: Mapping[str, Any], files: str | None) -> tuple[DataSet, Batch]:
    """Raw samples to compare on, and the data set that prepares them. Raises UserError: they cannot be read."""
    if (loader := Settings.of(config).loader) is None:
        raise UserError(
            f"data={config.data.title} has its own dataloaders; export needs a DataSet. lockstep.load_model(<run>) returns the network with its weights."
        )
    if files is not None:
        inputs = input_files(files, config.data, metadata, "remove --files to compare on the run's own data", "--files")
        batch = batch_of(inputs, np.arange(min(COMPARED, len(inputs))))
        readable = [index for index, problem in enumerate(batch.pop("problem")) if not problem]
        return inputs.reader, samples_at(batch, readable, len(batch["index"]))
    try:
        data: DataSet = create_data(config.data, loader)
        data.evaluates = True
        data.prepare()
        with seeded_and_restored(0):
            return data.evaluated, batch_of(data.evaluated.test, np.arange(min(COMPARED, len(data.test))))
    except Exception as e:  # custom data sets may raise anything
        raise UserError(f"the run's data for the comparison cannot be read: {e} Pass --files <folder>.") from None


# --- README.md of an exported folder, the model card: the network, its data, its metrics, how to load it ---


def card(checkpoint: Checkpoint, candidate: NetworkToExport, part: Path, differences: dict[str, float]) -> str:
    """The model card. `differences`: by file, the largest difference of its outputs from the trained network's."""
    run = checkpoint.path.resolve().parent.parent
    report = RunFolder(run).report()
    # empty if the run tested a different checkpoint
    tested = report if report.get("checkpoint") == os.path.relpath(checkpoint.path.resolve(), run) else {}
    inputs = () if candidate.takes_images else leaves(candidate.examples()[0])
    return MARKDOWN.get_template("card.md.j2").render(
        config=config_of(checkpoint),
        parameters=sum(p.numel() for p in candidate.net.parameters()),
        what=candidate,
        checkpoint=checkpoint,
        inputs=[
            f"{x.dtype} of shape {('batch', *x.shape[1:])}".replace("torch.", "").replace("'", "") for _, x in inputs
        ],
        reader=json.loads((part / "model.json").read_bytes())["reader"],
        metrics={name: tested[name] for name in metrics_of_test(tested) if name != "test/count"},
        count=tested.get("test/count", 0),
        differences=differences,
        packages=(part / "requirements.txt").read_text(encoding="utf-8").split(),
        files=[path.name for path in part.iterdir()],
        settings=overrides_of(report) or (),
        versions=versions(),
    )
