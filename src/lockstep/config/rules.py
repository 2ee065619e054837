"""Rules between the keys of a config: devices, strategy, batches, length, task, and what `exact.shards` excludes. Free of torch."""

import importlib.util
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from lockstep.config.instantiate import has_own_loaders, operations, uses_custom_module
from lockstep.config.run_config import accumulated, epochs_of, title, unit, why_not_fused
from lockstep.config.schema import is_devices, is_shipped
from lockstep.config.words import plain, shown
from lockstep.errors import did_you_mean
from lockstep.machine.world import StrategySpec, World, available, number, spec_of, why_no_gpu

# Keys that only torch's DistributedDataParallel and all-reduce read, and their usual values.
OF_DDP = {"bucket_cap_mb": 25, "gradient_as_bucket_view": True, "static_graph": False, "find_unused_parameters": False}
COUNTED = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "val_check_interval")  # in batches
TIMM = "lockstep.models.from_timm"
WANDB = "lockstep.reporting.loggers.wandb"
WANDB_MODES = ["online", "offline", "disabled", "dryrun", "run", "shared"]  # of its client
# Each with the module that it imports, which is also the name of the extra, and the package to install.
OPTIONAL = {"lockstep.extras.mlflow_logger.mlflow": ("mlflow", "mlflow-skinny")}


@dataclass(frozen=True)
class Context:
    """What a rule looks at. A rule yields what breaks it, or raises UserError."""

    cfg: DictConfig
    world: World
    imported: bool = False  # whether the classes of the user may be imported; until then rules are about Lockstep's own

    def knows(self, node: DictConfig) -> bool:
        return self.imported or is_shipped(node)

    @property
    def spec(self) -> StrategySpec:
        return spec_of(self.cfg.strategy)

    @property
    def own_loaders(self) -> bool:
        return self.imported and has_own_loaders(self.cfg)

    @property
    def custom_module(self) -> bool:
        return self.imported and uses_custom_module(self.cfg)


# --- The machine, its launcher and the strategy ---


