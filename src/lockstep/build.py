"""From a config node to an object, one function a stage. The only file that joins the packages."""

from lockstep.compat import torchmetrics_imports  # noqa: F401  # before Lightning

# isort: split
import os
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from hydra.errors import InstantiationException
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler
from omegaconf import DictConfig, OmegaConf

from lockstep import callbacks, strategies
from lockstep.checkpoints import saving
from lockstep.checkpoints.content import load_weights
from lockstep.checkpoints.io import AtomicCheckpointIO
from lockstep.compat.sigterm_broadcast import without_sigterm_broadcast
from lockstep.config.checks import fused_problem
from lockstep.config.identity import run_dir
from lockstep.config.instantiate import create, network
from lockstep.data.datamodule import DataModule
from lockstep.data.prepare import FORMATS, prepare
from lockstep.errors import UserError
from lockstep.machine.hardware import keep_freed_memory
from lockstep.machine.world import World, gpu_count, threads
from lockstep.models.from_timm import normalisation
from lockstep.reporting import console
from lockstep.reporting.loggers import CutAtResume, MetricsCsv
from lockstep.training import memory
from lockstep.training.module import Classification
from lockstep.training.profiler import NoProfiler

PROFILERS: dict[str, type[Profiler]] = {
    "simple": SimpleProfiler,
    "advanced": AdvancedProfiler,
    "pytorch": PyTorchProfiler,
}


def plain(cfg: DictConfig) -> dict[str, Any]:
    """A node as plain values, its references resolved."""
    content = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def process(cfg: DictConfig, world: World) -> None:
    """What holds for this process as a whole: memory, threads, arithmetic."""
    if world.accelerator == "cpu":
        if world.strategy != "fsdp":  # whoever shards wants to save memory, and what is gathered leaves it in pieces
            keep_freed_memory()
        if number := threads(world):
            torch.set_num_threads(number)
    if not gpu_count():
        # Lightning lets torch ask the driver whether there are GPUs, which optimizers want to know at each step: 0.1 ms
        # where there is no driver.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = bool(cfg.get("tf32"))


def seed(cfg: DictConfig) -> None:
    """The same on every rank: networks start equal. What differs by rank comes from the step's own seed."""
    pl.seed_everything(cfg.seed, workers=True, verbose=False)


def data(cfg: DictConfig) -> DataModule:
    form, own = FORMATS[cfg.data.name], None
    if "model" in (cfg.data.mean, cfg.data.std):
        own = normalisation(cfg.model.name)
    if own and len(own[0]) != len(form.mean):  # pretrained on colours, used on grey
        own = None
    mean, std = own or (form.mean, form.std)
    return DataModule(
        prepare(cfg.data),
        batch_size=cfg.data.batch_size,
        eval_batch_size=cfg.data.eval_batch_size,
        val_fraction=cfg.data.val_fraction,
        limit_train=cfg.data.limit_train,
        num_workers=cfg.data.num_workers,
        prefetch_factor=cfg.data.get("prefetch_factor"),
        persistent_workers=cfg.data.get("persistent_workers"),
        on_device=cfg.data.get("on_device", False),  # runs of before this key have none
        seed=cfg.seed,
        image_size=cfg.data.image_size,
        mean=mean if cfg.data.mean == "model" else list(cfg.data.mean),
        std=std if cfg.data.std == "model" else list(cfg.data.std),
        classes=form.classes,
        channels_last=cfg.channels_last,
        random_shift=cfg.data.random_shift,
        random_flip=cfg.data.random_flip,
    )


def optimizer(cfg: DictConfig) -> Any:
    """What makes the optimizer of a network's parameters. `fused: auto` is decided here, for the strategy of this process."""
    if cfg.optim.get("fused") != "auto":
        return create(cfg.optim)
    return create(cfg.optim, fused=fused_problem(cfg) is None)


def task(cfg: DictConfig, data: DataModule, weights: str | None = None) -> Classification:
    """The task with a new network, or with the weights of the checkpoint `weights`."""
    net = network(plain(cfg.model), data.about, with_weights=weights is None)
    if weights:
        load_weights(net, Path(weights))
    return Classification(
        net,
        optimizer=optimizer(cfg),
        schedule=create(cfg.schedule),
        parallelize=partial(
            strategies.parallelize,
            sync_batchnorm=cfg.trainer.sync_batchnorm,
            channels_last=cfg.channels_last,
            compile=cfg.compile,
        ),
        config=plain(cfg),
    )


def loggers(cfg: DictConfig) -> list[Logger]:
    """metrics.csv first, whatever else is chosen."""
    place = {"run_dir": run_dir(cfg), "run": cfg.run}
    return [MetricsCsv(**place), *(create(node, **place) for name, node in cfg.logger.items() if name != "csv")]


