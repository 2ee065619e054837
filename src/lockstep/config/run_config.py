"""What a run decides once, before any process starts: its name and folder, what `auto` means here, its batches and its length. Free of torch.

A resumed run and its evaluation compute as the run began. Processes that decide separately, such as torchrun's, must agree
(callbacks/summary.py).
"""

import math
import os
import re
import secrets
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf, open_dict

from lockstep import ROOT, WHEEL
from lockstep.config import project
from lockstep.config.instantiate import has_own_loaders, operations, to_plain
from lockstep.errors import UserError
from lockstep.machine.world import (
    VOLTA,
    World,
    accelerator_of,
    capabilities,
    cores,
    memory_bytes,
    multiplies_bf16,
    spec_of,
)
from lockstep.run.report import provenance

if TYPE_CHECKING:
    from lockstep.data.dataset import DataSet

# --- The name and the folder of a run ---

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
            raise UserError("torchrun without --rdzv-id or --standalone has no id to name the run. Set run=<name>.")
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


def first_report(cfg: DictConfig, world: World) -> dict[str, Any]:
    """What report.json says from a run's first second."""
    return {
        "run": cfg.run,
        "task": title(cfg.task),
        "model": model_title(cfg),
        "strategy": cfg.strategy.name,
        "world_size": world.size,
        "accelerator": world.accelerator,
        "devices": world.devices,
        "nodes": world.nodes,
        "precision": str(cfg.trainer.precision),
        **batches(cfg, world),
        "seed": cfg.seed,
        "monitor": cfg.checkpoint.monitor,
        "monitor_mode": cfg.checkpoint.mode,
        "data/name": title(cfg.data),
        "resumed_from": cfg.resume,
        "restarts": 0,
        **provenance(project.current().root or (None if WHEEL else ROOT)),
    }


# --- How a global batch is divided into micro-batches, and the length of a run ---


