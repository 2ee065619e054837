"""The LightningModule of every task: figures sum up exactly, a batch in which nothing counts changes nothing, and outputs are cut by samples."""

from itertools import pairwise
from types import SimpleNamespace

import building
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric, MetricCollection, SumMetric

from lockstep import DataSet
from lockstep.extras.panels import shown
from lockstep.kit.task import Task
from lockstep.kit.tasks import Classification, Regression, Segmentation
from lockstep.strategies import SingleDevice, change_in_place
from lockstep.training.arithmetic import ExactClipping, StepArithmetic
from lockstep.training.losses import sample_at, samples_at
from lockstep.training.metrics import named_values
from lockstep.training.module import Means, call_own_train
from lockstep.training.optim import add_base


def untrained(task: type[Task], net: nn.Module) -> Task:
    """The module of a task, for evaluation."""
    classes = ["land", "sea"] if issubclass(task, Segmentation) else list("0123456789")
    return building.task(task, net, targets=["height"], classes=classes)


def module(task: type[Task] = Classification) -> Task:
    """Its network hands logits on."""
    return untrained(task, nn.Identity())


def samples(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = np.random.default_rng(seed)
    label_B = random.integers(0, 10, count)
    logits_BK = random.normal(size=(count, 10)) + 2 * np.eye(10)[label_B]
    return torch.tensor(logits_BK, dtype=torch.float32), torch.tensor(label_B)


def seen(module: Task, *batches: tuple[Tensor, Tensor]) -> Task:
    """After an evaluation of these batches."""
    for logits_BK, label_B in batches:
        module.validation_step({"input": logits_BK, "target": label_B, "index": torch.arange(len(label_B))}, 0)
    return module


def logged(module: Task) -> dict[str, float]:
    """What the end of the evaluation logs; the sums begin anew then."""
    found: dict[str, Tensor] = {}
    module.log = lambda name, value, **_: found.update({name: value})
    module.log_evaluation("test")
    return {name.removeprefix("test/"): value.item() for name, value in found.items()}


def plainly(logits_BK: Tensor, label_B: Tensor) -> dict[str, float]:
    """The same from the formulas, a sample at a time, in double precision."""
    pairs = [(z, int(y)) for z, y in zip(logits_BK.double().numpy(), label_B, strict=True)]
    losses = [float(np.log(np.exp(z - z.max()).sum()) + z.max() - z[y]) for z, y in pairs]
    hits = sum(int(z.argmax() == y) for z, y in pairs)
    return {"loss": sum(losses) / len(pairs), "acc": hits / len(pairs), "count": len(pairs)}


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(0, 300), max_size=12), seed=st.integers(0, 1000))
def test_the_figures_are_those_of_a_plain_computation_however_samples_are_split_into_batches(cuts, seed):
    """What an earlier evaluation saw does not count."""
    made, (logits_BK, label_B) = module(), samples(300, seed)
    logged(seen(made, samples(7)))
    places = sorted({0, *cuts, 300})
    batches = [(logits_BK[a:b], label_B[a:b]) for a, b in pairwise(places)]
    assert logged(seen(made, *batches)) == pytest.approx(plainly(logits_BK, label_B), rel=1e-6)


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="mps has no float64")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_in_float64_whatever_the_precision_of_the_weights(dtype):
    made = module().to(dtype)  # as Lightning does for precision bf16-true and 16-true
    made.on_validation_start()
    logits_BK, label_B = samples(3000)
    seen(made, *((logits_BK[i : i + 100].to(dtype), label_B[i : i + 100]) for i in range(0, 3000, 100)))
    assert made.measured("val")[0]["loss"][0].dtype == torch.float64
    assert logged(made) == pytest.approx(plainly(logits_BK.to(dtype).float(), label_B), rel=1e-5)
    errors = untrained(Regression, nn.Flatten()).to(dtype)
    errors.on_test_start()
    for error in (2.0**13, *[1.0] * 7):  # the sum of squares has 27 binary digits
        batch = {"input": torch.tensor([[error]]), "target": torch.zeros(1, 1), "index": torch.zeros(1)}
        errors.validation_step(batch, 0)
    assert errors.measured("val")[1]["rmse"].compute().item() == pytest.approx(((2.0**26 + 7) / 8) ** 0.5, rel=1e-12)


class Seen(Regression):
    """Metrics that convert their inputs, and a collection of several."""

    def metrics(self):
        return {"mean": MeanMetric(), "both": MetricCollection([MeanMetric(), SumMetric()])}

    def metric_inputs(self, output, batch):
        return (output,)

    def loss(self, output, batch):
        return output.flatten()


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="mps has no float64")
def test_a_metric_does_not_depend_on_how_the_samples_are_divided():
    value_B = torch.rand(10_000, 1, generator=torch.Generator().manual_seed(0)) + 1
    found = []
    for size in (1000, 77):
        made = untrained(Seen, nn.Flatten())
        made.on_validation_start()
        seen(made, *((part, torch.zeros(len(part), 1)) for part in value_B.split(size)))
        found.append(logged(made))
    mean, total = value_B.double().mean().item(), value_B.double().sum().item()
    exact = {"mean": mean, "both/MeanMetric": mean, "both/SumMetric": total}
    rounded = {name: torch.tensor(value).float().item() for name, value in exact.items()}
    assert [{name: each[name] for name in exact} for each in found] == [rounded, rounded]
    assert [*dict(made.named_children())] == ["net"]  # nor are metrics in checkpoints


