"""Random numbers outside of forward and backward belong to the step: they are the same on all ranks and after a resume."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import thin_project
import torch
from in_process import Crash, state

import lockstep

pytestmark = pytest.mark.filterwarnings("ignore:You passed in a `.*_dataloader` but have no", "ignore:Be aware that when using `ckpt_path`")

NOISE = "+callbacks.noise._target_=drawing.WeightNoise"
WAYS = {
    "ddp": ["strategy=ddp", "trainer.devices=2"],
    "fsdp": ["strategy=fsdp", "trainer.devices=2"],
    "accumulated": ["trainer.accumulate_grad_batches=2"],
}


@pytest.fixture(scope="module", autouse=True)
def project(tmp_path_factory) -> Iterator[Path]:
    files = {**thin_project.package("kept"), **thin_project.package("unseen"), **thin_project.package("drawing")}
    with thin_project.entered(tmp_path_factory.mktemp("project"), "drawing", **files) as root:
        yield root


def train(name: str, run: str, *more: str) -> dict[str, torch.Tensor]:
    """The weights after 18 steps."""
    module = ["task=lightning_module", f"task._target_=drawing.{name}", "task.monitor=val_loss", "data=none"]
    options = [f"run={run}", "trainer.max_epochs=3", "trainer.precision=32-true", "trainer.accelerator=cpu"]
    lockstep.train([*module, *options, *more])
    return state(f"{run}/checkpoints/last.ckpt")["state_dict"]


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


CASES = [("LangevinModule", []), ("ManualLangevin", []), ("ManualLangevin", ["+task.raw=true"]), ("GradientNoise", []), ("ZeroGradNoise", []), ("EpochScale", []), ("drawing.Plain", [NOISE])]


@pytest.mark.parametrize(("name", "more"), CASES)
def test_ranks_draw_the_same(name, more, forked):
    name = name.removeprefix("drawing.")
    one = train(name, f"{name}{len(more)}-one", *more)
    found = {}
    for way, typed in WAYS.items():
        if way == "accumulated" and name.startswith("Manual"):
            continue
        found[way] = distance(one, train(name, f"{name}{len(more)}-{way}", *more, *typed))
    with Path("/tmp/found.txt").open("a") as f:
        f.write(f"{name} {more} {found}\n")
    assert max(found.values()) < 1e-6
