"""The profiler of a run that is not profiled costs nothing, and one that is asked for is used."""

from lightning.pytorch.profilers import PassThroughProfiler

import lockstep
from lockstep.build_trainer import NoProfiler


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
