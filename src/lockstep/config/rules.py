"""Rules between config keys: devices, strategy, data, length, and limits of `exact.logical_ranks`. Free of torch."""

import math
import os
from collections.abc import Iterator
from typing import Any

from lockstep.config.formatting import to_text
from lockstep.config.instantiate import has_base
from lockstep.config.settings import Settings
from lockstep.config.validators import is_devices
from lockstep.machine.world import accelerator_of, available, number_from_env, why_no_gpu

# Keys that `exact.logical_ranks` excludes, with their defaults and the reasons. In training and evaluation:
EXACT = {
    "compile": (
        False,
        "computes differently under each strategy, which is incompatible with {exact}. Remove one of them",
    ),
    "tf32": (False, "computes differently on each kind of GPU, which is incompatible with {exact}. Remove one of them"),
}
# In training only. The last four keys are options of torch's DistributedDataParallel and all-reduce.
ADDED = "has no effect with {exact}, which sums gradients itself. Remove it"
EXACT_TRAINING = {
    "trainer.accumulate_grad_batches": (
        1,
        "has no effect with {exact}, which divides the batch. Remove it; for smaller micro-batches set a larger exact.logical_ranks",
    ),
    "trainer.sync_batchnorm": (
        False,
        "is not supported with {exact}: each logical rank normalises its own samples. Remove it",
    ),
    "strategy.comm_hook": (
        None,
        "rounds the sums over processes, which is incompatible with {exact}. Remove one of them",
    ),
    "strategy.reduce_each_micro_batch": (False, "has no effect with {exact}, which always does so. Remove it"),
    "strategy.bucket_cap_mb": (25, ADDED),
    "strategy.gradient_as_bucket_view": (True, ADDED),
    "strategy.static_graph": (False, ADDED),
    "strategy.find_unused_parameters": (False, ADDED),
}
SCHEDULES = "lockstep.kit.schedules."
ENDLESS = (f"{SCHEDULES}constant",)  # schedules that do not depend on the length of the run
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
    if isinstance(ids, list) and is_devices(ids) and world.accelerator == "cpu":
        yield f"trainer.devices={text} lists GPU ids, but a CPU has none. Set trainer.devices={world.devices}."
    elif isinstance(ids, list) and is_devices(ids) and count and max(ids) >= count:
        yield f"trainer.devices={text}: this machine has {count} {world.accelerator} devices, with the ids 0 to {count - 1}."
    if world.one_process and not splits and world.devices > 1:
        yield f"strategy={world.strategy} uses one device, but trainer.devices={text} requests {world.devices}. Set strategy=ddp, or trainer.devices=1."
    if splits and world.accelerator == "cpu" and world.devices > 1:
        yield f"strategy={world.strategy} splits batches across GPUs, but trainer.devices={text} on a CPU has none. Set strategy=ddp, or trainer.devices=1."
    if world.one_process and world.nodes > 1:
        yield f"strategy={world.strategy} runs in one process, but trainer.num_nodes={world.nodes} needs several. Set strategy=ddp, or trainer.num_nodes=1."
    if not world.external:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK") if name not in os.environ]
        if world.nodes > 1 and not world.one_process and (missing or cfg.run is None):
            yield (
                f"trainer.num_nodes={world.nodes} without torchrun or SLURM needs MASTER_ADDR, MASTER_PORT and NODE_RANK in the "
                "environment of each node, and run=<name>. Run torchrun --nnodes=... train.py, or set trainer.num_nodes=1."
            )
        if (node := number_from_env(os.environ, "NODE_RANK", default=0)) >= max(1, world.nodes):
            yield (
                f"NODE_RANK={node} is set in the environment, but must be below trainer.num_nodes={world.nodes}. If it is left over "
                "from a different job, run unset NODE_RANK; otherwise set trainer.num_nodes=<number of nodes>."
            )
        return
    if count is not None and count < world.devices:
        yield (
            f"{world.external} started {world.devices} processes on this node, but {count} {world.accelerator} devices are visible to this "
            f"process. Make all devices visible to each process: pass --gpus-per-node={world.devices}, not --gpus-per-task."
        )
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
    cfg, on_gpu, messages = settings.cfg, settings.world.accelerator == "cuda", dict[str, str]()
    under = f"has no effect under strategy={settings.world.strategy}"
    if cfg.tf32 and not on_gpu:
        messages["tf32"] = (
            f"has no effect on {settings.world.accelerator}: only NVIDIA GPUs support it. Set tf32=false."
        )
    if cfg.trainer.sync_batchnorm and settings.spec.splits_batches:
        messages["trainer.sync_batchnorm"] = f"{under}: each replica normalises its own part. Set strategy=ddp."
    if cfg.compile and settings.spec.splits_batches:
        messages["compile"] = f"{under}: all replicas would run on the first device. Set strategy=ddp."
    if cfg.checkpoint.sharded and not settings.spec.is_sharded:
        messages["checkpoint.sharded"] = (
            f"{under}, which shards nothing. Set strategy=fsdp, or checkpoint.sharded=false."
        )
    if cfg.strategy.get("comm_hook") and not on_gpu:
        messages["strategy.comm_hook"] = "has no effect without GPUs. Set strategy.comm_hook=null."
    return {key: f"{settings.setting_text(key)} {message}" for key, message in messages.items()}


