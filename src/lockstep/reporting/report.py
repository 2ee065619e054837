"""The report of a run in Python: its metrics, curves and panels. Free of torch."""

import base64
import io
import json
import re
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from lockstep.config.compose import dotted
from lockstep.config.formatting import metric
from lockstep.config.renames import with_moved
from lockstep.errors import UserError
from lockstep.machine.files import read_text
from lockstep.run import OF_RANK_0, RunFolder, explain_damage, metrics_of_test

if TYPE_CHECKING:
    import pandas as pd

# An iframe keeps the styles and the script of the page apart from those of the notebook.
FRAME = '<iframe srcdoc="{}" sandbox="allow-scripts allow-popups" width="100%" height="640" style="border:0"></iframe>'


KIND, IMAGE, ARRAY = "__panel__", "__image__", "__array__"  # keys of panels.json, which extras/panels.py writes


def decode(encoded: dict[str, Any]) -> Any:
    """A value of panels.json. A panel, or a part of one, has the attributes of its class, and the name of the class as `kind`."""
    import numpy as np
    from PIL import Image

    if IMAGE in encoded:
        image = np.array(Image.open(io.BytesIO(base64.b64decode(encoded[IMAGE].partition(",")[2]))))
        return image.transpose(2, 0, 1) if image.ndim == 3 else image[None]
    if ARRAY in encoded:
        dtype, shape, text = encoded[ARRAY]
        return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype).reshape(shape)
    return SimpleNamespace(kind=encoded.pop(KIND), **encoded) if KIND in encoded else encoded


def read_panels(path: Path) -> list[Any]:
    """The panels in `path`; empty without the file. Raises UserError if it is damaged."""
    with explain_damage(path, "Remove the file; report.html shows the same panels."):
        panels = json.loads(read_text(path), object_hook=decode) if path.exists() else []
        if not isinstance(panels, list) or not all(hasattr(panel, "title") for panel in panels):
            raise ValueError("it does not contain panels")
    return panels


def metric_series(rows: Iterable[Mapping[str, float]]) -> dict[str, list[tuple[int, float]]]:
    """The columns of metrics.csv by name, each as (step, value) pairs."""
    series: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step":
                series.setdefault(name, []).append((int(row["step"]), value))
    return series


class Curve(NamedTuple):
    """A metric over time, for `plt.plot(*curve)`."""

    steps: list[int]  # optimizer steps done
    values: list[float]


class Report(dict[str, Any]):
    """report.json as a dict; empty if it does not exist. A notebook shows report.html."""

    def __init__(self, run: RunFolder, content: Mapping[str, Any] | None = None) -> None:
        super().__init__(run.report() if content is None else content)
        self.run_folder, self.folder = run, run.path

    @classmethod
    def listed(cls, run: RunFolder, runs_dir: Path) -> Self:
        """The report of one run in a list: a damaged file must not hide the other runs."""
        content: dict[str, Any] = {"status": "damaged" if run.report_file.is_file() else "no report"}
        with suppress(UserError):
            content |= run.report()
        return cls(run, content | {"run": run.path.relative_to(runs_dir).as_posix()})

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The config by dotted keys; empty if it is missing or damaged."""
        with suppress(UserError):
            return dotted(with_moved(self.run_folder.saved_config()[0]))
        return {}

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """The columns of metrics.csv by name."""
        columns = metric_series(self.run_folder.metrics())
        return {name: Curve(*map(list, zip(*points, strict=True))) for name, points in columns.items()}

    @cached_property
    def panels(self) -> dict[str, Any]:
        """The page's panels about the test set by title, as in `report.panels["Largest losses"].samples`."""
        return {panel.title: panel for panel in read_panels(self.run_folder.panels_file)}

    def frame(self) -> "pd.DataFrame":
        """The rows of metrics.csv as a DataFrame."""
        import pandas as pd

        return pd.DataFrame(self.run_folder.metrics())

    def _repr_html_(self) -> str | None:
        page = self.run_folder.page_file
        return FRAME.format(escape(read_text(page))) if page.is_file() else None


# --- The headline ---

Headline = tuple[str, str, tuple[float, float] | None]  # name, value, and the 95% interval if there is a simple one
STAGE = re.compile(r"(train|val|valid|validation)[/_]([^/]+)(/.+)?")
STAGES = re.compile(r"(?:^|[\W_])(?:train|val|valid|validation|test)(?=$|[\W_])")


def primary_metric(report: Mapping[str, Any]) -> tuple[str, str]:
    """Name and value of a run's primary metric.

    This is the test metric that corresponds to the monitored one, or the first one if that is a loss; else the
    monitored metric. Without any metric: the run's progress.
    """
    monitor, tested = str(report.get("monitor")), metrics_of_test(report)
    plain = {name: STAGES.sub("", name).strip("/_") for name in (*tested, monitor)}

    def rank(name: str) -> tuple[bool, bool]:
        is_other, is_loss = not f"{plain[name]}/".startswith(f"{plain[monitor]}/"), "loss" in plain[name]
        return (is_loss, is_other) if "loss" in plain[monitor] else (is_other, is_loss)

    names = sorted((name for name in tested if not name.endswith((OF_RANK_0, "/count"))), key=rank)
    names += [*tested, *(name for name in report if name == monitor)]
    names += [name for name in report if name.startswith("val") and STAGE.fullmatch(name) and name != "val/count"]
    if names:
        samples = f" on {report['test/count']:,} {report['unit']}" if "test/count" in report else ""
        return names[0].replace("/", " "), metric(names[0], report[names[0]]) + samples
    return str(report["status"]).capitalize(), f"the log ends at step {report.get('train/steps') or 0:,}"


def headline(module: Any, report: Mapping[str, Any]) -> Headline:
    """The primary metric of a run, by its LightningModule's `primary_metric` and `interval` if it has them."""
    from lockstep.training.module import hook  # imports torch

    own, interval = (hook(module, name, lambda _: None) for name in ("primary_metric", "interval"))
    return *(own(report) or primary_metric(report)), interval(report)
