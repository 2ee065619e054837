"""The reports of runs: one for Python, and the page of many with overlaid curves and the settings that differ. Free of torch."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.config.compose import PLACE, dotted
from lockstep.config.words import number, seconds, shown
from lockstep.errors import UserError
from lockstep.reporting.render import chart, coloured, render
from lockstep.run.folder import RunFolder, find_run
from lockstep.run.report import ListedRun, metric_series, tested

if TYPE_CHECKING:
    import pandas as pd

    from lockstep.tasks.panel import Content


# --- The report of a run for Python: its figures, curves and panels. Free of torch until the panels are asked for ---

# The page has styles and a script of its own, which must not meet those of the notebook.
FRAME = '<iframe srcdoc="{}" sandbox="allow-scripts allow-popups" width="100%" height="640" style="border:0"></iframe>'


class Curve(NamedTuple):
    """As for `plt.plot(*curve)`."""

    steps: list[int]  # optimizer steps done
    values: list[float]


class Report(dict[str, Any]):
    """report.json as a dict; empty without one. A notebook shows the page."""

    def __init__(self, run: RunFolder) -> None:
        super().__init__(run.report())
        self.run, self.folder = run, run.path

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """The columns of metrics.csv by name."""
        columns = metric_series(self.run.metrics())
        return {name: Curve(*map(list, zip(*points, strict=True))) for name, points in columns.items()}

    @cached_property
    def panels(self) -> "dict[str, Content]":
        """What the page shows of the test set, by title: `report.panels["Largest losses"].samples`."""
        from lockstep.reporting.panels import read_panels

        return {panel.title: panel for panel in read_panels(self.folder)}

    def frame(self) -> "pd.DataFrame":
        """The rows of metrics.csv as a DataFrame. Raises UserError: pandas is not installed."""
        try:
            import pandas as pd
        except ImportError:
            raise UserError("frame() needs pandas: pip install pandas. `curves` has the same as lists.") from None
        return pd.DataFrame(self.run.metrics())

    def _repr_html_(self) -> str:
        """A table of the main figures, which viewers without frames show as well; then the page."""
        names = ("run", "status", "error", *tested(self), str(self.get("monitor")), "train/steps", "wall_s")
        rows = {name: number(self[name]) for name in names if self.get(name) is not None}
        cells = "".join(f"<tr><th>{escape(str(name))}</th><td>{escape(text)}</td></tr>" for name, text in rows.items())
        page = self.run.page_file
        return f"<table>{cells}</table>" + (FRAME.format(escape(page.read_text("utf-8"))) if page.is_file() else "")


def load_report(run: str | Path, runs_dir: str = "runs") -> Report:
    """Raises UserError: there is no such run."""
    return Report(find_run(run, runs_dir, needs="report.json"))


# --- The page of many runs: overlaid curves, and a table of figures and of the settings that differ. Free of torch ---

FIGURES, POINTS, SETTINGS = 6, 100, 12  # 100 runs with as many of each stay below 5 MB
# Decided by Lockstep, not by a person.
DERIVED = ("logger.", "data.source", "data.num_workers", "trainer.precision", "trainer.log_every_n_steps")


@dataclass(frozen=True)
class Cell:
    """A number as it is shown, and what it is sorted by."""

    text: str
    value: float


def cell(value: Any, form: Callable[[Any], str] = shown) -> Cell | str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Cell(form(value), value)
    return "" if value is None else shown(value)


def differing(runs: Sequence[ListedRun]) -> list[str]:
    """The keys of the configs that do not have one value."""
    configs = [{key: shown(value) for key, value in dotted(run.config).items()} for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config)
    ignored = (*PLACE, *DERIVED)
    return [k for k in keys if not k.startswith(ignored) and len({config.get(k) for config in configs}) > 1]


def curve_charts(runs: Sequence[ListedRun], monitors: Sequence[str], unit: str) -> list[dict[str, Any]]:
    """A chart for each figure, the monitored ones first; a second one over samples seen if the runs' batches differ."""
    columns = {run.name: metric_series(run.metrics()) for run in runs}
    names = dict.fromkeys(name for each in columns.values() for name in each)
    curves = [n for n in names if n != "epoch" and not n.endswith("/count") and not n.startswith("test/")]
    chosen = sorted(curves, key=lambda name: (name not in monitors, "loss" not in name))[:FIGURES]
    batches = {run.batch_size for run in runs if columns[run.name]}
    per = next(iter(batches)) if len(batches) == 1 else None
    charts = []
    for name in chosen:
        by_step = {run: each[name] for run, each in columns.items() if name in each}
        if all(len(points) == 1 for points in by_step.values()):
            continue  # the table has these numbers
        svgs = [("" if per else " in-x", chart("step", by_step, per_x=per, per_x_label=f"{unit} seen", many=POINTS))]
        if not per:
            by_sample = {r.name: [(x * r.batch_size, y) for x, y in by_step[r.name]] for r in runs if r.name in by_step}
            svgs.append((" in-per", chart(f"{unit} seen", by_sample, many=POINTS)))
        charts.append({"name": name, "svgs": svgs, "keys": coloured(by_step)})
    return charts


