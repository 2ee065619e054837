"""What predict.py makes of a config: the data to predict, and the trainer that writes the table."""

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from omegaconf import DictConfig

from lockstep import build
from lockstep.build_trainer import evaluator
from lockstep.checkpoints.weights import read
from lockstep.config.identity import title
from lockstep.config.instantiate import has_own_loaders, target_of
from lockstep.data.datamodule import DataModule
from lockstep.data.images import ImageFiles, Images, find_inputs
from lockstep.errors import UserError
from lockstep.extras import prediction_writer
from lockstep.extras.gallery import write_gallery
from lockstep.extras.prediction_writer import KEPT, Writer
from lockstep.launch.start import gallery_of
from lockstep.machine.files import remove
from lockstep.machine.world import World
from lockstep.training.workload import workload


def data(cfg: DictConfig) -> DataModule:
    """The part of the run's data that is asked for, or the files."""
    if has_own_loaders(cfg):
        raise UserError(
            f"data={title(cfg.data)} is a LightningDataModule with its own dataloaders, which may repeat samples or leave some out. "
            "Write a lockstep.data.DataSet to predict, or call lockstep.load_model and predict in your own loop."
        )
    if cfg.predict.part:
        made = build.data(cfg)
        assert isinstance(made, DataModule)
        made.predicted = cfg.predict.part
        return made
    data_class: Any = target_of(cfg.data._target_, "data")
    own = getattr(data_class, "preprocess", None)
    if own is not Images.preprocess and not data_class.__module__.startswith("lockstep."):
        raise UserError(
            f"input={cfg.predict.input}: files are read for data of images; {title(cfg.data)} prepares its batches itself. "
            "Type input=test, or val or train: a part of the run's own data."
        )
    checkpoint = read(Path(cfg.init_from))
    files = ImageFiles(
        find_inputs(cfg.predict.input),
        about=checkpoint.metadata,
        network=checkpoint.network or {},
        channels_last=bool(cfg.data.get("channels_last", cfg.channels_last)),
    )
    batch, workers = cfg.data.get("eval_batch_size") or cfg.data.batch_size, cfg.data.get("num_workers", 0)
    return DataModule(files, batch_size=1, eval_batch_size=batch, num_workers=workers)


def predict(
    cfg: DictConfig, world: World, data: DataModule, module: pl.LightningModule
) -> prediction_writer.Counted | None:
    """Writes the table; returns what rank 0 counted.

    Raises:
        UserError: the module does not predict, or no file can be read.
    """
    asked, output = cfg.predict, Path(cfg.predict.output)
    columns, names = workload(module, data).columns(asked.top_k)
    if asked.gallery and not {"mean", "std", "image_size"} <= data.about.keys():
        raise UserError("gallery=true needs images, with mean and std in the `about` of their data. Leave it out.")
    table = Writer(data, asked, columns, names)
    trainer = evaluator(cfg, world, table)
    try:
        with build.oom_advice(cfg, trainer, module, data):
            trainer.predict(module, data, return_predictions=False)
        if world.rank:
            return None
        if asked.gallery:
            write_gallery(gallery_of(output), output.stem, prediction_writer.joined(output, world.size), KEPT)
        counted = prediction_writer.write(output, world.size)
        if counted.broken:
            print(
                f"WARNING: {counted.broken:,} of {counted.count:,} files cannot be read; their rows have the reason in the column "
                f"{prediction_writer.ERROR}:{counted.listed}",
                file=sys.stderr,
            )
        return counted
    finally:
        if world.rank == 0:
            remove(prediction_writer.folder_of(output))
