"""What the processes of a prediction leave for rank 0: each a file of lines, joined in input order as streams. Free of torch."""

import heapq
import json
from collections.abc import Iterator
from pathlib import Path

from lockstep.errors import UserError
from lockstep.machine.files import remove, replacing
from lockstep.prediction.formats import Row, write_table

ERROR = "error"  # the column of why a file could not be read
THUMBNAIL = "thumbnail"  # of a row, for the gallery; no column


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
