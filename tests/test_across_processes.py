"""The first lines of a run and its report say how far the result depends on the number of processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import thin_project
from in_process import options

import lockstep
from lockstep.training.invariance import ROUNDING, SAME_BITS

pytestmark = pytest.mark.xdist_group("across")
SHORT = ["trainer.max_steps=1", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1"]
RESNET = ["model=timm", "model.name=test_resnet", "data.image_size=32"]
CASES = {
    "exact": (["exact.logical_ranks=2"], SAME_BITS),
    "batch norm": (RESNET, "differs with the number of processes, because batch normalisation"),
    "synchronised": ([*RESNET, "trainer.sync_batchnorm=true"], ROUNDING),
    "attention": (
        ["model=timm", "model.name=test_vit", "data.image_size=32", "+model.img_size=32", "+model.attn_drop_rate=0.5"],
        "differs with the number of processes, because each process draws its own random numbers in Attention (timm.",
    ),
    "drop path": (
        ["model=timm", "model.name=test_vit", "data.image_size=32", "+model.img_size=32", "+model.drop_path_rate=0.5"],
        ROUNDING,
    ),
}


QUICK = ("exact", "batch norm", "attention")  # the default is in tests/test_strategies_agree.py


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]
)
def test_the_line_of_a_run(name, train, capsys):
    more, line = CASES[name]
    report = train("run=a", *SHORT, *more)
    assert report["across_processes"].startswith(line)
    assert f"result: {line}" in " ".join(capsys.readouterr().out.split())
    assert line in Path("runs/a/report.html").read_text()


OWN = """import random

import numpy as np
from torch import nn
from torch.nn.functional import cross_entropy

from lockstep.tasks import Classification


class Plain(nn.Module):
    def __init__(self, in_channels, num_classes, image_size):
        super().__init__()
        self.line = nn.Linear(in_channels * image_size**2, num_classes)

    def forward(self, image_BCHW):
        return self.line(image_BCHW.flatten(1))


class Coupled(Plain):
    def forward(self, image_BCHW):
        return super().forward(image_BCHW - image_BCHW.mean(0))


class Skips(Plain):
    def forward(self, image_BCHW):
        return super().forward(image_BCHW) * (random.random() > 0.5)


class OwnGenerator(Plain):
    numbers = np.random.default_rng(0)

    def forward(self, image_BCHW):
        return super().forward(image_BCHW) + self.numbers.random()


class Contrastive(Classification):
    def loss(self, output, batch):
        similar_BB = output @ output.T
        return cross_entropy(similar_BB, batch["target"] % len(similar_BB), reduction="none")


class Announced(Contrastive):
    between_samples = True
"""
OWN_CASES = {
    "model._target_=mine.Plain": ROUNDING,
    "model._target_=mine.Coupled": "differs with the number of processes, because what Coupled (src/mine/__init__.py:20) computes",
    "model._target_=mine.Skips": "differs with the number of processes, because each process draws its own random numbers in Skips (",
    "task._target_=mine.Contrastive": "differs with the number of processes, because what Contrastive (src/mine/__init__.py:37) computes",
    "task._target_=mine.Announced": ROUNDING,
    "model._target_=mine.Plain exact.logical_ranks=2": SAME_BITS,
    "model._target_=mine.OwnGenerator exact.logical_ranks=2": "differs with the number of processes, because each process draws its own",
}


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Iterator[Path]:
    files = {
        "src/mine/__init__.py": OWN,
        "configs/model/mine.yaml": "_target_: mine.Plain\n",
        "configs/task/mine.yaml": "defaults: [classification]\n",
    }
    with thin_project.entered(tmp_path_factory.mktemp("project"), "mine", **files) as root:
        yield root


@pytest.mark.parametrize("typed", OWN_CASES)
def test_the_line_of_networks_and_losses_of_ones_own(typed, project, mnist, cache, tmp_path, monkeypatch):
    """None of them draws from torch's generators, whose numbers logical ranks share."""
    monkeypatch.chdir(project)
    given = [*options(mnist, cache), *SHORT, "model=mine", "task=mine", *typed.split()]
    report = lockstep.train([f"runs_dir={tmp_path}", "run=a", *given])
    assert report["across_processes"].startswith(OWN_CASES[typed])


@pytest.mark.slow  # compiles
def test_a_compiled_network_is_not_covered(forked_command):
    done = forked_command("train.py", "run=a", *SHORT, "compile=true")
    assert "because a compiled network draws random numbers" in done.out, done
