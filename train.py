"""Train and test a model: config -> check -> data -> task -> strategy -> trainer.fit -> checkpoint -> report.

python train.py [key=value ...]      python train.py --help
"""

from lockstep import launch


def train(settings: launch.Settings) -> None:
    """The part of one process. By now the config is checked, the data is prepared and the run has a name."""
    from lockstep import build  # imports torch and Lightning (7 s), so only after the config is checked

    build.process(settings)
    build.seed(settings)
    settings = settings.with_numbers()
    with build.recorder(settings) as run:
        data = build.data(settings)
        work = build.workload(settings, data, weights=None if settings.cfg.resume else settings.cfg.init_from)
        trainer = build.trainer(settings, work)
        build.dry_run(settings, trainer, work)  # what does not fit is refused before a file is written
        run.begin(trainer, work)
        best = build.fit(settings, trainer, work)
        run.trained(best)
        if not run.was_validated:
            run.add(**build.evaluate(settings, data, work, "val"))
        run.add(**build.evaluate(settings, data, best or work, panels=run.panels))


JOB = train

if __name__ == "__main__":
    launch.main(JOB, "train")
