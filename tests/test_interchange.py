"""Invariant 5: a checkpoint made under any strategy goes on under any other, at the same sample, to the same end."""

from pathlib import Path

import consolidate
import pytest

import lockstep
from lockstep.checkpoints.content import read
from lockstep.checkpoints.trees import leaves
from lockstep.reporting import comparison

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
# One step of each pair for the quick suite: each setup is left once and gone on with once.
QUICK = list(zip(SETUPS, [*list(SETUPS)[3:], *list(SETUPS)[:3]], strict=True))
ALL = [(a, b) for a in SETUPS for b in SETUPS]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("interchange") / "runs"


@pytest.fixture(scope="module")
def train(runs, mnist, cache, forked):
    """AdamW with warm-up, clipping and an average of the weights; dropout off, for ranks draw different masks.

    Its eps is large: AdamW makes whole steps out of gradients that are rounding alone."""
    base = [
        f"runs_dir={runs}", f"data.root={mnist}", f"data.cache_dir={cache}", "data.batch_size=48", "data.eval_batch_size=40",
        "trainer.accelerator=cpu", "trainer.log_every_n_steps=1", "trainer.enable_progress_bar=false", "model.dropout_conv=0",
        "model.dropout_fc=0", "trainer.gradient_clip_val=0.5", "data.random_shift=2", "callbacks=[default,ema]",
        "callbacks.ema.decay=0.8", "schedule.warmup_steps=5", "trainer.limit_val_batches=1", "optim.lr=1e-4", "optim.eps=1e-4",
        "trainer.precision=32-true",
    ]  # fmt: skip
    return lambda *overrides: lockstep.train([*base, *overrides])


@pytest.fixture(scope="module")
def whole(train, runs) -> comparison.Run:
    """One that nothing stopped; beside it, one under each setup that stopped in mid-epoch."""
    train("run=whole", f"trainer.max_steps={STEPS}")
    for name, options in SETUPS.items():
        train(f"run={name}", *options, f"trainer.max_steps={STOPPED}")
    return comparison.find("whole", runs)


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
    assert [step for step, _ in rows] == [str(step) for step in range(STOPPED, STEPS)]
    assert [float(loss) for _, loss in rows] == pytest.approx([float(loss) for _, loss in expected[STOPPED:]], rel=2e-6)
    assert report["test/loss"] == pytest.approx(whole.report["test/loss"], rel=1e-5)


@pytest.mark.parametrize(("left", "under"), QUICK)
def test_a_checkpoint_goes_on_under_another_strategy(left, under, train, runs, whole):
    assert_goes_on(train, runs, whole, left, under, runs / left / "checkpoints" / "last.ckpt")


@pytest.mark.slow
@pytest.mark.parametrize(("left", "under"), [pair for pair in ALL if pair not in QUICK])
def test_every_checkpoint_goes_on_under_every_strategy(left, under, train, runs, whole):
    assert_goes_on(train, runs, whole, left, under, runs / left / "checkpoints" / "last.ckpt")


@pytest.mark.parametrize("world", [2, 4])
def test_shards_can_be_put_together_to_one_file_and_evaluated_on_one_process(world, train, runs, whole):
    folder = runs / f"shards{world}" / "checkpoints" / "last.ckpt"
    assert sorted(path.name for path in folder.iterdir()) == [
        "rest.pt",
        *(f"shard-{rank:05}-of-{world:05}.pt" for rank in range(world)),
    ]
    file = consolidate.consolidate(folder, folder.with_name("together.ckpt"))
    assert file.is_file()
    figures = [lockstep.evaluate([f"checkpoint={path}", "trainer.accelerator=cpu"]) for path in (file, folder)]
    expected = lockstep.evaluate(["run=single", f"runs_dir={runs}", "trainer.accelerator=cpu"])
    for figure in figures:
        assert figure["test/loss"] == pytest.approx(expected["test/loss"], rel=1e-6)
        assert (figure["strategy"], figure["test/count"]) == ("single", 103)
    assert_goes_on(train, runs, whole, f"together{world}", "ddp2", file)


def test_checkpoints_have_the_same_keys_whatever_made_them(runs, whole):
    def keys(name: str) -> set[tuple]:
        found = leaves(read(runs / name / "checkpoints" / "last.ckpt"))
        return {path for path, _ in found if path[0] not in ("callbacks", "hyper_parameters")}

    own = {name: keys(name) for name in SETUPS}
    for name in SETUPS:
        assert own[name] ^ own["single"] == set(), name
