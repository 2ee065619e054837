"""What a run is called and where it lives: decided once, before any process starts."""

import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from lockstep.errors import UserError

SWEEP = "LOCKSTEP_SWEEP"


def stamp() -> str:
    """A time to read and four random digits: two runs of one second differ."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def sweep_name(run: str | None) -> str:
    """The directory of a multirun. Kept in the environment, where the sweep's other processes find it."""
    return os.environ.setdefault(SWEEP, run or f"sweep-{stamp()}")


def run_name(cfg: DictConfig, env: Mapping[str, str] = os.environ) -> str:
    """`run`, or a new name; under torchrun and SLURM the job's id, so that all ranks agree without talking."""
    if cfg.run is not None:
        return str(cfg.run)
    model_data = f"{str(cfg.model.name).replace('/', '-')}-{cfg.data.name}"
    if "TORCHELASTIC_RUN_ID" in env:
        if env["TORCHELASTIC_RUN_ID"] == "none":
            raise UserError("torchrun without --rdzv-id or --standalone has no id to name the run. Type run=<name>.")
        return f"{model_data}-{env['TORCHELASTIC_RUN_ID']}"
    if "SLURM_PROCID" in env and "SLURM_JOB_ID" in env:
        return f"{model_data}-{env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID', '0')}"
    return f"{model_data}-{stamp()}"


def run_dir(cfg: DictConfig) -> Path:
    return Path(cfg.runs_dir) / str(cfg.run)


def identify(cfg: DictConfig, data_source: str) -> DictConfig:
    """The config with all that a run decides once: its name, its seed, its data, its W&B id."""
    cfg = cfg.copy()
    OmegaConf.set_struct(cfg, False)
    cfg.run = run_name(cfg)
    cfg.data.source = data_source
    if cfg.seed is None:
        cfg.seed = secrets.randbelow(2**31)
    if "wandb" in cfg.logger and cfg.logger.wandb.get("id") is None:
        cfg.logger.wandb.id = secrets.token_hex(4)
    if cfg.trainer.max_epochs is None and cfg.trainer.max_steps == -1:
        cfg.trainer.max_epochs = 1
    return cfg
