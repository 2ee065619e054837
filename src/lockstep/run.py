"""A run's folder, `runs/<name>`: reads and writes its config, report, metrics and lock. Free of torch.

A file that the user may have damaged raises a UserError that names the file.
"""

import csv
import json
import logging
import os
import platform
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from lockstep.errors import FolderRemoved, UserError, did_you_mean, outcome_of
from lockstep.machine import files

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # PyYAML may be built without libyaml
PATIENCE_S = 1.0  # another process may hold the lock for a moment to check it
log = logging.getLogger("lockstep")


@contextmanager
def explain_damage(path: Path, advice: str) -> Iterator[None]:
    """Turns any error of the block that reads `path` into a UserError: the file may contain anything."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as e:
        reason, _, _ = str(getattr(e, "strerror", None) or e).partition("\n")
        raise UserError(f"{path} is damaged: {reason}. {advice}") from None


MOST_VALUES = 1_000_000  # of a config
BUSY_S = 0.2  # an evaluation may write to the folder of a run that trains
CONFIG_ADVICE = "Restore the file, or set run=<new name> to start over."
ROWS_ADVICE = "Repair the file, or move it away to continue the run without its earlier rows."


def why_not_plain(tree: Any) -> str | None:
    """Why a saved config cannot have been written by a run; None if it can. A run writes only values.

    OmegaConf would resolve a `${` of an untrusted file, and YAML aliases can make a small file expand without end.
    """
    nodes = [tree]
    for node in nodes:
        children = (*node, *node.values()) if isinstance(node, dict) else node if isinstance(node, list | tuple) else ()
        if len(nodes) + len(children) > MOST_VALUES:
            return f"it has more than {MOST_VALUES:,} values"
        if isinstance(node, str) and ("${" in node or node == "???"):
            return f"it contains {node[:80]}, but the config of a run contains only values"
        nodes += children
    return None


class CsvLog:
    """A CSV file that a run appends to. A new name adds a column. An incomplete last row after a kill is ignored."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: list[str] = []  # of the file, once it has been read or written

    def rows(self) -> list[dict[str, str]]:
        """The rows; empty without a file. A row without a step, as loggers may write it, gets that of the previous row.

        Raises:
            UserError: the file is damaged, e.g. a step is not a whole number.
        """
        with explain_damage(self.path, ROWS_ADVICE):
            text = files.read_text(self.path) if self.path.exists() else ""
            reader = csv.DictReader(line for line in text.splitlines(keepends=True) if line.endswith("\n"))
            self.columns, rows, step = list(reader.fieldnames or ()), list(reader), "0"
            for row in rows:
                step = row["step"] = str(int(float(row["step"] or step)))
        return rows

    def append(self, *rows: Mapping[str, Any]) -> None:
        names = dict.fromkeys(name for row in rows for name in row)
        try:
            if not (self.path.exists() and names.keys() <= set(self.columns) and self.path.stat().st_nlink == 1):
                previous_rows = self.rows()
                self.columns += [name for name in names if name not in self.columns]
                files.write_csv(self.path, self.columns, [*previous_rows, *rows])
                return
            with files.open_plain(self.path, "a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self.columns).writerows(rows)
        except FileNotFoundError:
            raise FolderRemoved(self.path.parent) from None

    def keep(self, is_kept: Callable[[dict[str, str]], bool]) -> None:
        if self.path.exists():
            rows = self.rows()
            files.write_csv(self.path, self.columns, (row for row in rows if is_kept(row)))


class RunFolder:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_file, self.report_file = self.path / "config.yaml", self.path / "report.json"
        self.log_file, self.page_file = self.path / "train.log", self.path / "report.html"
        self.panels_file = self.path / "panels.json"
        self.checkpoints, self.logs = self.path / "checkpoints", self.path / "logs"
        self.metrics_log = CsvLog(self.path / "metrics.csv")
        self.digests_log = CsvLog(self.path / "digests.csv")  # of each step's losses, gradients and weights
        self.lock_file = self.path / ".lock"
        self.is_locked = partial(files.is_held, self.lock_file)

    # --- Files that later commands read ---

    def has_config(self) -> bool:
        """Whether the run has begun."""
        return self.config_file.is_file()

    def saved_config(self) -> tuple[dict[str, Any], str]:
        """config.yaml as plain values, and its text. OmegaConf takes 20 ms for a config where libyaml takes 2."""
        with explain_damage(self.config_file, CONFIG_ADVICE):
            values = yaml.load(text := files.read_text(self.config_file), LOADER)
            if (reason := why_not_plain(values)) or not isinstance(values, dict):
                raise ValueError(reason or "it is not a config")
        return values, text

    def report(self) -> dict[str, Any]:
        """The report; empty without a file. A run is `died` if it is `running` on this machine but its lock is free."""
        with explain_damage(self.report_file, "Remove the file: the run continues without it."):
            report = json.loads(files.read_text(self.report_file)) if self.report_file.exists() else {}
            if not isinstance(report, dict) or (not report and self.report_file.exists()):
                raise ValueError("it is not a report")
        is_local = report.get("status") == "running" and report.get("host") == socket.gethostname()
        return report | {"status": "died"} if is_local and not self.is_locked() else report

    def metrics(self) -> list[dict[str, float]]:
        """The rows of metrics.csv, without empty cells; no rows without a file."""
        with explain_damage(self.metrics_log.path, ROWS_ADVICE):
            rows = [{name: float(value) for name, value in row.items() if value} for row in self.metrics_log.rows()]
        return rows

    def log_lines(self) -> list[str]:
        content = files.read_bytes(self.log_file) if self.log_file.exists() else b""
        return content.decode(errors="replace").splitlines()

    def refuse_links(self) -> None:
        """Raises UserError if the run contains a link, a pipe or a device: it could lead to files elsewhere."""
        folders = (self.path, self.logs, self.path / "tensorboard")
        files.refuse_odd(*(path for folder in folders if folder.is_dir() for path in folder.iterdir()))

    # --- Files that the run writes ---

    def write_report(self, report: Mapping[str, Any]) -> None:
        files.write_json(self.report_file, dict(report))

    def record_end(self, error: BaseException) -> None:
        """Writes how a run ended if its own processes could not.

        Ctrl-C also replaces `failed`: a process may have failed because another one was already gone.
        """
        outcome, report = outcome_of(error), self.report()
        unfinished = ("running", "died")
        replaceable = {"interrupted": (*unfinished, "failed"), "refused": ()}.get(outcome.status, unfinished)
        if report.get("status") in replaceable:
            self.write_report(report | {"status": outcome.status, "error": outcome.error})

    def truncate_logs(self, steps: int) -> None:
        """Drops the rows after step `steps`, which a resumed run will write again."""
        for log in (self.digests_log, self.metrics_log):  # metrics_log is already validated
            log.keep(lambda row: int(row["step"]) <= steps)

    def drop_tests(self, metrics: Iterable[str]) -> None:
        """Drops the rows of earlier tests, which contain only these metrics."""
        names = {"step", *metrics}
        self.metrics_log.keep(lambda row: any(value and name not in names for name, value in row.items()))

    def discard(self) -> None:
        """Removes the files of a run that died before its first checkpoint."""
        for file in (self.config_file, self.metrics_log.path, self.digests_log.path):
            file.unlink(missing_ok=True)
        shutil.rmtree(self.path / "tensorboard", ignore_errors=True)

    def snapshot_restorer(self) -> Callable[[], None]:
        """A function that restores the current state of the folder, for a run that cannot start."""
        if not self.path.exists() or {file.name for file in self.path.iterdir()} <= {self.lock_file.name}:
            return partial(files.remove, self.path)
        paths = (self.config_file, self.report_file, self.page_file)
        contents = {file: files.read_text(file) if file.is_file() else None for file in paths}

        def restore() -> None:
            for file, text in contents.items():
                file.unlink(missing_ok=True) if text is None else files.write_text(file, text)

        return restore

    # --- One process at a time ---

    @contextmanager
    def locked(self, patience_s: float = PATIENCE_S) -> Iterator[None]:
        """Creates the folder and holds its lock within the block. Afterwards, removes the new folders that are empty.

        Raises:
            UserError: another process still holds the lock after `patience_s` seconds.
        """
        self.refuse_links()
        new_folders = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        in_use = f"{self.path} is in use: another process is training there. Wait until it ends or stop it, then rerun the command with resume=auto. Or set run=<new name>."
        try:
            with files.locked(self.lock_file, in_use, patience_s):
                files.remove_parts(self.checkpoints, age_s=0)  # left by a run that was killed while saving
                files.remove_parts(self.path, age_s=BUSY_S)
                yield
        finally:
            for folder in new_folders:
                with suppress(OSError):  # it is not empty
                    folder.rmdir()


# --- Finding runs ---


def run_folders(runs_dir: str | Path) -> Iterator[RunFolder]:
    """All runs below `runs_dir`. A job that failed before it started has only a report.

    W&B's folders and exported folders have a config.yaml too, but neither checkpoints/ nor metrics.csv.
    """
    for path, folders, names in os.walk(runs_dir):
        folders[:] = [name for name in folders if not name.startswith(files.PART)]  # still being written
        if "report.json" in names or ("config.yaml" in names and ("checkpoints" in folders or "metrics.csv" in names)):
            yield RunFolder(path)


def find_run(run: str | Path, runs_dir: str | Path, *, needs: str = "config.yaml", key: str = "") -> RunFolder:
    """The run with this name that has the file `needs`. Without a config `key`, `run` may also be the path of a run.

    Raises:
        UserError: there is no such run; the message suggests a similar one and lists the last ones.
    """
    places = [Path(folder, run) / needs for folder in ((runs_dir,) if key else (runs_dir, ""))]
    for file in places:
        if file.is_file():
            return RunFolder(file.parent)
    names = sorted(item.path.relative_to(runs_dir).as_posix() for item in run_folders(runs_dir) if item.has_config())
    given = f"{key and f'{key}='}{run}: neither a checkpoint nor a run ({' or '.join(map(str, places))} is missing)"
    raise UserError(f"{given}{did_you_mean(str(run), names)}. Runs there: {', '.join(names[-3:]) or 'none'}.")


# --- Content of a run's report: the origin of the run, and the metrics that were tested ---

PACKAGES = ("lockstep", "torch", "lightning", "torchvision", "timm", "hydra-core", "numpy")
SEPARATOR = " | "  # between names in `evaluated`, because values of report.json are neither lists nor dicts


def overrides_of(report: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The overrides in a report; None if it has none because an earlier version wrote it."""
    overrides = report.get("overrides")
    return None if overrides is None else tuple(shlex.split(overrides))


@cache  # called at every checkpoint; reading the metadata of the packages takes 30 ms
def versions() -> str:
    installed = [f"python {platform.python_version()}"]
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            installed.append(f"{package} {version(package)}")
    return ", ".join(installed)


def provenance(root: Path | None) -> dict[str, Any]:
    """When and where a run starts, and from which code. `root`: the checkout of the project.

    The commit ends in `-dirty` if there are uncommitted changes. It is None without a checkout or without git.
    """
    command, sha = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"], ""
    with suppress(OSError, subprocess.SubprocessError):
        sha = subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=10).strip() if root else ""
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return {"started": started, "host": socket.gethostname(), "git_sha": sha or None, "versions": versions()}


OF_RANK_0 = " (rank 0 only)"  # ends the names of values that are from rank 0 only


def metrics_of_test(report: Mapping[str, Any]) -> list[str]:
    """The names of the test metrics. A LightningModule may log any names."""
    return [name for name in str(report.get("evaluated", "")).split(SEPARATOR) if name in report]


def validation_metrics_at(rows: Iterable[Mapping[str, float]], step: int, monitor: str | None) -> dict[str, float]:
    """The metrics of the validation at `step`, that of the tested checkpoint; without `monitor`, of the last one."""
    if monitor:
        matches = [row for row in rows if monitor in row and row["step"] == step]
    else:
        matches = [row for row in rows if any(name.startswith("val/") for name in row)]
    last = matches[-1] if matches else {}
    counts = [name for name in last if name.startswith("val/") and name.endswith("/count")]
    return {name: value for name, value in last.items() if name not in ("step", "epoch", *counts)}
