"""What strategies share: the changes to a network before training, and one form for the state of networks and optimizers."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lockstep.checkpoints.finding import mapped
from lockstep.checkpoints.weights import load_into, sharded_like
from lockstep.errors import UserError, raise_problems
from lockstep.strategies.batch_norm import synchronise

# --- The changes to a network before training. Their order matters ---

GRAPHS = 8  # of a compiled part: training, evaluation, last batches of other sizes; torch's own limit for one


def parallelize(
    net: nn.Module, trainer: pl.Trainer, *, sync_batchnorm: bool, channels_last: bool, compile: bool
) -> Callable[[Tensor], Tensor]:
    """Changes `net` in place, keeps its state keys, and returns the callable for a batch."""
    strategy = cast(PortableCheckpoint, trainer.strategy)
    if channels_last:
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if sync_batchnorm:  # before sharding: it replaces modules
        synchronise(net, strategy.root_device.type)
    if compile:  # before sharding and DDP: their hooks stay outside the compiled graphs
        compile_in_place(strategy.blocks_of(net) or [net])
    return strategy.parallelize(net)


def compile_in_place(parts: list[nn.Module]) -> None:
    """A wrapper would prefix every key with `_orig_mod.`.

    Blocks of a class share torch's cache of compiled graphs, and equal ones share their graphs. The 16 of resnet50d, in training and
    in evaluation, need more than eight, after which torch gives up by default.
    """
    config: Any = torch.compiler.config
    config.recompile_limit = max(config.recompile_limit, GRAPHS * len(parts))
    for part in parts:
        part.compile()


# --- One form for the state of networks and optimizers under every strategy: by parameter name, with whole tensors ---
#
# Lightning saves optimizer states by index under ddp and by name under fsdp, and neither loads the other.

# An optimizer's options for how this process computes its step. SGD has no fused kernel for shards, and one that is fused unscales
# the gradients of 16-mixed itself: a checkpoint must not bring them along.
OF_THIS_PROCESS = ("fused", "foreach", "capturable", "differentiable")


def gathered(tree: Any, keep: bool) -> Any:
    """`tree` with whole tensors on the CPU. Every process must call it; those without `keep` get None for each tensor."""

    def whole(_: tuple[Any, ...], leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        full = leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
        return full.cpu() if keep else None

    return mapped(tree, whole)


def own_copy(value: Any, own: Tensor) -> Any:
    """A copy of an optimizer's value for the parameter `own`, in the parameter's memory format.

    Without a copy the optimizer would update the memory-mapped file, which some systems cannot replace then. Fused optimizers on
    CPUs (torch 2.13) walk through the memory of value and parameter together: in different formats they mix up the elements.
    """
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, DTensor) or value.shape != own.shape:  # shards are contiguous
        return value.clone()
    return torch.empty_like(own, dtype=value.dtype, device=value.device).copy_(value)


class PortableCheckpoint(Strategy):
    """The base of all strategies: saves and loads weights and optimizer states by name, in the precision they were saved in."""

    lightning_module: pl.LightningModule  # set before anything here is called
    # whether a process computes neighbouring micro-batches of a global batch; otherwise every world-th
    contiguous_micro_batches = False

    def blocks_of(self, net: nn.Module) -> list[nn.Module]:
        """The parts of a network that are computed one after the other, if the strategy treats them separately."""
        return []

    def parallelize(self, net: nn.Module) -> nn.Module:
        """What is called for a batch, after changing `net` in place."""
        return net

    def device_rows(self, rows: range) -> dict[torch.device, range]:
        """Which rows of the global batch each device of this process computes, of the `rows` of its micro-batch."""
        return {self.root_device: rows}

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Set-up converts the network to the dtype of trainer.precision; loading before it would round the weights."""
        return True

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Always strict. Raises UserError where names or shapes differ."""
        load_into(self.lightning_module.state_dict(), checkpoint["state_dict"], "the checkpoint")

    def named_groups(self, optimizer: Optimizer) -> list[dict[str, nn.Parameter]]:
        """The parameters of each of the optimizer's groups by name."""
        names = {id(p): name for name, p in self.lightning_module.named_parameters()}
        return [{names[id(p)]: p for p in group["params"]} for group in optimizer.param_groups]

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """`{"state": {name: {...}}, "param_groups": [{..., "params": names}]}`."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        state, names = optimizer.state_dict(), [list(named) for named in self.named_groups(optimizer)]
        flat = [name for own in names for name in own]
        return {
            "state": {flat[i]: values for i, values in state["state"].items()},
            "param_groups": [{**g, "params": own} for g, own in zip(state["param_groups"], names, strict=True)],
        }

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            groups = self.named_groups(optimizer)
            if [sorted(group["params"]) for group in saved["param_groups"]] != [sorted(named) for named in groups]:
                raise UserError(
                    "the checkpoint's optimizer has other parameters than this network. Type init_from=<checkpoint> to start a new run from its weights."
                )
            optimizer.load_state_dict(by_index(optimizer, groups, saved))


def by_index(optimizer: Optimizer, groups: list[dict[str, nn.Parameter]], saved: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state by name as torch wants it: by index, each value in the form of its parameter."""
    parameters = {name: p for named in groups for name, p in named.items()}
    if "fused" in optimizer.defaults:
        raise_problems(shape_problems(parameters, saved["state"]))
    index = {name: i for i, name in enumerate(parameters)}
    state = {
        index[name]: {key: own_copy(sharded_like(value, p), p) for key, value in saved["state"][name].items()}
        for name, p in parameters.items()
        if name in saved["state"]  # plain SGD has no state
    }
    param_groups = [
        {**values, **{key: own[key] for key in OF_THIS_PROCESS if key in own}, "params": [index[n] for n in named]}
        for own, named, values in zip(optimizer.param_groups, groups, saved["param_groups"], strict=True)
    ]
    return {"state": state, "param_groups": param_groups}


def shape_problems(parameters: Mapping[str, Tensor], state: Mapping[str, Any]) -> Iterator[str]:
    """Values of another shape than their parameter's, except the step, of an optimizer that computes element by element.

    Those optimizers are the ones with fused kernels, which would read and write past the end of such a value.
    """
    for name, p in parameters.items():
        for key, value in state.get(name, {}).items():
            right = () if key == "step" else p.shape
            if isinstance(value, Tensor) and value.shape != right:
                yield (
                    f"the checkpoint's optimizer has a {key} of {tuple(value.shape)} for {name} instead of {tuple(right)}. "
                    "Type init_from=<checkpoint> to start a new run from its weights."
                )
