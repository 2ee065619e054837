"""Finding runs and checkpoints on disk, and which checkpoints are complete. Free of torch."""

import difflib
import os
import pickletools
import re
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lockstep.config.run_files import read_report
from lockstep.errors import UserError
from lockstep.machine.world import rank_of

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


# --- Finding runs and checkpoints on disk, and which checkpoints are complete. Free of torch ---

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


def run_folders(runs_dir: Path) -> Iterator[Path]:
    """The folders of all runs below `runs_dir`. A job that failed before it began has only a report.

    W&B's folders and exported folders have a config.yaml too, but neither checkpoints/ nor metrics.csv.
    """
    for place, folders, files in os.walk(runs_dir):
        if "report.json" in files or ("config.yaml" in files and ("checkpoints" in folders or "metrics.csv" in files)):
            yield Path(place)


def find_run(runs_dir: str, name: str, key: str) -> Path:
    """The directory of run `name`. Raises UserError that names similar runs. `key` is the config key that named it."""
    path = Path(runs_dir) / name
    if (path / "config.yaml").is_file():
        return path
    raise UserError(
        f"{key}={name}: neither a checkpoint nor a run ({path}/config.yaml is missing). {similar_runs(runs_dir, name)}"
    )


def run_with(file: str, given: str | Path, runs_dir: str | Path) -> Path:
    """The folder of the run `given`, a name or a directory, that holds `file`. Raises UserError that names similar runs."""
    for folder in (Path(given), Path(runs_dir) / given):
        if (folder / file).is_file():
            return folder
    raise UserError(
        f"{given} is not a run: neither {given}/{file} nor {runs_dir}/{given}/{file} exists. {similar_runs(str(runs_dir), str(given))}"
    )


def similar_runs(runs_dir: str, name: str) -> str:
    """For messages: the runs of similar names, or else the last ones."""
    begun = sorted(found for found in run_folders(Path(runs_dir)) if (found / "config.yaml").is_file())
    names = [found.relative_to(runs_dir).as_posix() for found in begun]
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.4) or names[-3:]
    return f"Runs there: {', '.join(near)}." if near else f"There are no runs in {runs_dir}/."


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
    named = read_report(run_dir).get("checkpoint")
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
    if (path / "config.yaml").is_file():
        return checkpoint_of_report(path)
    if path.suffix == ".ckpt" or path.exists():
        return complete_checkpoint(path, key)
    return checkpoint_of_report(find_run(runs_dir, given, key))
