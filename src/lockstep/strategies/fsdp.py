"""FSDP2, torch's fully_shard: one process per device, each with a shard of everything. Runs on GPUs and CPUs."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lockstep.checkpoints import weights
from lockstep.checkpoints.finding import map_leaves
from lockstep.checkpoints.saving import AtomicCheckpointIO
from lockstep.compat.lightning import WholeMeshStrategy
from lockstep.compat.torch import whole_draws
from lockstep.errors import UserError
from lockstep.machine import files
from lockstep.strategies.base import PortableCheckpoint
from lockstep.strategies.rendezvous import rendezvous
from lockstep.strategies.sharded_module import Root, shard_module
from lockstep.training.optim import Float32

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
        device, reshard = self.root_device, self.reshard_after_forward
        self.root = shard_module(module, blocks, vectors, self.device_mesh, device, policy=policy, reshard=reshard)
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
            torch.distributed.broadcast(flat, 0)
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
            self.writers = torch.distributed.new_group(backend="gloo", timeout=self.timeout)
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
            torch.distributed.broadcast_object_list(folder, 0, self.writers)
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
        torch.distributed.all_reduce(succeeded, torch.distributed.ReduceOp.MIN, group=self.writers)
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
