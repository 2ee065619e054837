"""Variables of the environment whose values a library would refuse late, with a traceback. Free of torch."""

import os
from collections.abc import Iterator

from omegaconf import DictConfig

from lockstep.config.words import nearest

WANDB = "lockstep.reporting.loggers.wandb"
WANDB_MODES = ["online", "offline", "disabled", "dryrun", "run", "shared"]  # of its client


def environment_problems(cfg: DictConfig, _: object) -> Iterator[str]:
    mode = os.environ.get("WANDB_MODE", "offline")
    used = any(node.get("_target_") == WANDB and node.get("mode") == "auto" for node in cfg.logger.values())
    if used and mode not in WANDB_MODES:
        yield (
            f"WANDB_MODE={mode} in the environment is not possible; it takes one of {', '.join(WANDB_MODES)}{nearest(mode, WANDB_MODES)}. "
            "Type logger.wandb.mode=offline, or env -u WANDB_MODE python train.py ..."
        )
