"""Console output: lines and tables. Silences known messages of the frameworks."""

import logging
import shlex
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lockstep.config.words import number, readable

log = logging.getLogger("lockstep")
# Names are shown as they are: a[red]b, callbacks=[default,ema].
out = Console(highlight=False, markup=False, emoji=False)

# Beginnings of messages that say nothing about a run. Only these are silenced.
CHATTER = (
    "GPU available:", "TPU available:", "HPU available:",  # the first line of a run says what is used
    "\U0001f4a1 Tip:", "LOCAL_RANK:", "You are using the plain ModelCheckpoint", "Initializing distributed:",
    "-----", "distributed_backend=", "All distributed processes registered", "Using bfloat16 Automatic", "Using 16bit Automatic",
    "You are using a CUDA device (",  # its advice about tensor cores: the key tf32 has that setting
    "`Trainer.fit` stopped:", "Restoring states from the checkpoint", "Restored all states", "Found current_model_state in",
    "Loaded model weights from the checkpoint", "Loading `train_dataloader` to estimate", "`Trainer(limit_", "No CUDA runtime is found",
)  # fmt: skip
NOISE = (
    r".*does not have many workers which may be a bottleneck",  # images are in memory: workers would only copy them
    r".*The number of training batches .* is smaller than the logging interval",  # short runs are meant to be short
    r".*It is recommended to use `self.log\(.*sync_dist=True\)`",  # torchmetrics has reduced these values already
    r".*Checkpoint directory .* exists and is not empty",  # resuming
    r".*The dirpath has changed from",  # resuming under another run name
    r".*The `srun` command is available on your system but is not used",  # where SLURM is installed; config/devices.py has the checks
    r".*You are trying to `self.log\(\)` but the .* is not registered",
    r".*`isinstance\(treespec, LeafSpec\)` is deprecated",  # Lightning 2.6 on torch 2.9 and newer
    r".*`torch.distributed._.*` is deprecated",
    r".*Trainer already configured with model summary callbacks",
    r".*Grad strides do not match bucket view strides",  # 1x1 convolutions in channels_last; torch's message calls it harmless
)


def says_something(record: logging.LogRecord) -> bool:
    return not record.getMessage().lstrip("\n").startswith(CHATTER)


def quiet(rank: int) -> None:
    """Silences known messages on rank 0, and every warning on the other ranks, which repeat rank 0's."""
    for pattern in NOISE:
        warnings.filterwarnings("ignore", message=pattern)
    if rank:
        warnings.simplefilter("ignore")
    known = [name for name in logging.root.manager.loggerDict if name.startswith("lightning.")]
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "torch.utils.cpp_extension", *known):
        logger = logging.getLogger(name)
        for target in (logger, *logger.handlers):
            target.addFilter(says_something)


def say(text: str) -> None:
    """Prints a line and writes it to train.log. Call it on rank 0 only, or where other ranks have no output."""
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    if getattr(rank_zero_only, "rank", 0) == 0:
        out.print(readable(text), soft_wrap=True)
        log.info(readable(text))


def speed(report: dict[str, Any]) -> str:
    """How fast training was, and how close to the limits: the share of waiting for data, and FLOP/s."""
    unit, wait, flops = report["unit"], report["train/data_wait_share"], report["train/flops_per_s"]
    rate = report[f"train/{unit}_per_s"]
    if rate is None:
        return "not measured"
    waiting = "" if wait is None else f", {wait:.1%} of the time waiting for data"
    return f"{rate:,.0f} {unit}/s{waiting}" + (f", {flops / 1e9:,.0f} GFLOP/s" if flops else "")


def figures_table(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """A table of names and values, also written to train.log."""
    table = Table(show_header=False)
    table.add_column()
    table.add_column(overflow="fold")  # do not wrap paths: people copy them
    for row in rows:
        table.add_row(*map(readable, row))
        log.info("%s: %s", *map(readable, row))
    out.print(readable(title), soft_wrap=True)
    out.print(table)


def differences(rows: Sequence[dict[str, Any]]) -> list[str]:
    """For each job, the overrides that not all jobs share, as one string."""
    each = [shlex.split(str(row.get("overrides", ""))) for row in rows]
    return [shlex.join(o for o in own if not all(o in other for other in each)) for own in each]


def sweep_table(
    rows: Sequence[dict[str, Any]], spread: Sequence[dict[str, Any]], columns: Sequence[str], path: Path
) -> None:
    """Prints a multirun's jobs, one per line, and below them mean and spread of repeated ones."""
    table = Table("run", "with", *columns)
    for place, (row, own) in enumerate(zip([*rows, *spread], differences([*rows, *spread]), strict=True)):
        if place == len(rows):
            table.add_section()
        table.add_row(*map(readable, [str(row["run"]), own, *(number(row.get(column)) for column in columns)]))
    print_wide(f"{len(rows)} runs, also in {path}", table)


def print_wide(*what: Any, columns: int = 160) -> None:
    """Into a pipe with so many columns, where rich assumes 80."""
    wide = out if out.is_terminal else Console(highlight=False, markup=False, emoji=False, width=columns)
    for each in what:
        wide.print(each)
