"""panels.json: what report.html shows of the test set, as data."""

import base64
import io
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from PIL import Image

from lockstep.errors import UserError
from lockstep.machine.files import write_text
from lockstep.reporting.pictures import data_uri, thumbnail
from lockstep.tasks.panel import Content, Mask, Sample, Share, Tokens

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
