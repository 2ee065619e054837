"""The stages of train.py for scripts that measure them: the same run, without its report."""

import lightning.pytorch as pl
from omegaconf import DictConfig

from lockstep import build
from lockstep.config.identity import run_dir
from lockstep.data.datamodule import DataModule
from lockstep.machine import process
from lockstep.machine.world import World
from lockstep.training.module import TaskModule


def ready(cfg: DictConfig, world: World) -> tuple[DataModule, TaskModule, pl.Trainer]:
    """Data, task and trainer of a run, with its directory."""
    run_dir(cfg).mkdir(parents=True, exist_ok=True)
    process.owned = True
    build.process(cfg, world)
    build.seed(cfg)
    data = build.data(build.with_numbers(cfg))
    module = build.module(cfg, data)
    assert isinstance(data, DataModule) and isinstance(module, TaskModule)
    return data, module, build.trainer(cfg, world, data)
