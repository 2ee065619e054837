"""Lightning still asks rank 0 by a broadcast at each step, and a trainer of ours does not."""

import inspect

import lightning.pytorch as pl
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

from lockstep import build
from lockstep.config.compose import compose_config
from lockstep.machine.world import world_of


def test_lightning_still_broadcasts():
    """When this fails, see whether compat/sigterm_broadcast.py can go."""
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(_TrainingEpochLoop.advance)


def test_no_process_asks_another_at_each_step(mnist, cache, monkeypatch):
    asked = []
    monkeypatch.setattr(_TrainingEpochLoop, "_broadcast_sigterm_tensor", lambda self: asked.append(self))
    trainer = pl.Trainer(logger=False, accelerator="cpu")
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor()
    assert len(asked) == 1
    given = [f"data.root={mnist}", f"data.cache_dir={cache}", "run=a", "trainer.accelerator=cpu"]
    cfg = compose_config("train", [*given, "trainer.precision=32-true"])
    trainer = build.evaluator(cfg, world_of(cfg))
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor()
    assert len(asked) == 1