def devices(run: Context) -> Iterator[str]:
    """Whether the machine and its launcher have the devices and processes that a config asks for."""
    cfg, world, splits = run.cfg, run.world, run.spec.splits_batches
    ids = plain(cfg.trainer.devices)
    given, there = shown(ids), available(world.accelerator)
    if world.accelerator == "cuda" and not there:
        yield f"trainer.accelerator={cfg.trainer.accelerator} needs a GPU, but {why_no_gpu() or 'this machine shows none'}. Type trainer.accelerator=cpu."
    elif there is not None and world.devices > there and not world.external:
        yield f"trainer.devices={given} asks for {world.devices} {world.accelerator} devices; this machine has {there}. Type trainer.devices={there}, or trainer.accelerator=cpu."
    if isinstance(ids, list) and is_devices(ids) and world.accelerator == "cpu":
        yield f"trainer.devices={given} names GPUs by their ids, but a CPU has none. Type trainer.devices={world.devices}."
    elif isinstance(ids, list) and is_devices(ids) and there and max(ids) >= there:
        yield f"trainer.devices={given}: this machine has {there} {world.accelerator} devices, 0 to {there - 1}."
    if world.one_process and not splits and world.devices > 1:
        yield f"strategy={world.strategy} uses one device; trainer.devices={given} asks for {world.devices}. Type strategy=ddp, or trainer.devices=1."
    if splits and world.accelerator == "cpu" and world.devices > 1:
        yield f"strategy={world.strategy} splits batches over GPUs, but trainer.devices={given} on a CPU has none. Type strategy=ddp, or trainer.devices=1."
    if world.one_process and world.nodes > 1:
        yield f"strategy={world.strategy} is one process, but trainer.num_nodes={world.nodes} needs several. Type strategy=ddp, or trainer.num_nodes=1."
    if not world.external:
        absent = [name for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK") if name not in os.environ]
        if world.nodes > 1 and not world.one_process and (absent or not cfg.run):
            yield (
                f"trainer.num_nodes={world.nodes} without torchrun or SLURM needs MASTER_ADDR, MASTER_PORT and NODE_RANK in the "
                "environment of each node, and run=<name>. Type torchrun --nnodes=... train.py, or trainer.num_nodes=1."
            )
        if (node := number(os.environ, "NODE_RANK", default=0)) >= max(1, world.nodes):
            yield (
                f"NODE_RANK={node} is in the environment, but trainer.num_nodes={world.nodes} starts with node 0. If it is left over "
                "from another job, type unset NODE_RANK; otherwise trainer.num_nodes=<how many there are>."
            )
        return
    if there is not None and there < world.devices:
        yield f"{world.external} started {world.devices} processes on this node, but this one sees {there} {world.accelerator} devices. Let each process see all of them: --gpus-per-node={world.devices}, not --gpus-per-task."
    if world.one_process and splits and world.devices * world.nodes > 1:
        yield f"strategy={world.strategy} is one process with all GPUs, but {world.external} started {world.devices * world.nodes}. Start one, or type strategy=ddp."
    if cfg.trainer.devices not in ("auto", -1, world.devices):
        yield f"trainer.devices={given} contradicts {world.external}, which started {world.devices} processes on this node. Leave trainer.devices out."
    if cfg.seed is None and cfg.resume is None:
        yield f"seed=null would be drawn separately by each process that {world.external} started. Type seed=<number>."
    if cfg.trainer.num_nodes not in (1, world.nodes):
        yield f"trainer.num_nodes={cfg.trainer.num_nodes} contradicts {world.external}, which started {world.nodes} nodes. Leave trainer.num_nodes out."


def strategy(run: Context) -> Iterator[str]:
    precision, possible, accelerator = str(run.cfg.trainer.precision), run.spec.precisions, run.world.accelerator
    if precision in ("16-mixed", "16-true", "16") and accelerator == "cpu":
        yield f"trainer.precision={precision} is not supported on a CPU. Type trainer.precision=bf16-mixed."
    if possible and precision not in ("auto", "32", *possible):
        yield f"strategy={run.world.strategy} does not support trainer.precision={precision}; it takes one of {', '.join(possible)}. Type trainer.precision=bf16-mixed."
    if accelerator == "mps" and precision in ("64-true", "64"):
        yield "trainer.precision=64-true is not supported on mps. Type trainer.precision=32-true."
    yield from without_effect(run).values()


def without_effect(run: Context) -> dict[str, str]:
    """Keys that do nothing under the strategy or on the device, each with what to say. Flags, or names that null takes away."""
    cfg, accelerator, found = run.cfg, run.world.accelerator, dict[str, str]()
    under = f"has no effect under strategy={run.world.strategy}"
    if cfg.tf32 and accelerator != "cuda":
        found["tf32"] = f"has no effect on {accelerator}: only NVIDIA GPUs have it. Type tf32=false."
    if cfg.trainer.sync_batchnorm and run.spec.splits_batches:
        found["trainer.sync_batchnorm"] = f"{under}: each replica normalises its own part. Type strategy=ddp."
    if cfg.compile and run.spec.splits_batches:
        found["compile"] = f"{under}: all replicas would run on the first device. Type strategy=ddp."
    if cfg.checkpoint.sharded and not run.spec.is_sharded:
        choice = "Type strategy=fsdp, or checkpoint.sharded=false."
        found["checkpoint.sharded"] = f"{under}: nothing is sharded there. {choice}"
    if cfg.strategy.get("comm_hook") and accelerator != "cuda":
        found["strategy.comm_hook"] = "has no effect without GPUs. Type strategy.comm_hook=null."
    return {key: f"{key}={shown(OmegaConf.select(cfg, key))} {why}" for key, why in found.items()}


# --- The same bits on any number of processes (`exact.shards`) ---


def processes(run: Context) -> Iterator[str]:
    """Of training and evaluation: where figures would depend on the processes."""
    cfg, world, exact = run.cfg, run.world, f"exact.shards={run.cfg.exact.shards}"
    if (shards := cfg.exact.shards) is None:
        return
    if shards % world.size:
        yield (
            f"{exact} cannot be divided among {world.size} processes. Start 1, 2, 4 or another power of two up to {shards}. A run keeps its "
            "exact.shards; an evaluation with exact.shards=null has figures that are equal to rounding."
        )
    if not run.spec.adds_in_fixed_order:
        yield f"{exact} needs strategy=single, ddp or fsdp: strategy={title(cfg.strategy)} adds gradients in an order of its own."
    if run.spec.splits_batches:
        yield f"{exact} is not possible with strategy={world.strategy}, which divides batches by the number of GPUs. Type strategy=ddp."
    if world.accelerator == "mps":
        yield f"{exact} needs float64, which mps does not support. Type trainer.accelerator=cpu."
    if world.accelerator == "cuda" and cfg.trainer.deterministic in (False, "warn"):
        yield f"{exact} needs deterministic kernels on GPUs. Leave trainer.deterministic={shown(cfg.trainer.deterministic)} out."
    if world.accelerator == "cuda" and cfg.trainer.benchmark:
        yield f"trainer.benchmark=true chooses kernels by their speed in this run, so {exact} is not possible. Leave trainer.benchmark out."
    if world.accelerator != "cpu" and cfg.exact.threads != 1:
        yield f"exact.threads={cfg.exact.threads} has no effect on {world.accelerator}: it is for CPUs. Leave it out."
    if cfg.compile:
        yield f"compile=true computes differently under each strategy, so {exact} is not possible. Leave one of them out."
    if cfg.tf32:
        yield f"tf32=true computes differently on each kind of GPU, so {exact} is not possible. Leave one of them out."


def exact_training(run: Context) -> Iterator[str]:
    cfg, trainer, strategy = run.cfg, run.cfg.trainer, run.cfg.strategy
    exact = f"exact.shards={cfg.exact.shards}"
    if cfg.exact.shards is None:
        for key, usual in (("threads", 1), ("digests", False)):
            if cfg.exact[key] != usual:
                yield f"exact.{key}={shown(cfg.exact[key])} has no effect without exact.shards. Type exact.shards=8 as well, or leave it out."
        return
    if trainer.accumulate_grad_batches != 1:
        yield (
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches} has no effect with {exact}, which divides the batch. Leave it "
            "out; for smaller micro-batches type a larger exact.shards."
        )
    for key in COUNTED:
        if isinstance(trainer[key], float) and trainer[key] not in (0.0, 1.0):
            yield f"trainer.{key}={trainer[key]} is a share of a process's micro-batches; with {exact} it takes a number of steps. Type trainer.{key}=10."
    if trainer.sync_batchnorm:
        yield f"trainer.sync_batchnorm=true has no place with {exact}: each logical rank normalises its own samples. Leave it out."
    if strategy.get("comm_hook"):
        yield f"strategy.comm_hook={strategy.comm_hook} rounds sums of processes, so {exact} is not possible. Leave one of them out."
    if strategy.get("reduce_each_micro_batch"):
        yield f"strategy.reduce_each_micro_batch=true has no effect with {exact}, which does so anyway. Leave it out."
    for key, usual in OF_DDP.items():
        if strategy.get(key, usual) != usual:
            yield f"strategy.{key}={shown(strategy[key])} has no effect with {exact}, which adds gradients itself. Leave it out."
    if run.spec.is_sharded and trainer.precision in ("bf16-true", "16-true"):
        yield f"trainer.precision={trainer.precision} rounds the last elements of a shard in another way, so {exact} is not possible with strategy={run.world.strategy}. Type trainer.precision=bf16-mixed."