# --- Bit-identical results on any number of processes (`exact.logical_ranks`) ---


def processes(settings: Settings) -> Iterator[str]:
    """Settings of training and evaluation that would make metrics depend on the number of processes."""
    cfg, world, exact = settings.cfg, settings.world, settings.setting_text("exact.logical_ranks")
    ranks, on_gpu = cfg.exact.logical_ranks, world.accelerator == "cuda"
    if ranks is None:
        return
    if ranks % world.size:
        yield (
            f"{exact} cannot be divided among {world.size} processes. Start 1, 2, 4 or another power of two up to {ranks}. A run keeps its "
            "exact.logical_ranks; an evaluation with exact.logical_ranks=null gives metrics that are equal up to rounding."
        )
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
    yield from settings.exact_conflicts(EXACT)


def exact_training(settings: Settings) -> Iterator[str]:
    trainer, exact = settings.cfg.trainer, settings.setting_text("exact.logical_ranks")
    if settings.cfg.exact.logical_ranks is None:
        reason = "has no effect without exact.logical_ranks. Set exact.logical_ranks=8 as well, or remove it"
        yield from settings.exact_conflicts({"exact.threads": (1, reason), "exact.digests": (False, reason)})
        return
    for key in COUNTED:
        count = settings.cfg.get(f"trainer.{key}")
        if isinstance(count, float) and count not in (0.0, 1.0):
            yield f"trainer.{key}={count} is a fraction of a process's micro-batches; with {exact} it must be a number of steps. Set trainer.{key}=10."
    yield from settings.exact_conflicts(EXACT_TRAINING)
    if settings.spec.is_sharded and trainer.precision in ("bf16-true", "16-true"):
        yield (
            f"trainer.precision={trainer.precision} rounds the last elements of a shard differently, so {exact} is not supported with "
            f"strategy={settings.world.strategy}. Set trainer.precision=bf16-mixed."
        )


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
    for key in ("prefetch_factor", "persistent_workers"):
        value = getattr(loader, key)
        if value is not None and loader.num_workers in (0, "auto"):
            yield f"loader.{key}={to_text(value)} has no effect without workers. Set loader.num_workers=2 as well, or remove it."


