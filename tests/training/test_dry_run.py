"""A trial step: what does not fit together is rejected before a file is written, and operations are counted."""

import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import thin_project
import torch
from in_process import options
from torchmetrics import Metric

import lockstep
from lockstep import build
from lockstep.config.compose import compose_config
from lockstep.config.settings import Settings
from lockstep.data import Arrays, Images
from lockstep.data.datamodule import DataModule
from lockstep.errors import UserError
from lockstep.training import dry_run
from lockstep.training.dry_run import MOST, computed


class Black(Images):
    """Four black images."""

    classes = tuple("0123456789")

    def __init__(self, channels: int, image_size: int) -> None:
        super().__init__(image_size=image_size, mean=[0.5] * channels, std=[0.5] * channels)
        self.train = self.test = Arrays(input=np.zeros((4, channels, 28, 28), np.uint8), target=np.zeros(4, np.int64))


def flops_per_sample(channels: int, image_size: int, *overrides: str) -> int | None:
    given = [*overrides, "data.batch_size=2", f"data.image_size={image_size}", "trainer.accelerator=cpu"]
    cfg = compose_config("train", given)
    work = build.workload(Settings.of(cfg), DataModule(Black(channels, image_size), batch_size=2, eval_batch_size=2))
    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu")), callbacks=[])
    build.dry_run(Settings.of(cfg), trainer, work)
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


F1 = "+task.metrics.f1={_target_:torchmetrics.classification.%s}"
ONE_CYCLE = "schedule._target_=torch.optim.lr_scheduler.OneCycleLR ~schedule.warmup_steps"
LARGE = f"{F1 % 'BinaryF1Score'} seed=1"  # with a network that is too large to be copied
PLAIN = "~model.dropout_conv ~model.dropout_fc"


@pytest.mark.parametrize(("typed", "told"), [
    ("data.image_size=5", r"data.image_size=5: BasicNet needs images of at least 6 pixels"),
    ("model=timm model.name=test_vit data.image_size=3", r"data.image_size=3 and task=classification do not fit .*patch size"),
    (f"model._target_=torch.nn.Identity {PLAIN}", r"model=identity, data=mnist .* do not fit together: the network gives .*\(2, 1, 12, 12\)"),
    (f"model._target_=torchvision.models.squeezenet1_0 {PLAIN}", r"model=squeezenet1_0, .* to have 3 channels, but got 1 channels"),
    ("+model.num_classes=5", r"model.num_classes=5 has no effect: the data and the task need 10"),
    ("task=segmentation", r"task=segmentation needs a class per pixel"),
    ("optim._target_=torch.optim.SparseAdam ~optim.fused ~optim.weight_decay", r"optim: SparseAdam does not support dense gradients"),
    (ONE_CYCLE, r"schedule: .*max_lr"),
    (f"{ONE_CYCLE} +schedule.max_lr=1 trainer.max_epochs=-1", r"schedule: .*total_steps"),
    (F1 % "BinaryF1Score", r"task.metrics.f1 does not fit task=classification .* the same shape"),
    (LARGE, r"task.metrics.f1 does not fit task=classification"),
    (F1 % "MulticlassF1Score,num_classes:3", r"task.metrics.f1 does not fit task=classification"),
])  # fmt: skip
def test_what_does_not_fit_together_is_refused_before_a_file_is_written(train, typed, told, monkeypatch):
    if typed == LARGE:
        monkeypatch.setattr(dry_run, "LARGEST", 0)
    with pytest.raises(UserError, match=told):
        train(*typed.split())
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "typed",
    [
        "optim._target_=torch.optim.LBFGS ~optim.betas ~optim.fused ~optim.weight_decay ~optim.eps channels_last=false",
        f"{ONE_CYCLE} +schedule.max_lr=0.1",
        F1 % "MulticlassConfusionMatrix",
    ],
)
def test_what_cannot_run_without_numbers_is_not_refused(train, typed):
    assert train(*typed.split(), "trainer.max_steps=1")["status"] == "done"


def test_a_dry_run_changes_nothing(train, monkeypatch):
    """Neither weights nor the order of random numbers, on whatever device the step was tried."""
    losses = [train("run=a", "trainer.max_steps=2")["test/loss"]]
    with monkeypatch.context() as patch:
        patch.setattr(dry_run, "LARGEST", 0)
        losses.append(train("run=b", "trainer.max_steps=2")["test/loss"])
    monkeypatch.setattr(build, "dry_run", lambda *_: None)
    losses.append(train("run=c", "trainer.max_steps=2")["test/loss"])
    assert len(set(losses)) == 1


