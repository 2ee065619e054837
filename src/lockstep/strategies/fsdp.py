"""One process per device with a shard of everything: torch's fully_shard (FSDP2), on GPUs and on CPUs."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lockstep.checkpoints import weights
from lockstep.checkpoints.finding import mapped
from lockstep.checkpoints.saving import AtomicCheckpointIO
from lockstep.compat.lightning import WholeMeshStrategy
from lockstep.errors import UserError
from lockstep.machine import files
from lockstep.strategies.base import Float32, PortableCheckpoint
from lockstep.strategies.rendezvous import meet
from lockstep.strategies.sharded_module import WHOLE, Root, shard_module
from lockstep.training.arithmetic import StepArithmetic

OUT_OF_BLOCK = (
    "A step uses parameters of a block without calling the block, whose forward gathers them, or parameters that are no block's outside of a "
    f"step or after a backward. {WHOLE}"
)
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
    found = [module for module in net.modules() if type(module).__name__ in names]
    classes = sorted({type(module).__name__ for module in net.modules()})
    if missing := sorted(set(names) - {type(module).__name__ for module in found}):
        raise UserError(
            f"strategy.blocks={names}: the network has no {', '.join(missing)}; its classes are {', '.join(classes)}."
        )
    return found


def modules_of_vectors(blocks: list[nn.Module]) -> Iterator[nn.Module]:
    """Norms, layer scales and their like in the blocks, whose parameters autocast leaves in fp32: none has more than a dimension. And a
    head in float32."""
    once = dict.fromkeys(module for block in blocks for module in block.modules() if module is not block)
    for module in once:
        own = list(module.parameters(recurse=False))
        if own and (isinstance(module, Float32) or all(p.dim() <= 1 for p in module.parameters())):
            yield module


class FSDP2(PortableCheckpoint, WholeMeshStrategy):
    """Lightning's strategy for FSDP2, which also shards the network, so the network needs no code for it."""

    lightning_restore_optimizer = True  # like the other strategies; see PortableCheckpoint

    def __init__(
        self,
        *,
        environment: ClusterEnvironment | None,
        blocks: str | list[str],
        reshard_after_forward: bool,
        reduce_each_micro_batch: bool = False,
        sharded_checkpoints: bool,
        timeout_s: float,
        arithmetic: StepArithmetic | None = None,
    ) -> None:
        self.timeout, self.sharded_checkpoints = timedelta(seconds=timeout_s), sharded_checkpoints
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=sharded_checkpoints, timeout=self.timeout)
        self.cluster_environment = environment
        self.blocks, self.reshard_after_forward = blocks, reshard_after_forward
        # whole gradients of a logical rank would not fit
        self.arithmetic = arithmetic or StepArithmetic()
        self.reduce_each_micro_batch = reduce_each_micro_batch or self.arithmetic.same_bits
        self.root: FSDPModule | None = None
        self.custom: Root | None = None  # of a user's LightningModule
        self.writers: Any = None  # the process group of the threads that write shards

    def setup_environment(self) -> None:
        meet(self, self.timeout)
        super().setup_environment()

    def blocks_of(self, net: nn.Module) -> list[nn.Module]:
        """What is gathered at once, and compiled by itself."""
        return list(repeated_blocks(net)) if isinstance(self.blocks, str) else named_blocks(net, list(self.blocks))

    def parallelize(self, net: nn.Module) -> nn.Module:
        """Shards the blocks, inner ones first, and the remaining parameters with the network itself.

        fully_shard moves to the device what it shards, so a network larger than one GPU arrives there block by block. FSDP2
        (torch 2.13) refuses channels_last parameters. Convolutions run in that format anyway when images come in it.
        """
        net.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        blocks, mesh = [block for block in self.blocks_of(net) if not isinstance(block, Float32)], self.device_mesh
        policy = MixedPrecisionPolicy()
        if self.precision_plugin.precision == "bf16-mixed" and not self.arithmetic.same_bits:
            # Autocast would keep a bf16 copy of each weight from its use in forward to backward. The rest of the network stays
            # with autocast: a position embedding in bf16 would turn all that is added to it into bf16. Layer scales in blocks are
            # rounded all the same, so logical ranks leave everything to autocast, as under the other strategies.
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
            if vectors := list(modules_of_vectors(blocks)):
                fully_shard(vectors, mesh=mesh, reshard_after_forward=False)  # one small group, in fp32
        for block in reversed(blocks):
            fully_shard(block, mesh=mesh, reshard_after_forward=self.reshard_after_forward, mp_policy=policy)
        self.root = fully_shard(net, mesh=mesh, reshard_after_forward=self.reshard_after_forward)
        self.arithmetic.add_shards_of([module for module in net.modules() if isinstance(module, FSDPModule)])
        return net

    def shard(self, module: pl.LightningModule) -> None:
        module.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        blocks = self.blocks_of(module)
        self.custom = shard_module(module, blocks, self.device_mesh, self.root_device, self.reshard_after_forward)
        self.root = self.custom.fsdp

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning's, around micro-batches before the last: they add up whole gradients instead of communicating."""
        if self.reduce_each_micro_batch or self.root is None:
            yield
            return
        self.root.set_requires_gradient_sync(False)
        if self.custom:
            self.custom.accumulates = True
        try:
            yield
        finally:
            self.root.set_requires_gradient_sync(True)
            if self.custom:
                self.custom.accumulates = False

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.custom and not self.custom.accumulates:
            self.share_buffers()  # as DDP does
        return super().training_step(*args, **kwargs)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        if self.custom:
            for optimizer in self.optimizers:
                if optimizer.state_dict():  # unless configure_optimizers returned None
                    self.custom.watch(optimizer)

    def on_exception(self, exception: BaseException) -> None:
        mixed = "mixed torch.Tensor and DTensor"
        exception.args = tuple(f"{arg}\n{OUT_OF_BLOCK}" if mixed in str(arg) else arg for arg in exception.args)
        if self.custom:  # torch cannot move parameters in the middle of a forward, and Lightning does
            with suppress(RuntimeError, AttributeError):  # nothing was computed yet
                self.custom.fsdp.reset_iter_state()

    def checkpoint_form(self, state: dict[str, Any]) -> dict[str, Any]:
        """Sharded; or with whole tensors on the CPU of rank 0, and None for each on the others. Every process must call it."""

        def whole(_: tuple[Any, ...], leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            full = leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
            return full.cpu() if self.is_global_zero else None

        return state if self.sharded_checkpoints else mapped(state, whole)

    def share_buffers(self) -> None:
        """Gives all processes rank 0's running statistics, before validations and checkpoints.

        Under FSDP2 each process keeps its own, and a checkpoint would hold rank 0's only. DDP shares them before each forward.
        """
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self.lightning_module.buffers():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for buffers in by_dtype.values():
            together = torch.cat([buffer.reshape(-1) for buffer in buffers])
            torch.distributed.broadcast(together, 0)
            for buffer, values in zip(buffers, together.split([b.numel() for b in buffers]), strict=True):
                buffer.copy_(values.view(buffer.shape))

    on_validation_start = share_buffers

    def on_validation_end(self) -> None:
        if self.custom:
            self.custom.reshard()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.share_buffers()
        return self.checkpoint_form(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self.custom:
            self.custom.reshard()
        return self.checkpoint_form(super().optimizer_state(optimizer))

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(checkpoint_path))
        return weights.load(path, self.device_mesh) if path.is_dir() else self.checkpoint_io.load_checkpoint(path)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """One file, written by rank 0; or a folder of shards, which gets its name when it is complete."""
        path = Path(self.broadcast(filepath))
        self.make_loadable(checkpoint, path)
        if not self.sharded_checkpoints:
            if self.is_global_zero:
                self.checkpoint_io.save_checkpoint(checkpoint, path)
            return
        if self.writers is None:
            self.writers = torch.distributed.new_group(backend="gloo", timeout=self.timeout)
        rest, own = weights.divide(checkpoint)
        assert isinstance(self.checkpoint_io, AtomicCheckpointIO)
        self.checkpoint_io.save({"rest": rest, "own": own}, path, self.write_shards)

    def write_shards(self, content: dict[str, Any], path: Path) -> None:
        """Runs in the writing thread while training continues, with a process group of its own."""
        with ExitStack() as whole:
            place = [""]
            with self.all_or_none():
                if self.is_global_zero:
                    self.checkpoint_io.make_parent(path)  # type: ignore[attr-defined]
                    part = whole.enter_context(files.replacing(path))
                    part.mkdir()
                    place = [str(part)]
            torch.distributed.broadcast_object_list(place, 0, self.writers)
            with self.all_or_none():
                weights.save(content["rest"], content["own"], Path(place[0]), self.global_rank, self.world_size)
            with self.all_or_none():
                whole.pop_all().close()  # takes the name

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Waits for the other processes. An error in one of them raises in all."""
        error: Exception | None = None
        try:
            yield
        except Exception as e:
            error = e
        good = torch.tensor(int(error is None))
        torch.distributed.all_reduce(good, torch.distributed.ReduceOp.MIN, group=self.writers)
        if error:
            raise error
        if not good:
            raise OSError("another process could not write its part")

    def teardown(self) -> None:
        """As Lightning's other strategies: optimizer and shards leave the GPU, which the test needs for its own. Its
        ModelParallelStrategy keeps them there, and does not end the CheckpointIO."""
        self.close_loaders()
        super(ModelParallelStrategy, self).teardown()
