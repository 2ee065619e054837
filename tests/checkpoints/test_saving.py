"""Which checkpoints are kept and tested: the best by the metric; of equal ones those of the lower loss, then the later ones; or the last."""

import json
import math
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lockstep.checkpoints import saving
from lockstep.checkpoints.saving import ModelCheckpoint


@pytest.fixture
def trainer(monkeypatch):
    """A trainer with so many `steps` done."""
    strategy = SimpleNamespace(reduce_boolean_decision=bool, remove_checkpoint=Path.unlink)
    made = SimpleNamespace(strategy=strategy, loggers=[], is_global_zero=True, sanity_checking=False)
    made.save_checkpoint = lambda path, **_: path.touch()
    made.steps, made.global_step = 0, 0
    made.state = SimpleNamespace(fn="fit")
    monkeypatch.setattr(saving, "steps_done", lambda trainer: trainer.steps)
    return made


def made(folder, mode: str, top: int) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath=folder, monitor="val/acc", mode=mode, save_top_k=top)


def names(paths) -> list[int]:
    return sorted(int(str(path).rpartition("-")[2].removesuffix(".ckpt")) for path in paths)


@pytest.mark.parametrize(("mode", "top"), product(["min", "max"], [1, 2, 3, -1]))
def test_the_kept_checkpoints_are_the_first_of_a_sorted_list_also_across_resumes(trainer, tmp_path, mode, top):
    """The reference sorts all validations; each checkpoint here is by a new callback with the state of the one before."""
    scores = [0.5, 0.5, math.nan, 0.5, 1.0, 1.0, 0.5, 1.0, 0.25]
    losses = [0.3, 0.2, 0.1, 0.2, 0.7, 0.7, math.nan, 0.6, 0.5]
    sign, state, seen = (1 if mode == "max" else -1), None, []
    for step, (score, loss) in enumerate(zip(scores, losses, strict=True), start=1):
        callback = made(tmp_path, mode, top)
        if state:
            callback.load_state_dict(state)
        trainer.steps, trainer.global_step = step, 2 * step  # of two optimizers
        trainer.callback_metrics = {"val/acc": torch.tensor(score), "val/loss": torch.tensor(loss)}
        callback.on_validation_end(trainer, None)
        state = callback.state_dict()
        worst = -math.inf if math.isnan(score) else sign * score
        seen.append((worst, -math.inf if math.isnan(loss) else -loss, step))
        expected = [each[2] for each in sorted(seen, reverse=True)][: None if top == -1 else top]
        assert names(tmp_path.iterdir()) == names(callback.best_k_models) == sorted(expected)
        assert names([callback.best_model_path]) == expected[:1]


@pytest.mark.parametrize("name", ["/x/..", "../..", ".", "/x/last.ckpt", "config.yaml", "../best-step-1.ckpt"])
def test_a_checkpoint_names_no_file_to_remove_but_a_best_checkpoint_of_this_run(name, tmp_path):
    (tmp_path / "best-step-2.ckpt").touch()
    (tmp_path / "last.ckpt").touch()
    callback = made(tmp_path, "max", 1)
    callback.load_state_dict(
        {"kept": {name: (1.0, 1.0), "best-step-3.ckpt": (1.0, 1.0), "best-step-2.ckpt": (0.5, 1.0)}}
    )
    assert list(callback.best_k_models) == [callback.best_model_path] == [str(tmp_path / "best-step-2.ckpt")]


@pytest.mark.parametrize("typed", ["task.monitor=null", "checkpoint.monitor=null trainer.limit_val_batches=0"])
def test_without_a_monitor_the_last_checkpoint_is_kept_and_tested(train, typed):
    report = train("run=a", "trainer.max_epochs=2", "optim.lr=0", *typed.split())
    assert (report["status"], report["monitor"], report["checkpoint"]) == ("done", None, "checkpoints/last.ckpt")
    assert [path.name for path in Path("runs/a/checkpoints").iterdir()] == ["last.ckpt"]
    assert ("val/acc" in report) == ("limit_val_batches=0" not in typed)
    assert report["test/count"] == 103
    assert "Test accuracy" in Path("runs/a/report.html").read_text()
    assert json.loads(Path("runs/a/report.json").read_text())["train/epochs"] == 2


def test_without_a_monitor_the_reports_validation_is_that_of_the_last_step(train):
    train("run=a", "trainer.max_epochs=2", "task.monitor=null")
    rows = [line.split(",") for line in Path("runs/a/metrics.csv").read_text().splitlines()]
    place = rows[0].index("val/loss")
    last = [row[place] for row in rows[1:] if row[place]][-1]
    assert json.loads(Path("runs/a/report.json").read_text())["val/loss"] == float(last)
