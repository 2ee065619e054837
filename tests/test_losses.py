"""Losses of weighted samples, and losses between samples: on several processes the step of one. What would change it is refused."""

import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import building
import numpy as np
import pytest
import thin_project
import torch
from in_process import rows, state
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep
from lockstep import build
from lockstep.config.checks import resolve
from lockstep.config.instantiate import create_data
from lockstep.config.settings import Settings
from lockstep.data.dataset import Batch
from lockstep.data.sampler import ComputedOrder
from lockstep.errors import UserError

pytestmark = pytest.mark.xdist_group("losses")

STEPS, BATCH = 4, 24
BETWEEN = "task._target_=near.Between"
TWO, SHARDED = ("strategy=ddp", "trainer.devices=2"), ("strategy=fsdp", "trainer.devices=2")
MIXED = ("augment=[mixup]",)
SETUPS = {"ddp": TWO, "fsdp": SHARDED, "mixed": (*TWO, *MIXED), "three": ("strategy=ddp", "trainer.devices=3")}


@pytest.fixture(scope="module")
def options(tmp_path_factory, mnist, cache) -> Iterator[list[str]]:
    root = thin_project.write(tmp_path_factory.mktemp("project"), **thin_project.package("near"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        data = f"data.root={mnist} data.cache_dir={cache} loader.batch_size={BATCH} loader.eval_batch_size=25 loader.limit_train=96"
        more = (
            "checkpoint.monitor=val/loss checkpoint.mode=min optim=sgd optim.momentum=0.5 optim.lr=0.02 model.width=8"
        )
        trainer = "trainer.log_every_n_steps=1 trainer.precision=32-true trainer.accelerator=cpu"
        yield f"{data} {more} trainer.max_steps={STEPS} {trainer}".split()
    sys.modules.pop("near", None)


def distance(run: str, expected: dict[str, Tensor]) -> float:
    """Of a run's weights from others, as a fraction of their norm."""
    ours, theirs = (
        torch.cat([value.double().flatten() for value in each.values()])
        for each in (state(f"{run}/checkpoints/last.ckpt")["state_dict"], expected)
    )
    return float((ours - theirs).norm() / theirs.norm())


def losses(run: str, name: str) -> list[float]:
    return [float(row[name]) for row in rows(run) if row[name]]


# --- Weighted samples: the step of a plain loop with sum(w * loss) / sum(w) of the global batch ---


def weighted_mean(net: nn.Module, batch: Batch) -> Tensor:
    weight_B = 0.5 * batch["target"].float()
    loss_B = F.cross_entropy(net(batch["input"]), batch["target"], reduction="none")
    return (weight_B * loss_B).sum() / weight_B.sum()


@pytest.fixture(scope="module")
def plain(options) -> tuple[dict[str, Tensor], list[float], float]:
    """Weights, losses and validation loss of a plain loop."""
    cfg = resolve(["task._target_=near.Weighted", *options])
    settings = Settings.of(cfg).with_auto_resolved(create_data(cfg.data, cfg.loader))
    build.seed(settings.seed)
    data = building.batches(settings)
    module = building.module(settings, data)
    net, found = module.net, []
    optimizer = module.optimizer(net.parameters())
    order, split = ComputedOrder(data.splits["train"].count), data.splits["train"]
    for step in range(STEPS):
        index_B = split.indices(order.at(np.arange(step * BATCH, (step + 1) * BATCH), cfg.seed, 0))
        loss = weighted_mean(net, data.augmented(data.raw("train", index_B), range(0), cfg.seed, 0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    indices = data.splits["val"].indices(np.arange(data.splits["val"].count))
    with torch.no_grad():
        val_loss = weighted_mean(net, data.evaluated.preprocess(data.raw("val", indices))).item()
    return net.state_dict(), found, val_loss


ACCUMULATED = ("trainer.accumulate_grad_batches=2",)
WEIGHTED = {"single": (), "accumulated": ACCUMULATED, "ddp_accumulated": (*TWO, *ACCUMULATED), "fsdp": SHARDED}


@pytest.mark.parametrize(
    "setup", [pytest.param(name, marks=[pytest.mark.slow] * (name != "fsdp")) for name in WEIGHTED]
)
def test_samples_weigh_alike_under_every_strategy(setup, options, plain, forked):
    run = f"weighted_{setup}"
    report = lockstep.train([f"run={run}", "task._target_=near.Weighted", *WEIGHTED[setup], *options])
    expected, train_losses, val_loss = plain
    assert distance(run, expected) < 1e-6
    assert losses(run, "train/loss") == pytest.approx(train_losses, rel=2e-6)
    assert report["val/loss"] == pytest.approx(val_loss, rel=1e-5)
    assert report["test/count"] == 103  # samples of weight 0 are counted as well


# --- Losses between samples ---


@pytest.fixture(scope="module")
def alone(options) -> Callable[..., str]:
    """Trains with one process, once for the same overrides; returns the name of the run."""

    @cache
    def train(*more: str) -> str:
        run = f"alone-{len(more)}"
        lockstep.train([f"run={run}", BETWEEN, *more, *options])
        return run

    return train


@pytest.mark.parametrize("setup", [pytest.param(name, marks=[pytest.mark.slow] * (name != "ddp")) for name in SETUPS])
def test_processes_find_the_weights_and_figures_of_one(setup, options, alone, forked):
    report = lockstep.train([f"run={setup}", BETWEEN, *SETUPS[setup], *options])
    single = alone(*MIXED) if setup == "mixed" else alone()
    assert distance(setup, state(f"{single}/checkpoints/last.ckpt")["state_dict"]) < 1e-6
    for name in ("train/loss", "val/loss", "test/loss"):
        assert losses(setup, name) == pytest.approx(losses(single, name), rel=2e-6)
    assert report["test/count"] == 103  # batches of 25 cannot be divided; the last one has 3


@pytest.mark.parametrize("whole", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_gathered_samples_may_be_divided_unevenly(whole, count, options, forked):
    """10, 10 and 4 samples in a step."""
    trainer = "trainer.max_epochs=3 trainer.accelerator=cpu trainer.precision=32-true trainer.log_every_n_steps=1"
    task = f"task=lightning_module task._target_=near.Own +task.whole={str(whole).lower()} data=none"
    given = f"{task} {trainer}".split()
    alone = f"alone{count}{whole}"
    lockstep.train([f"run={alone}", *given])
    lockstep.train([f"run=own{count}{whole}", *given, "strategy=ddp", f"trainer.devices={count}"])
    assert distance(f"own{count}{whole}", state(f"{alone}/checkpoints/last.ckpt")["state_dict"]) < 1e-6
    assert losses(f"own{count}{whole}", "train/loss") == pytest.approx(losses(alone, "train/loss"), rel=2e-6)


@pytest.mark.parametrize(("override", "told"), [
    ("trainer.accumulate_grad_batches=2", "set trainer.accumulate_grad_batches=1"),
    ("exact.logical_ranks=2", "Remove exact.logical_ranks"),
])  # fmt: skip
def test_what_divides_a_batch_is_refused(override, told, options):
    with pytest.raises(UserError, match=told):
        lockstep.train(["run=refused", BETWEEN, *options, override])
    assert not Path("runs/refused").exists()


@pytest.mark.slow
@pytest.mark.parametrize("more", [
    ("task._target_=near.Gathers", *TWO), ("task=classification", *SHARDED, "exact.logical_ranks=2"),
])  # fmt: skip
def test_what_gives_the_result_of_one_process_is_left_alone(more, options, forked):
    """A task that gathers a whole batch, and a strategy that gathers the network."""
    run = more[0].rpartition(".")[2].removeprefix("task=")
    assert lockstep.train([f"run={run}", *more, *options])["status"] == "done"
