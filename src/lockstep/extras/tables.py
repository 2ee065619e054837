"""Inputs and outputs of predictions: files, and tables as CSV, JSON, JSON lines or Parquet."""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.utilities.model_helpers import is_overridden
from numpy.typing import NDArray
from PIL.Image import Image
from torch import Tensor

from lockstep.config.formatting import inline
from lockstep.config.project import is_user_code_error
from lockstep.config.run_config import Component, Request
from lockstep.config.targets import target_of
from lockstep.data.dataset import Batch, DataSet
from lockstep.errors import UserError
from lockstep.extras.exported import digits, odd_shape, samples_of, write_csv
from lockstep.kit.folder import fold_name
from lockstep.kit.listing import MISSING, SEPARATORS, Check, Listing, find_inputs, target_problem
from lockstep.kit.pixels import Frame, file_name_text, read_error_text
from lockstep.kit.task import Task
from lockstep.machine.files import plain_values, to_json
from lockstep.training.losses import validated_columns
from lockstep.training.module import WholeBatchNeeded, hook

# --- Files to predict ---

Row = dict[str, Any]
BUGS = (NameError, AttributeError, TypeError, ImportError)  # in a custom `read`; raised if no file can be read
LISTED = 10  # files in a message


def list_errors(errors: Iterable[tuple[str, str]], count: int) -> str:
    """Lines with the first of `count` files that cannot be read, and why. `errors`: path and reason of each."""
    lines = [f"\n  {inline(path)}: {inline(why)}" for path, why in itertools.islice(errors, LISTED)]
    return "".join(lines) + (f"\n  and {count - LISTED:,} more" if count > LISTED else "")


class InputFiles:
    """Samples from files. For a file that cannot be read, `problem` has the reason, and the sample is a copy of a readable one.

    Files are read on demand. If a file has several samples, all files are read at the start.

    Raises:
        UserError: no file can be read.
    """

    def __init__(self, reader: DataSet, inputs: Listing) -> None:
        # One array of bytes, because reference counts make workers copy a list of strings page by page.
        self.name_N, self.target_N = (np.array([os.fsencode(x) for x in xs]) for xs in (inputs.paths, inputs.targets))
        self.reader, self.base, self.left_out = reader, inputs.base, inputs.left_out
        self.several = True  # whether files may have several samples, as the first readable one has
        self.bug: Exception | None = None
        count, problems = len(self.name_N), list[tuple[str, str]]()
        for file in range(count):
            samples, problem = self.read(file)
            if not problem:
                break
            problems.append((self.name(file), problem))
        else:
            if self.bug:
                self.bug.add_note(
                    f"{type(reader).__name__}.read can use only self.metadata, because __init__ was not called."
                )
                raise self.bug
            raise UserError(f"none of {count:,} files can be read:{list_errors(problems, count)}\nNothing was written.")
        self.example, self.several = samples[0], not isinstance(samples, list)
        self.held = [self.read(file) for file in range(count)] if self.several else []
        counts = np.array([max(1, len(samples)) for samples, _ in self.held] or [1] * count)  # a broken file has a row
        self.file_N = np.repeat(np.arange(count), counts)
        self.first_N = counts.cumsum() - counts  # for each file, the index of its first sample

    def __len__(self) -> int:
        return len(self.file_N)

    def name(self, file: int) -> str:
        return os.fsdecode(self.name_N[file])

    def path(self, index: int) -> Path:
        return self.base / self.name(self.file_N[index])

    def read(self, file: int) -> tuple[Any, str]:
        """The samples of a file, and the reason if it cannot be read."""
        try:
            samples = samples_of(self.reader.read(self.base / self.name(file)))
            if len(samples) > 1 and not self.several:
                raise ValueError(f"it contains {len(samples)} samples, but the first file has only one")
            return samples, ""
        except Exception as e:  # Pillow raises nearly anything for a broken file
            if isinstance(e, BUGS) and is_user_code_error(e):
                self.bug = e
            return [], read_error_text(e)

    def sample(self, index: int) -> tuple[Row, str]:
        file = self.file_N[index]
        samples, problem = self.held[file] if self.held else self.read(file)
        sample = self.example if problem else samples[index - self.first_N[file]]
        problem = problem or odd_shape(sample, self.example)
        return self.example if problem else sample, problem

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        samples, problems = zip(*map(self.sample, indices), strict=True)
        columns = {name: np.stack([sample[name] for sample in samples]) for name in self.example}
        return {n: v.tolist() if v.dtype.kind == "U" else v for n, v in columns.items()} | {"problem": list(problems)}

    def mask(self, index: int, mask_HW: NDArray[np.integer]) -> Image:
        """A predicted mask of a file, in the size of the file."""
        frame = getattr(self.reader, "frame", Frame(len(mask_HW)))
        return frame.mask(mask_HW, self.reader.mask_size(self.path(index)))

    def facts(self, index: int) -> Row:
        """The first columns of a table: the path of the file, the row in it, and the target, if there are any."""
        file = self.file_N[index]
        facts: Row = {"path": self.name(file)}
        if self.several:
            facts["row"] = int(index - self.first_N[file])
        if len(self.target_N):
            cell, names = os.fsdecode(self.target_N[file]), [*(self.reader.metadata.get("targets") or ())]
            is_number = len(names) == 1
            facts |= {f"target/{names[0]}": digits(float(cell)) if cell else None} if is_number else {"target": cell}
        return facts


# of a name, which a target may have in any of these
FORMS: tuple[Callable[[str], str], ...] = (str, fold_name, lambda name: fold_name(name).lower())


