"""Rules between the keys of a config, free of torch: a table, and functions where a rule takes more than a condition."""

import importlib.util
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lockstep.config.batches import accumulated, repeats, unit
from lockstep.config.identity import title
from lockstep.config.instantiate import has_own_loaders
from lockstep.config.schema import is_devices
from lockstep.config.targets import is_shipped
from lockstep.config.words import nearest, plain, shown
from lockstep.machine.hardware import why_no_gpu
from lockstep.machine.world import World, accelerator_of, available, number, spec_of

# A key, when its value is wrong, and why: text that follows `key=value`, with the config {c}, the world {w} and titles of groups.
Rule = tuple[str, Callable[[Any, World], object], str]

COUNTED = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "val_check_interval")  # in batches
# Keys that only torch's DistributedDataParallel and all-reduce read, and their usual values.
OF_DDP = {"bucket_cap_mb": 25, "gradient_as_bucket_view": True, "static_graph": False, "find_unused_parameters": False}

# fmt: off
# Keys that do nothing under the strategy or on the device: flags, or names that null takes away.
WITHOUT_EFFECT: list[Rule] = [
    ("tf32", lambda c, w: c.tf32 and w.accelerator != "cuda",
     "has no effect on {w.accelerator}: only NVIDIA GPUs have it. Type tf32=false."),
    ("trainer.sync_batchnorm", lambda c, w: c.trainer.sync_batchnorm and spec_of(c).splits_batches,
     "has no effect under strategy={w.strategy}: each replica normalises its own part. Type strategy=ddp."),
    ("compile", lambda c, w: c.compile and spec_of(c).splits_batches,
     "has no effect under strategy={w.strategy}: all replicas would run on the first device. Type strategy=ddp."),
    ("checkpoint.sharded", lambda c, w: c.checkpoint.sharded and not spec_of(c).is_sharded,
     "has no effect under strategy={w.strategy}: nothing is sharded there. Type strategy=fsdp, or checkpoint.sharded=false."),
    ("strategy.comm_hook", lambda c, w: c.strategy.get("comm_hook") and w.accelerator != "cuda",
     "has no effect without GPUs. Type strategy.comm_hook=null."),
]
STRATEGY: list[Rule] = [
    ("strategy.name", lambda c, w: is_shipped(c.strategy) and c.strategy._target_ != spec_of(c).target,
     "cannot be set, because it says what the strategy is. Choose one with strategy=<name>."),
    ("trainer.precision", lambda c, w: str(c.trainer.precision) in ("16-mixed", "16-true", "16") and w.accelerator == "cpu",
     "is not supported on a CPU. Type trainer.precision=bf16-mixed."),
    ("trainer.precision", lambda c, w: str(c.trainer.precision) not in ("auto", "32", *(spec_of(c).precisions or [str(c.trainer.precision)])),
     "is not possible: strategy={w.strategy} does not support it. Type one of {precisions}."),
    ("trainer.precision", lambda c, w: str(c.trainer.precision) in ("64-true", "64") and w.accelerator == "mps",
     "is not supported on mps. Type trainer.precision=32-true."),
]
LOADING: list[Rule] = [
    ("data.on_device", lambda c, w: c.data.get("on_device") is True and w.accelerator == "cpu",
     "has no effect on a CPU: the samples are in its memory already. Type data.on_device=auto."),
    ("data.on_device", lambda c, w: c.data.get("on_device") is True and c.data.get("num_workers") not in (0, "auto"),
     "leaves nothing for data.num_workers={c.data.num_workers} to load. Leave one of them out."),
    *((f"data.{key}", lambda c, w, key=key: c.data.get(key) is not None and c.data.get("num_workers") in (0, "auto"),
       "has no effect without workers. Type data.num_workers=2 as well, or leave it out.") for key in ("prefetch_factor", "persistent_workers")),
]
# Where the same bits on any number of processes are not possible. These of training and evaluation:
EXACT_ANYWHERE: list[Rule] = [
    ("exact.shards", lambda c, w: c.exact.shards % w.size,
     "cannot be divided among {w.size} processes. Start 1, 2, 4 or another power of two up to {c.exact.shards}. A run keeps its "
     "exact.shards; an evaluation with exact.shards=null has figures that are equal to rounding."),
    ("exact.shards", lambda c, w: not is_shipped(c.strategy),
     "needs strategy=single, ddp or fsdp: strategy={strategy} adds gradients in an order of its own."),
    ("exact.shards", lambda c, w: spec_of(c).splits_batches,
     "is not possible with strategy={w.strategy}, which divides batches by the number of GPUs. Type strategy=ddp."),
    ("exact.shards", lambda c, w: w.accelerator == "mps", "needs float64, which mps does not support. Type trainer.accelerator=cpu."),
    ("trainer.deterministic", lambda c, w: w.accelerator == "cuda" and c.trainer.deterministic in (False, "warn"),
     "does not go with exact.shards={c.exact.shards}, which needs deterministic kernels on GPUs. Leave it out."),
    ("trainer.benchmark", lambda c, w: w.accelerator == "cuda" and c.trainer.benchmark,
     "chooses kernels by their speed in this run, so exact.shards={c.exact.shards} is not possible. Leave trainer.benchmark out."),
    ("exact.threads", lambda c, w: w.accelerator != "cpu" and c.exact.threads != 1,
     "has no effect on {w.accelerator}: it is for CPUs. Leave it out."),
    ("compile", lambda c, w: c.compile,
     "computes differently under each strategy, so exact.shards={c.exact.shards} is not possible. Leave one of them out."),
    ("tf32", lambda c, w: c.tf32,
     "computes differently on each kind of GPU, so exact.shards={c.exact.shards} is not possible. Leave one of them out."),
]
EXACT: list[Rule] = [
    ("trainer.accumulate_grad_batches", lambda c, w: c.trainer.accumulate_grad_batches != 1,
     "has no effect with exact.shards={c.exact.shards}, which divides the batch. Leave it out; for smaller micro-batches type a larger exact.shards."),
    *((f"trainer.{key}", lambda c, w, key=key: isinstance(c.trainer[key], float) and c.trainer[key] not in (0.0, 1.0),
       f"is a share of a process's micro-batches; with exact.shards it takes a number of steps. Type trainer.{key}=10.") for key in COUNTED),
    ("trainer.sync_batchnorm", lambda c, w: c.trainer.sync_batchnorm,
     "has no place with exact.shards={c.exact.shards}: each logical rank normalises its own samples. Leave it out."),
    ("strategy.comm_hook", lambda c, w: c.strategy.get("comm_hook"),
     "rounds sums of processes, so exact.shards={c.exact.shards} is not possible. Leave one of them out."),
    ("strategy.reduce_each_micro_batch", lambda c, w: c.strategy.get("reduce_each_micro_batch"),
     "has no effect with exact.shards={c.exact.shards}, which does so anyway. Leave it out."),
    *((f"strategy.{key}", lambda c, w, key=key, usual=usual: c.strategy.get(key, usual) != usual,
       "has no effect with exact.shards={c.exact.shards}, which adds gradients itself. Leave it out.") for key, usual in OF_DDP.items()),
    ("trainer.precision", lambda c, w: spec_of(c).is_sharded and c.trainer.precision in ("bf16-true", "16-true"),
     "rounds the last elements of a shard in another way, so exact.shards={c.exact.shards} is not possible with strategy={w.strategy}. "
     "Type trainer.precision=bf16-mixed."),
]
NOT_EXACT: list[Rule] = [
    ("exact.threads", lambda c, w: c.exact.threads != 1, "has no effect without exact.shards. Type exact.shards=8 as well, or leave it out."),
    ("exact.digests", lambda c, w: c.exact.digests, "has no effect without exact.shards. Type exact.shards=8 as well, or leave it out."),
]
TRAINING: list[Rule] = [
    # how long a run is
    ("trainer.min_epochs", lambda c, w: (c.trainer.min_epochs or 0) > epochs_of(c),
     "is more than the run's {epochs:g} epochs. Type trainer.max_epochs={c.trainer.min_epochs}."),
    ("trainer.min_steps", lambda c, w: -1 < c.trainer.max_steps < (c.trainer.min_steps or 0),
     "is more than trainer.max_steps={c.trainer.max_steps}. Leave one of them out."),
    ("trainer.max_epochs", lambda c, w: c.schedule.get("needs_end") is True and epochs_of(c) == math.inf and c.trainer.max_steps == -1,
     "has no end, and schedule={schedule} needs the run's number of steps. Type trainer.max_epochs=<n> or trainer.max_steps=<n>, or schedule=constant."),
    ("trainer.check_val_every_n_epoch", lambda c, w: c.trainer.check_val_every_n_epoch is None and not isinstance(c.trainer.val_check_interval, int),
     "counts batches over epochs. Type trainer.val_check_interval=<number of batches> as well."),
    ("trainer.limit_train_batches", lambda c, w: c.trainer.limit_train_batches == 0,
     "trains nothing. To evaluate a run, use eval in place of train, with run=<name>."),
    # micro-batches
    *((f"trainer.{key}", lambda c, w, key=key: (isinstance(c.trainer[key], int) and c.trainer[key] % accumulated(c))
       or (key == "limit_train_batches" and isinstance(c.trainer[key], float) and accumulated(c) > 1),
       "counts micro-batches and must be whole steps of {accumulate}. Type trainer." + key + "={whole[" + key + "]}.")
      for key in ("limit_train_batches", "val_check_interval")),
    ("trainer.accumulate_grad_batches", lambda c, w: c.trainer.accumulate_grad_batches == "auto" and (w.external or w.nodes > 1),
     "restarts the processes when memory runs out, but {launcher} started them. Type trainer.accumulate_grad_batches=1: "
     "if a micro-batch does not fit, the error names a number that does."),
    *((f"trainer.{key}", lambda c, w, key=key: c.trainer.accumulate_grad_batches == "auto" and c.trainer[key]
       and (isinstance(c.trainer[key], int) or key == "limit_train_batches"),
       "counts micro-batches; with trainer.accumulate_grad_batches=auto their number per step is not known yet. "
       "Type trainer.accumulate_grad_batches=1, or a larger number.") for key in ("limit_train_batches", "val_check_interval")),
    # data
    ("data.fold", lambda c, w: c.data.get("folds") is None and c.data.get("fold"), "has no effect without data.folds. Type data.folds=5 as well."),
    ("data.fold", lambda c, w: c.data.get("folds") is not None and c.data.get("fold", 0) >= c.data.folds,
     "is not possible with data.folds={c.data.folds}; folds are counted from 0."),
    # the optimizer
    ("optim.fused", lambda c, w: c.optim.get("fused") is True and fused_problem(c), "{fused}. Leave optim.fused out."),
    ("optim.nesterov", lambda c, w: is_shipped(c.optim) and c.optim.get("nesterov") is True and not c.optim.get("momentum"),
     "needs a momentum above 0. Type optim.momentum=0.9, or optim.nesterov=false."),
    ("optim.no_decay", lambda c, w: is_shipped(c.optim) and c.optim.get("no_decay") is True and not c.optim.get("weight_decay"),
     "has no effect with optim.weight_decay=0. Leave it out, or type optim.weight_decay=0.05."),
    ("trainer.gradient_clip_algorithm", lambda c, w: c.trainer.gradient_clip_algorithm and c.trainer.gradient_clip_val is None,
     "has no effect alone. Type trainer.gradient_clip_val=1.0 as well."),
    # checkpoints and weights
    ("checkpoint.mode", lambda c, w: c.checkpoint.mode != best_mode(c),
     "with checkpoint.monitor={c.checkpoint.monitor} would keep the worst checkpoint. Type checkpoint.mode={best_mode}."),
    ("checkpoint.every_n_steps", lambda c, w: not c.trainer.enable_checkpointing and c.checkpoint.every_n_steps,
     "has no effect with trainer.enable_checkpointing=false. Leave one of them out."),
    ("checkpoint.background", lambda c, w: not c.trainer.enable_checkpointing and not c.checkpoint.background,
     "has no effect with trainer.enable_checkpointing=false. Leave one of them out."),
    ("init_from", lambda c, w: c.init_from and (c.model.get("pretrained") or c.model.get("checkpoint_path")),
     "and model.pretrained or model.checkpoint_path both name weights to start from. Leave one of them out."),
    ("model.checkpoint_path", lambda c, w: is_shipped(c.model) and c.model.get("checkpoint_path")
     and not Path(c.model.checkpoint_path).expanduser().is_file(), "does not exist. Name a file of weights (.safetensors or .pth)."),
]
# With a LightningDataModule, which makes its own batches:
OWN_LOADERS: list[Rule] = [
    ("exact.shards", lambda c, w: c.exact.shards, "divides Lockstep's batches, but data={data} makes its own. Leave it out."),
    ("trainer.accumulate_grad_batches", lambda c, w: c.trainer.accumulate_grad_batches == "auto",
     "divides Lockstep's batches, but data={data} makes its own. Type a number."),
    ("data.num_workers", lambda c, w: c.data.get("num_workers") == "auto",
     "is for Lockstep's dataloaders, but data={data} has its own. Type a number."),
]
# fmt: on


