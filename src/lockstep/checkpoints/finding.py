"""Finding checkpoints on disk, and which of them are complete. Free of torch."""

import pickletools
import re
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.machine.world import rank_of
from lockstep.run.folder import RunFolder, find_run

# --- Trees of dicts, lists and tuples, as checkpoints are. Free of torch ---

Place = tuple[Any, ...]  # the keys and indices that lead to a leaf


def leaves(tree: Any, path: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Everything in `tree` that is no dict, list or tuple, with its path."""
    if isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, (*path, key))
    else:
        yield path, tree


def mapped(tree: Any, change: Callable[[Place, Any], Any], path: Place = ()) -> Any:
    """`tree` with `change(path, leaf)` in place of each leaf."""
    if isinstance(tree, dict):
        return {key: mapped(value, change, (*path, key)) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(mapped(value, change, (*path, i)) for i, value in enumerate(tree))
    return change(path, tree)


# --- Finding checkpoints on disk, and which of them are complete. Free of torch ---

BEST = re.compile(r"best-step-(\d+)\.ckpt")


def is_complete_file(path: Path) -> bool:
    """Whether the zip checksums of a file of torch.save are right. Reads no device or pipe, and no more bytes than the file has."""
    try:
        if not path.is_file():
            return False
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()  # torch.save compresses nothing
            plain = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
            return plain and sum(e.file_size for e in entries) <= path.stat().st_size and archive.testzip() is None
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, RuntimeError):  # RuntimeError: it seems to be encrypted
        return False


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a complete checkpoint: a file, or a folder with all its shards (see shards.py)."""
    if not path.is_dir():
        return is_complete_file(path)
    shards = sorted(path.glob("shard-*-of-*.pt"))
    world = int(shards[0].stem.rpartition("-")[2]) if shards else -1
    return len(shards) == world and all(map(is_complete_file, [path / "rest.pt", *shards]))


def step_of(path: Path) -> int:
    """The optimizer steps done in a complete checkpoint, read from its pickle without loading it; -1 if it does not say."""
    file = path / "rest.pt" if path.is_dir() else path
    with zipfile.ZipFile(file) as archive:
        pickle = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        operations = pickletools.genops(archive.read(pickle))
        values = (arg for op, arg, _ in operations if "PUT" not in op.name and arg is not None)
        return next((int(next(values, -1)) for value in values if value == "global_step"), -1)


def found_in(run_dir: Path) -> list[Path]:
    """The checkpoints of a run, complete or not."""
    folder = run_dir / "checkpoints"
    last = [folder / "last.ckpt", folder / "last.ckpt.old"]  # a kill between two renamings leaves only `.old`
    found = [next((path for path in last if path.exists()), last[0])]
    return [path for path in [*found, *folder.glob("best-step-*.ckpt")] if path.exists()]


def checkpoints(run_dir: Path) -> Iterator[Path]:
    """The complete checkpoints of a run, newest first; incomplete ones are skipped with a warning.

    The newest is the one with the most steps: file times change when a folder is copied.
    """
    found = found_in(run_dir)
    complete = [path for path in found if is_checkpoint(path)]
    if rank_of() == 0:
        for path in sorted(set(found) - set(complete)):
            print(f"WARNING: {path} is incomplete and is skipped.", file=sys.stderr)
    yield from sorted(complete, key=lambda path: (step_of(path), path.name), reverse=True)


def checkpoint_if_any(run_dir: Path) -> Path | None:
    """The newest complete checkpoint; None if there is no checkpoint at all.

    Raises:
        UserError: all are damaged. A kill cannot do that, as checkpoints are written whole or not at all.
    """
    newest, found = next(checkpoints(run_dir), None), found_in(run_dir)
    if newest is None and found:
        raise UserError(
            f"no checkpoint in {run_dir}/checkpoints is complete; damaged, or something else: "
            f"{', '.join(sorted(path.name for path in found))}. Bring them back from a copy, or type run=<another name> to start over."
        )
    return newest


def newest_checkpoint(run_dir: Path, key: str) -> Path:
    for path in checkpoints(run_dir):
        return path
    raise UserError(
        f"{key}={run_dir.name}: {run_dir}/checkpoints holds no complete checkpoint. Type run=<another name> to start over."
    )


def checkpoint_of_report(run_dir: Path) -> Path:
    """The checkpoint that the run tested, or its newest one if it did not get that far."""
    named = RunFolder(run_dir).report().get("checkpoint")
    path = run_dir / str(named) if named else None
    return path if path is not None and is_checkpoint(path) else newest_checkpoint(run_dir, "run")


def complete_checkpoint(path: Path, key: str) -> Path:
    """`path`, if it is a complete checkpoint. Raises UserError otherwise."""
    if not path.exists():
        raise UserError(f"{key}={path} does not exist. Type the path of a .ckpt file, or run=<name>.")
    if not is_checkpoint(path):
        raise UserError(
            f"{key}={path} is not a complete checkpoint: it is cut off, damaged, or something else. Try another file of that folder."
        )
    return path


def tested_checkpoint(given: str, key: str, runs_dir: str = "runs") -> Path:
    """The checkpoint `given`, or the one that the run `given`, a name or a directory, tested. `key` is for messages.

    Raises:
        UserError: there is none, or it is damaged.
    """
    path = Path(given)
    if RunFolder(path).has_config():
        return checkpoint_of_report(path)
    if path.suffix == ".ckpt" or path.exists():
        return complete_checkpoint(path, key)
    return checkpoint_of_report(find_run(given, runs_dir, key=key).path)