# --- Data, batches and operations ---


def loading(run: Context) -> Iterator[str]:
    data, workers = run.cfg.data, run.cfg.data.get("num_workers")
    if not run.knows(data) or run.own_loaders:
        return
    if data.get("on_device") is True and run.world.accelerator == "cpu":
        yield "data.on_device=true has no effect on a CPU: the samples are in its memory already. Type data.on_device=auto."
    if data.get("on_device") is True and workers not in (0, "auto"):
        yield f"data.on_device=true leaves nothing for data.num_workers={workers} to load. Leave one of them out."
    for key in ("prefetch_factor", "persistent_workers"):
        if data.get(key) is not None and workers in (0, "auto"):
            yield f"data.{key}={shown(data[key])} has no effect without workers. Type data.num_workers=2 as well, or leave it out."


def augmentation(run: Context) -> Iterator[str]:
    if run.own_loaders and (names := [*(run.cfg.get("augment") or ())]):
        yield f"augment.{names[0]} has no effect: {run.cfg.data._target_} makes its own batches. Type augment=none."
    else:
        operations(run.cfg, shipped_only=not run.imported)


def division(run: Context) -> Iterator[str]:
    """The global batch must divide into processes x micro-batches, each with whole pairs and copies; evaluation batches need not."""
    cfg, shards, accumulate = run.cfg, run.cfg.exact.shards, accumulated(run.cfg)
    if not run.knows(cfg.data) or run.own_loaders:
        return
    batch, folds, fold = cfg.data.batch_size, cfg.data.get("folds"), cfg.data.get("fold", 0)
    if folds is None and fold:
        yield f"data.fold={fold} has no effect without data.folds. Type data.folds=5 as well."
    if folds is not None and fold >= folds:
        yield f"data.fold={fold} is not possible with data.folds={folds}; folds are counted from 0 to {folds - 1}."
    whole, why = unit(cfg, shipped_only=not run.imported)
    parts = (shards or run.world.size * accumulate) * whole
    if batch % parts:
        low, high = batch // parts * parts, (batch // parts + 1) * parts
        into = f"{run.world.size} processes x {accumulate} accumulated micro-batches"
        into = f"{shards} logical ranks (exact.shards)" if shards else into
        into += f" of a multiple of {whole} samples ({why} within a micro-batch)" if whole > 1 else ""
        yield (
            f"data.batch_size={batch} is the global batch; it cannot be divided among {into}. "
            f"Type data.batch_size={f'{low} or {high}' if low else high}, or change {'exact.shards' if shards else 'trainer.devices or trainer.accumulate_grad_batches'}."
        )


