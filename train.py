"""Train and test a model: config -> check -> data -> module with its network -> trainer -> fit -> checkpoint -> test -> report.

python train.py                                   BasicNet on MNIST
python train.py strategy=ddp trainer.devices=4    the same result, up to rounding, on four devices
python train.py model=resnet50d data=cifar10      a timm network on CIFAR-10
python train.py run=first resume=auto             start the run `first`, or continue it after a crash
python train.py -m optim.lr=1e-3,3e-3 seed=0,1    four runs and a table of their results

Each object comes from the config. You can create any of them in Python instead.
"""

from typing import TYPE_CHECKING

from lockstep import launch
from lockstep.extras import write_page

if TYPE_CHECKING:  # importing torch and Lightning takes 7 s; the config is checked first
    import lightning.pytorch as pl

    from lockstep import DataSet


def data(config: launch.Settings) -> "DataSet":
    """The data set of configs/data. Each process calls this once, before anything is written."""
    return launch.data(config)


def module(config: launch.Settings, datamodule: "pl.LightningDataModule | None") -> "pl.LightningModule":
    """The LightningModule with its network, and with the weights of a checkpoint if the config names one. eval.py and predict.py use it too."""
    from lockstep import build

    # configs/task, as in src/project/module.py, with what its constructor takes of configs/model, configs/optim and configs/schedule
    return build.module(config, datamodule)


def train(config: launch.Settings, data: "DataSet") -> None:
    """The work of one process. By now the config is checked, and the run has a name."""
    from lockstep import build
    from lockstep.extras.page import LivePage

    with build.recorder(config, write_page) as run:
        datamodule = build.datamodule(config, data)  # configs/loader and configs/augment
        trained = module(config, datamodule)
        # configs/trainer, configs/strategy, configs/callbacks and configs/logger
        trainer = build.trainer(config, trained, datamodule, LivePage(config))
        run.begin(trainer)
        trainer.fit(trained, datamodule=datamodule, ckpt_path=config.resume)
        best = run.trained()
        for stage in run.stages:
            run.add(**build.evaluate(config, module, datamodule, best or trained, stage, run))


JOB = launch.Job("train", train, data, page=write_page)

if __name__ == "__main__":
    launch.main(JOB)