def augmentation(settings: Settings) -> Iterator[str]:
    """Creating the operations raises all errors in their arguments."""
    _ = settings.operations
    yield from ()


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
        low, high = batch // unit * unit, (batch // unit + 1) * unit
        detail = f", each a multiple of {multiple} samples ({reason} within a micro-batch)" if multiple > 1 else ""
        yield (
            f"loader.batch_size={batch} is the global batch; it cannot be divided into {count} equal micro-batches{detail}. "
            f"Set loader.batch_size={f'{low} or {high}' if low else high}, or change trainer.devices, trainer.accumulate_grad_batches or "
            "exact.logical_ranks, which divide it."
        )


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
    trainer, epochs = settings.cfg.trainer, settings.epochs
    if trainer.min_epochs and trainer.min_epochs > epochs:
        yield f"trainer.min_epochs={trainer.min_epochs} is more than the run's {epochs} epochs. Set trainer.max_epochs={trainer.min_epochs}."
    if trainer.min_steps and -1 < trainer.max_steps < trainer.min_steps:
        yield f"trainer.min_steps={trainer.min_steps} is more than trainer.max_steps={trainer.max_steps}. Remove one of them."
    if trainer.check_val_every_n_epoch is None and not isinstance(trainer.val_check_interval, int):
        yield "trainer.check_val_every_n_epoch=null counts batches across epochs. Set trainer.val_check_interval=<number of batches> as well."
    schedule = settings.cfg.schedule.target
    if math.isinf(epochs) and trainer.max_steps == -1 and schedule.startswith(SCHEDULES) and schedule not in ENDLESS:
        yield "schedule: the schedule needs the run's number of steps. Set trainer.max_epochs=<n> or trainer.max_steps=<n>, or schedule=constant."
    if trainer.limit_train_batches == 0:
        yield "trainer.limit_train_batches=0 trains nothing. To evaluate a run, use eval with run=<name> instead of train."


def why_not_fused(settings: Settings) -> str | None:
    """Why the optimizer cannot be fused: the second half of a sentence that starts with `optim.fused=true`."""
    cfg, exact, is_sharded = settings.cfg, settings.cfg.exact.logical_ranks, settings.spec.is_sharded
    if exact and accelerator_of(str(cfg.trainer.accelerator)) == "cpu":
        return None  # training/arithmetic.py
    if exact and is_sharded:
        return f"has not been tested on GPU shards, so it is not supported with exact.logical_ranks={exact}"
    if cfg.optim.target not in SGD and not has_base(cfg.optim, "optim", SGD[1]):
        return None
    if is_sharded:
        return f"has no kernel for SGD on the shards of strategy={cfg.strategy.name} (torch 2.13)"
    if cfg.optim.get("dampening"):
        return "has no kernel for SGD with dampening that supports a parameter's first gradient in a later step (torch 2.13)"
    return None


def optimizer_node(settings: Settings) -> dict[str, Any]:
    """The `optim` node, with `fused: auto` resolved for the strategy of this process."""
    node = settings.cfg.optim.node
    if node.get("fused") != "auto":
        return node
    # With exact.logical_ranks, all strategies compute as they do on shards.
    is_untested = settings.cfg.exact.logical_ranks and accelerator_of(str(settings.cfg.trainer.accelerator)) != "cpu"
    return {**node, "fused": why_not_fused(settings) is None and not is_untested}


def optimizer(settings: Settings) -> Iterator[str]:
    optim, trainer = settings.cfg.optim, settings.cfg.trainer
    if optim.get("fused") is True and (reason := why_not_fused(settings)):
        yield f"optim.fused=true {reason}. Remove optim.fused."
    if optim.get("nesterov") is True and "momentum" in optim and not optim.get("momentum"):
        yield "optim.nesterov=true needs a momentum above 0. Set optim.momentum=0.9, or optim.nesterov=false."
    if optim.get("no_decay") is True and "weight_decay" in optim and not optim.get("weight_decay"):
        yield "optim.no_decay=true has no effect with optim.weight_decay=0. Remove it, or set optim.weight_decay=0.05."
    if trainer.gradient_clip_algorithm and trainer.gradient_clip_val is None:
        algorithm = trainer.gradient_clip_algorithm
        yield f"trainer.gradient_clip_algorithm={algorithm} has no effect without trainer.gradient_clip_val. Set trainer.gradient_clip_val=1.0 as well."


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
    cfg, checkpoint = settings.cfg, settings.cfg.checkpoint
    if not cfg.trainer.enable_checkpointing:
        unused = {
            "checkpoint.every_n_steps": checkpoint.every_n_steps,
            "checkpoint.background=false": not checkpoint.background,
        }
        unused |= {f"logger.{name}.log_model": logger.get("log_model") for name, logger in cfg.logger.items()}
        for key in (key for key, is_set in unused.items() if is_set):
            yield f"{key} has no effect with trainer.enable_checkpointing=false. Remove one of them."
    pretrained, path = cfg.model.get("pretrained"), cfg.model.get("checkpoint_path")
    if cfg.init_from and (pretrained or path):
        yield "init_from and model.pretrained or model.checkpoint_path both set the initial weights. Remove one of them."
