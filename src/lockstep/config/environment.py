"""What loggers need: packages, checkpoints to upload, and variables whose values a library would refuse late. Free of torch."""

import importlib.util
import os
from collections.abc import Iterator

from omegaconf import DictConfig

from lockstep.config.words import nearest

WANDB = "lockstep.reporting.loggers.wandb"
WANDB_MODES = ["online", "offline", "disabled", "dryrun", "run", "shared"]  # of its client
# Each with the module that it imports, which is also the name of the extra, and the package to install.
OPTIONAL = {"lockstep.reporting.mlflow_logger.mlflow": ("mlflow", "mlflow-skinny")}


def environment_problems(cfg: DictConfig, _: object) -> Iterator[str]:
    mode = os.environ.get("WANDB_MODE", "offline")
    used = any(node.get("_target_") == WANDB and node.get("mode") == "auto" for node in cfg.logger.values())
    if used and mode not in WANDB_MODES:
        yield (
            f"WANDB_MODE={mode} in the environment is not possible; it takes one of {', '.join(WANDB_MODES)}{nearest(mode, WANDB_MODES)}. "
            "Type logger.wandb.mode=offline, or unset WANDB_MODE."
        )
    for name, node in cfg.logger.items():
        module, package = OPTIONAL.get(str(node.get("_target_")), ("os", ""))
        if node.get("log_model") and not cfg.trainer.enable_checkpointing:
            yield f"logger.{name}.log_model has no effect with trainer.enable_checkpointing=false. Leave one of them out."
        if not installed(module):
            yield (
                f"logger={name} needs the package {package}, which is not installed. Type uv sync --extra {module}, or "
                f"pip install {package}."
            )


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
