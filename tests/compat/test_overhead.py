"""What is left out of Lightning's step is still there to be left out, and is."""

import inspect

import lightning.pytorch as pl
import overhead
import pytest
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.profilers import PassThroughProfiler

import lockstep
from lockstep import build
from lockstep.compat.overhead import NoProfiler
from lockstep.config.compose import compose_config
from lockstep.machine.world import world_of
from lockstep.reporting import console


def test_lightning_still_has_the_broadcast():
    """When this fails, see whether `without_sigterm_broadcast` can go."""
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(_TrainingEpochLoop.advance)


def test_no_process_asks_another_at_each_step(mnist, cache, monkeypatch):
    """The broadcast is called where it is not left out, and not in a trainer of ours."""
    asked = []
    monkeypatch.setattr(_TrainingEpochLoop, "_broadcast_sigterm_tensor", lambda self: asked.append(self))
    cfg = compose_config(
        "train",
        [
            f"data.root={mnist}",
            f"data.cache_dir={cache}",
            "run=a",
            "trainer.accelerator=cpu",
            "trainer.precision=32-true",
        ],
    )
    trainer = build.evaluator(cfg, world_of(cfg))
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor()
    assert not asked
    pl.Trainer(logger=False, accelerator="cpu").fit_loop.epoch_loop._broadcast_sigterm_tensor()
    assert len(asked) == 1


def test_no_context_is_made_anew():
    profiler = NoProfiler()
    assert isinstance(profiler, PassThroughProfiler)
    assert profiler.profile("a") is profiler.profile("b")
    with profiler.profile("a"), profiler.profile("b"):
        pass


def test_a_profiler_that_is_asked_for_is_used(tmp_path, mnist, cache):
    small = [
        "trainer.max_steps=2",
        "trainer.limit_val_batches=1",
        "trainer.limit_test_batches=1",
        "trainer.accelerator=cpu",
    ]
    lockstep.train(
        [
            *small,
            f"data.root={mnist}",
            f"data.cache_dir={cache}",
            f"runs_dir={tmp_path}",
            "run=a",
            "trainer.profiler=simple",
        ]
    )
    assert "run_training_batch" in (tmp_path / "a" / "fit-profile.txt").read_text()


# What Lightning says of a run of its own.
@pytest.mark.filterwarnings(
    "ignore:.*LeafSpec:FutureWarning", "ignore:.*does not have many workers", "ignore:GPU available"
)
def test_what_the_framework_costs_is_measured(cache, monkeypatch):
    """The clock of each way begins and ends; a run that is cut short has none."""
    monkeypatch.setattr(overhead, "WARM", 2)
    monkeypatch.setattr(console.out, "_file", None)  # the script turns it elsewhere
    more = f"data.cache_dir={cache}"
    ways = {"bare loop": overhead.bare(3), "Lightning alone": overhead.lightning_alone(3)}
    ways["Lockstep"] = overhead.lockstep(3, more)
    assert all(seconds > 0 for seconds in ways.values())
    assert overhead.lockstep(3, more, "trainer.enable_checkpointing=false") > 0
    assert overhead.lockstep(3, more, "trainer.max_steps=4") == 0
    *_, last = overhead.table({name: [seconds] for name, seconds in ways.items()}).splitlines()
    above = (ways["Lockstep"] - ways["bare loop"]) * 1e3
    assert last.startswith("| Lockstep |") and float(last.split("|")[-2]) == pytest.approx(above, abs=0.01)
