"""Losses of weighted samples, and losses between samples: on several processes the step of one. What would change it is refused."""

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import thin_project
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import lockstep
from lockstep import build
from lockstep.checkpoints.weights import read
from lockstep.config.compose import compose_config
from lockstep.config.instantiate import create_data
from lockstep.config.settings import Settings
from lockstep.data.dataset import Batch
from lockstep.data.loaders import fetch
from lockstep.data.sampler import TrainBatches
from lockstep.errors import RunFailed, UserError
from lockstep.training.losses import whole_batch

pytestmark = pytest.mark.xdist_group("losses")

TASK = """import torch
from torch import distributed
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F

from lockstep.tasks import Classification


class Weighted(Classification):
    '''High digits count more, and zeros not at all.'''

    def weight(self, batch):
        return 0.5 * batch["target"].float()


class Between(Classification):
    '''Cross-entropy, and samples of a class closer to each other than others are; high digits count more.'''

    between_samples = True

    def outputs(self, net, batch):
        batch["rows"] = list(batch["index"].split(1))
        logits_BK = net(batch["input"])
        return {"logits": logits_BK, "more": [logits_BK.mean(1, keepdim=True)]}

    def loss(self, output, batch):
        assert len(batch["input"]) == len(batch["index"]) == batch["count"] == len(output["logits"])
        if "rows" in batch and not batch["index"].is_meta:
            assert torch.equal(torch.cat(batch["rows"]), batch["index"])  # a list of tensors
        target_N, z_NK = batch["target"], F.normalize(output["logits"] + output["more"][0], dim=1)
        same_NN = (target_N[:, None] == target_N).float()
        near_NN = (z_NK @ z_NK.T / 0.2).log_softmax(1)
        apart_N = -(same_NN * near_NN).sum(1) / same_NN.sum(1)
        place_N = torch.arange(len(target_N), device=target_N.device) / len(target_N)  # the order matters
        return F.cross_entropy(output["logits"], target_N, reduction="none") + (0.5 + place_N) * apart_N

    def weight(self, batch):
        return 0.5 + 0.1 * batch["target"].float()

    def metric_inputs(self, output, batch):
        return output["logits"], batch["target"]

    def predictions(self, output):
        return super().predictions(output["logits"])

    def describe(self, output, batch):
        return super().describe(output["logits"], batch)


class Ragged(Between):
    def outputs(self, net, batch):
        return {**super().outputs(net, batch), "boxes": [torch.ones(1 + i) for i in range(len(batch["index"]))]}


class Gathers(Classification):
    '''Communicates by itself, and does not say so.'''

    def loss(self, output, batch):
        if distributed.is_initialized() and torch.is_grad_enabled():
            output = output + 0 * torch.cat(all_gather(output)).mean()
        return super().loss(output, batch)


class GathersOutputs(Classification):
    def outputs(self, net, batch):
        logits_BK = net(batch["input"])
        if distributed.is_initialized():
            distributed.all_reduce(logits_BK.detach().clone())
        return logits_BK
"""
STEPS, BATCH = 4, 24
TWO, SHARDED = ("strategy=ddp", "trainer.devices=2"), ("strategy=fsdp", "trainer.devices=2")
MIXED = ("augment=[mixup]",)
SETUPS = {"ddp": TWO, "fsdp": SHARDED, "mixed": (*TWO, *MIXED), "three": ("strategy=ddp", "trainer.devices=3")}


@pytest.fixture(scope="module")
def options(tmp_path_factory, mnist, cache) -> Iterator[list[str]]:
    names = {
        "weighted": "Weighted",
        "between": "Between",
        "ragged": "Ragged",
        "gathers": "Gathers",
        "outputs": "GathersOutputs",
    }
    tasks = {f"configs/task/{k}.yaml": f"defaults: [classification]\n_target_: near.{v}\n" for k, v in names.items()}
    root = thin_project.write(tmp_path_factory.mktemp("project"), **{"src/near/__init__.py": TASK, **tasks})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        yield [
            f"data.root={mnist}", f"data.cache_dir={cache}", f"data.batch_size={BATCH}", "data.eval_batch_size=24", "data.limit_train=96",
            "checkpoint.monitor=val/loss", "checkpoint.mode=min", "optim=sgd", "optim.momentum=0.5", "optim.lr=0.02",
            f"trainer.max_steps={STEPS}", "trainer.log_every_n_steps=1", "trainer.precision=32-true", "trainer.accelerator=cpu", "model.width=8",
        ]  # fmt: skip
    sys.modules.pop("near", None)


