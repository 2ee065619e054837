"""A run's name and directory: decided once, before any process starts."""

import os
import re
import secrets
import time
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from lockstep.errors import UserError

SWEEP = "LOCKSTEP_SWEEP"


def stamp() -> str:
    """A timestamp and four random hex digits, so runs started in the same second get different names."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def sweep_name(run: object, env: MutableMapping[str, str] = os.environ) -> str:
    """The directory of a multirun. Kept in the environment for the sweep's other processes."""
    srun = env.get("SLURM_JOB_ID") if "SLURM_STEP_ID" in env else None
    ours = env.get("TORCHELASTIC_RUN_ID") or srun  # there, every process runs Hydra itself
    return env.setdefault(SWEEP, str(run or f"sweep-{ours or stamp()}"))


def title(node: DictConfig) -> str:
    """The display name of a node: its `name`, or its class name in the same form."""
    target = str(node.get("_target_") or "none").rpartition(".")[2]
    return str(node.get("name") or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", target).lower())


def model_title(cfg: DictConfig) -> str:
    """The display name of the model, or of a task that makes its own network."""
    return title(cfg.model if cfg.model else cfg.task)


def model_and_data(cfg: DictConfig) -> str:
    return f"{model_title(cfg).replace('/', '-')}-{title(cfg.data)}"


def name_of_job(cfg: DictConfig, env: Mapping[str, str] = os.environ) -> str | None:
    """Under torchrun and SLURM, a name with the job's id, so all ranks and restarts agree without communicating."""
    if "TORCHELASTIC_RUN_ID" in env:
        if env["TORCHELASTIC_RUN_ID"] == "none":
            raise UserError("torchrun without --rdzv-id or --standalone has no id to name the run. Type run=<name>.")
        return f"{model_and_data(cfg)}-{env['TORCHELASTIC_RUN_ID']}"
    if "SLURM_PROCID" in env and "SLURM_JOB_ID" in env:
        return f"{model_and_data(cfg)}-{env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID', '0')}"
    return None


def restarted(env: Mapping[str, str] = os.environ) -> bool:
    """Whether SLURM requeued this job, or torchrun restarted its workers after a failure."""
    return any(int(env.get(name, "0")) > 0 for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"))


def run_dir(cfg: DictConfig) -> Path:
    return Path(cfg.runs_dir) / str(cfg.run)


def identify(cfg: DictConfig, data_source: str | None, experiment: str | None = None) -> DictConfig:
    """The config with everything that a run decides once: its name, seed, data, loggers' ids, the experiment among their tags."""
    cfg = cfg.copy()
    OmegaConf.set_struct(cfg, False)
    cfg.run = f"{model_and_data(cfg)}-{stamp()}" if cfg.run is None else cfg.run
    if data_source and cfg.data.get("source") == "auto":
        cfg.data.source = data_source
    if cfg.seed is None:
        cfg.seed = secrets.randbelow(2**31)
    for logger in cfg.logger.values():
        if "id" in logger and logger.id is None:
            logger.id = secrets.token_hex(4)
        if experiment and "auto" in (tags := logger.get("tags") or ()) and experiment not in tags:
            logger.tags = [experiment, *tags]
    if cfg.trainer.max_epochs is None and cfg.trainer.max_steps == -1:
        cfg.trainer.max_epochs = 1
    return cfg


def evaluation_file(cfg: DictConfig, job: str = "eval") -> Path:
    """Where eval.py and predict.py write: the run's <job>.json, or a file beside a checkpoint that is not in a run directory."""
    file = run_dir(cfg) / f"{job}.json"
    return file if file.parent.is_dir() else Path(cfg.init_from).with_suffix(f".{job}.json")
