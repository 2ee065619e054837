"""What a process of a check writes down: of each step the samples, the loss, the gradients and the weights; of one step every layer too."""

import inspect
import json
import math
import os
import pickle
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn

from lockstep.checkpoints.finding import leaves
from lockstep.config import checked
from lockstep.data.loaders import digest_of
from lockstep.extras.comparison import Record, sketch
from lockstep.machine import system
from lockstep.training.arithmetic import completes_step, micro_batch_index, steps_done

PLAN = "LOCKSTEP_CHECK"  # the environment variable with the plan of this process, as JSON
# Values of attributes that are compared, and lists and dicts of them.
KINDS = (
    bool, int, float, str, bytes, type(None), Tensor, np.ndarray, np.generic, np.random.Generator, random.Random,
)  # fmt: skip


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for _, leaf in leaves(tree) if isinstance(leaf, Tensor)]


def sketches(tree: Any) -> list[Record]:
    return [sketch(tensor) for tensor in tensors(tree)]


def weights(module: nn.Module) -> dict[str, Record]:
    return {name: sketch(tensor, 1) for name, tensor in [*module.named_parameters(), *module.named_buffers()]}


def place(cls: Any, method: str) -> str:
    """The class, and the file and line of its method."""
    cls = getattr(cls, "original", cls)
    code = getattr(inspect.unwrap(getattr(cls, method, cls)), "__code__", None)
    if code is None:
        return str(cls.__name__)
    is_own = not Path(code.co_filename).is_relative_to(sys.prefix)
    return f"{cls.__name__} ({os.path.relpath(code.co_filename) if is_own else cls.__module__}:{code.co_firstlineno})"


def generators() -> tuple[Any, ...]:
    """Every draw changes them."""
    return torch.get_rng_state().numpy().tobytes(), pickle.dumps(np.random.get_state()), random.getstate()


def attributes(owners: dict[str, Any]) -> dict[str, str]:
    """Digests of what objects keep besides parameters and buffers."""
    plain, found = vars(pl.LightningModule()), dict[str, str]()
    for name, owner in owners.items():
        for key, value in getattr(owner, "__dict__", {}).items():
            value = value.get_state() if isinstance(value, torch.Generator) else value
            if key not in plain and all(isinstance(leaf, KINDS) for _, leaf in leaves(value)):
                found[f"{name}.{key}".removeprefix(".")] = digest_of(value)
    return found


def dataset(trainer: pl.Trainer) -> Any:
    """The data set of the first loader."""
    own = next((getattr(loader, "dataset", None) for _, loader in leaves(trainer.train_dataloader)), None)
    return getattr(getattr(trainer.datamodule, "dataset", None), "train", own)  # type: ignore[attr-defined]


class Recorder(pl.Callback):
    """Records the steps of a process up to `last` and ends the run there, or kills it at `kill`."""

    def __init__(self) -> None:
        self.plan = json.loads(os.environ[PLAN])
        self.record: Record = {"steps": {}}
        self.hooks: list[Any] = []  # of the layers, in the traced step

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        names = {id(parameter): name for name, parameter in module.named_parameters()}

        def stepped(optimizer: Any, *_: Any) -> None:
            owned = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            self.step["gradients"] |= {names.get(id(p), "?"): sketch(p.grad, 1) for p in owned}

        for optimizer in trainer.optimizers:
            optimizer.register_step_post_hook(stepped)
        summary: Any = next(each for each in trainer.callbacks if hasattr(each, "data_info"))  # type: ignore[attr-defined]
        config = summary.settings.cfg
        self.traced = not config.compile and (self.plan["traced"] or steps_done(trainer) + 1)  # hooks break graphs
        self.record["facts"] = checked.facts(config, summary.data_info["data/sha256"])
        called = (pair for pair in module.named_modules() if type(pair[1]).forward is not nn.Module.forward)
        places = self.record["places"] = {name: place(type(each), "forward") for name, each in called if name}
        places["step"] = place(type(module), "training_step")
        places["loss"] = place(type(module), "loss") if hasattr(module, "loss") else places["step"]
        places["samples"] = place(type(dataset(trainer)), "__getitem__")
        places["optimizer"] = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers)

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        number, self.micro = steps_done(trainer) + 1, micro_batch_index(trainer, batch_idx)
        if number not in self.record["steps"]:
            self.step: Record = {"begin": weights(module), "samples": {}, "calls": {}, "loss": {}, "gradients": {}}
            self.record["steps"][number] = self.step
            if number == self.plan["noted"]:
                self.record["attributes"] = attributes({**dict(module.named_modules()), "data": dataset(trainer)})
        self.step["samples"][self.micro] = sketches(batch)
        self.calls = self.step["calls"].setdefault(self.micro, [])
        if number == self.traced:
            self.states: list[Any] = []
            for path, layer in module.named_modules():
                if path:
                    self.hooks.append(layer.register_forward_pre_hook(partial(self.enter, path), with_kwargs=True))
                    self.hooks.append(layer.register_forward_hook(partial(self.leave, path)))

    def enter(self, path: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        self.calls.append({"path": path, "what": "input", "tensors": sketches((args, kwargs))})
        self.states.append(generators())

    def leave(self, path: str, _: nn.Module, __: Any, output: Any) -> None:
        draws, calls = self.states.pop() != generators(), self.calls
        calls.append({"path": path, "what": "output", "tensors": sketches(output), "draws": draws})

        def backward(gradient: Tensor) -> None:
            calls.append({"path": path, "what": "gradient", "tensors": [sketch(gradient)]})

        for tensor in tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(backward)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.step["loss"][self.micro] = next((float(each.detach().mean()) for each in tensors(outputs)), math.nan)
        self.record.setdefault("of_steps", sorted(trainer.callback_metrics))
        while self.hooks:
            self.hooks.pop().remove()
        if not completes_step(trainer):
            return
        self.step["end"] = weights(module)
        if steps_done(trainer) == self.plan["kill"]:
            while not (Path(trainer.default_root_dir) / "checkpoints/last.ckpt").exists():  # it is being written
                time.sleep(0.01)
            signal.raise_signal(9)  # SIGKILL, which Windows does not name
        trainer.should_stop |= steps_done(trainer) >= self.plan["last"]

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.record |= {"precision": str(trainer.precision), "device": trainer.strategy.root_device.type}
        self.record["peak_bytes"] = system.resident_peak_bytes() or 1
        self.record["of_rank_0"] = sorted(trainer.strategy.means.of_rank_0)  # type: ignore[attr-defined]
        torch.save(self.record, Path(self.plan["folder"]) / f"{trainer.global_rank}.pt")
