"""Panels of the report as images, for loggers: matplotlib draws what report.html draws as SVG."""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from lockstep.reporting.drawing import first_lines, other_lines, shown_images
from lockstep.tasks.panel import Bars, Content, Gallery, Lines, Matrix, Points

SMALLEST = 96  # pixels; smaller images are enlarged
COLUMNS, GAP, LINE, LETTERS = 6, 8, 14, 10  # of a sheet; the last three are pixels


def images_of(panel: Content) -> list[tuple[Image.Image, str]]:
    """Each image with its caption: of a gallery one for each sample; none of panels that are texts."""
    if isinstance(panel, Gallery):
        found = []
        for sample in panel.samples:
            caption = "\n".join([*first_lines(sample), *other_lines(sample)])
            found += [(enlarged(image), caption) for image in shown_images(sample).values()]
        return found
    if isinstance(panel, Matrix | Lines | Points | Bars):
        return [(chart(panel), " · ".join(filter(None, [panel.title, panel.note])))]
    return []


def enlarged(image: Image.Image) -> Image.Image:
    scale = max(1, math.ceil(SMALLEST / max(image.size)))
    return image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)


def chart(panel: Matrix | Lines | Points | Bars) -> Image.Image:
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
