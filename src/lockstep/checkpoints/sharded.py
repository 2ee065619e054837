"""A checkpoint as a folder: each process writes its shards of the sharded tensors, and rank 0 writes everything else.

All are files of torch.save, so they load with weights_only=True like every checkpoint, and a zip checksum shows whether each is
complete. torch.distributed.checkpoint stores its metadata as a pickle, which may run code.
"""

# `rest.pt` holds the checkpoint with a note in place of each sharded tensor. `shard-<rank>-of-<world>.pt` maps each note to the
# rows of that tensor from row `first` on.

import os
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lockstep.checkpoints.finding import REST, mapped, shard_files
from lockstep.errors import UserError

NOTE = "sharded tensor "  # followed by the tensor's place; no other string in a checkpoint begins like this


def write(content: Any, path: Path) -> None:
    """torch.save, then fsync."""
    with path.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def open_file(path: Path) -> Any:
    """Tensors and plain values, memory-mapped. Raises UserError: the checksums do not cover the table of contents."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (UnpicklingError, RuntimeError, ValueError, LookupError, EOFError) as e:
        if "weights_only" in str(e):  # torch's own message advises to run its code
            raise UserError(
                f"{path} is not a checkpoint of Lockstep: it holds objects that could run code, and a checkpoint has only tensors and plain "
                "values."
            ) from None
        raise UserError(
            f"{path} is damaged ({str(e).splitlines()[0]}). Restore it from a copy, or remove it: resume=auto takes the newest "
            "complete checkpoint."
        ) from None


def row_range(rows: int, rank: int, world: int) -> tuple[int, int]:
    """The first row of a process's shard and the row after its last, divided as torch.chunk and FSDP2 do."""
    each = -(-rows // world)
    return min(rank * each, rows), min((rank + 1) * each, rows)


def divide(content: Any) -> tuple[Any, dict[str, Any]]:
    """`content` with a note in place of each sharded tensor, and this process's rows by note."""
    shards: dict[str, Any] = {}

    def note(path: tuple[Any, ...], leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        if tuple(leaf.placements) != (Shard(0),):
            raise ValueError(
                f"only tensors sharded by rows over one mesh dimension can be saved, not {leaf.placements}"
            )
        name = NOTE + "/".join(map(str, path))
        first, _ = row_range(leaf.shape[0], leaf.device_mesh.get_local_rank(), leaf.device_mesh.size())
        shards[name] = {"first": first, "shape": list(leaf.shape), "rows": leaf.to_local().detach()}
        return name

    return mapped(content, note), shards


def save(rest: Any, shards: dict[str, Any], folder: Path, rank: int, world: int) -> None:
    """Writes this process's part into an existing folder. The checkpoint is complete when every process has returned."""
    write(shards, folder / f"shard-{rank:05}-of-{world:05}.pt")
    if rank == 0:
        write(rest, folder / REST)


def load(path: Path, mesh: DeviceMesh | None = None) -> Any:
    """The values of a checkpoint on the CPU, with whole tensors.

    With a `mesh`, tensors from a folder of shards are sharded over it, whatever number of processes wrote them; each process reads
    its rows only.
    """
    if not path.is_dir():
        return open_file(path)
    shards: dict[str, list[dict[str, Any]]] = {}  # by note, in the order of their rows, memory-mapped
    for file in shard_files(path):
        for note, shard in open_file(file).items():
            shards.setdefault(note, []).append(shard)
    tensors = {
        note: resharded(parts, mesh) if mesh else torch.cat([part["rows"] for part in parts])
        for note, parts in shards.items()
    }
    return mapped(
        open_file(path / REST),
        lambda _, leaf: tensors[leaf] if isinstance(leaf, str) and leaf.startswith(NOTE) else leaf,
    )


def rows_between(shards: list[dict[str, Any]], begin: int, end: int) -> Tensor:
    """Rows `begin` to `end` of a tensor; only these are read from the memory-mapped shards."""
    return torch.cat([s["rows"][max(begin - s["first"], 0) : max(end - s["first"], 0)] for s in shards])


def resharded(shards: list[dict[str, Any]], mesh: DeviceMesh) -> DTensor:
    shape = torch.Size(shards[0]["shape"])
    local = rows_between(shards, *row_range(shape[0], mesh.get_local_rank(), mesh.size()))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local.to(mesh.device_type), mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