def weights(run: str) -> Tensor:
    return vector(read(Path("runs", run, "checkpoints/last.ckpt")).state_dict)


def vector(state: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.double().flatten() for value in state.values()])


def losses(run: str, name: str) -> list[float]:
    with Path("runs", run, "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row[name]]


# --- Weighted samples: the step of a plain loop with sum(w * loss) / sum(w) of the global batch ---


def weighted_mean(net: nn.Module, batch: Batch) -> Tensor:
    weight_B = 0.5 * batch["target"].float()
    loss_B = F.cross_entropy(net(batch["input"]), batch["target"], reduction="none")
    return (weight_B * loss_B).sum() / weight_B.sum()


@pytest.fixture(scope="module")
def plain(options) -> tuple[Tensor, list[float], float]:
    """Weights, losses and validation loss of a plain loop."""
    cfg = compose_config("train", ["task=weighted", *options])
    settings = Settings.of(cfg).decided(create_data(cfg.data))
    build.seed(settings)
    data = build.data(settings)
    module = build.workload(settings, data).module
    net, split, found = module.net, data.train_split, []
    optimizer = module.make_optimizer(net.parameters())
    batches = iter(TrainBatches(split, batch=BATCH, seed=cfg.seed))
    for _ in range(STEPS):
        loss = weighted_mean(net, data.finished(fetch(data.dataset.train, next(batches)), training=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    indices = data.val_split.indices(torch.arange(data.val_split.count).numpy())
    with torch.no_grad():
        val_loss = weighted_mean(net, data.finished(fetch(data.dataset.train, indices), training=False)).item()
    return vector(net.state_dict()), found, val_loss


ACCUMULATED = ("trainer.accumulate_grad_batches=2",)
WEIGHTED = {"single": (), "accumulated": ACCUMULATED, "ddp_accumulated": (*TWO, *ACCUMULATED), "fsdp": SHARDED}


@pytest.mark.parametrize(
    "setup", [pytest.param(name, marks=[pytest.mark.slow] * (name != "fsdp")) for name in WEIGHTED]
)
def test_samples_weigh_alike_under_every_strategy(setup, options, plain, forked):
    run = f"weighted_{setup}"
    report, (expected, train_losses, val_loss) = (
        lockstep.train([f"run={run}", "task=weighted", *WEIGHTED[setup], *options]),
        plain,
    )
    assert float((weights(run) - expected).norm() / expected.norm()) < 1e-6
    assert losses(run, "train/loss") == pytest.approx(train_losses, rel=2e-6)
    assert report["val/loss"] == pytest.approx(val_loss, rel=1e-5)
    assert report["test/count"] == 103  # samples of weight 0 are counted as well


# --- Losses between samples ---


@pytest.fixture(scope="module")
def alone(options) -> dict[tuple[str, ...], str]:
    """The runs with one process, by what they add."""
    for run, more in {"alone": (), "alone_mixed": MIXED}.items():
        lockstep.train([f"run={run}", "task=between", *more, *options])
    return {(): "alone", MIXED: "alone_mixed"}


@pytest.mark.parametrize("setup", [pytest.param(name, marks=[pytest.mark.slow] * (name != "ddp")) for name in SETUPS])
def test_processes_find_the_weights_and_figures_of_one(setup, options, alone, forked):
    more = SETUPS[setup]
    report = lockstep.train([f"run={setup}", "task=between", *more, *options])
    single = alone[MIXED if more[-1:] == MIXED else ()]
    assert float((weights(setup) - weights(single)).norm() / weights(single).norm()) < 1e-6
    for name in ("train/loss", "val/loss", "test/loss"):
        assert losses(setup, name) == pytest.approx(losses(single, name), rel=2e-6)
    assert report["test/count"] == 103  # the last batch has 7 samples, all of them the first process's


def whole_of_two(monkeypatch, output: Any, batch: Batch) -> tuple[Any, Batch]:
    """The outputs and the batch of two processes that have the same ones, in this process."""

    def exchange(every: list, own: list) -> None:
        assert {item.device.type for item in own if isinstance(item, Tensor)} <= {"cpu"}
        every[:] = [own, own]

    def gather(parts: list[Tensor], own: Tensor) -> None:
        for part in parts:
            part.copy_(own)

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", exchange)
    monkeypatch.setattr(torch.distributed, "all_gather", gather)
    task, trainer = SimpleNamespace(between_samples=True), SimpleNamespace(global_rank=0, world_size=2)
    return whole_batch(task, output, batch, trainer)


def test_what_a_batch_holds_of_each_sample_is_gathered_wherever_it_is(monkeypatch):
    """A list of tensors over the CPU: otherwise it would arrive on the sender's GPU. Here the GPU has no values."""
    with FakeTensorMode():
        index = torch.arange(2, device="cuda")
        boxes = [torch.ones(1, 4, device="cuda"), torch.zeros(3, 4, device="cuda")]
        more = {"boxes": boxes, "texts": ("a", "b"), "views": (index, index), "scale": 2.0}
        outputs = {"logits": (torch.ones(2, 3, device="cuda"), torch.ones(2, device="cuda"))}
        output, whole = whole_of_two(monkeypatch, outputs, {"index": index, "more": more, "count": 2})
    found = whole["more"]
    assert [(box.device.type, *box.shape) for box in found["boxes"]] == [("cuda", 1, 4), ("cuda", 3, 4)] * 2
    assert (found["texts"], found["scale"], whole["count"]) == (["a", "b"] * 2, 2.0, 4)
    assert [len(value) for value in (*found["views"], *output["logits"])] == [4] * 4


@pytest.mark.parametrize(("output", "told"), [
    ({"boxes": [torch.ones(2), torch.ones(2)]}, r"output\['boxes'\] has 2 items in a batch of 2"),
    ((torch.ones(2), torch.ones(2), torch.ones(3)), r"output\[2\] has the shape \(3,\)"),
])  # fmt: skip
def test_outputs_that_cannot_be_gathered_are_named(output, told, monkeypatch):
    with pytest.raises(UserError, match=told):
        whole_of_two(monkeypatch, output, {"index": torch.arange(2), "count": 2})


REFUSED = {
    "trainer.accumulate_grad_batches=2": "divides the global batch into micro-batches",
    "trainer.accumulate_grad_batches=auto": "Set trainer.accumulate_grad_batches=1",
    "exact.logical_ranks=2": "exact.logical_ranks=2 divides the global batch into logical ranks",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_divides_a_batch_is_refused(override, options):
    with pytest.raises(UserError) as refused:
        lockstep.train(["run=refused", "task=between", *options, override])
    assert REFUSED[override] in str(refused.value)
    assert not Path("runs/refused").exists()


def refused_by_two(capfd, *overrides: str) -> str:
    """The message of processes that were started, which leave no folder."""
    with pytest.raises(RunFailed) as refused:
        lockstep.train(["run=refused", *overrides])
    assert refused.value.exit_code == 2
    assert not Path("runs/refused").exists()
    return capfd.readouterr().err


def test_evaluation_batches_are_those_of_one_process_or_refused(options):
    cfg = compose_config("train", ["run=refused", "task=between", *TWO, *options, "data.eval_batch_size=25"])
    settings = Settings.of(cfg).decided(create_data(cfg.data))
    with pytest.raises(UserError, match=r"Set data\.eval_batch_size=24\."):
        build.workload(settings, build.data(settings))


@pytest.mark.slow
def test_an_output_without_a_row_per_sample_is_refused(options, forked, capfd):
    assert "output['boxes'] has 12 items in a batch of 12" in refused_by_two(capfd, "task=ragged", *TWO, *options)


@pytest.mark.parametrize(
    ("task", "more"),
    [
        ("gathers", (*TWO, "exact.logical_ranks=2")),
        pytest.param("gathers", (*TWO, "trainer.accumulate_grad_batches=2"), marks=pytest.mark.slow),
        pytest.param("outputs", (*SHARDED, "trainer.accumulate_grad_batches=2"), marks=pytest.mark.slow),
    ],
)
def test_a_task_that_communicates_unannounced_is_refused_where_batches_are_divided(task, more, options, forked, capfd):
    said = refused_by_two(capfd, f"task={task}", *options, *more)
    assert f"{more[-1]} divides each process's samples" in said
    assert "`between_samples = True`" in said


@pytest.mark.slow
@pytest.mark.parametrize("more", [("task=gathers", *TWO), ("task=classification", *SHARDED, "exact.logical_ranks=2")])
def test_what_gives_the_result_of_one_process_is_left_alone(more, options, forked):
    """A task that gathers a whole batch, and a strategy that gathers the network."""
    assert lockstep.train([f"run={more[0].partition('=')[2]}", *more, *options])["status"] == "done"
