"""The learning-rate range test: the curve of a loss of known shape, and real runs."""

import csv
import itertools
import math
import sys
from pathlib import Path

import lr_range
import pytest

from lockstep.errors import UserError


def test_the_suggestion_lies_where_a_known_loss_falls_fastest():
    rate = lr_range.rates(1e-6, 1.0, 200)
    assert rate[0] == pytest.approx(1e-6) and rate[-1] < 1.0
    assert all(b / a == pytest.approx(rate[1] / rate[0]) for a, b in itertools.pairwise(rate))
    loss = [1 - 1 / (1 + math.exp(-3 * (math.log10(x) + 3))) + (10 * max(0.0, math.log10(x) + 1)) ** 2 for x in rate]
    steepest, smallest = lr_range.suggestion(rate, loss)
    assert steepest == pytest.approx(1e-3, rel=0.1) and 0.05 < smallest < 0.2


def test_a_loss_that_diverges_cuts_the_curve():
    assert lr_range.smoothed([2.0] * 5 + [100.0] * 5) == pytest.approx([2.0] * 5)
    assert len(lr_range.smoothed([1.0, 1.0, math.nan, 1.0])) == 2
    with pytest.raises(UserError, match="--low"):
        lr_range.suggestion([1e-3, 1e-2], [1.0, 1.0])


def test_bounds_that_make_no_sense_are_refused(monkeypatch):
    for given, told in (("--low 1 --high 0.1", "below --high"), ("--steps 3", "at least 10")):
        monkeypatch.setattr(sys, "argv", ["lr_range.py", *given.split()])
        with pytest.raises(UserError, match=told):
            lr_range.main()


@pytest.mark.parametrize(
    "strategy", ["single", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "fsdp", "dp"))]
)
def test_a_range_of_rates_is_trained_and_drawn(strategy, tmp_path, mnist, cache, monkeypatch, capsys, forked):
    monkeypatch.chdir(tmp_path)
    own = ["schedule=cosine", "++schedule.warmup_steps=100", "trainer.max_epochs=1"]  # keys that the test sets itself
    devices = ["trainer.devices=2"] if strategy in ("ddp", "fsdp") else []
    given = [f"data.root={mnist}", f"data.cache_dir={cache}", "loader.batch_size=16", "run=a", "runs_dir=elsewhere"]
    length = ["--steps", "20", "--high", "0.1"]
    options = [*given, *own, "trainer.accelerator=cpu", f"strategy={strategy}", *devices, *length]
    monkeypatch.setattr(sys, "argv", ["lr_range.py", *options])
    lr_range.main()
    out = capsys.readouterr().out
    assert "optim.lr=" in out and f"without {' '.join(own)}, which" in out
    folder = Path("elsewhere/a")
    assert "<svg" in (folder / "lr_range.html").read_text()
    with (folder / "metrics.csv").open() as file:
        assert len([row for row in csv.DictReader(file) if row["train/loss"]]) == 20
