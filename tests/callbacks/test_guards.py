"""Early stopping on a metric that nothing logs; a task is watched for one micro-batch only."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import callbacks
from torch import distributed, nn

from lockstep.callbacks.stopping import CollectiveCounter, CollectivesGuard, EarlyStopping
from lockstep.errors import TrainingFailed
from lockstep.tasks import Classification
from lockstep.training import schedules
from lockstep.training.module import TaskModule


def module_of(task: Classification) -> TaskModule:
    options = {
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "schedule": schedules.constant,
        "parallelize": pytest.fail,
    }
    return TaskModule(nn.Identity(), task, **options, metrics={}, network_arguments={})


def test_early_stopping_on_a_metric_that_nothing_logs_ends_without_a_traceback():
    trainer = SimpleNamespace(
        callback_metrics={"val/ac": 1.0}, fast_dev_run=False, sanity_checking=False, state=SimpleNamespace(fn="fit")
    )
    callback = EarlyStopping(monitor="val/acc", check_on_train_epoch_end=False)
    with pytest.raises(TrainingFailed, match=r"callbacks\.early_stopping\.monitor=val/acc: .*`val/ac`"):
        callback.on_validation_end(trainer, None)


# --- A task that communicates; tests/test_losses.py has what is rejected ---


@pytest.fixture
def one_process(tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_collectives_are_counted_and_nothing_else(one_process):
    counter, ones = CollectiveCounter(), torch.ones(2, requires_grad=True)
    with counter:
        (ones * 2).sum().backward()
    assert counter.count == 0
    with counter:
        distributed.all_reduce(torch.ones(2))
        distributed.all_gather([torch.empty(2)], torch.ones(2))
        distributed.all_gather_object([None], "text")
    assert counter.count >= 3


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


def test_early_stopping_leaves_the_error_of_a_lost_process_as_it_is(monkeypatch):
    def lost(*_: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(callbacks.EarlyStopping, "on_validation_end", lost)
    trainer = SimpleNamespace(callback_metrics={"val/acc": 1.0})
    with pytest.raises(RuntimeError, match=r"^Connection closed") as error:
        EarlyStopping(monitor="val/acc").on_validation_end(trainer, None)
    assert not isinstance(error.value, TrainingFailed)
