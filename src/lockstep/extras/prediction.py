"""The work of predict.py: each process writes its predictions as they are computed, and rank 0 merges them in input order."""

import hashlib
import heapq
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sized
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any
from urllib.parse import quote

import lightning.pytorch as pl
import numpy as np
from PIL import Image
from torch import Tensor

from lockstep import build
from lockstep.build_trainer import evaluator
from lockstep.checkpoints.finding import DATA
from lockstep.checkpoints.weights import read
from lockstep.config.formatting import inline, pluralize, warn
from lockstep.config.run_config import Request
from lockstep.config.settings import Settings
from lockstep.data.dataset import DataSet, Sound
from lockstep.errors import TrainingFailed, UserError
from lockstep.extras import gallery_of
from lockstep.extras.exported import digits, text
from lockstep.extras.panels import encode, shown
from lockstep.extras.render import render
from lockstep.extras.tables import Inputs, Row, input_files, list_errors, predicted_columns, write_table
from lockstep.kit import Images
from lockstep.kit.datamodule import DataModule
from lockstep.kit.panels import Lines, Mask, Picture, Sample
from lockstep.kit.pixels import Frame
from lockstep.machine.files import atomic_replace, locked, part_folder, plain_values, remove, write_json, write_text
from lockstep.reporting.console import print_line
from lockstep.reporting.report import decode
from lockstep.training.batches import Loaders
from lockstep.training.losses import RESERVED, sample_at
from lockstep.training.module import hook
from lockstep.training.oom import oom_advice

# --- From columns of predictions to table rows: plain values by name ---

# B batch · K class, label, ... · H W pixel


def table_rows(columns: Row, count: int) -> list[Row]:
    """A dict for each of `count` samples. Raises UserError: a column does not have one value per sample."""
    cells: Row = {}
    for name, value in columns.items():
        shape = tuple(value.shape) if isinstance(value, Tensor) else (len(value),) if isinstance(value, Sized) else ()
        if shape[:1] != (count,) or len(shape) > 2:
            raise UserError(
                f"the predictions have a column `{name}` with the shape {shape} for a batch of {count}. Return one value per sample: a number, a string, a list of either, or an integer image (HW)."
            )
        cells[name] = digits(plain_values(value if isinstance(value, Tensor) else [*value]))
    return [dict(zip(cells, row, strict=True)) for row in zip(*cells.values(), strict=True)]


# --- Files that the processes write for rank 0, which merges them as streams in input order ---

*_, ERROR = RESERVED  # the column with the reason why a file could not be read
FIRST = (*RESERVED[:-1], "target")  # columns before the task's
SORTED = {"loss": "the largest losses first", "probability": "the least certain first"}
KEPT = 200  # samples in a gallery
# The file of one process. A line has the number of a batch, the index of a sample, its row, and what its task draws.
PART = "rank-{}.jsonl"
DRAWN = {"Lines": Lines, "Picture": Picture}  # what a gallery shows of `describe`


def order(row: Row) -> float:
    """The sort key of a row in the gallery, from the first of SORTED that it has; otherwise rows keep their order."""
    key = next((name for name in SORTED if name in row), "")
    value = row.get(key, 0.0)
    if not isinstance(value, int | float):  # a column of one's own may have this name
        return 0.0
    return -math.inf if math.isnan(value) else -value if key == "loss" else value


def masks(output: Path, column: str) -> Path:
    """The folder of a column of masks, next to the table."""
    return output.with_name(f"{output.stem}-{column}")


