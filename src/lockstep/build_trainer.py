"""The Lightning Trainer of a config: loggers, callbacks, strategy, plugins. The second half of build.py."""

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler

from lockstep.callbacks import step_seed, stopping, summary
from lockstep.callbacks.hang_detector import HangDetector
from lockstep.callbacks.module_hooks import ModuleHooks
from lockstep.callbacks.weights import Digests
from lockstep.checkpoints import saving
from lockstep.checkpoints.finding import read_outline, step_of
from lockstep.compat.lightning import LogsNothing, StepsFromOne, log_by, without_sigterm_handler
from lockstep.config.instantiate import create_object
from lockstep.config.run_config import Component
from lockstep.config.settings import SPARSEST, Settings, log_interval
from lockstep.config.targets import matching_kwargs
from lockstep.data.parts import Targets
from lockstep.errors import UserError, raise_problems
from lockstep.machine import process
from lockstep.reporting.loggers import MetricsCsv
from lockstep.strategies.base import DividedBatches
from lockstep.training.arithmetic import ExactClipping, LogicalRanks, StepArithmetic
from lockstep.training.batches import Loaders
from lockstep.training.module import Means
from lockstep.training.optim import add_base

PROFILERS: dict[str, type[Profiler]] = {
    "simple": SimpleProfiler,
    "advanced": AdvancedProfiler,
    "pytorch": PyTorchProfiler,
}


def loggers(settings: Settings) -> list[Logger]:
    """All loggers, metrics.csv last, so `self.logger` is the first chosen one. A logger gets `run_dir`, `run`, `runs_dir` and `purge_step` if its
    signature names them."""
    cfg, folder = settings.cfg, settings.folder.path
    purge_step = step_of(Path(cfg.resume)) + 1 if cfg.resume else None
    offered = {"run_dir": folder, "run": cfg.run, "runs_dir": Path(cfg.runs_dir), "purge_step": purge_step}
    made: list[Logger] = []
    for name, each in cfg.logger.items():
        if name != "csv":
            given = matching_kwargs(each.target, offered) | labels(settings, each)
            made.append(create_object(each, f"logger.{name}", **given))
    return [*made, MetricsCsv(folder)]


def labels(settings: Settings, logger: Component) -> dict[str, Any]:
    """The `group` (the name of the sweep) and `tags` of a logger with these keys; the tag `auto` stands for model, data and strategy."""
    values: dict[str, Any] = {}
    if "group" in logger and logger.get("group") is None:
        values["group"] = str(settings.cfg.run).rpartition("/")[0] or None
    if "auto" in (tags := list(logger.get("tags") or ())):
        place = tags.index("auto")
        tags[place : place + 1] = [settings.model_title, settings.cfg.data.title, settings.cfg.strategy.title]
        values["tags"] = list(dict.fromkeys(tags))
    return values


def module_hooks(settings: Settings, loaders: Loaders, loggers: Sequence[Logger]) -> ModuleHooks:
    """First in the list, so it reports errors first. `loggers`: provide `self.logger` in an evaluation."""
    return ModuleHooks(
        loaders=loaders,
        loggers=list(loggers) or [DummyLogger()],
        monitor=settings.cfg.checkpoint.monitor,
        log_interval=log_interval if settings.cfg.trainer.log_every_n_steps == "auto" else None,
    )


def random_numbers(settings: Settings) -> step_seed.StepSeed:
    by_row = not arithmetic(settings).same_bits and not settings.cfg.compile
    return step_seed.StepSeed(settings.seed, masks_by_row=by_row)


def arithmetic(settings: Settings) -> StepArithmetic:
    ranks = settings.cfg.exact.logical_ranks
    return LogicalRanks(ranks) if ranks else StepArithmetic()


