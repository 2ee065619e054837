"""Invariant 5: a checkpoint made under any strategy goes on under any other, at the same sample, to the same end."""

import itertools
from collections.abc import Callable
from pathlib import Path

import consolidate
import pytest
from in_process import SMALL

import lockstep
from lockstep.checkpoints.finding import leaves
from lockstep.checkpoints.weights import read
from lockstep.extras import comparison
from lockstep.reporting.report import Report

SETUPS = {
    "single": ["strategy=single"],
    "accumulated": ["strategy=single", "trainer.accumulate_grad_batches=3"],
    "dp": ["strategy=dp"],
    "ddp2": ["strategy=ddp", "trainer.devices=2"],
    "fsdp2": ["strategy=fsdp", "trainer.devices=2"],
    "fsdp4": ["strategy=fsdp", "trainer.devices=4"],
    "shards2": ["strategy=fsdp", "trainer.devices=2", "checkpoint.sharded=true"],
    "shards4": ["strategy=fsdp", "trainer.devices=4", "checkpoint.sharded=true"],
}
STEPS, STOPPED = 17, 7  # an epoch has 12
# In a ring, each setup is left once and gone on with once.
RING = ["single", "ddp2", "fsdp2", "accumulated", "shards2", "dp"]
LARGE_RING = ["fsdp2", "shards4", "ddp2", "fsdp4", "shards2", "single"]
AROUND = list(zip(RING, [*RING[1:], RING[0]], strict=True))
QUICK = AROUND[:1]
SLOW = [*AROUND[1:], *zip(LARGE_RING, [*LARGE_RING[1:], LARGE_RING[0]], strict=True)]
FULL = [pair for pair in itertools.product(SETUPS, SETUPS) if pair not in (*QUICK, *SLOW)]

pytestmark = pytest.mark.xdist_group("interchange")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("interchange") / "runs"


@pytest.fixture(scope="module")
def train(runs, mnist, cache, forked):
    """AdamW with warm-up, clipping, dropout and an average of the weights.

    Its eps is large: AdamW makes whole steps out of gradients that are rounding alone."""
    data = f"runs_dir={runs} data.root={mnist} data.cache_dir={cache} loader.batch_size=48 loader.eval_batch_size=40"
    trainer = "trainer.log_every_n_steps=1 trainer.enable_progress_bar=false trainer.gradient_clip_val=0.5 trainer.precision=32-true"
    more = "augment=[shift] augment.shift.pixels=2 callbacks=[default,ema] callbacks.ema.decay=0.8 trainer.limit_val_batches=1"
    base = [*SMALL, *f"{data} {trainer} {more} schedule.warmup_steps=5 optim.lr=1e-4 optim.eps=1e-4".split()]
    return lambda *overrides: lockstep.train([*base, *overrides])


@pytest.fixture(scope="module")
def whole(train, runs) -> Report:
    """One that nothing stopped."""
    train("run=whole", f"trainer.max_steps={STEPS}")
    return comparison.find("whole", runs)


@pytest.fixture(scope="module")
def stopped(train, runs) -> Callable[[str], Path]:
    """The checkpoint of a run under a setup that stopped in mid-epoch."""

    def checkpoint(setup: str) -> Path:
        path = runs / setup / "checkpoints" / "last.ckpt"
        if not path.exists():
            train(f"run={setup}", *SETUPS[setup], f"trainer.max_steps={STOPPED}")
        return path

    return checkpoint


def keys(checkpoint: Path) -> set[tuple]:
    """Without the states of callbacks, the config, whose strategy has keys of its own, and what only ddp records."""
    apart = ("callbacks", "config", "gradient_order")
    return {path for path, _ in leaves(read(checkpoint).values) if path[0] not in apart}


def assert_goes_on(train, runs, whole, left: str, under: str, checkpoint: Path) -> None:
    run = f"{left}-{under}"
    one_file = [] if under.startswith("shards") else ["checkpoint.sharded=false"]
    accumulate = [] if under == "accumulated" else ["trainer.accumulate_grad_batches=1"]
    options = [*one_file, *accumulate, *SETUPS[under], f"trainer.max_steps={STEPS}"]
    report = train(f"resume={checkpoint}", f"run={run}", *options)
    assert (report["train/steps"], report["resumed_from"]) == (STEPS, str(checkpoint))
    found = comparison.compare(whole, comparison.find(run, runs), exact=False, tolerance=1e-6)
    assert found["weights"] == []
    expected, rows = (comparison.series(comparison.find(name, runs))["train/loss"] for name in ("whole", run))
    assert rows.steps == list(range(STOPPED + 1, STEPS + 1))
    assert rows.values == pytest.approx(expected.values[STOPPED:], rel=2e-6)
    assert report["test/loss"] == pytest.approx(whole["test/loss"], rel=1e-5)
    ours, theirs = (keys(runs / name / "checkpoints/last.ckpt") for name in (run, "whole"))
    assert ours ^ theirs == set()  # whatever made them


@pytest.mark.parametrize(
    ("left", "under"),
    [
        *QUICK,
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW),
        *(pytest.param(*pair, marks=pytest.mark.full) for pair in FULL),
    ],
)
def test_a_checkpoint_goes_on_under_another_strategy(left, under, train, runs, whole, stopped):
    assert_goes_on(train, runs, whole, left, under, stopped(left))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_shards_can_be_put_together_to_one_file_and_evaluated_on_one_process(world, train, runs, whole, stopped):
    folder = stopped(f"shards{world}")
    shards = [f"shard-{rank:05}-of-{world:05}.pt" for rank in range(world)]
    assert sorted(path.name for path in folder.iterdir()) == ["rest.pt", *shards]
    file = consolidate.consolidate(folder, folder.with_name("together.ckpt"))
    assert file.is_file()
    stopped("single")
    figures = [lockstep.evaluate([f"checkpoint={path}", "trainer.accelerator=cpu"]) for path in (file, folder)]
    expected = lockstep.evaluate(["run=single", f"runs_dir={runs}", "trainer.accelerator=cpu"])
    for figure in figures:
        assert figure["test/loss"] == pytest.approx(expected["test/loss"], rel=1e-6)
        assert (figure["strategy"], figure["test/count"]) == ("single", 103)
    assert_goes_on(train, runs, whole, f"together{world}", "ddp2", file)