@dataclass(frozen=True)
class StepPlan:
    """How each step's global batch is divided, and how many steps a run has. Infinite without a limit."""

    batch_size: int  # global; 0 with dataloaders of your own
    repeats: int
    accumulate: int  # `trainer.accumulate_grad_batches`; 1 for `auto`, which starts with it
    logical_ranks: int | None  # exact.logical_ranks, which divide the batch instead
    max_epochs: int | None
    max_steps: int
    limit_train_batches: int | float | None

    def micro_batches(self, processes: int) -> int:
        """Of each step, in each process."""
        return self.logical_ranks // processes if self.logical_ranks else self.accumulate

    def parts(self, processes: int) -> tuple[int, str, str]:
        """How many parts a global batch has, their description, and the keys that change their number."""
        if self.logical_ranks:
            return (
                self.logical_ranks,
                f"{self.logical_ranks} logical ranks (exact.logical_ranks)",
                "exact.logical_ranks",
            )
        keys = "trainer.devices or trainer.accumulate_grad_batches"
        return processes * self.accumulate, f"{processes} processes x {self.accumulate} accumulated micro-batches", keys

    @property
    def epochs(self) -> float:
        if self.max_epochs is None:
            return 1 if self.max_steps == -1 else math.inf
        return math.inf if self.max_epochs == -1 else self.max_epochs

    def epoch(self, samples: int) -> int:
        """The micro-batches of an epoch of so many training samples."""
        limit, batches = self.limit_train_batches, samples // (self.batch_size // self.repeats) * self.accumulate
        if limit is None:
            return batches
        return min(batches, limit) if isinstance(limit, int) else int(batches * limit)

    def steps(self, samples: int) -> float:
        """The optimizer steps of a run."""
        total = self.epochs * (self.epoch(samples) // self.accumulate)
        return min(total, self.max_steps) if self.max_steps != -1 else total


def step_plan(cfg: DictConfig) -> StepPlan:
    data, trainer = cfg.data, cfg.trainer
    return StepPlan(
        batch_size=data.get("batch_size", 0),
        repeats=data.get("repeats", 1),
        accumulate=1 if trainer.accumulate_grad_batches == "auto" else trainer.accumulate_grad_batches,
        logical_ranks=cfg.exact.logical_ranks,
        max_epochs=trainer.max_epochs,
        max_steps=trainer.max_steps,
        limit_train_batches=trainer.limit_train_batches,
    )


def unit(cfg: DictConfig, *, shipped_only: bool = False) -> tuple[int, str]:
    """A micro-batch has a multiple of so many samples, and why: copies and partners are made within it."""
    repeats = int(cfg.data.get("repeats", 1))
    pairs = [name for name, operation in operations(cfg, shipped_only=shipped_only).items() if operation.mixes]
    copies = [f"data.repeats={repeats} copies each sample"] if repeats > 1 else []
    reasons = [*copies, *(f"augment.{name} mixes pairs" for name in pairs)]
    return repeats * (2 if pairs else 1), " and ".join(reasons)


def accumulations(batch: int, world: int, unit: int = 1) -> list[int]:
    """The possible numbers of micro-batches per process and step, smallest first. Each has a multiple of `unit` samples."""
    return [count for count in range(1, batch // world + 1) if batch % (world * count * unit) == 0]


def batches(cfg: DictConfig, world: World) -> dict[str, Any]:
    """For the report: the global batch and how it is divided; None for the user's own dataloaders."""
    plan, own = step_plan(cfg), has_own_loaders(cfg)
    accumulate = plan.micro_batches(world.size)
    return {
        "batch_size": None if own else plan.batch_size,
        "accumulate_grad_batches": accumulate,
        "micro_batch": None if own else plan.batch_size // (world.size * accumulate),  # per process
    }


# --- What `auto` is for this run and machine ---

MOST_WORKERS = 8  # per process
ROWS, SPARSEST = 20, 50  # of the log: at least so many a run, and at least one in so many steps


def precision(accelerator: str, possible: Sequence[str] | None) -> str:
    """The fastest mixed precision that the hardware has units for. `possible` under the strategy; None: all."""
    if multiplies_bf16(accelerator):
        return "bf16-mixed"
    has_fp16 = accelerator == "cuda" and min(capabilities(), default=0) >= VOLTA
    return "16-mixed" if has_fp16 and "16-mixed" in (possible or ["16-mixed"]) else "32-true"


def workers(bytes_in_memory: int | None, world: World) -> int:
    """0 if the data fits into memory; otherwise this process's cores minus the one that trains."""
    if bytes_in_memory is not None and bytes_in_memory < memory_bytes() / 2:
        return 0
    return max(1, min(MOST_WORKERS, cores() // (world.size // world.nodes) - 1))


def log_interval(steps: float) -> int:
    """The optimizer steps from one row of the log to the next, in a run of so many; `steps` may be infinite."""
    return int(min(SPARSEST, max(1.0, steps / ROWS)))


def decided(cfg: DictConfig, world: World, data: "DataSet | None", samples: int | None = None) -> DictConfig:
    """`cfg` with a value for each `auto` that depends on the machine or on the number of training samples.

    `data` is None for a LightningDataModule, which knows its length only when it trains (callbacks/custom_module.py).
    """
    cfg = cfg.copy()
    with open_dict(cfg):
        if cfg.trainer.precision == "auto":
            cfg.trainer.precision = precision(world.accelerator, spec_of(cfg.strategy).precisions)
        if cfg.trainer.log_every_n_steps == "auto" and samples is not None:
            cfg.trainer.log_every_n_steps = log_interval(step_plan(cfg).steps(samples))
        if data is not None and cfg.data.get("num_workers") == "auto":
            on_device = cfg.data.get("on_device") is True
            cfg.data.num_workers = 0 if on_device else workers(data.bytes_in_memory, world)
    return cfg


def why_not_fused(cfg: DictConfig) -> str | None:
    """Why the optimizer cannot be fused: the second half of a sentence that starts with `optim.fused=true`."""
    exact, is_sharded = cfg.exact.logical_ranks, spec_of(cfg.strategy).is_sharded
    if exact and accelerator_of(str(cfg.trainer.accelerator)) == "cpu":
        return None  # training/arithmetic.py
    if exact and is_sharded:
        return f"was not tried on shards of GPUs, so exact.logical_ranks={exact} is not possible"
    if not str(cfg.optim.get("_target_")).endswith("SGD"):
        return None
    if is_sharded:
        return f"has no kernel for SGD on the shards of strategy={cfg.strategy.name} (torch 2.13)"
    if any(node.get("unfreeze") for node in cfg.callbacks.values()):
        return "has no kernel for SGD where some parameters have no momentum yet, as with callbacks.freeze.unfreeze (torch 2.13)"
    return None


def optimizer_node(cfg: DictConfig) -> dict[str, Any]:
    """The `optim` node, with `fused: auto` decided for the strategy of this process."""
    node = to_plain(cfg.optim)
    if node.get("fused") != "auto":
        return node
    # with exact.logical_ranks all strategies compute as shards do
    unknown = cfg.exact.logical_ranks and accelerator_of(str(cfg.trainer.accelerator)) != "cpu"
    return {**node, "fused": why_not_fused(cfg) is None and not unknown}