def module_problems(settings: Settings, loaders: Loaders) -> Iterator[str]:
    """What the module and the data define that would be ignored or is not supported."""
    cfg, module = settings.cfg, loaders.module
    name = type(module).__name__
    if arithmetic(settings).same_bits and not module.automatic_optimization:
        yield f"exact.logical_ranks computes each step several times, but {name} uses manual optimization, whose steps change the weights. Remove it."
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        yield f"{name}.training_step takes dataloader_iter, so Lockstep cannot track its batches. Change it to take batch and batch_idx."
    if (monitor := cfg.checkpoint.monitor) and not loaders.evaluates("validation", "val"):
        yield f"checkpoint.monitor={monitor} has no effect: {name} or the data has no validation. Set task.monitor=null."


def small_parts(settings: Settings, data: Any) -> Iterator[str]:
    """Evaluations that cannot be divided: otherwise a run would learn it at its end."""
    count = max(settings.world.size, settings.cfg.exact.logical_ranks or 1)
    for part, split in data.splits.items() if isinstance(getattr(data, "targets", None), Targets) else ():
        if part != "train" and split.count < count:
            yield f"the {part} part has {split.count} {data.unit}, but there are {count} processes or logical ranks. Add samples, or use fewer of them."


def trainer(settings: Settings, module: pl.LightningModule, data: Any, *more: pl.Callback) -> pl.Trainer:
    """The Lightning Trainer of a training run: `trainer`, `strategy`, `callbacks`, `logger`, `more` callbacks, and Lockstep's own.

    Raises:
        UserError: Lightning rejects a combination of arguments, or the checkpoint to resume has no position.
    """
    loaders, model = Loaders(data, module), settings.network_title(module)
    settings = settings.as_built()
    raise_problems([*module_problems(settings, loaders), *small_parts(settings, data)])
    cfg, folder = settings.cfg, settings.folder
    if cfg.resume:
        read_outline(Path(cfg.resume)).require_position("plateau", "window", *loaders.position)
    data_info = loaders.data_info
    shared = {
        "is the run": cfg.run,
        "has the seed": cfg.seed,
        "computes in precision": cfg.trainer.precision,
        "starts from": cfg.resume or cfg.init_from or "new weights",
        "has data with SHA-256": data_info["data/sha256"],
    }
    own: list[pl.Callback] = [
        stopping.RankAgreement(shared),
        summary.RunSummary(loaders, data_info, model, settings),
        *more,
    ]
    if cfg.trainer.enable_progress_bar:
        own.append(summary.Progress(cfg.checkpoint.monitor))
    if cfg.exact.digests:
        own.append(Digests(folder.path))
    save, begin = None, list[Callable[[pl.Trainer], None]]()  # `begin`: what happens between two steps
    if cfg.trainer.enable_checkpointing:
        if cfg.trainer.limit_val_batches != 0 and cfg.checkpoint.monitor:
            named = {key: getattr(cfg.checkpoint, key) for key in ("monitor", "mode", "save_top_k")}
            own.append(saving.ModelCheckpoint(dirpath=folder.checkpoints, **named))
        own.append(
            last := saving.LastCheckpoint(folder.checkpoints / "last.ckpt", cfg.checkpoint.every_n_steps, cfg.resume)
        )
        save = last.save_and_wait
        begin.append(last.begin_step)
    own.append(preemption := stopping.Preemption(save))
    begin.append(preemption.begin_step)
    if cfg.trainer.max_time:
        own.append(stopping.Timer(cfg.trainer.max_time))
    chosen = [create_object(each, f"callbacks.{name}") for name, each in cfg.callbacks.items()]
    logs = loggers(settings)
    # before the chosen callbacks, which may log, draw or count when a batch begins
    position = saving.Position(cfg, settings.made_for, begin)
    first = [module_hooks(settings, loaders, logs), position, random_numbers(settings)]
    every = [*first, *chosen, *own]
    return lightning_trainer(settings, callbacks=every, logger=logs)


def evaluator(settings: Settings, loaders: Loaders, *more: pl.Callback, loggers: Sequence[Logger] = ()) -> pl.Trainer:
    """A Trainer that tests or predicts only, with the strategy and precision of the config. It logs nothing itself."""
    shown = [summary.Progress()] if settings.cfg.trainer.enable_progress_bar else []
    # Preemption comes last: it may raise a different error while callbacks clean up after an error.
    own = [random_numbers(settings), *shown, *more, stopping.Preemption(None)]
    every = [module_hooks(settings, loaders, loggers), *own]
    made = lightning_trainer(settings, callbacks=every, logger=False, enable_checkpointing=False, profiler=None)
    log_by(made, LogsNothing)
    return made


