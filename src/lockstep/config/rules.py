"""Rules between config keys: devices, strategy, data, length, and limits of `exact.logical_ranks`. Free of torch."""

import os
from collections.abc import Iterator
from typing import Any

from lockstep.config.formatting import to_text
from lockstep.config.instantiate import has_base
from lockstep.config.settings import Settings
from lockstep.config.validators import is_devices
from lockstep.machine.world import available, number_from_env, why_no_gpu

# Keys that `exact.logical_ranks` excludes, with the reasons. In training and evaluation:
DIFFERS = "computes differently under each strategy or on each kind of GPU, which is incompatible with {exact}. Remove one of them"
EXACT = {"compile": DIFFERS, "tf32": DIFFERS}
# In training only. The last four keys are options of torch's DistributedDataParallel and all-reduce.
ADDED = "has no effect with {exact}, which sums gradients itself. Remove it"
EXACT_TRAINING = {
    "trainer.accumulate_grad_batches": "has no effect with {exact}, which divides the batch. Remove it; for smaller micro-batches set a larger exact.logical_ranks",
    "trainer.sync_batchnorm": "is not supported with {exact}: each logical rank normalises its own samples. Remove it",
    "strategy.comm_hook": "rounds the sums over processes, which is incompatible with {exact}. Remove one of them",
    "strategy.reduce_each_micro_batch": "has no effect with {exact}, which always does so. Remove it",
    "strategy.bucket_cap_mb": ADDED,
    "strategy.gradient_as_bucket_view": ADDED,
    "strategy.static_graph": ADDED,
    "strategy.find_unused_parameters": ADDED,
}
SCHEDULES = "lockstep.kit.schedules."
SGD = ("torch.optim.SGD", "torch.optim.sgd.SGD")  # torch's SGD is recognised without importing it, unlike subclasses
COUNTED = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "val_check_interval")  # in batches


# --- The machine, its launcher and the strategy ---


def devices(settings: Settings) -> Iterator[str]:
    """Devices and processes that a config requires but the machine or its launcher does not provide."""
    cfg, world, splits = settings.cfg, settings.world, settings.spec.splits_batches
    ids = cfg.trainer.devices
    text, count = to_text(ids), available(world.accelerator)
    if world.accelerator == "cuda" and not count:
        yield f"trainer.accelerator={cfg.trainer.accelerator} needs a GPU, but {why_no_gpu() or 'none is visible'}. Set trainer.accelerator=cpu."
    elif count is not None and world.devices > count and not world.external:
        yield f"trainer.devices={text} requests {world.devices} {world.accelerator} devices; this machine has {count}. Set trainer.devices={count}, or trainer.accelerator=cpu."
    gpus = 0 if world.accelerator == "cpu" else count
    if isinstance(ids, list) and is_devices(ids) and gpus is not None and max(ids) >= gpus:
        yield f"trainer.devices={text} lists ids of GPUs; this run can use {gpus}, numbered from 0. Set trainer.devices=1."
    if world.one_process and world.devices > 1 and (not splits or world.accelerator == "cpu"):
        yield f"strategy={world.strategy} uses one process, but trainer.devices={text} requests {world.devices}. Set strategy=ddp, or trainer.devices=1."
    if world.one_process and world.nodes > 1:
        yield f"strategy={world.strategy} runs in one process, but trainer.num_nodes={world.nodes} needs several. Set strategy=ddp, or trainer.num_nodes=1."
    if not world.external:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK") if name not in os.environ]
        if world.nodes > 1 and not world.one_process and (missing or cfg.run is None):
            yield f"trainer.num_nodes={world.nodes} needs MASTER_ADDR, MASTER_PORT and NODE_RANK on each node and run=<name>, or torchrun --nnodes=... train.py."
        if (node := number_from_env(os.environ, "NODE_RANK", default=0)) >= max(1, world.nodes):
            yield f"NODE_RANK={node} must be below trainer.num_nodes={world.nodes}. If it is left over from a different job, run unset NODE_RANK."
        return
    if count is not None and count < world.devices:
        yield f"{world.external} started {world.devices} processes, but {count} {world.accelerator} devices are visible to each. Pass --gpus-per-node={world.devices}, not --gpus-per-task."
    if world.one_process and splits and world.devices * world.nodes > 1:
        yield f"strategy={world.strategy} runs in one process with all GPUs, but {world.external} started {world.devices * world.nodes}. Start one process, or set strategy=ddp."
    if cfg.trainer.devices not in ("auto", -1, world.devices):
        yield f"trainer.devices={text} contradicts {world.external}, which started {world.devices} processes on this node. Remove trainer.devices."
    if cfg.seed is None and cfg.resume is None:
        yield f"seed=null would give each process that {world.external} started a different seed. Set seed=<number>."
    if cfg.trainer.num_nodes not in (1, world.nodes):
        yield f"trainer.num_nodes={cfg.trainer.num_nodes} contradicts {world.external}, which started {world.nodes} nodes. Remove trainer.num_nodes."