def broken(rules: Sequence[Rule], cfg: DictConfig, world: World) -> Iterator[tuple[str, str]]:
    """The keys that break a rule, each with what to say."""
    facts: dict[str, Any] = {group: title(cfg[group]) for group in ("task", "data", "strategy", "schedule")}
    facts |= {
        "precisions": ", ".join(spec_of(cfg).precisions or ()),
        "epochs": epochs_of(cfg),
        "accumulate": accumulated(cfg),
    }
    facts |= {
        "launcher": world.external or "more than one parent process",
        "fused": fused_problem(cfg),
        "best_mode": best_mode(cfg),
    }
    limits = {key: cfg.trainer[key] or 1 for key in ("limit_train_batches", "val_check_interval")}
    facts["whole"] = {key: accumulated(cfg) * max(1, int(count) // accumulated(cfg)) for key, count in limits.items()}
    for key, when, why in rules:
        if when(cfg, world):
            yield key, f"{key}={shown(plain(OmegaConf.select(cfg, key)))} {why.format(c=cfg, w=world, **facts)}"


def best_mode(cfg: DictConfig) -> str:
    modes = {cfg.task.get("monitor"): cfg.task.get("mode"), "val/loss": "min", None: cfg.checkpoint.mode}
    return str(modes.get(cfg.checkpoint.monitor, cfg.checkpoint.mode))


def without_effect(cfg: DictConfig, world: World) -> dict[str, str]:
    """Keys that do nothing under the strategy or on the device, each with what to say."""
    return dict(broken(WITHOUT_EFFECT, cfg, world))


def evaluation_problems(cfg: DictConfig, world: World) -> Iterator[str]:
    rules = [
        *STRATEGY,
        *WITHOUT_EFFECT,
        *(OWN_LOADERS if has_own_loaders(cfg) else LOADING),
        *(EXACT_ANYWHERE if cfg.exact.shards else ()),
    ]
    yield from (text for _, text in broken(rules, cfg, world))


def training_problems(cfg: DictConfig, world: World) -> Iterator[str]:
    yield from evaluation_problems(cfg, world)
    yield from (text for _, text in broken([*(EXACT if cfg.exact.shards else NOT_EXACT), *TRAINING], cfg, world))
    if not has_own_loaders(cfg):
        yield from division_problems(cfg, world, shipped_only=True)
    for name, node in cfg.callbacks.items():
        if "monitor" in node and is_shipped(node) and cfg.trainer.limit_val_batches == 0:
            yield f"callbacks=[{name}] has no effect with trainer.limit_val_batches=0: nothing is validated. Leave one of them out."
        if "monitor" in node and is_shipped(node) and node.monitor is None:
            yield f"callbacks=[{name}] needs a figure to watch, and callbacks.{name}.monitor is null. Type checkpoint.monitor=<a figure of the validation>."


def fused_problem(cfg: DictConfig) -> str | None:
    """Why the optimizer cannot be fused: the second half of a sentence that starts with `optim.fused=true`."""
    if cfg.exact.shards and accelerator_of(str(cfg.trainer.accelerator)) == "cpu":
        return None  # training/arithmetic.py
    if cfg.exact.shards and spec_of(cfg).is_sharded:
        return f"was not tried on shards of GPUs, so exact.shards={cfg.exact.shards} is not possible"
    if not str(cfg.optim.get("_target_")).endswith("SGD"):
        return None
    if spec_of(cfg).is_sharded:
        return f"has no kernel for SGD on the shards of strategy={cfg.strategy.name} (torch 2.13)"
    if any(node.get("unfreeze") for node in cfg.callbacks.values()):
        return "has no kernel for SGD where some parameters have no momentum yet, as with callbacks.freeze.unfreeze (torch 2.13)"
    return None


def epochs_of(cfg: DictConfig) -> float:
    """The most epochs of a run; infinite without a limit."""
    given, steps = cfg.trainer.max_epochs, cfg.trainer.max_steps
    if given is None:
        return 1 if steps == -1 else math.inf
    return math.inf if given == -1 else int(given)


def batches_of(cfg: DictConfig, samples: int) -> int:
    """The micro-batches of an epoch of so many training samples."""
    steps, limit = samples // (cfg.data.batch_size // repeats(cfg)), cfg.trainer.limit_train_batches
    batches = steps * accumulated(cfg)
    if limit is not None:
        batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    return int(batches)


def total_steps(cfg: DictConfig, samples: int) -> float:
    """The optimizer steps of a run; infinite without a limit."""
    total = epochs_of(cfg) * (batches_of(cfg, samples) // accumulated(cfg))
    return min(total, cfg.trainer.max_steps) if cfg.trainer.max_steps != -1 else total


def step_problems(cfg: DictConfig, samples: int) -> Iterator[str]:
    """Limits that a run of so many training samples per epoch does not reach."""
    trainer, every = cfg.trainer, cfg.trainer.val_check_interval
    batches = batches_of(cfg, samples)
    if not batches:
        return  # Lightning says that nothing is trained
    total = total_steps(cfg, samples)
    warmup = cfg.schedule.get("warmup_steps")
    if isinstance(warmup, int) and warmup >= total:
        yield f"schedule.warmup_steps={warmup} must be below the run's {total:g} steps. Type a smaller number."
    if trainer.min_epochs and trainer.min_epochs * (batches // accumulated(cfg)) > total:
        yield f"trainer.min_epochs={trainer.min_epochs} is more than the run's {total:g} steps allow. Type a smaller number."
    if trainer.min_steps and trainer.min_steps > total:
        yield f"trainer.min_steps={trainer.min_steps} is more than the run's {total:g} steps. Type a smaller number, or trainer.max_epochs=<more>."
    if isinstance(every, int) and every > batches and trainer.check_val_every_n_epoch is not None:
        yield (
            f"trainer.val_check_interval={every} is more than the {batches} batches of an epoch. Type a smaller number, "
            "or trainer.check_val_every_n_epoch=null to count over epochs."
        )


def division_problems(cfg: DictConfig, world: World, *, shipped_only: bool = False) -> Iterator[str]:
    """The global batch must divide into processes x micro-batches; evaluation batches need not."""
    batch, accumulate = cfg.data.batch_size, accumulated(cfg)
    whole, why = unit(cfg, shipped_only=shipped_only)
    shards = cfg.exact.shards
    parts = (shards or world.size * accumulate) * whole
    if batch % parts:
        low, high = batch // parts * parts, (batch // parts + 1) * parts
        choice = f"{low} or {high}" if low else str(high)
        into = f"{world.size} processes x {accumulate} accumulated micro-batches"
        into = f"{shards} logical ranks (exact.shards)" if shards else into
        cannot = f"cannot be divided among {into}"
        if whole > 1:
            cannot = f"cannot be divided among {into} of a multiple of {whole} samples ({why} within a micro-batch)"
        yield (
            f"data.batch_size={batch} is the global batch; it {cannot}. "
            f"Type data.batch_size={choice}, or change {'exact.shards' if shards else 'trainer.devices or trainer.accumulate_grad_batches'}."
        )


def division_of_whole_batch(cfg: DictConfig) -> Iterator[str]:
    """What divides the global batch of a task that compares its samples (`Task.between_samples`)."""
    why = f"task={title(cfg.task)} compares the samples of a batch (between_samples)"
    given = cfg.trainer.accumulate_grad_batches
    if cfg.exact.shards:
        yield f"exact.shards={cfg.exact.shards} divides the global batch into logical ranks, but {why}. Leave it out."
    elif given != 1:
        yield (
            f"trainer.accumulate_grad_batches={given} divides the global batch into micro-batches, but {why}. "
            "Type trainer.accumulate_grad_batches=1; if memory runs out, use more processes or a smaller data.batch_size."
        )


# --- What loggers need: packages, checkpoints to upload, and variables whose values a library would refuse late. Free of torch ---

WANDB = "lockstep.reporting.loggers.wandb"
WANDB_MODES = ["online", "offline", "disabled", "dryrun", "run", "shared"]  # of its client
# Each with the module that it imports, which is also the name of the extra, and the package to install.
OPTIONAL = {"lockstep.extras.mlflow_logger.mlflow": ("mlflow", "mlflow-skinny")}


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


# --- Whether the machine and its launcher have the devices and processes that a config asks for ---


def device_problems(cfg: DictConfig, world: World) -> Iterator[str]:
    given, there = shown(plain(cfg.trainer.devices)), available(world.accelerator)
    if world.accelerator == "cuda" and not there:
        yield f"trainer.accelerator={cfg.trainer.accelerator} needs a GPU, but {why_no_gpu() or 'this machine shows none'}. Type trainer.accelerator=cpu."
    elif there is not None and world.devices > there and not world.external:
        yield f"trainer.devices={given} asks for {world.devices} {world.accelerator} devices; this machine has {there}. Type trainer.devices={there}, or trainer.accelerator=cpu."
    ids = plain(cfg.trainer.devices)
    if isinstance(ids, list) and is_devices(ids) and world.accelerator == "cpu":
        yield f"trainer.devices={given} names GPUs by their ids, but a CPU has none. Type trainer.devices={world.devices}."
    elif isinstance(ids, list) and is_devices(ids) and there and max(ids) >= there:
        yield f"trainer.devices={given}: this machine has {there} {world.accelerator} devices, 0 to {there - 1}."
    if world.external and there is not None and there < world.devices:
        yield f"{world.external} started {world.devices} processes on this node, but this one sees {there} {world.accelerator} devices. Let each process see all of them: --gpus-per-node={world.devices}, not --gpus-per-task."
    if world.one_process and spec_of(cfg).splits_batches and world.external and world.devices * world.nodes > 1:
        yield f"strategy={world.strategy} is one process with all GPUs, but {world.external} started {world.devices * world.nodes}. Start one, or type strategy=ddp."
    if world.one_process and not spec_of(cfg).splits_batches and world.devices > 1:
        yield f"strategy={world.strategy} uses one device; trainer.devices={given} asks for {world.devices}. Type strategy=ddp, or trainer.devices=1."
    if spec_of(cfg).splits_batches and world.accelerator == "cpu" and world.devices > 1:
        yield f"strategy={world.strategy} splits batches over GPUs, but trainer.devices={given} on a CPU has none. Type strategy=ddp, or trainer.devices=1."
    if world.one_process and world.nodes > 1:
        yield f"strategy={world.strategy} is one process, but trainer.num_nodes={world.nodes} needs several. Type strategy=ddp, or trainer.num_nodes=1."
    if world.nodes > 1 and not world.external and not world.one_process:
        absent = [name for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK") if name not in os.environ]
        if absent or not cfg.run:
            yield (
                f"trainer.num_nodes={world.nodes} without torchrun or SLURM needs MASTER_ADDR, MASTER_PORT and NODE_RANK in the "
                "environment of each node, and run=<name>. Type torchrun --nnodes=... train.py, or trainer.num_nodes=1."
            )
    if not world.external and (node := number(os.environ, "NODE_RANK", default=0)) >= max(1, world.nodes):
        yield (
            f"NODE_RANK={node} is in the environment, but trainer.num_nodes={world.nodes} starts with node 0. If it is left over "
            "from another job, type unset NODE_RANK; otherwise trainer.num_nodes=<how many there are>."
        )
    if world.external and cfg.trainer.devices not in ("auto", -1, world.devices):
        yield f"trainer.devices={given} contradicts {world.external}, which started {world.devices} processes on this node. Leave trainer.devices out."
    if world.external and cfg.seed is None and cfg.resume is None:
        yield f"seed=null would be drawn separately by each process that {world.external} started. Type seed=<number>."
    if world.external and cfg.trainer.num_nodes not in (1, world.nodes):
        yield f"trainer.num_nodes={cfg.trainer.num_nodes} contradicts {world.external}, which started {world.nodes} nodes. Leave trainer.num_nodes out."
