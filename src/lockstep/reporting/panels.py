"""The panels of the test set: as data (panels.json), drawn for report.html, and as images for loggers."""

import base64
import io
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from markupsafe import Markup
from PIL import Image, ImageDraw, ImageFont

from lockstep.config.words import number, percent
from lockstep.errors import UserError
from lockstep.machine.files import write_text
from lockstep.reporting.pictures import data_uri, overlaid, thumbnail
from lockstep.reporting.render import chart, coloured
from lockstep.tasks.panel import Bars, Content, Gallery, Lines, Mask, Matrix, Points, Sample, Share, Tokens

# --- panels.json: what report.html shows of the test set, as data ---

NAME, KIND, IMAGE, ARRAY = "panels.json", "__panel__", "__image__", "__array__"
KINDS = {kind.__name__: kind for kind in (*get_args(Content), Mask, Sample, Share, Tokens)}


def encoded(value: Any) -> Any:
    """Plain values. Images (CHW) become thumbnails, as on the page; other arrays keep all their values."""
    if is_dataclass(value) and not isinstance(value, type):
        return {KIND: type(value).__name__} | {f.name: encoded(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): encoded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [encoded(each) for each in value]
    if getattr(value, "ndim", 0) == 3:
        return {IMAGE: data_uri(thumbnail(value))}
    if getattr(value, "ndim", 0):
        array = np.asarray(value)
        return {ARRAY: [array.dtype.str, array.shape, base64.b64encode(zlib.compress(array.tobytes())).decode()]}
    if hasattr(value, "item"):
        return value.item()
    return value if value is None or isinstance(value, str | int | float) else str(value)


def decoded(found: dict[str, Any]) -> Any:
    if IMAGE in found:
        image = np.array(Image.open(io.BytesIO(base64.b64decode(found[IMAGE].partition(",")[2]))))
        return image.transpose(2, 0, 1) if image.ndim == 3 else image[None]
    if ARRAY in found:
        dtype, shape, text = found[ARRAY]
        return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype).reshape(shape)
    return KINDS[found.pop(KIND)](**found) if KIND in found else found


def write_panels(folder: Path, panels: Sequence[Content]) -> None:
    write_text(folder / NAME, json.dumps([encoded(panel) for panel in panels]) + "\n")


def read_panels(folder: Path) -> list[Content]:
    """No panels without the file. Raises UserError: it is damaged."""
    path = folder / NAME
    try:
        found = json.loads(path.read_text(encoding="utf-8"), object_hook=decoded) if path.is_file() else []
        if isinstance(found, list) and all(isinstance(each, get_args(Content)) for each in found):
            return found
        why = "it holds something else"
    except (OSError, ValueError, KeyError, TypeError, RecursionError, zlib.error) as e:
        why = str(e)
    raise UserError(f"{path} is damaged: {why}. Remove the file: report.html shows the same.")


# --- How panels of the test set and samples are drawn: the filters that their templates use ---


def drawn(panel: Lines | Points | Bars) -> Markup:
    if isinstance(panel, Lines):
        return chart(panel.x, panel.series)
    if isinstance(panel, Points):
        return chart(panel.x, {}, scatter=panel.points, diagonal=panel.diagonal)
    return chart(panel.x, {}, bars=list(zip(panel.edges, panel.edges[1:], panel.counts, strict=False)))


def keys(panel: Lines) -> list[tuple[str, str]]:
    return coloured([name for name, points in panel.series.items() if points])


# --- galleries ---


def shown_images(sample: Sample) -> dict[str, Image.Image]:
    """By name: the masks of a sample over its image, or the image itself."""
    if sample.image_CHW is None:
        return {}
    masks = {name: value for name, value in sample.facts.items() if isinstance(value, Mask)}
    images = {name: overlaid(sample.image_CHW, mask.classes_HW, mask.ignored) for name, mask in masks.items()}
    return images or {"sample": thumbnail(sample.image_CHW)}


def images_of(sample: Sample) -> list[tuple[str, str, bool]]:
    """Name, data URI and whether the pixels are few."""
    return [(name, data_uri(image), max(image.size) <= 64) for name, image in shown_images(sample).items()]


def tokens_of(sample: Sample) -> list[tuple[str, list[tuple[str, float, float]]]]:
    """Name, and each piece with the strength of its colour and its number."""
    found = [(name, value.pieces) for name, value in sample.facts.items() if isinstance(value, Tokens)]
    most = max((abs(v) for _, pieces in found for _, v in pieces if math.isfinite(v)), default=1.0) or 1.0
    return [
        (name, [(text, min(1.0, abs(v) / most) if math.isfinite(v) else 1.0, v) for text, v in pieces])
        for name, pieces in found
    ]


def plain_facts(sample: Sample) -> dict[str, str]:
    return {n: said(n, v) for n, v in sample.facts.items() if not isinstance(v, Mask | Tokens)}


