"""A monitored metric that nothing logs ends the run as soon as that is sure. A task is watched for one micro-batch only."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lockstep.callbacks.stopping import CollectivesGuard, MonitorGuard
from lockstep.errors import TrainingFailed
from lockstep.tasks import Classification
from lockstep.training import schedules
from lockstep.training.module import TaskModule


def trainer(*logged: str) -> SimpleNamespace:
    metrics = dict.fromkeys(logged, 1.0)
    return SimpleNamespace(
        callback_metrics=metrics, sanity_checking=False, lightning_module=SimpleNamespace(), datamodule=None
    )


def module_of(task: Classification) -> TaskModule:
    options = {
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "schedule": schedules.constant,
        "parallelize": pytest.fail,
    }
    return TaskModule(nn.Identity(), task, **options, metrics={}, network_arguments={})


def watching(saved: list | None, **checkpoint: str) -> MonitorGuard:
    validated = {f"checkpoint.{name}": value for name, value in checkpoint.items()} | {
        "callbacks.stop.monitor": "val/x"
    }
    return MonitorGuard(
        "Classification", validated, {"callbacks.mine.monitor": "a/b"}, None if saved is None else saved.append
    )


def test_what_is_watched_at_a_validation_is_told_there_after_a_checkpoint():
    saved: list = []
    callback = watching(saved, monitor="val/acc")
    callback.on_validation_end(trainer("val/acc", "val/x"), None)
    assert saved == []
    with pytest.raises(TrainingFailed, match=r"checkpoint.monitor=val/acc is not logged .* \(did you mean val/ac\?\)"):
        callback.on_validation_end(trainer("val/ac", "val/x"), None)
    assert len(saved) == 1
    with pytest.raises(TrainingFailed, match=r"callbacks.stop.monitor=val/x is not logged .* Set .* resume=auto"):
        callback.on_validation_end(trainer("val/acc"), None)


def test_what_a_callback_may_watch_later_is_told_at_the_end():
    callback = watching(None)
    callback.on_validation_end(trainer("val/x"), None)
    callback.on_train_end(trainer("a/b"), None)
    with pytest.raises(TrainingFailed, match=r"callbacks.mine.monitor=a/b is not logged .* Set [^ ]*=<one of them>\.$"):
        callback.on_train_end(trainer("val/x"), None)


def test_a_training_that_ends_before_its_first_validation_passes():
    callback, early = watching(None), trainer("train/loss")
    early.sanity_checking = True
    callback.on_validation_end(early, None)
    callback.on_train_end(early, None)


def test_a_task_is_told_by_its_own_name():
    task, lasting = Classification(), trainer("val/x")
    task.bind({"classes": "ab"})
    lasting.lightning_module = module_of(task)
    with pytest.raises(TrainingFailed, match="is not logged by Classification, which"):
        watching([], monitor="val/acc").on_validation_end(lasting, None)


# --- A task that communicates; tests/test_between_samples.py has what is rejected ---

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
    module, callback = module_of(task), CollectivesGuard()
    before, modules = dict(vars(task)), dict(task.named_modules())
    callback.on_train_start(TRAINER, module)
    assert task.loss is not before.get("loss")
    batch = {"input": torch.zeros(3, 10), "target": torch.zeros(3, dtype=torch.int64)}
    assert task.loss(task.outputs(nn.Identity(), batch), batch).tolist() == pytest.approx([2.302585] * 3)
    for _ in range(2):
        callback.on_train_batch_end(TRAINER, module, None, batch, 0)
        assert vars(task) == before
        assert dict(task.named_modules()) == modules
