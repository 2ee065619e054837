"""Changes of the pixels of a batch, each image by its own parameters, in one pass for all of them."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.augment.draws import Draws, wide

# --- Random boxes within images, chosen for a whole batch at once as torchvision chooses one ---

# B batch · T attempt · H W pixel


Box = tuple[Tensor, Tensor, Tensor, Tensor]  # top_B, left_B, height_B, width_B


def random_sides(
    draws: Draws, area: int, scale: Sequence[float], ratio: Sequence[float], attempts: int
) -> tuple[Tensor, Tensor]:
    """width_BT and height_BT of boxes with a share of `area` and a ratio of width to height, uniform in its logarithm."""
    share_BT, log_BT = wide(draws.uniform(shape=(2, attempts))).unbind(1)
    area_BT = area * (scale[0] + (scale[1] - scale[0]) * share_BT)
    low, high = math.log(ratio[0]), math.log(ratio[1])
    ratio_BT = (low + (high - low) * log_BT).exp()
    return (area_BT * ratio_BT).sqrt().round().long(), (area_BT / ratio_BT).sqrt().round().long()


def first_that_fits(fits_BT: Tensor, value_BT: Tensor, otherwise: int) -> Tensor:
    """value_B of the first attempt that fits."""
    first_B1 = fits_BT.int().argmax(1, keepdim=True)
    return value_BT.gather(1, first_B1)[:, 0].where(fits_BT.any(1), otherwise)


def inside(box: Box, height: int, width: int) -> Tensor:
    """inside_BHW: the pixels in each image's box."""
    top_B, left_B, height_B, width_B = box
    y_H, x_W = torch.arange(height, device=top_B.device), torch.arange(width, device=top_B.device)
    rows_BH = (y_H >= top_B[:, None]) & (y_H < (top_B + height_B)[:, None])
    columns_BW = (x_W >= left_B[:, None]) & (x_W < (left_B + width_B)[:, None])
    return rows_BH[:, :, None] & columns_BW[:, None, :]


# --- Moves the pixels of each image of a batch by its own parameters, in one pass for all of them ---
#
# Elementwise arithmetic only: matrix products and fused functions may round differently in batches of another size, and then a
# sample would depend on how many others share its micro-batch.

# B batch · C channel · H W pixel · K tap, one of the pixels that make a new one


def to_bytes(image: Tensor) -> Tensor:
    return image.round().clamp(0, 255).to(torch.uint8)


def rows_and_columns(value_BCHW: Tensor, y_BH: Tensor, x_BW: Tensor) -> Tensor:
    """The rows y_BH and the columns x_BW of each image."""
    b, c, _, w = value_BCHW.shape
    rows = value_BCHW.gather(2, y_BH[:, None, :, None].expand(b, c, y_BH.shape[1], w))
    return rows.gather(3, x_BW[:, None, None, :].expand(b, c, y_BH.shape[1], x_BW.shape[1]))


def shift(value_BCHW: Tensor, down_B: Tensor, right_B: Tensor, most: int, *, fill: float) -> Tensor:
    """Shifts by at most `most` pixels."""
    h, w = value_BCHW.shape[-2:]
    y_H, x_W = torch.arange(h, device=down_B.device), torch.arange(w, device=down_B.device)
    padded = F.pad(value_BCHW, (most, most, most, most), value=fill)
    return rows_and_columns(padded, y_H + (most - down_B)[:, None], x_W + (most - right_B)[:, None])


def crop_nearest(value_BCHW: Tensor, box: Box, size: tuple[int, int]) -> Tensor:
    """Boxes resized without mixing values, as torchvision's NEAREST_EXACT does."""
    top_B, left_B, height_B, width_B = box

    def places(start_B: Tensor, length_B: Tensor, out: int) -> Tensor:
        middle = 2 * torch.arange(out, device=start_B.device) + 1
        return start_B[:, None] + middle * length_B[:, None] // (2 * out)

    return rows_and_columns(value_BCHW, places(top_B, height_B, size[0]), places(left_B, width_B, size[1]))


