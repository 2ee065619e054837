"""Changes of colour, each image by its own factor, as torchvision computes them for bytes.

Images are whole numbers from 0 to 255 in float32. Like bytes, results are rounded down after each change.
"""

# B batch · C channel · H W pixel

import torch
from torch import Tensor

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