class Frozen(nn.Module):
    """Keeps a part in evaluation mode, and something for an evaluation, as networks do in a `train` of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.kept = nn.BatchNorm1d(10), nn.BatchNorm1d(10), False

    def train(self, mode: bool = True) -> "Frozen":
        super().train(mode)
        self.body.eval()
        self.kept = not mode
        return self


def test_a_networks_own_train_is_called_before_training_and_after_each_validation():
    made = untrained(Classification, nn.Sequential(Frozen(), nn.BatchNorm1d(10)))
    net, made.trainer = made.net[0], SimpleNamespace(model=made)
    change_in_place(made, None, configured=True)
    made.__class__ = type("Sharded", (type(made),), {})  # as fsdp does
    call_own_train([(net, True)])  # as `build.module` does
    net.norm.eval()  # as callbacks=[freeze] does
    modes = [(True, False, False), (False, False, False), (True, False, False)]
    for change, expected in zip(
        (lambda: None, made.on_validation_model_eval, made.on_validation_model_train),
        modes,
        strict=True,
    ):
        change()
        assert (net.training, net.body.training, net.norm.training) == expected
        assert (net.kept, made.net[1].training) == (not expected[0], expected[0])


class Featured(Metric):
    """Has a network, as image metrics do."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.BatchNorm1d(10), nn.Linear(10, 1))
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, logits_BK: Tensor, label_B: Tensor) -> None:
        self.total += self.features(logits_BK).sum().detach()

    def compute(self) -> Tensor:
        return self.total


class Judged(Classification):
    def metrics(self) -> dict[str, Metric]:
        return {"items": Featured()}  # which is the name of a method of torch's ModuleDict, too


def test_a_metric_may_have_a_network_which_is_not_the_modules():
    made, (logits_BK, label_B) = module(Judged).to(torch.bfloat16), samples(12)
    network = made.measured("val")[1]["items"].features
    made.on_validation_start()
    assert (network[1].weight.dtype, made.measured("val")[1]["items"].total.dtype) == (torch.float32, torch.float64)
    seen(made, (logits_BK[:1], label_B[:1]), (logits_BK[1:], label_B[1:]))
    assert logged(made)["items"] == pytest.approx(network(logits_BK).sum().item(), rel=1e-5)
    assert not made.state_dict() and not list(made.parameters())


