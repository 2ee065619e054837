"""What a run shows at its end: report.html (0.4 s to write, 80 kB for MNIST on two cores) and a table on the terminal."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.compose import typed
from lockstep.config.project import command
from lockstep.config.words import number, size
from lockstep.machine.files import write_json, write_text
from lockstep.reporting.console import metrics_table, say, speed, warnings_in
from lockstep.reporting.panels import write_panels
from lockstep.reporting.render import chart, coloured, render
from lockstep.run.folder import RunFolder
from lockstep.run.report import metric_series, tested
from lockstep.tasks.panel import Content, Gallery

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lockstep.tasks import Task

PARTS = {
    "start": "start", "steps": "training steps", "wait": "waiting for data", "validation": "validation", "saving": "saving",
    "test": "test and end",
}  # fmt: skip
ROWS, LINES, CURVES = 5, 40, 8  # of a failed run: rows of metrics.csv and lines of train.log; curves of unknown metrics
STAGE = re.compile(r"(train|val|valid|validation)[/_](.+)")
Metrics = Sequence[dict[str, float]]
Curve = tuple[str, str, tuple[str, ...]]


@dataclass(frozen=True)
class RunInfo:
    """What the page shows of a run's config."""

    run: str
    runs_dir: str
    overrides: Sequence[str]  # that give the config
    config: str  # all of it, as YAML
    compiles: bool = False

    @property
    def folder(self) -> Path:
        return Path(self.runs_dir, self.run)

    @property
    def in_runs_dir(self) -> str:
        """The override that commands need to find the run."""
        return "" if self.runs_dir == "runs" else f" runs_dir={typed(self.runs_dir)}"


# --- The headline ---


def task_of(module: "pl.LightningModule | None") -> "Task | None":
    return getattr(module, "task", None) if getattr(module, "of_task", False) else None


def headline_of(module: "pl.LightningModule | None", report: dict[str, Any]) -> tuple[str, str]:
    """Name and value. Without a task or without a test: the first test metric, else the monitored one."""
    task = task_of(module)
    if task is not None and "test/count" in report:
        return task.headline(report)
    names = [*tested(report), *(name for name in report if name == report.get("monitor"))]
    found = next(((name, report[name]) for name in names), ("test", "nothing was logged"))
    return found[0], found[1] if isinstance(found[1], str) else f"{found[1]:.4f}"


def headline(module: "pl.LightningModule | None", report: dict[str, Any]) -> dict[str, Any]:
    """The metric, what it is of, and its interval."""
    name, text = headline_of(module, report)
    value, _, rest = text.partition(" ")
    short = bool(re.fullmatch(r"-?[\d.,e+-]+%?|nan|inf", value))
    task = task_of(module)
    ends = task.interval(report) if task is not None and "test/count" in report else None
    shares = value.endswith("%")
    low, high = (f"{100 * end:.2f}" if shares else f"{end:.4f}" for end in ends or (0, 0))
    return {
        "name": "Result" if name == "test" else name[:1].upper() + name[1:],
        "value": value.removesuffix("%") if short else text,
        "percent": short and shares,
        "short": short,
        "rest": rest.removeprefix("of ").removeprefix("on ") if short else "",
        "interval": f"{low} to {high}{'%' if shares else ''}" if ends else "",
    }


# --- Curves of training ---


def curves(module: "pl.LightningModule | None", metrics: Metrics, unit: str) -> list[Curve]:
    """The curves of the task, or those that a LightningModule logged; then learning rate, speed and memory."""
    logged = list(metric_series(metrics))
    rates = [
        ("Learning rate", "", ("train/lr", *(name for name in logged if name.startswith("lr-")))),
        ("Speed", f"{unit}/s", (f"train/{unit}_per_s",)),
        ("Peak memory so far", "GiB, first process", ("train/peak_memory_gib",)),
    ]
    if (task := task_of(module)) is not None:
        return [*task.panels(), *rates]
    known = {name for _, _, names in rates for name in names}
    groups: dict[str, list[str]] = {}
    for name in logged:
        if (found := STAGE.fullmatch(name)) and name not in known and not name.endswith("/count"):
            groups.setdefault(found[2], []).append(name)
    return [*((name, "", tuple(names)) for name, names in list(groups.items())[:CURVES]), *rates]


def highest(module: "pl.LightningModule | None", names: Sequence[str]) -> float:
    """The largest value that all these columns can have, as torchmetrics declares it: 1 for fractions."""
    metrics: Any = getattr(module, "figures", {}) if task_of(module) is not None else {}
    found = [name.split("/")[1] for name in names if "/" in name]
    bounds = [float(metrics[name].plot_upper_bound or math.inf) if name in metrics else math.inf for name in found]
    return max(bounds, default=math.inf)


