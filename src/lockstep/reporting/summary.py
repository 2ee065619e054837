"""Prints the end of a run or an evaluation."""

from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from lockstep.config.identity import evaluation_file, run_dir
from lockstep.config.project import command
from lockstep.config.run_files import read_metrics
from lockstep.config.words import size
from lockstep.machine.files import write_json
from lockstep.machine.world import World
from lockstep.reporting.report_file import evaluated

if TYPE_CHECKING:
    import lightning.pytorch as pl


def show_run(cfg: DictConfig, report: dict[str, Any], module: "pl.LightningModule") -> None:
    """Writes report.html and prints the table at the end of a run."""
    from lockstep.reporting.console import figures_table, number, say, speed
    from lockstep.reporting.loggers import wandb_sync_line
    from lockstep.reporting.page import write_html
    from lockstep.training.module import TaskModule

    folder, run, where = run_dir(cfg), cfg.run, cfg.runs_dir
    task = module.task if isinstance(module, TaskModule) else None
    headline = task.headline(report) if task is not None and "test/count" in report else plain_headline(report)
    write_html(folder, report, read_metrics(folder / "metrics.csv"), cfg, headline, task)
    compiling = f", {report['train/first_step_s'] or 0:.1f} s of it in the first step" if cfg.compile else ""
    rows = [
        headline,
        *([("test loss", number(report["test/loss"]))] if "test/loss" in report else []),
        ("speed", speed(report)),
        ("time", f"{report['wall_s']:.1f} s, {report['train/steps']:,} steps" + compiling),
        ("peak memory", f"{size(report['peak_memory_bytes'])} per process"),
        ("checkpoint", str(folder / report["checkpoint"]) if report["checkpoint"] else "none"),
        ("report", str(folder / "report.html")),
    ]
    sync = wandb_sync_line(folder)
    figures_table(str(run), rows)
    say(f"evaluate it: {command('eval')} run={run}" + (f" runs_dir={where}" if where != "runs" else ""))
    if sync:
        say(f"upload it to W&B: {sync}")


def plain_headline(report: dict[str, Any]) -> tuple[str, str]:
    """The headline without a task or without a test: the first test figure, else the monitored one."""
    names = [*evaluated(report), *(name for name in report if name == report.get("monitor"))]
    found = next(((name, report[name]) for name in names), ("test", "nothing was logged"))
    return found[0], found[1] if isinstance(found[1], str) else f"{found[1]:.4f}"


def show_evaluation(cfg: DictConfig, world: World, figures: dict[str, Any]) -> None:
    """Prints the figures and writes them to eval.json in the run's directory."""
    from lockstep.reporting.console import figures_table, number

    report = {
        "run": cfg.run,
        "checkpoint": cfg.init_from,
        "strategy": cfg.strategy.name,
        "world_size": world.size,
        **figures,
    }
    write_json(evaluation_file(cfg), report)
    figures_table(
        str(cfg.init_from), [(name, f"{v:.8f}" if isinstance(v, float) else number(v)) for name, v in figures.items()]
    )