def said(name: str, value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(said(name, each) for each in value)
    if isinstance(value, float) and name.startswith("P("):
        return percent(value)
    return number(value)


def first_lines(sample: Sample) -> list[str]:
    """Target and prediction, the first thing to see."""
    facts = plain_facts(sample)
    target, guess = facts.get("target"), facts.get("prediction")
    if target is not None and guess is not None:
        return [f"{target} → {guess}"]
    return [target] if target is not None else []


def other_lines(sample: Sample) -> list[str]:
    facts = {n: v for n, v in plain_facts(sample).items() if n not in ("target", "prediction")}
    loss = facts.pop("loss", None)
    ending = [f"loss {loss}"] if loss is not None else []
    ending += [f"#{sample.index}"] if sample.index is not None else []
    return [*(f"{n} {v}" for n, v in facts.items()), " · ".join(ending)]


def look(sample: Sample) -> str:
    kinds = {type(value) for value in sample.facts.values()}
    return "texts" if Tokens in kinds else "masks" if Mask in kinds and sample.image_CHW is not None else "images"


FILTERS = (drawn, keys, images_of, tokens_of, first_lines, other_lines, look)


# --- Panels of the report as images, for loggers: matplotlib draws what report.html draws as SVG ---

SMALLEST = 96  # pixels; smaller images are enlarged
COLUMNS, GAP, LINE, LETTERS = 6, 8, 14, 10  # of a sheet; the last three are pixels


def images_of_panel(panel: Content) -> list[tuple[Image.Image, str]]:
    """Each image with its caption: of a gallery one for each sample; none of panels that are texts."""
    if isinstance(panel, Gallery):
        found = []
        for sample in panel.samples:
            caption = "\n".join([*first_lines(sample), *other_lines(sample)])
            found += [(enlarged(image), caption) for image in shown_images(sample).values()]
        return found
    if isinstance(panel, Matrix | Lines | Points | Bars):
        return [(chart_image(panel), " · ".join(filter(None, [panel.title, panel.note])))]
    return []


def enlarged(image: Image.Image) -> Image.Image:
    scale = max(1, math.ceil(SMALLEST / max(image.size)))
    return image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)


def chart_image(panel: Matrix | Lines | Points | Bars) -> Image.Image:
    from matplotlib.figure import Figure

    side = max(5.0, 0.4 * len(panel.names)) if isinstance(panel, Matrix) else 5.0  # inches
    figure = Figure(figsize=(side, side), layout="constrained", dpi=100)
    axes = figure.subplots()
    if isinstance(panel, Matrix):
        axes.set_title(panel.title)
        draw_matrix(axes, panel)
    else:
        axes.set_title(f"{panel.title}\n{panel.note}".strip(), fontsize=10, wrap=True)
        axes.set(xlabel=panel.x, ylabel=panel.y)
    if isinstance(panel, Lines):
        for name, points in panel.series.items():
            axes.plot(*zip(*points, strict=True), label=name, marker=".") if points else None
        axes.legend()
    elif isinstance(panel, Points):
        axes.scatter([x for x, _ in panel.points], [y for _, y in panel.points], s=6)
        if panel.diagonal:
            axes.axline((0, 0), slope=1, color="grey", linewidth=1)
    elif isinstance(panel, Bars):
        axes.stairs(panel.counts, panel.edges, fill=True)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return Image.open(file).convert("RGB")


def draw_matrix(axes: Any, panel: Matrix) -> None:
    """Colours are shares of a row; the numbers are counts."""
    shares = [[value / max(1, sum(row)) for value in row] for row in panel.values]
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set(xlabel="prediction", ylabel="target")
    axes.set_xticks(range(len(panel.names)), panel.names, rotation=90)
    axes.set_yticks(range(len(panel.names)), panel.names)
    for y, row in enumerate(panel.values):
        for x, value in enumerate(row):
            colour = "white" if shares[y][x] > 0.5 else "black"
            axes.text(x, y, str(value), ha="center", va="center", fontsize=7, color=colour) if value else None


def sheet(pictures: Sequence[tuple[Image.Image, str]]) -> Image.Image:
    """All images on one, with their captions below; a single one as it is."""
    from matplotlib import get_data_path

    if len(pictures) == 1:
        return pictures[0][0]
    font = ImageFont.truetype(Path(get_data_path(), "fonts/ttf/DejaVuSans.ttf"), LETTERS)  # Pillow's own has no arrow
    texts = [line for _, caption in pictures for line in caption.splitlines()]
    width, height = (max(image.size[axis] for image, _ in pictures) for axis in (0, 1))
    width = max(width, *(math.ceil(font.getlength(line)) for line in texts), 0)
    lines = max(len(caption.splitlines()) for _, caption in pictures)
    tall, columns = height + lines * LINE + GAP, min(COLUMNS, len(pictures))
    page = Image.new("RGB", (columns * (width + GAP), math.ceil(len(pictures) / columns) * tall), "white")
    draw = ImageDraw.Draw(page)
    for place, (image, caption) in enumerate(pictures):
        row, column = divmod(place, columns)
        page.paste(image, (column * (width + GAP), row * tall))
        below = column * (width + GAP), row * tall + height
        draw.multiline_text(below, caption, "black", font, spacing=LINE - LETTERS)
    return page