def target_check(metadata: Mapping[str, Any]) -> Check:
    """A check that spells a row's classes or labels as in `metadata`, and rejects targets that must be numbers and are not.

    A missing value becomes empty.
    """
    names = [*map(str, metadata.get("classes") or metadata.get("labels") or ())]
    is_number = len(metadata.get("targets") or ()) == 1
    spelling = dict.fromkeys(MISSING if names or is_number else (), "")
    for form in reversed(FORMS):
        spelling |= {form(name): name for name in names}

    @cache
    def normalised(cell: str) -> str:
        parts = filter(None, SEPARATORS.split(cell)) if metadata.get("labels") else [cell]
        return "|".join(
            next((spelling[form(part)] for form in FORMS if form(part) in spelling), part) for part in parts
        )

    def check(row: dict[str, str]) -> str | None:
        if "target" in row:
            row["target"] = cell = normalised(file_name_text(row["target"].strip()))
            if is_number and cell and target_problem(cell, "number"):
                return f"target={cell} is not a number, such as 1.5. Correct it, or leave it empty."
        return None

    return check


def input_files(source: str, data: Component, metadata: Mapping[str, Any], hint: str, key: str = "input") -> InputFiles:
    """The files that `source` names, read by the class of a run's `data`. Raises UserError: it cannot read files, or there are none."""
    reader: Any = target_of(data.target, "data")
    if getattr(reader, "read", DataSet.read) is DataSet.read:
        raise UserError(
            f"{key}={source}: data={data.title} cannot read files. Make it a DataSet with a method read(path) (docs/predict-export.md), or {hint}."
        )
    files = find_inputs(source, reader.endings, reader.unit, target_check(metadata), key)
    return InputFiles(reader.for_files(metadata), files)


class Inputs(DataSet):
    """Files as the data of a prediction. The network gets the arguments from the checkpoint."""

    def __init__(self, files: InputFiles, network: Mapping[str, Any]) -> None:
        reader = files.reader
        self.unit, self.metadata = reader.unit, reader.metadata  # type: ignore[misc]
        self.train = self.val = self.test = files
        self.preprocess, self.show = reader.preprocess, reader.show  # type: ignore[method-assign]
        self.model_kwargs = lambda: dict(network)  # type: ignore[method-assign]


# --- Tables as files. Rows are streamed, so memory does not grow ---

CHUNK = 10_000  # rows of a Parquet row group


def write_table(path: Path, ending: str, example: Row, rows: Iterator[Row]) -> None:
    """Writes `rows` to `path` in the format of `ending`, with the columns of `example`; missing values are empty."""
    filled = ({name: row.get(name) for name in example} for row in rows)
    if ending == ".parquet":
        write_parquet(path, example, filled)
    elif ending == ".csv":
        write_csv(path, example, filled)
    else:
        first, between, last = ("[\n", ",\n", "\n]\n") if ending == ".json" else ("", "\n", "\n")
        with path.open("w", encoding="utf-8") as file:
            for number, row in enumerate(filled):
                file.write((between if number else first) + to_json(row, indent=None))
            file.write(last)


def write_parquet(path: Path, example: Row, rows: Iterator[Row]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    readable = map(plain_values, rows)
    chunks = iter(lambda: list(itertools.islice(readable, CHUNK)), [])
    first = next(chunks)
    # a column that has only empty lists, or no values, gets the type of texts
    known = {name: [""] if value == [] else "" if value is None else value for name, value in example.items()}
    try:
        schema = pa.schema([(n, pa.infer_type([value, *(row[n] for row in first)])) for n, value in known.items()])
        with pq.ParquetWriter(path, schema) as writer:
            for chunk in itertools.chain([first], chunks):
                writer.write_table(pa.Table.from_pylist(chunk, schema))
    except (pa.ArrowInvalid, pa.ArrowTypeError) as e:
        raise UserError(
            f"a Parquet column has values of one type, but these predictions do not ({inline(e)}). Set output= to a .jsonl file, or return values of one type."
        ) from None


# --- Columns of a table, from what a task or a module predicts ---


def predicted_columns(module: pl.LightningModule, request: Request) -> Callable[[Any], Row]:
    """A function from the result of a prediction to columns of a table."""
    if request.top_k > 1 and not hook(module, "top"):
        raise UserError(
            f"top_k={request.top_k} has no effect: {type(module).__name__} does not rank classes. Remove it."
        )
    if isinstance(module, Task):
        return partial(columns_of_task, module, request)
    if not (is_overridden("predict_step", module) or is_overridden("forward", module)):
        raise UserError(
            f"{type(module).__name__} has no predict_step and no forward. Add one that takes a batch and returns a tensor with a row per sample, or a dict of columns."
        )
    return columns_of_module


def columns_of_task(task: Task, request: Request, output: tuple[Any, Any]) -> Row:
    """The task's predictions; targets and loss too, if the batch has targets."""
    network_output, batch = output
    predictions, names = validated_columns(task.predictions(network_output)), task.value_names
    if names and isinstance(wide := predictions.get("probabilities"), Tensor) and wide.dim() == 2:
        del predictions["probabilities"]
        if request.probabilities:
            predictions |= {f"probability/{name}": x for name, x in zip(names, wide.unbind(1), strict=False)}
    if request.top_k > 1:
        predictions |= task.top(network_output, request.top_k)  # type: ignore[operator]
    if "target" not in batch:
        return predictions
    columns = task.targets(batch) | predictions
    with suppress(WholeBatchNeeded):  # alone, a sample has no loss
        columns.setdefault("loss", task.loss(network_output, batch))
    return columns


def columns_of_module(output: Any) -> Row:
    return validated_columns(output, targets=True) if isinstance(output, Mapping) else {"output": output}
