"""From a config node to an object, one function a stage. The only file that joins the packages."""

from lockstep.compat import torchmetrics_imports  # noqa: F401  # before Lightning

# isort: split
import os
from collections.abc import Iterator
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
from lockstep.build_trainer import evaluator, trainer
from lockstep.checkpoints import saving
from lockstep.checkpoints.content import load_module_weights, load_weights, read
from lockstep.config.classes import optimizer_node
from lockstep.config.components import missing_groups
from lockstep.config.identity import title
from lockstep.config.instantiate import ENGINE_DATA, create, create_data, has_own_loaders, target_of, to_plain
from lockstep.config.project import of_users_code
from lockstep.config.signatures import accepted, locate
from lockstep.config.words import nearest
from lockstep.data.datamodule import DataModule
from lockstep.errors import UserError, raise_problems
from lockstep.machine.hardware import keep_freed_memory
from lockstep.machine.world import World, gpu_count, threads
from lockstep.models.network import network
from lockstep.reporting import console
from lockstep.tasks import Task
from lockstep.training import foreign, memory
from lockstep.training.module import TaskModule

__all__ = ["data", "evaluate", "fit", "module", "process", "quiet", "seed", "trainer", "validate", "with_numbers"]
REFUSALS = (ValueError, TypeError, InstantiationException, MisconfigurationException)


def process(cfg: DictConfig, world: World) -> None:
    """What holds for this process as a whole: memory, threads, arithmetic."""
    if world.accelerator == "cpu":
        if (
            not cfg.strategy.traits.shards
        ):  # whoever shards wants to save memory, and what is gathered leaves it in pieces
            keep_freed_memory()
        if number := threads(world):
            torch.set_num_threads(number)
    if not gpu_count():
        # Lightning lets torch ask the driver whether there are GPUs, which optimizers want to know at each step: 0.1 ms
        # where there is no driver.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = bool(cfg.tf32)


def seed(cfg: DictConfig) -> None:
    """The same on every rank: networks start equal. What differs by rank comes from the step's own seed."""
    pl.seed_everything(cfg.seed, workers=True, verbose=False)


def with_numbers(cfg: DictConfig) -> DictConfig:
    """`cfg` with numbers for a mean and std of `model`, so that a newer timm cannot change a run that resumes."""
    cfg = cfg.copy()
    wanted = [key for key in ("mean", "std") if cfg.data.get(key) == "model"]
    if not wanted:
        return cfg
    dataset = locate(cfg.data._target_)
    network_class = locate(cfg.model._target_) if cfg.model else None
    of_network = getattr(network_class, "normalisation", lambda _: None)(cfg.model.get("name"))
    own = dataset.normalisation(to_plain(cfg.data))
    if of_network and len(of_network[0]) != len(own[0]):  # pretrained on colours, used on grey
        of_network = None
    numbers = dict(zip(("mean", "std"), of_network or own, strict=True))
    for key in wanted:
        cfg.data[key] = list(numbers[key])
    return cfg


def data(cfg: DictConfig) -> pl.LightningDataModule:
    if has_own_loaders(cfg):
        own: pl.LightningDataModule = create(cfg.data, "data")
        return own
    node, dataset = to_plain(cfg.data), create_data(cfg)
    dataset.prepare()
    given = {key: node[key] for key in ENGINE_DATA if key in node}
    return DataModule(dataset, seed=cfg.seed, **{"eval_batch_size": node["batch_size"], **given})


def optimizer(cfg: DictConfig) -> Any:
    """What makes the optimizer of a network's parameters."""
    return create(optimizer_node(cfg), "optim")


def module(cfg: DictConfig, data: pl.LightningDataModule, weights: str | None = None) -> pl.LightningModule:
    """The task's LightningModule with a new network, or with the weights of the checkpoint `weights`.

    Raises:
        UserError: network, task and data do not fit together.
    """
    if foreign.is_foreign(target_of(cfg.task._target_, "task")):
        made = foreign.create_module(
            cfg, foreign.offered_by(data), partial(optimizer, cfg), with_weights=weights is None
        )
        raise_problems(foreign.problems(cfg, made, data))
        if weights:
            load_module_weights(made, Path(weights))
        return made
    raise_problems(missing_groups(cfg))
    goal: Task = create(cfg.task, "task")
    if not isinstance(goal, Task):
        raise UserError(
            f"task._target_={cfg.task._target_} is neither a lockstep.tasks.Task nor a lightning.pytorch.LightningModule."
        )
    if not isinstance(data, DataModule):
        raise UserError(
            f"task={title(cfg.task)} needs data that says what it is; data={title(cfg.data)} brings dataloaders of its own. "
            "Write a lockstep.data.DataSet, or take a LightningModule as the task."
        )
    goal.bind(data.about)
    if any(True for _ in goal.parameters()) and cfg.strategy.traits.shards:
        raise UserError(
            f"task={type(goal).__name__} has parameters of its own, which strategy={cfg.strategy.name} does not shard. Type strategy=ddp."
        )
    offered = {**data.dataset.network_arguments(), **goal.network_arguments()}
    net = network(to_plain(cfg.model), offered, with_weights=weights is None)
    if weights:
        load_weights(net, Path(weights))
    made = TaskModule(
        net,
        goal,
        optimizer=optimizer(cfg),
        schedule=create(cfg.schedule, "schedule"),
        parallelize=partial(
            strategies.parallelize,
            sync_batchnorm=cfg.trainer.sync_batchnorm,
            channels_last=cfg.channels_last,
            compile=cfg.compile,
        ),
        metrics=metrics(cfg, goal),
        network_arguments=offered,
    )
    raise_problems(monitor_problems(str(cfg.checkpoint.monitor), made.figure_names()))
    return made


