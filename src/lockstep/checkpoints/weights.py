"""Reads and writes checkpoint files, whole or in shards, and loads weights into a network. Does not import Lightning.

torch.save writes all files, so they load with weights_only=True, and zip checksums show whether they are complete.
"""

import os
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parameter import is_lazy

from lockstep.checkpoints.finding import REST, Checkpoint, map_leaves, max_values, shard_files
from lockstep.config import formatting
from lockstep.config.instantiate import network
from lockstep.errors import UnsafeCheckpoint, UserError, oom_with_path
from lockstep.machine.files import open_plain
from lockstep.machine.process import seeded_and_restored
from lockstep.run import explain_damage, why_not_plain

# --- Values that torch.load accepts with weights_only=True, as checkpoints are loaded ---

MAPPINGS = (dict, OrderedDict, Counter)
SEQUENCES = (list, tuple, set)
VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def unsafe_values(tree: Any, path: str = "") -> Iterator[str]:
    """The paths and types of the values that torch.load rejects."""
    if type(tree) in MAPPINGS:
        for key, value in tree.items():
            yield from unsafe_values(key, f"{path}/{key}")
            yield from unsafe_values(value, f"{path}/{key}")
    elif type(tree) in SEQUENCES:
        for index, value in enumerate(tree):
            yield from unsafe_values(value, f"{path}/{index}")
    elif type(tree) not in VALUES and not isinstance(tree, Tensor):
        yield f"{path} ({type(tree).__module__}.{type(tree).__qualname__})"


# what save_hyperparameters() and users' hooks add to a checkpoint
HPARAMS = ("hyper_parameters", "datamodule_hyper_parameters")


def omit_hyperparameters(checkpoint: dict[str, Any]) -> Iterator[str]:
    """Removes hyperparameters that torch.load rejects, and yields their names.

    A resumed run does not need them, because a config creates the module.
    """
    for name in ("hparams_type", "datamodule_hparams_type"):  # a class
        checkpoint.pop(name, None)
    for key in HPARAMS:
        if key in checkpoint:
            values = formatting.plain(checkpoint[key])  # may be a Hydra node
            values = values if isinstance(values, Mapping) else vars(values)  # a Namespace
            checkpoint[key] = {name: value for name, value in values.items() if not any(unsafe_values({name: value}))}
            yield from (f"{key}.{name}" for name in values if name not in checkpoint[key])


def plain(tree: dict[str, Any], name: str) -> dict[str, Any]:
    """`tree` with NumPy values converted to Python's.

    Raises UserError for other values that cannot be saved: before training, not at the first checkpoint.
    """
    values: dict[str, Any] = map_leaves(tree, lambda _, x: x.tolist() if isinstance(x, np.generic | np.ndarray) else x)
    if rejected := next(unsafe_values(values), None):
        raise UserError(f"{name}{rejected} cannot be saved in a checkpoint. Use plain Python values and lists of them.")
    return values


# --- Files ---


