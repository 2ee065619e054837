"""The state of networks and optimizers in one form, whatever strategy holds it: by parameter name, tensors whole.

Lightning saves optimizer states by index under ddp and by name under fsdp, which do not fit each other.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lockstep.errors import UserError


def mapped(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """`tree` of dicts, lists and tuples with every tensor changed."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: mapped(value, change) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(mapped(value, change) for value in tree)
    return tree


def gathered(tree: Any, keep: bool) -> Any:
    """`tree` with sharded tensors put together on the CPU. Every process must call it; those without `keep` get None."""

    def whole(tensor: Tensor) -> Tensor | None:
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return full.cpu() if keep else None

    return mapped(tree, whole)


def shaped_like(value: Any, own: Tensor) -> Any:
    """A tensor of a checkpoint in the form that the strategy gave to `own`: this process's shard of it, or the whole."""
    if not isinstance(own, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if value.shape != own.shape:  # an optimizer's count of steps
        return value
    # Every process has read the checkpoint, so each cuts its own shard out: nothing is sent.
    return distribute_tensor(value.to(own.device).contiguous(), own.device_mesh, own.placements, src_data_rank=None)


def own_copy(value: Any, own: Tensor) -> Any:
    """The optimizer would go on in the mapped file itself, which cannot be replaced then on some systems.

    In the memory format of the parameter: fused optimizers on CPUs (torch 2.13) walk through the memory of both at once, and
    take one element for another where fsdp's contiguous state meets a channels_last weight.
    """
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, DTensor) or value.shape != own.shape:  # shards are contiguous
        return value.clone()
    return torch.empty_like(own, dtype=value.dtype, device=value.device).copy_(value)


class OneFormat(Strategy):
    """For the strategies to inherit: weights and optimizer states by name, restored in the precision that they were saved in."""

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Set-up converts the network to trainer.precision=64-true and its like; before, weights would be rounded."""
        return True

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Strictly, whatever `strict` says. Raises UserError where names or shapes differ."""
        assert self.lightning_module is not None
        load_into(self.lightning_module.state_dict(), checkpoint["state_dict"])

    def parameter_names(self, optimizer: Optimizer) -> list[list[str]]:
        assert self.lightning_module is not None
        names = {id(p): name for name, p in self.lightning_module.named_parameters()}
        return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """`{"state": {name: {...}}, "param_groups": [{..., "params": names}]}`."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        state, names = optimizer.state_dict(), self.parameter_names(optimizer)
        flat = [name for group in names for name in group]
        return {
            "state": {flat[i]: values for i, values in state["state"].items()},
            "param_groups": [{**g, "params": own} for g, own in zip(state["param_groups"], names, strict=True)],
        }

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            names = self.parameter_names(optimizer)
            if [sorted(group["params"]) for group in saved["param_groups"]] != [sorted(group) for group in names]:
                raise UserError(
                    "the checkpoint's optimizer has other parameters than this network. Type init_from=<checkpoint> to start a new run from its weights."
                )
            places = iter(range(sum(map(len, names))))
            by_index: dict[str, Any] = {"state": {}, "param_groups": []}
            for group, own, values in zip(optimizer.param_groups, names, saved["param_groups"], strict=True):
                indices = [next(places) for _ in own]
                by_index["param_groups"].append({**values, "params": indices})
                for i, name, p in zip(indices, own, group["params"], strict=True):
                    if name in saved["state"]:  # plain SGD has none
                        of_p = saved["state"][name]
                        by_index["state"][i] = {key: own_copy(shaped_like(value, p), p) for key, value in of_p.items()}
            optimizer.load_state_dict(by_index)


@torch.no_grad()
def load_into(own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copies the tensors of a checkpoint into those of a network. Raises UserError where names or shapes differ."""
    missing, extra = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
    shapes = [name for name in own if name in saved and own[name].shape != saved[name].shape]
    if missing or extra or shapes:
        raise UserError(
            f"the checkpoint does not fit the network: missing {missing[:5]}, not wanted {extra[:5]}, of other shapes {shapes[:5]}. "
            "Leave the model as it was, or type init_from=<run> for a new run."
        )
    for name, tensor in own.items():
        tensor.copy_(shaped_like(saved[name], tensor))