def taps(start_B: Tensor, length_B: Tensor, out: int, whole: int) -> tuple[Tensor, Tensor]:
    """place_BOK and weight_BOK of the pixels that make each of `out` new ones: a triangle as wide as a new pixel, at least two.

    The arithmetic of F.interpolate with mode="bilinear" and antialias=True.
    """
    scale_B1 = (length_B.float() / out)[:, None]
    support_B1 = scale_B1.clamp(min=1)
    centre_BO = scale_B1 * (torch.arange(out, device=start_B.device) + 0.5)
    first_BO = (centre_BO - support_B1 + 0.5).floor().clamp(min=0).long()
    count = math.ceil(2 * max(1, whole / out))  # of places within the widest triangle
    place_BOK = first_BO[:, :, None] + torch.arange(count, device=start_B.device)
    distance_BOK = (place_BOK + 0.5 - centre_BO[:, :, None]).abs()
    inside_BOK = place_BOK < length_B[:, None, None]
    weight_BOK = (1 - distance_BOK / support_B1[:, :, None]).clamp(min=0) * inside_BOK
    total_BO = sum(weight_BOK.unbind(2))
    return start_B[:, None, None] + place_BOK.where(inside_BOK, 0), weight_BOK / total_BO[:, :, None]  # type: ignore[index]


def crop_resized(image_BCHW: Tensor, box: Box, size: tuple[int, int]) -> Tensor:
    """Boxes resized to `size`: bilinear, with antialiasing. float32."""
    top_B, left_B, height_B, width_B = box
    b, c, h, w = image_BCHW.shape
    y_BOK, of_y_BOK = taps(top_B, height_B, size[0], h)
    x_BOK, of_x_BOK = taps(left_B, width_B, size[1], w)
    rows = torch.zeros(b, c, size[0], w, device=image_BCHW.device)
    for y_BO, weight_BO in zip(y_BOK.unbind(2), of_y_BOK.unbind(2), strict=True):
        taken = image_BCHW.gather(2, y_BO[:, None, :, None].expand(b, c, size[0], w))
        rows += taken * weight_BO[:, None, :, None]
    result = torch.zeros(b, c, *size, device=image_BCHW.device)
    for x_BO, weight_BO in zip(x_BOK.unbind(2), of_x_BOK.unbind(2), strict=True):
        result += rows.gather(3, x_BO[:, None, None, :].expand(b, c, *size)) * weight_BO[:, None, None, :]
    return result


def rotation(radians_B: Tensor) -> Tensor:
    """matrix_B23 of `affine`, counterclockwise."""
    cos_B, sin_B = wide(radians_B).cos().float(), wide(radians_B).sin().float()
    zero_B = torch.zeros_like(cos_B)
    return torch.stack([cos_B, -sin_B, zero_B, sin_B, cos_B, zero_B], 1).view(-1, 2, 3)


