"""What predict.py does: each process writes its predictions while it makes them, and rank 0 joins all in input order."""

import hashlib
import heapq
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import lightning.pytorch as pl
import numpy as np
from PIL import Image
from torch import Tensor

from lockstep import build
from lockstep.build_trainer import evaluator, workload
from lockstep.checkpoints.weights import read
from lockstep.config.run_config import Request
from lockstep.config.settings import Settings
from lockstep.config.words import counted, warn
from lockstep.data import DataSet, Images, Sound
from lockstep.data.datamodule import DataModule
from lockstep.data.pixels import Frame
from lockstep.errors import TrainingFailed, UserError
from lockstep.extras.exported import digits, text
from lockstep.extras.panels import encoded
from lockstep.extras.render import render
from lockstep.extras.tables import LISTED, Inputs, Row, as_utf8, input_files, listed, write_table
from lockstep.launch.start import gallery_of
from lockstep.machine.files import locked, part_folder, remove, replacing, write_json, write_text
from lockstep.panel import Lines, Mask, Picture, Sample
from lockstep.reporting.console import say
from lockstep.reporting.saved_panels import decoded
from lockstep.training.batches import Loaders
from lockstep.training.losses import RESERVED, sample_at
from lockstep.training.task import Task
from lockstep.training.workload import Columns

# --- Columns of predictions as the rows of a table: plain values by name ---

# B batch · K class, label, ... · H W pixel


WIDE = "probabilities"  # a column of a number for each class or label, written on request


def table_rows(columns: Columns, names: Sequence[str], count: int, *, wide: bool) -> list[Row]:
    """A dict for each of `count` samples. Raises UserError: a column does not fit into it."""
    found: dict[str, list[Any]] = {}
    for name, value in columns.items():
        if len(value) != count or (isinstance(value, Tensor) and value.dim() > 2):
            size = f"the shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{len(value)} values"
            raise UserError(
                f"the predictions have a column `{name}` with {size} for a batch of {count}. Return one value per sample: a number, a text, "
                "a list of them, or an image of whole numbers (HW)."
            )
        if name == WIDE and names and isinstance(value, Tensor) and value.dim() == 2:
            labels = zip(names, value.unbind(1), strict=False) if wide else ()
            found |= {f"probability/{label}": digits(column.tolist()) for label, column in labels}
        else:
            found[name] = digits(value.tolist()) if isinstance(value, Tensor) else list(value)
    return [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)]


# --- What the processes of a prediction leave for rank 0: each a file of lines, joined in input order as streams ---

*_, ERROR = RESERVED  # the column of why a file could not be read
FIRST = (*RESERVED[:-1], "target")  # columns before the task's
SORTED = {"loss": "the largest losses first", "probability": "the least certain first"}
KEPT = 200  # samples of a gallery
DRAWN = "rank-{}.drawn"  # the file of one process: a line holds the index of a sample, and what its task draws of it


def part(folder: Path, rank: int) -> Path:
    """The file of one process: a line holds the number of a batch, the index of a sample, and its row."""
    return folder / f"rank-{rank}.jsonl"


def order(row: Row) -> float:
    """The place of a row in the gallery, by the first of SORTED that it has; otherwise rows keep their order."""
    key = next((name for name in SORTED if name in row), "")
    value = row.get(key, 0.0)
    return -math.inf if math.isnan(value) else -value if key == "loss" else value


def masks(output: Path, column: str) -> Path:
    """The folder of a column of masks, beside the table."""
    return output.with_name(f"{output.stem}-{column}")


