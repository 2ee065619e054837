"""What predict.py does: each process writes its predictions while it makes them, and rank 0 joins all in input order."""

import heapq
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import lightning.pytorch as pl
from omegaconf import DictConfig
from torch import Tensor

from lockstep import build
from lockstep.build_trainer import evaluator
from lockstep.checkpoints.weights import read
from lockstep.config.instantiate import has_own_loaders
from lockstep.config.run_config import title
from lockstep.config.targets import target_of
from lockstep.data.datamodule import DataModule
from lockstep.data.images import Images, find_inputs
from lockstep.data.pixels import mask_image
from lockstep.data.sampler import FILLER
from lockstep.errors import TrainingFailed, UserError
from lockstep.extras.tables import ImageFiles, Row, text, write_table
from lockstep.launch.start import gallery_of
from lockstep.machine.files import remove, replacing, write_text
from lockstep.machine.world import World
from lockstep.reporting.panels import data_uri, overlaid, restored, thumbnail
from lockstep.reporting.render import render
from lockstep.training.workload import Workload

# --- Columns of predictions as the rows of a table: plain values by name ---

# B batch · K class, label, ... · H W pixel


WIDE = "probabilities"  # a column of a number for each class or label, written on request


def digits(value: Any) -> Any:
    """A float with the digits that float32 has."""
    if isinstance(value, list):
        return [digits(each) for each in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def is_mask(value: Any) -> bool:
    """Whether it is an image of whole numbers for each sample."""
    return isinstance(value, Tensor) and value.dim() == 3 and not value.is_floating_point()


def cells(name: str, value: Sequence[Any] | Tensor, names: Sequence[str], *, wide: bool) -> dict[str, list[Any]]:
    """The columns that one column of a task's predictions becomes."""
    if not isinstance(value, Tensor):
        return {name: list(value)}
    if value.dim() > 2:
        raise UserError(
            f"the predictions have a column `{name}` of shape {tuple(value.shape)}; a row holds numbers, texts, lists of them, or an "
            "image of whole numbers (HW). Return something smaller."
        )
    if value.dim() == 2 and name == WIDE and names:
        columns = value.unbind(1) if wide else ()
        return {f"probability/{label}": digits(column.tolist()) for label, column in zip(names, columns, strict=False)}
    return {name: digits(value.tolist())}


def table_rows(
    columns: Mapping[str, Sequence[Any] | Tensor], names: Sequence[str], *, wide: bool
) -> list[dict[str, Any]]:
    """A dict for each sample. Raises UserError if the columns differ in length."""
    found: dict[str, list[Any]] = {}
    for name, value in columns.items():
        found |= cells(name, value, names, wide=wide)
    lengths = {name: len(column) for name, column in found.items()}
    if len(set(lengths.values())) > 1:
        raise UserError(f"the columns of the predictions differ in length: {lengths}. Each needs a value per sample.")
    return [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)]


# --- What the processes of a prediction leave for rank 0: each a file of lines, joined in input order as streams. Free of torch ---

ERROR = "error"  # the column of why a file could not be read
THUMBNAIL = "thumbnail"  # of a row, for the gallery; no column
KEPT = 200  # thumbnails of a gallery


def folder_of(output: Path) -> Path:
    return output.with_name(f"{output.name}.parts")


def part(output: Path, rank: int) -> Path:
    """The file of one process: a line holds the number of a batch and a row."""
    return folder_of(output) / f"rank-{rank}.jsonl"


def masks(output: Path, column: str) -> Path:
    """The folder of a column of masks, beside the table."""
    return output.with_name(f"{output.stem}-{column}")


def lines(path: Path) -> Iterator[tuple[int, Row]]:
    """The rows of one process, each with the number of its batch."""
    if not path.is_file():
        raise UserError(f"{path} is not there: output needs a folder that all machines share. Type another output=.")
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def joined(output: Path, world: int) -> Iterator[Row]:
    """All rows in input order: a batch is shared out by rank, so rows of a batch come by rank."""
    streams = [lines(part(output, rank)) for rank in range(world)]
    for _, row in heapq.merge(*streams, key=lambda line: line[0]):
        yield row


