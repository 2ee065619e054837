"""Masks of dropout belong to the samples of the global batch, whichever process draws them."""

# B batch

import copy
import pickle
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import timm
import torch
import torchvision
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.errors import UserError
from lockstep.training import dropout

CPU = torch.device("cpu")
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dropout": (lambda: nn.Dropout(0.25), (8, 5, 7)),
    "16 bits": (lambda: nn.Dropout(0.1), (8, 33)),
    "vectors": (lambda: nn.Dropout(0.5), (8,)),
    "1d": (lambda: nn.Dropout1d(0.5), (8, 6, 4)),
    "2d": (lambda: nn.Dropout2d(0.5), (8, 6, 4, 4)),
    "3d": (lambda: nn.Dropout3d(0.5), (8, 6, 2, 2, 2)),
    "alpha": (lambda: nn.AlphaDropout(0.3), (8, 50)),
    "feature alpha": (lambda: nn.FeatureAlphaDropout(0.3), (8, 6, 4)),
    "timm": (lambda: timm.layers.DropPath(0.5), (8, 3, 4)),
    "timm unscaled": (lambda: timm.layers.DropPath(0.5, scale_by_keep=False), (8, 3)),
    "stochastic depth": (lambda: torchvision.ops.StochasticDepth(0.5, "row"), (8, 3, 4)),
}


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    dropout.begin(None)


def layer(make: Callable[[], nn.Module]) -> nn.Module:
    net = nn.Sequential(make())
    dropout.use_row_masks(net)
    return net


def run(net: nn.Module, x: torch.Tensor, first: int = 0, samples: int | None = None, step: int = 3) -> torch.Tensor:
    dropout.begin(dropout.MicroBatch(0, step, {CPU: range(first, first + (samples or len(x)))}))
    return net(x)


@pytest.mark.parametrize("name", LAYERS)
def test_parts_of_a_batch_have_the_masks_of_the_whole(name):
    """And each step, layer and call of a layer has its own; each micro-batch counts the calls anew."""
    make, shape = LAYERS[name]
    x, net = torch.rand(shape) + 1, layer(make)
    whole = run(net, x)
    assert not torch.equal(net(x), whole)
    for count in (1, 2, 4):
        parts = [run(net, x[i : i + count], i) for i in range(0, len(x), count)]
        assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(run(net, x, step=4), whole)
    assert not torch.equal(run(layer(lambda: nn.Sequential(make())), x), whole)  # another name


def computes_as(net: nn.Module, torchs: nn.Module, x: torch.Tensor) -> bool:
    torch.manual_seed(0)
    found = net(x)
    torch.manual_seed(0)
    return torch.equal(found, torchs(x))


@pytest.mark.parametrize("name", LAYERS)
def test_outside_of_a_training_step_the_layers_are_torchs_own_and_so_are_copies(name):
    make, shape = LAYERS[name]
    net, x = layer(make), torch.rand(shape)
    assert computes_as(net, make(), x)
    for copied in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert type(copied[0]) is type(make())
        dropout.use_row_masks(copied)
        assert torch.equal(run(copied, x), run(net, x))
    assert torch.equal(run(net.eval(), x), x)


@pytest.mark.parametrize(("make", "shape"), [
    (nn.Dropout, (0, 5)), (nn.Dropout, (4, 0)), (nn.Dropout1d, (6, 4)), (nn.Dropout1d, (4, 4)),
])  # fmt: skip
def test_inputs_without_elements_or_without_samples_are_torchs(make, shape):
    net = layer(lambda: make(0.5))
    dropout.begin(dropout.MicroBatch(0, 0, {CPU: range(2)}))
    assert computes_as(net, make(0.5), torch.ones(shape))


@pytest.mark.parametrize("name", LAYERS)
def test_masks_have_the_moments_and_the_values_of_torchs(name):
    make, (_, *rest) = LAYERS[name]
    x = torch.ones(4000, *rest)
    torch.manual_seed(0)
    found, expected = run(layer(make), x), make()(x)
    torch.testing.assert_close(found.unique(), expected.unique(), rtol=1e-4, atol=1e-4)
    drawn = found.reshape(len(x), -1)[:, 0]
    scale = max(1.0, expected.abs().max().item())
    assert abs((found.mean() - expected.mean()).item()) < 0.04 * scale
    neighbours = (drawn[1:] * drawn[:-1]).mean() - drawn.mean() ** 2
    assert neighbours.abs().item() < 0.1 * scale**2  # they are independent
    if rest and name in ("dropout", "16 bits", "basic"):
        kept = (found != 0).double()
        assert (kept.mean(0) - kept.mean()).abs().max() < 0.05  # no element is favoured


def test_whole_channels_and_whole_samples_are_dropped():
    x = torch.ones(64, 6, 4, 4)
    channels = run(layer(lambda: nn.Dropout2d(0.5)), x).flatten(2)
    assert (channels == channels[:, :, :1]).all()
    samples = run(layer(lambda: timm.layers.DropPath(0.5)), x).flatten(1)
    assert (samples == samples[:, :1]).all()
    assert len(samples.unique()) == len(channels.unique()) == 2
    whole = layer(lambda: torchvision.ops.StochasticDepth(0.5, "batch"))
    for step in range(8):
        batch = run(whole, x, step=step)
        assert len(batch.unique()) == 1
        assert torch.equal(run(whole, x[5:6], 5, step=step), batch[5:6])  # a micro-batch of one sample


