"""Reads and writes checkpoint files, whole or in shards, and loads weights into a network. Does not import Lightning.

torch.save writes all files, so they load with weights_only=True, and zip checksums show whether they are complete.
"""

import os
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime
from itertools import accumulate, chain
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parameter import is_lazy

from lockstep.checkpoints.finding import REST, Checkpoint, Place, map_leaves, shard_files
from lockstep.config import formatting
from lockstep.errors import UnsafeCheckpoint, UserError
from lockstep.machine.files import open_plain
from lockstep.run import explain_damage

# --- What a checkpoint may hold ---
#
# torch.load accepts tensors, VALUES, lists, tuples and MAPPINGS with weights_only=True. A value of TYPES is saved as such
# values, and the checkpoint lists where under TYPES_KEY, so it is loaded as what it was. Anything else is left out.

MAPPINGS = (dict, OrderedDict, Counter)
VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
FACTORIES: tuple[Any, ...] = (bool, int, float, str, list, dict, set)  # of a defaultdict; checkpoints have the index
# the plain form of a value, and back
TYPES: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    **{cls: (list, cls) for cls in (tuple, set, frozenset)},  # tuples with values of these types
    **{cls: (cls.isoformat, cls.fromisoformat) for cls in (date, datetime)},
    type(Path()): (str, Path),
    deque: (lambda x: [x.maxlen, *x], lambda x: deque(x[1:], x[0])),
    defaultdict: (lambda x: [FACTORIES.index(x.default_factory), {**x}], lambda x: defaultdict(FACTORIES[x[0]], x[1])),
    np.ndarray: (
        lambda x: x.tolist() if x.dtype.kind in "US" else torch.from_numpy(np.array(x, order="C")),
        lambda x: x.numpy().copy() if isinstance(x, Tensor) else np.array(x),
    ),
    **{np.dtype(code).type: (lambda x: x.item(), np.dtype(code).type) for code in "?bhilqBHILQefdFDUS"},
}
TYPES_KEY = "lockstep.types"  # a hook of a user may save `types`
BY_NAME = {cls.__name__: back for cls, (_, back) in TYPES.items()}


def to_plain(tree: Any, types: list[Any], omitted: list[str], path: Place = ()) -> Any:
    """`tree` as plain values, without copying parts that are plain.

    Adds to `types` the path and name of each type to restore, inner ones first, and to `omitted` the entries of dicts that
    cannot be saved. Raises LookupError, TypeError or ValueError for a value outside of dicts.
    """
    tree = formatting.plain(tree)  # may be a Hydra node
    if isinstance(tree, Tensor) and (tree.layout != torch.strided or tree.is_quantized):
        raise TypeError  # the copy for writing in the background cannot hold it
    if type(tree) in VALUES or (isinstance(tree, Tensor) and type(tree).__module__.partition(".")[0] == "torch"):
        return tree
    if type(tree) in MAPPINGS:
        items = {}
        for old, value in tree.items():
            key, known = old.item() if isinstance(old, np.generic) else old, len(types)
            try:
                if to_plain(key, [], []) is not key:
                    raise TypeError
                items[key] = to_plain(value, types, omitted, (*path, key))
            except (LookupError, TypeError, ValueError):
                del types[known:]
                omitted.append(".".join(map(str, (*path, key))))
        unchanged = [*map(id, chain(*items.items()))] == [*map(id, chain(*tree.items()))]
        return tree if unchanged else type(tree)(items)
    if type(tree) in (list, tuple):
        values = [to_plain(value, types, omitted, (*path, i)) for i, value in enumerate(tree)]
        if [*map(id, values)] == [*map(id, tree)]:
            return tree
    else:
        values = to_plain(TYPES[type(tree)][0](tree), types, omitted, path)
    if type(tree) is not list:
        types.append((path, type(tree).__name__))
    return values


def make_plain(checkpoint: dict[str, Any]) -> list[str]:
    """Converts a checkpoint in place. Returns the names of what it leaves out."""
    types, omitted = list[Any](), list[str]()
    values = {key: value for key, value in checkpoint.items() if not key.endswith("hparams_type")}  # a class
    checkpoint.clear()
    checkpoint.update(to_plain(values, types, omitted) | {TYPES_KEY: types})
    return omitted


def restore_types(content: Any) -> Any:
    """Undoes `make_plain`."""
    for (*parents, key), name in content.pop(TYPES_KEY, ()) if isinstance(content, dict) else ():
        parent = content
        for each in parents:
            parent = parent[each]
        parent[key] = BY_NAME.get(name, lambda x: x)(parent[key])
    return content


def plain(tree: dict[str, Any], name: str) -> dict[str, Any]:
    """`tree` with NumPy values converted to Python's.

    Raises UserError for other values that cannot be saved: before training, not at the first checkpoint.
    """
    values: dict[str, Any] = map_leaves(tree, lambda _, x: x.tolist() if isinstance(x, np.generic | np.ndarray) else x)
    saved = {**values}
    if rejected := make_plain(saved) or [path[0] for path, _ in saved[TYPES_KEY]]:
        raise UserError(f"{name}/{rejected[0]} cannot be saved in a checkpoint. Use plain values and lists of them.")
    return values


# --- Files ---


