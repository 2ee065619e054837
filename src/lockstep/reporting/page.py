"""report.html, the page of one run. On two cores, of a run on MNIST: 0.4 s to write, 80 kB."""

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from lockstep.config.compose import as_overrides, typed
from lockstep.config.identity import run_dir
from lockstep.config.project import command
from lockstep.config.words import number, seconds, size
from lockstep.machine.files import write_text
from lockstep.reporting.console import lines_of, warnings_in
from lockstep.reporting.panels import FILTERS, write_panels
from lockstep.reporting.render import chart, coloured, render
from lockstep.run.folder import RunFolder
from lockstep.run.report import tested
from lockstep.tasks.panel import Content, Durations, Gallery

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lockstep.tasks import Task

PARTS = {
    "start": "start", "steps": "training steps", "wait": "waiting for data", "validation": "validation", "saving": "saving",
    "test": "test and end",
}  # fmt: skip
ROWS, LINES, CURVES = 5, 40, 8  # of a failed run: rows of metrics.csv and lines of train.log; curves of unknown figures
STAGE = re.compile(r"(train|val|valid|validation)[/_](.+)")
Metrics = Sequence[dict[str, float]]
Curve = tuple[str, str, tuple[str, ...]]


def task_of(module: "pl.LightningModule | None") -> "Task | None":
    return getattr(module, "task", None) if getattr(module, "of_task", False) else None


def headline_of(module: "pl.LightningModule | None", report: dict[str, Any]) -> tuple[str, str]:
    """Name and value. Without a task or without a test: the first test figure, else the monitored one."""
    task = task_of(module)
    if task is not None and "test/count" in report:
        return task.headline(report)
    names = [*tested(report), *(name for name in report if name == report.get("monitor"))]
    found = next(((name, report[name]) for name in names), ("test", "nothing was logged"))
    return found[0], found[1] if isinstance(found[1], str) else f"{found[1]:.4f}"


def headline(module: "pl.LightningModule | None", report: dict[str, Any]) -> dict[str, Any]:
    """The figure, what it is of, and its interval."""
    name, text = headline_of(module, report)
    value, _, rest = text.partition(" ")
    short = bool(re.fullmatch(r"-?[\d.,e+-]+%?|nan|inf", value))
    task = task_of(module)
    ends = task.interval(report) if task is not None and "test/count" in report else None
    shares = value.endswith("%")
    low, high = (f"{100 * end:.2f}" if shares else f"{end:.4f}" for end in ends or (0, 0))
    name = {"test": "Result"}.get(name, name[:1].upper() + name[1:])
    return {
        "name": name,
        "value": value.removesuffix("%") if short else text,
        "percent": short and shares,
        "short": short,
        "rest": rest.removeprefix("of ").removeprefix("on ") if short else "",
        "interval": f"{low} to {high}{'%' if shares else ''}" if ends else "",
    }


def curves(module: "pl.LightningModule | None", metrics: Metrics, unit: str) -> list[Curve]:
    """The curves of the task, or those that a LightningModule logged; then learning rate, speed and memory."""
    logged = list(dict.fromkeys(name for row in metrics for name in row))
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
) -> list[Any]:
    """Charts over steps done, and numbers where there is one point only."""
    best = re.search(r"best-step-(\d+)", str(report.get("checkpoint")))
    drawn = []
    for title, unit, names in found:
        series = {name: [(row["step"], row[name]) for row in metrics if name in row] for name in names}
        series = {label: points for label, points in zip(labels(names), series.values(), strict=True) if points}
        if series and all(len(points) == 1 for points in series.values()):
            values = [("" if len(series) == 1 else label, f"{points[0][1]:.4g}") for label, points in series.items()]
            drawn.append({"title": title, "unit": unit, "svg": "", "keys": [], "values": values})
            continue
        validated = any(name.startswith("val") and any(name in row for row in metrics) for name in names)
        svg = chart(
            "step",
            series,
            x_range=(0.0, max(1.0, *(row["step"] for row in metrics))),
            highest=highest(module, names),
            mark=("best checkpoint", float(best[1])) if best and validated else None,
            per_x=report.get("batch_size"),
            per_x_label=f"{report.get('unit', 'samples')} seen",
        )
        keys = coloured(series) if validated else []
        drawn += [{"title": title, "unit": unit, "svg": svg, "keys": keys, "values": []}] if svg else []
    return drawn


def labels(names: Sequence[str]) -> list[str]:
    """Short names of curves that one chart shows: only what differs, if they are named as stage/figure."""
    parts = [name.partition("/")[::2] for name in names]
    if not all(figure for _, figure in parts) or len(set(names)) < len(names):
        return list(names)
    stages, figures = ({part[i] for part in parts} for i in (0, 1))
    if len(figures) == 1:
        return [stage for stage, _ in parts]
    return [figure if len(stages) == 1 else f"{stage}/{figure}" for stage, figure in parts]


def facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    """What the run was, in a few words. A run that failed early knows little of it."""
    unit, world = report.get("unit", "samples"), report["world_size"]
    rate, wait = report.get(f"train/{unit}_per_s"), report.get("train/data_wait_share")
    found = {
        "model": report["model"],
        "parameters": number(report.get("parameters")),
        "data": report["data/name"],
        f"training {unit}": number(report.get("data/train")),
        "strategy": report["strategy"] + (f", {world} processes" if world > 1 else ""),
        "steps": number(report.get("train/steps")),
        "time": seconds(report["wall_s"]) if "wall_s" in report else "",
        "speed": f"{rate:,.0f} {unit}/s" if rate else "",
        "data wait": f"{wait:.1%}" if wait is not None else "",
        "peak memory": size(report["peak_memory_bytes"]) if report.get("peak_memory_bytes") else "",
    }
    return [(name.capitalize(), str(value)) for name, value in found.items() if value not in ("", None)]


def machine(report: dict[str, Any]) -> list[tuple[str, str]]:
    world, nodes = report["world_size"], report.get("nodes")
    found = {
        "host": report.get("host"),
        "devices": f"{report.get('devices')} x {report.get('accelerator')}" + (f" on {nodes} nodes" if (nodes or 1) > 1 else ""),
        "processes": world,
        "result": report.get("across_processes"),
        "precision": report.get("precision"),
        "batch": f"{report.get('batch_size')} = {world} x {report.get('micro_batch')} x {report.get('accumulate_grad_batches')} accumulated",
        "data": f"{report.get('data/source')}, SHA-256 {str(report.get('data/sha256'))[:12]}",
        "started": report.get("started"),
        "commit": report.get("git_sha") or "none: not a git repository",
        "versions": report.get("versions"),
    }  # fmt: skip
    return [(name, str(value)) for name, value in found.items() if value is not None]


def commands(cfg: DictConfig, report: dict[str, Any]) -> list[tuple[str, str]]:
    run, folder = typed(str(cfg.run)), run_dir(cfg)
    place = "" if cfg.runs_dir == "runs" else f" runs_dir={typed(str(cfg.runs_dir))}"
    named = str(cfg.run) if not place else str(folder)
    done = report["status"] == "done"
    epochs = 2 * int(report.get("train/epochs") or 1)
    more = f"resume={run} trainer.max_epochs={epochs}" if done else f"run={run} resume=auto"
    found = {
        "evaluate": f"{command('eval')} run={run}{place}",
        "predict": f"{command('predict')} run={run}{place} input=<folder>",
        "train on" if done else "resume": f"{command('train')} {more}{place}",
        "export": f"{command('export')} {named}",
        "compare": f"{command('compare_runs')} {named} <another run>",
    }
    kept = list(found) if report.get("checkpoint") else ["train on" if done else "resume"]
    return [(name, found[name]) for name in kept]


def write_page(
    cfg: DictConfig, report: dict[str, Any], module: "pl.LightningModule | None", panels: Sequence[Content]
) -> None:
    """Writes report.html and panels.json of a run that is done or has failed."""
    folder = run_dir(cfg)
    write_panels(folder, panels)
    metrics, log_lines = RunFolder(folder).metrics(), lines_of(folder / "train.log")
    plain = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))
    assert isinstance(plain, DictConfig)
    unit, failed = report.get("unit", "samples"), report["status"] != "done"
    last = metrics[-ROWS:] if failed else []
    columns = list(dict.fromkeys(name for row in last for name in row))
    values: dict[str, Any] = {
        "report": report,
        "unit": unit,
        "headline": headline(module, report),
        "facts": facts(report),
        "error": report.get("error"),
        "warnings": [*filter(None, [report.get("data/notice")]), *warnings_in(log_lines)],
        "last_rows": (columns, [[row.get(name, "") for name in columns] for row in last]) if columns else None,
        "log_lines": log_lines[-LINES:] if failed else [],
        "curves": drawn_curves(module, curves(module, metrics, unit), metrics, report),
        "per_step": report.get("batch_size"),
        "test_panels": [panel for panel in panels if not isinstance(panel, Gallery)],
        "galleries": [panel for panel in panels if isinstance(panel, Gallery)],
        "durations": Durations("", {PARTS[part]: float(s) for part in PARTS if (s := report.get(f"time/{part}_s"))}),
        "settings": [each.partition("=")[::2] for each in as_overrides(plain)],
        "config": OmegaConf.to_yaml(plain),
        "machine": machine(report),
        "commands": commands(cfg, report),
        "figures": [(name, "" if value is None else value) for name, value in report.items()],
    }
    shown = {"training": "curves", "test": "test_panels", "samples": "galleries"}
    titles = {"training": "Training", "test": "Test set", "samples": "Samples", "time": "Time", "settings": "Settings",
              "machine": "Machine", "commands": "Commands", "figures": "All figures"}  # fmt: skip
    there = [(i, t) for i, t in titles.items() if i not in shown or values[shown[i]]]
    values["sections"] = [(i, t) for i, t in there if i != "time" or values["durations"].seconds]
    write_text(folder / "report.html", render("report.html.j2", str(report["run"]), values, FILTERS))
