"""Evaluate a checkpoint on the test set, under any strategy.

python eval.py run=first                                   evaluate the checkpoint that the run `first` tested
python eval.py run=first data.root=<folder>                evaluate it on different data
python eval.py checkpoint=<path> strategy=ddp trainer.devices=4
"""

from typing import TYPE_CHECKING

from lockstep import launch
from train import data, module

if TYPE_CHECKING:
    from lockstep import DataSet


def evaluate(config: launch.Settings, data: "DataSet") -> None:
    """The part of one process: the run's config with the strategy and devices of this command line."""
    from lockstep import build
    from lockstep.reporting.console import show_evaluation

    datamodule = build.datamodule(config, data)
    metrics = build.evaluate(config, module, datamodule, config.tested_checkpoint)
    if config.world.rank == 0:
        show_evaluation(config.evaluation_file(), build.evaluation_info(config), metrics)


JOB = launch.Job("eval", evaluate, data)

if __name__ == "__main__":
    launch.main(JOB)
