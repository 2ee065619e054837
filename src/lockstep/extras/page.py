"""report.html: the page of a run, rewritten while it trains."""

import logging
import math
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

from lockstep.build_trainer import workload_of
from lockstep.checkpoints.finding import checkpoint_paths
from lockstep.config.compose import to_hydra
from lockstep.config.draft import as_yaml
from lockstep.config.formatting import is_fraction, metric
from lockstep.config.project import command
from lockstep.config.renames import overrides_of
from lockstep.config.run_config import RunConfig
from lockstep.config.settings import Settings
from lockstep.extras.panels import classes_of, is_right, write_panels
from lockstep.extras.render import chart, render, with_colours
from lockstep.machine.files import write_text
from lockstep.panel import Content, Gallery
from lockstep.reporting.console import in_runs_dir, print_line, time_left, warnings_in
from lockstep.reporting.report import metric_series
from lockstep.run import RunFolder, metrics_of_test
from lockstep.training.arithmetic import completes_step, steps_done, total_steps
from lockstep.training.workload import primary_metric

if TYPE_CHECKING:
    from lockstep.training.workload import Workload

# Parts of the time: name and colour. Training, validation and test have the colours of their curves.
PARTS = {
    "start": ("start", "start"), "steps": ("training steps", "train"), "wait": ("waiting for data", "wait"),
    "validation": ("validation", "val"), "saving": ("saving", "saving"), "test": ("test and end", "test"),
}  # fmt: skip
ROWS, LINES = 5, 40  # shown for a failed run: rows of metrics.csv, lines of train.log
Columns = Mapping[str, Sequence[tuple[int, float]]]  # of metrics.csv, as pairs of step and value


# --- The headline ---


def headline_parts(work: "Workload | None", report: dict[str, Any]) -> dict[str, Any]:
    """The primary metric as the page shows it: its name, number and unit, the rest of its text, and its interval."""
    name, text, interval = work.primary_metric(report) if work else (*primary_metric(report), None)
    value, _, rest = text.partition(" ")
    if not re.fullmatch(r"-?[\d.,e+-]+%?|nan|inf", value):
        value, rest = "", ""
    unit, scale, digits = ("%", 100, 2) if value.endswith("%") else ("", 1, 4)
    return {
        "name": name[:1].upper() + name[1:],
        "number": value.removesuffix("%"),
        "text": text,
        "unit": unit,
        "rest": rest.removeprefix("of ").removeprefix("on "),
        "interval": " to ".join(f"{scale * end:.{digits}f}" for end in interval) + unit if interval else "",
    }


# --- Curves of training ---


