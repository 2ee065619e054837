"""Writes the predictions of a process while it makes them."""

# B batch

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import lightning.pytorch as pl
from torch import Tensor

from lockstep.data.datamodule import DataModule
from lockstep.data.image_files import ImageFiles
from lockstep.data.pixels import mask_image
from lockstep.data.sampler import FILLER
from lockstep.errors import TrainingFailed, UserError
from lockstep.machine.files import remove
from lockstep.prediction import columns, parts
from lockstep.prediction.formats import Row
from lockstep.reporting.pictures import data_uri, overlaid, restored, thumbnail

Columns = dict[str, Any]
KEPT = 200  # thumbnails of a gallery


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
        folder = parts.folder_of(self.output)
        if trainer.is_global_zero:
            remove(folder)
            folder.mkdir(parents=True)
        same = self.files.fingerprint if self.files else ""
        if trainer.strategy.broadcast(same) != same:  # which also waits for the folder
            raise TrainingFailed(
                "input: the processes found different files, because the folder changes. Type a CSV of the files."
            )
        trainer.strategy.barrier("the folder of the parts")
        self.file = parts.part(self.output, trainer.global_rank).open("w", encoding="utf-8")
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
        masks = {name: found.pop(name) for name in list(found) if columns.is_mask(found[name])}
        found |= {name: self.saved(name, mask_BHW, indices, problems) for name, mask_BHW in masks.items()}
        rows = columns.rows(found, self.names, wide=self.asked.probabilities)
        if len(rows) != len(indices):
            raise UserError(
                f"the predictions have {len(rows)} rows for a batch of {len(indices)}. Return one for each."
            )
        rows = [self.first(index) | row for index, row in zip(indices, rows, strict=True)]
        for place, why in enumerate((problems or ())[: len(rows)]):
            rows[place] = {**(self.first(indices[place]) if why else rows[place]), parts.ERROR: why}
        if self.asked.gallery and self.kept < KEPT:
            self.kept += len(rows)
            image_BCHW = restored(batch["input"] if isinstance(batch, dict) else batch[0], self.data.about)
            images = image_BCHW.numpy()
            drawn = next((mask_BHW.cpu().numpy() for mask_BHW in masks.values()), None)
            for place, row in enumerate(rows):
                image = thumbnail(images[place]) if drawn is None else overlaid(images[place], drawn[place])
                row[parts.THUMBNAIL] = data_uri(image)
        self.file.writelines(f"{json.dumps([batch_idx, row])}\n" for row in rows)

    def saved(self, name: str, mask_BHW: Tensor, indices: Sequence[int], problems: Sequence[str] | None) -> list[str]:
        """Writes masks as PNG files; returns their paths, relative to the table."""
        there = parts.masks(self.output, name)
        if there.exists() and not self.asked.overwrite:
            raise UserError(f"{there} exists. Type another output=, or overwrite=true.")
        folder = parts.folder_of(self.output) / name
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
