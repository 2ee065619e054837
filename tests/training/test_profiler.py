"""The profiler of a run that is not profiled costs nothing, and one that is asked for is used."""

from pathlib import Path

from lightning.pytorch.profilers import PassThroughProfiler

from lockstep.build_trainer import NoProfiler


def test_no_context_is_made_anew():
    profiler = NoProfiler()
    assert isinstance(profiler, PassThroughProfiler)
    assert profiler.profile("a") is profiler.profile("b")
    with profiler.profile("a"), profiler.profile("b"):
        pass


def test_a_profiler_that_is_asked_for_is_used(train):
    train("run=a", "trainer.max_steps=1", "trainer.profiler=simple")
    assert "run_training_batch" in Path("runs/a/fit-profile.txt").read_text()
