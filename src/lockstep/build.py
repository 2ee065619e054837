"""From config nodes to objects, one function per stage. Only this file, build_trainer.py and extras/prediction.py join the packages."""

from lockstep.compat import torchmetrics_imports  # noqa: F401  # before Lightning

# isort: split
import inspect
import os
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from hydra.errors import InstantiationException
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from torchmetrics import Metric

from lockstep import strategies
from lockstep.augment.augmentation import Augmentation
from lockstep.build_trainer import evaluator, trainer
from lockstep.checkpoints import saving
from lockstep.checkpoints.content import load_into, load_module_weights, network_of, plain, read
from lockstep.config import batches
from lockstep.config.components import missing_groups, monitor_problems, optimizer_node
from lockstep.config.identity import title
from lockstep.config.instantiate import (
    ENGINE,
    ENGINE_DATA,
    create,
    create_data,
    has_own_loaders,
    operations,
    to_plain,
    with_numbers,
)
from lockstep.config.project import of_users_code
from lockstep.config.targets import accepted
from lockstep.config.words import shown
from lockstep.data.datamodule import DataModule
from lockstep.data.loaders import warn_of_small_shared_memory
from lockstep.errors import UserError, raise_problems
from lockstep.machine.hardware import keep_freed_memory
from lockstep.machine.world import World, gpu_count, spec_of, threads, world_of
from lockstep.models.network import network
from lockstep.reporting import console
from lockstep.tasks import Task
from lockstep.training import between_samples, dry_run, foreign, memory, optim
from lockstep.training.module import TaskModule
from lockstep.training.panels import TestPanels

__all__ = ["data", "evaluate", "fit", "module", "process", "rehearse", "seed", "trainer", "with_numbers"]
before_exact: dict[str, int] = {}  # what the next job of a sweep in this process has again
REFUSALS = (ValueError, TypeError, InstantiationException, MisconfigurationException)


def process(cfg: DictConfig, world: World) -> None:
    """Settings of the whole process: what it prints, memory, threads, arithmetic."""
    console.quiet(world.rank)
    if world.accelerator == "cpu":
        if not spec_of(cfg).is_sharded:  # Not when sharding: gathered blocks fragment the heap.
            keep_freed_memory()
        if number := threads(world) or before_exact.pop("threads", None):
            torch.set_num_threads(number)
        if cfg.exact.shards:
            before_exact["threads"] = torch.get_num_threads()
            torch.set_num_threads(cfg.exact.threads)
    if not gpu_count():
        # Optimizers ask at each step whether there are GPUs. Lightning makes torch ask the driver, which takes 0.1 ms if
        # there is none.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = bool(cfg.tf32)


def seed(cfg: DictConfig) -> None:
    """The same seed on every rank, so networks start equal. callbacks/step_seed.py seeds what differs by rank."""
    pl.seed_everything(cfg.seed, workers=True, verbose=False)


def data(cfg: DictConfig) -> pl.LightningDataModule:
    if has_own_loaders(cfg):
        warn_of_small_shared_memory()
        return create(cfg.data, "data")
    node, dataset = to_plain(cfg.data), create_data(cfg)
    dataset.prepare()
    given = {key: node[key] for key in ENGINE_DATA if key in node}
    augment = Augmentation(operations(cfg)) if cfg.get("augment") or given.get("repeats", 1) > 1 else None
    given = {"eval_batch_size": node["batch_size"], **given, "shards": cfg.exact.shards}
    made = DataModule(dataset, seed=cfg.seed, augment=augment, **given)
    made.about = plain(made.about, "about")
    return made


def optimizer(cfg: DictConfig) -> dict[str, Any]:
    """Two functions: from parameters to their optimizer, and from a network to the parameters, in groups if a key asks for it."""
    node = optimizer_node(cfg)
    made: dict[str, Any] = {"optimizer": create(node, "optim")}
    takes = inspect.signature(made["optimizer"]).parameters
    if cfg.exact.shards:
        if spec_of(cfg).is_sharded and "fused" not in takes:  # torch has fused kernels for those that work so
            raise UserError(
                f"optim: {node['_target_']} is not known to work element by element, so exact.shards={cfg.exact.shards} is not possible "
                f"with strategy={cfg.strategy.name}. Name another optimizer, or type strategy=ddp."
            )
        if "foreach" in takes:  # the first step, which is not fused, computes element by element
            made["optimizer"] = partial(made["optimizer"], foreach=False)
    own = set(ENGINE["optim"]) - takes.keys()
    if asked := {key: value for key, value in node.items() if key in own and value is not None and value is not False}:
        raise_problems(
            f"optim.{key}={shown(value)} has no effect: {node['_target_']} groups the parameters itself. Leave it out."
            for key, value in asked.items()
            if "named_parameters" in takes
        )
        rates = {key: node[key] for key in ("lr", "weight_decay") if key in node}
        made["parameters"] = partial(optim.groups, **rates, **asked)
    return made


