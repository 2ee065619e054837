"""Writes the predictions of a process while it makes them."""

# B batch

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import lightning.pytorch as pl
from torch import Tensor

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

    `first(index)` and `problems()` are the columns that the data knows: of each sample, and why samples of the current batch
    could not be read. `made` makes columns of the outputs. `about` describes the images of a gallery. Masks are enlarged or
    shrunk to `original_size(index)`, if it is known.
    """

    def __init__(
        self,
        output: Path,
        *,
        made: Callable[[Any], Columns],
        first: Callable[[int], Row],
        problems: Callable[[], Sequence[str] | None],
        names: Sequence[str],
        probabilities: bool,
        overwrite: bool,
        about: Mapping[str, Any] | None = None,
        original_size: Callable[[int], tuple[int, int]] | None = None,
        same: str = "",
    ) -> None:
        self.output, self.made, self.first, self.problems = output, made, first, problems
        self.names, self.wide, self.overwrite, self.about, self.same = names, probabilities, overwrite, about, same
        self.original_size = original_size
        self.file: IO[str] | None = None
        self.order: Iterator[Any] = iter(())
        self.kept = 0

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        folder = parts.folder_of(self.output)
        if trainer.is_global_zero:
            remove(folder)
            folder.mkdir(parents=True)
        if trainer.strategy.broadcast(self.same) != self.same:  # which also waits for the folder
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
        found, problems = self.made(outputs), self.problems()
        masks = {name: found.pop(name) for name in list(found) if columns.is_mask(found[name])}
        found |= {name: self.saved(name, mask_BHW, indices, problems) for name, mask_BHW in masks.items()}
        rows = columns.rows(found, self.names, wide=self.wide)
        if len(rows) != len(indices):
            raise UserError(
                f"the predictions have {len(rows)} rows for a batch of {len(indices)}. Return one for each."
            )
        rows = [self.first(index) | row for index, row in zip(indices, rows, strict=True)]
        if problems is not None:
            rows = [
                {**(self.first(index) if why else row), parts.ERROR: why}
                for index, row, why in zip(indices, rows, problems, strict=False)
            ]
        if self.about and self.kept < KEPT:
            self.kept += len(rows)
            image_BCHW = restored(batch["input"] if isinstance(batch, dict) else batch[0], self.about)
            images = image_BCHW.numpy()
            drawn = next((mask_BHW.cpu().numpy() for mask_BHW in masks.values()), None)
            for place, row in enumerate(rows):
                image = thumbnail(images[place]) if drawn is None else overlaid(images[place], drawn[place])
                row[parts.THUMBNAIL] = data_uri(image)
        self.file.writelines(f"{json.dumps([batch_idx, row])}\n" for row in rows)

    def saved(self, name: str, mask_BHW: Tensor, indices: Sequence[int], problems: Sequence[str] | None) -> list[str]:
        """Writes masks as PNG files; returns their paths, relative to the table."""
        there = parts.masks(self.output, name)
        if there.exists() and not self.overwrite:
            raise UserError(f"{there} exists. Type another output=, or overwrite=true.")
        folder = parts.folder_of(self.output) / name
        folder.mkdir(exist_ok=True)
        for place, (index, mask_HW) in enumerate(zip(indices, mask_BHW.cpu().numpy(), strict=True)):
            if problems and problems[place]:
                continue
            size = self.original_size(index) if self.original_size else None
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
