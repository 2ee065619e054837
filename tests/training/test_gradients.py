"""Clipping is torch's, with a norm that does not depend on how the gradients are divided."""

import pytest
import torch

from lockstep.training.optim import clip_grad_norm, exact_norm, gradient_norm


def parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((1000, 300), (7,), (3, 4, 5))]
    for p in made:
        p.grad = torch.randn(p.shape, generator=generator)
    return [*made, torch.nn.Parameter(torch.zeros(2))]  # the last one has no gradient


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_gradients_are_clipped_as_torch_does(max_norm):
    ours, theirs = parameters(), parameters()
    norm, expected = clip_grad_norm(ours, max_norm), torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    assert float(norm) == pytest.approx(float(expected), rel=1e-5)
    for a, b in zip(ours[:-1], theirs[:-1], strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=0)
    assert ours[-1].grad is None


def test_a_network_without_gradients_is_left_alone():
    assert float(clip_grad_norm([torch.nn.Parameter(torch.zeros(2))], 1.0)) == 0.0


def test_the_norm_is_the_same_of_parts():
    """In float32 these differ in the fifth or sixth digit."""
    grad = torch.randn(1_000_000, generator=torch.Generator().manual_seed(1))
    whole, halves, many = (float(gradient_norm(parts)) for parts in ([grad], list(grad.chunk(2)), list(grad.chunk(37))))
    assert halves == pytest.approx(whole, rel=1e-12)
    assert many == pytest.approx(whole, rel=1e-12)


def test_the_exact_norm_is_the_norm():
    grads = [p.grad for p in parameters() if p.grad is not None] + [torch.zeros(3), torch.zeros(0)]
    assert float(exact_norm(grads)) == pytest.approx(float(gradient_norm(grads[:-1])), rel=1e-9)
    tiny = [grad * 1e-30 for grad in grads]
    assert float(exact_norm(tiny)) == pytest.approx(float(exact_norm(grads)) * 1e-30, rel=1e-6)
    assert float(exact_norm([torch.zeros(4)])) == 0.0
    for factor in (1e-150, 1e160):
        assert float(exact_norm([grad.double() * factor for grad in grads])) == pytest.approx(
            float(exact_norm(grads)) * factor
        )
    for wrong in (torch.nan, torch.inf):
        assert float(exact_norm([*grads, torch.tensor([1.0, wrong])])) == torch.inf


def test_the_exact_norm_has_the_same_bits_in_any_order():
    """The order of a sum of floats shows in its last bits."""
    grad = torch.randn(100_003, generator=torch.Generator().manual_seed(1)) ** 5
    orders = [grad[torch.randperm(len(grad), generator=torch.Generator().manual_seed(i))] for i in range(8)]
    assert len({float(each.double().square().cumsum(0)[-1]) for each in orders}) > 1
    assert len({float(exact_norm([each])) for each in orders}) == 1
