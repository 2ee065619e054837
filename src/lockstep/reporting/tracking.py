"""What a run hands its loggers. metrics.csv gets the figures alone.

A logger is any class of Lightning's. Besides Lightning's methods, of which `log_hyperparams` gets the config and `log_metrics` the
figures at a step, it may have these:

    log_pictures(name, pictures, step)   a panel of the report as images, each with its caption
    log_checkpoint(path, name)           the checkpoint that was tested, a file or a folder
    end(status, error, step)             done, failed, preempted, interrupted or pruned

They are called on rank 0, in the logger's own thread (background.py).
"""

import logging
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from lockstep.config.compose import dotted

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import Logger

    from lockstep.tasks.panel import Content

FACTS = ("task", "model", "world_size", "accelerator", "nodes", "host", "data/name", "data/sha256", "git_sha", "versions")  # fmt: skip
UPLOAD_S = 600.0  # how long a run waits for the upload of its checkpoint
log = logging.getLogger("lockstep")


class Tracking:
    """The loggers of a run, from its begin to its end."""

    def __init__(self) -> None:
        self.begun: list[Logger] = []

    def begin(self, trainer: "pl.Trainer", cfg: DictConfig, report: Mapping[str, Any]) -> None:
        """Connects each logger, which may raise UserError, and hands it the config and what is known of the run."""
        config: Any = OmegaConf.to_container(cfg, resolve=True)
        facts = {name: report.get(name) for name in FACTS}
        for logger in trainer.loggers:
            _ = getattr(logger, "experiment", None)  # connects
            self.begun.append(logger)
            if hasattr(logger, "background"):  # not metrics.csv
                logger.log_hyperparams({**config, "facts": facts})
                if report["batch_size"]:
                    count_samples(logger, trainer, f"train/{report['unit']}_seen", report["batch_size"])

    def end(self, report: Mapping[str, Any], panels: "Sequence[Content]", folder: Path) -> None:
        """Hands over the panels and the checkpoint of a run that is done, and the status of any; waits for the loggers."""
        from lockstep.reporting import background, wandb_logger

        status, step = report["status"], int(report.get("train/steps", 0))
        done = status == "done"
        checkpoint = folder / report["checkpoint"] if done and report.get("checkpoint") else None
        takes = done and any(hasattr(logger, "log_pictures") for logger in self.begun)
        pictures = drawn(panels) if takes else {}  # matplotlib takes a second, which a run that is ended may not have
        for logger in self.begun:
            for name, images in pictures.items():
                optional(logger, "log_pictures")(name, images, step)
            if checkpoint:
                optional(logger, "log_checkpoint")(checkpoint, str(report["run"]))
            optional(logger, "end")(status, report.get("error"), step)
            logger.finalize("success" if done else "failed")  # again, for the test figures
            uploads = checkpoint is not None and getattr(logger, "log_model", False)
            if thread := getattr(logger, "background", None):
                thread.finish(UPLOAD_S if uploads else background.LATE_S if done else background.SHORT_S)
            wandb_logger.finish(logger, status)
        self.begun = []


def optional(logger: "Logger", method: str) -> Any:
    return getattr(logger, method, lambda *_: None)


def count_samples(logger: "Logger", trainer: "pl.Trainer", figure: str, batch: int) -> None:
    """Adds the number of samples that the optimizer has seen to every row, as a second axis."""
    from lockstep.training.steps import steps_done

    def with_samples(write: Any, metrics: Mapping[str, float], step: int | None = None) -> None:
        write({figure: steps_done(trainer) * batch, **metrics}, step)

    logger.log_metrics = partial(with_samples, logger.log_metrics)  # type: ignore[method-assign]


def drawn(panels: "Sequence[Content]") -> dict[str, list[Any]]:
    """Images and captions of each panel that can be drawn, by its name."""
    from lockstep.reporting.panels import images_of_panel as images_of

    found: dict[str, list[Any]] = {}
    for panel in panels:
        try:
            images = images_of(panel)
        except Exception as e:  # a decoration, which must not cost the run's end
            log.warning("loggers get no picture of %s: %s: %s", panel.title, type(e).__name__, e)
        else:
            name = re.sub(r"\W+", "_", panel.title.lower()).strip("_")
            found |= {f"panels/{name}": images} if images else {}
    return found


def flat(config: dict[Any, Any]) -> dict[str, Any]:
    """Keys as they are typed, `optim.lr`; values that are no number, flag or text become one."""
    values = dotted(config).items()
    return {key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in values}