class PredictionParts:
    """The rows of all processes. `write` writes the table; `gallery` writes a page.

    `example` has a value of each column that any row has.
    """

    def __init__(self, output: Path, folder: Path, world: int) -> None:
        self.output, self.folder, self.paths = output, folder, [folder / PART.format(rank) for rank in range(world)]
        self.count = self.broken = 0
        self.filled = Counter[str]()  # rows that have a column
        example: Row = {}
        for _, row, _ in self.rows():
            self.count += 1
            self.filled.update(row.keys())
            if row.get(ERROR):
                self.broken += 1
            else:
                example |= {name: value for name, value in row.items() if example.get(name) in (None, [])}
        if not example:
            raise UserError("the files can no longer be read. Nothing was written.")
        self.example = dict(sorted(example.items(), key=lambda item: item[0] == ERROR))  # the last column
        self.masks = sorted(path.name for path in folder.glob("*/"))
        columns = [name for name in self.example if name not in (*FIRST, ERROR) and not name.startswith("target/")]
        numbers = [name for name in self.example if f"target/{name}" in self.example]  # one may be named target
        self.guess = next(iter(numbers + columns), "")  # the column of the prediction
        self.key = next((name for name in SORTED if name in self.example), "")

    def rows(self) -> Iterator[tuple[int, Row, Row]]:
        """Index, row and drawing, in input order. Batches are split by rank, so the rows of a batch are in the order of the ranks."""
        with ExitStack() as files:
            streams = [map(json.loads, files.enter_context(path.open(encoding="utf-8"))) for path in self.paths]
            yield from (line for _, *line in heapq.merge(*streams, key=itemgetter(0)))

    def is_wrong(self, row: Row) -> bool:
        """Whether target and prediction differ; numbers and masks are neither right nor wrong."""
        target, guess = row.get("target"), row.get(self.guess)
        if target in (None, "") or guess is None or isinstance(guess, float) or self.guess in self.masks:
            return False
        return set(str(text(target)).split("|")) != set(str(text(guess)).split("|"))

    def write(self) -> None:
        """Writes the table, whole or not at all, with its masks."""
        with atomic_replace(self.output) as new:
            write_table(new, self.output.suffix, self.example, (row for _, row, _ in self.rows()))
            for name in self.masks:
                target = masks(self.output, name)
                remove(target)
                (self.folder / name).replace(target)

    def gallery(self, data: DataModule, metadata: Mapping[str, str]) -> None:
        """Writes a page of `KEPT` samples with their predictions. It works offline, and needs the files of sounds only to play them."""
        readable = (line for line in self.rows() if not line[1].get(ERROR))
        chosen = heapq.nsmallest(KEPT, readable, lambda line: order(line[1]))
        folders = [Path.cwd() / Path(row["path"]).parent for _, row, _ in chosen if "path" in row]
        common = os.path.commonpath(folders) if folders else ""
        names = [os.path.relpath(row["path"], common) if "path" in row else f"#{index}" for index, row, _ in chosen]
        values = {
            "samples": [self.sample(*line, data) for line in chosen],
            "rows": [row for _, row, _ in chosen],
            "hidden": {*FIRST, self.guess, f"target/{self.guess}", self.key, ERROR, *self.masks},
            "names": plain_values(names),
            "order": SORTED.get(self.key, "the first ones"),
            "unit": data.unit,
            "table": self,
            "wrong": sum(self.is_wrong(row) for _, row, _ in self.rows()),
            "about": metadata,
        }
        write_text(gallery_of(self.output), render("gallery.html.j2", self.output.stem, values))

    def sample(self, index: int, row: Row, drawn: Row, data: DataModule) -> Sample:
        """A sample as the page shows it: what the data set stores, its masks, and what the task draws."""
        raw = sample_at(data.raw(data.predicted, [index]), 0, 1)
        values = shown(data.dataset, raw)
        if isinstance(data.dataset, Inputs):
            file = quote(os.fsencode(os.path.relpath(data.dataset.test.path(index), self.output.parent)))
            values = {n: replace(v, file=file) if isinstance(v, Sound) else v for n, v in values.items()}
        if self.masks and np.ndim(raw.get("target", 0)) == 2:
            values["target"] = Mask(np.asarray(raw["target"]))
        for name in [name for name in self.masks if name in row]:
            with Image.open(self.output.parent / row[name]) as mask:
                values[name] = Mask(np.asarray(mask))
        image = values.pop("image", None)
        for name, drawing in json.loads(json.dumps(drawn), object_hook=decode).items():
            parts = vars(drawing)
            values[name] = DRAWN[parts.pop("kind")](**parts)
        return Sample(index, values, image)


# --- Writes the predictions of a process as they are computed ---


