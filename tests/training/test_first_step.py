"""What does not fit together is found by the sanity validation or the first step, in one line, and the run leaves no folder."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import thin_project
from in_process import options

import lockstep
from lockstep.callbacks.summary import Throughput
from lockstep.errors import TrainingFailed, UserError

OWN = {
    **thin_project.package("mine"),
    "configs/task/mine.yaml": "defaults: [classification]\n",
    "configs/task/bare.yaml": "_target_: mine.Bare\nmonitor: val/loss\nmode: min\n",
}


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Iterator[Path]:
    with thin_project.entered(tmp_path_factory.mktemp("project"), "mine", **OWN) as root:
        yield root


@pytest.fixture
def train(project, mnist, cache, monkeypatch):
    """Trains in a project with the classes of tests/packages/mine.py; its runs go when the test ends."""
    monkeypatch.chdir(project)
    yield lambda *typed: lockstep.train([*options(mnist, cache), "run=a", *typed])
    shutil.rmtree("runs", ignore_errors=True)


F1 = "+task.metrics.f1={_target_:torchmetrics.classification.BinaryF1Score}"
ONE_CYCLE = "schedule._target_=torch.optim.lr_scheduler.OneCycleLR ~schedule.warmup_steps"
PLAIN = "~model.dropout_conv ~model.dropout_fc"


@pytest.mark.parametrize(("typed", "told"), [
    ("data.image_size=5", r"data.image_size=5: BasicNet needs images of at least 6 pixels"),
    ("model=timm model.name=test_vit data.image_size=3", r"patch size"),
    (f"model._target_=torch.nn.Identity {PLAIN}", r"optimizer got an empty parameter list"),
    (f"model._target_=mine.Twelve {PLAIN}", r"the network returns shape \(64, 12\), but the task and the data need \(64, 10\)"),
    (f"model._target_=torchvision.models.squeezenet1_0 {PLAIN}", r"to have 3 channels, but got 1 channels"),
    ("+model.num_classes=5", r"model.num_classes=5 has no effect: the data and the task need 10"),
    ("model=timm model.name=test_resnet loader.batch_size=1", r"Expected more than 1 value"),
    ("task=segmentation", r"is int64 of shape \(\); expected a class number for each pixel from 0 to 9, or 255"),
    ("optim._target_=torch.optim.SparseAdam ~optim.fused ~optim.weight_decay", r"SparseAdam does not support dense gradients"),
    (f"{ONE_CYCLE} +schedule.max_lr=1 trainer.max_epochs=-1", r"total_steps"),
    (F1, r"the same shape"),
    ("task=mine task._target_=mine.Scalar", r"task=Scalar: `loss` returns shape \(\) for 64 samples; expected one number per sample, shape \(64,\)"),
    ("task=mine task._target_=mine.Wide", r"task=Wide: `loss` returns shape \(64, 10\) for 64 samples"),
    ("task=mine task._target_=mine.Column", r"task=Column: `weight` returns shape \(64, 1\) for 64 samples; expected one number per sample"),
    ("task=mine task._target_=mine.Replaced", r"task=Replaced: `metrics` returns loss, which every task logs"),
    ("task=mine +task.metrics.curve={_target_:mine.Curve}", r"the metric curve returns a tuple, which cannot be logged"),
    # any Task accepts any key and passes it on
    ("task=mine +task.metric.mean._target_=torchmetrics.MeanMetric", r"^task.metric is not an argument of .* \(did you mean metrics\?\)"),
    ("task=bare +task.metric.mean._target_=torchmetrics.MeanMetric", r"^task.metric is not an argument of .* \(did you mean metrics\?\)"),
])  # fmt: skip
def test_what_does_not_fit_together_is_told_in_one_line(train, typed, told):
    with pytest.raises(UserError, match=told):
        train(*typed.split())
    assert not Path("runs/a").exists()


def test_a_misspelt_monitor_is_told_after_the_sanity_validation(train, capsys):
    with pytest.raises(TrainingFailed, match="val/accc is not logged by"):  # after the first whole validation
        train("task.monitor=val/accc", "trainer.max_epochs=1")
    assert "val/accc is monitored, but the first validation batches logged" in capsys.readouterr().out


@pytest.mark.parametrize(("typed", "line"), [
    ("+task.metrics.own={_target_:mine.Unfinished}", "self.sen.mean()"),
    ("+task.metrics.needy={_target_:mine.Needy,least:129}", "too few samples"),
])  # fmt: skip
def test_a_users_bug_in_an_evaluation_is_shown_before_the_first_step(train, typed, line):
    with pytest.raises((AttributeError, AssertionError)) as error:
        train("task=mine", *typed.split())
    assert any(line in str(entry.statement) for entry in error.traceback)
    assert not Path("runs/a").exists()


def test_basic_nets_operations_are_those_of_its_shapes(train, monkeypatch):
    first = 10 * 10 * 32 * 9  # multiplications and additions
    second = 8 * 8 * 64 * 32 * 9
    linear = 1024 * 128 + 128 * 10
    forward = first + second + linear
    backward = first + 2 * (second + linear)  # no gradient of the images
    found = []
    monkeypatch.setattr(Throughput, "on_fit_end", lambda self, *_: found.append(self.flops_per_sample), raising=False)
    for accumulated in (1, 2):
        train(f"run=a{accumulated}", "trainer.max_steps=2", f"trainer.accumulate_grad_batches={accumulated}")
    assert found == [2 * (forward + backward)] * 2


@pytest.mark.parametrize(("typed", "more"), [("task=bare", set()), ("task=classifier ~task.metrics", {"test/acc"})])
def test_a_task_without_the_key_of_metrics_has_those_of_its_class(train, typed, more):
    report = train(*typed.split(), "trainer.max_steps=1", "trainer.limit_test_batches=1")
    assert {name for name in report if name.startswith("test/")} == {"test/loss", "test/count"} | more