def example_of(output: Path, world: int) -> Row:
    """The first row with a prediction; empty if all files are broken."""
    for row in joined(output, world):
        if not row.get(ERROR):
            return {name: value for name, value in row.items() if name != THUMBNAIL}
    return {}


class Counted:
    """Rows as they pass: how many, the broken ones, and the first of them with their reasons."""

    def __init__(self, shown: int) -> None:
        self.count = self.broken = 0
        self.shown, self.examples = shown, list[str]()

    def __call__(self, rows: Iterator[Row]) -> Iterator[Row]:
        for row in rows:
            self.count += 1
            if row.get(ERROR):
                self.broken += 1
                if len(self.examples) < self.shown:
                    self.examples.append(f"\n  {row.get('path')}: {row[ERROR]}")
            yield row

    @property
    def listed(self) -> str:
        more = self.broken - len(self.examples)
        return "".join(self.examples) + (f"\n  and {more:,} more" if more else "")


def write(output: Path, world: int, shown: int = 10) -> Counted:
    """Joins the parts to the table `output`, which appears whole or not at all, with its masks.

    Raises:
        UserError: all files are broken.
    """
    example, counted = example_of(output, world), Counted(shown)
    if not example:
        for _ in counted(joined(output, world)):
            pass
        raise UserError(f"none of {counted.count:,} files can be read:{counted.listed}\nNothing was written.")
    with replacing(output) as new:
        write_table(new, output.suffix, example, counted(joined(output, world)))
        for folder in sorted(path for path in folder_of(output).iterdir() if path.is_dir()):
            remove(masks(output, folder.name))
            folder.replace(masks(output, folder.name))
    return counted


def write_gallery(path: Path, output: Path, world: int) -> None:
    """A page of the first `KEPT` images with their predictions: one file, which needs no network."""
    pictured = [
        (row.pop(THUMBNAIL), [(name, text(value)) for name, value in row.items() if value not in (None, "")])
        for row in itertools.islice((row for row in joined(output, world) if THUMBNAIL in row), KEPT)
    ]
    write_text(path, render("gallery.html.j2", output.stem, {"pictured": pictured}))


# --- Writes the predictions of a process while it makes them ---

# B batch


Columns = dict[str, Any]


