"""Console output (lines, tables, progress, results) and train.log. Silences known messages of the frameworks."""

import logging
import math
import re
import shlex
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.style import Style
from rich.table import Table

from lockstep.config.compose import to_hydra
from lockstep.config.formatting import inline, number, pluralize, seconds, size
from lockstep.config.project import command
from lockstep.config.run_config import RunConfig
from lockstep.machine import process
from lockstep.machine.files import open_log, write_json
from lockstep.machine.process import in_notebook
from lockstep.run import RunFolder

# --- Progress: a bar on a terminal, a line that is rewritten in a notebook, otherwise a new line now and then ---

# Seconds between two lines: 1% of the elapsed time, within these limits. A notebook is read while it runs.
LINES_S, NOTEBOOK_S = (10.0, math.inf), (1.0, 10.0)
BAR_S = 0.1  # seconds between two updates of a bar
BAR_WIDTH = 16


def clock(seconds: float) -> str:
    minutes, s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{s:02}" if hours else f"{minutes}:{s:02}"


def time_left(began_s: float, first: int, done: int, total: float | None) -> str:
    """Estimated time until `total`, empty if unknown. `first`: what an earlier process had already done."""
    if total is None or math.isinf(total) or done <= first:
        return ""
    return clock((time.monotonic() - began_s) * (total - done) / (done - first))


class ProgressLine:
    """Progress from `first` to `total`; None: unknown total."""

    def __init__(self, what: str, total: float | None, first: int = 0) -> None:
        self.what, self.total, self.first = what, None if total is None or math.isinf(total) else int(total), first
        self.began_s = self.shown_s = time.monotonic()
        self.notebook, self.width = in_notebook(), 0
        self.bar: Progress | None = None
        if out.file.isatty() and not out.is_dumb_terminal:
            details = TextColumn("{task.fields[rest]}", markup=False)
            columns = (TextColumn("{task.description}"), BarColumn(bar_width=BAR_WIDTH), details)
            self.bar = Progress(*columns, console=out, refresh_per_second=4)
            self.bar.add_task("", total=self.total, completed=first, rest=f"first {what}")  # which may compile
            self.bar.start()
            process.before_prompt[self] = self.end

    def due(self, done: int) -> bool:
        """Whether `show` would change anything. Checked at every step, before the metrics are formatted."""
        now_s = time.monotonic()
        if self.bar is not None:
            return done == self.total or now_s - self.shown_s > BAR_S
        min_s, max_s = NOTEBOOK_S if self.notebook else LINES_S
        return now_s - self.shown_s > min(max_s, max(min_s, (now_s - self.began_s) / 100))

    def show(self, title: str, done: int, *metrics: str) -> None:
        self.shown_s = time.monotonic()
        remaining = time_left(self.began_s, self.first, done, self.total)
        position = f"{done:,}/{'?' if self.total is None else format(self.total, ',')}"
        text = " · ".join(filter(None, [position, remaining and f"{remaining} left", *metrics]))
        if self.bar is not None:
            max_width = out.width - BAR_WIDTH - len(title) - 2
            while len(text) > max_width and " · " in text:  # fit on one line: drop the last, least important parts
                text = text.rpartition(" · ")[0]
            self.bar.update(self.bar.task_ids[0], completed=done, description=title, rest=text)
            return
        text = f"{title} · {self.what} {text}"
        if self.notebook:
            print(f"\r{text:{self.width}}", end="", flush=True)
            self.width = len(text)
        else:
            print_line(text)

    def print_above(self, text: str) -> None:
        """Prints a line that stays."""
        self.end_line()
        print_line(text)

    def end_line(self) -> None:
        """In a notebook, ends the line that is rewritten."""
        if self.width:
            print(flush=True)
        self.width = 0

    def end(self) -> None:
        process.before_prompt.pop(self, None)
        if self.bar is not None:
            self.bar.stop()
        self.bar = None
        self.end_line()