def accumulation(run: Context) -> Iterator[str]:
    """Counts of micro-batches are whole steps. trainer.accumulate_grad_batches=auto restarts the processes with other ones."""
    trainer, world, accumulate = run.cfg.trainer, run.world, accumulated(run.cfg)
    auto, is_auto = "trainer.accumulate_grad_batches=auto", trainer.accumulate_grad_batches == "auto"
    if is_auto and (world.external or world.nodes > 1):
        who = world.external or "more than one parent process"
        yield (
            f"{auto} restarts the processes when memory runs out, but {who} started them. Type trainer.accumulate_grad_batches=1: "
            "if a micro-batch does not fit, the error names a number that does."
        )
    for key in ("limit_train_batches", "val_check_interval"):
        count = trainer[key]
        share = isinstance(count, float) and key == "limit_train_batches"
        if is_auto and count and (share or isinstance(count, int)):
            yield (
                f"trainer.{key}={count} counts micro-batches; with {auto} their number per step is not known yet. "
                "Type trainer.accumulate_grad_batches=1, or a larger number."
            )
        if (share and accumulate > 1) or (isinstance(count, int) and count % accumulate):
            yield (
                f"trainer.{key}={count} counts micro-batches and must be whole steps of {accumulate}. "
                f"Type trainer.{key}={accumulate * max(1, int(count) // accumulate)}."
            )


# --- The training: its length, optimizer, checkpoints, callbacks, loggers ---


def length(run: Context) -> Iterator[str]:
    cfg, trainer, epochs = run.cfg, run.cfg.trainer, epochs_of(run.cfg)
    if trainer.min_epochs and trainer.min_epochs > epochs:
        yield f"trainer.min_epochs={trainer.min_epochs} is more than the run's {epochs} epochs. Type trainer.max_epochs={trainer.min_epochs}."
    if trainer.min_steps and -1 < trainer.max_steps < trainer.min_steps:
        yield f"trainer.min_steps={trainer.min_steps} is more than trainer.max_steps={trainer.max_steps}. Leave one of them out."
    if cfg.schedule.get("needs_end") is True and epochs == math.inf and trainer.max_steps == -1:
        yield (
            f"schedule={title(cfg.schedule)} needs the run's number of steps, and trainer.max_epochs={trainer.max_epochs} has no end. "
            "Type trainer.max_epochs=<n> or trainer.max_steps=<n>, or schedule=constant."
        )
    if trainer.check_val_every_n_epoch is None and not isinstance(trainer.val_check_interval, int):
        yield "trainer.check_val_every_n_epoch=null counts batches over epochs. Type trainer.val_check_interval=<number of batches> as well."
    if trainer.limit_train_batches == 0:
        yield "trainer.limit_train_batches=0 trains nothing. To evaluate a run, use eval in place of train, with run=<name>."


