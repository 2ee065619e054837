"""Random numbers outside of forward and backward belong to the step: they are the same on all ranks and after a resume."""

from collections.abc import Iterator
from pathlib import Path

import forked as forked_processes
import pytest
import thin_project
import torch
from in_process import state

import lockstep
from lockstep.errors import ProcessDied, RunFailed

pytestmark = pytest.mark.filterwarnings(
    "ignore:You passed in a `.*_dataloader` but have no", "ignore:Be aware that when using `ckpt_path`"
)

NOISE = "+callbacks.noise._target_=drawing.WeightNoise"
WAYS = {
    "ddp": ["strategy=ddp", "trainer.devices=2"],
    "fsdp": ["strategy=fsdp", "trainer.devices=2"],
    "accumulated": ["trainer.accumulate_grad_batches=2"],
}


KILL = """
import os, signal
from lockstep.callbacks import FiniteLoss

def kill(self, trainer, *_):
    if trainer.global_step == 8 and trainer.global_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

FiniteLoss.on_train_batch_end = kill
"""


@pytest.fixture(scope="module", autouse=True)
def project(tmp_path_factory) -> Iterator[Path]:
    files = {**thin_project.package("kept"), **thin_project.package("unseen"), **thin_project.package("drawing")}
    with thin_project.entered(tmp_path_factory.mktemp("project"), "drawing", **files) as root:
        yield root


def train(name: str, run: str, *more: str) -> dict[str, torch.Tensor]:
    """The weights after 18 steps."""
    run = f"{name}-{len(more)}-{run}" if run in ("one", *WAYS) else run
    module = ["task=lightning_module", f"task._target_=drawing.{name}", "task.monitor=val_loss", "data=none"]
    options = [f"run={run}", "trainer.max_epochs=3", "trainer.precision=32-true", "trainer.accelerator=cpu"]
    lockstep.train([*module, *options, *more])
    return state(f"{run}/checkpoints/last.ckpt")["state_dict"]


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


ALONE = [
    ("LateLayers", []),
    ("LangevinModule", []),
    ("GradientNoise", []),
    ("ZeroGradNoise", []),
    ("BackwardNoise", []),
    ("EpochScale", []),
    ("ManualLangevin", []),
    ("ManualLangevin", ["+task.raw=true"]),
    ("Plain", [NOISE]),
]


@pytest.mark.parametrize(
    ("name", "more"), [("Everything", []), *(pytest.param(*case, marks=pytest.mark.slow) for case in ALONE)]
)
def test_ranks_and_accumulation_draw_as_one_process(name, more, forked):
    """Hooks of a batch run once per micro-batch, and an update by hand does not accumulate."""
    one = train(name, "one", *more)
    ways = WAYS if name != "ManualLangevin" and not more else {way: WAYS[way] for way in ("ddp", "fsdp")}
    distances = {way: distance(one, train(name, way, *more, *typed)) for way, typed in ways.items()}
    assert max(distances.values()) < 1e-6, distances


@pytest.mark.slow
def test_logical_ranks_draw_the_same_bits(forked):
    exact = ["exact.logical_ranks=4"]
    one, two = train("Everything", "one", *exact), train("Everything", "two", *exact, *WAYS["ddp"])
    assert distance(one, two) == 0


@pytest.mark.slow
def test_a_killed_rank_draws_the_same_again(forked, tmp_path, monkeypatch):
    typed = ["checkpoint.every_n_steps=1", *WAYS["ddp"]]
    whole = train("Everything", "whole", *typed)
    hook = tmp_path / "hook.py"
    hook.write_text(KILL)
    monkeypatch.setenv(forked_processes.HOOK, str(hook))
    with pytest.raises((RunFailed, ProcessDied)):  # how a SIGKILL is explained
        train("Everything", "parts", *typed)
    monkeypatch.delenv(forked_processes.HOOK)
    assert distance(whole, train("Everything", "parts", "resume=auto", *typed)) == 0


def test_ranks_that_drift_apart_end_or_warn(forked):
    with pytest.raises(RunFailed):
        train("Drifting", "far", *WAYS["ddp"])
    told = Path("runs/far/train.log").read_text()
    assert (
        "the ranks have drifted apart: after step 6, head.bias" in told
        and "differ by up to 1.0e+00 between the ranks" in told
    )
    train("Drifting", "near", "+task.by=1e-5", *WAYS["ddp"])
    assert "differ by up to 1.0e-05 between the ranks" in Path("runs/near/train.log").read_text()


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_ranks_with_parameters_in_another_order_end(strategy, forked, capfd):
    with pytest.raises(RunFailed):
        train("Sets", strategy, *WAYS[strategy])
    told = "rank 1 has shape.weight (6, 6) torch.float32 where rank 0 has colour.weight (6, 6) torch.float32"
    assert told in capfd.readouterr().err
