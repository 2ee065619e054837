"""Tries a training step before the run's directory is made, so parts that do not fit together are refused without a trace.

It runs on the meta device, which has shapes but no numbers: 0.4 s for resnet50d. What fails there fails as well in training, or
cannot run on that device; a step of a copy of the network on the run's device decides. Also counts the step's operations.
"""

import copy
import logging
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lockstep.config.admitted import TRUSTED
from lockstep.config.identity import title
from lockstep.config.instantiate import to_plain
from lockstep.config.length import total_steps
from lockstep.config.project import of_users_code
from lockstep.data.datamodule import DataModule
from lockstep.data.dataset import Batch
from lockstep.errors import UserError
from lockstep.models.network import network
from lockstep.tasks import Task
from lockstep.training.memory import ran_out
from lockstep.training.module import TaskModule
from lockstep.training.schedules import scheduler
from lockstep.training.trees import first_samples, float32

SAMPLES = 2
FEW = 8  # parameters whose update is tried
LARGEST = 200_000_000  # parameters of a network that is copied for a step on the run's device


def rehearse(
    cfg: DictConfig,
    module: object,
    data: object,
    *,
    device: torch.device,
    samples: int,
    callbacks: Sequence[object] = (),
) -> None:
    """Sets `module.flops_per_sample`. A callback that changes training batches has `rehearsed(batch, steps)`.

    Raises:
        UserError: network, data, task, optimizer, schedule or metrics do not fit together. Errors of the user's own classes are
            left to training, which shows them with their traceback.
    """
    if not isinstance(module, TaskModule) or not isinstance(data, DataModule):
        return
    count = min(SAMPLES, samples)
    with warnings.catch_warnings(), same_random_numbers(device):
        warnings.simplefilter("ignore")  # training shows them
        try:
            outputs = on_meta(cfg, module, data, count)
        except Exception as e:
            if is_refusal(e):
                raise
            logging.getLogger("lockstep").info("no step on the meta device: %s", e)
            size = sum(p.numel() for p in module.net.parameters())
            outputs = on_device(cfg, module, data, count, device) if all_shipped(cfg) and size <= LARGEST else None
        for callback in callbacks:
            if hasattr(callback, "rehearsed"):
                try_callback(cfg, module, data, callback)
        if outputs is not None:
            try_metrics(cfg, module, data, outputs, count)


@contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Leaves the generators of Python, NumPy and torch as they were, so training draws what it would have drawn."""
    python, numbers = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    random.setstate(python)
    np.random.set_state(numbers)


def is_refusal(error: Exception) -> bool:
    """Whether Lockstep itself found something wrong, so that a step on another device would not help."""
    return isinstance(error, UserError) and error.__cause__ is None


def all_shipped(cfg: DictConfig) -> bool:
    """Whether the classes are those of Lockstep and the libraries, so that no error can be a bug of the user's."""
    groups = ("model", "data", "task", "optim", "schedule")
    return all(str(cfg[group].get("_target_")).startswith(TRUSTED) for group in groups)


def on_meta(cfg: DictConfig, module: TaskModule, data: DataModule, count: int) -> Any:
    """The network's outputs, without numbers."""
    batch = moved(data.example(count), torch.device("meta"))
    with torch.device("meta"):
        net = network(to_plain(cfg.model), module.network_arguments, with_weights=False).train()
    return step(cfg, module, data, net, copy.deepcopy(module.task).to("meta"), batch)


def on_device(cfg: DictConfig, module: TaskModule, data: DataModule, count: int, device: torch.device) -> Any:
    """The network's outputs in a step of a copy; None if it cannot be copied or memory runs out."""
    try:
        net, task = copy.deepcopy(module.net).train().to(device), copy.deepcopy(module.task).to(device)
        batch = moved(data.example(count), device)
    except Exception:
        return None
    try:
        return step(cfg, module, data, net, task, batch)
    except UserError as e:
        if e.__cause__ and ran_out(e.__cause__):
            return None
        raise


def step(cfg: DictConfig, module: TaskModule, data: DataModule, net: nn.Module, task: Task, batch: Batch) -> Any:
    """The network's outputs in a training step."""
    with refused(misfit(cfg, batch)), FlopCounterMode(display=False) as counter:
        outputs = task.outputs(net, batch)
        loss = task.loss(outputs, batch).sum()
        loss.backward()
    module.flops_per_sample = int(counter.get_total_flops()) // len(batch["index"])
    with refused("optim: {}."):
        optimizer = module.new_optimizer(net)
    with refused("schedule: {}."):
        scheduler(module.make_schedule, optimizer, total_steps(cfg, data.train_split.count))
    for parameter in list(net.parameters())[FEW:]:
        parameter.grad = None
    closure: Any = loss.detach  # Lightning gives one too
    with refused("optim: {}."):
        optimizer.step(closure)
    return outputs


def try_callback(cfg: DictConfig, module: TaskModule, data: DataModule, callback: Any) -> None:
    """The outputs for a batch that the callback has changed, without numbers."""
    name, needs = type(callback).__name__, getattr(callback, "needs", "")
    words = f"{name} does not fit model={title(cfg.model)} and data={title(cfg.data)}: {{}}."
    with refused(words):
        batch = moved(data.example(SAMPLES), torch.device("meta"))
        batch = callback.rehearsed(batch, total_steps(cfg, data.train_split.count))
    with refused(f"{words}{needs}"):
        with torch.device("meta"):
            net = network(to_plain(cfg.model), module.network_arguments, with_weights=False).train()
        copy.deepcopy(module.task).to("meta").outputs(net, batch)


def try_metrics(cfg: DictConfig, module: TaskModule, data: DataModule, outputs: Any, count: int) -> None:
    """Updates each metric of the config with outputs of 1, which all of them take, and the targets of real samples."""
    blank = apply_to_collection(outputs, Tensor, lambda tensor: torch.ones(tensor.shape, dtype=tensor.dtype))
    batch = first_samples(data.example(count, training=False), count)
    for name in map(str, cfg.task.get("metrics") or ()):
        metric = copy.deepcopy(module.figures[name])
        try:
            with refused(f"task.metrics.{name} does not fit task={title(cfg.task)} and the data: {{}}."):
                metric.update(*module.task.metric_inputs(float32(blank), batch))
        except UserError as e:
            if not of_users_code(e.__cause__ or e):
                raise


def misfit(cfg: DictConfig, batch: Batch) -> str:
    shapes = [f"{name} {list(v.shape)}" for name, v in batch.items() if isinstance(v, Tensor) and name != "index"]
    keys, size = ["model", "data", "task"], ""
    if "image_size" in cfg.data:
        keys, size = [*keys, "data.image_size"], f" at data.image_size={cfg.data.image_size}"
    return (
        f"model={title(cfg.model)}, data={title(cfg.data)}{size} and task={title(cfg.task)} do not fit together: {{}}. "
        f"A batch holds {', '.join(shapes)}. Change one of them: {', '.join(keys)}."
    )


@contextmanager
def refused(words: str) -> Iterator[None]:
    """An error becomes a UserError with `words`, whose {} is the error."""
    try:
        yield
    except Exception as e:
        reason = " ".join(str(e).split()) or type(e).__name__
        raise UserError(words.replace("{}", reason.removesuffix("."))) from (None if is_refusal(e) else e)


def moved(batch: Batch, device: torch.device) -> Batch:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
