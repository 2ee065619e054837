"""Compares each operation of augmentation with torchvision's, image by image: the same results, and what they cost on a CPU.

python benchmarks/augment.py [--batch 32] [--turns 5] [--out docs/measurements/speed.md]

Both get the same bytes and the same parameters. Lockstep's time includes drawing them, and torchvision's the batch that its images
become. Times are of the processor, with one thread. The table replaces its section of the page.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sections import write_section
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from lockstep import augment
from lockstep.augment import Draws
from lockstep.augment.mixing import beta
from lockstep.run.report import versions

HEADING = "# Parity and cost"
SIZES = (32, 224)
COLUMNS = ("equal pixels", "at most one level apart", "Lockstep, ms", "torchvision, ms")
Reference = Callable[[Tensor, int], Tensor]  # of an image and its place in the batch
BLENDS = {
    "brightness": F.adjust_brightness,
    "contrast": F.adjust_contrast,
    "color": F.adjust_saturation,
    "sharpness": F.adjust_sharpness,
}


def new_draws(count: int) -> Draws:
    return Draws("augment.x", np.arange(count), seed=0, epoch=0)


def of_policy(image: Tensor, name: str, magnitude: float) -> Tensor:
    """One operation of a policy by torchvision."""
    if name in BLENDS:
        return BLENDS[name](image, magnitude)
    if name in ("autocontrast", "equalize", "invert"):
        return getattr(F, name)(image)  # type: ignore[no-any-return]
    if name in ("posterize", "solarize"):
        return F.posterize(image, int(magnitude)) if name == "posterize" else F.solarize(image, magnitude)
    if name == "identity" or not magnitude:
        return image
    if name == "rotate":
        return F.rotate(image, magnitude)
    moved = [0.0, 0.0]
    moved["xy".index(name[-1])] = math.degrees(math.atan(magnitude)) if name.startswith("shear") else magnitude
    if name.startswith("shear"):
        return F.affine(image, angle=0.0, translate=[0, 0], scale=1.0, shear=moved, center=[0, 0])
    return F.affine(image, angle=0.0, translate=[int(m) for m in moved], scale=1.0, shear=[0.0, 0.0])


def policy(operation: Any, image: Tensor, times: int) -> Reference:
    draws = new_draws(len(image)).host
    chosen = [operation.magnitudes(draws, *image.shape[-2:]) for _ in range(times)]
    plain = [list(zip(names.tolist(), magnitudes.tolist(), strict=True)) for names, magnitudes in chosen]

    def reference(one: Tensor, place: int) -> Tensor:
        for each in plain:
            one = of_policy(one, *each[place])
        return one

    return reference


def cases(image: Tensor) -> dict[str, tuple[augment.Operation, Reference]]:
    """Each operation with its defaults, and torchvision's for the same draws."""
    count, (height, width) = len(image), image.shape[-2:]
    shift, flip, cut = augment.Shift(pixels=4), augment.Flip(), augment.Cutmix()
    crop, mixup, erase = (
        augment.RandomResizedCrop(),
        augment.Mixup(),
        augment.RandomErasing(probability=1.0, fill=0),
    )
    jitter = augment.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1)
    corners = shift.plan(height, width, new_draws(count)).tolist()
    mirrored = flip.plan(height, width, new_draws(count))[-1].tolist()
    boxes = crop.plan(height, width, new_draws(count)).tolist()
    erased = erase.boxes(height, width, new_draws(count).host).tolist()
    pasted = cut.boxes(height, width, new_draws(count).host).tolist()
    degrees = new_draws(count).host.uniform(-15, 15).tolist()
    share = beta(new_draws(count).host, mixup.alpha).tolist()
    factors = {name: values.tolist() for name, values in jitter.factors(new_draws(count).host).items()}

    def jittered(one: Tensor, place: int) -> Tensor:
        for name, values in factors.items():
            one = getattr(F, f"adjust_{name}")(one, values[place])
        return one

    def with_box(one: Tensor, place: int) -> Tensor:
        top, left, height, width = pasted[place]
        box = (slice(None), slice(top, top + height), slice(left, left + width))
        one = one.clone()
        one[box] = image[place ^ 1][box]
        return one

    return {
        "shift": (shift, lambda one, i: F.crop(F.pad(one, [4, 4, 4, 4]), *corners[i], height, width)),
        "flip": (flip, lambda one, i: F.horizontal_flip(one) if mirrored[i] else one),
        "crop": (crop, lambda one, i: F.resized_crop(one, *boxes[i], [height, width], antialias=True)),
        "rotate": (augment.Rotate(degrees=15), lambda one, i: F.rotate(one, degrees[i], InterpolationMode.BILINEAR)),
        "color_jitter": (jitter, jittered),
        "trivial": (augment.TrivialAugment(), policy(augment.TrivialAugment(), image, 1)),
        "rand": (augment.RandAugment(), policy(augment.RandAugment(), image, 2)),
        "erase": (erase, lambda one, i: F.erase(one, *erased[i], torch.zeros(1, 1, 1, dtype=torch.uint8))),
        "mixup": (mixup, lambda one, i: (one * share[i] + image[i ^ 1] * (1 - share[i])).round().to(torch.uint8)),
        "cutmix": (cut, with_box),
    }


