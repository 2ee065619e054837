"""What images cost, in time of the processor: augmentation next to torchvision's, and reading from files.

python benchmarks/images.py augment [--batch 32] [--turns 5]
python benchmarks/images.py decoding [--images 2000]

augment: the same bytes and the same parameters for both. Lockstep's time includes drawing them, and torchvision's the batch that its
images become. One thread. Pixels that differ by more than a level come from the middle between two pixels, where rounding decides
which one is nearest, or from a level that a further change has multiplied.
decoding: by a worker, and once into the cache. The images are noise over a smooth pattern, as JPEG of quality 90: 60 kB at 500 x 375.
"""

import argparse
import math
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import measuring
import numpy as np
import torch
from measuring import in_turns, show, table
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from lockstep import augment
from lockstep.augment import Draws
from lockstep.augment.mixing import beta
from lockstep.data import Folder
from lockstep.data.images import Files

spent_s = partial(timeit.timeit, timer=time.process_time, number=1)  # seconds of the processor


# --- augment ---

SIZES = (32, 224)
COLUMNS = ("equal pixels", "at most one level apart", "Lockstep, ms", "torchvision, ms")
Reference = Callable[[Tensor, int], Tensor]  # of an image and its place in the batch
BY_NAME: dict[str, Callable[[Tensor, float], Tensor]] = {  # torchvision's, of an image and a magnitude
    "identity": lambda image, _: image,
    "rotate": F.rotate,
    "brightness": F.adjust_brightness,
    "contrast": F.adjust_contrast,
    "color": F.adjust_saturation,
    "sharpness": F.adjust_sharpness,
    "posterize": lambda image, bits: F.posterize(image, int(bits)),
    "solarize": F.solarize,
    "autocontrast": lambda image, _: F.autocontrast(image),
    "equalize": lambda image, _: F.equalize(image),
    "invert": lambda image, _: F.invert(image),
}


def new_draws(count: int) -> Draws:
    return Draws("augment.x", np.arange(count), seed=0, epoch=0)


def of_policy(image: Tensor, name: str, magnitude: float) -> Tensor:
    """One operation of a policy by torchvision."""
    if name in BY_NAME:
        return BY_NAME[name](image, magnitude)
    moved, is_x = [0.0, 0.0], name[-1] == "x"
    if name.startswith("shear"):
        moved[not is_x] = math.degrees(math.atan(magnitude))
        return F.affine(image, angle=0.0, translate=[0, 0], scale=1.0, shear=moved, center=[0, 0])
    moved[not is_x] = int(magnitude)
    return F.affine(image, angle=0.0, translate=moved, scale=1.0, shear=[0.0, 0.0])


def policy(operation: Any, image: Tensor, times: int) -> Reference:
    draws = new_draws(len(image))
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
    crop, mixup = augment.RandomResizedCrop(), augment.Mixup()
    erase = augment.RandomErasing(probability=1.0, fill=0)
    jitter = augment.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1)
    corners = shift.plan(height, width, new_draws(count)).tolist()
    mirrored = flip.plan(height, width, new_draws(count))[-1].tolist()
    boxes = crop.plan(height, width, new_draws(count)).tolist()
    erased = erase.boxes(height, width, new_draws(count)).tolist()
    pasted = cut.boxes(height, width, new_draws(count)).tolist()
    degrees = new_draws(count).uniform(-15, 15).tolist()
    share = beta(new_draws(count), mixup.alpha).tolist()
    factors = {name: values.tolist() for name, values in jitter.factors(new_draws(count)).items()}

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