def test_masks_do_not_depend_on_the_order_in_memory():
    x = torch.rand(8, 16, 5, 5)
    net = layer(lambda: nn.Dropout(0.5))
    found = run(net, x.contiguous(memory_format=torch.channels_last))
    assert torch.equal(found, run(net, x))
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_a_device_draws_what_numpy_draws():
    for sizes, neighbours, key, call in (((1,), 1, 5, 9), ((3, 2, 13), 1, 2**64 - 1, 2**63 + 5), ((2, 7), 3, 1, 2**63)):
        draw = partial(dropout.random_words, key, call, range(40, 60), neighbours, sizes, CPU)
        numbers = draw(on_host=True)
        assert torch.equal(numbers, draw(on_host=False))
    for bits in (8, 16):
        expected = numbers.view(torch.int8 if bits == 8 else torch.int16)[..., :20] >= 7
        assert torch.equal(dropout.kept_rows(numbers, 20, bits, 7).bool(), expected)


@pytest.mark.parametrize("name", [name for name, (_, shape) in LAYERS.items() if len(shape) > 2])
def test_padding_changes_no_mask(name):
    """A sample has the same mask in a batch that is padded further: in the last dimension, in one before it, in the rows of its neighbours."""
    make, shape = LAYERS[name]
    net, x = layer(make), torch.rand(shape) + 1
    for dim in range(1 if type(net[0]).__mro__[1] is dropout.RowDropout else 2, len(shape)):
        longer = torch.cat([x, x], dim)
        assert torch.equal(run(net, longer).narrow(dim, 0, shape[dim]), run(net, x))
    flat, padded = torch.rand(8 * 3, 10), torch.rand(8 * 5, 10)
    padded.view(8, 5, 10)[:, :3] = flat.view(8, 3, 10)
    tokens = layer(lambda: nn.Dropout(0.5))
    assert torch.equal(
        run(tokens, padded, samples=8).view(8, 5, 10)[:, :3].reshape(24, 10), run(tokens, flat, samples=8)
    )
    assert torch.equal(
        run(tokens, flat.view(8, 3, 10)[:, 0], samples=8), run(tokens, flat, samples=8).view(8, 3, 10)[:, 0]
    )


def test_several_rows_of_a_sample_and_rows_of_none():
    """Windows of an image, tokens of a sentence: k neighbours of each sample. A table of positions: one mask for all."""
    net, x = layer(lambda: nn.Dropout(0.5)), torch.rand(8 * 3, 10)
    whole = run(net, x, samples=8)
    assert torch.equal(torch.cat([run(net, x[:12], 0, 4), run(net, x[12:], 4, 4)]), whole)
    positions = torch.rand(5, 10)
    assert torch.equal(run(net, positions, 0, 4), run(net, positions, 4, 4))
    sequences = torch.rand(5, 8, 10)  # tokens come before samples
    halves = run(net, sequences[:, :4], 0, 4), run(net, sequences[:, 4:], 4, 4)
    assert torch.equal(torch.cat(halves, 1), run(net, sequences, samples=8))
    assert not torch.equal(*halves)


@pytest.mark.parametrize(("reentrant", "compute"), [
    (False, torch.Tensor.backward), (False, torch.autograd.grad), (True, torch.Tensor.backward),
])  # fmt: skip
def test_recomputed_activations_have_the_same_masks(reentrant, compute):
    """Whoever asks for gradients: Lightning, or a step under manual optimization."""
    torch.manual_seed(0)
    inner = layer(lambda: nn.Sequential(nn.Linear(20, 20), nn.Dropout(0.5), nn.ReLU(), nn.Linear(20, 1)))
    x, weights = torch.rand(8, 20, requires_grad=True), list(inner.parameters())
    expected = torch.autograd.grad(run(inner, x).sum(), weights)
    dropout.begin(dropout.MicroBatch(0, 3, {CPU: range(8)}))
    loss = checkpoint(inner, x, use_reentrant=reentrant, preserve_rng_state=False).sum()
    found = compute(loss, weights) if compute is torch.autograd.grad else compute(loss)
    assert all(map(torch.equal, found or [p.grad for p in weights], expected))


def test_a_layer_that_is_called_twice_cannot_be_recomputed():
    drop, x = layer(lambda: nn.Dropout(0.5)), torch.rand(4, 9, requires_grad=True)
    dropout.begin(dropout.MicroBatch(0, 3, {CPU: range(4)}))
    loss = checkpoint(lambda y: drop(drop(y) + y), x, use_reentrant=False, preserve_rng_state=False).sum()
    with pytest.raises(UserError, match="calls 2 times"):
        loss.backward()


def test_subclasses_and_shared_layers_and_keys_stay():
    class Mine(nn.Dropout):
        pass

    shared = nn.Dropout(0.5)
    net = nn.ModuleDict({"a": shared, "b": shared, "mine": Mine(0.5), "linear": nn.Linear(2, 2)})
    keys = list(net.state_dict())
    dropout.use_row_masks(net)
    dropout.use_row_masks(net)  # again: a network that is trained twice
    assert net["a"] is net["b"]
    assert isinstance(net["a"], nn.Dropout)
    assert type(net["mine"]) is Mine
    assert list(net.state_dict()) == keys
    assert repr(net["a"]) == "Dropout(p=0.5, inplace=False)"


def test_inplace_layers_and_gradients():
    net, x = layer(lambda: nn.Dropout(0.25, inplace=True)), torch.ones(8, 40, requires_grad=True)
    y = x * 1
    out = run(net, y)
    assert out is y
    out.sum().backward()
    assert torch.equal(x.grad, out)
