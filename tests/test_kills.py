"""Invariant 3: a run that is killed at any instant and typed again ends bit-identical to the run that was not."""

import json
import shutil
from contextlib import suppress
from pathlib import Path

import kills
import pytest
from in_process import SMALL

import lockstep
from lockstep.errors import ProcessDied, RunFailed
from lockstep.extras import comparison

SETUPS = {
    "single": ["strategy=single"],
    "foreground": ["strategy=single", "checkpoint.background=false"],
    # validated at its last step
    "plain": ["strategy=single", "callbacks.early_stopping.patience=9", "trainer.val_check_interval=null"],
    "ddp": ["strategy=ddp", "trainer.devices=2"],
    "ddp3": ["strategy=ddp", "trainer.devices=3"],  # sums of three numbers depend on their order
    "fsdp": ["strategy=fsdp", "trainer.devices=2"],
    # each with its own statistics
    "norms": ["strategy=fsdp", "trainer.devices=2", "model=timm", "model.name=test_resnet", "data.image_size=28"],
    "shards": ["strategy=fsdp", "trainer.devices=2", "checkpoint.sharded=true"],
}
# All that has a state: dropout, momentum, schedule, average, best scores, early stopping, a mean loss over three steps.
# Two epochs of 12 steps, of two micro-batches each, validated in mid-epoch; stopped early in the last one.
OPTIONS = [
    *SMALL, "loader.batch_size=48", "loader.eval_batch_size=40", "trainer.max_epochs=2", "trainer.log_every_n_steps=3",
    "trainer.accumulate_grad_batches=2", "trainer.val_check_interval=10", "trainer.gradient_clip_val=1.0", "checkpoint.every_n_steps=4",
    "schedule=cosine", "schedule.warmup_steps=3", "optim.lr=3e-3", "callbacks=[default,ema,early_stopping]", "callbacks.ema.decay=0.9",
    "callbacks.early_stopping.patience=2", "callbacks.early_stopping.monitor=val/loss", "callbacks.early_stopping.mode=max",
    "checkpoint.monitor=val/loss", "checkpoint.mode=min", "augment=[light,mixup]", "trainer.enable_progress_bar=false", "resume=auto",
]  # fmt: skip

pytestmark = pytest.mark.xdist_group("kills")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("kills")


