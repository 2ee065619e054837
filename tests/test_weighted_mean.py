"""Samples of different weight: under every strategy, the step of a plain loop with sum(w * loss) / sum(w) of the global batch."""

import csv
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import thin_project
import torch
from torch import Tensor
from torch.nn import functional as F

import lockstep
from lockstep import build
from lockstep.checkpoints.weights import read
from lockstep.config.compose import compose_config
from lockstep.config.instantiate import create_data
from lockstep.config.settings import Settings
from lockstep.data.loaders import fetch
from lockstep.data.sampler import TrainBatches

pytestmark = pytest.mark.xdist_group("weighted_mean")

TASK = """from lockstep.tasks import Classification


class Weighted(Classification):
    '''High digits count more, and zeros not at all.'''

    def weight(self, batch):
        return 0.5 * batch["target"].float()
"""
STEPS, BATCH = 6, 48
SETUPS = {
    "single": [],
    "accumulated": ["trainer.accumulate_grad_batches=2"],
    "ddp": ["strategy=ddp", "trainer.devices=2"],
    "ddp_accumulated": ["strategy=ddp", "trainer.devices=2", "trainer.accumulate_grad_batches=2"],
    "fsdp": ["strategy=fsdp", "trainer.devices=2"],
}


@pytest.fixture(scope="module")
def options(tmp_path_factory, mnist, cache) -> Iterator[list[str]]:
    config = "defaults: [classification]\n_target_: weighing.Weighted\n"
    files = {"src/weighing/__init__.py": TASK, "configs/task/weighted.yaml": config}
    root = thin_project.write(tmp_path_factory.mktemp("project"), **files)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        yield [
            f"data.root={mnist}", f"data.cache_dir={cache}", f"data.batch_size={BATCH}", "data.eval_batch_size=20", "task=weighted",
            "checkpoint.monitor=val/loss", "checkpoint.mode=min", "model=basic_net", "model.dropout_conv=0", "model.dropout_fc=0",
            "optim=sgd", "optim.momentum=0.5", "optim.lr=0.02", f"trainer.max_steps={STEPS}", "trainer.log_every_n_steps=1",
            "trainer.precision=32-true", "trainer.accelerator=cpu",
        ]  # fmt: skip
    sys.modules.pop("weighing", None)


def weighted_mean(net: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    weight_B = 0.5 * batch["target"].float()
    loss_B = F.cross_entropy(net(batch["input"]), batch["target"], reduction="none")
    return (weight_B * loss_B).sum() / weight_B.sum()


@pytest.fixture(scope="module")
def plain(options) -> tuple[dict[str, Tensor], list[float], float]:
    """Weights, losses and validation loss of a plain loop."""
    cfg = compose_config("train", options)
    settings = Settings.of(cfg).decided(create_data(cfg.data))
    build.seed(settings)
    data = build.data(settings)
    module = build.workload(settings, data).module
    net, split, losses = module.net, data.train_split, []
    optimizer = module.make_optimizer(net.parameters())
    batches = iter(TrainBatches(split, batch=BATCH, seed=cfg.seed))
    for _ in range(STEPS):
        loss = weighted_mean(net, data.finished(fetch(data.dataset.train, next(batches)), training=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    indices = data.val_split.indices(torch.arange(data.val_split.count).numpy())
    with torch.no_grad():
        val_loss = weighted_mean(net, data.finished(fetch(data.dataset.train, indices), training=False)).item()
    return {f"net.{key}": value for key, value in net.state_dict().items()}, losses, val_loss


def vector(state: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.double().flatten() for value in state.values()])


@pytest.mark.parametrize("setup", [pytest.param(name, marks=[pytest.mark.slow] * (name != "fsdp")) for name in SETUPS])
def test_samples_weigh_alike_under_every_strategy(setup, options, plain, forked):
    report = lockstep.train([f"run={setup}", *SETUPS[setup], *options])
    state, (weights, expected, val_loss) = read(Path("runs", setup, "checkpoints/last.ckpt")).state_dict, plain
    assert list(state) == list(weights)
    assert float((vector(state) - vector(weights)).norm() / vector(weights).norm()) < 1e-6
    with Path("runs", setup, "metrics.csv").open() as file:
        losses = [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]
    assert losses == pytest.approx(expected, rel=2e-6)
    assert report["val/loss"] == pytest.approx(val_loss, rel=1e-5)
    assert report["test/count"] == 103  # samples of weight 0 are counted as well
