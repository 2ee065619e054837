"""FSDP2, torch's fully_shard: one process per device, each with a shard of everything. Runs on GPUs and CPUs."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial, wraps
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from lockstep.checkpoints import weights
from lockstep.checkpoints.finding import map_leaves
from lockstep.checkpoints.saving import AtomicCheckpointIO
from lockstep.compat.lightning import WholeMeshStrategy
from lockstep.compat.torch import gather_after_writes, whole_draws, whole_values
from lockstep.errors import UserError
from lockstep.machine import files
from lockstep.strategies.base import PortableCheckpoint
from lockstep.strategies.rendezvous import rendezvous
from lockstep.training.optim import Float32, add_base

dist: Any = torch.distributed
MIN_BLOCK = 1_000_000  # parameters; a smaller single layer is gathered with its parent


def repeated_blocks(net: nn.Module) -> Iterator[nn.Module]:
    """The building blocks of a network: members of Sequentials and ModuleLists that are composite or large."""
    for child in net.children():
        if isinstance(child, nn.Sequential | nn.ModuleList):
            for member in child:
                size = sum(p.numel() for p in member.parameters())
                composite = any(True for _ in member.children())
                if size >= MIN_BLOCK or (composite and size and not isinstance(member, nn.Sequential | nn.ModuleList)):
                    yield member
                else:
                    yield from repeated_blocks(member)
        else:
            yield from repeated_blocks(child)


def named_blocks(net: nn.Module, names: list[str]) -> list[nn.Module]:
    """The modules whose class has one of `names`. Raises UserError for a name that the network does not have."""
    blocks = [module for module in net.modules() if type(module).__name__ in names]
    classes = sorted({type(module).__name__ for module in net.modules()})
    if missing := sorted(set(names) - {type(module).__name__ for module in blocks}):
        raise UserError(
            f"strategy.blocks={names}: the network has no {', '.join(missing)}; its classes are {', '.join(classes)}."
        )
    return blocks


def modules_of_vectors(blocks: list[nn.Module]) -> Iterator[nn.Module]:
    """Modules in the blocks whose parameters autocast leaves in fp32, such as norms and layer scales.

    None of their parameters has more than one dimension. A head in float32 is included.
    """
    modules = dict.fromkeys(module for block in blocks for module in block.modules() if module is not block)
    for module in modules:
        parameters = list(module.parameters(recurse=False))
        if parameters and (isinstance(module, Float32) or all(p.dim() <= 1 for p in module.parameters())):
            yield module


class FSDP2(PortableCheckpoint, WholeMeshStrategy):
    """Lightning's FSDP2 strategy, but it also shards the network, so the network needs no code for it."""

    lightning_restore_optimizer = True  # like the other strategies; see PortableCheckpoint

    def __init__(
        self,
        *,
        blocks: str | list[str],
        reshard_after_forward: bool,
        reduce_each_micro_batch: bool = False,
        sharded_checkpoints: bool,
        timeout_s: float,
    ) -> None:
        self.timeout, self.sharded_checkpoints = timedelta(seconds=timeout_s), sharded_checkpoints
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=sharded_checkpoints, timeout=self.timeout)
        self.blocks, self.reshard_after_forward = blocks, reshard_after_forward
        self.reduce_each_micro_batch = reduce_each_micro_batch
        self.root: Root | None = None
        self.writers: Any = None  # the process group of the threads that write shards

    def setup_environment(self) -> None:
        rendezvous(self, self.timeout)
        super().setup_environment()
        whole_draws()

    def blocks_of(self, net: nn.Module) -> list[nn.Module]:
        """The units that are gathered, and compiled, one at a time."""
        return list(repeated_blocks(net)) if isinstance(self.blocks, str) else named_blocks(net, list(self.blocks))

    def divide(self, module: pl.LightningModule) -> None:
        """Shards the blocks, inner ones first, then the remaining parameters with the module itself.

        fully_shard moves what it shards to the device, so a network larger than one GPU is moved block by block. FSDP2
        (torch 2.13) does not support channels_last parameters. Convolutions still run in that format if the images have
        it.
        """
        module.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        blocks = [block for block in self.blocks_of(module) if not isinstance(block, Float32)]
        policy, vectors = MixedPrecisionPolicy(), list[nn.Module]()
        if self.precision_plugin.precision == "bf16-mixed" and not self.arithmetic.same_bits:
            # Autocast would keep a bf16 copy of each weight from its use in forward to backward. The rest of the
            # network stays under autocast: a position embedding in bf16 would turn everything added to it into bf16.
            # Layer scales in blocks are still rounded, so with logical ranks everything is left to autocast, as under
            # the other strategies.
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
            vectors = list(modules_of_vectors(blocks))
        broadcast_from_rank_0(module, self.root_device)
        self.root = shard_module(module, blocks, vectors, self.device_mesh, policy, self.reshard_after_forward)
        if self.root.whole and self.arithmetic.same_bits:
            raise UserError(
                f"exact.logical_ranks: strategy=fsdp cannot shard {len(self.root.whole)} trained parameters of {type(module).__name__}, which have no "
                "dimension or a rare dtype. Give them a dimension, or set strategy=ddp."
            )
        self.arithmetic.add_shards_of([child for child in module.modules() if isinstance(child, FSDPModule)])

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning calls it for all micro-batches but the last: they add up whole gradients without communicating."""
        # unsharded gradients of a logical rank would not fit
        if self.reduce_each_micro_batch or self.arithmetic.same_bits or self.root is None:
            yield
            return
        self.root.module.set_requires_gradient_sync(False)
        self.root.accumulates = True
        try:
            yield
        finally:
            self.root.module.set_requires_gradient_sync(True)
            self.root.accumulates = False

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.root and not self.root.accumulates:
            self.share_buffers()  # as DDP does
        return super().training_step(*args, **kwargs)

    def watch(self, optimizer: Optimizer) -> None:
        if self.root and optimizer.state_dict():  # unless configure_optimizers returned None
            self.root.watch(optimizer)
        super().watch(optimizer)

    def on_exception(self, exception: BaseException) -> None:
        if self.root:  # Lightning moves parameters, which torch cannot do in the middle of a forward
            with suppress(RuntimeError, AttributeError):  # if nothing was computed yet
                self.root.module.reset_iter_state()

    def checkpoint_form(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state to save, sharded or as whole tensors. Every process must call it.

        Whole tensors are on rank 0's CPU; the other ranks get None for each.
        """

        def unshard(_: tuple[Any, ...], leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            full = leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
            return full.cpu() if self.is_global_zero else None

        return state if self.sharded_checkpoints else map_leaves(state, unshard)

    def share_buffers(self) -> None:
        """Copies rank 0's running statistics to all processes, before validations and checkpoints.

        Under FSDP2 each process has its own, and a checkpoint would hold only rank 0's. DDP broadcasts them before each
        forward.
        """
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self.lightning_module.buffers():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for buffers in by_dtype.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            dist.broadcast(flat, 0)
            for buffer, values in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                buffer.copy_(values.view(buffer.shape))

    on_validation_start = share_buffers

    def on_validation_end(self) -> None:
        if self.root:
            self.root.reshard()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.share_buffers()
        return self.checkpoint_form(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self.root:
            self.root.reshard()
        return self.checkpoint_form(super().optimizer_state(optimizer))

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(checkpoint_path))
        return weights.load(path, self.device_mesh) if path.is_dir() else self.checkpoint_io.load_checkpoint(path)

    def write(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Writes one file from rank 0, or a folder of shards that gets its final name when it is complete."""
        if not self.sharded_checkpoints:
            super().write(checkpoint, path)
            return
        path = self.broadcast(path)
        if self.writers is None:
            self.writers = dist.new_group(backend="gloo", timeout=self.timeout)
        rest, shards = weights.divide(checkpoint)
        assert isinstance(self.checkpoint_io, AtomicCheckpointIO)
        self.checkpoint_io.save({"rest": rest, "own": shards}, path, self.write_shards)

    def write_shards(self, content: dict[str, Any], path: Path) -> None:
        """Runs in the writing thread while training continues, with its own process group."""
        with ExitStack() as stack:
            folder = [""]
            with self.all_or_none():
                if self.is_global_zero:
                    self.checkpoint_io.make_parent(path)  # type: ignore[attr-defined]
                    part = stack.enter_context(files.atomic_replace(path))
                    part.mkdir()
                    folder = [str(part)]
            dist.broadcast_object_list(folder, 0, self.writers)
            with self.all_or_none():
                weights.save(content["rest"], content["own"], Path(folder[0]), self.global_rank, self.world_size)
            with self.all_or_none():
                stack.pop_all().close()  # gives the folder its final name

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Waits for the other processes. An error in one process raises in all of them."""
        error: Exception | None = None
        try:
            yield
        except Exception as e:
            error = e
        succeeded = torch.tensor(int(error is None))
        dist.all_reduce(succeeded, dist.ReduceOp.MIN, group=self.writers)
        if error:
            raise error
        if not succeeded:
            raise OSError("another process could not write its part")

    def teardown(self) -> None:
        """Moves optimizer and shards off the GPU, as Lightning's other strategies do: the test needs the memory.

        Lightning's ModelParallelStrategy keeps them on the GPU and does not tear down the CheckpointIO.
        """
        self.close_loaders()
        super(ModelParallelStrategy, self).teardown()


# --- Any LightningModule as the root of the shards, above the blocks of its networks ---
#
# A step may use the root's parameters in any way: in methods of a network other than `forward`, next to its children,
# after a step of an optimizer. So they are gathered for the whole step. Values written to them, such as the average of a
# momentum encoder, are copied to the shards. Code that steps optimizers, clips gradients or reads them gets shards.

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class ShardedModule(pl.LightningModule):
    """First base class of a LightningModule under FSDP2."""

    root: "Root"

    def through_hooks(self, value: Callable[[], Tensor]) -> Tensor:
        """Registered as a forward method of FSDP2: the backward of the returned tensor reduces the root's gradients."""
        return value()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with self.root.backward():
            super().backward(loss, *args, **kwargs)

    def toggle_optimizer(self, optimizer: Optimizer | LightningOptimizer) -> None:
        with self.root.sharded():  # gathered parameters copy requires_grad from the shards
            super().toggle_optimizer(optimizer)

    def untoggle_optimizer(self, optimizer: Optimizer | LightningOptimizer) -> None:
        with self.root.sharded():
            super().untoggle_optimizer(optimizer)


@dataclass
class Gathered:
    """A gathered parameter, and the memory that FSDP2 allocated for it."""

    owner: nn.Module
    name: str
    parameter: nn.Parameter
    data: Tensor
    shard: DTensor

    @torch.no_grad()
    def keep(self) -> None:
        """Writes the values to the shard. Always, because a write such as `p.data.mul_(2)` cannot be detected."""
        if getattr(self.owner, self.name) is not self.parameter:
            raise UserError(
                f"a step replaces the parameter {self.name} of {type(self.owner).__name__}, which sharding does not support. Write to it, or set strategy=ddp."
            )
        if self.parameter.data_ptr() != self.data.data_ptr():  # a different tensor was assigned
            self.data.copy_(self.parameter.data)
            self.parameter.data = self.data
        sharded = distribute_tensor(self.data, self.shard.device_mesh, self.shard.placements, src_data_rank=None)
        self.shard.to_local().copy_(sharded.to_local())
        self.shard.requires_grad_(self.parameter.requires_grad)


@dataclass(eq=False)
class Root:
    """The parameters outside of all blocks."""

    module: Any  # a ShardedModule and FSDPModule
    owners: list[tuple[nn.Module, str]]  # module and name of each sharded parameter
    whole: list[nn.Parameter]  # trained parameters that FSDP2 cannot shard: replicated, with averaged gradients
    blocks: list[FSDPModule] = field(default_factory=list)
    shards: set[int] = field(default_factory=set)  # ids of all parameters that optimizers may update
    gathered: list[Gathered] = field(default_factory=list)
    watched: set[int] = field(default_factory=set)  # ids of gathered parameters with a hook
    in_step: bool = False
    in_backward: bool = False
    in_optimizer: bool = False
    is_first: bool = False  # no block was called yet in this step
    accumulates: bool = False  # in an accumulated micro-batch before the last

    def __deepcopy__(self, memo: dict[int, Any]) -> "Root":
        """A copied network keeps its hooks."""
        return self

    @property
    def title(self) -> str:
        return type(self.module).__name__.removeprefix("FSDP")

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
        gather_after_writes(self.module)
        self.module.unshard()
        entries = zip(self.owners, self.parameters, shards, strict=True)
        self.gathered = [Gathered(module, name, p, p.data, shard) for (module, name), p, shard in entries]
        for parameter in self.parameters:
            if parameter.requires_grad and id(parameter) not in self.watched:
                parameter.register_post_accumulate_grad_hook(self.require_backward)
                self.watched.add(id(parameter))

    def first_block(self, *_: Any) -> None:
        """Until its first block runs, a step writes to the shards of blocks: gathering must wait for these writes."""
        if self.is_first:
            self.is_first = False
            gather_after_writes(self.module)

    def keep_writes(self, *_: Any) -> None:
        if self.is_gathered:
            for parameter in self.gathered:
                parameter.keep()

    def drop(self) -> None:
        """Reshards and discards writes. Includes blocks, which may stay gathered after their forward."""
        for block in self.blocks:
            block.reshard()
        # within a forward, torch ignores reshard() otherwise
        self.module.set_reshard_after_forward(True, recurse=False)
        self.module.reshard()
        self.module.set_reshard_after_forward(False, recurse=False)
        self.gathered = []

    def reshard(self) -> None:
        self.keep_writes()
        self.drop()

    @contextmanager
    def sharded(self) -> Iterator[None]:
        """Reshards the parameters; within a step, gathers them again afterwards."""
        self.reshard()
        yield
        if self.in_step:
            self.gather()

    # --- Gradients ---

    def require_backward(self, _: Tensor) -> None:
        if not self.in_backward:
            raise UserError(
                f"a step of {self.title} calls backward() on a tensor, which does not reduce the gradients of shards. Call self.manual_backward(loss) instead."
            )

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Wraps a backward; afterwards the gradients are those of all processes."""
        self.gather()
        self.keep_writes()
        self.in_backward = True
        yield
        # FSDP2 has reduced only gradients that existed when the backward of a block ended
        if pending := [p for p in self.parameters if p.grad is not None] if self.is_gathered else []:
            zero = pending[0].new_zeros((), requires_grad=True)
            self.module.through_hooks(lambda: zero * 1).backward()
        self.in_backward = False
        if not self.accumulates:
            self.reduce_whole()
        self.reshard()

    def reduce_whole(self) -> None:
        """A parameter may have a gradient in some processes only."""
        if not self.whole:
            return
        counts = torch.tensor([float(p.grad is not None) for p in self.whole], device=self.whole[0].device)
        dist.all_reduce(counts)
        for parameter, count in zip(self.whole, counts.tolist(), strict=True):
            if count:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

    # --- Optimizers ---

    def watch(self, optimizer: Optimizer) -> None:
        self.reshard()
        self.shards = {id(p) for p in self.module.parameters()}
        self.require_shards(optimizer)
        optimizer.register_step_pre_hook(self.before_step)
        optimizer.register_step_post_hook(self.after_step)

    def require_shards(self, optimizer: Optimizer) -> None:
        """Raises UserError if the optimizer has other parameters, whose updates would have no effect."""
        if not all(id(p) in self.shards for group in optimizer.param_groups for p in group["params"]):
            raise UserError(
                f"an optimizer of {self.title} has parameters from before sharding, or from within a step. Pass it the module's parameters in configure_optimizers, or set strategy=ddp."
            )

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.reshard()
        self.require_shards(optimizer)
        self.in_optimizer = True

    def after_step(self, *_: Any) -> None:
        self.in_optimizer = False
        self.drop()  # the gathered values are older than the step
        if self.in_step:
            self.gather()


def shard_module(
    module: Any,
    blocks: list[nn.Module],
    vectors: list[nn.Module],
    mesh: Any,
    policy: MixedPrecisionPolicy,
    reshard: bool,
) -> Root:
    """Shards a LightningModule in place. `policy`: of the blocks; those of `vectors` stay in float32, as one small group."""
    whole_values()
    metrics = {p for child in module.modules() if isinstance(child, Metric) for p in child.parameters()}
    parameters = [p for p in module.parameters() if p not in metrics]
    dtypes = [p.dtype for p in parameters if p.requires_grad]
    common = max(dtypes, key=dtypes.count, default=torch.float32)
    unsharded = [p for p in parameters if p.dim() == 0 or (p.requires_grad and p.dtype != common)]
    ignored = metrics | {*unsharded}
    of_root = {*parameters} - ignored
    entries = [(child, name, p) for child in module.modules() for name, p in child.named_parameters(recurse=False)]
    root = Root(module, [], [p for p in unsharded if p.requires_grad])
    for child in dict.fromkeys(child for child, _, _ in entries):  # before FSDP2's hooks, which reshard them
        child.register_state_dict_pre_hook(root.keep_writes)
        child.register_load_state_dict_pre_hook(root.keep_writes)
    options: dict[str, Any] = {"mesh": mesh, "ignored_params": ignored}
    divided = list[nn.Module]()
    for block in reversed([block for block in blocks if not isinstance(block, Metric)]):
        of_block = {*block.parameters()}
        if not is_shared(block, module) and of_block.isdisjoint(ignored):
            of_root -= of_block
            divided.append(block)
    if vectors := [child for child in vectors if of_root.isdisjoint(child.parameters())]:
        root.blocks += fully_shard(vectors, reshard_after_forward=False, **options)[:1]
    for block in divided:
        root.blocks.append(fully_shard(block, reshard_after_forward=reshard, mp_policy=policy, **options))
        block.register_forward_pre_hook(root.first_block, prepend=True)
        block.register_forward_hook(refuse_gradients_of_gradients)
    root.owners = [(child, name) for child, name, p in entries if p in of_root]
    for child in module.modules():  # a partial, so a copied network gets its own
        child.zero_grad = partial(zero_grad, weakref.ref(root), child)  # type: ignore[method-assign]
    add_base(module, ShardedModule)
    root.module.root = root
    fully_shard(module, reshard_after_forward=False, **options)
    root.module.set_reshard_after_backward(False, recurse=False)  # a step may compute gradients of gradients
    for child in dict.fromkeys([module, *(child for child, _ in root.owners)]):
        child.register_forward_pre_hook(root.gather, prepend=True)
    register_fsdp_forward_method(module, "through_hooks")
    for name in STEPS:
        if is_overridden(name, module):
            register_step(root, name)
    return root


def zero_grad(reference: Callable[[], Root | None], module: nn.Module, set_to_none: bool = True) -> None:
    """Zeroes the gradients of the shards."""
    if root := reference():
        with root.sharded():
            type(module).zero_grad(module, set_to_none)


def register_step(root: Root, name: str) -> None:
    """Gathers the parameters before a step and writes them to the shards after it, between FSDP2's own hooks."""
    module, step = root.module, getattr(root.module, name)

    @wraps(step)
    def keeping_step(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        root.keep_writes()  # FSDP2 reshards after a step without gradients
        return result

    setattr(module, name, keeping_step)
    register_fsdp_forward_method(module, name)
    registered = getattr(module, name)

    @wraps(step)
    def gathered_step(*args: Any, **kwargs: Any) -> Any:
        if root.in_optimizer:  # an optimizer that evaluates its closure several times
            root.drop()
        root.in_step = root.is_first = True
        root.gather()
        try:
            return registered(*args, **kwargs)
        finally:
            root.in_step = False

    setattr(module, name, gathered_step)


def refuse_gradients_of_gradients(block: nn.Module, _: Any, output: Any) -> None:
    """A block is gathered for one backward; a second backward would read freed memory."""

    def reject(_: Tensor) -> None:
        if torch.is_grad_enabled():  # in a backward: create_graph=True
            name = type(block).__name__.removeprefix("FSDP")
            raise UserError(
                f"a step computes gradients of gradients through the block {name}, which sharding does not support. "
                "Set strategy.blocks=[] to gather all parameters for the whole step, or set strategy=ddp."
            )

    apply_to_collection(output, Tensor, lambda tensor: tensor.requires_grad and tensor.register_hook(reject))


def is_shared(block: nn.Module, module: nn.Module) -> bool:
    """Whether a module outside of a block shares parameters with it."""
    inside, of_block = {*block.modules()}, {*block.parameters()}
    outside = (child for child in module.modules() if child not in inside)
    return any(p in of_block for child in outside for p in child.parameters(recurse=False))


@torch.no_grad()
def broadcast_from_rank_0(module: nn.Module, device: torch.device) -> None:
    """Broadcasts rank 0's tensors, as DDP does. One at a time, because the device may be too small for all."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_meta:
            on_device = tensor.to(device)
            dist.broadcast(on_device, 0)
            tensor.copy_(on_device)