def load_module(path: Path) -> pl.LightningModule:
    """The LightningModule of a checkpoint with its weights, for evaluation. Raises UserError: it does not fit."""
    content = read(path)
    cfg = OmegaConf.create(content["config"])
    made = foreign.create_module(cfg, content["module_arguments"], partial(optimizer, cfg), with_weights=False)
    load_module_weights(made, path)
    return made.eval()


def metrics(cfg: DictConfig, goal: Task) -> dict[str, Metric]:
    """The task's own figures and those of the config."""
    found = goal.metrics()
    for name, node in cfg.task.metrics.items():
        more = {k: v for k, v in accepted(node._target_, goal.metric_arguments()).items() if k not in node}
        found[str(name)] = create(node, f"task.metrics.{name}", **more)
    taken = sorted(found.keys() & {"loss", "count"})
    raise_problems(f"task.metrics.{name}: every task logs a {name}. Type another name." for name in taken)
    return found


def monitor_problems(monitor: str, figures: list[str]) -> Iterator[str]:
    names = [f"val/{figure}" for figure in ("loss", *figures)]
    known = any(monitor == name or (name.endswith("/*") and monitor.startswith(name[:-1])) for name in names)
    if not known:
        yield f"checkpoint.monitor={monitor}: the validation logs {', '.join(names)}{nearest(monitor, names)}. Name one of them, or add it to task.metrics."


def quiet(world: World) -> None:
    console.quiet(world.rank)


def fit(cfg: DictConfig, trainer: pl.Trainer, module: pl.LightningModule, data: pl.LightningDataModule) -> str | None:
    """Trains; returns the checkpoint to test.

    Raises:
        UserError: torch or Lightning refuses an argument before the first batch.
        OutOfMemory: memory ran out, in training or in a validation.
    """
    try:
        with memory.explained(cfg, trainer, module, data):
            trainer.fit(module, data, ckpt_path=cfg.resume, weights_only=True)
    except REFUSALS as e:
        if trainer.fit_loop.epoch_loop.batch_progress.total.ready or of_users_code(e):
            raise
        raise e if isinstance(e, UserError) else UserError(" ".join(str(e).split())) from e
    return saving.best_checkpoint(trainer)


def evaluate(
    cfg: DictConfig, world: World, data: pl.LightningDataModule, tested: str | pl.LightningModule
) -> dict[str, float]:
    """Figures of a checkpoint, or of a module as it is. The same code after training and in eval.py."""
    subject = module(cfg, data, weights=tested) if isinstance(tested, str) else tested
    if not foreign.evaluates(subject, data, "test", "test"):
        console.say(f"nothing is tested: {type(subject).__name__} has no test_step, or the data no test_dataloader")
        return {}
    trainer = evaluator(cfg, world)
    with memory.explained(cfg, trainer, subject, data):
        found = trainer.test(subject, data, verbose=False, weights_only=True)  # one for each dataloader
    figures = {name: value for each in found for name, value in each.items()}
    return {name: int(value) if name.endswith("/count") else value for name, value in figures.items()}


def validate(
    cfg: DictConfig, world: World, data: pl.LightningDataModule, module: pl.LightningModule
) -> dict[str, float]:
    """Validation figures for a run that ended before its first validation; none where validation is turned off."""
    if cfg.trainer.limit_val_batches == 0 or not foreign.evaluates(module, data, "validation", "val"):
        return {}
    trainer = evaluator(cfg, world)
    with memory.explained(cfg, trainer, module, data):
        found = trainer.validate(module, data, verbose=False, weights_only=True)
    return {name: value for each in found for name, value in each.items() if name != "val/count"}