def spent_ms(work: Callable[[], object], turns: int) -> float:
    """The median of several turns, after one that is not counted."""
    found = []
    for _ in range(turns + 1):
        began_s = time.process_time()
        work()
        found.append((time.process_time() - began_s) * 1000)
    return statistics.median(found[1:])


def cells(batch: int, size: int, turns: int) -> dict[str, str]:
    """Columns of the table for images of one size, by operation."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(batch, 3, 14, 14, generator=generator)
    noise = torch.randn(batch, 3, size, size, generator=generator) * 8
    smooth = torch.nn.functional.interpolate(coarse, size=(size, size), mode="bicubic") * 255
    image = (smooth + noise).round().clamp(0, 255).to(torch.uint8)
    found = {}
    for name, (operation, reference) in cases(image).items():
        given = {"input": image, "index": torch.arange(batch), "count": batch}
        made = operation(given, new_draws(batch))["input"].int()
        expected = torch.stack([reference(one, place) for place, one in enumerate(image)]).int()
        apart = (made - expected).abs()
        ours_ms = spent_ms(lambda: operation(given, new_draws(batch)), turns)  # noqa: B023
        theirs_ms = spent_ms(lambda: torch.stack([reference(one, place) for place, one in enumerate(image)]), turns)  # noqa: B023
        equal, close = ((apart <= levels).float().mean() for levels in (0, 1))
        found[name] = f"{equal:.2%} | {close:.2%} | {ours_ms:.1f} | {theirs_ms:.1f}"
        print(size, name, found[name], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("docs/measurements/speed.md"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    command = f"python benchmarks/augment.py --batch {args.batch} --turns {args.turns}"
    small, large = (cells(args.batch, size, args.turns) for size in SIZES)
    columns = [f"{size} px: {column}" for size in SIZES for column in COLUMNS]
    table = [
        f"{HEADING}\n",
        f"{args.batch} colour images of bytes, next to torchvision's functions image by image, with the same parameters. "
        "Times are milliseconds of the processor for the whole batch, with one thread; Lockstep's include the random numbers, "
        "torchvision's the copy into a batch. Pixels that differ by more than a level come from the middle between two pixels, where rounding decides which "
        "one is nearest, or from a level that a further change has multiplied. `tests/augment/test_references.py` checks each "
        "operation for odd sizes and one and three channels.\n",
        f"Made by `{command}` with {versions()}.\n",
        f"| operation | {' | '.join(columns)} |",
        f"|{' --- |' * (len(columns) + 1)}",
        *(f"| `{name}` | {small[name]} | {large[name]} |" for name in small),
        "",
    ]
    write_section(args.out, "\n".join(table))


if __name__ == "__main__":
    main()
