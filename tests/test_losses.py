"""Losses of weighted samples, and losses between samples: on several processes the step of one. What would change it is refused."""

import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import building
import numpy as np
import pytest
import thin_project
import torch
from in_process import rows, state
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import lockstep
from lockstep import build
from lockstep.config.checks import resolve
from lockstep.config.instantiate import create_data
from lockstep.config.settings import Settings
from lockstep.data.dataset import Batch
from lockstep.data.sampler import ComputedOrder
from lockstep.errors import RunFailed, UserError
from lockstep.training.losses import join_global_batch

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
        yield [
            f"data.root={mnist}", f"data.cache_dir={cache}", f"loader.batch_size={BATCH}", "loader.eval_batch_size=25", "loader.limit_train=96",
            "checkpoint.monitor=val/loss", "checkpoint.mode=min", "optim=sgd", "optim.momentum=0.5", "optim.lr=0.02",
            f"trainer.max_steps={STEPS}", "trainer.log_every_n_steps=1", "trainer.precision=32-true", "trainer.accelerator=cpu", "model.width=8",
        ]  # fmt: skip
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
    optimizer = module.parts.optimizer(net.parameters())
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
        val_loss = weighted_mean(net, data.preprocessed(data.raw("val", indices))).item()
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


@pytest.fixture
def whole_of_two(monkeypatch):
    """The outputs and the batch of two processes that have the same ones, in this process."""

    def exchange(every: list, own: list) -> None:
        assert {item.device.type for item in own if isinstance(item, Tensor)} <= {"cpu"}
        every[:] = [own, own]

    def gather(parts: list[Tensor], own: Tensor) -> None:
        for part in parts:
            part.copy_(own)

    replaced = {"is_initialized": lambda: True, "get_world_size": lambda: 2, "all_gather_object": exchange}
    for name, value in {**replaced, "all_gather": gather}.items():
        monkeypatch.setattr(torch.distributed, name, value)
    strategy = SimpleNamespace(compares_batches=False)
    trainer = SimpleNamespace(global_rank=0, world_size=2, strategy=strategy)
    task = SimpleNamespace(between_samples=True, training=True, trainer=trainer)
    return lambda output, batch: join_global_batch(task, output, batch)


def test_what_a_batch_holds_of_each_sample_is_gathered_wherever_it_is(whole_of_two):
    """A list of tensors over the CPU: otherwise it would arrive on the sender's GPU. Here the GPU has no values."""
    with FakeTensorMode():
        index = torch.arange(2, device="cuda")
        boxes = [torch.ones(1, 4, device="cuda"), torch.zeros(3, 4, device="cuda")]
        more = {"boxes": boxes, "texts": ("a", "b"), "views": (index, index), "scale": 2.0}
        outputs = {"logits": (torch.ones(2, 3, device="cuda"), torch.ones(2, device="cuda"))}
        output, whole = whole_of_two(outputs, {"index": index, "more": more})
    found = whole["more"]
    assert [(box.device.type, *box.shape) for box in found["boxes"]] == [("cuda", 1, 4), ("cuda", 3, 4)] * 2
    assert (found["texts"], found["scale"]) == (["a", "b"] * 2, 2.0)
    assert [len(value) for value in (*found["views"], *output["logits"])] == [4] * 4
    with pytest.raises(UserError, match=r"output\[2\] has the shape \(3,\)"):
        whole_of_two((torch.ones(2), torch.ones(2), torch.ones(3)), {"index": torch.arange(2)})


@pytest.mark.parametrize(("override", "told"), [
    ("trainer.accumulate_grad_batches=2", "Set trainer.accumulate_grad_batches=1"),
    ("exact.logical_ranks=2", "exact.logical_ranks=2 divides the global batch into logical ranks"),
])  # fmt: skip
def test_what_divides_a_batch_is_refused(override, told, options):
    with pytest.raises(UserError, match=told):
        lockstep.train(["run=refused", BETWEEN, *options, override])
    assert not Path("runs/refused").exists()


@pytest.mark.slow
def test_outputs_without_a_row_per_sample_are_refused(options, forked, capfd):
    with pytest.raises(RunFailed) as refused:
        lockstep.train(["run=refused", "task._target_=near.Ragged", *options, *TWO])
    assert refused.value.exit_code == 2
    assert not Path("runs/refused").exists()
    assert "output['boxes'] has 13 items in a batch of 13" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("more", [
    ("task._target_=near.Gathers", *TWO), ("task=classification", *SHARDED, "exact.logical_ranks=2"),
])  # fmt: skip
def test_what_gives_the_result_of_one_process_is_left_alone(more, options, forked):
    """A task that gathers a whole batch, and a strategy that gathers the network."""
    run = more[0].rpartition(".")[2].removeprefix("task=")
    assert lockstep.train([f"run={run}", *more, *options])["status"] == "done"