def drawn_curves(work: "Workload", columns: Columns, report: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The workload's curves, then learning rate, speed and memory: charts over steps, or numbers if there is only one point."""
    unit, batch = report.get("unit", "samples"), report.get("batch_size")
    rates = [
        ("Learning rate", "", ("train/lr", *(name for name in columns if name.startswith("lr-")))),
        ("Speed", f"{unit}/s", (f"train/{unit}_per_s",)),
        ("Peak memory so far", "GiB, first process", ("train/peak_memory_gib",)),
    ]
    excluded = {"epoch", *metrics_of_test(report), *(name for _, _, names in rates for name in names)}
    curves = [*work.curves(name for name in columns if name not in excluded), *rates]
    best = re.search(r"best-step-(\d+)", str(report.get("checkpoint")))
    last_step = max((step for points in columns.values() for step, _ in points), default=1)
    for title, y_unit, names in curves:
        pairs = [(label, name) for label, name in zip(labels(names), names, strict=True) if name in columns]
        lines = {label: columns[name] for label, name in pairs}
        panel = {"title": title, "unit": y_unit, "svg": "", "keys": [], "values": []}
        if lines and all(len(points) == 1 for points in lines.values()):
            values = [("" if len(pairs) == 1 else label, metric(name, columns[name][0][1])) for label, name in pairs]
            yield panel | {"values": values}
            continue
        validated = any(name.startswith("val") for _, name in pairs)
        svg = chart(
            title,
            "step",
            lines,
            x_range=(0.0, max(1.0, last_step)),
            highest=max(map(work.highest, names)),
            percent=all(is_fraction(name, *(y for _, y in columns[name])) for _, name in pairs),
            mark=("best checkpoint", float(best[1])) if best and validated else None,
            second_x=(f"{unit} seen", batch) if batch else None,
        )
        if svg:
            yield panel | {"svg": svg, "keys": with_colours(lines) if validated else []}


def labels(names: Sequence[str]) -> list[str]:
    """Short labels for the curves of one chart: only the part that differs, for names like stage/metric."""
    stages, _, metrics = zip(*(name.partition("/") for name in names), strict=True)
    if "" in metrics:
        return list(names)
    return list(stages) if len(set(metrics)) == 1 else list(metrics) if len(set(stages)) == 1 else list(names)


# --- The page ---


def write_page(
    folder: RunFolder,
    config: RunConfig,
    report: dict[str, Any],
    work: "Workload | None",
    panels: Sequence[Content],
    progress: Mapping[str, Any] | None = None,
) -> None:
    """Writes report.html, and panels.json if the run is done or has failed. `progress`: of a run that is still training."""
    if progress is None:
        write_panels(folder.panels_file, panels)
    metrics, log_lines = folder.metrics(), folder.log_lines()
    failed, is_in_runs_dir = report["status"] not in ("done", "running"), in_runs_dir(config)
    galleries = [panel for panel in panels if isinstance(panel, Gallery)]
    if failed and metrics:
        report = {"train/steps": int(metrics[-1]["step"]), **report}
    doubled = {"max_epochs": 2 * (report.get("train/epochs") or 1), "max_steps": 2 * (report.get("train/steps") or 1)}
    limits = [name for name in doubled if (config.get(f"trainer.{name}") or 0) > 0] or ["max_epochs"]
    values: dict[str, Any] = {
        "run": to_hydra(str(config.run)),
        "folder": shlex.quote(str(folder.path)) if is_in_runs_dir else config.run,
        "there": is_in_runs_dir,
        "longer": " ".join(f"trainer.{name}={doubled[name]}" for name in limits),
        "overrides": overrides_of(report),
        "config": as_yaml(config),
        "report": report,
        "progress": progress,
        "unit": report.get("unit", "samples"),
        "headline": headline_parts(work, report),
        "warnings": [*filter(None, [report.get("data/notice")]), *warnings_in(log_lines)],
        "last_rows": metrics[-ROWS:] if failed else [],
        "log_lines": log_lines[-LINES:] if failed else [],
        "curves": list(drawn_curves(work, metric_series(metrics), report)) if work else [],
        "test_panels": [panel for panel in panels if not isinstance(panel, Gallery)],
        "galleries": galleries,
        "classes": classes_of(galleries),
        "judged": any(is_right(sample) is not None for panel in galleries for sample in panel.samples),
        "durations": [(*PARTS[part], s) for part in PARTS if (s := report.get(f"time/{part}_s"))],
        "command": command,
    }
    write_text(folder.page_file, render("report.html.j2", str(report["run"]), values))
    if failed:
        print_line(f"report: {folder.page_file}")


class LivePage(pl.Callback):
    """Rewrites report.html while the run trains, on rank 0: every EVERY_S seconds, or less often if it took over 1% of the time."""

    EVERY_S, PAUSE = 2.0, 100  # PAUSE: a multiple of the time that a page takes

    work: "Workload"

    def __init__(self, settings: Settings) -> None:
        self.folder, self.settings = settings.folder, settings
        self.first_step, self.began_s, self.due_s, self.every_s = 0, 0.0, math.inf, self.EVERY_S

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.work, self.config = workload_of(trainer), self.settings.as_built().cfg
        self.first_step, self.began_s = steps_done(trainer), time.monotonic()
        self.due_s = self.began_s + self.EVERY_S

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if completes_step(trainer, batch_idx):
            self.renew(trainer, pl_module)

    def renew(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes the page if it is due."""
        if not trainer.is_global_zero or time.monotonic() < self.due_s:
            return
        began_s = time.monotonic()
        try:
            report = self.folder.report() | {"status": "running"}
            write_page(self.folder, self.config, report, self.work, (), self.progress(trainer))
        except Exception as e:  # the page must not end the run
            logging.getLogger("lockstep").warning(
                "report.html could not be updated at step %s: %s", steps_done(trainer), e
            )
        self.every_s = max(self.EVERY_S, self.PAUSE * (time.monotonic() - began_s))
        self.due_s = time.monotonic() + self.every_s

    on_train_end = renew

    def progress(self, trainer: pl.Trainer) -> dict[str, Any]:
        """The progress of the run, for the page."""
        step, total, time_format = steps_done(trainer), total_steps(trainer), "%H:%M:%S"
        saved = [(path.stat().st_mtime, path.name) for path in checkpoint_paths(self.folder.path)]
        return {
            "step": step,
            "total": int(total) if math.isfinite(total) else None,
            "epoch": trainer.current_epoch + 1,
            "left": time_left(self.began_s, self.first_step, step, total),
            "checkpoint": "".join(
                f"{name}, {time.strftime(time_format, time.localtime(s))}" for s, name in sorted(saved)[-1:]
            ),
            "every_s": self.every_s,
            "written_s": time.time(),
        }
