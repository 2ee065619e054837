"""Tries a training step and an evaluation before the run's directory is made, so parts that do not fit together leave no trace.

Networks run on the meta device, which has shapes but no numbers: 0.4 s for resnet50d. What fails there fails as well in the run, or
cannot run on that device; a copy of the network on the run's device decides. Also counts the step's operations.
"""

import copy
import logging
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning_utilities.core.apply_func import apply_to_collection
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torchmetrics import Metric

from lockstep.config.identity import title
from lockstep.config.instantiate import to_plain
from lockstep.config.project import of_users_code
from lockstep.config.rules import total_steps
from lockstep.config.targets import TRUSTED
from lockstep.data.datamodule import DataModule
from lockstep.data.dataset import Batch
from lockstep.errors import UserError
from lockstep.models.network import network
from lockstep.tasks import Task
from lockstep.training import invariance
from lockstep.training.memory import ran_out
from lockstep.training.metrics import named, one_per_sample
from lockstep.training.module import TaskModule
from lockstep.training.schedules import scheduler
from lockstep.training.trees import first_rows, float32

# --- Tries what an evaluation, the report and a prediction do with a network's outputs ---

# Samples of a metric that computes nothing of a few. KernelInceptionDistance needs the most: 1,000 real and 1,000 generated ones.
MOST = 2_000


def evaluate(cfg: DictConfig, module: TaskModule, data: DataModule, outputs: Any, batch: Batch) -> None:
    task, count = copy.deepcopy(module.task), len(batch["index"])
    with torch.no_grad(), refused(misfit(cfg, batch)):
        outputs = float32(first_rows(outputs, count, count))
        loss_B = task.loss(outputs, batch)
    one_per_sample(loss_B, task, batch)
    for name, metric in module.figures.items():
        with torch.no_grad(), refused(f"task.metrics.{name} does not fit task={title(cfg.task)} and the data: {{}}."):
            try_metric(name, metric, task.metric_inputs(outputs, batch), count, data.val_split.count)
    with refused(f"task={title(cfg.task)}: {{}}."):
        predicted = task.predictions(outputs)
        made = {"describe": task.describe(outputs, batch), **(task.targets(batch) if "target" in batch else {})}
        made |= {} if type(task).predictions is Task.predictions else predicted  # columns of the user's own
        for what, found in made.items():
            if len(found) != count:
                raise UserError(f"`{what}` has {len(found)} entries for {count} samples; it needs one per sample")


def try_metric(name: str, metric: Metric, inputs: tuple[Any, ...], count: int, available: int) -> None:
    """Updates and computes. A metric that needs more samples gets twice as many until it computes, at most those of a validation."""
    one, updates, most = copy.deepcopy(metric), 0, min(available, MOST) // count
    while True:
        for _ in range(max(1, min(updates, most - updates))):
            one.update(*inputs)
            updates += 1
        try:
            named(name, one.compute(), ())
            return
        except UserError:
            raise
        except Exception:
            if updates >= most:
                raise


def is_refusal(error: Exception) -> bool:
    """Whether Lockstep itself found something wrong, so that a step on another device would not help."""
    return isinstance(error, UserError) and error.__cause__ is None


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


# --- Tries a training step and an evaluation before the run's directory is made, so parts that do not fit together leave no trace ---
#
# Networks run on the meta device, which has shapes but no numbers: 0.4 s for resnet50d. What fails there fails as well in the run, or
# cannot run on that device; a copy of the network on the run's device decides. Also counts the step's operations.

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
        UserError: network, data, task, optimizer, schedule or metrics do not fit together.
        Exception: of the user's own classes in an evaluation. Those in a training step are left to training, whose first shows them.
    """
    if not isinstance(module, TaskModule) or not isinstance(data, DataModule):
        return
    count = min(SAMPLES, samples)
    with warnings.catch_warnings(), same_random_numbers(device):
        warnings.simplefilter("ignore")  # training shows them
        try:
            on_meta(cfg, module, data, count)
        except Exception as e:
            if is_refusal(e):
                raise
            logging.getLogger("lockstep").info("no step on the meta device: %s", e)
            size = sum(p.numel() for p in module.net.parameters())
            if all_shipped(cfg) and size <= LARGEST:
                on_device(cfg, module, data, count, device)
        for callback in callbacks:
            if hasattr(callback, "rehearsed"):
                try_callback(cfg, module, data, callback)
        if any(cfg.trainer[f"limit_{part}_batches"] != 0 for part in ("val", "test")):
            try_evaluation(cfg, module, data, device, count)
        if not module.arithmetic.same_bits:
            module.across_processes = across_processes(cfg, module, data, device)


def across_processes(cfg: DictConfig, module: TaskModule, data: DataModule, device: torch.device) -> str:
    """Whether the network and the loss compute the same on any number of processes, and why not."""
    if module.draws is False and all_shipped(cfg):
        return invariance.ROUNDING
    if cfg.compile and module.draws is not False:
        return invariance.DIFFERS.format(
            "a compiled network draws random numbers of each process's own. Remove compile=true"
        )
    if sum(p.numel() for p in module.net.parameters()) > LARGEST:
        return invariance.UNKNOWN.format(f"it has more than {LARGEST:,} parameters, and no copy of it was tried")
    try:
        net, task = copy.deepcopy(module.net).to(device), copy.deepcopy(module.task).to(device)
        why = invariance.why_not(net, task, data.example(invariance.COUNT, device, training=False))
    except Exception as e:
        return invariance.UNKNOWN.format(f"its forward could not be tried: {' '.join(str(e).split())}")
    return invariance.DIFFERS.format(why) if why else invariance.ROUNDING


@contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Leaves the generators of Python, NumPy and torch as they were, so training draws what it would have drawn."""
    python, numbers = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    random.setstate(python)
    np.random.set_state(numbers)


