"""Evaluation figures are those of all samples at once, however they come in."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lockstep.tasks import Classification
from lockstep.training.metrics import MeanLoss
from lockstep.training.module import TaskModule

FLOAT64 = pytest.mark.skipif(torch.backends.mps.is_available(), reason="mps has no float64")


def module() -> TaskModule:
    """Its network hands logits on."""
    task, never = Classification(), pytest.fail
    task.bind({"classes": list("0123456789")})
    return TaskModule(
        nn.Identity(),
        task,
        optimizer=never,
        schedule=never,
        parallelize=never,
        metrics=task.metrics(),
        network_arguments={},
    )


def samples(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = np.random.default_rng(seed)
    label_B = random.integers(0, 10, count)
    logits_BK = random.normal(size=(count, 10)) + 2 * np.eye(10)[label_B]
    return torch.tensor(logits_BK, dtype=torch.float32), torch.tensor(label_B)


def seen(module: TaskModule, *batches: tuple[Tensor, Tensor], fillers: int = 0) -> TaskModule:
    """After an evaluation of these batches, each with so many fillers at its end."""
    for logits_BK, label_B in batches:
        odd_BK = torch.cat([logits_BK, 1e4 * torch.rand(fillers, 10)])
        target_B, index_B = (
            torch.cat([x, torch.full((fillers,), y)]) for x, y in ((label_B, 0), (torch.arange(len(label_B)), -1))
        )
        batch = {"input": odd_BK, "target": target_B, "index": index_B}
        module.evaluation_step(batch | {"count": len(label_B)}, 0)
    return module


def logged(module: TaskModule) -> dict[str, float]:
    """What the end of the evaluation logs; the sums begin anew then."""
    found: dict[str, Tensor] = {}
    module.log_dict = lambda figures, **_: found.update(figures)
    module.log_evaluation("test")
    return {name.removeprefix("test/"): value.item() for name, value in found.items()}


def figures(*batches: tuple[Tensor, Tensor], fillers: int = 0) -> dict[str, float]:
    return logged(seen(module(), *batches, fillers=fillers))


def plainly(logits_BK: Tensor, label_B: Tensor) -> dict[str, float]:
    """The same from the formulas, a sample at a time, in double precision."""
    pairs = [(z, int(y)) for z, y in zip(logits_BK.double().numpy(), label_B, strict=True)]
    losses = [float(np.log(np.exp(z - z.max()).sum()) + z.max() - z[y]) for z, y in pairs]
    hits = sum(int(z.argmax() == y) for z, y in pairs)
    return {"loss": sum(losses) / len(pairs), "acc": hits / len(pairs), "count": len(pairs)}


def test_the_figures_are_those_of_a_plain_computation():
    assert figures(samples(500)) == pytest.approx(plainly(*samples(500)), rel=1e-6)


def test_fillers_count_nowhere():
    assert figures(samples(100), fillers=37) == figures(samples(100))
    nothing = (torch.zeros(0, 10), torch.zeros(0, dtype=torch.int64))
    assert figures(samples(100), nothing, fillers=5) == figures(samples(100))


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(0, 300), max_size=12), seed=st.integers(0, 1000))
def test_how_samples_are_split_into_batches_does_not_show(cuts, seed):
    logits_BK, label_B = samples(300, seed)
    places = [0, *sorted(cuts), 300]
    batches = [(logits_BK[a:b], label_B[a:b]) for a, b in pairwise(places)]
    assert figures(*batches, fillers=1) == pytest.approx(figures((logits_BK, label_B)), rel=1e-6)


def test_the_sums_of_two_processes_make_the_figures_of_all():
    logits_BK, label_B = samples(300)
    one, other = seen(module(), (logits_BK[:17], label_B[:17])), seen(module(), (logits_BK[17:], label_B[17:]))
    one.mean_loss.merge_state(other.mean_loss)
    one.figures["acc"].merge_state(other.figures["acc"])
    assert logged(one) == pytest.approx(figures((logits_BK, label_B)), rel=1e-6)


def test_the_next_evaluation_forgets_the_one_before():
    made, last = module(), samples(50, seed=1)
    logged(seen(made, samples(50, seed=0)))
    assert logged(seen(made, last)) == figures(last)


def test_weights_of_samples_weigh_their_losses():
    loss_B, weight_B = torch.tensor([1.0, 2.0, 5.0, 9.0]), torch.tensor([0.5, 0.0, 2.0, 1.5])
    mean = MeanLoss()
    for part in (slice(0, 1), slice(1, 4)):
        mean.update(loss_B[part], weight_B[part])
    assert {name: value.item() for name, value in mean.compute().items()} == {"loss": 24 / 4, "count": 4}


@FLOAT64
def test_small_losses_are_not_lost_beside_a_large_sum():
    mean = MeanLoss()
    for loss in (2.0**25, *[64.0] * 10, *[1.5] * 10):
        mean.update(torch.tensor([loss]), None)
    assert mean.loss_sum.item() == 2.0**25 + 640 + 15


@FLOAT64
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_leave_the_sums_in_float64(dtype):
    made = module().to(dtype)  # as Lightning does for precision bf16-true and 16-true
    made.on_validation_epoch_start()
    logits_BK, label_B = samples(3000)
    seen(made, *((logits_BK[i : i + 100].to(dtype), label_B[i : i + 100]) for i in range(0, 3000, 100)))
    assert made.mean_loss.loss_sum.dtype == torch.float64
    assert logged(made) == pytest.approx(plainly(logits_BK.to(dtype).float(), label_B), rel=1e-5)
