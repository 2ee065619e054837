"""DDP's own part of a resume: one forward and backward that leaves nothing behind; and its advice."""

from contextlib import nullcontext
from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.strategies import DDP
from lockstep.training import dropout


class Recomputed(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def test_buckets_are_rebuilt_without_masks_by_row_also_where_activations_are_computed_again():
    net, cpu = Recomputed(nn.Linear(3, 3), nn.AlphaDropout(0.5), nn.Linear(3, 3)), torch.device("cpu")
    dropout.by_row(net)
    micro_batch = dropout.MicroBatch(0, 5, {cpu: range(4)})
    dropout.begin(micro_batch)
    plugin = SimpleNamespace(train_step_context=nullcontext)
    try:
        DDP.rebuild_buckets(
            SimpleNamespace(model=net, lightning_module=net, root_device=cpu, precision_plugin=plugin), torch.ones(4, 3)
        )
        assert (dropout.current, micro_batch.calls) == (micro_batch, {})
    finally:
        dropout.begin(None)
    assert all(parameter.grad is None for parameter in net.parameters())


def test_lightnings_advice_on_unused_parameters_names_our_key():
    error = RuntimeError("Expected to have finished reduction in the prior iteration before starting a new one. ...", 7)
    DDP.on_exception(DDP.__new__(DDP), error)
    assert "set strategy.find_unused_parameters=true" in error.args[0]
    assert error.args[1] == 7
    other = ValueError("mine")
    DDP.on_exception(DDP.__new__(DDP), other)
    assert other.args == ("mine",)
