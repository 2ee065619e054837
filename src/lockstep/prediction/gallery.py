"""A page of images with their predictions: one file, which needs no network. Free of torch."""

import html
import itertools
from collections.abc import Iterator
from pathlib import Path

from lockstep.machine.files import write_text
from lockstep.prediction.formats import Row, text
from lockstep.prediction.parts import THUMBNAIL

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
body {{ font: 14px system-ui, sans-serif; margin: 1rem; color-scheme: light dark }}
main {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 1rem }}
figure {{ margin: 0; overflow-wrap: anywhere }} img {{ width: 128px; image-rendering: pixelated }} b {{ font-weight: 600 }}
</style>
<h1>{title}</h1>
<main>
{figures}
</main>
</html>
"""


def write_gallery(path: Path, title: str, rows: Iterator[Row], count: int) -> None:
    """The first `count` rows that have a thumbnail."""
    pictured = itertools.islice((row for row in rows if THUMBNAIL in row), count)
    write_text(path, PAGE.format(title=html.escape(title), figures="\n".join(map(figure, pictured))))


def figure(row: Row) -> str:
    said = "<br>".join(
        f"{html.escape(name)}: <b>{html.escape(str(text(value)))}</b>"
        for name, value in row.items()
        if name != THUMBNAIL and value not in (None, "")
    )
    return f'<figure><img src="{row[THUMBNAIL]}" alt="" loading="lazy"><figcaption>{said}</figcaption></figure>'