def sources(matrix_B23: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """y_BHW and x_BHW: where each new pixel comes from. `matrix` maps places (x, y, 1), counted from the image's centre."""
    x_W = torch.arange(width, device=matrix_B23.device) - (width - 1) / 2
    y_H1 = (torch.arange(height, device=matrix_B23.device) - (height - 1) / 2)[:, None]
    rows = matrix_B23[:, :, :, None, None].unbind(1)
    x_BHW, y_BHW = (a * x_W + (b * y_H1 + c) for a, b, c in (row.unbind(1) for row in rows))
    return y_BHW + (height - 1) / 2, x_BHW + (width - 1) / 2


def at(value_BCHW: Tensor, y_BHW: Tensor, x_BHW: Tensor, fill: float) -> Tensor:
    """The values at whole places (given as floats), and `fill` outside of the images."""
    b, c, h, w = value_BCHW.shape
    inside_BHW = (y_BHW >= 0) & (y_BHW < h) & (x_BHW >= 0) & (x_BHW < w)
    place_BHW = (y_BHW.clamp(0, h - 1) * w + x_BHW.clamp(0, w - 1)).long()
    taken = value_BCHW.reshape(b, c, h * w).gather(2, place_BHW.view(b, 1, -1).expand(b, c, -1)).view(b, c, h, w)
    return taken.where(inside_BHW[:, None], fill)


def affine_nearest(value_BCHW: Tensor, matrix_B23: Tensor, fill: float) -> Tensor:
    y_BHW, x_BHW = sources(matrix_B23, *value_BCHW.shape[-2:])
    return at(value_BCHW, y_BHW.round(), x_BHW.round(), fill).to(value_BCHW.dtype)


def affine_bilinear(image_BCHW: Tensor, matrix_B23: Tensor, fill: float) -> Tensor:
    """float32."""
    y_BHW, x_BHW = sources(matrix_B23, *image_BCHW.shape[-2:])
    top_BHW, left_BHW = y_BHW.floor(), x_BHW.floor()
    result = torch.zeros(image_BCHW.shape, device=image_BCHW.device)
    for y in (0, 1):
        of_y_BHW = (y_BHW - top_BHW) if y else 1 - (y_BHW - top_BHW)
        for x in (0, 1):
            weight_BHW = of_y_BHW * ((x_BHW - left_BHW) if x else 1 - (x_BHW - left_BHW))
            result += at(image_BCHW, top_BHW + y, left_BHW + x, fill) * weight_BHW[:, None]
    return result


# --- Changes of colour, each image by its own factor, as torchvision computes them for bytes ---
#
# Images are whole numbers from 0 to 255 in float32. Like bytes, results are rounded down after each change.

# B batch · C channel · H W pixel


LEVELS = 256


def of_batch(factor_B: Tensor) -> Tensor:
    return factor_B[:, None, None, None]


def blend(image: Tensor, other: Tensor, factor_B: Tensor) -> Tensor:
    """`image` with a factor of 1, `other` with 0, and beyond."""
    factor = of_batch(factor_B)
    return (image * factor + other * (1 - factor)).clamp(0, 255).floor()


def grey(image_BCHW: Tensor) -> Tensor:
    """grey_B1HW: the brightness of colours."""
    if image_BCHW.shape[1] == 1:
        return image_BCHW
    r, g, b = image_BCHW.unbind(1)
    return (r * 0.2989 + g * 0.587 + b * 0.114).floor()[:, None]


def mean_grey(image_BCHW: Tensor) -> Tensor:
    """mean_B111. Of whole numbers, whose sum has no order."""
    total_B = grey(image_BCHW).long().sum((1, 2, 3))
    return of_batch(total_B.float() / (image_BCHW.shape[2] * image_BCHW.shape[3]))


def brightness(image_BCHW: Tensor, factor_B: Tensor) -> Tensor:
    return (image_BCHW * of_batch(factor_B)).clamp(0, 255).floor()


def contrast(image_BCHW: Tensor, factor_B: Tensor) -> Tensor:
    return blend(image_BCHW, mean_grey(image_BCHW), factor_B)


def saturation(image_BCHW: Tensor, factor_B: Tensor) -> Tensor:
    return image_BCHW if image_BCHW.shape[1] == 1 else blend(image_BCHW, grey(image_BCHW), factor_B)


def sharpness(image_BCHW: Tensor, factor_B: Tensor) -> Tensor:
    """A blend with the image smoothed by a kernel of 3 x 3; its edges stay."""
    h, w = image_BCHW.shape[-2:]
    if h < 3 or w < 3:
        return image_BCHW
    inner = image_BCHW[:, :, 1:-1, 1:-1]
    rows = image_BCHW[:, :, :-2] + image_BCHW[:, :, 1:-1] + image_BCHW[:, :, 2:]
    total = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * inner
    result = image_BCHW.clone()
    result[:, :, 1:-1, 1:-1] = blend(inner, (total / 13).round(), factor_B)
    return result


def hue(image_BCHW: Tensor, turn_B: Tensor) -> Tensor:
    """Turns the hues by a share of the circle: to HSV and back (Pillow's formulas)."""
    if image_BCHW.shape[1] == 1:
        return image_BCHW
    image = image_BCHW / 255
    r, g, b = image.unbind(1)
    value, least = image.amax(1), image.amin(1)
    spread = value - least
    divisor = spread.where(spread > 0, 1.0)
    of_red, of_green, of_blue = (b - g) / divisor * -1, (b - r) / divisor + 2, (r - g) / divisor + 4
    sixths = of_red.where(value == r, of_green.where(value == g, of_blue))
    turned = sixths / 6 + turn_B[:, None, None]
    sixths = (turned - turned.floor()) * 6
    channels = []
    for offset in (5.0, 3.0, 1.0):
        place = sixths + offset
        place = place - 6 * (place >= 6)
        channels.append(value - spread * torch.minimum(place, 4 - place).clamp(0, 1))
    return (torch.stack(channels, 1) * (LEVELS - 1e-3)).floor().clamp(0, 255)


def histogram(image_BCHW: Tensor) -> Tensor:
    """count_BCL: how many pixels have each of the 256 values, as whole numbers."""
    b, c = image_BCHW.shape[:2]
    row = torch.arange(b * c, device=image_BCHW.device)[:, None] * LEVELS
    place = (row + image_BCHW.reshape(b * c, -1).long()).flatten()
    counts = torch.zeros(b * c * LEVELS, dtype=torch.int64, device=image_BCHW.device)
    return counts.scatter_add_(0, place, torch.ones_like(place)).view(b, c, LEVELS)


def equalized(image_BCHW: Tensor) -> Tensor:
    """table_BCL that makes all values about equally frequent, by Pillow's scheme."""
    count = histogram(image_BCHW)
    below = count.cumsum(2)
    last = count.gather(2, below.argmax(2, keepdim=True))  # how many pixels have the greatest value
    step = (below[:, :, -1:] - last) // 255
    table = ((below - count + step // 2) // step.clamp(min=1)).clamp(0, 255)
    return table.where(step > 0, torch.arange(LEVELS, device=image_BCHW.device)).float()


def stretched(image_BCHW: Tensor) -> Tensor:
    """table_BCL that stretches the values of each channel to 0..255."""
    least, most = image_BCHW.amin((2, 3))[:, :, None], image_BCHW.amax((2, 3))[:, :, None]
    level = torch.arange(LEVELS, device=image_BCHW.device).float()
    table = ((level - least) / ((most - least).clamp(min=1) * (1 / 255))).clamp(0, 255).floor()
    return table.where(most > least, level)


def looked_up(image_BCHW: Tensor, table_BCL: Tensor) -> Tensor:
    """Each pixel's entry in the table of its image and channel."""
    b, c = image_BCHW.shape[:2]
    return table_BCL.gather(2, image_BCHW.reshape(b, c, -1).long()).view(image_BCHW.shape)


# --- What a policy's magnitudes do to a batch of images: one matrix, one table for each channel, two blends ---

# B batch · C channel · H W pixel · L level of 256


def matrix(magnitudes: Mapping[str, Tensor], height: int, width: int) -> Tensor:
    """matrix_B23 of resampling's `affine`: the identity in samples without a geometric operation."""
    nothing_B = torch.zeros_like(next(iter(magnitudes.values())), dtype=torch.float32)
    of = {name: magnitudes.get(name, nothing_B) for name in ("shear_x", "shear_y", "translate_x", "translate_y")}
    radians_B = wide(magnitudes.get("rotate", nothing_B)) * (math.pi / 180)
    cos_B, sin_B = radians_B.cos().float(), radians_B.sin().float()
    # shears leave the upper left corner in its place
    right_B = of["shear_x"] * (height / 2) - of["translate_x"]
    down_B = of["shear_y"] * (width / 2) - of["translate_y"]
    entries = [cos_B, of["shear_x"] - sin_B, right_B, of["shear_y"] + sin_B, cos_B, down_B]
    return torch.stack(entries, 1).view(-1, 2, 3)


def recolored(image_BCHW: Tensor, magnitudes: Mapping[str, Tensor]) -> Tensor:
    """Bytes. At most one operation of each sample is not neutral, so their order does not matter."""
    image = image_BCHW.float()
    table_BCL = table(image, magnitudes)
    result = image if table_BCL is None else looked_up(image, table_BCL)
    for name, change in (("color", saturation), ("sharpness", sharpness)):
        result = change(result, magnitudes[name]) if name in magnitudes else result
    return result.to(torch.uint8)


def table(image: Tensor, magnitudes: Mapping[str, Tensor]) -> Tensor | None:
    """table_BCL of the operations that change each value for itself; None if there are none."""
    level = torch.arange(LEVELS, device=image.device).float().expand(*image.shape[:2], 1, -1)
    result = level
    if (factor_B := magnitudes.get("brightness")) is not None:
        result = brightness(result, factor_B)
    if (factor_B := magnitudes.get("contrast")) is not None:
        result = blend(result, mean_grey(image), factor_B)
    if (bits_B := magnitudes.get("posterize")) is not None:
        step = of_batch(1 << (8 - bits_B.long()))
        result = (result.long() // step * step).float()
    if (threshold_B := magnitudes.get("solarize")) is not None:
        result = (255 - result).where(result >= of_batch(threshold_B), result)
    if (inverted_B := magnitudes.get("invert")) is not None:
        result = (255 - result).where(of_batch(inverted_B), result)
    for name, of_image in (("autocontrast", stretched), ("equalize", equalized)):
        if (chosen_B := magnitudes.get(name)) is not None:
            result = of_image(image)[:, :, None].where(of_batch(chosen_B), result)
    return None if result is level else result[:, :, 0]
