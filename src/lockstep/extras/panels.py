"""The panels of the test set: their images, their data (panels.json), and their drawings for report.html."""

import base64
import io
import json
import math
import wave
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image, ImageColor

from lockstep.config.formatting import metric
from lockstep.data.dataset import DataSet, Sound
from lockstep.extras.render import ENVIRONMENT, chart, thin_out, with_colours
from lockstep.kit.panels import Bars, Content, Gallery, Lines, Mask, Matrix, Picture, Points, Sample, Tokens
from lockstep.machine.files import write_text
from lockstep.reporting.report import ARRAY, IMAGE, KIND

# --- Small images for a page, as data URIs ---

SIDE = 128  # pixels: the largest side of a thumbnail
FEW = 64  # pixels: up to this side, browsers enlarge an image
SMALL = 200  # the most points of a sample's curve
LONG = 160  # characters; a longer text gets a wide column, and is not a class
CONTROLS = {n: f"\\x{n:02x}" for n in range(32) if chr(n) not in "\t\n"}  # escaped, because browsers do not show them
# Colours of mask classes: those of Okabe and Ito, which colour-blind people can distinguish, then hues a golden angle apart.
OKABE_ITO = np.frombuffer(bytes.fromhex("000000 e69f00 56b4e9 009e73 f0e442 0072b2 d55e00 cc79a7"), np.uint8)
HUES = [ImageColor.getrgb(f"hsv({222.48 * k % 360}, {90 - 35 * (k % 2)}%, 85%)") for k in range(8, 256)]
COLOURS = np.concatenate([OKABE_ITO.reshape(-1, 3), HUES]).astype(np.float32)
OPACITY = 0.55


def thumbnail(image_CHW: Any) -> Image.Image:
    array = np.asarray(image_CHW)
    image = Image.fromarray(array[0] if len(array) == 1 else array.transpose(1, 2, 0))
    if max(image.size) > SIDE:
        image.thumbnail((SIDE, SIDE))
    return image


