"""A page of images with their predictions: one file, which needs no network. Free of torch."""

import itertools
from collections.abc import Iterator
from pathlib import Path

from lockstep.extras.prediction_writer import THUMBNAIL
from lockstep.extras.tables import Row, text
from lockstep.machine.files import write_text
from lockstep.reporting.render import render


def write_gallery(path: Path, title: str, rows: Iterator[Row], count: int) -> None:
    """The first `count` rows that have a thumbnail."""
    pictured = [
        (row.pop(THUMBNAIL), [(name, text(value)) for name, value in row.items() if value not in (None, "")])
        for row in itertools.islice((row for row in rows if THUMBNAIL in row), count)
    ]
    write_text(path, render("gallery.html.j2", title, {"pictured": pictured}))
