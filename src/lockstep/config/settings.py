"""The settings of a run: its config and what follows from it, decided before any process starts. Free of torch.

A resumed run and its evaluation compute as the run began. Processes that decide separately, such as torchrun's, must agree
(callbacks/summary.py).
"""

import math
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf, open_dict

from lockstep.config.instantiate import ENGINE_DATA, is_a, operations, pretraining, to_plain
from lockstep.config.schema import is_shipped
from lockstep.config.words import plain, shown
from lockstep.errors import UserError
from lockstep.machine.world import (
    SLURM,
    TORCHRUN,
    VOLTA,
    StrategySpec,
    World,
    accelerator_of,
    capabilities,
    cores,
    device_count,
    external_launcher,
    memory_bytes,
    multiplies_bf16,
    number,
    rank_of,
    spec_of,
)
from lockstep.run import RunFolder

if TYPE_CHECKING:
    from lockstep.data.dataset import DataSet

# --- The name of a run, a sweep or a node ---

SWEEP = "LOCKSTEP_SWEEP"
# Keys of `data` that may be `model`: as in pretraining.
OF_NETWORK = ("mean", "std", "resize", "crop_pct", "interpolation")


def stamp() -> str:
    """A timestamp and four random hex digits, so runs started in the same second get different names."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def sweep_name(run: object, env: MutableMapping[str, str] = os.environ) -> str:
    """The directory of a multirun. Kept in the environment for the sweep's other processes."""
    srun = env.get("SLURM_JOB_ID") if "SLURM_STEP_ID" in env else None
    ours = env.get("TORCHELASTIC_RUN_ID") or srun  # there, every process runs Hydra itself
    return env.setdefault(SWEEP, str(run or f"sweep-{ours or stamp()}"))


