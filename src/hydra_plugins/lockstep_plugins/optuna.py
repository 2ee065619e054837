"""An Optuna sweeper that continues a study, records failures, prunes trials, and writes plots; see lockstep/extras/study.py."""

from typing import Any

from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class ContinuedOptunaSweeper(Sweeper):
    """Takes the options of configs/hydra/sweeper/optuna.yaml."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from lockstep.extras.study import StudySweeper

        self.sweeper = StudySweeper(**self.options)
        self.sweeper.setup(hydra_context=hydra_context, task_function=task_function, config=config)

    def sweep(self, arguments: list[str]) -> None:
        self.sweeper.sweep(arguments)
