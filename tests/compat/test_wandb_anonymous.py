"""Lightning still passes `anonymous`, wandb still complains about it, and the patch removes it."""

import wandb
from lightning.pytorch.loggers import WandbLogger

from lockstep.compat.wandb_anonymous import without_anonymous


def test_wandb_warns_about_what_lightning_passes(tmp_path, monkeypatch):
    """When this fails, remove compat/wandb_anonymous.py."""
    warnings: list[str] = []
    monkeypatch.setattr(wandb, "termwarn", lambda text, **_: warnings.append(text))
    logger = WandbLogger(save_dir=str(tmp_path), mode="offline")
    wandb.Settings(anonymous=logger._wandb_init["anonymous"])
    assert "anonymous setting has no effect" in warnings[0]
    without_anonymous(logger)
    assert "anonymous" not in logger._wandb_init
    without_anonymous(logger)  # as with a Lightning that passes none