@pytest.fixture
def train(folder, mnist, cache, monkeypatch, forked):
    """Trains in processes that can be killed, one process alone included."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("lockstep.launch.start.runs_in_this_process", lambda _: False)
    monkeypatch.setenv(kills.AT, "0")
    base = [f"data.root={mnist}", f"data.cache_dir={cache}", *OPTIONS]
    return lambda *overrides: lockstep.train([*base, *overrides])


@pytest.fixture
def moments(train, folder, monkeypatch):
    """Runs without a kill, once, as whole-<setup>; returns the names of the moments at which `rank` could have been killed."""

    def found(setup: str, rank: int) -> list[str]:
        monkeypatch.setenv(kills.RANK, str(rank))
        file = folder / f"moments-{setup}-{rank}"
        if not file.exists():
            monkeypatch.setenv(kills.COUNT, str(file))
            train(f"run=whole-{setup}-{rank}", *SETUPS[setup])
            monkeypatch.delenv(kills.COUNT)
        return file.read_text().splitlines()

    return found


def chosen(names: list[str], kinds: slice) -> list[int]:
    """Numbers of moments: of each of the `kinds` one, in different parts of the run; and before the last checkpoint."""
    order = list(dict.fromkeys(names))
    places = {kind: [i for i, name in enumerate(names, 1) if name == kind] for kind in order}
    found = [places[kind][(7 * i + 3) % len(places[kind])] for i, kind in list(enumerate(order))[kinds]]
    return [*found, places["before save"][-1]] if "before save" in places else found


def files(run: str) -> set[str]:
    return {str(path.relative_to(f"runs/{run}")) for path in Path("runs", run).rglob("*") if path.is_file()}


def assert_ended_alike(run: str, whole: str, place: str) -> None:
    found = comparison.compare(*(comparison.find(name, Path("runs")) for name in (whole, run)), exact=True, tolerance=0)
    assert (place, {section: lines for section, lines in found.items() if lines}) == (place, {})
    assert files(run) == files(whole), place


@pytest.mark.slow
@pytest.mark.parametrize(("setup", "rank"), [("single", 0), ("shards", 1)])
def test_a_run_whose_disk_is_full_keeps_what_it_has_and_goes_on_when_there_is_room(
    setup, rank, train, moments, monkeypatch
):
    run, names = f"full-{setup}", moments(setup, rank)
    with monkeypatch.context() as at_once:
        at_once.setenv(kills.AT, str(len(names) // 2))
        at_once.setenv(kills.ROOM, "100000")
        with pytest.raises(RunFailed):
            train(f"run={run}", *SETUPS[setup])
    report = json.loads(Path(f"runs/{run}/report.json").read_text())
    assert (report["status"], "could not be saved" in report["error"]) == ("failed", True)
    kept = files(run)
    assert {"checkpoints/last.ckpt" + ("/rest.pt" if setup == "shards" else "")} <= kept
    assert not [path for path in kept if ".part" in path]
    train(f"run={run}", *SETUPS[setup])
    assert_ended_alike(run, f"whole-{setup}-{rank}", "the disk was full")


QUICK = [("single", 0, slice(1))]
SLOW = [
    ("single", 0, slice(3, None, 6)), ("plain", 0, slice(0)), ("ddp3", 1, slice(0)), ("ddp", 0, slice(0, None, 8)),
    ("shards", 0, slice(3, None, 9)), ("shards", 1, slice(1, 2)), ("norms", 0, slice(1)), ("fsdp", 0, slice(1, None, 8)),
]  # fmt: skip
FULL = [
    ("single", 0, slice(None)), ("foreground", 0, slice(0, None, 6)), ("ddp3", 1, slice(1)), ("ddp3", 0, slice(1, None, 10)),
    ("fsdp", 1, slice(1)), ("shards", 0, slice(2, None, 6)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("setup", "rank", "kinds"),
    [
        *QUICK,
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
        *(pytest.param(*case, marks=pytest.mark.full) for case in FULL),
    ],
)
def test_a_killed_run_that_is_typed_again_ends_alike(setup, rank, kinds, train, moments, monkeypatch):
    names = moments(setup, rank)
    for at in chosen(names, kinds):
        run = f"killed-{setup}-{rank}-{at}"
        counted = Path(f"moments-{run}")
        with monkeypatch.context() as killed:
            killed.setenv(kills.AT, str(at))
            killed.setenv(kills.COUNT, str(counted.resolve()))
            with suppress(RunFailed, ProcessDied):  # which is what a SIGKILL looks like
                train(f"run={run}", *SETUPS[setup])
                # the page is written every few seconds, so a faster run has fewer moments
                assert len(counted.read_text().splitlines()) < at
        train(f"run={run}", *SETUPS[setup])
        assert_ended_alike(run, f"whole-{setup}-{rank}", f"killed at moment {at}: {names[at - 1]}")
        shutil.rmtree(f"runs/{run}")


def test_the_run_that_is_compared_has_what_it_is_about(moments):
    moments("single", 0)
    report = json.loads(Path("runs/whole-single-0/report.json").read_text())
    checkpoint = lockstep.checkpoints.weights.read(Path("runs/whole-single-0/checkpoints/last.ckpt"))
    assert 12 < report["train/steps"] < 24
    assert checkpoint.values["current_model_state"]
    assert any("EarlyStopping" in name for name in checkpoint.values["callbacks"])
    log = json.dumps(comparison.series(comparison.find("whole-single-0", Path("runs"))))
    assert log.count("val/acc") == 1
