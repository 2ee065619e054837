"""Rules between the keys of a config: its length, its devices, its components, and what `exact.shards` excludes. Free of torch."""

import importlib.util
import math
import os
from collections.abc import Iterator, Mapping, Sized
from typing import Any

from omegaconf import DictConfig

from lockstep.config.batches import accumulated, repeats
from lockstep.config.identity import title
from lockstep.config.schema import is_devices
from lockstep.config.targets import is_shipped
from lockstep.config.words import plain, shown
from lockstep.errors import did_you_mean
from lockstep.machine.hardware import why_no_gpu
from lockstep.machine.world import World, available, number, spec_of

# --- Rules between the keys that say how long a run lasts, and how often it validates. Free of torch ---


def epochs_of(cfg: DictConfig) -> float:
    """The most epochs of a run; infinite without a limit."""
    given, steps = cfg.trainer.max_epochs, cfg.trainer.max_steps
    if given is None:
        return 1 if steps == -1 else math.inf
    return math.inf if given == -1 else int(given)


def length_problems(cfg: DictConfig, _: World) -> Iterator[str]:
    trainer, epochs = cfg.trainer, epochs_of(cfg)
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


# --- What cannot have the same bits on any number of processes (`exact.shards`). Free of torch ---

# Keys that only torch's DistributedDataParallel and all-reduce read, and their usual values.
OF_DDP = {"bucket_cap_mb": 25, "gradient_as_bucket_view": True, "static_graph": False, "find_unused_parameters": False}
COUNTED = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "val_check_interval")  # in batches
HALF = ("bf16-true", "16-true")


def process_problems(cfg: DictConfig, world: World) -> Iterator[str]:
    """Of training and evaluation: where figures would depend on the processes."""
    if (shards := cfg.exact.shards) is None:
        return
    exact = f"exact.shards={shards}"
    if shards % world.size:
        yield (
            f"{exact} cannot be divided among {world.size} processes. Start 1, 2, 4 or another power of two up to {shards}. A run keeps its "
            "exact.shards; an evaluation with exact.shards=null has figures that are equal to rounding."
        )
    if not is_shipped(cfg.strategy):
        yield f"{exact} needs strategy=single, ddp or fsdp: strategy={title(cfg.strategy)} adds gradients in an order of its own."
    if spec_of(cfg.strategy).splits_batches:
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


def exact_problems(cfg: DictConfig, world: World) -> Iterator[str]:
    """Of training."""
    if (shards := cfg.exact.shards) is None:
        for key, usual in (("threads", 1), ("digests", False)):
            if cfg.exact[key] != usual:
                yield f"exact.{key}={shown(cfg.exact[key])} has no effect without exact.shards. Type exact.shards=8 as well, or leave it out."
        return
    exact, trainer, strategy = f"exact.shards={shards}", cfg.trainer, cfg.strategy
    yield from process_problems(cfg, world)
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
    if spec_of(cfg.strategy).is_sharded and trainer.precision in HALF:
        yield f"trainer.precision={trainer.precision} rounds the last elements of a shard in another way, so {exact} is not possible with strategy={world.strategy}. Type trainer.precision=bf16-mixed."


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
            f"WANDB_MODE={mode} in the environment is not possible; it takes one of {', '.join(WANDB_MODES)}{did_you_mean(mode, WANDB_MODES)}. "
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
    if (
        world.one_process
        and spec_of(cfg.strategy).splits_batches
        and world.external
        and world.devices * world.nodes > 1
    ):
        yield f"strategy={world.strategy} is one process with all GPUs, but {world.external} started {world.devices * world.nodes}. Start one, or type strategy=ddp."
    if world.one_process and not spec_of(cfg.strategy).splits_batches and world.devices > 1:
        yield f"strategy={world.strategy} uses one device; trainer.devices={given} asks for {world.devices}. Type strategy=ddp, or trainer.devices=1."
    if spec_of(cfg.strategy).splits_batches and world.accelerator == "cpu" and world.devices > 1:
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


# --- Checks that apply only to the classes that come with Lockstep. Free of torch ---