class Writer(pl.Callback):
    """Writes what `predict_step` returns as rows to a file of this process, without keeping them in memory.

    `request`: the keys of predict.py. Masks of files are resized to the size of the file.
    """

    folder: Path  # of the parts; set on rank 0, which creates it

    def __init__(self, loaders: Loaders, request: Request) -> None:
        self.loaders, self.request = loaders, request
        self.to_columns = predicted_columns(loaders.module, request)
        self.describe = hook(loaders.module, "describe")
        self.first_keys: list[tuple[float, int]] = []  # of the samples so far that the gallery may show, in its order
        self.output = Path(str(request.output))
        dataset = getattr(loaders.data, "dataset", None)
        self.files = dataset.test if isinstance(dataset, Inputs) else None

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.folder = trainer.strategy.broadcast(self.folder)
        digest = hashlib.sha256(self.files.name_N.tobytes()).hexdigest() if self.files else ""
        if trainer.strategy.broadcast(digest) != digest:
            raise TrainingFailed("input: the folder is changing: processes listed different files. Pass a CSV of them.")
        trainer.strategy.barrier("the files to predict")
        self.part = self.folder / PART.format(trainer.global_rank)
        self.part.touch()
        self.order = self.loaders.predicted(trainer)  # the indices of each batch

    def on_predict_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, *_: int
    ) -> None:
        indices = next(self.order)
        if not indices:
            return
        # for each file of the batch, why it could not be read; None: the data is not files
        problems = getattr(self.loaders.data, "problems", None) or [None] * len(indices)
        columns = self.to_columns(outputs)
        for name, value in columns.items():
            # a mask for each sample
            if isinstance(value, Tensor) and value.dim() == 3 and not value.is_floating_point():
                columns[name] = self.save_masks(name, value, indices, problems)
        rows = table_rows(columns, len(indices))
        drawn = self.draw(outputs, [(order(row), index) for index, row in zip(indices, rows, strict=True)])
        paths = self.loaders.paths
        with self.part.open("a", encoding="utf-8") as file:
            for index, row, problem, drawing in zip(indices, rows, problems, drawn, strict=True):
                path = {} if paths is None else {"path": str(paths[index])}
                facts = self.files.facts(index) if self.files else {"index": index, **path}
                cells = facts | ({} if problem else row) | ({} if problem is None else {ERROR: problem})
                # encoded for a page, because images are large
                file.write(f"{json.dumps([batch_idx, index, cells, encode(drawing)])}\n")

    def draw(self, outputs: Any, keys: list[tuple[float, int]]) -> list[Row]:
        """The pictures and curves of the samples that the gallery may show."""
        drawn: list[Row] = [{} for _ in keys]
        if self.request.gallery and self.describe:
            self.first_keys = heapq.nsmallest(KEPT, [*self.first_keys, *keys])
            try:
                for key, facts, drawing in zip(keys, self.describe(*outputs), drawn, strict=True):
                    if key <= self.first_keys[-1]:
                        drawing.update({n: v for n, v in facts.items() if isinstance(v, Lines | Picture)})
            except Exception as e:
                self.describe = None  # it would fail for the next batch, too
                if e.args != ("target",):  # files have no target
                    warn(f"the gallery lacks pictures and curves, because `describe` failed: {type(e).__name__}: {e}")
        return drawn

    def save_masks(self, name: str, mask_BHW: Tensor, indices: list[int], problems: list[Any]) -> list[str]:
        """Writes masks as PNG files; returns their paths, relative to the table."""
        target, folder = masks(self.output, name), self.folder / name
        if target.exists() and not self.request.overwrite:
            raise UserError(f"{target} exists. Set a different output=, or overwrite=true.")
        folder.mkdir(exist_ok=True)
        for index, mask_HW, problem in zip(indices, mask_BHW.cpu().numpy(), problems, strict=True):
            if not problem:
                image = self.files.mask(index, mask_HW) if self.files else Frame(len(mask_HW)).mask(mask_HW)
                image.save(folder / f"{index:06}.png")
        return [f"{target.name}/{index:06}.png" for index in indices]

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.strategy.barrier("the parts")


# --- The data to predict, and the table of predictions ---


