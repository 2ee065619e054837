"""What callbacks say and compute, in short real runs."""

import itertools
import re

import pytest
import torch

import lockstep
from lockstep.callbacks import Throughput, progress
from lockstep.callbacks.step_seed import step_seed


@pytest.fixture
def train(tmp_path, mnist, cache, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = [f"data.root={mnist}", f"data.cache_dir={cache}", "data.batch_size=48", "trainer.accelerator=cpu"]
    return lambda *overrides: lockstep.train([*base, *overrides])


def test_each_step_and_rank_has_its_own_seed_and_always_the_same():
    seeds = {step_seed(*place) for place in itertools.product((0, 1), range(500), range(4))}
    assert len(seeds) == 4000
    assert step_seed(0, 3, 1) == step_seed(0, 3, 1)
    torch.manual_seed(max(seeds))  # torch takes them


def test_without_a_terminal_a_line_tells_loss_speed_and_the_time_left(train, monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY_S", -1.0)
    train("trainer.log_every_n_steps=6", "trainer.max_epochs=2")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    assert [line.split(" · ")[:2] for line in lines] == [
        [f"epoch {e}", f"step {s}/24"] for e, s in ((1, 6), (1, 12), (2, 18), (2, 24))
    ]
    for line in lines:
        assert re.search(r"\d:\d\d left · loss \d\.\d{4} · images/s [\d,]+", line)
    assert "val/acc" in lines[-1]


def test_no_bar_no_line(train, monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY_S", -1.0)
    train("trainer.log_every_n_steps=6", "trainer.enable_progress_bar=false")
    assert "left" not in capsys.readouterr().out


def test_speed_is_all_images_over_the_time_of_training_without_the_first_window():
    throughput = Throughput()
    throughput.windows = [(100, 50.0), (300, 2.0), (500, 2.0)]
    assert throughput.images_per_s == 200.0
    throughput.windows = [(100, 50.0)]
    assert throughput.images_per_s == 2.0
    throughput.windows = []
    assert throughput.images_per_s is None


def test_images_are_counted_over_accumulation_and_epochs(train, monkeypatch):
    seen = []
    monkeypatch.setattr(Throughput, "on_fit_end", lambda self, *_: seen.append(self.windows), raising=False)
    train("trainer.log_every_n_steps=5", "trainer.accumulate_grad_batches=2", "trainer.max_epochs=2")
    (windows,) = seen
    assert [images for images, _ in windows] == [240, 240, 96, 144, 240, 192]
    assert all(seconds > 0 for _, seconds in windows)
