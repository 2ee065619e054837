"""Bytes that change under a run: it ends with a clear error, or its result is right; never a different one in silence."""

import shutil
from pathlib import Path

import pytest
from in_process import end_before_the_test, report, same, state

from lockstep.callbacks import FiniteLoss
from lockstep.errors import DataChanged, TrainingFailed


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_nothing_is_saved_of_a_training_on_data_that_changed(train, trained, cache, tmp_path, monkeypatch):
    own = tmp_path / "cache"
    shutil.copytree(cache, own)
    options = [f"data.cache_dir={own}", "run=b", "trainer.log_every_n_steps=1", "checkpoint.every_n_steps=4"]

    def change(self, trainer, *_):
        if trainer.global_step == 6:
            for path in own.glob("mnist-*/train/input.npy"):  # also those that other tests prepared
                flip(path)

    with monkeypatch.context() as patch:
        patch.setattr(FiniteLoss, "on_train_batch_end", change)
        with pytest.raises(DataChanged):
            train(*options)
    assert state("b/checkpoints/last.ckpt")["global_step"] == 4
    assert train(*options, "resume=auto")["status"] == "done"
    ours, theirs = state("b/checkpoints/last.ckpt"), state(trained / "checkpoints" / "last.ckpt")
    assert same(ours["state_dict"], theirs["state_dict"])


def test_a_best_checkpoint_that_is_damaged_is_not_tested(train, run_a):
    best = Path("runs/a", run_a["checkpoint"])
    flip(best)
    end_before_the_test("a")
    with pytest.raises(TrainingFailed, match=best.name):
        train("run=a", "resume=auto")
    assert report("a")["status"] == "failed"
    best.unlink()
    assert train("run=a", "resume=auto")["checkpoint"] == "checkpoints/last.ckpt"