class Writer(pl.Callback):
    """Turns what `predict_step` returns into rows, in a file of this process; nothing is kept in memory.

    `asked` are the keys of predict.py. `made` makes columns of the outputs, and `names` are those of their classes or labels. Masks
    of files are enlarged or shrunk to the size of the file.
    """

    def __init__(self, data: DataModule, asked: Any, made: Callable[[Any], Columns], names: Sequence[str]) -> None:
        self.data, self.asked, self.made, self.names = data, asked, made, names
        self.output = Path(asked.output)
        self.files = data.dataset if isinstance(data.dataset, ImageFiles) else None
        self.paths = None if self.files else data.dataset.paths(data.predicted_split[0])
        self.file: IO[str] | None = None
        self.order: Iterator[Any] = iter(())
        self.kept = 0

    def first(self, index: int) -> Row:
        """What the data knows of a sample: the path of a file, and its target if there is one; or the index in its part."""
        if self.files is None:
            return {"index": index} | ({} if self.paths is None else {"path": str(self.paths[index])})
        target = self.files.test.target(index)
        return {"path": self.files.test.name(index)} | ({} if target is None else {"target": target})

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        folder = folder_of(self.output)
        if trainer.is_global_zero:
            remove(folder)
            folder.mkdir(parents=True)
        same = self.files.fingerprint if self.files else ""
        if trainer.strategy.broadcast(same) != same:  # which also waits for the folder
            raise TrainingFailed(
                "input: the processes found different files, because the folder changes. Type a CSV of the files."
            )
        trainer.strategy.barrier("the folder of the parts")
        self.file = part(self.output, trainer.global_rank).open("w", encoding="utf-8")
        self.order = iter(trainer.predict_dataloaders.sampler)  # type: ignore[union-attr]  # the loader's own order again

    def on_predict_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: int
    ) -> None:
        assert self.file is not None
        indices = next(self.order)
        indices = indices[indices != FILLER].tolist()
        if not indices:
            return
        found, problems = self.made(outputs), self.data.problems
        masks = {name: found.pop(name) for name in list(found) if is_mask(found[name])}
        found |= {name: self.saved(name, mask_BHW, indices, problems) for name, mask_BHW in masks.items()}
        rows = table_rows(found, self.names, wide=self.asked.probabilities)
        if len(rows) != len(indices):
            raise UserError(
                f"the predictions have {len(rows)} rows for a batch of {len(indices)}. Return one for each."
            )
        rows = [self.first(index) | row for index, row in zip(indices, rows, strict=True)]
        for place, why in enumerate((problems or ())[: len(rows)]):
            rows[place] = {**(self.first(indices[place]) if why else rows[place]), ERROR: why}
        if self.asked.gallery and self.kept < KEPT:
            self.kept += len(rows)
            image_BCHW = restored(batch["input"] if isinstance(batch, dict) else batch[0], self.data.about)
            images = image_BCHW.numpy()
            drawn = next((mask_BHW.cpu().numpy() for mask_BHW in masks.values()), None)
            for place, row in enumerate(rows):
                image = thumbnail(images[place]) if drawn is None else overlaid(images[place], drawn[place])
                row[THUMBNAIL] = data_uri(image)
        self.file.writelines(f"{json.dumps([batch_idx, row])}\n" for row in rows)

    def saved(self, name: str, mask_BHW: Tensor, indices: Sequence[int], problems: Sequence[str] | None) -> list[str]:
        """Writes masks as PNG files; returns their paths, relative to the table."""
        there = masks(self.output, name)
        if there.exists() and not self.asked.overwrite:
            raise UserError(f"{there} exists. Type another output=, or overwrite=true.")
        folder = folder_of(self.output) / name
        folder.mkdir(exist_ok=True)
        for place, (index, mask_HW) in enumerate(zip(indices, mask_BHW.cpu().numpy(), strict=True)):
            if problems and problems[place]:
                continue
            size = self.files.test.original_size(index) if self.files else None
            mask_image(mask_HW, size).save(folder / f"{index:06}.png")
        return [f"{there.name}/{index:06}.png" for index in indices]

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.close()
        trainer.strategy.barrier("the parts are written")

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.close()

    def close(self) -> None:
        if self.file:
            self.file.close()


# --- The data to predict, and the table of their predictions ---


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
    target: Any = target_of(cfg.data._target_, "data")
    if getattr(target, "preprocess", None) is not Images.preprocess and not target.__module__.startswith("lockstep."):
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


def predict(cfg: DictConfig, world: World, data: DataModule, work: Workload) -> Counted | None:
    """Writes the table; returns what rank 0 counted.

    Raises:
        UserError: the module does not predict, or no file can be read.
    """
    asked, output = cfg.predict, Path(cfg.predict.output)
    columns, names = work.columns(asked.top_k)
    if asked.gallery and not {"mean", "std", "image_size"} <= data.about.keys():
        raise UserError("gallery=true needs images, with mean and std in the `about` of their data. Leave it out.")
    table = Writer(data, asked, columns, names)
    trainer = evaluator(cfg, world, work, table)
    try:
        with build.oom_advice(cfg, trainer, work):
            trainer.predict(work.module, data, return_predictions=False)
        if world.rank:
            return None
        if asked.gallery:
            write_gallery(gallery_of(output), output, world.size)
        counted = write(output, world.size)
        if counted.broken:
            print(
                f"WARNING: {counted.broken:,} of {counted.count:,} files cannot be read; their rows have the reason in the column "
                f"{ERROR}:{counted.listed}",
                file=sys.stderr,
            )
        return counted
    finally:
        if world.rank == 0:
            remove(folder_of(output))
