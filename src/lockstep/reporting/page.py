"""report.html: figures, curves and config in one self-contained page."""

import html
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lockstep.machine.files import write_text
from lockstep.reporting.chart import chart
from lockstep.reporting.console import number

PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; background: #fff }}
table {{ border-collapse: collapse; margin: 1rem 0 }} td {{ padding: .2rem 1.5rem .2rem 0; border-bottom: 1px solid #ddd; vertical-align: top; overflow-wrap: anywhere }}
.big {{ font-size: 2.5rem; font-weight: 600; margin: 0 }} svg {{ max-width: 100%; height: auto }} pre {{ overflow-x: auto; background: #f5f5f5; padding: 1rem }}
</style>
<h1>{title}</h1><p class="big">{headline}</p><p>{subline}</p>
{plots}
<h2>Figures</h2><table>{rows}</table>
<h2>Config</h2><pre>{config}</pre></html>
"""


def curve(title: str, unit: str, names: tuple[str, ...], metrics: list[dict[str, float]]) -> str:
    """An SVG of the named columns over optimizer steps; empty if none was logged."""
    series = {name: [(row["step"], row[name]) for row in metrics if name in row] for name in names}
    return chart(title, "optimizer step", unit, series)


def panels(task: Any, report: dict[str, Any]) -> list[tuple[str, str, tuple[str, ...]]]:
    """The curves of the task, and the speed."""
    unit = report["unit"]
    own = (
        task.panels() if task is not None else [("Loss", "loss", ("train/loss", "train_loss", "val/loss", "val_loss"))]
    )
    return [*own, ("Speed", f"{unit}/s", (f"train/{unit}_per_s",))]


def write_html(
    folder: Path,
    report: dict[str, Any],
    metrics: list[dict[str, float]],
    cfg: DictConfig,
    headline: tuple[str, str],
    task: Any,
) -> None:
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(number(value))}</td></tr>" for name, value in report.items()
    )
    page = PAGE.format(
        title=html.escape(str(report["run"])),
        headline=html.escape(f"{headline[1]} {headline[0]}"),
        subline=html.escape(
            f"{report['model']} on {report['data/name']} ({report['data/source']}), {report['strategy']} with "
            f"{report['world_size']} process(es), {report['precision']}, {report['train/steps']:,} steps in {report['wall_s']:.0f} s"
        ),
        plots="\n".join(curve(title, unit, names, metrics) for title, unit, names in panels(task, report)),
        rows=rows,
        config=html.escape(OmegaConf.to_yaml(cfg, resolve=True)),
    )
    write_text(folder / "report.html", page)
