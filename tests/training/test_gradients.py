"""Clipping is torch's, with a norm that does not depend on how the gradients are divided."""

import pytest
import torch

from lockstep.training.arithmetic import LogicalRanks, StepArithmetic, clip_by_norm

gradient_norm, exact_norm = StepArithmetic().gradient_norm, LogicalRanks(4).gradient_norm


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((1000, 300), (7,), (3, 4, 5))]
    for p in made:
        p.grad = torch.randn(p.shape, generator=generator)
    return made


def gradients() -> list[torch.Tensor]:
    return [p.grad for p in parameters()]


@pytest.mark.parametrize("arithmetic", [StepArithmetic(), LogicalRanks(4)])
@pytest.mark.parametrize("most", [0.5, 1e6])
def test_gradients_are_clipped_as_torch_does(most, arithmetic):
    ours, theirs = gradients(), parameters()
    clip_by_norm(ours, most, arithmetic)
    expected = torch.nn.utils.clip_grad_norm_(theirs, most)
    assert float(arithmetic.gradient_norm(gradients())) == pytest.approx(float(expected), rel=1e-5)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b.grad, rtol=1e-5, atol=0)
    clip_by_norm([], most, arithmetic)  # a network without gradients


def test_the_norm_is_the_same_of_parts():
    """In float32 these differ in the fifth or sixth digit."""
    grad = torch.randn(1_000_000, generator=torch.Generator().manual_seed(1))
    whole, halves, many = (float(gradient_norm(parts)) for parts in ([grad], list(grad.chunk(2)), list(grad.chunk(37))))
    assert halves == pytest.approx(whole, rel=1e-12)
    assert many == pytest.approx(whole, rel=1e-12)


def test_the_exact_norm_is_the_norm():
    grads = [*gradients(), torch.zeros(3), torch.zeros(0)]
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
