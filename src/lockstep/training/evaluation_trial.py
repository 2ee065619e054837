"""Tries what an evaluation, the report and a prediction do with a network's outputs."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor
from torchmetrics import Metric

from lockstep.config.identity import title
from lockstep.data.datamodule import DataModule
from lockstep.data.dataset import Batch
from lockstep.errors import UserError
from lockstep.tasks import Task
from lockstep.training.metrics import named
from lockstep.training.mixed import one_per_sample
from lockstep.training.module import TaskModule
from lockstep.training.trees import first_rows, float32

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
