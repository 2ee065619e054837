"""Train and test a model: config -> check -> data -> task -> strategy -> trainer.fit -> checkpoint -> report.

python train.py                                   BasicNet on MNIST
python train.py strategy=ddp trainer.devices=4    the same result, up to rounding, on four devices
python train.py model=resnet50d data=cifar10      a timm network on CIFAR-10
python train.py run=first resume=auto             start the run `first`, or continue it after a crash
python train.py -m optim.lr=1e-3,3e-3 seed=0,1    four runs and a table of their results
"""

from typing import Any

from lockstep import launch


def page(*of_run: Any) -> None:
    """Writes report.html, also of a run that fails before `train` begins."""
    from lockstep.extras.page import write_page

    write_page(*of_run)


def train(settings: launch.Settings) -> None:
    """The part of one process. By now the config is checked, the data is prepared and the run has a name."""
    from lockstep import build  # imports torch and Lightning (7 s), so only after the config is checked
    from lockstep.extras.page import LivePage

    build.process(settings)
    build.seed(settings)
    settings = settings.with_numbers()
    with build.recorder(settings, page) as run:
        data = build.data(settings)
        work = build.workload(settings, data, weights=None if settings.cfg.resume else settings.cfg.init_from)
        trainer = build.trainer(settings, work, LivePage(settings.folder, settings.cfg, work))
        build.dry_run(settings, trainer, work)  # what does not fit is refused before a file is written
        run.begin(trainer, work)
        best = build.fit(settings, trainer, work)
        run.trained(best)
        if not run.was_validated:
            run.add(**build.evaluate(settings, data, best or work, "val", loggers=trainer.loggers))
        run.add(**build.evaluate(settings, data, best or work, panels=run.panels, loggers=trainer.loggers))


JOB = launch.Training(train, page)

if __name__ == "__main__":
    launch.main(JOB, "train")