def datamodule(settings: Settings, data: DataSet | None) -> pl.LightningDataModule | None:
    """Batches of the requested part of the run's data, or of the files."""
    cfg, request = settings.cfg, settings.request
    assert request
    if request.part:
        return build.datamodule(settings, data)
    checkpoint = read(Path(settings.tested_checkpoint))
    made = cfg.data.target
    if made == checkpoint.component("data").target:  # train.py may have created a data set of another class
        made = checkpoint.values.get(DATA, {}).get("class", made)
    if made.startswith("__main__."):
        raise UserError(
            f"input={request.input}: predict.py cannot import {made[9:]}, the data set's class. Move it from train.py into src/."
        )
    hint = "pass input=test, val, train or, with your own dataloaders, predict (parts of the run's own data)"
    files = input_files(request.input, replace(cfg.data, target=made), checkpoint.metadata, hint)
    if files.left_out and settings.world.rank == 0:
        warn(f"left out of input={request.input}: {files.left_out}")
    if isinstance(files.reader, Images):
        files.reader.channels_last = bool(cfg.data.get("channels_last", cfg.channels_last))
    loader: Any = cfg.loader
    options = {"eval_batch_size": loader.eval_batch_size or loader.batch_size, "num_workers": loader.num_workers}
    return DataModule(Inputs(files, checkpoint.network or {}), batch_size=1, **options)


@contextmanager
def lock_output(output: Path, *, overwrite: bool) -> Iterator[Path]:
    """Locks `output`; yields a folder for its parts. Raises UserError: another prediction is writing it, or wrote it in the meantime."""
    in_use = f"output={output}: another prediction is writing it. Set a different output=."
    output.parent.mkdir(parents=True, exist_ok=True)
    with locked(output.with_name(f".{output.name}.lock"), in_use, 0):
        if output.exists() and not overwrite:
            raise UserError(f"output={output} exists. Set a different file, or overwrite=true.")
        with part_folder(output.parent) as folder:
            yield folder


def predict(settings: Settings, module: pl.LightningModule, data: Any) -> PredictionParts | None:
    """Writes the table; returns its rows and counts on rank 0, else None. Raises UserError: the module does not predict."""
    world, request, loaders = settings.world, settings.request, Loaders(data, module)
    assert request
    loaders.predict_on(request.part, gallery=request.gallery)
    writer = Writer(loaders, request)
    trainer, output = evaluator(settings, loaders, writer), writer.output
    with nullcontext(output) if world.rank else lock_output(output, overwrite=request.overwrite) as writer.folder:
        with oom_advice(trainer, loaders, settings):
            trainer.predict(module, datamodule=data, return_predictions=False)
        if world.rank:
            return None
        parts = PredictionParts(output, writer.folder, world.size)
        parts.write()
        if request.gallery:
            parts.gallery(data, {"Input": request.input, "Checkpoint": Path(settings.tested_checkpoint).name})
        partial = [item for item in parts.filled.items() if item[1] < parts.count - parts.broken]
        if counts := ", ".join(f"{inline(name)} ({count:,} of {parts.count:,} rows)" for name, count in partial):
            warn(f"not every batch has these columns, so they are empty in the other rows: {counts}")
        if parts.broken:
            # inline, so the files are closed before their folder is removed
            why = list_errors(((row["path"], row[ERROR]) for _, row, _ in parts.rows() if row.get(ERROR)), parts.broken)
            warn(f"{parts.broken:,} of {parts.count:,} files cannot be read; the column {ERROR} has the reasons:{why}")
        return parts


def show_predictions(settings: Settings, parts: PredictionParts) -> None:
    """Prints the path of the table, and writes predict.json."""
    request, path, broken = settings.request, settings.evaluation_file("predict"), parts.broken
    assert request
    metadata = build.evaluation_info(settings)
    rows = f"done: {pluralize(parts.count, 'row')}" + (f", {pluralize(broken, 'broken file')}" if broken else "")
    print_line(f"{rows}; predictions by {metadata['checkpoint']}:")
    print_line(str(parts.output), copied=True)
    if request.gallery:
        page = gallery_of(parts.output)
        print_line(str(page), copied=True, link=page)
    content = {**metadata, "input": request.input, "output": request.output, "count": parts.count, "broken": broken}
    try:
        write_json(path, content)
    except OSError as e:  # the run may be read-only; the table is complete, and may be elsewhere
        warn(f"{path} could not be written: {e.strerror}. The table is complete.")