def write(content: Any, path: Path) -> None:
    """torch.save, then fsync."""
    with open_plain(path, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def open_file(path: Path) -> Any:
    """Tensors and plain values, memory-mapped. Raises any error if the file is damaged."""
    open_plain(path).close()  # torch memory-maps by path only
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (UnpicklingError, RuntimeError) as e:
        if "weights_only" in str(e):  # torch's own message suggests running the file's code
            raise UnsafeCheckpoint(path, "rejected by torch.load") from None
        raise


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
    write({**shards, "global_step": rest["global_step"]}, folder / f"shard-{rank:05}-of-{world:05}.pt")
    if rank == 0:
        write(rest, folder / REST)


def load(path: Path, mesh: DeviceMesh | None = None) -> Any:
    """The values of a checkpoint on the CPU, with whole tensors and the types that it was saved with.

    With a `mesh`, tensors from a folder of shards are sharded over it, regardless of how many processes wrote them.
    Each process reads only its rows.
    """
    with explain_damage(path, "Restore it from a copy, or move it away."):
        if not path.is_dir():
            return restore_types(open_file(path))
        rest = open_file(path / REST)
        shards: dict[str, list[dict[str, Any]]] = {}  # by note, memory-mapped
        for file in shard_files(path):
            part = open_file(file)
            if part.pop("global_step", rest["global_step"]) != rest["global_step"]:
                raise ValueError(f"{file.name} is of a different step than {REST}")
            for note, shard in part.items():
                shards.setdefault(note, []).append(shard)
        tensors = {note: joined(parts, mesh) for note, parts in shards.items()}
        rest = map_leaves(rest, lambda _, x: tensors[x] if isinstance(x, str) and x.startswith(PLACEHOLDER) else x)
        return restore_types(rest)


def rows_between(shards: list[dict[str, Any]], begin: int, end: int) -> Tensor:
    """Rows `begin` to `end` of a tensor; only these are read from the memory-mapped shards."""
    return torch.cat([s["rows"][max(begin - s["first"], 0) : max(end - s["first"], 0)] for s in shards])


def joined(shards: list[dict[str, Any]], mesh: DeviceMesh | None) -> Tensor:
    """The whole tensor, or sharded over `mesh`. Raises ValueError if the shards are not all rows of one tensor."""
    shards.sort(key=lambda shard: shard["first"])
    shape, rows = torch.Size(shards[0]["shape"]), [*accumulate((len(s["rows"]) for s in shards), initial=0)]
    found = [(s["first"], *s["shape"], *s["rows"].shape[1:]) for s in shards]
    if found != [(row, *shape, *shape[1:]) for row in rows[:-1]] or rows[-1] != shape[0]:
        raise ValueError("its shards do not fit together")
    if mesh is None:
        return torch.cat([shard["rows"] for shard in shards])
    local = rows_between(shards, *row_range(shape[0], mesh.get_local_rank(), mesh.size()))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local.to(mesh.device_type), mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


# --- From a checkpoint into a network: the only code that compares names and shapes ---

SHOWN = 5  # names in a message


def read(path: Path) -> Checkpoint:
    """A checkpoint on the CPU, with joined shards. Raises UserError if it is damaged or not a checkpoint."""
    return Checkpoint.parse(path, load(path))


def load_module_weights(module: Any, checkpoint: Checkpoint) -> None:
    """Loads the weights of a custom module, as Lightning does. Raises UserError if the checkpoint does not fit."""
    module.on_load_checkpoint(checkpoint.values)
    saved = checkpoint.values["state_dict"]  # the hook may have replaced it
    materialize(module, saved)
    load_into(module, saved, checkpoint.path, strict=module.strict_loading)


def materialize(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Gives lazy layers the shapes of their saved weights."""
    tensors = chain(module.named_parameters(), module.named_buffers())
    lazy = [name for name, tensor in tensors if is_lazy(tensor) and name in saved]
    if lazy:
        module.load_state_dict({name: saved[name] for name in lazy}, strict=False)


def sharded_like(value: Any, like: Tensor) -> Any:
    """A value of a checkpoint in the form of `like`: this process's shard, or the whole value."""
    is_whole = isinstance(value, Tensor) and not isinstance(value, DTensor)
    if not isinstance(like, DTensor) or not is_whole or value.shape != like.shape:  # such as an optimizer's step count
        return value
    # Every process has read the checkpoint and takes its own shard: no communication.
    return distribute_tensor(value.to(like.device).contiguous(), like.device_mesh, like.placements, src_data_rank=None)


def differences(target: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> Iterator[str]:
    for kind, names in (("missing", target.keys() - saved.keys()), ("unexpected", saved.keys() - target.keys())):
        if names:
            yield f"{kind}: {', '.join(sorted(names)[:SHOWN])}"
    pairs = [(name, *map(describe_value, (saved[name], value))) for name, value in target.items() if name in saved]
    yield from [f"{name} is {got} instead of {expected}" for name, got, expected in pairs if got != expected][:SHOWN]


def describe_value(value: Any) -> str:
    """What must agree between a weight and its saved value."""
    kind = "complex " * value.is_complex() if isinstance(value, Tensor) else f"a {type(value).__name__} "
    return f"{kind}{tuple(getattr(value, 'shape', ()))}"


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
