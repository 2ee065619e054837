"""A finished run that is typed again, with nothing left to train."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lockstep.checkpoints.finding import checkpoints, step_of
from lockstep.checkpoints.resuming import MACHINE
from lockstep.config.batches import accumulated
from lockstep.config.keys import dotted
from lockstep.config.length import batches_of, epochs_of
from lockstep.config.run_files import load_config, read_report

PLACE = ("run", "runs_dir", "resume", "init_from", *MACHINE)  # keys that change nothing of the training


def training(cfg: DictConfig) -> dict[str, Any]:
    values = dotted(OmegaConf.to_container(cfg, resolve=True))
    return {key: value for key, value in values.items() if not key.startswith(PLACE)}


def longer(cfg: DictConfig, steps: int, per_epoch: int | None) -> Iterator[str]:
    """The keys that end the run after `steps` steps, each with a larger value."""
    epochs = epochs_of(cfg)
    if epochs * (per_epoch or 0) <= steps:
        yield f"trainer.max_epochs={steps // per_epoch + 1 if per_epoch else int(epochs) + 1}"
    if 0 < cfg.trainer.max_steps <= steps:
        yield f"trainer.max_steps={2 * steps}"


def already_finished(cfg: DictConfig, samples: int | None) -> str | None:
    """What to tell if the run of the checkpoint `cfg.resume` is done and `cfg` trains no further; None if it does.

    `samples` are those of an epoch; None where nobody knows. Early stopping and max_time may end a run before its last step, so a
    config that trains alike has nothing left either.
    """
    if not cfg.resume:
        return None
    folder = Path(cfg.resume).resolve().parents[1]
    report, newest = read_report(folder), next(checkpoints(folder), None)
    ended = report.get("status") == "done" and (folder / "report.html").is_file()  # which is written last
    if not ended or newest is None or step_of(Path(cfg.resume)) < step_of(newest):
        return None
    steps = int(report["train/steps"])
    per_epoch = batches_of(cfg, samples) // accumulated(cfg) if samples else None
    limits = list(longer(cfg, steps, per_epoch))
    reached = limits if per_epoch else []
    if not reached and training(cfg) != training(load_config(folder / "config.yaml")):
        return None
    early = ["trainer.max_time=<longer>"] if cfg.trainer.max_time else []
    early += [f"callbacks.{name}.patience=<more>" for name, node in cfg.callbacks.items() if "patience" in node]
    keys = " ".join(reached or early or limits)
    return (
        f"{report['run']} is already finished: {steps:,}{f' of {steps:,}' if reached else ''} steps"
        f"{f'; set {keys} to continue' if keys else ''}. Nothing was changed."
    )
