"""What a schedule is constructed with comes from the config; its position comes from the checkpoint."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import thin_project
from in_process import options, rows, same, state

import lockstep

pytestmark = pytest.mark.filterwarnings(
    "ignore:You passed in a `.*_dataloader` but have no", "ignore:Trying to infer the `batch_size`"
)
ROWS = ["trainer.log_every_n_steps=1"]


@pytest.fixture(scope="module", autouse=True)
def project(tmp_path_factory) -> Iterator[Path]:
    packages = ("scheduled", "kept", "unseen")
    files = {path: text for name in packages for path, text in thin_project.package(name).items()}
    with thin_project.entered(tmp_path_factory.mktemp("project"), "scheduled", **files) as root:
        yield root


def train(name: str, run: str, epochs: int, *more: str) -> dict:
    module = ["task=lightning_module", f"task._target_=scheduled.{name}", "task.monitor=val_loss", "data=none"]
    options = [f"run={run}", f"trainer.max_epochs={epochs}", "trainer.precision=32-true", "trainer.accelerator=cpu"]
    return lockstep.train([*module, *options, *ROWS, *more])


def rates(run: str) -> list[dict[str, float]]:
    """Of each step, by schedule."""
    return [json.loads(line) for line in Path("runs", run, "rates.jsonl").read_text().splitlines()]


def schedule_state(run: str) -> tuple:
    checkpoint = state(f"{run}/checkpoints/last.ckpt")
    return checkpoint["lr_schedulers"], [optimizer["param_groups"] for optimizer in checkpoint["optimizer_states"]]


def test_every_schedule_of_a_longer_run_has_its_length():
    train("Every", "whole", 2)
    train("Every", "parts", 1)
    lockstep.train(["resume=parts", "trainer.max_epochs=2"])
    steps = list(zip(rates("whole"), rates("parts"), strict=True))[6:]
    assert {name for whole, parts in steps for name in whole if whole[name] != parts[name]} == set()
    assert schedule_state("parts") == schedule_state("whole")


def rate_of_epochs(run: str) -> list[float]:
    return [float(row["rate"]) for row in rows(run) if row["rate"]][::6]


KINDS = [("cosine", "epoch"), ("onecycle", "step"), ("plateau", "epoch"), ("by_hand", "epoch")]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "interval"), KINDS)
def test_a_longer_run_continues_as_an_uninterrupted_one(kind, interval):
    run, more = f"{kind}-{interval}", [f"+task.kind={kind}", f"+task.interval={interval}"]
    train("One", f"{run}-whole", 4, *more)
    train("One", f"{run}-parts", 2, *more)
    lockstep.train([f"resume={run}-parts", "trainer.max_epochs=4"])
    assert rate_of_epochs(f"{run}-parts")[2:] == rate_of_epochs(f"{run}-whole")[2:]
    if kind in ("plateau", "by_hand"):  # nothing depends on the length, so the weights are the same, too
        assert same(*(state(f"{run}-{part}/checkpoints/last.ckpt")["state_dict"] for part in ("whole", "parts")))


@pytest.mark.slow
def test_a_schedule_that_cannot_repeat_its_steps_is_reported():
    more = ["+task.kind=timm", "+task.interval=epoch"]
    train("One", "timm-whole", 4, *more)
    train("One", "timm", 2, *more)
    lockstep.train(["resume=timm", "trainer.max_epochs=4"])
    assert "CosineLRScheduler cannot repeat its steps" in Path("runs/timm/train.log").read_text()
    assert rate_of_epochs("timm")[3:] == rate_of_epochs("timm-whole")[3:]


@pytest.mark.slow
def test_changed_arguments_apply_and_the_history_stays():
    train("One", "a", 3, "+task.kind=plateau", "+task.interval=epoch")
    lockstep.train(["resume=a", "trainer.max_epochs=6", "+task.patience=1"])
    assert rate_of_epochs("a") == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.025, 0.025])
    lockstep.train(["resume=a", "trainer.max_epochs=7", "+task.lr=0.01", "+task.patience=9"])
    assert rate_of_epochs("a")[6] == pytest.approx(0.01)
    train("One", "b", 1, "+task.kind=by_hand")
    lockstep.train(["resume=b", "trainer.max_epochs=2", "+task.lr=0.03"])
    assert rate_of_epochs("b") == pytest.approx([0.1, 0.03])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [
    ["schedule=cosine"], ["schedule=exponential"], ["schedule=step", "schedule.milestones=[0.5]"],
    ["schedule._target_=torch.optim.lr_scheduler.OneCycleLR", "~schedule.warmup_steps", "+schedule.max_lr=0.1"],
])  # fmt: skip
def test_a_longer_run_of_a_task_continues_likewise(mnist, cache, tmp_path, monkeypatch, schedule):
    monkeypatch.chdir(tmp_path)
    common = [*options(mnist, cache), *ROWS, *schedule]
    lockstep.train([*common, "run=whole", "trainer.max_epochs=2"])
    lockstep.train([*common, "run=parts", "trainer.max_epochs=1"])
    lockstep.train(["resume=parts", "trainer.max_epochs=2"])
    whole, parts = ([row["train/lr"] for row in rows(run) if row["train/lr"]] for run in ("whole", "parts"))
    assert len(whole) == 24 and parts[12:] == whole[12:]
    assert schedule_state("parts") == schedule_state("whole")