def overlay_mask(image_CHW: Any, mask: Mask) -> Image.Image:
    """The mask over a thumbnail of the image."""
    image, classes = np.asarray(thumbnail(image_CHW).convert("RGB")), np.asarray(mask.classes_HW)
    rows, columns = (np.arange(n) * size // n for n, size in zip(image.shape, classes.shape, strict=False))
    return blend(image, classes[np.ix_(rows, columns)], mask.ignored)


def blend(image_HW3: NDArray[np.uint8], classes: NDArray[Any], ignored: int | None = None) -> Image.Image:
    """The mask over the image; class 0 and the ignored class are transparent."""
    drawn = ((classes != 0) & (classes != ignored))[..., None]
    mixed = np.where(drawn, OPACITY * colour_of(classes) + (1 - OPACITY) * image_HW3, image_HW3)
    return Image.fromarray(mixed.round().astype(np.uint8))


def colour_of(classes: Any) -> NDArray[np.float32]:
    return COLOURS[np.where(classes > 0, (classes - 1) % (len(COLOURS) - 1) + 1, 0)]


# --- What a sample of any data shows ---

PLAYED = 2**15  # most samples of a sound that a page plays


def picture(value: Any) -> NDArray[np.uint8] | None:
    """uint8 image_CHW; None unless `value` is an image of 1 or 3 channels. Other dtypes are scaled from black to white."""
    image_CHW = np.asarray(value)
    if image_CHW.ndim != 3 or image_CHW.shape[0] not in (1, 3):
        return None
    if image_CHW.dtype != np.uint8:
        image_CHW = image_CHW.astype(np.float32)
        image_CHW = (image_CHW - image_CHW.min()) / max(1e-12, np.ptp(image_CHW)) * 255
    return image_CHW.round().astype(np.uint8)


def shown(dataset: DataSet, sample: Mapping[str, Any]) -> dict[str, Any]:
    """What a page shows for a sample, by name: what the data set's `show` returns.

    Otherwise images of 1 or 3 channels, texts, and data described in `metadata`: sounds (`sample_rate`), tokens
    (`vocabulary`), table columns (`inputs`).
    """
    if (own := dataset.show(sample)) is not None:
        return own
    value, metadata = sample.get("input"), dataset.metadata
    if isinstance(value, str):
        return {"text": value}
    if isinstance(value, Mapping) or (isinstance(value, list | tuple) and any(hasattr(x, "shape") for x in value)):
        return {}  # several inputs
    if (image_CHW := picture(value)) is not None:
        return {"image": image_CHW}
    array = np.asarray(value)
    if "sample_rate" in metadata and array.ndim in (1, 2):
        wave_T = array.reshape(-1, array.shape[-1])[0, :PLAYED]
        peak = 32768.0 if wave_T.dtype == np.int16 else max(1.0, float(np.abs(wave_T).max(initial=0)))
        return {"sound": Sound((wave_T / peak * 32767).astype(np.int16), int(metadata["sample_rate"]))}
    if "vocabulary" in metadata and array.ndim == 1 and array.dtype.kind in "iu":
        return {"text": "".join(str(metadata["vocabulary"][token]) for token in array)}
    names = metadata.get("inputs", ())
    return dict(zip(names, array.tolist(), strict=True)) if array.shape == (len(names),) else {}


# --- Data URIs ---


def data_uri(image: Image.Image) -> str:
    """PNG for few pixels, which a browser enlarges without blurring; JPEG for many."""
    file, kind = io.BytesIO(), "png" if max(image.size) <= FEW else "jpeg"
    image.save(file, kind, optimize=True, quality=82)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


# --- panels.json: the test-set panels of report.html as data. reporting/report.py reads it ---


def encode(value: Any) -> Any:
    """A value as JSON. As on the page, images (CHW) become thumbnails and a sample's curves are thinned out; other arrays keep all values."""
    if isinstance(value, Sample):
        value = replace(value, facts={**value.facts, **charts(value)})
    if is_dataclass(value) and not isinstance(value, type):
        return {KIND: type(value).__name__} | {f.name: encode(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if getattr(value, "ndim", 0) == 3:
        return {IMAGE: data_uri(thumbnail(value))}
    if getattr(value, "ndim", 0):
        array = np.asarray(value)
        return {ARRAY: [array.dtype.str, array.shape, base64.b64encode(zlib.compress(array.tobytes())).decode()]}
    if hasattr(value, "item"):
        return value.item()
    return value if value is None or isinstance(value, str | int | float) else str(value)


def write_panels(path: Path, panels: Sequence[Content]) -> None:
    write_text(path, json.dumps([encode(panel) for panel in panels]) + "\n")


# --- What the templates need to draw a panel ---


def panel_svg(panel: Lines | Points | Bars) -> Markup:
    if isinstance(panel, Lines):
        highest = 1.0 if all(y <= 1 for points in panel.series.values() for _, y in points) else math.inf
        return chart(panel.title, panel.x, panel.series, colours=dict(keys(panel)), highest=highest)
    if isinstance(panel, Points):
        return chart(panel.title, panel.x, {}, scatter=panel.points, diagonal=panel.diagonal)
    return chart(panel.title, panel.x, {}, bars=list(zip(panel.edges, panel.edges[1:], panel.counts, strict=False)))


def keys(panel: Lines) -> list[tuple[str, str]]:
    """The series and their colours; a single series has the colour of the test set."""
    return with_colours([name for name, points in panel.series.items() if points], one="test")


def most_errors(panel: Matrix) -> int:
    """The largest count off the diagonal, which is drawn in the darkest red."""
    return max((n for i, row in enumerate(panel.values) for j, n in enumerate(row) if i != j), default=0)


def is_right(sample: Sample) -> bool | None:
    """Whether the prediction is right; None for samples without target and prediction as text."""
    pair = [sample.facts.get(name) for name in ("target", "prediction")]
    return pair[0] == pair[1] if all(isinstance(value, str | list) for value in pair) else None


def classes(sample: Sample) -> list[str]:
    """The target as text, or each of several labels. A long text is not a class."""
    target = sample.facts.get("target")
    words = map(str, target) if isinstance(target, list) else [target] if isinstance(target, str) else []
    return [word for word in words if len(word) <= LONG]


def classes_of(galleries: Sequence[Gallery]) -> list[str]:
    """All targets that are text, by which the page filters."""
    words = {word for panel in galleries for sample in panel.samples for word in classes(sample)}
    return sorted(words, key=lambda word: (len(word) if word.isdigit() else 0, word)) if len(words) > 1 else []


def mask_legend(panel: Gallery) -> list[tuple[str, str]]:
    """The classes of the masks that are drawn, with their colours."""
    masks = [v for sample in panel.samples for v in sample.facts.values() if isinstance(v, Mask) and v.names]
    drawn = {k for mask in masks for k in np.unique(mask.classes_HW) if k not in (0, mask.ignored)}
    names = enumerate(masks[0].names if masks else ())
    return [(str(name), "rgb({:.0f} {:.0f} {:.0f})".format(*colour_of(k))) for k, name in names if k in drawn]


def images(sample: Sample) -> list[tuple[str, str, bool]]:
    """The masks of a sample over its image, or the image itself, and its pictures: name, data URI, and whether it has few pixels."""
    image_CHW, facts = sample.image_CHW, sample.facts.items()
    pictures = [(name, thumbnail(v.image_CHW)) for name, v in facts if isinstance(v, Picture)]
    if image_CHW is not None:
        masks = [(name, overlay_mask(image_CHW, v)) for name, v in facts if isinstance(v, Mask)]
        pictures = (masks or [("sample", thumbnail(image_CHW))]) + pictures
    return [(name, data_uri(image), max(image.size) <= FEW) for name, image in pictures]


def charts(sample: Sample) -> dict[str, Lines]:
    """A sample's curves, with as many points as a small chart shows."""
    return {
        name: replace(value, series={label: thin_out(points, SMALL) for label, points in value.series.items()})
        for name, value in sample.facts.items()
        if isinstance(value, Lines)
    }


def tokens(sample: Sample) -> list[tuple[str, list[tuple[str, float, float]]]]:
    """Name, and for each piece its text, the strength of its colour, and its number."""
    entries = [(name, value.pieces) for name, value in sample.facts.items() if isinstance(value, Tokens)]
    largest = max((abs(v) for _, pieces in entries for _, v in pieces if math.isfinite(v)), default=1.0) or 1.0
    return [
        (name, [(text, min(1.0, abs(v) / largest), v) for text, v in pieces])  # 1 for infinity and NaN
        for name, pieces in entries
    ]


def sounds(sample: Sample) -> list[tuple[str, str, str]]:
    """Name, the SVG path of the waveform in a box of 200 x 60, and what a browser plays: a file, or an embedded sound."""
    return [(name, waveform(v.wave_T), v.file or audio(v)) for name, v in sample.facts.items() if isinstance(v, Sound)]


def waveform(wave_T: Any) -> str:
    """An SVG path with a line for each column, from its lowest to its highest value."""
    columns = np.array_split(30 - 29 * (np.asarray(wave_T) / 32768), max(1, min(200, len(wave_T))))
    return "".join(
        f"M{200 * x / len(columns):.4g} {y.min(initial=30):.1f}V{y.max(initial=30) + 0.5:.1f}"
        for x, y in enumerate(columns)
    )


def audio(sound: Sound) -> str:
    memory = io.BytesIO()
    with wave.open(memory, "wb") as file:
        file.setparams((1, 2, sound.rate, 0, "NONE", ""))
        file.writeframes(np.asarray(sound.wave_T).astype("<i2").tobytes())
    return f"data:audio/wav;base64,{base64.b64encode(memory.getvalue()).decode()}"


def texts(sample: Sample) -> dict[str, str]:
    drawn = Lines | Mask | Picture | Sound | Tokens
    return {name: text(name, v).translate(CONTROLS) for name, v in sample.facts.items() if not isinstance(v, drawn)}


def text(name: str, value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(text(name, item) for item in value)
    return metric(name, value)


def look(samples: Sequence[Sample]) -> str:
    """The layout of a gallery: how wide its columns are."""
    kinds = {type(value) for sample in samples for value in sample.facts.values()}
    is_long = any(len(line) > LONG for sample in samples for line in texts(sample).values())
    if Lines in kinds:
        return "charts"
    if {Mask, Picture, Sound} & kinds:
        return "masks"
    if all(sample.image_CHW is None for sample in samples):
        return "texts" if Tokens in kinds or is_long else "facts"
    return "masks" if is_long else "images"


FILTERS = (panel_svg, keys, most_errors, is_right, classes, mask_legend, images, charts, sounds, tokens, texts, look)
ENVIRONMENT.filters |= {function.__name__: function for function in FILTERS}
ENVIRONMENT.filters["kind"] = lambda panel: type(panel).__name__
