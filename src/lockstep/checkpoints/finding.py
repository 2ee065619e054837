"""Checkpoints on disk: where they are, which are complete, and what they contain. Does not import torch."""

import codecs
import os
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.formatting import warn
from lockstep.config.renames import with_moved
from lockstep.config.run_config import Component
from lockstep.config.schema import GROUPS, RECIPES
from lockstep.errors import UnsafeCheckpoint, UserError
from lockstep.machine.files import open_plain, refuse_odd
from lockstep.machine.world import rank_of
from lockstep.run import RunFolder, find_run, why_not_plain

BEST = re.compile(r"best-step-(\d+)\.ckpt")
SHARD = re.compile(r"shard-\d+-of-\d+\.pt")
REST = "rest.pt"  # next to the shards: everything that is not sharded
DATA = "DataModule"  # Lightning's key for the datamodule's state

# --- Trees of dicts, lists and tuples, as checkpoints are ---

Place = tuple[Any, ...]  # the keys and indices on the way to a leaf


def leaves(tree: Any, path: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Everything in `tree` that is not a dict, list or tuple, with its path."""
    if isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, (*path, key))
    else:
        yield path, tree


def map_leaves(tree: Any, change: Callable[[Place, Any], Any], path: Place = ()) -> Any:
    """`tree` with each leaf replaced by `change(path, leaf)`."""
    if isinstance(tree, dict):
        return {key: map_leaves(value, change, (*path, key)) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map_leaves(value, change, (*path, i)) for i, value in enumerate(tree))
    return change(path, tree)


# --- The content of a checkpoint ---

# The parts that a resumed run needs.
POSITION = (
    "optimizer_states", "lr_schedulers", "callbacks", "loops", "epoch", "global_step", "accumulate_grad_batches", "pytorch-lightning_version",
)  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of Lockstep. Only `parse` creates one, and only `parse` decides whether values are one."""

    path: Path
    values: dict[str, Any]  # everything, as Lightning's hooks receive it
    config: dict[str, Any]  # of the run that saved it, under the current keys
    network: dict[str, Any] | None  # the network's arguments; None if a custom module creates its own network
    metadata: dict[str, Any]  # describes the data: classes, normalisation, ...

    @classmethod
    def parse(cls, path: Path, values: Any) -> "Checkpoint":
        """Raises UserError if `values`, the content of `path`, are not a checkpoint of Lockstep."""
        config = values.get("config") if isinstance(values, dict) else None
        groups = {"loader": {}, **config} if isinstance(config, dict) else {}  # 0.1 had no loader
        is_config = all(isinstance(groups.get(group), dict) for group in GROUPS if group not in RECIPES)
        problem = why_not_plain(config)
        if problem or not is_config or not isinstance(values.get("state_dict"), dict):
            raise UserError(
                f"{path} is not a checkpoint of Lockstep: it has no weights with the config of a run{f' ({problem})' if problem else ''}. Pass a run, or "
                "a .ckpt file from its checkpoints folder. To load other weights into a timm model, set model.checkpoint_path=<file>."
            )
        metadata = values.get("metadata") or values.get(DATA, {}).get("about", {})
        return cls(path, values, with_moved(config), values.get("network"), metadata)

    def component(self, group: str) -> Component:
        return Component.of(self.config[group] or {})

    def require_position(self, *names: str) -> None:
        """Raises UserError if a part is missing that training needs to continue; `names`: those of one kind of run."""
        if missing := [name for name in (*POSITION, "gradient_order", *names) if name not in self.values]:
            why = "does not record where training stopped"
            if "loops" in self.values and "gradient_order" in missing:  # it drew other random numbers
                why = "was saved by an earlier version of Lockstep and can be resumed with lockstep==0.2"
            raise UserError(
                f"{self.path} {why}: it has no {', '.join(missing)}. Pass init_from={self.path} run=<new name> to start a new run from its weights."
            )


# the modules of what tensors and plain values need; `__builtin__` is Python 2's name of `builtins`
KNOWN = {"__builtin__", "builtins", "collections", "torch", "torch.nn.parameter", codecs.encode.__module__}
KNOWN |= {"torch._tensor", "torch._utils", "torch.cuda", "torch.serialization", "torch.sparse", "torch.storage"}


class StandIn:
    """An inert object in place of each tensor or other object in a pickle."""

    def __new__(cls, *_: Any, **__: Any) -> "StandIn":
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass


class Outline(pickle.Unpickler):
    """Reads a pickle without creating its objects: nothing that it names is imported or called."""

    path: Path

    def find_class(self, module: str, name: str) -> Any:
        if module not in KNOWN:
            raise UnsafeCheckpoint(self.path, f"{module}.{name}")
        return OrderedDict if name == "OrderedDict" else StandIn

    def persistent_load(self, reference: Any) -> Any:
        return StandIn()


def read_pickle(path: Path) -> Any:
    """The values in a torch.save file, with stand-ins for tensors. Raises UserError if it is not such a file."""
    file = path / REST if path.is_dir() else path
    try:
        with open_plain(file) as opened, zipfile.ZipFile(opened) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
            with archive.open(name) as pickled:
                outline = Outline(pickled)
                outline.path = path
                return outline.load()
    except (UnsafeCheckpoint, MemoryError):
        raise
    except Exception as e:  # bytes that are not a pickle may raise anything
        raise UserError(
            f"{path} is not a checkpoint of Lockstep: it cannot be read: {' '.join(str(e).split())}."
        ) from None


def read_outline(path: Path) -> Checkpoint:
    """A complete checkpoint without its tensors. Raises UserError if it is not a checkpoint."""
    return Checkpoint.parse(path, read_pickle(path))


def step_of(path: Path) -> int:
    """The number of optimizer steps done in a checkpoint; -1 if it cannot be read."""
    try:
        step = -1 if path.is_symlink() else read_pickle(path)["global_step"]
    except UnsafeCheckpoint:  # crafted: neither a kill nor a disk error produces this
        raise
    except (UserError, LookupError, TypeError):
        return -1
    return step if isinstance(step, int) else -1


# --- Which checkpoints are complete ---


def is_intact(path: Path) -> bool:
    """Whether `path` is an uncompressed zip file, as torch.save writes, whose checksums match."""
    try:
        with open_plain(path) as file, zipfile.ZipFile(file) as archive:
            is_stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())
            return is_stored and archive.testzip() is None
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, RuntimeError):  # RuntimeError: it looks encrypted
        return False