class StartedProcesses(LightningEnvironment):
    """The processes that Lockstep started."""

    def teardown(self) -> None:
        """Keeps WORLD_SIZE, which Lightning removes at the end of each stage: data sets read it."""


def lightning_trainer(settings: Settings, **parts: Any) -> pl.Trainer:
    cfg, world, folder = settings.cfg, settings.world, settings.folder.path
    ways = arithmetic(settings)
    given = matching_kwargs("lightning.pytorch.Trainer", vars(cfg.trainer))  # a custom key is for a custom callback
    if not isinstance(given["devices"], list):  # a number, not which devices
        given["devices"] = world.devices
    given |= {"accelerator": world.accelerator, "num_nodes": world.nodes}
    given |= ways.trainer_arguments(given, world) | parts
    if given["log_every_n_steps"] == "auto":
        given["log_every_n_steps"] = SPARSEST  # callbacks/module_hooks.py decides once the loaders are there
    chosen = cfg.strategy
    if "timeout_s" in chosen and process.debug_rank is not None:
        chosen = chosen.replace(timeout_s=process.DEBUG_TIMEOUT_S)
    elif timeout_s := chosen.get("timeout_s"):  # first, so a process that hangs in a different callback falls behind
        given["callbacks"] = [HangDetector(timeout_s), *given["callbacks"]]
    if settings.spec.is_sharded:  # torch 2.11 to 2.13 cannot gather the shards of one process in inference mode
        given["inference_mode"] = False
    profiler = PROFILERS.get(given["profiler"])
    given["profiler"] = profiler(dirpath=folder, filename="profile") if profiler else None
    # strategies/base.py, callbacks/summary.py, callbacks/stopping.py
    given |= {"sync_batchnorm": False, "enable_progress_bar": False, "max_time": None}
    # For processes that Lockstep started, only LOCAL_RANK and the like matter, not the rest of the environment.
    # Under SLURM Lockstep resumes: Lightning would prefer its own checkpoint of a requeued job, which is in a different folder.
    environment: ClusterEnvironment | None = None if world.external else StartedProcesses()
    if world.external == "slurm":  # Lightning needs this variable, which `srun --ntasks` does not set
        os.environ["SLURM_NTASKS_PER_NODE"] = str(world.devices)
        environment = SLURMEnvironment(auto_requeue=False)
    offered = {"sharded_checkpoints": cfg.checkpoint.sharded}
    strategy = create_object(chosen, "strategy", **matching_kwargs(chosen.target, offered))
    if not isinstance(strategy, DividedBatches):
        raise UserError(
            f"strategy._target_={chosen.target} does not divide batches: subclass one of lockstep.strategies."
        )
    strategy.seed, strategy.arithmetic, strategy.means = settings.seed, ways, Means()
    plugins: list[Any] = [saving.AtomicCheckpointIO(folder, background=cfg.checkpoint.background)]
    if environment is not None:
        plugins.append(environment)  # otherwise Lightning would requeue a SLURM job of one task
    bars = [callback for callback in given["callbacks"] if isinstance(callback, ProgressBar)]
    given["callbacks"] = [callback for callback in given["callbacks"] if callback not in bars]
    try:
        made = pl.Trainer(
            **given,
            strategy=strategy,
            plugins=plugins,
            use_distributed_sampler=False,  # the strategy divides batches
            default_root_dir=folder,
        )
    except (ValueError, TypeError, RuntimeError, MisconfigurationException) as e:
        raise UserError(f"trainer: {e}") from e
    made.callbacks += bars  # type: ignore[attr-defined]  # Lightning rejects them; callbacks/module_hooks.py reports them
    add_base(made.precision_plugin, ExactClipping, arithmetic=ways)
    without_sigterm_handler(made)
    log_by(made, StepsFromOne)
    return made