TRAINED = ("train/loss", "train/lr")  # what the training of every task logs
MEASURED = ("_per_s", "_memory_gib")  # endings of figures that depend on the data's unit or on the device


def task_problems(cfg: DictConfig, _: object) -> Iterator[str]:
    """Checks shipped tasks; build.py checks other tasks, once their class is imported."""
    if not is_shipped(cfg.task):
        if cfg.checkpoint.monitor and cfg.checkpoint.mode not in ("max", "min"):
            yield f"checkpoint.mode={cfg.checkpoint.mode} is not possible; it takes one of max, min. Type checkpoint.mode=min."
        return
    for name in {"loss", "count"} & set(cfg.task.get("metrics") or ()):
        yield f"task.metrics.{name}: every task already logs {name}. Type another name."
    yield from missing_groups(cfg)
    if cfg.task.get("traits"):
        added = cfg.task.get("metrics") or ()
        figures = [*cfg.task.traits.figures, *(f"{name}{rest}" for name in added for rest in ("", "/*"))]
        yield from monitor_problems(cfg, figures)
    elif cfg.checkpoint.monitor and not cfg.checkpoint.monitor.startswith("val/"):
        yield f"checkpoint.monitor={cfg.checkpoint.monitor} is not possible; it takes a validation figure, val/<name>. Type for example checkpoint.monitor=val/loss."


def monitors(cfg: DictConfig) -> dict[str, str]:
    """The keys that name a figure to watch, with their figures. A callback that watches the checkpoints' figure is left out."""
    typed = "task.monitor" if cfg.task.get("monitor") == cfg.checkpoint.monitor else "checkpoint.monitor"
    watching = {f"callbacks.{name}.monitor": node.get("monitor") for name, node in cfg.callbacks.items()}
    others = {key: str(name) for key, name in watching.items() if name not in (None, cfg.checkpoint.monitor)}
    return ({typed: str(cfg.checkpoint.monitor)} if cfg.checkpoint.monitor else {}) | others


def monitor_problems(cfg: DictConfig, figures: list[str]) -> Iterator[str]:
    """Monitors that nothing logs. The figures of callbacks that are not Lockstep's are known only when the run logs them."""
    own = all(str(node.get("_target_")).startswith("lockstep.") for node in cfg.callbacks.values())
    for key, monitor in monitors(cfg).items():
        of_callback = key.startswith("callbacks.")
        names = [*(f"val/{figure}" for figure in ("loss", *figures)), *(TRAINED if of_callback else ())]
        known = any(monitor == name or (name.endswith("/*") and monitor.startswith(name[:-1])) for name in names)
        later = of_callback and not monitor.startswith("val/") and (not own or monitor.endswith(MEASURED))
        if not known and not later:
            yield f"{key}={monitor}: the {'run' if of_callback else 'validation'} logs {', '.join(names)}{did_you_mean(monitor, names)}. Type one of them, or add it to task.metrics."


def about_problems(cfg: DictConfig, about: Mapping[str, Any]) -> Iterator[str]:
    """Whether the data has what a shipped task needs, by the task's traits."""
    traits = cfg.task.get("traits") if is_shipped(cfg.task) else None
    if traits is None:
        return
    there = [k for k, v in about.items() if v is not None and not (isinstance(v, Sized) and len(v) == 0)]
    if missing := [name for name in traits.needs if name not in there]:
        yield (
            f"task={title(cfg.task)} needs {', '.join(missing)} in the `about` of the data; data={title(cfg.data)} has "
            f"{', '.join(there) or 'nothing'}. Choose another task or data, or add it to the `about` of your data set."
        )
    for name, of in traits.one_each.items():
        given, count = plain(cfg.task.get(name)), len(about[of]) if of in there else 0
        if isinstance(given, list) and len(given) != count:
            yield f"task.{name} has {len(given)} numbers; the data has {count} {of}. Give one for each."


def missing_groups(cfg: DictConfig) -> Iterator[str]:
    """Groups that every Task needs but that are `none`."""
    for group in ("model", "optim", "schedule"):
        if not cfg[group]:
            yield f"{group}=none is for a LightningModule with its own {group}; task={title(cfg.task)} needs one. Choose it with {group}=<name>."