def best_of(runs: Sequence[ListedRun], monitor: str) -> dict[str, str]:
    """The best monitored validation figure, as `name`, `value` and `run`."""
    scored = [(run.report[monitor], run) for run in runs if isinstance(run.report.get(monitor), int | float)]
    modes = {run.report.get("monitor_mode") for _, run in scored if run.report.get("monitor") == monitor}
    if not scored or len(modes) != 1:
        return {"name": "", "value": "", "run": ""}
    value, run = (max if modes == {"max"} else min)(scored, key=lambda pair: pair[0])
    return {"name": monitor, "value": number(float(value)), "run": run.name}


def whole(value: float) -> str:
    return f"{value:,.0f}" if value else ""


def runs_page(runs: Sequence[ListedRun], folder: Path, out: Path) -> str:
    """HTML. Links to the runs' own pages are relative to `out`."""
    monitors = [str(run.report["monitor"]) for run in runs if run.report.get("monitor")]
    common = [name for name, _ in Counter(monitors).most_common()]
    unit = next((str(run.report["unit"]) for run in runs if run.report.get("unit")), "samples")
    charts, settings = curve_charts(runs, common, unit), differing(runs)
    of_test = dict.fromkeys(name for run in runs for name in tested(run.report) if not name.endswith("/count"))
    figures = dict.fromkeys(name for name in (*common, *of_test) if any(name in run.report for run in runs))
    short = {key: key.rpartition(".")[2] for key in settings[:SETTINGS]}
    names = Counter(short.values())
    configs = [dotted(run.config) for run in runs]
    columns = [  # head, title, cells
        *(
            (n if names[n] == 1 else key, key, [cell(config.get(key)) for config in configs])
            for key, n in short.items()
        ),
        *((name, "", [cell(run.report.get(name), number) for run in runs]) for name in figures),
        ("steps", "", [cell(run.report.get("train/steps"), whole) for run in runs]),
        (f"{unit}/s", "", [cell(run.report.get(f"train/{unit}_per_s"), whole) for run in runs]),
        ("time", "", [cell(run.report.get("wall_s"), seconds) for run in runs]),
    ]
    pages = [run.folder.page_file for run in runs]
    links = [Path(os.path.relpath(page, out.parent)).as_posix() if page.is_file() else "" for page in pages]
    counts = Counter(str(run.report["status"]) for run in runs)
    values = {
        "folder": str(folder),
        "best": best_of(runs, next(iter(common), "")),
        "facts": [(status.capitalize(), number(count)) for status, count in counts.most_common()],
        "charts": charts,
        "unit": unit,
        "columns": columns,
        "rows": list(zip(runs, links, zip(*(cells for *_, cells in columns), strict=True), strict=True)),
        "left_out": max(0, len(settings) - SETTINGS),
    }
    return render("runs.html.j2", f"{len(runs)} runs", values)
