"""What callbacks say and compute, in short real runs."""

import itertools
import random
import re
import time
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningModule
from shipped_data import divided
from torch import nn
from torch.distributed import HashStore
from torch.utils.data import DataLoader

from lockstep.callbacks import EMA, Throughput, stopping
from lockstep.callbacks.step_seed import draw_for_samples
from lockstep.callbacks.stopping import RankAgreement, Timer
from lockstep.data.sampler import ComputedOrder
from lockstep.errors import TrainingFailed
from lockstep.machine import process
from lockstep.training.seeds import derive_seed, seed_generators


@pytest.mark.parametrize(("windows", "images_per_s", "waited"), [
    ([(100, 50.0, 40.0), (300, 2.0, 0.1), (500, 2.0, 0.3)], 200.0, pytest.approx(0.1)),
    ([(100, 50.0, 5.0)], 2.0, 0.1),
    ([], None, None),
])  # fmt: skip
def test_speed_is_all_images_over_the_time_of_training_without_the_first_window(windows, images_per_s, waited):
    throughput = Throughput()
    throughput.unit, throughput.windows, throughput.first_step_s = "images", windows, 48.0
    throughput.flops_per_sample = 3.0
    speed = {"train/images_per_s": images_per_s, "train/data_wait_share": waited, "train/first_step_s": 48.0}
    speed["train/flops_per_s"] = images_per_s and 3 * images_per_s
    assert throughput.report_metrics() == speed


def test_images_are_counted_over_accumulation_and_epochs_and_the_first_line_says_what_is_trained(
    train, monkeypatch, capsys
):
    seen = []
    monkeypatch.setattr(Throughput, "on_fit_end", lambda self, *_: seen.append(self.windows), raising=False)
    train("run=a", "trainer.log_every_n_steps=5", "trainer.accumulate_grad_batches=2", "trainer.max_epochs=2")
    (windows,) = seen
    assert [images for images, *_ in windows] == [240, 240, 96, 144, 240, 192]
    assert all(seconds > waited_s > 0 for _, seconds, waited_s in windows)
    told = r"a: basic_net \([\d,]+ parameters\) · mnist from disk \(576 train, 64 val, 103 test\) · single, 1 process on cpu · .* · 24 steps"
    assert re.search(told, capsys.readouterr().out)


def trainer_at(step: int, **more: object) -> SimpleNamespace:
    return SimpleNamespace(
        global_step=step, accumulate_grad_batches=1, num_training_batches=1000, is_last_batch=False,
        lightning_module=SimpleNamespace(automatic_optimization=True), **more,
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_idx=step - 1)),
    )  # fmt: skip


@pytest.mark.parametrize(("warmup", "decays"), [(True, [2 / 11, 3 / 12, 4 / 13, 5 / 14]), (False, [0.4] * 4)])
def test_the_average_follows_its_definition(warmup, decays):
    module, ema = nn.BatchNorm1d(3), EMA(decay=0.4, update_every_n_steps=2, warmup=warmup)
    expected, numbers = None, iter(decays)
    for step in range(1, 10):
        module.weight.data = torch.arange(3) + float(step**2)
        module.running_mean.fill_(step)
        module.num_batches_tracked.fill_(step)
        ema.on_train_batch_end(trainer_at(step), module)
        if step % 2:  # the first step, the third, ...
            now = torch.cat([module.weight.detach(), module.running_mean]).double()
            expected = now if expected is None else torch.lerp(now, expected, next(numbers))
    before, module.tied = module.weight.clone(), module.weight  # a tied weight is swapped once
    ema.swap(None, module)
    assert torch.cat([module.tied.detach(), module.running_mean]).tolist() == pytest.approx(expected.tolist(), rel=1e-6)
    assert int(module.num_batches_tracked) == 9
    ema.swap(None, module)
    assert torch.equal(module.weight, before)


def test_the_time_limit_asks_rank_0_once_a_second_and_all_ranks_at_the_same_step(monkeypatch):
    """The clock of rank 1 is an hour ahead: rank 0 decides."""
    clock, stopped = SimpleNamespace(now_s=0.0), []
    monkeypatch.setattr(time, "monotonic", lambda: clock.now_s)
    monkeypatch.setattr(process, "store", HashStore())
    for rank in (0, 1):
        monkeypatch.setattr(stopping, "polls", looks := itertools.count())
        trainer = trainer_at(0, strategy=Mock(), should_stop=False, world_size=2, global_rank=rank)
        trainer.strategy.broadcast = lambda over: over
        timer, clock.now_s = Timer({"minutes": 1}), 0.0
        timer.on_train_start(trainer, None)
        clock.now_s += rank * 3600.0
        while not trainer.should_stop:
            clock.now_s += 0.1
            trainer.global_step += 1
            timer.on_train_batch_end(trainer)
        stopped.append((trainer.global_step, next(looks)))
    assert stopped[0] == stopped[1]
    assert 600 <= stopped[0][0] < 615 and stopped[0][1] < 70


def test_what_a_step_draws_depends_on_its_seed_alone_and_each_step_and_rank_has_its_own():
    def draw(seed: int) -> tuple[float, float, float]:
        seed_generators(seed, "cpu")
        return random.random(), np.random.rand(), torch.rand(1).item()

    seeds = {derive_seed(*place) for place in itertools.product((0, 1), range(500), range(4))}
    assert len(seeds) == 4000
    largest = max(seeds)  # torch takes it
    first, other = draw(largest), draw(7)
    assert other != first == draw(largest)


def test_a_decorated_hook_draws_for_samples_once_per_trainer():
    class Decorated(LightningModule):
        @torch.no_grad()
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch, dataloader_idx, torch.is_grad_enabled()

    module, first, second = Decorated(), Mock(), Mock()
    for trainer in (first, second):
        draw_for_samples(module, "on_after_batch_transfer", trainer)
    assert module.on_after_batch_transfer("batch", 1) == ("batch", 1, False)
    assert not first.strategy.seeds.transfer.called
    second.strategy.seeds.transfer.assert_called_once_with("on_after_batch_transfer")


def test_processes_that_would_compute_differently_end_and_say_so():
    trainer = Mock(global_rank=1)
    trainer.strategy.broadcast.return_value = {"computes in precision": "bf16-mixed"}
    RankAgreement({"computes in precision": "bf16-mixed"}).setup(trainer, None, "fit")
    with pytest.raises(
        TrainingFailed, match="rank 1 computes in precision 32-true, but rank 0 computes in precision bf16-mixed"
    ):
        RankAgreement({"computes in precision": "32-true"}).setup(trainer, None, "fit")


# --- The rows of the global batch that a process has masks for are those of the samples that it gets ---


@settings(deadline=None)
@given(
    world=st.integers(1, 4), accumulate=st.integers(1, 4), share=st.integers(1, 3), steps=st.integers(1, 3),
    contiguous=st.booleans(),
)  # fmt: skip
def test_rows_are_the_places_of_a_processs_samples_in_the_batches_of_one_process(
    world, accumulate, share, steps, contiguous
):
    batch = world * accumulate * share
    loader = DataLoader(torch.arange(batch * steps), batch, sampler=ComputedOrder(batch * steps), drop_last=True)
    whole = [samples for samples, _ in divided(loader, seed=5)]
    assert len(whole) == steps
    for rank in range(world):
        division = {"rank": rank, "world": world, "accumulate": accumulate, "contiguous": contiguous}
        for batch_idx, (samples, info) in enumerate(divided(loader, seed=5, **division)):
            of_step = whole[batch_idx // accumulate]
            assert of_step[info.rows.start : info.rows.stop].tolist() == samples.tolist()
