"""Compares each operation of augmentation with torchvision's, image by image: the same results, and what they cost on a CPU.

python benchmarks/augment.py [--batch 32] [--turns 5] [--out docs/augment.md]

Both get the same bytes and the same parameters; drawing them is part of Lockstep's time and not of torchvision's. Times are of
the processor, with one thread. The table replaces the last section of the page.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from lockstep import augment
from lockstep.augment.draws import Draws
from lockstep.augment.mixing import beta
from lockstep.run.report import versions

HEADING = "## Parity and cost"
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
    return Draws("augment.x", torch.arange(count), seed=0, epoch=0)


def of_policy(image: Tensor, name: str, magnitude: float) -> Tensor:
    """One operation of a policy by torchvision."""
    if name in ("autocontrast", "equalize"):
        return getattr(F, name)(image) if magnitude else image  # type: ignore[no-any-return]
    if name in BLENDS:
        return BLENDS[name](image, magnitude) if magnitude != 1 else image
    if name == "posterize":
        return F.posterize(image, int(magnitude)) if magnitude < 8 else image
    if name == "solarize":
        return F.solarize(image, magnitude) if magnitude < 256 else image
    if name == "identity" or not magnitude:
        return image
    if name == "rotate":
        return F.rotate(image, magnitude)
    place, degrees = "xy".index(name[-1]), float(torch.tensor(magnitude).atan().rad2deg())
    moved = [0.0, 0.0]
    moved[place] = degrees if name.startswith("shear") else magnitude
    if name.startswith("shear"):
        return F.affine(image, angle=0.0, translate=[0, 0], scale=1.0, shear=moved, center=[0, 0])
    return F.affine(image, angle=0.0, translate=[int(m) for m in moved], scale=1.0, shear=[0.0, 0.0])


def policy(operation: Any, image: Tensor, times: int) -> Reference:
    draws = new_draws(len(image))
    found = [operation.magnitudes(draws, *image.shape[-2:]) for _ in range(times)]
    plain = [{name: values.tolist() for name, values in each.items()} for each in found]

    def reference(one: Tensor, place: int) -> Tensor:
        for each in plain:
            for name, values in each.items():
                one = of_policy(one, name, float(values[place]))
        return one

    return reference


def cases(image: Tensor) -> dict[str, tuple[augment.Operation, Reference]]:
    """Each operation with its defaults, and torchvision's for the same draws."""
    count, size = len(image), image.shape[-1]
    shift, flip, erase, cut = (
        augment.Shift(pixels=4),
        augment.Flip(),
        augment.RandomErasing(probability=1.0, fill=0),
        augment.Cutmix(),
    )
    crop, mixup = augment.RandomResizedCrop(image_size=size), augment.Mixup()
    shifts = shift.plan(size, size, new_draws(count)).tolist()
    mirrored = flip.plan(size, size, new_draws(count))[-1].tolist()
    boxes = torch.stack(crop.plan(size, size, new_draws(count)), 1).tolist()
    erased = torch.stack(erase.boxes(size, size, new_draws(count)), 1).tolist()
    pasted = torch.stack(cut.boxes(size, size, new_draws(count)), 1).tolist()
    degrees = new_draws(count).uniform(-15, 15).tolist()
    share = beta(new_draws(count), mixup.alpha).tolist()
    draws = new_draws(count)
    factors = [*(draws.uniform(0.6, 1.4).tolist() for _ in range(3)), draws.uniform(-0.1, 0.1).tolist()]
    changes = [F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue]

    def jittered(one: Tensor, place: int) -> Tensor:
        for change, of in zip(changes, factors, strict=True):
            one = change(one, of[place])
        return one

    def with_box(one: Tensor, place: int) -> Tensor:
        top, left, height, width = pasted[place]
        box = (slice(None), slice(top, top + height), slice(left, left + width))
        one = one.clone()
        one[box] = image[place ^ 1][box]
        return one

    return {
        "shift": (
            shift,
            lambda one, i: F.crop(F.pad(one, [4, 4, 4, 4]), 4 - shifts[i][0], 4 - shifts[i][1], size, size),
        ),
        "flip": (flip, lambda one, i: F.horizontal_flip(one) if mirrored[i] else one),
        "crop": (crop, lambda one, i: F.resized_crop(one, *boxes[i], [size, size], antialias=True)),
        "rotate": (augment.Rotate(degrees=15), lambda one, i: F.rotate(one, degrees[i], InterpolationMode.BILINEAR)),
        "color_jitter": (augment.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1), jittered),
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
        theirs_ms = spent_ms(lambda: [reference(one, place) for place, one in enumerate(image)], turns)  # noqa: B023
        equal, close = ((apart <= levels).float().mean() for levels in (0, 1))
        found[name] = f"{equal:.2%} | {close:.2%} | {ours_ms:.1f} | {theirs_ms:.1f}"
        print(size, name, found[name], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("docs/augment.md"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    command = f"python benchmarks/augment.py --batch {args.batch} --turns {args.turns}"
    small, large = (cells(args.batch, size, args.turns) for size in SIZES)
    columns = [f"{size} px: {column}" for size in SIZES for column in COLUMNS]
    table = [
        f"{HEADING}\n",
        f"{args.batch} colour images of bytes, next to torchvision's functions image by image, with the same parameters. "
        "Times are milliseconds of the processor for the whole batch, with one thread; Lockstep's include the random numbers. "
        "All operations of a batch run on its device: on a CPU large images cost more than image by image, on a GPU they are a few kernels. "
        "Pixels that differ by more than a level come from the middle between two pixels, where rounding decides which one is nearest, "
        "or from a level that a further change has multiplied. "
        "`tests/augment/test_references.py` checks each operation at each strength, for odd sizes and one and three channels.\n",
        f"Made by `{command}` with {versions()}.\n",
        f"| operation | {' | '.join(columns)} |",
        f"|{' --- |' * (len(columns) + 1)}",
        *(f"| `{name}` | {small[name]} | {large[name]} |" for name in small),
        "",
    ]
    before = args.out.read_text().partition(HEADING)[0]
    args.out.write_text(before + "\n".join(table))


if __name__ == "__main__":
    main()
