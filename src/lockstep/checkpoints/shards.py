"""A checkpoint as a folder: every process writes its shards of the sharded tensors, the first one all the rest.

Plain files of torch.save, so that they load with weights_only=True as every checkpoint does (the metadata of
torch.distributed.checkpoint is a pickle that may run code), and so that a zip checksum tells whether each is whole.
"""

# `rest.pt` holds the checkpoint with a note in the place of each sharded tensor; `shard-<rank>-of-<world>.pt` holds for each
# note the rows of the tensor from `first` on.

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

REST = "rest.pt"
NOTE = "sharded tensor "  # and its place in the checkpoint; no other text of a checkpoint begins like this


def write(content: Any, path: Path) -> None:
    """torch.save, down to the disk."""
    with path.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def open_file(path: Path) -> Any:
    """Tensors and plain values, mapped, not read."""
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def share(rows: int, rank: int, world: int) -> tuple[int, int]:
    """The first row of a process and the one after its last: torch.chunk's way of dividing, which FSDP2 follows."""
    each = -(-rows // world)
    return min(rank * each, rows), min((rank + 1) * each, rows)


def divide(tree: Any, shards: dict[str, Any], place: str = "") -> Any:
    """`tree` with notes in place of sharded tensors, whose local parts go into `shards`."""
    if isinstance(tree, DTensor):
        if tuple(tree.placements) != (Shard(0),):
            raise ValueError(f"sharded by rows over one mesh dimension is what can be saved, not {tree.placements}")
        note, mesh = f"{NOTE}{place}", tree.device_mesh
        first, _ = share(tree.shape[0], mesh.get_local_rank(), mesh.size())
        shards[note] = {"first": first, "shape": list(tree.shape), "rows": tree.to_local().detach()}
        return note
    if isinstance(tree, dict):
        return {key: divide(value, shards, f"{place}/{key}") for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(divide(value, shards, f"{place}/{i}") for i, value in enumerate(tree))
    return tree


def save(rest: Any, own: dict[str, Any], folder: Path, rank: int, world: int) -> None:
    """This process's part, as `divide` made it. `folder` exists; the checkpoint is whole when every process is through."""
    write(own, folder / f"shard-{rank:05}-of-{world:05}.pt")
    if rank == 0:
        write(rest, folder / REST)


def files(folder: Path) -> list[Path]:
    """The shards, in the order of their rows."""
    return sorted(folder.glob("shard-*-of-*.pt"))


def parts(folder: Path) -> Iterator[dict[str, Any]]:
    for path in files(folder):
        yield open_file(path)


def joined(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The reverse of `divide`."""
    if isinstance(tree, str) and tree.startswith(NOTE):
        return tensors[tree]
    if isinstance(tree, dict):
        return {key: joined(value, tensors) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(joined(value, tensors) for value in tree)
    return tree


def load(folder: Path) -> Any:
    """The checkpoint on the CPU with whole tensors."""
    rows: dict[str, list[Tensor]] = {}
    for part in parts(folder):
        for note, shard in part.items():
            rows.setdefault(note, []).append(shard["rows"])
    return joined(open_file(folder / REST), {note: torch.cat(each) for note, each in rows.items()})


def load_sharded(folder: Path, mesh: DeviceMesh) -> Any:
    """The checkpoint with each sharded tensor divided anew among the processes of `mesh`; each reads its own rows only."""
    found: dict[str, list[dict[str, Any]]] = {}
    for part in parts(folder):
        for note, shard in part.items():
            found.setdefault(note, []).append(shard)
    tensors = {note: redistributed(each, mesh) for note, each in found.items()}
    return joined(open_file(folder / REST), tensors)


def rows_between(shards: list[dict[str, Any]], begin: int, end: int) -> Tensor:
    """Rows of a tensor from its shards, which are mapped: only what is wanted is read."""
    return torch.cat([s["rows"][max(begin - s["first"], 0) : max(end - s["first"], 0)] for s in shards])


def redistributed(shards: list[dict[str, Any]], mesh: DeviceMesh) -> DTensor:
    shape = torch.Size(shards[0]["shape"])
    local = rows_between(shards, *share(shape[0], mesh.get_local_rank(), mesh.size()))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local.to(mesh.device_type), mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def remove(path: Path) -> None:
    """A checkpoint, whichever form it has; nothing where there is none."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def take_place(part: Path, path: Path) -> None:
    """Puts the checkpoint `part` where `path` is.

    A file takes a file's place in one go. A folder cannot: for an instant only `<path>.old` is there, and it is looked for.
    """
    if part.is_file() and not path.is_dir():
        part.replace(path)
        return
    old = path.with_name(path.name + ".old")
    if path.exists():
        remove(old)  # left behind by a kill
        path.rename(old)
    part.rename(path)
    remove(old)