def trainer(cfg: DictConfig, world: World, data: DataModule) -> pl.Trainer:
    """The Trainer of a training run.

    Raises:
        UserError: Lightning refuses a combination of arguments.
    """
    own: list[pl.Callback] = [callbacks.StepSeed(cfg.seed), callbacks.Plan(cfg, data), CutAtResume(), saving.Position()]
    if cfg.trainer.enable_progress_bar:
        own.append(callbacks.Progress())
    save = None
    if cfg.trainer.enable_checkpointing:
        folder = run_dir(cfg) / "checkpoints"
        if cfg.trainer.limit_val_batches != 0:
            own.append(saving.best_checkpoints(cfg, folder))
        own.append(last := saving.last_checkpoint(cfg, folder))
        save = last.save_and_wait
    own.append(callbacks.Preemption(save))
    return lightning_trainer(cfg, world, callbacks=[*map(create, cfg.callbacks.values()), *own], logger=loggers(cfg))


def evaluator(cfg: DictConfig, world: World) -> pl.Trainer:
    """A Trainer that tests only: no logger, the strategy and precision of the config."""
    return lightning_trainer(
        cfg, world, callbacks=[callbacks.Preemption(None)], logger=False, enable_checkpointing=False, profiler=None
    )


def lightning_trainer(cfg: DictConfig, world: World, **parts: Any) -> pl.Trainer:
    given = plain(cfg.trainer)
    ids = isinstance(given["devices"], list) or "," in str(given["devices"])  # which ones; otherwise, how many
    devices = given["devices"] if ids else world.devices
    given |= {"accelerator": world.accelerator, "devices": devices, "num_nodes": world.nodes}
    given |= parts
    profiler = PROFILERS.get(given["profiler"])
    given["profiler"] = profiler(dirpath=run_dir(cfg), filename="profile") if profiler else NoProfiler()
    given |= {"sync_batchnorm": False, "enable_progress_bar": False}  # strategies/parallelize.py, callbacks/progress.py
    # Processes that Lockstep started are described by LOCAL_RANK and its like, whatever else the environment says.
    # Under SLURM, resuming is ours: Lightning's own checkpoint of a requeued job lies elsewhere and is taken first.
    slurm = SLURMEnvironment(auto_requeue=False) if world.external == "slurm" else None
    environment = slurm if world.external else LightningEnvironment()
    strategy = create(cfg.strategy, environment=environment, sharded_checkpoints=cfg.checkpoint.sharded)
    plugins: list[Any] = [AtomicCheckpointIO(background=cfg.checkpoint.get("background", True))]
    if environment is not None and getattr(strategy, "cluster_environment", None) is None:
        plugins.append(environment)  # single and dp; otherwise Lightning takes a job of one task for SLURM's to requeue
    try:
        made = pl.Trainer(
            **given,
            strategy=strategy,
            plugins=plugins,
            use_distributed_sampler=False,
            default_root_dir=run_dir(cfg),
        )
    except (ValueError, TypeError, MisconfigurationException) as e:
        raise UserError(f"trainer: {e}") from e
    without_sigterm_broadcast(made)
    return made


def quiet(world: World) -> None:
    console.quiet(world.rank)


def fit(cfg: DictConfig, trainer: pl.Trainer, task: Classification, data: DataModule) -> str | None:
    """Trains; returns the checkpoint to test.

    Raises:
        UserError: torch or Lightning refuses an argument before the first batch.
        OutOfMemory: memory ran out, in training or in a validation.
    """
    try:
        with memory.explained(cfg, trainer, task, data):
            trainer.fit(task, data, ckpt_path=cfg.resume, weights_only=True)
    except UserError:
        raise
    except (ValueError, TypeError, InstantiationException, MisconfigurationException) as e:
        if trainer.fit_loop.epoch_loop.batch_progress.total.ready:
            raise
        raise UserError(" ".join(str(e).split())) from e
    return saving.best_checkpoint(trainer)


def evaluate(cfg: DictConfig, world: World, data: DataModule, tested: str | Classification) -> dict[str, float]:
    """Figures of a checkpoint, or of a task as it is. The same code after training and in eval.py."""
    subject = task(cfg, data, weights=tested) if isinstance(tested, str) else tested
    trainer = evaluator(cfg, world)
    with memory.explained(cfg, trainer, subject, data):
        (figures,) = trainer.test(subject, data, verbose=False, weights_only=True)
    return {**figures, "test/count": int(figures["test/count"])}


def validate(cfg: DictConfig, world: World, data: DataModule, task: Classification) -> dict[str, float]:
    """Validation figures for a run that ended before its first validation; none where validation is turned off."""
    if cfg.trainer.limit_val_batches == 0:
        return {}
    trainer = evaluator(cfg, world)
    with memory.explained(cfg, trainer, task, data):
        (figures,) = trainer.validate(task, data, verbose=False, weights_only=True)
    return {name: value for name, value in figures.items() if name != "val/count"}