def strategy(settings: Settings) -> Iterator[str]:
    precision, supported = str(settings.cfg.trainer.precision), settings.spec.precisions
    if precision in ("16-mixed", "16-true", "16") and settings.world.accelerator == "cpu":
        yield f"trainer.precision={precision} is not supported on a CPU. Set trainer.precision=bf16-mixed."
    if supported and precision not in ("auto", "32", *supported):
        yield f"strategy={settings.world.strategy} does not support trainer.precision={precision}; it supports {', '.join(supported)}. Set trainer.precision=bf16-mixed."
    yield from keys_without_effect(settings).values()


def keys_without_effect(settings: Settings) -> dict[str, str]:
    """Keys without effect under the strategy or on the device, with messages: flags, or names that null disables."""
    cfg, world, spec = settings.cfg, settings.world, settings.spec
    has_no_effect = {
        "tf32": world.accelerator != "cuda",
        "compile": spec.splits_batches,
        "trainer.sync_batchnorm": spec.splits_batches,
        "checkpoint.sharded": not spec.is_sharded,
        "strategy.comm_hook": world.accelerator != "cuda",
    }
    values = {key: cfg.get(key) for key, is_idle in has_no_effect.items() if is_idle and cfg.get(key)}
    under = f"has no effect under strategy={world.strategy} on {world.accelerator}"
    off = {key: "false" if value is True else "null" for key, value in values.items()}
    return {key: f"{key}={to_text(value)} {under}. Set {key}={off[key]}." for key, value in values.items()}


# --- Bit-identical results on any number of processes (`exact.logical_ranks`) ---


def processes(settings: Settings) -> Iterator[str]:
    """Settings of training and evaluation that would make metrics depend on the number of processes."""
    cfg, world, exact = settings.cfg, settings.world, settings.setting_text("exact.logical_ranks")
    ranks, on_gpu = cfg.exact.logical_ranks, world.accelerator == "cuda"
    if ranks is None:
        return
    if ranks % world.size:
        yield f"{exact} cannot be divided among {world.size} processes. Start 1, 2, 4 or another power of two up to {ranks}; an evaluation may set exact.logical_ranks=null."
    if not settings.spec.adds_in_fixed_order:
        yield f"{exact} needs strategy=single, ddp or fsdp: strategy={settings.cfg.strategy.title} does not add gradients in a fixed order."
    if settings.spec.splits_batches:
        yield f"{exact} is not supported with strategy={world.strategy}, which divides batches by the number of GPUs. Set strategy=ddp."
    if world.accelerator == "mps":
        yield f"{exact} needs float64, which mps does not support. Set trainer.accelerator=cpu."
    if on_gpu and cfg.trainer.deterministic in (False, "warn"):
        yield f"{exact} needs deterministic kernels on GPUs. Remove {settings.setting_text('trainer.deterministic')}."
    if on_gpu and cfg.trainer.benchmark:
        yield f"trainer.benchmark=true chooses kernels by their speed in this run, which is incompatible with {exact}. Remove trainer.benchmark."
    if world.accelerator != "cpu" and cfg.exact.threads != 1:
        yield f"{settings.setting_text('exact.threads')} has no effect on {world.accelerator}: it applies only to CPUs. Remove it."
    yield from settings.conflicts(EXACT)


