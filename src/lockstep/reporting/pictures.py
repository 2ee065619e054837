"""Small images for a page, and a picture of training samples before and after augmentation."""

import base64
import io
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from lockstep.data.dataset import Batch
from lockstep.errors import UserError

# --- Small images for a page, as data URIs ---

SIDE = 128  # pixels of a thumbnail, at most
# Colours of the classes of a mask: those of Okabe and Ito, which colour-blind people can tell apart.
COLOURS = np.array(
    [[0, 0, 0], [230, 159, 0], [86, 180, 233], [0, 158, 115], [240, 228, 66], [0, 114, 178], [213, 94, 0], [204, 121, 167]],
    np.float32,
)  # fmt: skip
OPACITY = 0.55


def restored(input_BCHW: Any, about: Mapping[str, Any]) -> Any:
    """The bytes of images without their normalisation, on the CPU; None if they are no images, or `about` does not tell it."""
    mean, std = about.get("mean"), about.get("std")
    if input_BCHW.dim() != 4 or not mean or not std or len(mean) != input_BCHW.shape[1]:
        return None
    image_BCHW = input_BCHW.detach().float().cpu()
    mean_C, std_C = (image_BCHW.new_tensor(each).view(-1, 1, 1) for each in (mean, std))
    return ((image_BCHW * std_C + mean_C) * 255).round().clamp(0, 255).byte()


def thumbnail(image_CHW: Any) -> Image.Image:
    array = np.asarray(image_CHW)
    image = Image.fromarray(array[0] if len(array) == 1 else np.ascontiguousarray(array.transpose(1, 2, 0)))
    if max(image.size) > SIDE:
        image.thumbnail((SIDE, SIDE))
    return image


def overlaid(image_CHW: Any, classes_HW: Any, ignored: int | None = None) -> Image.Image:
    """The mask over a thumbnail of the image."""
    image = np.asarray(thumbnail(image_CHW).convert("RGB"))
    height, width = image.shape[:2]
    classes = np.asarray(classes_HW)
    rows, columns = (np.arange(n) * size // n for n, size in ((height, classes.shape[0]), (width, classes.shape[1])))
    return coloured(image, classes[rows[:, None], columns], ignored)


def coloured(image_HW3: NDArray[np.uint8], classes: NDArray[Any], ignored: int | None = None) -> Image.Image:
    """The mask over the image; class 0 and what is ignored stay clear."""
    image = image_HW3.astype(np.float32)
    drawn = ((classes != 0) & (classes != ignored))[..., None]
    colour = COLOURS[np.where(classes > 0, (classes - 1) % (len(COLOURS) - 1) + 1, 0)]
    return Image.fromarray(np.where(drawn, OPACITY * colour + (1 - OPACITY) * image, image).round().astype(np.uint8))


def data_uri(image: Image.Image) -> str:
    """PNG of few pixels, which a browser enlarges without blurring; JPEG of many."""
    few = max(image.size) <= 64
    file = io.BytesIO()
    image.save(file, "PNG" if few else "JPEG", **({"optimize": True} if few else {"quality": 82}))
    return f"data:image/{'png' if few else 'jpeg'};base64,{base64.b64encode(file.getvalue()).decode()}"


# --- A picture of training samples: each before and after augmentation, with its target ---

# B batch · C channel · H W pixel


COLUMNS, SMALLEST, GAP, LINE, MARGIN = 8, 112, 6, 14, 52  # pixels, except for COLUMNS


def picture(before: Batch, after: Batch, about: Mapping[str, Any], count: int) -> Image.Image:
    """The first `count` samples of two batches as the network gets them. Raises UserError if they are no images."""
    images = [bytes_of(batch, about)[:count] for batch in (before, after)]
    scale = max(1, math.ceil(SMALLEST / images[1].shape[2]))
    width, height = images[1].shape[2] * scale, images[1].shape[1] * scale
    columns = min(COLUMNS, count)
    tall = 2 * (height + GAP) + LINE + GAP
    page = Image.new("RGB", (MARGIN + columns * (width + GAP), math.ceil(count / columns) * tall + GAP), "white")
    draw = ImageDraw.Draw(page)
    for place in range(count):
        row, column = divmod(place, columns)
        left, top = MARGIN + column * (width + GAP), GAP + row * tall
        for line, (batch, drawn) in enumerate(zip((before, after), images, strict=True)):
            tile = with_mask(drawn[place], batch["target"][place].numpy())
            page.paste(tile.resize((width, height), Image.Resampling.NEAREST), (left, top + line * (height + GAP)))
            if not column:
                draw.text((4, top + line * (height + GAP)), ("before", "after")[line], fill="black")
        draw.text((left, top + 2 * (height + GAP) - 2), caption(after, place, about, width // 6), fill="black")
    return page


def bytes_of(batch: Batch, about: Mapping[str, Any]) -> NDArray[np.uint8]:
    """image_BHW3: the input of a network without its normalisation."""
    given = batch["input"]
    image_BCHW = restored(given, about)
    if image_BCHW is None or image_BCHW.shape[1] not in (1, 3):
        raise UserError(f"only images can be shown; `input` is {given.dtype} of shape {tuple(given.shape)}.")
    image: NDArray[np.uint8] = image_BCHW.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy()
    return image


def with_mask(image_HW3: NDArray[np.uint8], target: NDArray[Any]) -> Image.Image:
    """The image, with the target over it if that is a mask."""
    if target.shape != image_HW3.shape[:2]:
        return Image.fromarray(image_HW3)
    return coloured(image_HW3, target)


def caption(batch: Batch, place: int, about: Mapping[str, Any], longest: int) -> str:
    """The target of a sample; of a mixed one, both with their shares."""
    own = name(batch["target"][place].tolist(), about)
    if "share" in batch:
        share, other = float(batch["share"][place]), int(batch["partner"][place])
        own = f"{share:.0%} {own} + {1 - share:.0%} {name(batch['target'][other].tolist(), about)}"
    return own[:longest]


def name(target: Any, about: Mapping[str, Any]) -> str:
    """A target in words; nothing for a mask."""
    if isinstance(target, list):
        labels = about.get("labels")
        if labels and len(labels) == len(target):
            return ", ".join(str(label) for label, there in zip(labels, target, strict=True) if there)
        return "" if target and isinstance(target[0], list) else ", ".join(f"{value:.3g}" for value in target)
    classes = about.get("classes")
    return str(classes[target]) if classes and isinstance(target, int) else f"{target:.3g}"
