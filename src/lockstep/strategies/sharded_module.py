"""FSDP2 around a LightningModule as it is: the module is the root of the shards, above the blocks of its networks.

A step may use the root's parameters in any way: by methods of a network other than `forward`, next to its children, after a step of an
optimizer. So they are gathered for the whole step. What is written to them, such as the average of a momentum encoder, is written to
the shards.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from lockstep.compat.torch import assignable_data
from lockstep.training.arithmetic import StepArithmetic, clip_by_norm

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
dist: Any = torch.distributed


class ShardedModule(pl.LightningModule):
    """The first base of the class of a LightningModule under FSDP2."""

    root: "Root"

    def through_hooks(self, value: Callable[[], Tensor]) -> Tensor:
        """A forward method to FSDP2: a backward of the tensor that it returns reduces the root's gradients."""
        return value()

    def toggle_optimizer(self, optimizer: Optimizer | LightningOptimizer) -> None:
        with self.root.sharded():  # gathered parameters take over what the shards say of their gradients
            super().toggle_optimizer(optimizer)

    def untoggle_optimizer(self, optimizer: Optimizer | LightningOptimizer) -> None:
        with self.root.sharded():
            super().untoggle_optimizer(optimizer)

    def zero_grad(self, set_to_none: bool = True) -> None:
        with self.root.sharded():
            super().zero_grad(set_to_none)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        given, kind = self.trainer.gradient_clip_val, gradient_clip_algorithm or self.trainer.gradient_clip_algorithm
        with self.root.sharded():
            if not self.root.whole or kind == "value":
                super().clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            elif most := given if gradient_clip_val is None else gradient_clip_val:
                # torch 2.13 cannot add norms of shards and of whole gradients
                held = (p for group in optimizer.param_groups for p in group["params"])
                clip_by_norm([p.grad for p in held if p.grad is not None], most, StepArithmetic())


@dataclass
class Gathered:
    """A parameter while it is gathered: the memory that FSDP2 gave it, and how often it had been written to."""

    parameter: nn.Parameter
    data: Tensor
    version: int
    shard: DTensor

    @property
    def is_written(self) -> bool:
        return self.parameter.data_ptr() != self.data.data_ptr() or self.parameter._version != self.version

    @torch.no_grad()
    def keep(self) -> None:
        """Writes to the shard what was written to the parameter."""
        value = self.parameter.data
        if value.data_ptr() != self.data.data_ptr():  # another tensor was assigned
            self.data.copy_(value)
            self.parameter.data = self.data
        own = distribute_tensor(self.data, self.shard.device_mesh, self.shard.placements, src_data_rank=None)
        self.shard.to_local().copy_(own.to_local())
        self.version = self.parameter._version


@dataclass(eq=False)
class Root:
    """The parameters that no block has."""

    module: ShardedModule
    owners: list[tuple[nn.Module, str]]  # of the sharded ones
    whole: list[nn.Parameter]  # that FSDP2 cannot shard: each process has all of them, with the mean of the gradients
    gathered: list[Gathered] = field(default_factory=list)
    in_step: bool = False

    @property
    def parameters(self) -> list[Any]:
        return [getattr(module, name) for module, name in self.owners]

    @property
    def is_gathered(self) -> bool:
        return not any(isinstance(getattr(module, name), DTensor) for module, name in self.owners[:1])  # all at once

    def gather(self, *_: Any) -> None:
        if self.is_gathered:
            return
        shards = self.parameters
        self.root.unshard()
        pairs = zip(self.parameters, shards, strict=True)
        self.gathered = [Gathered(p, p.data, p._version, shard) for p, shard in pairs]

    @property
    def root(self) -> FSDPModule:
        assert isinstance(self.module, FSDPModule)
        return self.module

    def keep_writes(self, *_: Any) -> None:
        if self.is_gathered:
            for each in self.gathered:
                if each.is_written:
                    each.keep()

    def reshard(self) -> None:
        self.keep_writes()
        self.root.set_reshard_after_forward(True, recurse=False)  # within a forward, torch ignores it otherwise
        self.root.reshard()
        self.root.set_reshard_after_forward(False, recurse=False)
        self.gathered = []

    @contextmanager
    def sharded(self) -> Iterator[None]:
        """With all gradients. Gathers them again afterwards, within a step."""
        self.reduce_gradients(of_all=True)
        self.reshard()
        yield
        if self.in_step:
            self.gather()

    def reduce_gradients(self, *, of_all: bool) -> None:
        """What a backward of the user's has left, without Lightning. `of_all`: not of one of several accumulated micro-batches."""
        pending = [p for p in self.parameters if p.grad is not None] if self.is_gathered else []
        if pending:
            none = pending[0].new_zeros((), requires_grad=True)
            self.module.through_hooks(lambda: none * 1).backward()
        for parameter in self.whole if of_all else ():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()