def drawn_curves(
    module: "pl.LightningModule | None", found: Sequence[Curve], metrics: Metrics, report: dict[str, Any]
) -> list[dict[str, Any]]:
    """Charts over steps done, and numbers where there is one point only."""
    best = re.search(r"best-step-(\d+)", str(report.get("checkpoint")))
    columns = metric_series(metrics)
    drawn: list[dict[str, Any]] = []
    for title, unit, names in found:
        lines = {label: columns[name] for label, name in zip(labels(names), names, strict=True) if name in columns}
        shown = {"title": title, "unit": unit, "svg": "", "keys": [], "values": []}
        if lines and all(len(points) == 1 for points in lines.values()):
            values = [("" if len(lines) == 1 else label, f"{points[0][1]:.4g}") for label, points in lines.items()]
            drawn.append(shown | {"values": values})
            continue
        validated = any(name.startswith("val") and name in columns for name in names)
        svg = chart(
            "step",
            lines,
            x_range=(0.0, max((1.0, *(row["step"] for row in metrics)))),
            highest=highest(module, names),
            mark=("best checkpoint", float(best[1])) if best and validated else None,
            per_x=report.get("batch_size"),
            per_x_label=f"{report.get('unit', 'samples')} seen",
        )
        drawn += [shown | {"svg": svg, "keys": coloured(lines) if validated else []}] if svg else []
    return drawn


def labels(names: Sequence[str]) -> list[str]:
    """Short names of curves that one chart shows: only what differs, if they are named as stage/metric."""
    parts = [name.partition("/")[::2] for name in names]
    if not all(metric for _, metric in parts) or len(set(names)) < len(names):
        return list(names)
    stages, metrics = ({part[i] for part in parts} for i in (0, 1))
    if len(metrics) == 1:
        return [stage for stage, _ in parts]
    return [metric if len(stages) == 1 else f"{stage}/{metric}" for stage, metric in parts]


# --- The page ---


def write_page(
    info: RunInfo, report: dict[str, Any], module: "pl.LightningModule | None", panels: Sequence[Content]
) -> None:
    """Writes report.html and panels.json of a run that is done or has failed."""
    folder = RunFolder(info.folder)
    write_panels(folder.path, panels)
    metrics, has_log = folder.metrics(), folder.log_file.is_file()
    log_lines = folder.log_file.read_text(encoding="utf-8", errors="replace").splitlines() if has_log else []
    unit, failed = report.get("unit", "samples"), report["status"] != "done"
    values: dict[str, Any] = {
        "info": info,
        "run": typed(info.run),
        "report": report,
        "unit": unit,
        "headline": headline(module, report),
        "warnings": [*filter(None, [report.get("data/notice")]), *warnings_in(log_lines)],
        "last_rows": metrics[-ROWS:] if failed else [],
        "log_lines": log_lines[-LINES:] if failed else [],
        "curves": drawn_curves(module, curves(module, metrics, unit), metrics, report),
        "test_panels": [panel for panel in panels if not isinstance(panel, Gallery)],
        "galleries": [panel for panel in panels if isinstance(panel, Gallery)],
        "durations": {PARTS[part]: s for part in PARTS if (s := report.get(f"time/{part}_s"))},
        "command": command,
    }
    write_text(folder.page_file, render("report.html.j2", str(report["run"]), values))


# --- The end of a run, an evaluation or a prediction on the terminal ---


def show_run(info: RunInfo, report: dict[str, Any], module: "pl.LightningModule | None") -> None:
    from lockstep.reporting.loggers import wandb_sync_line

    compiling = f", {report['train/first_step_s'] or 0:.1f} s of it in the first step" if info.compiles else ""
    rows = [
        headline_of(module, report),
        *([("test loss", number(report["test/loss"]))] if "test/loss" in report else []),
        ("speed", speed(report)),
        ("time", f"{report['wall_s']:.1f} s, {report['train/steps']:,} steps" + compiling),
        ("peak memory", f"{size(report['peak_memory_bytes'])} per process"),
        ("checkpoint", str(info.folder / report["checkpoint"]) if report["checkpoint"] else "none"),
        ("report", str(info.folder / "report.html")),
    ]
    metrics_table(info.run, rows)
    if report["checkpoint"]:
        say(f"evaluate it: {command('eval')} run={info.run}{info.in_runs_dir}")
    if sync := wandb_sync_line(info.folder):
        say(f"upload it to W&B: {sync}")


def show_evaluation(path: Path, about: Mapping[str, Any], metrics: dict[str, Any]) -> None:
    """Prints the metrics, and writes them to `path` with what they are about: run, checkpoint, strategy, world size."""
    write_json(path, {**about, **metrics})
    rows = [(name, f"{v:.8f}" if isinstance(v, float) else number(v)) for name, v in metrics.items()]
    metrics_table(str(about["checkpoint"]), rows)


def show_predictions(path: Path, about: Mapping[str, Any], result: Mapping[str, Any], gallery: bool) -> None:
    """Says where the table is, and writes `path`. `result`: input, output, count of rows, broken files."""
    write_json(path, {**about, **result})
    rows = [("predictions", str(result["output"])), ("rows", number(result["count"]))]
    rows += [("broken files", number(result["broken"]))] if result["broken"] else []
    rows += [("gallery", f"{result['output']}.html")] if gallery else []
    metrics_table(str(about["checkpoint"]), rows)
