"""A figure that nothing logs ends the run at the first moment at which that is sure; the run goes on with another one."""

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from lockstep.callbacks import Monitored
from lockstep.errors import TrainingFailed

NODES = {
    "mine": {"monitor": "a/b"},
    "stop": {"monitor": "val/x", "check_on_train_epoch_end": False},
    "no": {"monitor": None},
}


def trainer(*logged: str) -> SimpleNamespace:
    metrics = dict.fromkeys(logged, 1.0)
    return SimpleNamespace(callback_metrics=metrics, sanity_checking=False, lightning_module=SimpleNamespace())


def watching(saved: list | None, **checkpoint) -> Monitored:
    cfg = OmegaConf.create({"checkpoint": {"monitor": None, **checkpoint}, "callbacks": NODES})
    return Monitored(cfg, None if saved is None else saved.append)


def test_what_is_watched_at_a_validation_is_told_there_after_a_checkpoint():
    saved: list = []
    callback = watching(saved, monitor="val/acc")
    callback.on_validation_end(trainer("val/acc", "val/x"), None)
    assert saved == []
    with pytest.raises(TrainingFailed, match=r"checkpoint.monitor=val/acc is not logged .* \(did you mean val/ac\?\)"):
        callback.on_validation_end(trainer("val/ac", "val/x"), None)
    assert len(saved) == 1
    with pytest.raises(TrainingFailed, match=r"callbacks.stop.monitor=val/x is not logged .* Type .* resume=auto"):
        callback.on_validation_end(trainer("val/acc"), None)


def test_what_a_callback_may_watch_later_is_told_at_the_end():
    callback = watching(None)
    callback.on_validation_end(trainer("val/x"), None)
    callback.on_train_end(trainer("a/b"), None)
    with pytest.raises(
        TrainingFailed, match=r"callbacks.mine.monitor=a/b is not logged .* Type [^ ]*=<one of them>\.$"
    ):
        callback.on_train_end(trainer("val/x"), None)
