"""Reads panels.json: the panels of the test set as data. extras/panels.py writes it."""

import base64
import io
import json
import zlib
from pathlib import Path
from typing import Any, get_args

import numpy as np
from PIL import Image

from lockstep.data.dataset import Sound
from lockstep.machine.files import read_text
from lockstep.panel import Content, Mask, Picture, Sample, Share, Tokens
from lockstep.run import told_if_damaged

KIND, IMAGE, ARRAY = "__panel__", "__image__", "__array__"
KINDS = {kind.__name__: kind for kind in (*get_args(Content), Mask, Picture, Sample, Share, Sound, Tokens)}


def decoded(encoded: dict[str, Any]) -> Any:
    if IMAGE in encoded:
        image = np.array(Image.open(io.BytesIO(base64.b64decode(encoded[IMAGE].partition(",")[2]))))
        return image.transpose(2, 0, 1) if image.ndim == 3 else image[None]
    if ARRAY in encoded:
        dtype, shape, text = encoded[ARRAY]
        return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype).reshape(shape)
    return KINDS[encoded.pop(KIND)](**encoded) if KIND in encoded else encoded


def read_panels(path: Path) -> list[Content]:
    """The panels in `path`; empty without the file. Raises UserError if it is damaged."""
    with told_if_damaged(path, "Remove the file; report.html shows the same panels."):
        panels = json.loads(read_text(path), object_hook=decoded) if path.exists() else []
        if not isinstance(panels, list) or not all(isinstance(panel, get_args(Content)) for panel in panels):
            raise ValueError("it does not contain panels")
    return panels