def module(cfg: DictConfig, data: pl.LightningDataModule, weights: str | None = None) -> pl.LightningModule:
    """The task's LightningModule with a new network, or with the weights of the checkpoint `weights`.

    Raises:
        UserError: network, task and data do not fit together.
    """
    if foreign.is_foreign(cfg):
        made = foreign.create_module(cfg)
        raise_problems(foreign.problems(cfg, made, data))
        if weights:
            load_module_weights(made, Path(weights))
        return made
    raise_problems(missing_groups(cfg))
    goal: Task = create(cfg.task, "task")
    if not isinstance(data, DataModule):
        raise UserError(
            f"task={title(cfg.task)} needs a data set that describes itself; data={title(cfg.data)} is a LightningDataModule with its own dataloaders. "
            "Write a lockstep.data.DataSet, or use a LightningModule as the task."
        )
    goal.bind(data.about)
    raise_problems(between_samples.problems(cfg, world_of(cfg), data, goal))
    if own := ", ".join(goal.state_dict()):
        raise UserError(
            f"task={title(cfg.task)} has weights of its own ({own}), and checkpoints hold only the network. Move them into the "
            "network; register a buffer that never changes with persistent=False."
        )
    offered = plain({**data.dataset.network_arguments(), **goal.network_arguments()}, "network_arguments()")
    net = network(to_plain(cfg.model), offered, with_weights=weights is None)
    if weights:
        load_into(net.state_dict(), network_of(read(Path(weights))), weights)
    made = TaskModule(
        net,
        goal,
        **optimizer(cfg),
        schedule=create(cfg.schedule, "schedule"),
        parallelize=partial(
            strategies.parallelize,
            sync_batchnorm=cfg.trainer.sync_batchnorm,
            # strategy=fsdp cannot have it, and the other format rounds differently
            channels_last=cfg.channels_last and not cfg.exact.shards,
            compile=cfg.compile,
        ),
        metrics=metrics(cfg, goal),
        network_arguments=offered,
        shards=cfg.exact.shards,
    )
    raise_problems(monitor_problems(cfg, made.figure_names()))
    return made


def load_module(path: Path) -> pl.LightningModule:
    """The LightningModule of a checkpoint with its weights, for evaluation. Raises UserError if they do not fit."""
    content = read(path)
    made = foreign.create_module(OmegaConf.create(content["config"]))
    load_module_weights(made, path)
    return made.eval()


def metrics(cfg: DictConfig, goal: Task) -> dict[str, Metric]:
    """The metrics of the task and those of task.metrics."""
    found = goal.metrics()
    for name, node in (cfg.task.get("metrics") or {}).items():
        more = {k: v for k, v in accepted(node._target_, goal.metric_arguments()).items() if k not in node}
        found[str(name)] = create(node, f"task.metrics.{name}", **more)
    taken = sorted(found.keys() & {"loss", "count"})
    raise_problems(f"task.metrics.{name}: every task already logs {name}. Type another name." for name in taken)
    return found


def rehearse(cfg: DictConfig, world: World, trainer: pl.Trainer, module: object, data: object) -> None:
    """Tries a step without computing it. Raises UserError if the parts do not fit together."""
    samples = batches.batches(cfg, world)["micro_batch"] or 1
    samples *= world.size if cfg.trainer.sync_batchnorm else 1  # whose statistics are of all processes
    device, callbacks = trainer.strategy.root_device, trainer.callbacks  # type: ignore[attr-defined]
    dry_run.rehearse(cfg, module, data, device=device, samples=samples, callbacks=callbacks)


def fit(cfg: DictConfig, trainer: pl.Trainer, module: pl.LightningModule, data: pl.LightningDataModule) -> str | None:
    """Trains; returns the checkpoint to test.

    Raises:
        UserError: torch or Lightning refuses an argument before the first batch.
        OutOfMemory: memory ran out, in training or in validation.
    """
    try:
        with memory.explained(cfg, trainer, module, data):
            trainer.fit(module, data, ckpt_path=cfg.resume, weights_only=True)
    except REFUSALS as e:
        began = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if began or isinstance(e, UserError) or of_users_code(e):
            raise
        raise UserError(" ".join(str(e).split())) from e
    return saving.best_checkpoint(trainer)


def evaluate(
    cfg: DictConfig,
    world: World,
    data: pl.LightningDataModule,
    tested: str | pl.LightningModule,
    stage: str = "test",
    panels: list[Any] | None = None,
) -> dict[str, float]:
    """The test (or `val`) figures of a checkpoint or of a module, for training and eval.py. `panels` gets the task's panels.

    Of a checkpoint with averaged weights, `test/acc` is of the average, and `test/raw/acc` of the weights themselves.
    """
    step, run = {"test": ("test", "test"), "val": ("validation", "validate")}[stage]
    if cfg.trainer[f"limit_{stage}_batches"] == 0:
        return {}
    subject = module(cfg, data, weights=tested) if isinstance(tested, str) else tested
    if not foreign.evaluates(subject, data, step, stage):
        console.say(f"no {run}: {type(subject).__name__} has no {step}_step, or the data has no {stage}_dataloader")
        return {}
    if panels is not None and isinstance(subject, TaskModule):
        subject.test_panels = TestPanels(subject.task, panels, compiled=bool(cfg.compile))
    figures = figures_of(cfg, world, data, subject, run)
    raw = read(Path(tested)).get("current_model_state") if isinstance(tested, str) else None
    if raw is not None:  # the run averaged its weights: training goes on with these
        subject = module(cfg, data, weights=str(tested))
        load_into(subject.state_dict(), raw, tested)
        of_raw = figures_of(cfg, world, data, subject, run)
        figures |= {name.replace("/", "/raw/", 1): v for name, v in of_raw.items() if not name.endswith("/count")}
    return figures


def figures_of(
    cfg: DictConfig, world: World, data: pl.LightningDataModule, subject: pl.LightningModule, run: str
) -> dict[str, float]:
    trainer = evaluator(cfg, world)
    with memory.explained(cfg, trainer, subject, data):
        found = getattr(trainer, run)(subject, data, verbose=False, weights_only=True)  # one for each dataloader
    figures = {name: value for each in found for name, value in each.items() if name != "val/count"}
    return {name: int(value) if name.endswith("/count") else value for name, value in figures.items()}
