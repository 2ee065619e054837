"""Prints the end of a run or an evaluation."""

from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from lockstep.config.identity import evaluation_file, run_dir
from lockstep.config.project import command
from lockstep.config.words import number, size
from lockstep.machine.files import write_json
from lockstep.machine.world import World
from lockstep.reporting.console import figures_table, say, speed
from lockstep.reporting.page import headline_of, write_page
from lockstep.reporting.wandb_logger import wandb_sync_line

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lockstep.tasks.panel import Content


def show_run(
    cfg: DictConfig, report: dict[str, Any], module: "pl.LightningModule | None", panels: "list[Content]"
) -> None:
    """Writes report.html and prints the table at the end of a run."""
    folder, run, where = run_dir(cfg), cfg.run, cfg.runs_dir
    write_page(cfg, report, module, panels)
    compiling = f", {report['train/first_step_s'] or 0:.1f} s of it in the first step" if cfg.compile else ""
    rows = [
        headline_of(module, report),
        *([("test loss", number(report["test/loss"]))] if "test/loss" in report else []),
        ("speed", speed(report)),
        ("time", f"{report['wall_s']:.1f} s, {report['train/steps']:,} steps" + compiling),
        ("peak memory", f"{size(report['peak_memory_bytes'])} per process"),
        ("checkpoint", str(folder / report["checkpoint"]) if report["checkpoint"] else "none"),
        ("report", str(folder / "report.html")),
    ]
    sync = wandb_sync_line(folder)
    figures_table(str(run), rows)
    if report["checkpoint"]:
        say(f"evaluate it: {command('eval')} run={run}" + (f" runs_dir={where}" if where != "runs" else ""))
    if sync:
        say(f"upload it to W&B: {sync}")


def write_result(cfg: DictConfig, world: World, job: str, **figures: Any) -> None:
    """Writes <job>.json in the run's directory."""
    of = {"run": cfg.run, "checkpoint": cfg.init_from, "strategy": cfg.strategy.name, "world_size": world.size}
    write_json(evaluation_file(cfg, job), of | figures)


def show_predictions(cfg: DictConfig, world: World, counted: Any) -> None:
    """Says where the table is, and writes predict.json. `counted`: the rows, and the broken ones."""
    output, count, broken = cfg.predict.output, counted.count, counted.broken
    write_result(cfg, world, "predict", input=cfg.predict.input, output=output, count=count, broken=broken)
    rows = [("predictions", output), ("rows", f"{count:,}")]
    rows += [("broken files", f"{broken:,}")] if broken else []
    rows += [("gallery", f"{output}.html")] if cfg.predict.gallery else []
    figures_table(str(cfg.init_from), rows)


def show_evaluation(cfg: DictConfig, world: World, figures: dict[str, Any]) -> None:
    """Prints the figures, and writes eval.json."""
    write_result(cfg, world, "eval", **figures)
    rows = [(name, f"{v:.8f}" if isinstance(v, float) else number(v)) for name, v in figures.items()]
    figures_table(str(cfg.init_from), rows)
