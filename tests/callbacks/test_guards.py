"""A figure that nothing logs ends the run at the first moment at which that is sure; the run goes on with another one."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lockstep.callbacks.guards import MonitorGuard
from lockstep.errors import TrainingFailed
from lockstep.tasks import Classification
from lockstep.training import schedules
from lockstep.training.module import TaskModule


def trainer(*logged: str) -> SimpleNamespace:
    metrics = dict.fromkeys(logged, 1.0)
    return SimpleNamespace(callback_metrics=metrics, sanity_checking=False, lightning_module=SimpleNamespace())


def watching(saved: list | None, **checkpoint: str) -> MonitorGuard:
    validated = {f"checkpoint.{name}": value for name, value in checkpoint.items()} | {
        "callbacks.stop.monitor": "val/x"
    }
    return MonitorGuard(validated, {"callbacks.mine.monitor": "a/b"}, None if saved is None else saved.append)


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
    task, lasting, optimizer = Classification(), trainer("val/x"), partial(torch.optim.SGD, lr=0.1)
    task.bind({"classes": "ab"})
    lasting.lightning_module = TaskModule(
        nn.Identity(), task, optimizer=optimizer, schedule=schedules.constant, parallelize=pytest.fail, metrics={}, network_arguments={},
    )  # fmt: skip
    with pytest.raises(TrainingFailed, match="is not logged by Classification, which"):
        watching([], monitor="val/acc").on_validation_end(lasting, None)
