"""One process per device with a shard of everything: torch's fully_shard (FSDP2), on GPUs and on CPUs."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

from lockstep.errors import UserError

MIN_BLOCK = 1_000_000  # parameters; a lone layer below that is gathered with its parent


def repeated_blocks(net: nn.Module) -> Iterator[nn.Module]:
    """What a network is made of: the members of its Sequentials and ModuleLists that have parts, or are large."""
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
    missing = sorted(set(names) - {type(module).__name__ for module in found})
    if missing:
        raise UserError(
            f"strategy.blocks={names}: the network has no {', '.join(missing)}; its classes are {', '.join(classes)}."
        )
    return found


class FullyShardedStrategy(ModelParallelStrategy):
    """Lightning's strategy for FSDP2 with the sharding itself: the network needs no word about it."""

    def __init__(
        self,
        *,
        environment: ClusterEnvironment | None,
        blocks: str | list[str],
        reshard_after_forward: bool,
        sharded_checkpoints: bool,
    ) -> None:
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=sharded_checkpoints)
        self.cluster_environment = environment
        self.blocks, self.reshard_after_forward = blocks, reshard_after_forward

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def parallelize(self, net: nn.Module) -> nn.Module:
        """Shards the blocks, inner ones first, then what is left with the network itself."""
        mesh = self.device_mesh["data_parallel"]
        net.to(self.root_device)
        blocks = list(repeated_blocks(net)) if isinstance(self.blocks, str) else named_blocks(net, list(self.blocks))
        for block in reversed(blocks):
            fully_shard(block, mesh=mesh, reshard_after_forward=self.reshard_after_forward)
        fully_shard(net, mesh=mesh, reshard_after_forward=self.reshard_after_forward)
        return net

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """As Lightning does; a folder of shards appears whole, under another name until then."""
        if not self._save_distributed_checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        path = Path(self.broadcast(filepath))
        part = path.with_name(path.name + ".part")
        if self.is_global_zero:
            shutil.rmtree(part, ignore_errors=True)
        self.barrier()
        super().save_checkpoint(checkpoint, part, storage_options)
        self.barrier()
        if self.is_global_zero:
            old = path.with_name(path.name + ".old")
            if path.exists():
                path.rename(old)
            part.rename(path)
            shutil.rmtree(old, ignore_errors=True)
        self.barrier()


def fsdp(
    *,
    environment: ClusterEnvironment | None,
    sharded_checkpoints: bool,
    blocks: str | list[str],
    reshard_after_forward: bool,
    name: str = "fsdp",
) -> FullyShardedStrategy:
    return FullyShardedStrategy(
        environment=environment,
        blocks=blocks,
        reshard_after_forward=reshard_after_forward,
        sharded_checkpoints=sharded_checkpoints,
    )