class Parts:
    """The rows of all processes: `write` makes the table of them, `gallery` a page; what they count is in `count`, `broken`, `wrong`."""

    def __init__(self, output: Path, folder: Path, world: int) -> None:
        self.output, self.folder, self.world = output, folder, world
        self.count = self.broken = self.wrong = 0
        self.reasons: list[tuple[str, str]] = []  # why the first broken files could not be read
        example = next((row for _, row in self.rows() if not row.get(ERROR)), None)
        if example is None:
            raise UserError("no file can be read any more. Nothing was written.")
        self.example: Row = example
        self.masks = sorted(path.name for path in folder.iterdir() if path.is_dir())
        columns = [name for name in self.example if name not in (*FIRST, ERROR) and not name.startswith("target/")]
        numbers = [name for name in self.example if f"target/{name}" in self.example]  # one may be called target
        self.guess = next(iter(numbers + columns), "")  # the column of what is predicted
        self.key = next((name for name in SORTED if name in self.example), None)

    def rows(self) -> Iterator[tuple[int, Row]]:
        """Index and row, in input order: a batch is shared out by rank, so rows of a batch come by rank."""
        paths = [part(self.folder, rank) for rank in range(self.world)]
        if missing := [str(path) for path in paths if not path.is_file()]:
            raise UserError(f"{missing[0]} is missing: all machines must share the folder of output=. Set another one.")
        with ExitStack() as files:
            streams = [map(json.loads, files.enter_context(path.open(encoding="utf-8"))) for path in paths]
            yield from ((index, row) for _, index, row in heapq.merge(*streams, key=lambda line: line[0]))

    def counted(self) -> Iterator[Row]:
        for _, row in self.rows():
            self.count += 1
            self.wrong += self.is_wrong(row)
            if row.get(ERROR):
                self.broken += 1
                self.reasons += [(row["path"], row[ERROR])] if len(self.reasons) < LISTED else []
            yield row

    def is_wrong(self, row: Row) -> bool:
        """Whether target and prediction differ; numbers and masks are neither right nor wrong."""
        target, guess = (row.get(name) for name in ("target", self.guess))
        if target in (None, "") or guess is None or isinstance(guess, float) or self.guess in self.masks:
            return False
        return set(str(text(target)).split("|")) != set(str(text(guess)).split("|"))

    def write(self) -> None:
        """The table, which appears whole or not at all, with its masks."""
        with replacing(self.output) as new:
            write_table(new, self.output.suffix, self.example, self.counted())
            for name in self.masks:
                remove(masks(self.output, name))
                (self.folder / name).replace(masks(self.output, name))

    def gallery(self, path: Path, data: DataModule, about: Mapping[str, str]) -> None:
        """A page of `KEPT` samples with their predictions. It needs no network, and the files of sounds beside it only to play them."""
        good = (each for each in self.rows() if not each[1].get(ERROR))
        kept = heapq.nsmallest(KEPT, good, lambda each: order(each[1]))
        lines = [line for path in self.folder.glob(DRAWN.format("*")) for line in path.read_text().splitlines()]
        drawn = dict(json.loads(line, object_hook=decoded) for line in lines)
        folders = [Path.cwd() / Path(row["path"]).parent for _, row in kept if "path" in row]
        common = os.path.commonpath(folders) if folders else ""
        values = {
            "samples": [self.sample(index, row, data, path.parent, drawn.get(index, {})) for index, row in kept],
            "rows": [row for _, row in kept],
            "hidden": {*FIRST, self.guess, f"target/{self.guess}", self.key, ERROR, *self.masks},
            "names": [
                as_utf8(os.path.relpath(row["path"], common)) if "path" in row else f"#{index}" for index, row in kept
            ],
            "order": SORTED.get(str(self.key), "the first ones"),
            "unit": data.unit,
            "table": self,
            "about": about,
        }
        write_text(path, render("gallery.html.j2", self.output.stem, values))

    def sample(self, index: int, row: Row, data: DataModule, page: Path, drawn: Mapping[str, Any]) -> Sample:
        """What a page shows of a sample: as the data set stores it, its masks, and what the task draws."""
        raw = sample_at(data.raw(data.predicted_split[0], [index]), 0, 1)
        shown = data.dataset.show(raw)
        if isinstance(data.dataset, Inputs):
            file = quote(os.fsencode(os.path.relpath(data.dataset.test.path(index), page)))
            shown = {n: replace(v, file=file) if isinstance(v, Sound) else v for n, v in shown.items()}
        if self.masks and np.ndim(raw.get("target", 0)) == 2:
            shown["target"] = Mask(np.asarray(raw["target"]))
        for name in self.masks:
            with Image.open(self.output.parent / row[name]) as mask:
                shown[name] = Mask(np.asarray(mask))
        image = shown.pop("image", None)
        return Sample(index, {**shown, **drawn}, image)


# --- Writes the predictions of a process while it makes them ---


