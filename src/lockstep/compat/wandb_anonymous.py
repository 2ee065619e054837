"""Silences a warning about W&B's setting `anonymous`, which is not set.

Lightning 2.6.6 passes anonymous=None to wandb.init, and wandb 0.31 prints a warning about any value of it. Remove this file when
either stops: tests/compat/test_wandb_anonymous.py fails then.
"""

from lightning.pytorch.loggers import WandbLogger


def without_anonymous(logger: WandbLogger) -> None:
    logger._wandb_init.pop("anonymous", None)
