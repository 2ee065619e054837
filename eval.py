"""Evaluate a checkpoint on the test set, under any strategy.

python eval.py run=first                                   evaluate the checkpoint that the run `first` tested
python eval.py run=first data.root=<folder>                evaluate it on different data
python eval.py checkpoint=<path> strategy=ddp trainer.devices=4
"""

from omegaconf import DictConfig

from lockstep import launch


def evaluate(cfg: DictConfig, world: launch.World) -> None:
    """The part of one process. `cfg` is the run's config with the strategy and devices of this command line."""
    from lockstep import build
    from lockstep.config.run_config import evaluation_file
    from lockstep.reporting.page import show_evaluation

    build.process(cfg, world)
    data = build.data(cfg)
    metrics = build.evaluate(cfg, world, data, cfg.init_from)
    if world.rank == 0:
        show_evaluation(evaluation_file(cfg), build.evaluation_info(cfg, world), metrics)


JOB = evaluate

if __name__ == "__main__":
    launch.main(JOB, "eval")
