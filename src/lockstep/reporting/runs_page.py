"""The reports of runs: one for Python, and the page of many with overlaid curves and the settings that differ. Free of torch."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.config.compose import PLACE, dotted
from lockstep.config.words import number, seconds, shown
from lockstep.errors import UserError
from lockstep.reporting.render import chart, coloured, render
from lockstep.run.folder import RunFolder
from lockstep.run.report import ListedRun, metric_series, tested

if TYPE_CHECKING:
    import pandas as pd

    from lockstep.tasks.panel import Content


# --- The report of a run for Python: its metrics, curves and panels. Free of torch until the panels are asked for ---

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


# --- The page of many runs: overlaid curves, and a table of metrics and of the settings that differ. Free of torch ---

METRICS, POINTS, SETTINGS = 6, 100, 12  # 100 runs with as many of each stay below 5 MB
# Decided by Lockstep, not by a person.
DERIVED = ("logger.", "data.source", "data.num_workers", "trainer.precision", "trainer.log_every_n_steps")


def differing(runs: Sequence[ListedRun]) -> list[str]:
    """The keys of the configs that do not have one value."""
    configs = [{key: shown(value) for key, value in dotted(run.config).items()} for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config)
    ignored = (*PLACE, *DERIVED)
    return [k for k in keys if not k.startswith(ignored) and len({config.get(k) for config in configs}) > 1]


def curve_charts(runs: Sequence[ListedRun], monitors: Sequence[str], unit: str) -> Iterator[dict[str, Any]]:
    """A chart for each metric, the monitored ones first; a second one over samples seen if the runs' batches differ."""
    batches = {run.name: int(run.report.get("batch_size") or 1) for run in runs}
    columns = {run.name: series for run in runs if (series := metric_series(run.metrics()))}
    names = dict.fromkeys(name for series in columns.values() for name in series)
    curves = [n for n in names if n != "epoch" and not n.endswith("/count") and not n.startswith("test/")]
    sizes = list({batches[run] for run in columns})
    for name in sorted(curves, key=lambda name: (name not in monitors, "loss" not in name))[:METRICS]:
        by_step = {run: series[name] for run, series in columns.items() if name in series}
        if all(len(points) == 1 for points in by_step.values()):
            continue  # the table has these numbers
        second_x = (f"{unit} seen", sizes[0]) if len(sizes) == 1 else None
        svgs = [("" if second_x else " in-x", chart("step", by_step, second_x=second_x, many=POINTS))]
        if not second_x:
            by_sample = {run: [(x * batches[run], y) for x, y in points] for run, points in by_step.items()}
            svgs.append((" in-per", chart(f"{unit} seen", by_sample, many=POINTS)))
        yield {"name": name, "svgs": svgs, "keys": coloured(by_step)}


def best_of(runs: Sequence[ListedRun], monitor: str) -> dict[str, str]:
    """The best monitored validation figure, as `name`, `value` and `run`."""
    scored = [(run.report[monitor], run) for run in runs if isinstance(run.report.get(monitor), int | float)]
    modes = {run.report.get("monitor_mode") for _, run in scored if run.report.get("monitor") == monitor}
    if not scored or len(modes) != 1:
        return {"name": "", "value": "", "run": ""}
    value, run = (max if modes == {"max"} else min)(scored, key=lambda pair: pair[0])
    return {"name": monitor, "value": number(float(value)), "run": run.name}


def runs_page(runs: Sequence[ListedRun], folder: Path, out: Path) -> str:
    """HTML. Links to the runs' own pages are relative to `out`."""
    monitors = Counter(str(run.report["monitor"]) for run in runs if run.report.get("monitor"))
    common = [name for name, _ in monitors.most_common()]
    unit = next((str(run.report["unit"]) for run in runs if run.report.get("unit")), "samples")
    settings, configs = differing(runs), [dotted(run.config) for run in runs]
    of_test = [name for run in runs for name in tested(run.report) if not name.endswith("/count")]
    metrics = [n for n in dict.fromkeys([*common, *of_test]) if any(n in run.report for run in runs)]
    short = {key: key.rpartition(".")[2] for key in settings[:SETTINGS]}
    names = Counter(short.values())
    whole = "{:,.0f}".format
    measured = [(name, name, number) for name in metrics]
    measured += [
        ("steps", "train/steps", whole),
        (f"{unit}/s", f"train/{unit}_per_s", whole),
        ("time", "wall_s", seconds),
    ]
    columns = [  # head, title, how numbers are shown, values
        *(
            (n if names[n] == 1 else key, key, shown, [config.get(key) for config in configs])
            for key, n in short.items()
        ),
        *((head, "", form, [run.report.get(key) for run in runs]) for head, key, form in measured),
    ]
    pages = [run.folder.page_file for run in runs]
    links = [Path(os.path.relpath(page, out.parent)).as_posix() if page.is_file() else "" for page in pages]
    counts = Counter(str(run.report["status"]) for run in runs)
    values = {
        "folder": str(folder),
        "best": best_of(runs, next(iter(common), "")),
        "facts": [(status.capitalize(), number(count)) for status, count in counts.most_common()],
        "charts": list(curve_charts(runs, common, unit)),
        "unit": unit,
        "columns": columns,
        "rows": list(zip(runs, links, zip(*(values for *_, values in columns), strict=True), strict=True)),
        "left_out": max(0, len(settings) - SETTINGS),
    }
    return render("runs.html.j2", f"{len(runs)} runs", values)