# --- Lines and tables; silencing of known messages of the frameworks ---

log = logging.getLogger("lockstep")
# No markup: names such as a[red]b and callbacks=[default,ema] are shown unchanged.
out = Console(highlight=False, markup=False, emoji=False)

# Prefixes of messages that carry no information about a run. Only these are silenced.
CHATTER = (
    "GPU available:", "TPU available:", "HPU available:",  # the first line of a run reports the device
    "\U0001f4a1 Tip:", "LOCAL_RANK:", "You are using the plain ModelCheckpoint", "Initializing distributed:",
    "-----", "distributed_backend=", "All distributed processes registered", "Using bfloat16 Automatic", "Using 16bit Automatic",
    "You are using a CUDA device (",  # advice about tensor cores; the key tf32 is that setting
    "`Trainer.fit` stopped:", "Restoring states from the checkpoint", "Restored all states", "Found current_model_state in",
    "Loaded model weights from the checkpoint", "Loading `train_dataloader` to estimate", "`Trainer(limit_", "No CUDA runtime is found",
)  # fmt: skip
NOISE = (
    r"GPU available but not used",  # only with trainer.accelerator=cpu, so the user chose it
    r".*does not have many workers which may be a bottleneck",  # images are in memory, so workers would only copy them
    r".*The number of training batches .* is smaller than the logging interval",  # short runs are intended
    r".*Checkpoint directory .* exists and is not empty",  # resuming
    r".*The dirpath has changed from",  # resuming under another run name
    r".*The `srun` command is available on your system but is not used",  # if SLURM is installed; config/rules.py checks this
    r".*You are trying to `self.log\(\)` but the .* is not registered",
    r".*`isinstance\(treespec, LeafSpec\)` is deprecated",  # Lightning 2.6 on torch 2.9 and newer
    r".*`torch.distributed._.*` is deprecated",
    r".*Trainer already configured with model summary callbacks",
    r".*Grad strides do not match bucket view strides",  # 1x1 convolutions in channels_last; torch's message calls it harmless
)


def quiet(rank: int) -> None:
    """Silences known messages, and on ranks above 0 all warnings, which repeat those of rank 0."""
    for pattern in NOISE:
        warnings.filterwarnings("ignore", message=pattern)
    if rank:
        warnings.simplefilter("ignore")
    names = [name for name in logging.root.manager.loggerDict if name.startswith("lightning.")]
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "torch.utils.cpp_extension", *names):
        logger = logging.getLogger(name)
        for target in (logger, *logger.handlers):
            target.addFilter(lambda record: not record.getMessage().lstrip("\n").startswith(CHATTER))


def print_line(text: str, *, copied: bool = False, link: Path | None = None) -> None:
    """Prints a line and writes it to train.log. Call it on rank 0, or where the other ranks have no output.

    A terminal wraps the line between words, unless it is `copied`: a path or a command that people copy. A click opens
    `link`.
    """
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    if getattr(rank_zero_only, "rank", 0) == 0:
        text = inline(text)
        style = Style(link=link.resolve().as_uri()) if link else None
        out.print(text, style=style, soft_wrap=copied or not out.file.isatty())
        log.info(text)


def metrics_table(rows: Mapping[str, str]) -> None:
    """A table of names and values, also written to train.log."""
    table = Table(show_header=False)
    for name, value in rows.items():
        table.add_row(inline(name), inline(value))
        log.info("%s: %s", inline(name), inline(value))
    out.print(table)


def print_wide(*renderables: Any, columns: int = 160) -> None:
    """Prints to a terminal, or to a pipe with this number of columns instead of rich's 80."""
    printer = out if out.is_terminal else Console(highlight=False, markup=False, emoji=False, width=columns)
    for renderable in renderables:
        printer.print(renderable)


# --- The result of a run or of an evaluation ---