def shard_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("shard-*.pt") if SHARD.fullmatch(path.name))


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is complete: a file, or a folder with all its shards (weights.py)."""
    if not path.is_dir() or path.is_symlink():
        return is_intact(path)
    shards = shard_files(path)
    counts = {int(shard.stem.rpartition("-")[2]) for shard in shards}
    return counts == {len(shards)} and all(is_intact(file) for file in (path / REST, *shards))


def checkpoint_paths(run_dir: Path) -> list[Path]:
    """The checkpoints of a run, complete or not."""
    folder = run_dir / "checkpoints"
    refuse_odd(folder)
    last = [folder / "last.ckpt", folder / "last.ckpt.old"]  # a kill between two renames leaves only `.old`
    return [*[path for path in last if path.exists()][:1], *folder.glob("best-step-*.ckpt")]


def checkpoints(run_dir: Path) -> Iterator[Path]:
    """The complete checkpoints of a run, newest first; incomplete ones are skipped with a warning.

    The newest has the most steps: file times change when a folder is copied. Checksums of older ones are read on
    demand.
    """
    steps = {path: step_of(path) for path in checkpoint_paths(run_dir)}
    for path in sorted(steps, key=lambda path: (steps[path] < 0, steps[path], path.name), reverse=True):
        if steps[path] >= 0 and is_checkpoint(path):
            yield path
        elif rank_of() == 0:
            warn(f"{path} is incomplete or a link, and is skipped.")


# --- The checkpoint that a key names ---


def checkpoint_if_any(run_dir: Path) -> Path | None:
    """The newest complete checkpoint; None if there is no checkpoint at all.

    Raises:
        UserError: all are damaged. A kill cannot cause that, because checkpoints are written whole or not at all.
    """
    newest, paths = next(checkpoints(run_dir), None), checkpoint_paths(run_dir)
    if newest is None and paths:
        raise UserError(
            f"no checkpoint in {run_dir}/checkpoints is complete; damaged or not a checkpoint: "
            f"{', '.join(sorted(path.name for path in paths))}. Restore them from a copy, or pass run=<new name> to start over."
        )
    return newest


def newest_checkpoint(run_dir: Path) -> Path:
    """Raises UserError if the run has none, or all are damaged."""
    if path := checkpoint_if_any(run_dir):
        return path
    raise UserError(f"{run_dir}/checkpoints holds no checkpoint. Pass run=<new name> to start over.")


def checkpoint_of_report(run_dir: Path) -> Path:
    """The checkpoint that the run tested, or its newest if it has not tested one."""
    reported = RunFolder(run_dir).report().get("checkpoint")
    path = run_dir / "checkpoints" / Path(str(reported)).name
    if reported and Path(str(reported)) == path.relative_to(run_dir) and is_checkpoint(path):
        return path
    newest = newest_checkpoint(run_dir)
    if reported is not None and rank_of() == 0:
        warn(f"{run_dir}/report.json: checkpoint={reported} is not a complete checkpoint. Using {newest} instead.")
    return newest


def complete_checkpoint(path: Path, key: str) -> Path:
    """`path` with links resolved, if it is a complete checkpoint. Raises UserError otherwise."""
    if RunFolder(path.absolute().parent.parent).has_config():
        refuse_odd(path)
    path = Path(os.path.realpath(path)) if path.is_symlink() else path  # may be a link to itself
    if not is_checkpoint(path):
        raise UserError(
            f"{key}={path} does not exist, is incomplete, or is not a checkpoint of Lockstep. Pass the path of a .ckpt file, or the name of a run."
        )
    return path


def locate_checkpoint(source: str, key: str, runs_dir: str, choose: Callable[[Path], Path]) -> tuple[Path, Path]:
    """The folder of a run, and the checkpoint that `source` names.

    `source` is a checkpoint, or the name or folder of a run whose checkpoint `choose` selects.

    Raises:
        UserError: there is none, or it is damaged. `key` is for the message.
    """
    path = Path(source)
    if not RunFolder(path).has_config() and (path.is_file() or ".ckpt" in path.suffixes or (path / REST).exists()):
        checkpoint = complete_checkpoint(path, key)
        return checkpoint.resolve().parent.parent, checkpoint
    run_dir = path if RunFolder(path).has_config() else find_run(source, runs_dir, key=key).path
    return run_dir, choose(run_dir)


def tested_checkpoint(source: str, key: str, runs_dir: str = "runs") -> Path:
    """The checkpoint `source`, or the one that the run `source` tested."""
    return locate_checkpoint(source, key, runs_dir, checkpoint_of_report)[1]


def resume_point(resume: str, run: str | None, runs_dir: str) -> tuple[Path, Checkpoint | None]:
    """The folder of the run to resume, and the checkpoint to continue from: None if resume=auto has none yet."""
    if resume == "auto":
        if not run:
            raise UserError("resume=auto continues the run in runs/<run>. Pass run=<name> as well.")
        run_dir, path = Path(runs_dir, run), checkpoint_if_any(Path(runs_dir, run))
    else:
        run_dir, path = locate_checkpoint(resume, "resume", runs_dir, newest_checkpoint)
    if path is None:
        return run_dir, None
    checkpoint = read_outline(path)
    checkpoint.require_position()
    return run_dir, checkpoint