def exact_training(settings: Settings) -> Iterator[str]:
    trainer, exact = settings.cfg.trainer, settings.setting_text("exact.logical_ranks")
    if settings.cfg.exact.logical_ranks is None:
        reason = "has no effect without exact.logical_ranks. Set exact.logical_ranks=8 as well, or remove it"
        yield from settings.conflicts({"exact.threads": reason, "exact.digests": reason})
        return
    for key in COUNTED:
        count = settings.cfg.get(f"trainer.{key}")
        if isinstance(count, float) and count not in (0.0, 1.0):
            yield f"trainer.{key}={count} is a fraction of a process's micro-batches; with {exact} it must be a number of steps. Set trainer.{key}=10."
    yield from settings.conflicts(EXACT_TRAINING)
    if settings.spec.is_sharded and trainer.precision in ("bf16-true", "16-true"):
        yield f"trainer.precision={trainer.precision} rounds the last elements of a shard differently, unlike {exact}. Set trainer.precision=bf16-mixed."


# --- Data, batches and operations ---


def loading(settings: Settings) -> Iterator[str]:
    if (loader := settings.loader) is None:
        return
    if loader.on_device is True and settings.world.accelerator == "cpu":
        yield "loader.on_device=true has no effect on a CPU: the samples are already in its memory. Set loader.on_device=auto."
    if loader.on_device is True and loader.num_workers not in (0, "auto"):
        yield f"loader.on_device=true leaves no work for loader.num_workers={loader.num_workers}. Remove one of them."
    if loader.on_device is True and settings.transforms:
        yield f"loader.on_device=true is not supported with augment.{settings.transforms[0]}, which changes samples before they reach a device. Remove one of them."
    if loader.num_workers in (0, "auto"):
        reason = "has no effect without workers. Set loader.num_workers=2 as well, or remove it"
        yield from settings.conflicts({"loader.prefetch_factor": reason, "loader.persistent_workers": reason})