class Writer(pl.Callback):
    """Turns what `predict_step` returns into rows, in a file of this process; nothing is kept in memory.

    `asked` are the keys of predict.py. `made` makes columns of the outputs, and `names` are those of their classes or labels. Masks
    of files are enlarged or shrunk to the size of the file.
    """

    def __init__(
        self, loaders: Loaders, task: Task | None, asked: Request, made: Callable[[Any], Columns], names: Sequence[str]
    ) -> None:
        self.loaders, self.task, self.asked, self.made, self.names = loaders, task, asked, made, names
        self.drawn: list[tuple[float, int, str]] = []  # order, index and facts of the first samples of the gallery
        self.output = self.folder = Path(str(asked.output))
        self.own = ExitStack()  # of rank 0: the folder of the parts
        dataset = getattr(loaders.data, "dataset", None)
        self.files = dataset.test if isinstance(dataset, Inputs) else None
        self.file: IO[str] | None = None
        self.order: Iterator[Any] = iter(())  # the indices of each batch

    @property
    def problems(self) -> Sequence[str | None] | None:
        """Why files of the batch could not be read; None if the data is no files."""
        return getattr(self.loaders.data, "problems", None)

    def first(self, index: int) -> Row:
        """What the data knows of a sample: its file, or the index in its part."""
        if self.files is not None:
            return self.files.facts(index)
        paths = self.loaders.paths
        return {"index": index} | ({} if paths is None else {"path": str(paths[index])})

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            self.folder = self.own.enter_context(part_folder(self.output.parent))
        self.folder = trainer.strategy.broadcast(self.folder)
        same = hashlib.sha256(self.files.name_N.tobytes()).hexdigest() if self.files else ""
        if trainer.strategy.broadcast(same) != same:  # which also waits for the folder
            raise TrainingFailed("input: processes found different files: the folder changes. Pass a CSV of the files.")
        trainer.strategy.barrier("the folder of the parts")
        self.file = part(self.folder, trainer.global_rank).open("w", encoding="utf-8")
        self.order = self.loaders.predicted(trainer)

    def on_predict_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: int
    ) -> None:
        assert self.file is not None
        indices = next(self.order)
        if not indices:
            return
        columns = self.made(outputs)
        for name, value in columns.items():
            if (
                isinstance(value, Tensor) and value.dim() == 3 and not value.is_floating_point()
            ):  # a mask for each sample
                columns[name] = self.saved(name, value, indices)
        rows = table_rows(columns, self.names, len(indices), wide=self.asked.probabilities)
        for place, (index, row) in enumerate(zip(indices, rows, strict=True)):
            why = self.problems and self.problems[place]  # None: the data is no files
            row = self.first(index) | ({} if why else row) | ({} if why is None else {ERROR: why})
            self.file.write(f"{json.dumps([batch_idx, index, row])}\n")
        if self.asked.gallery and self.task:
            self.draw(self.task, outputs, [(order(row), index) for index, row in zip(indices, rows, strict=True)])

    def draw(self, task: Task, outputs: Any, places: Sequence[tuple[float, int]]) -> None:
        """Keeps the pictures and curves of the samples that the gallery may show, as a page has them: a set of images is large."""
        try:
            described = task.describe(*outputs)
            found = [{n: v for n, v in facts.items() if isinstance(v, Lines | Picture)} for facts in described]
            new = [(*place, facts) for place, facts in zip(places, found, strict=True) if facts]
        except Exception as e:
            self.task = None  # for the next batch the same
            if e.args != ("target",):  # which files do not have
                warn(f"the gallery lacks pictures and curves: `describe` failed: {type(e).__name__}: {e}")
            return
        kept = heapq.nsmallest(KEPT, [*self.drawn, *new], itemgetter(0))
        self.drawn = [(at, index, v if isinstance(v, str) else json.dumps(encoded(v))) for at, index, v in kept]

    def saved(self, name: str, mask_BHW: Tensor, indices: Sequence[int]) -> list[str]:
        """Writes masks as PNG files; returns their paths, relative to the table."""
        there = masks(self.output, name)
        if there.exists() and not self.asked.overwrite:
            raise UserError(f"{there} exists. Set another output=, or overwrite=true.")
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        for place, (index, mask_HW) in enumerate(zip(indices, mask_BHW.cpu().numpy(), strict=True)):
            if self.problems and self.problems[place]:
                continue
            size = self.files.reader.mask_size(self.files.path(index)) if self.files else None
            frame = getattr(self.files.reader, "frame", None) if self.files else None
            (frame or Frame(len(mask_HW))).mask(mask_HW, size).save(folder / f"{index:06}.png")
        return [f"{there.name}/{index:06}.png" for index in indices]

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.close()
        lines = [f"[{index}, {facts}]\n" for _, index, facts in self.drawn]
        (self.folder / DRAWN.format(trainer.global_rank)).write_text("".join(lines))
        trainer.strategy.barrier("the parts are written")

    def close(self) -> None:
        if self.file:
            self.file.close()


