"""The trial before training: which networks and losses compute the same however a batch is divided, and what is named if not."""

# B batch

import copy
import re

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep import Task
from lockstep.training import dropout, invariance
from lockstep.training.losses import samples_at


class Mean(Task):
    def loss(self, output: Tensor, batch: dict) -> Tensor:
        return output.flatten(1).mean(1)


class Noisy(Mean):
    def loss(self, output: Tensor, batch: dict) -> Tensor:
        return super().loss(output, batch) + torch.rand(len(output))


class Dropping(Mean):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def loss(self, output: Tensor, batch: dict) -> Tensor:
        return super().loss(self.drop(output), batch)


class Residue(Mean):
    """A loss of rounding errors. Its scale stands for kernels that round differently for different numbers of samples."""

    def loss(self, output: Tensor, batch: dict) -> Tensor:
        return (output * (1 + 1e-7 * len(output)) - output).flatten(1).mean(1)


class Entries(nn.Module):
    def forward(self, rows: list[Tensor]) -> dict[str, list[dict[str, Tensor]]]:
        return {"all": [{"box": row * 2} for row in rows]}


class Layers(nn.Module):
    """What the networks below are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop, self.entries = nn.Linear(6, 6), nn.Linear(6, 6), nn.Dropout(0.5), Entries()
        self.numbers = np.random.default_rng(0)


class Functional(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.dropout(self.a(x), 0.5, self.training))


class OfNumpy(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * float(np.random.rand() > 0.001)


class OwnGenerator(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + float(self.numbers.random())


class Windows(Layers):
    """Three neighbours of each sample."""

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.a(x).repeat_interleave(3, 0)).view(len(x), 3, -1).mean(1)


class Lists(Layers):
    """A list with an entry for each sample, of lengths of their own, as detection has."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.drop(self.a(x))
        boxes = self.entries([row[: i + 1] for i, row in zip((x[:, 0] > 0).tolist(), rows, strict=True)])
        return torch.stack([each["box"].mean() for each in boxes["all"]])[:, None]


class Coupled(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.drop(y - y.mean(0))


class Counts(Functional):
    """Its buffer, like the vectors of spectral norm, changes in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


def layers(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), *more, nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 2))


def why_not(net: nn.Module, task: Task, *, exact: bool = False) -> str:
    torch.manual_seed(0)
    batch = {"input": torch.randn(4, 6), "target": torch.zeros(4), "index": torch.arange(4), "count": 4}
    halves = [{**samples_at(batch, part, 4), "count": 2} for part in (slice(0, 2), slice(2, 4))]
    with torch.random.fork_rng():
        return invariance.process_dependence(net, task, [[batch, *halves]] * 2, exact=exact).step


NETWORKS = [layers(), layers(nn.BatchNorm1d(6)), layers(nn.AlphaDropout(0.2)), Windows(), Lists()]
COVERED = [*((net, Mean()) for net in NETWORKS), (layers(), Dropping()), (layers(), Residue())]


@pytest.mark.parametrize(("net", "task"), COVERED, ids=lambda value: type(value).__name__)
def test_covered_networks_and_losses(net, task):
    assert why_not(net, task) == ""
    assert dropout.current is None
    assert not net._forward_hooks


DRAWS = "each process draws its own random numbers in "


@pytest.mark.parametrize(("net", "expected"), [
    (Functional(), rf"{DRAWS}Functional \(.*test_invariance.py:.*nn.Dropout"),
    (OfNumpy(), rf"{DRAWS}OfNumpy \("),
    (OwnGenerator(), r"OwnGenerator \(.*depends on its own random generator(?!.*exact.logical_ranks)"),  # nobody seeds it for a logical rank either
    (Coupled(), r"Coupled \(.*depends on the other samples"),
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_what_depends_on_the_processes_is_named(net, expected):
    assert re.search(expected, why := why_not(net, Mean())), why


@pytest.mark.parametrize("net", [Functional(), OfNumpy(), Coupled(), Counts()], ids=lambda net: type(net).__name__)
def test_what_logical_ranks_repeat_is_covered_there(net):
    """They are seeded, and start from the same buffers; a generator of the network's own is not."""
    assert why_not(net, Noisy(), exact=True) == ""
    assert "depends on its own random generator" in why_not(OwnGenerator(), Mean(), exact=True)


def test_random_numbers_of_the_loss_are_found():
    assert "random numbers in Noisy (" in why_not(layers(), Noisy())


def test_draws_are_seen_without_numbers():
    batch = torch.empty(2, 6, device="meta")
    for net, expected in ((layers(), True), (nn.Linear(6, 6), False), (Functional(), True)):
        with invariance.Draws() as draws:
            copy.deepcopy(net).to("meta")(batch)
        assert draws.any is expected


def test_generators_are_restored_after_an_error():
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), invariance.same_random_numbers(torch.device("cpu")):
        torch.rand(1)
        _ = 1 / 0
    assert torch.equal(torch.get_rng_state(), before)