def shard_module(
    module: pl.LightningModule, blocks: list[nn.Module], mesh: DeviceMesh, device: torch.device, reshard: bool
) -> Root:
    """Shards a LightningModule in place."""
    assignable_data()
    equal_to_rank_0(module, device)
    metrics = {p for each in module.modules() if isinstance(each, Metric) for p in each.parameters()}
    every = [p for p in module.parameters() if p not in metrics]
    dtypes = [p.dtype for p in every if p.requires_grad]
    common = max(dtypes, key=dtypes.count, default=torch.float32)
    whole = [p for p in every if p.dim() == 0 or p.dtype != common]
    ignored = metrics | {*whole}
    own = {id(p) for p in every} - {id(p) for p in ignored}
    module.register_state_dict_pre_hook(lambda found, *_: found.root.keep_writes())  # before FSDP2's, which shards them
    given: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(), "ignored_params": ignored}
    for block in reversed([each for each in blocks if not isinstance(each, Metric)]):
        if not is_shared(block, module) and {id(p) for p in block.parameters()} <= own:
            fully_shard(block, reshard_after_forward=reshard, **given)
            own -= {id(p) for p in block.parameters()}
    holders = [(each, name, id(p)) for each in module.modules() for name, p in each.named_parameters(recurse=False)]
    owners = [(each, name) for each, name, number in holders if number in own]
    module.__class__ = type(
        type(module).__name__, (ShardedModule, type(module)), {"__module__": type(module).__module__}
    )
    sharded = cast(ShardedModule, module)
    sharded.root = root = Root(sharded, owners, [p for p in whole if p.requires_grad])
    fully_shard(module, reshard_after_forward=False, **given)
    for each in dict.fromkeys([module, *(each for each, _ in owners)]):
        each.register_forward_pre_hook(root.gather, prepend=True)
    register_fsdp_forward_method(module, "through_hooks")
    for name in STEPS:
        if is_overridden(name, module):
            register_step(root, name)
    return root


def register_step(root: Root, name: str) -> None:
    """Its parameters are gathered before and kept after it, between FSDP2's own hooks."""
    module, step = root.module, getattr(root.module, name)

    @wraps(step)
    def kept(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        root.keep_writes()
        return result

    setattr(module, name, kept)
    register_fsdp_forward_method(module, name)
    registered = getattr(module, name)

    @wraps(step)
    def whole(*args: Any, **kwargs: Any) -> Any:
        root.in_step = True
        root.gather()
        try:
            return registered(*args, **kwargs)
        finally:
            root.in_step = False

    setattr(module, name, whole)


def is_shared(block: nn.Module, module: nn.Module) -> bool:
    """Whether a module outside of a block has parameters of it."""
    inside = {*block.modules()}
    own = {id(p) for p in block.parameters()}
    others = (each for each in module.modules() if each not in inside)
    return any(id(p) in own for each in others for p in each.parameters(recurse=False))


@torch.no_grad()
def equal_to_rank_0(module: nn.Module, device: torch.device) -> None:
    """As under DDP. One tensor at a time: the device may be too small for all."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_meta:
            there = tensor.to(device)
            dist.broadcast(there, 0)
            tensor.copy_(there)