@pytest.mark.parametrize("count", [1, 2])
def test_a_batch_in_which_no_pixel_counts_gives_no_gradient(count):
    """In a step of one micro-batch, which is divided at once, and in one of two."""
    net, strategy = nn.Conv2d(1, 2, 1), SingleDevice()
    made = untrained(Segmentation, net)
    strategy.means, strategy._lightning_module = Means(), made
    progress = SimpleNamespace(current=SimpleNamespace(ready=count))
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress, batch_idx=count - 1))
    strategy.share = lambda: 1.0
    made.trainer = SimpleNamespace(
        accumulate_grad_batches=count, strategy=strategy, training=True, barebones=False, fit_loop=loop, num_training_batches=count
    )  # fmt: skip
    batch = {"input": torch.ones(2, 1, 3, 3), "target": torch.full((2, 3, 3), 255), "index": torch.arange(2)}
    loss = made.mean_loss(net(batch["input"]), batch)
    strategy.means.weigh(loss)
    loss.backward()
    strategy.post_backward(torch.zeros(()))
    assert [parameter.grad.abs().sum().item() for parameter in net.parameters()] == [0.0, 0.0]


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("fused", [True, False])
def test_scaled_gradients_are_clipped_as_they_are_unscaled(fused, algorithm):
    """16-mixed: Lightning unscales them before clipping, but not for fused optimizers, whose steps skip infinite ones unasked."""
    made, scaler = untrained(Regression, nn.Linear(2, 1)), torch.amp.GradScaler("cpu", init_scale=1024.0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    add_base(plugin, ExactClipping, arithmetic=StepArithmetic())
    twin = nn.Linear(2, 1)
    twin.load_state_dict(made.net.state_dict())
    optimizer = torch.optim.SGD(made.parameters(), lr=0.5, fused=fused)
    clip = {"norm": nn.utils.clip_grad_norm_, "value": nn.utils.clip_grad_value_}[algorithm]
    for x in (torch.tensor([3.0, 4.0]), torch.tensor([torch.inf, 1.0])):
        optimizer.zero_grad()
        scaler.scale(made.net(x)).backward()
        if not fused:
            scaler.unscale_(optimizer)
        plugin.clip_gradients(optimizer, 1.0, GradClipAlgorithmType(algorithm))
        scaler.step(optimizer)
        scaler.update()
        if x.isfinite().all():
            twin(x).backward()
            clip(twin.parameters(), 1.0)
            torch.optim.SGD(twin.parameters(), lr=0.5).step()
        for own, expected in zip(made.net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(own, expected)
    assert scaler.get_scale() == 512.0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_checkpoint_has_the_sums_of_all_processes_of_which_one_may_have_none(rank, monkeypatch):
    """The other processes would wait for one that does not take part."""
    monkeypatch.setattr("lockstep.training.module.all_gather_objects", lambda own: [{"train/loss": (3.0, 2.0)}, own])
    means, sums = Means(), {"train/loss": (1.0, 4.0), "train/l1": (5.0, 4.0)}
    assert means.collect(keeps=rank == 0) == {"train/loss": (3.0, 2.0)}
    means.train = dict(sums)
    total = {"train/loss": (4.0, 6.0), "train/l1": (5.0, 4.0)}
    assert (means.collect(keeps=rank == 0), means.train) == (total, total if rank == 0 else {})


def test_a_checkpoint_between_two_rows_changes_no_digit_of_the_loss(monkeypatch):
    """It adds up the processes' sums, which is another order of additions: in float32 the last digit differed."""
    losses = iter([2.0**24, 1.0, 1.0])
    made = module(Segmentation)
    monkeypatch.setattr(made, "loss", lambda *_: torch.tensor([next(losses)]))
    monkeypatch.setattr(made, "weight", lambda _: None)
    made.trainer = SimpleNamespace(
        training=True, accumulate_grad_batches=1, barebones=False,
        strategy=SimpleNamespace(means=(means := Means()), share=lambda: 1.0, arithmetic=StepArithmetic(), gathered=None),
    )  # fmt: skip
    for index in range(3):
        made.training_step({"input": torch.zeros(1, 2, 1, 1), "index": torch.zeros(1)}, index)
        means.collect(keeps=True)
    assert means.collect(keeps=True) == {"train/loss": (2.0**24 + 2, 3)}


def test_the_values_of_a_metric_are_named_by_what_the_task_says():
    names = module(Segmentation).value_names
    assert set(named_values("iou", torch.tensor([0.5, 0.25]), names)) == {"iou/land", "iou/sea"}
    assert set(named_values("matrix", torch.eye(2), names)) == {"matrix/0", "matrix/1", "matrix/2", "matrix/3"}
    nested = named_values("map", {"all": 1.0, "each": torch.ones(2), "none": torch.ones(0)}, names)
    assert set(nested) == {"map/all", "map/each/land", "map/each/sea"}


# --- Samples of a batch ---

B = 4


def rows(size: int, *more: int) -> torch.Tensor:
    return torch.arange(size).view(-1, *[1] * len(more)).expand(size, *more)


def test_a_sample_of_several_inputs_is_taken_out_of_a_batch_for_the_report():
    left_BT, right_BT = torch.arange(6).view(3, 2), torch.arange(12).view(3, 4)
    for inputs in ({"left": left_BT, "right": right_BT}, [left_BT, right_BT]):
        sample = sample_at({"input": inputs, "target": torch.arange(3), "file": ["a", "b", "c"]}, 1, 3)
        assert (sample["target"].item(), sample["file"], len(sample)) == (1, "b", 3)
        values = sample["input"].values() if isinstance(inputs, dict) else sample["input"]
        assert [value.tolist() for value in values] == [[2, 3], [4, 5, 6, 7]]
        assert shown(DataSet(), sample) == {}


def test_a_batch_may_hold_other_things_than_samples():
    batch = {"input": rows(B), "index": rows(B), "names": list("abcd"), "boxes": [rows(9)] * B, "of": {"x": rows(B)}, "anchors": rows(9), "views": [rows(B), rows(B)], "size": torch.Size((7, 9)), "count": 3}  # fmt: skip
    found = samples_at(batch, slice(3), B)
    assert [len(view) for view in found.pop("views")] == [3, 3]
    assert found.pop("size") == torch.Size((7, 9))
    sizes = {name: len(value) for name, value in found.items() if name not in ("count", "of")}
    assert sizes == {"input": 3, "index": 3, "names": 3, "boxes": 3, "anchors": 9}
    assert (len(found["boxes"][0]), len(found["of"]["x"]), found["count"]) == (9, 3, 3)
    assert samples_at(batch, [2, 0], B)["names"] == ["c", "a"]


class Apart(Classification):
    """A metric with inputs of its own."""

    def metrics(self) -> dict[str, Metric]:
        return {**super().metrics(), "largest": MeanMetric()}

    def inputs_by_metric(self, output: Tensor, batch: dict) -> dict[str, tuple]:
        return {"largest": (output.amax(1),)}


def test_a_metric_may_have_inputs_of_its_own():
    logits_BK, label_B = samples(50)
    found = logged(seen(module(Apart), (logits_BK, label_B)))
    assert found["largest"] == pytest.approx(logits_BK.amax(1).mean().item())
    assert found["acc"] == pytest.approx(plainly(logits_BK, label_B)["acc"])