TASK = """
import torch
from torch.nn.functional import cross_entropy
from torchmetrics import Metric

from lockstep.tasks import Classification, Task


class Scalar(Classification):
    def loss(self, output, batch):
        return cross_entropy(output, batch["target"])


class Wide(Classification):
    def loss(self, output, batch):
        return output.square()


class Bare(Task):
    def network_arguments(self):
        return {"num_classes": 10}

    def loss(self, output, batch):
        return cross_entropy(output, batch["target"], reduction="none")


class Several(Classification):
    def outputs(self, net, batch):
        return {"logits": net(batch["input"]), "mean": torch.zeros(7)}

    def loss(self, output, batch):
        return super().loss(output["logits"], batch)


class Short(Classification):
    def describe(self, output, batch):
        return super().describe(output, batch)[1:]


class Buggy(Classification):
    def predictions(self, output):
        return {"class": output["nothing"]}


class Unfinished(Metric):
    def update(self, output, target):
        self.seen = output

    def compute(self):
        return self.sen.mean()


class Curve(Unfinished):
    def compute(self):
        return self.seen[0], self.seen[1]
"""
OWN = {
    "src/mine/__init__.py": TASK,
    "configs/task/mine.yaml": "defaults: [classification]\ntraits: null\n",
    "configs/task/bare.yaml": "_target_: mine.Bare\nmonitor: val/loss\nmode: min\n",
}


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Iterator[Path]:
    with thin_project.entered(tmp_path_factory.mktemp("project"), "mine", **OWN) as root:
        yield root


@pytest.fixture
def own(project, mnist, cache, monkeypatch):
    """Trains with the classes of TASK."""
    monkeypatch.chdir(project)
    return lambda *typed: lockstep.train([*options(mnist, cache), "run=a", *typed])


@pytest.mark.parametrize(("typed", "told"), [
    ("task._target_=mine.Scalar", r"task=Scalar: `loss` returns shape \(\) for 2 samples; expected one number per sample, shape \(2,\)"),
    ("task._target_=mine.Wide", r"task=Wide: `loss` returns shape \(2, 10\) for 2 samples"),
    ("task._target_=mine.Several", r"the network returns output\['mean'\] of shape \(7,\) for a batch of 2"),
    ("task._target_=mine.Short", r"`describe` has 1 entries for 2 samples"),
    ("+task.metrics.curve={_target_:mine.Curve}", r"task.metrics.curve .*: the metric curve computes a tuple, which cannot be logged"),
    # any Task accepts any key and passes it on
    ("+task.metric.mean._target_=torchmetrics.MeanMetric", r"^task.metric is not an argument of .* \(did you mean metrics\?\)"),
    ("task=bare +task.metric.mean._target_=torchmetrics.MeanMetric", r"^task.metric is not an argument of .* \(did you mean metrics\?\)"),
])  # fmt: skip
def test_what_would_fail_after_an_epoch_is_refused_before_the_first_step(own, typed, told):
    with pytest.raises(UserError, match=told):
        own("task=mine", *typed.split())
    assert not Path("runs/a").exists()


@pytest.mark.parametrize(("typed", "line"), [
    ("task._target_=mine.Buggy", "output[\"nothing\"]"),
    ("+task.metrics.own={_target_:mine.Unfinished}", "self.sen.mean()"),
])  # fmt: skip
def test_a_users_bug_in_an_evaluation_is_shown_before_the_first_step(own, typed, line):
    with pytest.raises((TypeError, IndexError, AttributeError)) as error:
        own("task=mine", "run=bug", *typed.split())
    assert any(line in str(entry.statement) for entry in error.traceback)
    assert not list(Path("runs/bug/checkpoints").iterdir())
    shutil.rmtree("runs")


@pytest.mark.parametrize("typed", ["task=bare", "task=classification ~task.metrics"])
def test_a_task_without_the_key_of_metrics_has_those_of_its_class(own, typed):
    report = own(*typed.split(), "trainer.max_steps=1", "trainer.limit_test_batches=1")
    assert {name for name in report if name.startswith("test/")} == {"test/loss", "test/count"} | (
        set() if typed == "task=bare" else {"test/acc"}
    )
    shutil.rmtree("runs")


class Needy(Metric):
    """Computes nothing of fewer than `least` samples, as KernelInceptionDistance."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.count = least, 0

    def update(self, output, target) -> None:
        self.count += len(output)

    def compute(self):
        assert self.count >= self.least, f"too few samples: {self.count}"
        return 1.0


@pytest.mark.parametrize(("least", "available", "told"), [
    (0, 64, None), (50, 64, None), (MOST, 10_000, None), (65, 64, "too few samples: 64"), (3, 2, "too few samples: 2"),
    (10**6, 10**6, f"too few samples: {MOST}"),
])  # fmt: skip
def test_a_metric_that_needs_more_samples_gets_no_more_than_a_validation(least, available, told):
    with pytest.raises(AssertionError, match=told) if told else nullcontext():
        computed(Needy(least), (torch.ones(2), torch.ones(2)), 2, available)
