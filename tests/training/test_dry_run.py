"""A trial step: what does not fit together is rejected before a file is written, and operations are counted."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import building
import numpy as np
import pytest
import thin_project
import torch
from in_process import options

import lockstep
from lockstep import Arrays, build
from lockstep.config.checks import resolve
from lockstep.config.settings import Settings
from lockstep.data.datamodule import DataModule
from lockstep.errors import UserError
from lockstep.kit import Images
from lockstep.training import dry_run


class Black(Images):
    """Four black images."""

    classes = tuple("0123456789")

    def __init__(self, channels: int, image_size: int) -> None:
        super().__init__(image_size=image_size, mean=[0.5] * channels, std=[0.5] * channels)
        self.train = self.test = Arrays(input=np.zeros((4, channels, 28, 28), np.uint8), target=np.zeros(4, np.int64))


def flops_per_sample(channels: int, image_size: int, *overrides: str) -> int | None:
    given = [*overrides, "loader.batch_size=2", f"data.image_size={image_size}", "trainer.accelerator=cpu"]
    cfg = resolve(given)
    settings, data = Settings.of(cfg), DataModule(Black(channels, image_size), batch_size=2, eval_batch_size=2)
    work = building.workload(settings, data)
    root = SimpleNamespace(root_device=torch.device("cpu"))
    build.dry_run(settings, SimpleNamespace(strategy=root, callbacks=[SimpleNamespace(work=work)]))
    return work.flops_per_sample


def test_basic_nets_operations_are_those_of_its_shapes():
    first = 26 * 26 * 32 * 9  # multiplications and additions
    second = 24 * 24 * 64 * 32 * 9
    linear = 9216 * 128 + 128 * 10
    forward = first + second + linear
    backward = first + 2 * (second + linear)  # no gradient of the images
    assert flops_per_sample(1, 28) == 2 * (forward + backward)


def test_a_network_that_is_too_large_to_be_copied_is_counted_without_numbers(monkeypatch):
    vit = 3, 160, "model=timm", "model.name=test_vit"
    counted = flops_per_sample(*vit)
    monkeypatch.setattr(dry_run, "LARGEST", 0)
    assert flops_per_sample(*vit) == counted
    assert flops_per_sample(3, 336, "model=resnet50d", "model.pretrained=false") == pytest.approx(59.3e9, rel=0.001)


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
LARGE = f"{F1} seed=1"  # with a network that is too large to be copied
PLAIN = "~model.dropout_conv ~model.dropout_fc"


@pytest.mark.parametrize(("typed", "told"), [
    ("data.image_size=5", r"data.image_size=5: BasicNet needs images of at least 6 pixels"),
    ("model=timm model.name=test_vit data.image_size=3", r"data.image_size=3 and task=classifier do not fit .*patch size"),
    (f"model._target_=torch.nn.Identity {PLAIN}", r"model=identity, data=mnist .* do not fit together: the network returns shape .*\(2, 1, 12, 12\)"),
    (f"model._target_=mine.Twelve {PLAIN}", r"the network returns shape \(2, 12\), but the task and the data need \(2, 10\)"),
    (f"model._target_=torchvision.models.squeezenet1_0 {PLAIN}", r"model=squeezenet1_0, .* to have 3 channels, but got 1 channels"),
    ("+model.num_classes=5", r"model.num_classes=5 has no effect: the data and the task need 10"),
    ("model=timm model.name=test_resnet loader.batch_size=1", r"Expected more than 1 value .* Change one of them: loader.batch_size, because a micro-batch has 1 sample; model"),
    ("task=segmentation", r"is int64 of shape \(\); expected a class number for each pixel from 0 to 9, or 255"),
    ("optim._target_=torch.optim.SparseAdam ~optim.fused ~optim.weight_decay", r"optim: SparseAdam does not support dense gradients"),
    (f"{ONE_CYCLE} +schedule.max_lr=1 trainer.max_epochs=-1", r"schedule: .*total_steps"),
    (F1, r"task.metrics.f1 does not fit task=classifier .* the same shape"),
    (LARGE, r"task.metrics.f1 does not fit task=classifier"),
    ("task=mine task._target_=mine.Scalar", r"task=Scalar: `loss` returns shape \(\) for 2 samples; expected one number per sample, shape \(2,\)"),
    ("task=mine task._target_=mine.Wide", r"task=Wide: `loss` returns shape \(2, 10\) for 2 samples"),
    ("task=mine task._target_=mine.Column", r"task=Column: `weight` returns shape \(2, 1\) for 2 samples; expected one number per sample"),
    ("task=mine task._target_=mine.Replaced", r"task=Replaced: `metrics` returns loss, which every task already logs"),
    ("task=mine task._target_=mine.Uncalled", r"`metrics` returns {'mse': <class '.*MeanSquaredError'>}; expected a dict"),
    ("task=mine task._target_=mine.Unnamed", r"`metrics` returns \[.*\]; expected a dict of torchmetrics metrics"),
    ("task=mine task._target_=mine.Several", r"the network returns output\['mean'\] of shape \(7,\) for a batch of 2"),
    ("task=mine task._target_=mine.Short", r"`describe` has 1 entries for 2 samples"),
    ("task=mine +task.metrics.curve={_target_:mine.Curve}", r"task.metrics.curve .*: the metric curve returns a tuple, which cannot be logged"),
    # any Task accepts any key and passes it on
    ("task=mine +task.metric.mean._target_=torchmetrics.MeanMetric", r"^task.metric is not an argument of .* \(did you mean metrics\?\)"),
    ("task=bare +task.metric.mean._target_=torchmetrics.MeanMetric", r"^task.metric is not an argument of .* \(did you mean metrics\?\)"),
])  # fmt: skip
def test_what_does_not_fit_together_is_refused_before_a_file_is_written(train, typed, told, monkeypatch):
    if typed == LARGE:
        monkeypatch.setattr(dry_run, "LARGEST", 0)
    with pytest.raises(UserError, match=told):
        train(*typed.split())
    assert not Path("runs").exists()


@pytest.mark.parametrize("typed", [
    "optim._target_=torch.optim.LBFGS ~optim.betas ~optim.fused ~optim.weight_decay ~optim.eps channels_last=false",
    f"{ONE_CYCLE} +schedule.max_lr=0.1 +task.metrics.matrix={{_target_:torchmetrics.classification.MulticlassConfusionMatrix}}",
    "+task.metrics.needy={_target_:mine.Needy,least:50}",  # a validation has 64 samples
])  # fmt: skip
def test_what_cannot_run_without_numbers_is_not_refused(train, typed):
    assert train(*typed.split(), "trainer.max_steps=1")["status"] == "done"


def test_a_dry_run_changes_nothing(train, monkeypatch):
    """Neither weights nor the order of random numbers, on whatever device the step was tried."""
    losses = [train("trainer.max_steps=2")["test/loss"]]
    for owner, name, value in ((dry_run, "LARGEST", 0), (build, "dry_run", lambda *_: None)):
        monkeypatch.setattr(owner, name, value)
        losses.append(train(f"run={name}", "trainer.max_steps=2")["test/loss"])
    assert len(set(losses)) == 1


@pytest.mark.parametrize(("typed", "most", "line"), [
    ("task._target_=mine.Buggy", dry_run.MOST, "output[\"nothing\"]"),
    ("+task.metrics.own={_target_:mine.Unfinished}", dry_run.MOST, "self.sen.mean()"),
    ("+task.metrics.needy={_target_:mine.Needy,least:65}", dry_run.MOST, "too few samples"),  # more than a validation has
    ("+task.metrics.needy={_target_:mine.Needy,least:50}", 40, "too few samples"),
])  # fmt: skip
def test_a_users_bug_in_an_evaluation_is_shown_before_the_first_step(train, typed, most, line, monkeypatch):
    monkeypatch.setattr(dry_run, "MOST", most)
    with pytest.raises((TypeError, IndexError, AttributeError, AssertionError)) as error:
        train("task=mine", *typed.split())
    assert any(line in str(entry.statement) for entry in error.traceback)
    assert not list(Path("runs/a/checkpoints").iterdir())


@pytest.mark.parametrize(("typed", "more"), [("task=bare", set()), ("task=classifier ~task.metrics", {"test/acc"})])
def test_a_task_without_the_key_of_metrics_has_those_of_its_class(train, typed, more):
    report = train(*typed.split(), "trainer.max_steps=1", "trainer.limit_test_batches=1")
    assert {name for name in report if name.startswith("test/")} == {"test/loss", "test/count"} | more
