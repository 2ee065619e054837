"""Console output: lines, tables, progress, how a run ended; train.log. Silences known messages of the frameworks."""

import logging
import math
import re
import shlex
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.style import Style
from rich.table import Table

from lockstep.config.compose import typed
from lockstep.config.project import command
from lockstep.config.run_config import RunConfig
from lockstep.config.words import counted, inline, number, seconds, size
from lockstep.errors import NotSaved
from lockstep.machine import process
from lockstep.machine.files import open_log, write_json
from lockstep.machine.process import in_notebook
from lockstep.run import RunFolder

if TYPE_CHECKING:
    from lockstep.training.workload import Workload

# --- A line that says how far something is: a bar on a terminal, a line that is rewritten in a notebook, else a line now and then ---

# Seconds between two lines: at least so many, and a hundredth of the time so far; a notebook is read while it runs.
LINES_S, NOTEBOOK_S = (10.0, math.inf), (1.0, 10.0)
BAR_S = 0.1  # between two changes of a bar
BAR_WIDTH = 16


def clock(seconds: float) -> str:
    minutes, s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{s:02}" if hours else f"{minutes}:{s:02}"


def time_left(began_s: float, first: int, done: int, total: float | None) -> str:
    """For the rest of `total`, if that is known; `first`: what a resumed run had done when it began took no time now."""
    if total is None or math.isinf(total) or done <= first:
        return ""
    return clock((time.monotonic() - began_s) * (total - done) / (done - first))


class Line:
    """Counts up to `total`, None if that is not known, from `first`."""

    def __init__(self, what: str, total: float | None, first: int = 0) -> None:
        self.what, self.total, self.first = what, None if total is None or math.isinf(total) else int(total), first
        self.began_s = self.shown_s = time.monotonic()
        self.notebook, self.width = in_notebook(), 0
        self.bar: Progress | None = None
        if out.file.isatty() and not out.is_dumb_terminal:
            rest = TextColumn("{task.fields[rest]}", markup=False)
            columns = (TextColumn("{task.description}"), BarColumn(bar_width=BAR_WIDTH), rest)
            self.bar = Progress(*columns, console=out, refresh_per_second=4)
            self.bar.add_task("", total=self.total, completed=first, rest=f"first {what}")  # it may compile
            self.bar.start()
            process.before_prompt[self] = self.end

    def due(self, done: int) -> bool:
        """Whether `show` would change anything: asked at every step, before the metrics are put into words."""
        now_s = time.monotonic()
        if self.bar is not None:
            return done == self.total or now_s - self.shown_s > BAR_S
        least, most = NOTEBOOK_S if self.notebook else LINES_S
        return now_s - self.shown_s > min(most, max(least, (now_s - self.began_s) / 100))

    def show(self, title: str, done: int, *metrics: str) -> None:
        self.shown_s = time.monotonic()
        left = time_left(self.began_s, self.first, done, self.total)
        place = f"{done:,}/{'?' if self.total is None else format(self.total, ',')}"
        text = " · ".join(filter(None, [place, left and f"{left} left", *metrics]))
        if self.bar is not None:
            room = out.width - BAR_WIDTH - len(title) - 2
            while len(text) > room and " · " in text:  # one line: drop what is least important
                text = text.rpartition(" · ")[0]
            self.bar.update(self.bar.task_ids[0], completed=done, description=title, rest=text)
            return
        text = f"{title} · {self.what} {text}"
        if self.notebook:
            print(f"\r{text:{self.width}}", end="", flush=True)
            self.width = len(text)
        else:
            say(text)

    def end(self) -> None:
        process.before_prompt.pop(self, None)
        if self.bar is not None:
            self.bar.stop()
        elif self.width:
            print(flush=True)
        self.bar, self.width = None, 0


# --- Console output: lines and tables. Silences known messages of the frameworks ---

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
    r"GPU available but not used",  # nor is one without trainer.accelerator=cpu
    r".*does not have many workers which may be a bottleneck",  # images are in memory: workers would only copy them
    r".*The number of training batches .* is smaller than the logging interval",  # short runs are meant to be short
    r".*It is recommended to use `self.log\(.*sync_dist=True\)`",  # torchmetrics has reduced these values already
    r".*Checkpoint directory .* exists and is not empty",  # resuming
    r".*The dirpath has changed from",  # resuming under another run name
    r".*The `srun` command is available on your system but is not used",  # where SLURM is installed; config/rules.py has the checks
    r".*You are trying to `self.log\(\)` but the .* is not registered",
    r".*`isinstance\(treespec, LeafSpec\)` is deprecated",  # Lightning 2.6 on torch 2.9 and newer
    r".*`torch.distributed._.*` is deprecated",
    r".*Trainer already configured with model summary callbacks",
    r".*Grad strides do not match bucket view strides",  # 1x1 convolutions in channels_last; torch's message calls it harmless
)


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
            target.addFilter(lambda record: not record.getMessage().lstrip("\n").startswith(CHATTER))