def write(content: Any, path: Path) -> None:
    """torch.save, then fsync."""
    with open_plain(path, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def open_file(path: Path) -> Any:
    """Tensors and plain values, memory-mapped.

    Raises UserError if the file is damaged: its checksums do not cover the table of contents.
    """
    with oom_with_path(path):
        try:
            open_plain(path).close()  # torch memory-maps by path only
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            if problem := why_not_plain(content, references=True, most=max_values(path)):
                raise ValueError(problem)
            return content
        except (UnpicklingError, RuntimeError, ValueError, LookupError, EOFError, OSError) as e:
            if "weights_only" in str(e):  # torch's own message suggests running the file's code
                raise UnsafeCheckpoint("rejected by torch.load", path) from None
            if "allocate memory" in str(e).lower():  # for a memory mapping
                raise MemoryError from None
            raise UserError(
                f"{path} is damaged ({str(e).splitlines()[0]}). Restore it from a copy, or remove it; resume=auto then uses the newest "
                "complete checkpoint."
            ) from None


# --- A checkpoint as a folder ---
#
# Each process writes its shards of the sharded tensors, and rank 0 everything else. `rest.pt` holds the checkpoint with
# a note, a string, in place of each sharded tensor. `shard-<rank>-of-<world>.pt` maps each note to that tensor's rows,
# starting at row `first`. torch.distributed.checkpoint is no alternative: it stores its metadata as a pickle, which may
# run code.

PLACEHOLDER = "sharded tensor "  # followed by the tensor's path; no other string in a checkpoint begins like this


def row_range(rows: int, rank: int, world: int) -> tuple[int, int]:
    """The first row of a process's shard and the row after its last, divided as by torch.chunk and FSDP2."""
    size = -(-rows // world)
    return min(rank * size, rows), min((rank + 1) * size, rows)


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
        name = PLACEHOLDER + "/".join(map(str, path))
        first, _ = row_range(leaf.shape[0], leaf.device_mesh.get_local_rank(), leaf.device_mesh.size())
        shards[name] = {"first": first, "shape": list(leaf.shape), "rows": leaf.to_local().detach()}
        return name

    return map_leaves(content, note), shards


def save(rest: Any, shards: dict[str, Any], folder: Path, rank: int, world: int) -> None:
    """Writes this process's part into an existing folder. The checkpoint is complete when all processes return."""
    write(shards, folder / f"shard-{rank:05}-of-{world:05}.pt")
    if rank == 0:
        write(rest, folder / REST)


def load(path: Path, mesh: DeviceMesh | None = None) -> Any:
    """The values of a checkpoint on the CPU, with whole tensors.

    With a `mesh`, tensors from a folder of shards are sharded over it, regardless of how many processes wrote them.
    Each process reads only its rows.
    """
    if not path.is_dir():
        return open_file(path)
    shards: dict[str, list[dict[str, Any]]] = {}  # by note, in the order of their rows, memory-mapped
    with explain_damage(path, "Restore it from a copy."):
        for file in shard_files(path):
            for note, shard in open_file(file).items():
                shards.setdefault(note, []).append(shard)
        tensors = {
            note: resharded(parts, mesh) if mesh else torch.cat([part["rows"] for part in parts])
            for note, parts in shards.items()
        }
    return map_leaves(
        open_file(path / REST),
        lambda _, leaf: tensors[leaf] if isinstance(leaf, str) and leaf.startswith(PLACEHOLDER) else leaf,
    )


def rows_between(shards: list[dict[str, Any]], begin: int, end: int) -> Tensor:
    """Rows `begin` to `end` of a tensor; only these are read from the memory-mapped shards."""
    return torch.cat([s["rows"][max(begin - s["first"], 0) : max(end - s["first"], 0)] for s in shards])


def resharded(shards: list[dict[str, Any]], mesh: DeviceMesh) -> DTensor:
    shape = torch.Size(shards[0]["shape"])
    local = rows_between(shards, *row_range(shape[0], mesh.get_local_rank(), mesh.size()))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local.to(mesh.device_type), mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


# --- From a checkpoint into a network: the only code that compares names and shapes ---

SHOWN = 5  # names in a message


def read(path: Path) -> Checkpoint:
    """A checkpoint on the CPU, with joined shards. Raises UserError if it is damaged or not a checkpoint."""
    return Checkpoint.parse(path, load(path))


def load_network(path: Path) -> nn.Module | None:
    """The network of a checkpoint with its weights, in evaluation mode; None if a custom module defines its own.

    Raises UserError if train.py created the network.
    """
    checkpoint = read(path)
    if checkpoint.network is None:
        return None
    if not (model := checkpoint.component("model")):
        raise UserError(
            f"{path}: the network of this run is created in its train.py. Create it there, and load the weights with torch.load."
        )
    with seeded_and_restored(checkpoint.config["seed"]):  # what a network draws may be in no checkpoint
        net = network(model, checkpoint.network, with_weights=False)
    load_into(net, checkpoint.weights, path)
    return net.eval()


def load_module_weights(module: Any, checkpoint: Checkpoint) -> None:
    """Loads the weights of a custom module, as Lightning does. Raises UserError if the checkpoint does not fit."""
    module.on_load_checkpoint(checkpoint.values)
    materialize(module, checkpoint.state_dict)
    load_into(module, checkpoint.state_dict, checkpoint.path, strict=module.strict_loading)


def materialize(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Gives lazy layers the shapes of their saved weights."""
    tensors = chain(module.named_parameters(), module.named_buffers())
    lazy = [name for name, tensor in tensors if is_lazy(tensor) and name in saved]
    if lazy:
        module.load_state_dict({name: saved[name] for name in lazy}, strict=False)


def sharded_like(value: Any, like: Tensor) -> Any:
    """A value of a checkpoint in the form of `like`: this process's shard, or the whole value."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if value.shape != like.shape:  # an optimizer's step count
        return value
    # Every process has read the checkpoint and takes its own shard: no communication.
    return distribute_tensor(value.to(like.device).contiguous(), like.device_mesh, like.placements, src_data_rank=None)


def differences(target: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> Iterator[str]:
    for kind, names in (("missing", target.keys() - saved.keys()), ("unexpected", saved.keys() - target.keys())):
        if names:
            yield f"{kind}: {', '.join(sorted(names)[:SHOWN])}"
    pairs = [(name, *map(describe_tensor, (saved[name], tensor))) for name, tensor in target.items() if name in saved]
    yield from [f"{name} is {got} instead of {expected}" for name, got, expected in pairs if got != expected][:SHOWN]


def describe_tensor(value: Any) -> str:
    """What must agree between a weight and its saved value: copying one form into another fails or loses a part."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    properties = {"sparse": value.layout is not torch.strided, "meta": value.is_meta, "complex": value.is_complex()}
    return " ".join([*(name for name, applies in properties.items() if applies), str(tuple(value.shape))])


@torch.no_grad()
def load_into(module: nn.Module, saved: Mapping[str, Any], source: object, *, strict: bool = True) -> None:
    """Loads `saved`, a state_dict, into `module`.

    Weights are copied one by one, so a sharded network needs no whole copy. The rest of a state_dict has no place of its
    own in the module: extra state, and the states of metrics.

    Raises:
        UserError: shapes differ, or names if `strict`. The message calls the checkpoint `source`.
    """
    target = module.state_dict()
    if not strict:
        target, saved = ({name: tree[name] for name in target if name in saved} for tree in (target, saved))
    if errors := list(differences(target, saved)):
        raise UserError(
            f"{source} does not fit the network: {'; '.join(errors)}. Use the model and data that it was trained with."
        )
    tensors = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    weights = {name for name, _ in tensors} & target.keys()
    for name in weights:
        target[name].copy_(sharded_like(saved[name], target[name]))
    if rest := {name: saved[name] for name in target if name not in weights}:
        device = next((target[name].device for name in weights), torch.device("cpu"))
        # `saved` may be memory-mapped
        copies = map_leaves(rest, lambda _, leaf: leaf.to(device, copy=True) if isinstance(leaf, Tensor) else leaf)
        module.load_state_dict(copies, strict=False)
