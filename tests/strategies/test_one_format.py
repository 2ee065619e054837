"""The optimizer's state of a checkpoint, as a process loads it that computes in another way."""

import pytest
import torch

from lockstep.strategies.base import by_index
from lockstep.strategies.ddp import DDP


def optimizer(kind: type, **options: object) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = kind([torch.nn.Parameter(torch.ones(3))], lr=0.1, **options)
    made.param_groups[0]["params"][0].grad = torch.ones(3)
    made.step()
    return made


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize(
    ("saved", "own"),
    [({"fused": True}, {"fused": False}), ({"foreach": False}, {"fused": True}), ({}, {"foreach": True})],
)
def test_how_a_step_is_computed_is_not_taken_from_a_checkpoint(kind, saved, own):
    """A fused SGD of one process crashed on the shards of another strategy."""
    then = optimizer(kind, **saved, weight_decay=0.3)
    group, state = then.state_dict()["param_groups"][0], then.state_dict()["state"].get(0, {})
    now = optimizer(kind, **own)
    expected = {key: now.param_groups[0][key] for key in ("fused", "foreach", "differentiable")}
    own = [{"w": now.param_groups[0]["params"][0]}]
    now.load_state_dict(by_index(now, own, {"param_groups": [{**group, "params": ["w"]}], "state": {"w": state}}))
    assert {key: now.param_groups[0][key] for key in expected} == expected
    assert now.param_groups[0]["weight_decay"] == 0.3
    now.step()


def test_lightnings_advice_on_unused_parameters_names_our_key():
    error = RuntimeError("Expected to have finished reduction in the prior iteration before starting a new one. ...", 7)
    DDP.on_exception(DDP.__new__(DDP), error)
    assert "set strategy.find_unused_parameters=true" in error.args[0]
    assert error.args[1] == 7
    other = ValueError("mine")
    DDP.on_exception(DDP.__new__(DDP), other)
    assert other.args == ("mine",)
