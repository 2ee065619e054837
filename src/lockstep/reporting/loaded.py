"""The report of a run for Python: its figures, curves and panels. Free of torch until the panels are asked for."""

from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.checkpoints.finding import run_with
from lockstep.config.run_files import read_metrics, read_report
from lockstep.config.words import number
from lockstep.errors import UserError
from lockstep.reporting.report_file import evaluated, status

if TYPE_CHECKING:
    import pandas as pd

    from lockstep.tasks.panel import Content

# The page has styles and a script of its own, which must not meet those of the notebook.
FRAME = '<iframe srcdoc="{}" sandbox="allow-scripts allow-popups" width="100%" height="640" style="border:0"></iframe>'


class Curve(NamedTuple):
    """As for `plt.plot(*curve)`."""

    steps: list[int]  # optimizer steps done
    values: list[float]


class Report(dict[str, Any]):
    """report.json as a dict; empty without one. A notebook shows the page."""

    def __init__(self, folder: Path) -> None:
        found = read_report(folder)
        super().__init__(found | {"status": status(folder, found)} if found else {})
        self.folder = folder

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """The columns of metrics.csv by name."""
        rows = read_metrics(self.folder / "metrics.csv")
        names = dict.fromkeys(name for row in rows for name in row if name != "step")
        pairs = {name: [(int(row["step"]), row[name]) for row in rows if name in row] for name in names}
        return {name: Curve(*map(list, zip(*found, strict=True))) for name, found in pairs.items()}

    @cached_property
    def panels(self) -> "dict[str, Content]":
        """What the page shows of the test set, by title: `report.panels["Largest losses"].samples`."""
        from lockstep.reporting.panels_file import read_panels

        return {panel.title: panel for panel in read_panels(self.folder)}

    def frame(self) -> "pd.DataFrame":
        """The rows of metrics.csv as a DataFrame. Raises UserError: pandas is not installed."""
        try:
            import pandas as pd
        except ImportError:
            raise UserError("frame() needs pandas: pip install pandas. `curves` has the same as lists.") from None
        return pd.DataFrame(read_metrics(self.folder / "metrics.csv"))

    def _repr_html_(self) -> str:
        """A table of the main figures, which viewers without frames show as well; then the page."""
        names = ("run", "status", "error", *evaluated(self), str(self.get("monitor")), "train/steps", "wall_s")
        rows = {name: number(self[name]) for name in names if self.get(name) is not None}
        cells = "".join(f"<tr><th>{escape(str(name))}</th><td>{escape(text)}</td></tr>" for name, text in rows.items())
        page = self.folder / "report.html"
        return f"<table>{cells}</table>" + (FRAME.format(escape(page.read_text("utf-8"))) if page.is_file() else "")


def load_report(run: str | Path, runs_dir: str = "runs") -> Report:
    """Raises UserError: there is no such run."""
    return Report(run_with("report.json", run, runs_dir))