def in_runs_dir(config: RunConfig) -> str:
    """The override that commands need to find the run."""
    return "" if config.runs_dir == "runs" else f" {shlex.quote(f'runs_dir={to_hydra(str(config.runs_dir))}')}"


def show_run(folder: RunFolder, config: RunConfig, report: dict[str, Any], module: Any) -> None:
    from lockstep.reporting.loggers import wandb_sync_line
    from lockstep.reporting.report import headline

    unit = report["unit"]
    rate, wait, flops = (report[f"train/{name}"] for name in (f"{unit}_per_s", "data_wait_share", "flops_per_s"))
    speed = "not measured" if rate is None else f"{rate:,.0f} {unit}/s"
    speed += "" if wait is None else f", {wait:.1%} waiting for data"
    speed += f", {flops / 1e9:,.0f} GFLOP/s" if flops else ""
    primary, value, _ = headline(module, report)
    rows = {primary.replace("/", " "): value}
    for name in ("loss", *config.task.parts("metrics")):
        if f"test/{name}" in report:
            rows.setdefault(f"test {name.replace('/', ' ')}", number(report[f"test/{name}"]))
    rows |= {"speed": speed, "peak memory": f"{size(report['peak_memory_bytes'])} per process"}
    metrics_table(rows)
    checkpoint = report["checkpoint"]
    outputs = "checkpoint and report" if checkpoint else "report, without a checkpoint"
    steps = pluralize(report["train/steps"], "step")
    print_line(f"done: {steps} in {seconds(report['wall_s'])}; {outputs}:")
    if checkpoint:
        print_line(str(folder.path / checkpoint), copied=True)
    page = folder.page_file if folder.page_file.is_file() else folder.report_file
    print_line(str(page), copied=True, link=page)
    if sync := wandb_sync_line(folder.path):
        print_line(f"upload it to W&B: {sync}", copied=True)
    if checkpoint:
        print_line(f"evaluate it: {command('eval')} run={config.run}{in_runs_dir(config)}", copied=True)


def show_evaluation(path: Path, metadata: Mapping[str, Any], metrics: dict[str, Any]) -> None:
    """Prints the metrics and writes them to `path`, with `metadata`: their run, checkpoint, strategy and world size."""
    print_line(str(metadata["checkpoint"]), copied=True)
    metrics_table({name: f"{v:.8f}" if isinstance(v, float) else number(v) for name, v in metrics.items()})
    write_json(path, {**metadata, **metrics})


# --- train.log: the log messages of Lockstep and Lightning, and all warnings, which are also printed ---

LOGGED = ("lockstep", "lightning.pytorch", "py.warnings")
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ([A-Z]+) (.*)")


class LogFile(logging.StreamHandler[IO[str]]):
    """A handler that ignores errors of the disk: a full disk must neither end a run nor print a traceback per line."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


@contextmanager
def log_to_file(path: Path) -> Iterator[None]:
    """Within the block, messages and warnings go to the file `path`, and warnings also to the screen."""
    to_file, to_screen = LogFile(open_log(path, "a", encoding="utf-8")), logging.StreamHandler()
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    to_screen.setLevel(logging.WARNING)
    targets = [(to_file, name) for name in LOGGED] + [(to_screen, name) for name in ("lockstep", "py.warnings")]
    logging.captureWarnings(True)
    log.setLevel(logging.INFO)
    for handler, name in targets:
        logging.getLogger(name).addHandler(handler)
    try:
        yield
    finally:
        for handler, name in targets:
            logging.getLogger(name).removeHandler(handler)
        with suppress(OSError):  # a full disk may not accept the last lines
            to_file.stream.close()
        logging.captureWarnings(False)


def warnings_in(lines: list[str]) -> list[str]:
    """The distinct warnings of a train.log."""
    matches = (LINE.match(line) for line in lines)
    return list(dict.fromkeys(match[2] for match in matches if match and match[1] == "WARNING"))