def say(text: str, *, copied: bool = False, link: Path | None = None) -> None:
    """Prints a line and writes it to train.log. Call it on rank 0 only, or where other ranks have no output.

    A terminal gets it broken between words, unless it is a path or a command that people copy. It opens `link` at a click.
    """
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    if getattr(rank_zero_only, "rank", 0) == 0:
        text = inline(text)
        style = Style(link=link.resolve().as_uri()) if link else None
        out.print(text, style=style, soft_wrap=copied or not out.file.isatty())
        log.info(text)


def metrics_table(rows: Sequence[tuple[str, str]]) -> None:
    """A table of names and values, also written to train.log."""
    table = Table(show_header=False)
    for row in rows:
        table.add_row(*map(inline, row))
        log.info("%s: %s", *map(inline, row))
    out.print(table)


def print_wide(*what: Any, columns: int = 160) -> None:
    """Into a pipe with so many columns, where rich assumes 80."""
    wide = out if out.is_terminal else Console(highlight=False, markup=False, emoji=False, width=columns)
    for each in what:
        wide.print(each)


# --- The end of a run or of an evaluation ---


def in_runs_dir(config: RunConfig) -> str:
    """The override that commands need to find the run."""
    return "" if config.runs_dir == "runs" else f" {shlex.quote(f'runs_dir={typed(str(config.runs_dir))}')}"


def show_run(folder: RunFolder, config: RunConfig, report: dict[str, Any], work: "Workload") -> None:
    from lockstep.reporting.loggers import wandb_sync_line

    unit = report["unit"]
    rate, wait, flops = (report[f"train/{name}"] for name in (f"{unit}_per_s", "data_wait_share", "flops_per_s"))
    speed = "not measured" if rate is None else f"{rate:,.0f} {unit}/s"
    speed += "" if wait is None else f", {wait:.1%} waiting for data"
    speed += f", {flops / 1e9:,.0f} GFLOP/s" if flops else ""
    compiling = f", {report['train/first_step_s'] or 0:.1f} s of it in the first step" if config.compile else ""
    main = work.headline(report)[:2]
    of_test = [f"test/{name}" for name in ("loss", *config.task.parts("metrics"))]
    rows = [
        main,
        *(
            (n.replace("/", " "), number(report[n]))
            for n in of_test
            if n in report and n.replace("/", " ") != main[0].replace("/", " ")
        ),
        ("speed", speed),
        ("peak memory", f"{size(report['peak_memory_bytes'])} per process"),
    ]
    metrics_table(rows)
    checkpoint = report["checkpoint"]
    written = "checkpoint and report" if checkpoint else "report, without a checkpoint"
    say(f"done: {counted(report['train/steps'], 'step')} in {seconds(report['wall_s'])}{compiling}; {written}:")
    if checkpoint:
        say(str(folder.path / checkpoint), copied=True)
    shown = folder.page_file if folder.page_file.is_file() else folder.report_file
    say(str(shown), copied=True, link=shown)
    if sync := wandb_sync_line(folder.path):
        say(f"upload it to W&B: {sync}", copied=True)
    if checkpoint:
        say(f"evaluate it: {command('eval')} run={config.run}{in_runs_dir(config)}", copied=True)


def show_evaluation(path: Path, about: Mapping[str, Any], metrics: dict[str, Any]) -> None:
    """Prints the metrics, and writes them to `path` with what they are about: run, checkpoint, strategy, world size."""
    rows = [(name, f"{v:.8f}" if isinstance(v, float) else number(v)) for name, v in metrics.items()]
    say(str(about["checkpoint"]), copied=True)
    metrics_table(rows)
    try:
        write_json(path, {**about, **metrics})
    except OSError as e:
        raise NotSaved(f"{path} could not be written: {e.strerror}. The metrics are above.") from None


# --- train.log: what Lockstep and Lightning log, and all warnings, which also go to the screen ---

LOGGED = ("lockstep", "lightning.pytorch", "py.warnings")
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ([A-Z]+) (.*)")


class LogFile(logging.StreamHandler[IO[str]]):
    """A full disk ends no run here, and prints no traceback for each line."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


@contextmanager
def logged(path: Path) -> Iterator[None]:
    """Within, messages and warnings go to the file, and warnings to the screen as well."""
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
        with suppress(OSError):  # what a full disk did not take
            to_file.stream.close()
        logging.captureWarnings(False)


def warnings_in(lines: list[str]) -> list[str]:
    """The warnings of a train.log, each once."""
    found = (LINE.match(line) for line in lines)
    return list(dict.fromkeys(match[2] for match in found if match and match[1] == "WARNING"))