def all_shipped(cfg: DictConfig) -> bool:
    """Whether the classes are those of Lockstep and the libraries, so that no error can be a bug of the user's."""
    groups = ("model", "data", "task", "optim", "schedule")
    return all(str(cfg[group].get("_target_")).startswith(TRUSTED) for group in groups)


def without_numbers(cfg: DictConfig, module: TaskModule) -> tuple[nn.Module, Task]:
    with torch.device("meta"):
        net = network(to_plain(cfg.model), module.network_arguments, with_weights=False)
    return net, copy.deepcopy(module.task).to("meta")


def on_meta(cfg: DictConfig, module: TaskModule, data: DataModule, count: int) -> None:
    batch = move_data_to_device(data.example(count), torch.device("meta"))
    net, task = without_numbers(cfg, module)
    step(cfg, module, data, net.train(), task, batch)


def on_device(cfg: DictConfig, module: TaskModule, data: DataModule, count: int, device: torch.device) -> None:
    """A step of a copy, unless it cannot be copied or memory runs out."""
    try:
        net, task = copy.deepcopy(module.net).train().to(device), copy.deepcopy(module.task).to(device)
        batch = data.example(count, device)
    except Exception:
        return
    try:
        step(cfg, module, data, net, task, batch)
    except UserError as e:
        if not e.__cause__ or not ran_out(e.__cause__):
            raise


def step(cfg: DictConfig, module: TaskModule, data: DataModule, net: nn.Module, task: Task, batch: Batch) -> None:
    """A training step."""
    device = batch["index"].device
    before = invariance.generators(device)
    with FlopCounterMode(display=False) as counter, invariance.Draws() as draws:
        with refused(misfit(cfg, batch)):
            loss_B = task.loss(task.outputs(net, batch), batch)
        loss = one_per_sample(loss_B, task, batch).sum()
        with refused(misfit(cfg, batch)):
            loss.backward()
    module.draws = draws.any or invariance.generators(device) != before
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


def try_callback(cfg: DictConfig, module: TaskModule, data: DataModule, callback: Any) -> None:
    """The outputs for a batch that the callback has changed, without numbers."""
    name, needs = type(callback).__name__, getattr(callback, "needs", "")
    words = f"{name} does not fit model={title(cfg.model)} and data={title(cfg.data)}: {{}}."
    with refused(words):
        batch = move_data_to_device(data.example(SAMPLES), torch.device("meta"))
        batch = callback.rehearsed(batch, total_steps(cfg, data.train_split.count))
    with refused(f"{words}{needs}"):
        net, task = without_numbers(cfg, module)
        task.outputs(net.train(), batch)


def try_evaluation(cfg: DictConfig, module: TaskModule, data: DataModule, device: torch.device, count: int) -> None:
    """All that evaluation, report and prediction do with outputs: of 1, in the shapes that the meta device gives, or else real ones."""
    example = partial(data.example, count, training=False)
    try:
        net, task = without_numbers(cfg, module)
        batch = move_data_to_device(example(), torch.device("meta"))
        with torch.no_grad():
            shapes = task.outputs(net.eval(), batch)
        blank = apply_to_collection(shapes, Tensor, lambda tensor: torch.ones(tensor.shape, dtype=tensor.dtype))
        evaluate(cfg, module, data, blank, example())
    except Exception as e:
        if is_refusal(e):
            raise
        logging.getLogger("lockstep").info("no evaluation on the meta device: %s", e)
        try:
            with torch.no_grad():
                outputs = real_outputs(cfg, module, device, example)
            if outputs is not None:
                evaluate(cfg, module, data, move_data_to_device(outputs, torch.device("cpu")), example())
            elif isinstance(e, UserError) and not of_users_code(e.__cause__ or e):
                raise e
        except UserError as failed:
            if failed.__cause__ and of_users_code(failed.__cause__):
                raise failed.__cause__ from None
            raise


def real_outputs(cfg: DictConfig, module: TaskModule, device: torch.device, example: Callable[..., Batch]) -> Any:
    """A copy's outputs; None if the network is too large, cannot be copied, or waits for other processes."""
    if sum(p.numel() for p in module.net.parameters()) > LARGEST:
        return None
    try:
        net, task = copy.deepcopy(module.net).eval().to(device), copy.deepcopy(module.task).to(device)
        batch = example(device)
    except Exception:
        return None
    try:
        with refused(misfit(cfg, batch)):
            return task.outputs(net, batch)
    except UserError as e:
        if e.__cause__ and (ran_out(e.__cause__) or "process group" in str(e)):
            return None
        raise
