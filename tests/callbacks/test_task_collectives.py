"""The task is watched for one micro-batch, then it is what it was. tests/test_between_samples.py has the refusals."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lockstep.callbacks.guards import CollectivesGuard
from lockstep.tasks import Classification
from lockstep.training import schedules
from lockstep.training.module import TaskModule

TRAINER = SimpleNamespace(world_size=2, accumulate_grad_batches=2)


class WithLossModule(Classification):
    """Lightning's idiom; the method of the class is what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss()


def with_attributes() -> Classification:
    """A loss that is chosen when the task is made."""
    task = Classification()
    task.loss, task.outputs = partial(Classification.loss, task), partial(Classification.outputs, task)
    return task


@pytest.mark.parametrize("make", [Classification, with_attributes, WithLossModule])
def test_a_watched_task_is_afterwards_what_it_was(make):
    task = make()
    task.bind({"classes": "0123456789"})
    module = TaskModule(
        nn.Identity(), task, optimizer=torch.optim.SGD, schedule=schedules.constant, parallelize=pytest.fail, metrics={}, network_arguments={},
    )  # fmt: skip
    before, modules = dict(vars(task)), dict(task.named_modules())
    callback = CollectivesGuard(None)
    callback.on_train_start(TRAINER, module)
    assert task.loss is not before.get("loss")
    batch = {"input": torch.zeros(3, 10), "target": torch.zeros(3, dtype=torch.int64)}
    assert task.loss(task.outputs(nn.Identity(), batch), batch).tolist() == pytest.approx([2.302585] * 3)
    for _ in range(2):
        callback.on_train_batch_end(TRAINER, module, None, batch, 0)
        assert vars(task) == before
        assert dict(task.named_modules()) == modules


def test_a_lightning_module_may_have_a_task_of_its_own():
    module = SimpleNamespace(task="multiclass")  # as torchmetrics calls it
    callback = CollectivesGuard(None)
    callback.on_train_start(TRAINER, module)
    callback.on_train_batch_end(TRAINER, module, None, None, 0)
    assert module.task == "multiclass"