def optimizer(run: Context) -> Iterator[str]:
    cfg, optim, trainer = run.cfg, run.cfg.optim, run.cfg.trainer
    if optim.get("fused") is True and (why := why_not_fused(cfg)):
        yield f"optim.fused=true {why}. Leave optim.fused out."
    if optim.get("nesterov") is True and "momentum" in optim and not optim.momentum:
        yield "optim.nesterov=true needs a momentum above 0. Type optim.momentum=0.9, or optim.nesterov=false."
    if optim.get("no_decay") is True and "weight_decay" in optim and not optim.weight_decay:
        yield "optim.no_decay=true has no effect with optim.weight_decay=0. Leave it out, or type optim.weight_decay=0.05."
    if trainer.gradient_clip_algorithm and trainer.gradient_clip_val is None:
        yield f"trainer.gradient_clip_algorithm={trainer.gradient_clip_algorithm} has no effect alone. Type trainer.gradient_clip_val=1.0 as well."


def checkpoints(run: Context) -> Iterator[str]:
    """What is kept and started from: the monitored figure, saving, and weights."""
    cfg, checkpoint = run.cfg, run.cfg.checkpoint
    modes = {cfg.task.monitor: cfg.task.mode, "val/loss": "min", None: checkpoint.mode}
    if (good := modes.get(checkpoint.monitor, checkpoint.mode)) != checkpoint.mode:
        yield f"checkpoint.monitor={checkpoint.monitor} with checkpoint.mode={checkpoint.mode} would keep the worst checkpoint. Type checkpoint.mode={good}."
    for name, node in cfg.callbacks.items():
        if "monitor" not in node or not is_shipped(node):
            continue
        if cfg.trainer.limit_val_batches == 0:
            yield f"callbacks=[{name}] has no effect with trainer.limit_val_batches=0: nothing is validated. Leave one of them out."
        if node.monitor is None:
            yield f"callbacks=[{name}] needs a figure to watch, and callbacks.{name}.monitor is null. Type checkpoint.monitor=<a figure of the validation>."
    if not cfg.trainer.enable_checkpointing:
        idle = {
            "checkpoint.every_n_steps": checkpoint.every_n_steps,
            "checkpoint.background=false": not checkpoint.background,
        }
        idle |= {f"logger.{name}.log_model": node.get("log_model") for name, node in cfg.logger.items()}
        for key in (key for key, is_set in idle.items() if is_set):
            yield f"{key} has no effect with trainer.enable_checkpointing=false. Leave one of them out."
    pretrained, path = cfg.model.get("pretrained"), cfg.model.get("checkpoint_path")
    if cfg.init_from and (pretrained or path):
        yield "init_from and model.pretrained or model.checkpoint_path both name weights to start from. Leave one of them out."
    if cfg.model.get("_target_") == TIMM and path and not Path(path).expanduser().is_file():
        yield f"model.checkpoint_path={path} does not exist. Name a file of weights (.safetensors or .pth)."


def loggers(run: Context) -> Iterator[str]:
    """Packages, and variables whose values a library would refuse late."""
    mode, loggers = os.environ.get("WANDB_MODE", "offline"), run.cfg.logger
    used = any(node.get("_target_") == WANDB and node.get("mode") == "auto" for node in loggers.values())
    if used and mode not in WANDB_MODES:
        yield (
            f"WANDB_MODE={mode} in the environment is not possible; it takes one of {', '.join(WANDB_MODES)}{did_you_mean(mode, WANDB_MODES)}. "
            "Type logger.wandb.mode=offline, or unset WANDB_MODE."
        )
    for name, node in loggers.items():
        module, package = OPTIONAL.get(str(node.get("_target_")), ("os", ""))
        if not installed(module):
            yield f"logger={name} needs the package {package}, which is not installed. Type uv sync --extra {module}, or pip install {package}."


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