def compared(image: Tensor, operation: augment.Operation, reference: Reference, turns: int) -> list[str]:
    """Cells of COLUMNS."""
    batch = {"input": image, "index": torch.arange(len(image)), "count": len(image)}

    def ours() -> Any:
        return operation(batch, new_draws(len(image)))["input"]

    def theirs() -> Tensor:
        return torch.stack([reference(one, place) for place, one in enumerate(image)])

    apart = (ours().int() - theirs().int()).abs()
    equal, close = ((apart <= levels).float().mean() for levels in (0, 1))
    taken_s = in_turns({"ours": partial(spent_s, ours), "theirs": partial(spent_s, theirs)}, turns, warm_up=1)
    return [f"{equal:.2%}", f"{close:.2%}", *(f"{1000 * statistics.median(each):.1f}" for each in taken_s.values())]


def augmentation(args: argparse.Namespace) -> str:
    torch.set_num_threads(1)
    rows: dict[str, list[str]] = {}
    for size in SIZES:
        generator = torch.Generator().manual_seed(0)
        coarse = torch.rand(args.batch, 3, 14, 14, generator=generator)
        noise = torch.randn(args.batch, 3, size, size, generator=generator) * 8
        smooth = torch.nn.functional.interpolate(coarse, size=(size, size), mode="bicubic") * 255
        image = (smooth + noise).round().clamp(0, 255).to(torch.uint8)
        for name, case in cases(image).items():
            rows.setdefault(name, [f"`{name}`"]).extend(compared(image, *case, args.turns))
    head = ["operation", *(f"{size} px: {column}" for size in SIZES for column in COLUMNS)]
    return f"{args.batch} colour images.\n\n{table(head, list(rows.values()))}"


# --- decoding ---

JPEGS = ((500, 375), (1600, 1200), (4000, 3000))
SIDE = 224


def write_jpeg(path: Path, width: int, height: int) -> None:
    random = np.random.default_rng(0)
    pattern = Image.fromarray(random.integers(0, 255, (height // 25, width // 25, 3), dtype=np.uint8))
    smooth = np.asarray(pattern.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    noisy = (smooth + random.integers(-12, 12, smooth.shape)).clip(0, 255).astype(np.uint8)
    Image.fromarray(noisy).save(path, quality=90)


def by_a_worker(folder: Path) -> str:
    rows = []
    for width, height in JPEGS:
        path = folder / f"{width}.jpg"
        write_jpeg(path, width, height)
        count = max(8, 60_000_000 // (width * height))
        files = Files(folder, [path.name] * count, np.zeros(count), channels=3, size=SIDE)
        seconds = spent_s(partial(files.__getitem__, np.arange(count)))
        rows.append([f"{width} x {height}, {path.stat().st_size / 1000:,.0f} kB", f"{count / seconds:,.0f}"])
    return table(["file", "images/s of a worker, per core"], rows)


def into_the_cache(folder: Path, images: int) -> str:
    """Building the cache of `images` files of the first size."""
    write_jpeg(folder / "one.jpg", *JPEGS[0])
    for place in range(images):
        path = folder / "classes" / str(place % 2) / f"{place}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((folder / "one.jpg").read_bytes())
    data = Folder(root=str(folder / "classes"), decode="cache", cache_dir=str(folder / "cache"), image_size=SIDE)
    return f"Decoded into the cache, per core: {images / spent_s(data.prepare):,.0f} images/s of {JPEGS[0]}."


def decoding(args: argparse.Namespace) -> str:
    with tempfile.TemporaryDirectory() as name:
        return f"To {SIDE} x {SIDE} RGB.\n\n{by_a_worker(Path(name))}\n\n{into_the_cache(Path(name), args.images)}"


def main() -> None:
    parser = measuring.parser(__doc__)
    parts = parser.add_subparsers(dest="what", required=True, metavar="augment|decoding")
    part = parts.add_parser("augment")
    part.add_argument("--batch", type=int, default=32)
    part.add_argument("--turns", type=int, default=5)
    part = parts.add_parser("decoding")
    part.add_argument("--images", type=int, default=2000, help="files of the cache that is built")
    args = parser.parse_args()
    show(augmentation(args) if args.what == "augment" else decoding(args))


if __name__ == "__main__":
    main()