def division(settings: Settings) -> Iterator[str]:
    """The global batch must divide into processes × micro-batches of whole pairs and copies. For training only."""
    if (loader := settings.loader) is None:
        return
    batch, folds, fold = loader.batch_size, loader.folds, loader.fold
    if folds is None and fold:
        yield f"loader.fold={fold} has no effect without loader.folds. Set loader.folds=5 as well."
    if folds is not None and fold >= folds:
        yield f"loader.fold={fold} is invalid with loader.folds={folds}; folds are numbered from 0 to {folds - 1}."
    multiple, reason = settings.micro_batch_divisor
    count = settings.micro_batches
    if batch % (unit := count * multiple):
        sizes = " or ".join(str(size) for size in (batch // unit * unit, (batch // unit + 1) * unit) if size)
        detail = f", each a multiple of {multiple} samples ({reason} within a micro-batch)" if multiple > 1 else ""
        yield f"loader.batch_size={batch} is the global batch; it cannot be divided into {count} equal micro-batches (trainer.accumulate_grad_batches for each process){detail}. Set loader.batch_size={sizes}."


def accumulation(settings: Settings) -> Iterator[str]:
    """Counts of micro-batches must be whole steps."""
    accumulate = settings.cfg.trainer.accumulate_grad_batches
    for key in ("limit_train_batches", "val_check_interval"):
        count = settings.cfg.get(f"trainer.{key}")
        is_fraction = isinstance(count, float) and count != 1 and key == "limit_train_batches"
        if (is_fraction and accumulate > 1) or (isinstance(count, int) and count % accumulate):
            yield f"trainer.{key}={count} counts micro-batches and must be a multiple of {accumulate}, which is one step. Set trainer.{key}={accumulate * max(1, int(count) // accumulate)}."


# --- Training: length, optimizer, checkpoints, callbacks, loggers ---


def length(settings: Settings) -> Iterator[str]:
    trainer = settings.cfg.trainer
    if trainer.check_val_every_n_epoch is None and not isinstance(trainer.val_check_interval, int):
        yield "trainer.check_val_every_n_epoch=null counts batches across epochs. Set trainer.val_check_interval=<number of batches> as well."
    schedule = settings.cfg.schedule.target
    is_endless = trainer.max_epochs == trainer.max_steps == -1
    if is_endless and schedule.startswith(SCHEDULES) and schedule != f"{SCHEDULES}constant":
        yield "schedule: the schedule needs the run's number of steps. Set trainer.max_epochs=<n> or trainer.max_steps=<n>, or schedule=constant."
    if trainer.limit_train_batches == 0:
        yield "trainer.limit_train_batches=0 trains nothing. To evaluate a run, use eval with run=<name> instead of train."
    limits = {"epochs": (trainer.min_epochs, trainer.max_epochs), "steps": (trainer.min_steps, trainer.max_steps)}
    for unit, (low, high) in limits.items():
        if low and high and -1 < high < low:
            yield f"trainer.min_{unit}={low} is more than trainer.max_{unit}={high}. Remove one of them."


def fuses(settings: Settings) -> bool:
    """Whether `optim.fused=auto` fuses. torch 2.13 has no fused SGD for shards, and none with dampening for a first gradient in a later step."""
    optim, exact = settings.cfg.optim, settings.cfg.exact.logical_ranks
    if exact:  # training/arithmetic.py fuses on CPUs; shards on GPUs have not been tested
        return settings.world.accelerator == "cpu"
    is_sgd = optim.target in SGD or has_base(optim, "optim", SGD[1])
    return not (is_sgd and (settings.spec.is_sharded or optim.get("dampening")))


def optimizer_node(settings: Settings) -> dict[str, Any]:
    """The `optim` node, with `fused: auto` resolved for the strategy of this process."""
    node = settings.cfg.optim.node
    return {**node, "fused": fuses(settings)} if node.get("fused") == "auto" else node


def optimizer(settings: Settings) -> Iterator[str]:
    optim, trainer, exact = settings.cfg.optim, settings.cfg.trainer, settings.cfg.exact.logical_ranks
    on_gpu_shards = settings.spec.is_sharded and settings.world.accelerator != "cpu"
    if optim.get("fused") is True and exact and on_gpu_shards:
        yield "optim.fused=true has not been tested on GPU shards with exact.logical_ranks. Remove optim.fused."
    if optim.get("nesterov") is True and "momentum" in optim and not optim.get("momentum"):
        yield "optim.nesterov=true needs a momentum above 0. Set optim.momentum=0.9, or optim.nesterov=false."
    if optim.get("no_decay") is True and "weight_decay" in optim and not optim.get("weight_decay"):
        yield "optim.no_decay=true has no effect with optim.weight_decay=0. Remove it, or set optim.weight_decay=0.05."
    if trainer.gradient_clip_val is None:
        reason = "has no effect without trainer.gradient_clip_val. Set trainer.gradient_clip_val=1.0 as well"
        yield from settings.conflicts({"trainer.gradient_clip_algorithm": reason})


def monitored(settings: Settings) -> Iterator[str]:
    """The metric that selects the best checkpoint, and those that callbacks monitor, e.g. to end a run early."""
    cfg, checkpoint = settings.cfg, settings.cfg.checkpoint
    modes = {cfg.task.get("monitor"): cfg.task.get("mode"), "val/loss": "min", None: checkpoint.mode}
    if (mode := modes.get(checkpoint.monitor, checkpoint.mode)) != checkpoint.mode:
        yield f"checkpoint.monitor={checkpoint.monitor} with checkpoint.mode={checkpoint.mode} would keep the worst checkpoint. Set checkpoint.mode={mode}."
    for name, callback in cfg.callbacks.items():
        if "monitor" not in callback or not callback.is_shipped:
            continue
        if cfg.trainer.limit_val_batches == 0:
            yield f"callbacks=[{name}] has no effect with trainer.limit_val_batches=0: nothing is validated. Remove one of them."
        if callback.get("monitor") is None:
            yield f"callbacks=[{name}] needs a metric to monitor, but callbacks.{name}.monitor is null. Set checkpoint.monitor=<a validation metric>."


def checkpoints(settings: Settings) -> Iterator[str]:
    """Keys about saving checkpoints and about initial weights."""
    cfg = settings.cfg
    if not cfg.trainer.enable_checkpointing:
        reason = "has no effect with trainer.enable_checkpointing=false. Remove one of them"
        yield from settings.conflicts({"checkpoint.every_n_steps": reason, "checkpoint.background": reason})
        for name in (name for name, logger in cfg.logger.items() if logger.get("log_model")):
            yield f"logger.{name}.log_model {reason}."
    pretrained, path = cfg.model.get("pretrained"), cfg.model.get("checkpoint_path")
    if cfg.init_from and (pretrained or path):
        yield "init_from and model.pretrained or model.checkpoint_path both set the initial weights. Remove one of them."
