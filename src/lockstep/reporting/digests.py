"""digests.csv: what a step was made of, in digests. Free of torch.

For each step a row for the loss of each logical rank, then one for each tensor of the summed gradients, then one for each tensor of
the weights after the step.
"""

import csv
from collections.abc import Iterable
from pathlib import Path

from lockstep.config.run_files import whole_rows
from lockstep.machine import files

COLUMNS = ("step", "what", "name", "digest")
LOSS, GRADIENT, WEIGHT = "loss of logical rank", "gradient", "weight"
Row = tuple[str, ...]


def path_in(folder: Path) -> Path:
    return folder / "digests.csv"


def rows(folder: Path) -> list[Row]:
    return [tuple(row.values()) for row in whole_rows(path_in(folder))]


def append(folder: Path, added: Iterable[Row]) -> None:
    path = path_in(folder)
    with files.naming(path), path.open("a", newline="") as file:
        csv.writer(file).writerows(added)


def begin(folder: Path) -> None:
    """Makes the file, unless the run is resumed and has it."""
    if not path_in(folder).is_file():
        append(folder, [COLUMNS])


def cut(folder: Path, step: int) -> None:
    """Drops the rows after `step`, which a resumed run will write again."""
    if path_in(folder).is_file():
        kept = [row for row in rows(folder) if int(row[0]) <= step]
        with files.replacing(path_in(folder)) as part, part.open("w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *kept])


def parting(one: Path, other: Path) -> str | None:
    """Where two runs part first: step, logical rank, tensor; None if they do not, or one has no digests."""
    ours, theirs = ({row[:3]: row[3] for row in rows(folder)} for folder in (one, other))
    apart = [place for place, digest in ours.items() if theirs.get(place, digest) != digest]
    if not apart:
        return None
    step, what, _ = apart[0]
    names = [place[2] for place in apart if place[:2] == (step, what)]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"the runs part at step {step}, in the {what} {', '.join(names[:3])}{more}"
