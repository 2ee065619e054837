"""The page of many runs, with a section per data set, because only runs on the same data can be ranked. Does not import torch."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any
from urllib.parse import quote

from lockstep.config.compose import PLACE
from lockstep.config.formatting import is_fraction, metric, number, seconds, to_text
from lockstep.config.run_config import COMPONENTS
from lockstep.errors import UserError
from lockstep.extras.render import COLOURS, Points, chart, render
from lockstep.machine.files import read_text
from lockstep.reporting.report import Report, metric_series
from lockstep.run import metrics_of_test

METRICS, POINTS, SETTINGS = 6, 100, 12  # with these limits, 100 runs stay below 5 MB
# Keys that Lockstep sets, not the user.
DERIVED = ("logger.", "data.source", "loader.num_workers", "trainer.precision", "trainer.log_every_n_steps")
Values = dict[str, Any]


def differing_keys(runs: Sequence[Report]) -> list[str]:
    """The config keys whose values differ between the runs; those that name classes come last.

    Of a component that differs, such as `strategy`, its name and the keys that all runs have.
    """
    texts = [{key: to_text(value) for key, value in run.settings.items()} for run in runs]
    keys = dict.fromkeys(key for settings in texts for key in settings)
    varying = [key for key in keys if not key.startswith((*PLACE, *DERIVED)) and len({t.get(key) for t in texts}) > 1]
    shared = [key for key in varying if all(key in each for each in texts) and not key.endswith("_target_")]
    for group in COMPONENTS:
        title = next((key for key in (f"{group}.name", f"{group}._target_") if key in varying), None)
        varying = [k for k in varying if title in (None, k) or k in shared or not k.startswith(f"{group}.")]
    return sorted(varying, key=lambda key: key.endswith("_target_"))


def curve_charts(
    runs: Sequence[Report], monitors: Sequence[str], unit: str, colours: Mapping[str, str]
) -> Iterator[Values]:
    """A chart for each metric, monitored ones first: over steps, and over samples seen, as the batch sizes may differ."""
    batches = {run["run"]: int(run.get("batch_size") or 1) for run in runs}
    curves: dict[str, dict[str, Points]] = {}  # by name, then by run
    for run in runs:
        with suppress(UserError):
            for name, points in metric_series(run.run_folder.metrics()).items():
                curves.setdefault(name, {})[run["run"]] = points
    drawn = [n for n in curves if n != "epoch" and not n.endswith("/count") and not n.startswith("test/")]
    for name in sorted(drawn, key=lambda name: (name not in monitors, "loss" not in name))[:METRICS]:
        by_step = curves[name]
        if all(len(points) == 1 for points in by_step.values()):
            continue  # the table has these numbers
        percent = is_fraction(name, *(y for points in by_step.values() for _, y in points))
        draw = partial(chart, name, colours=colours, percent=percent, many=POINTS)
        by_sample = {run: [(x * batches[run], y) for x, y in points] for run, points in by_step.items()}
        svgs = [("in-x", draw("step", by_step)), ("in-per", draw(f"{unit} seen", by_sample))]
        yield {"name": name, "svgs": svgs}


def best_run(runs: Sequence[Report], monitor: str) -> Report | None:
    """The run with the best monitored value; None if the runs do not share a direction."""
    scored = [run for run in runs if isinstance(run.get(monitor), int | float)]
    modes = {run.get("monitor_mode") for run in scored if run.get("monitor") == monitor}
    if len(modes) != 1:
        return None
    return (max if modes == {"max"} else min)(scored, key=lambda run: run[monitor])


def confusion(run: Report) -> Values | None:
    """The confusion matrix in the raw panels.json: decoding it would import torch."""
    with suppress(Exception):  # the file is missing or damaged, or has no matrix
        panels = json.loads(read_text(run.run_folder.panels_file))
        matrix = next(panel for panel in panels if panel["__panel__"] == "Matrix")
        return {key: matrix[key] for key in ("names", "values")}
    return None


def repeats(runs: Sequence[Report], settings: Sequence[str], metrics: Sequence[str]) -> list[tuple[Values, list[Any]]]:
    """Groups of finished runs that differ only by seed: their settings, then their number, and mean and deviation of each metric."""
    groups: dict[tuple[str, ...], list[Report]] = {}
    others = [key for key in settings if key != "seed"]
    for run in runs:
        if run["status"] == "done":
            groups.setdefault(tuple(to_text(run.settings.get(key)) for key in others), []).append(run)
    rows = []
    for key, group in groups.items():
        cells: list[Any] = [len(group)]
        for name in metrics:
            values = [v for run in group if isinstance(v := run.get(name), int | float)]
            cells.append((fmean(values), stdev(values) if len(values) > 1 else None) if values else None)
        rows.append((dict(zip(others, key, strict=True)), cells))
    return rows if any(len(group) > 1 for group in groups.values()) else []


def section(title: str, runs: Sequence[Report], out: Path) -> Values:
    """What the page shows for the runs on one data set."""
    monitors = [name for name, _ in Counter(str(run["monitor"]) for run in runs if run.get("monitor")).most_common()]
    unit = next((str(run["unit"]) for run in runs if run.get("unit")), "samples")
    test_metrics = [name for run in runs for name in metrics_of_test(run) if not name.endswith("/count")]
    metrics = [n for n in dict.fromkeys([*monitors, *test_metrics]) if any(n in run for run in runs)]
    settings = differing_keys(runs)
    heads = {key: key.removesuffix(".name").removesuffix("._target_") for key in settings[:SETTINGS]}
    measured: list[tuple[str, str, Callable[[Any], str]]] = [
        *((name, name, partial(metric, name)) for name in metrics),
        ("steps", "train/steps", "{:,.0f}".format),
        (f"{unit}/s", f"train/{unit}_per_s", "{:,.0f}".format),
        ("time", "wall_s", seconds),
    ]
    columns = [(head, key, form, [run.get(key) for run in runs]) for head, key, form in measured]
    columns += [(head, key, to_text, [run.settings.get(key) for run in runs]) for key, head in heads.items()]
    links = [
        quote(os.fsencode(os.path.relpath(run.run_folder.page_file, out.parent).replace(os.sep, "/"))) for run in runs
    ]
    colours = {run["run"]: f"c{index % COLOURS}" for index, run in enumerate(runs)}
    monitor = next(iter(monitors), "")
    best = best_run(runs, monitor)
    compared = {
        run["run"]: {
            "settings": {key: to_text(run.settings.get(key)) for key in settings},
            "metrics": {head: form(run[key]) for head, key, form in measured if run.get(key) is not None},
            "confusion": confusion(run),
        }
        for run in runs
    }
    return {
        "title": title,
        "best": best and {"run": best["run"], "name": monitor, "value": metric(monitor, best[monitor])},
        "charts": list(curve_charts(runs, monitors, unit, colours)),
        "colours": colours,
        "unit": unit,
        "columns": columns,
        "rows": list(zip(runs, links, strict=True)),
        "left_out": settings[SETTINGS:],
        "metrics": metrics,
        "heads": {key: head for key, head in heads.items() if key != "seed"},
        "repeats": repeats(runs, settings, metrics),
        "compared": compared,
    }


def runs_page(runs: Sequence[Report], folder: Path, out: Path) -> str:
    """HTML. Links to the runs' own pages are relative to `out`."""
    by_data: dict[tuple[Any, Any], list[Report]] = {}
    for run in runs:
        by_data.setdefault((run.get("data/name"), run.get("data/sha256")), []).append(run)
    counts, names = Counter(str(run["status"]) for run in runs), Counter(name for name, _ in by_data)
    titles = [f"{name or 'unknown data'}{f' {sha256!s:.8}' if names[name] > 1 else ''}" for name, sha256 in by_data]
    values = {
        "folder": str(folder),
        "count": len(runs),
        "facts": [(status.capitalize(), number(count)) for status, count in counts.most_common()],
        "sections": [section(title, group, out) for title, group in zip(titles, by_data.values(), strict=True)],
    }
    return render("runs.html.j2", f"{len(runs)} runs", values)