# --- The data to predict, and the table of their predictions ---


def datamodule(settings: Settings, data: DataSet | None) -> pl.LightningDataModule | None:
    """Of the part of the run's data that is asked for, or of the files."""
    cfg, request = settings.cfg, settings.request
    assert request
    if request.part:
        return build.datamodule(settings, data)
    checkpoint = read(Path(settings.tested_checkpoint))
    instead = "pass input=test, or val or train: a part of the run's own data"
    files = input_files(request.input, cfg.data, checkpoint.metadata, instead)
    if files.left_out and settings.world.rank == 0:
        warn(f"left out of input={request.input}: {files.left_out}")
    if isinstance(files.reader, Images):
        files.reader.channels_last = bool(cfg.data.get("channels_last", cfg.channels_last))
    loader = cfg.loader
    assert loader and loader.num_workers != "auto"
    batch = loader.eval_batch_size or loader.batch_size
    return DataModule(
        Inputs(files, checkpoint.network or {}), batch_size=1, eval_batch_size=batch, num_workers=loader.num_workers
    )


@contextmanager
def claimed(output: Path, *, overwrite: bool) -> Iterator[None]:
    """Raises UserError: another prediction is writing `output`, or has written it meanwhile."""
    in_use = f"output={output}: another prediction is writing it. Set a different output=."
    with locked(output.with_name(f".{output.name}.lock"), in_use, 0):
        if output.exists() and not overwrite:
            raise UserError(f"output={output} exists. Set a different file, or overwrite=true.")
        yield


def predict(settings: Settings, module: pl.LightningModule, data: Any) -> Parts | None:
    """Writes the table; returns what rank 0 counted. Raises UserError: the module does not predict."""
    world, asked, work = settings.world, settings.request, workload(settings, module, data)
    assert asked and asked.output
    output = Path(asked.output)
    work.loaders.predict_on(asked.part, gallery=asked.gallery)
    writer = Writer(work.loaders, work.task, asked, *work.columns(asked.top_k))
    trainer = evaluator(settings, work, writer)
    claim = nullcontext() if world.rank else claimed(output, overwrite=asked.overwrite)
    with claim, writer.own, closing(writer):
        with build.oom_advice(settings, trainer, work):
            trainer.predict(work.module, datamodule=data, return_predictions=False)
        if world.rank:
            return None
        parts = Parts(output, writer.folder, world.size)
        parts.write()
        if asked.gallery:
            parts.gallery(
                gallery_of(output), data, {"Input": asked.input, "Checkpoint": Path(settings.tested_checkpoint).name}
            )
        if parts.broken:
            what = f"{parts.broken:,} of {parts.count:,} files cannot be read; the column {ERROR} has the reasons"
            warn(f"{what}:{listed(parts.reasons, parts.broken)}")
        return parts


def show_predictions(settings: Settings, about: Mapping[str, Any], parts: Parts) -> None:
    """Says where the table is, and writes predict.json."""
    asked, path, broken = settings.request, settings.evaluation_file("predict"), parts.broken
    assert asked and asked.output
    output, gallery = Path(asked.output), asked.gallery
    result = {"input": asked.input, "output": asked.output, "count": parts.count, "broken": broken}
    rows = f"done: {counted(parts.count, 'row')}" + (f", {counted(broken, 'broken file')}" if broken else "")
    say(f"{rows}; predictions by {about['checkpoint']}:")
    say(str(output), copied=True)
    if gallery:
        page = output.with_name(f"{output.name}.html")
        say(str(page), copied=True, link=page)
    try:
        write_json(path, {**about, **result})
    except OSError as e:  # the table is complete, and may be elsewhere because the run is read-only
        warn(f"{path} could not be written: {e.strerror}. The table is complete.")