def restarted(env: Mapping[str, str] = os.environ) -> bool:
    """Whether SLURM requeued this job, or torchrun restarted its workers after a failure."""
    return any(int(env.get(name, "0")) > 0 for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"))


def title(node: DictConfig) -> str:
    """The display name of a node: its `name`, or its class name in the same form."""
    target = str(node.get("_target_") or "none").rpartition(".")[2]
    return str(node.get("name") or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", target).lower())


def model_title(cfg: DictConfig) -> str:
    """The display name of the model, or of a task that makes its own network."""
    return title(cfg.model if cfg.model else cfg.task)


def model_and_data(cfg: DictConfig) -> str:
    """What the name of a run begins with."""
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
        """Of each step, in all processes."""
        return self.logical_ranks or processes * self.accumulate

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


def accumulations(batch: int, world: int, unit: int = 1) -> list[int]:
    """The possible numbers of micro-batches per process and step, smallest first. Each has a multiple of `unit` samples."""
    return [count for count in range(1, batch // world + 1) if batch % (world * count * unit) == 0]


# --- What `auto` is for this run and machine ---

MOST_WORKERS = 8  # per process
SGD = ("torch.optim.SGD", "torch.optim.sgd.SGD")  # torch's own, which a check need not import; subclasses are asked
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


# --- The settings ---


@dataclass(frozen=True)
class Settings:
    """The config of a run, its processes, and what follows from both. Nobody changes `cfg`: a changed copy goes into `but`."""

    cfg: DictConfig
    world: World
    imported: bool = True  # whether the user's classes may be imported; until then rules are about Lockstep's own

    @classmethod
    def of(cls, cfg: DictConfig, env: Mapping[str, str] = os.environ, *, imported: bool = True) -> "Settings":
        """With the processes that the config asks for; under torchrun and SLURM, those that they started."""
        spec, trainer = spec_of(cfg.strategy), cfg.trainer
        accelerator = accelerator_of(str(trainer.accelerator))
        devices = device_count(trainer.devices, accelerator, one_device=spec.one_process and not spec.splits_batches)
        nodes, external, rank = int(trainer.num_nodes), external_launcher(env), rank_of(env)
        if external == TORCHRUN:
            devices, nodes = int(env["LOCAL_WORLD_SIZE"]), int(env["WORLD_SIZE"]) // int(env["LOCAL_WORLD_SIZE"])
        elif external == SLURM:
            nodes = number(env, "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
            devices = int(env["SLURM_NTASKS"]) // nodes
        else:
            rank = int(env.get("NODE_RANK", "0")) * devices
        world = World(accelerator, devices, nodes, str(cfg.strategy.name), rank, external, spec.one_process)
        return cls(cfg, world, imported)

    def but(self, cfg: DictConfig) -> "Settings":
        return replace(self, cfg=cfg)

    # --- The names of its parts ---

    def title(self, group: str) -> str:
        return title(self.cfg[group])

    @property
    def model_title(self) -> str:
        return model_title(self.cfg)

    @property
    def folder(self) -> RunFolder:
        return folder_of(self.cfg)

    def evaluation_file(self, job: str = "eval") -> Path:
        """Where eval.py and predict.py write: the run's <job>.json, or a file beside a checkpoint that is not in a run directory."""
        folder = self.folder.path
        return folder / f"{job}.json" if folder.is_dir() else Path(self.cfg.init_from).with_suffix(f".{job}.json")

    # --- Its classes ---

    @cached_property
    def spec(self) -> StrategySpec:
        return spec_of(self.cfg.strategy)

    def plain(self, group: str) -> dict[str, Any]:
        """The node of a group as plain values."""
        return to_plain(self.cfg[group])

    def knows(self, group: str) -> bool:
        """Whether the class of a group may be looked at."""
        return self.imported or is_shipped(self.cfg[group])

    @cached_property
    def own_loaders(self) -> bool:
        """Whether `data` is a LightningDataModule, which has its own dataloaders."""
        return self.imported and is_a(self.cfg.data, "data", "lightning.pytorch.core.datamodule.LightningDataModule")

    @cached_property
    def loader(self) -> dict[str, Any]:
        """The keys of `data` by which Lockstep makes batches: none if the data has its own dataloaders, or its class is not known yet."""
        unknown = not self.knows("data") or self.own_loaders
        return {} if unknown else {key: self.cfg.data[key] for key in ENGINE_DATA if key in self.cfg.data}

    @cached_property
    def custom_module(self) -> bool:
        """Whether the task is the user's LightningModule: task=lightning_module says so; of another task, its class."""
        task, (base, ours) = (
            self.cfg.task,
            ("lightning.pytorch.core.module.LightningModule", "lockstep.training.task.Task"),
        )
        if "replaces" in task:
            return not (self.imported and is_a(task, "task", ours, base))
        return self.imported and is_a(task, "task", base, ours)

    @cached_property
    def operations(self) -> dict[str, Any]:
        """The operations of `augment` by name. Raises UserError: all that is wrong with their arguments."""
        nodes, image_size = self.cfg.get("augment") or {}, self.cfg.data.get("image_size")
        return operations({k: v for k, v in nodes.items() if self.imported or is_shipped(v)}, image_size)

    @property
    def evaluates(self) -> bool:
        """Whether nothing trains."""
        return bool(self.cfg.trainer.limit_train_batches == 0)

    @property
    def transforms(self) -> list[str]:
        """Those that run where samples are read: transforms of libraries, and operations that say so."""
        return [name for name, operation in self.operations.items() if getattr(operation, "at_reading", True)]

    # --- Its batches and steps ---

    @cached_property
    def steps(self) -> StepPlan:
        data, trainer = self.cfg.data, self.cfg.trainer
        return StepPlan(
            batch_size=data.get("batch_size", 0),
            repeats=data.get("repeats", 1),
            accumulate=1 if trainer.accumulate_grad_batches == "auto" else trainer.accumulate_grad_batches,
            logical_ranks=self.cfg.exact.logical_ranks,
            max_epochs=trainer.max_epochs,
            max_steps=trainer.max_steps,
            limit_train_batches=trainer.limit_train_batches,
        )

    @property
    def unit(self) -> tuple[int, str]:
        """A micro-batch has a multiple of so many samples, and why: copies and partners are made within it."""
        repeats = int(self.cfg.data.get("repeats", 1))
        pairs = [name for name, operation in self.operations.items() if getattr(operation, "mixes", False)]
        copies = [f"data.repeats={repeats} copies each sample"] if repeats > 1 else []
        reasons = [*copies, *(f"augment.{name} mixes pairs" for name in pairs)]
        return repeats * (2 if pairs else 1), " and ".join(reasons)

    @property
    def accumulations(self) -> list[int]:
        """The possible values of trainer.accumulate_grad_batches, smallest first."""
        return accumulations(self.cfg.data.batch_size, self.world.size, self.unit[0])

    @property
    def batches(self) -> dict[str, Any]:
        """For the report: the global batch and how it is divided; None for the user's own dataloaders."""
        accumulate, batch = self.steps.micro_batches(self.world.size) // self.world.size, self.loader.get("batch_size")
        return {
            "batch_size": batch,
            "accumulate_grad_batches": accumulate,
            "micro_batch": batch and batch // (self.world.size * accumulate),  # per process
        }

    # --- Its optimizer ---

    @property
    def why_not_fused(self) -> str | None:
        """Why the optimizer cannot be fused: the second half of a sentence that starts with `optim.fused=true`."""
        cfg, exact, is_sharded = self.cfg, self.steps.logical_ranks, self.spec.is_sharded
        if exact and accelerator_of(str(cfg.trainer.accelerator)) == "cpu":
            return None  # training/arithmetic.py
        if exact and is_sharded:
            return f"was not tried on shards of GPUs, so exact.logical_ranks={exact} is not possible"
        if cfg.optim.get("_target_") not in SGD and not (self.imported and is_a(cfg.optim, "optim", SGD[1])):
            return None
        if is_sharded:
            return f"has no kernel for SGD on the shards of strategy={cfg.strategy.name} (torch 2.13)"
        if cfg.optim.get("dampening"):
            return (
                "has no kernel for SGD with dampening that lets parameters get their first gradient later (torch 2.13)"
            )
        return None

    @property
    def optimizer_node(self) -> dict[str, Any]:
        """The `optim` node, with `fused: auto` decided for the strategy of this process."""
        node = self.plain("optim")
        if node.get("fused") != "auto":
            return node
        # with exact.logical_ranks all strategies compute as shards do
        unknown = self.steps.logical_ranks and accelerator_of(str(self.cfg.trainer.accelerator)) != "cpu"
        return {**node, "fused": self.why_not_fused is None and not unknown}

    # --- Messages about its keys ---

    def given(self, key: str) -> str:
        """A key and its value, as messages show them."""
        return f"{key}={shown(plain(OmegaConf.select(self.cfg, key)))}"

    def excluded(self, table: Mapping[str, tuple[Any, str]]) -> Iterator[str]:
        """Keys of a table that differ from their usual value, with why they must not."""
        for key, (usual, why) in table.items():
            if OmegaConf.select(self.cfg, key, default=usual) not in (usual, None):
                yield f"{self.given(key)} {why.format(exact=self.given('exact.logical_ranks'))}."

    # --- What a run decides once ---

    def decided(self, data: "DataSet | None", samples: int | None = None) -> "Settings":
        """With a value for each `auto` that depends on the machine or on the number of training samples.

        `data` is None for a LightningDataModule, which knows its length only when it trains (callbacks/module_hooks.py).
        """
        cfg = self.cfg.copy()
        with open_dict(cfg):
            if cfg.trainer.precision == "auto":
                best = precision(self.world.accelerator, self.spec.precisions)
                cfg.trainer.precision = "32-true" if self.custom_module else best  # Lightning's default
            if cfg.trainer.log_every_n_steps == "auto" and samples is not None:
                cfg.trainer.log_every_n_steps = log_interval(self.steps.steps(samples))
            if data is not None and cfg.data.get("num_workers") == "auto":
                on_device = cfg.data.get("on_device") is True
                in_memory = None if self.transforms else data.evaluated.bytes_in_memory
                cfg.data.num_workers = 0 if on_device else workers(in_memory, self.world)
        return self.but(cfg)

    def identified(self, data_source: str | None, experiment: str | None = None) -> "Settings":
        """With a name, a seed, the source of the data, and the loggers' ids; the experiment among their tags."""
        cfg = self.cfg.copy()
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
        return self.but(cfg)

    def with_numbers(self) -> "Settings":
        """With values in place of `model` in `data`, so a newer timm cannot change a resumed run."""
        cfg = self.cfg.copy()
        if wanted := [key for key in OF_NETWORK if cfg.data.get(key) == "model"]:
            values = pretraining(cfg.model, self.plain("data"))
            cfg.data.update({key: values[key] for key in wanted})
        return self.but(cfg)


def folder_of(cfg: DictConfig) -> RunFolder:
    return RunFolder(Path(cfg.runs_dir) / str(cfg.run))
