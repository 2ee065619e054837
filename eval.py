"""Evaluate a checkpoint on the test set, under any strategy.

python eval.py run=first                                   evaluate the checkpoint that the run `first` tested
python eval.py run=first data.root=<folder>                evaluate it on different data
python eval.py checkpoint=<path> strategy=ddp trainer.devices=4
"""

from lockstep import launch


def evaluate(settings: launch.Settings) -> None:
    """The part of one process: the run's settings with the strategy and devices of this command line."""
    from lockstep import build
    from lockstep.reporting.console import show_evaluation

    build.process(settings)
    data = build.data(settings)
    metrics = build.evaluate(settings, data, settings.tested_checkpoint)
    if settings.world.rank == 0:
        show_evaluation(settings.evaluation_file(), build.evaluation_info(settings), metrics)


JOB = evaluate

if __name__ == "__main__":
    launch.main(JOB, "eval")
