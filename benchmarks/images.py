"""Measures the CPU time of images: augmentation compared with torchvision, and reading from files.

python benchmarks/images.py augment [--batch 32] [--turns 5]
python benchmarks/images.py decoding [--images 2000] [--turns 7]
python benchmarks/images.py keyed [--images 4096] [--turns 5]

augment: both libraries process the same bytes with the same parameters, on one thread. Lockstep's time includes drawing the parameters;
torchvision's time includes stacking its images into a batch. For transforms that are torchvision's, Lockstep's time includes seeds and
copies for each sample.
decoding: from files to batches of bytes, the best of several turns, compared with torchvision's and timm's transforms of PIL images; also
decoding into the cache. The images are noise over a smooth pattern, as JPEGs with quality 90: 60 kB at 500 x 375.
keyed: images/s of a DataLoader over a torch Dataset, with random generators that are seeded for each sample or not, in turns.
"""

import argparse
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import measuring
import numpy as np
import torch
from measuring import in_turns, show, table
from numpy.typing import NDArray
from PIL import Image
from timm.data import create_transform
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_convert
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from lockstep.data.loaders import MicroBatches, MicroBatchInfo, Share, from_workers
from lockstep.data.parts import Part
from lockstep.data.sampler import Split
from lockstep.extras.adapters import Pictures
from lockstep.kit import Folder, augment
from lockstep.kit.augment import Augmentation, Draws
from lockstep.kit.augment.transforms import beta
from lockstep.kit.images import Files
from lockstep.kit.pixels import Frame

spent_s = partial(timeit.timeit, timer=time.process_time, number=1)  # CPU seconds


# --- augment ---

SIZES = (32, 224)
COLUMNS = ("equal pixels", "at most one level apart", "Lockstep, ms", "torchvision, ms")
Reference = Callable[[Tensor, int], Tensor]  # of an image and its index in the batch


def new_draws(count: int) -> Draws:
    return Draws("augment.x", np.arange(count), seed=0, epoch=0)


def transforms(size: int) -> dict[str, tuple[Any, Reference]]:
    """torchvision's transforms by option name, which run where samples are read."""
    operations: dict[str, Any] = {
        "crop": augment.RandomResizedCrop(image_size=size),
        "rotate": augment.Rotate(degrees=15.0),
        "color_jitter": v2.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1),
        "trivial": v2.TrivialAugmentWide(),
        "rand": v2.RandAugment(),
    }

    def reference(operation: Any) -> Reference:
        transform = operation.transform if isinstance(operation, augment.SampleTransform) else operation
        return lambda image, _: transform(image)

    return {name: (operation, reference(operation)) for name, operation in operations.items()}


def cases(image: Tensor) -> dict[str, tuple[Any, Reference]]:
    """Each operation with its defaults, and torchvision's operation with the same random numbers."""
    count, (height, width) = len(image), image.shape[-2:]
    shift, flip, cut = augment.Shift(pixels=4), augment.Flip(), augment.Cutmix()
    mixup = augment.Mixup()
    erase = augment.RandomErasing(probability=1.0, fill=0)
    corners = shift.plan(height, width, new_draws(count)).tolist()
    mirrored = flip.plan(height, width, new_draws(count))[-1].tolist()
    erased = erase.boxes(height, width, new_draws(count)).tolist()
    pasted = cut.boxes(height, width, new_draws(count)).tolist()
    share = beta(new_draws(count), mixup.alpha).tolist()

    def with_box(one: Tensor, index: int) -> Tensor:
        top, left, height, width = pasted[index]
        box = (slice(None), slice(top, top + height), slice(left, left + width))
        one = one.clone()
        one[box] = image[index ^ 1][box]
        return one

    return {
        "shift": (shift, lambda one, i: F.crop(F.pad(one, [4, 4, 4, 4]), *corners[i], height, width)),
        "flip": (flip, lambda one, i: F.horizontal_flip(one) if mirrored[i] else one),
        "erase": (erase, lambda one, i: F.erase(one, *erased[i], torch.zeros(1, 1, 1, dtype=torch.uint8))),
        "mixup": (mixup, lambda one, i: (one * share[i] + image[i ^ 1] * (1 - share[i])).round().to(torch.uint8)),
        "cutmix": (cut, with_box),
    }


def compared(image: Tensor, operation: Any, reference: Reference, turns: int) -> list[str]:
    """The cells of COLUMNS."""
    batch = {"input": image, "index": torch.arange(len(image))}
    reads = not isinstance(operation, augment.Operation)  # it is torchvision's own transform
    changed = Augmentation({"x": operation})

    def ours() -> Any:
        if not reads:
            return operation(batch, new_draws(len(image)))["input"]
        samples = [{name: value[index : index + 1] for name, value in batch.items()} for index in range(len(image))]
        return torch.cat([changed.at_reading(sample)["input"] for sample in samples])

    def theirs() -> Tensor:
        return torch.stack([reference(one, index) for index, one in enumerate(image)])

    differences = (ours().int() - theirs().int()).abs()
    close = [f"{(differences <= levels).float().mean():.2%}" for levels in (0, 1)]
    if reads:
        close = ["", ""]
    taken_s = in_turns({"ours": partial(spent_s, ours), "theirs": partial(spent_s, theirs)}, turns, warm_up=1)
    return [*close, *(f"{1000 * statistics.median(times_s):.1f}" for times_s in taken_s.values())]


def augmentation(args: argparse.Namespace) -> str:
    torch.set_num_threads(1)
    rows: dict[str, list[str]] = {}
    for size in SIZES:
        generator = torch.Generator().manual_seed(0)
        coarse = torch.rand(args.batch, 3, 14, 14, generator=generator)
        noise = torch.randn(args.batch, 3, size, size, generator=generator) * 8
        smooth = torch.nn.functional.interpolate(coarse, size=(size, size), mode="bicubic") * 255
        image = (smooth + noise).round().clamp(0, 255).to(torch.uint8)
        for name, case in (cases(image) | transforms(size)).items():
            rows.setdefault(name, [f"`{name}`"]).extend(compared(image, *case, args.turns))
    head = ["operation", *(f"{size} px: {column}" for size in SIZES for column in COLUMNS)]
    return f"{args.batch} colour images.\n\n{table(head, list(rows.values()))}"


# --- decoding ---

JPEGS = ((500, 375), (1600, 1200), (4000, 3000))
SIDE = 224
COLOUR: dict[str, Any] = {"channels": 3, "frame": Frame(SIDE, "crop", SIDE / 256)}
Read = Callable[[], object]  # reads a batch


def write_jpeg(path: Path, width: int, height: int) -> None:
    random = np.random.default_rng(0)
    pattern = Image.fromarray(random.integers(0, 255, (height // 25, width // 25, 3), dtype=np.uint8))
    smooth = np.asarray(pattern.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    noisy = (smooth + random.integers(-12, 12, smooth.shape)).clip(0, 255).astype(np.uint8)
    Image.fromarray(noisy).save(path, quality=90)


def training(path: Path, count: int, low: float) -> dict[str, Read]:
    """Random crops of at least the fraction `low` of the image, flipped. Lockstep flips on the device, so its time excludes it."""
    crop = augment.RandomResizedCrop(image_size=SIDE, scale=(low, 1.0))
    files = Files(path.parent, [path.name] * count, np.zeros(count), **COLOUR, least=crop.crops_from)
    part = Part(files, Split(count, 0, count, shuffled=False), Augmentation({"crop": crop}).at_reading)
    read = MicroBatches(part, default_convert).samples
    vision = v2.Compose([v2.RandomResizedCrop(SIDE, scale=(low, 1.0)), v2.RandomHorizontalFlip(), v2.PILToTensor()])
    scale = {"scale": (low, 1.0), "color_jitter": None}
    return {
        "Lockstep": lambda: read(share_of([*range(count)])),
        **others(path, count, vision, is_training=True, **scale),
    }


def evaluation(path: Path, count: int) -> dict[str, Read]:
    """Centre crops."""
    files = Files(path.parent, [path.name] * count, np.zeros(count), **COLOUR)
    vision = v2.Compose([v2.Resize(256), v2.CenterCrop(SIDE), v2.PILToTensor()])
    return {"Lockstep": lambda: files.__getitems__(range(count)), **others(path, count, vision, crop_pct=SIDE / 256)}


def others(path: Path, count: int, vision: Callable[[Any], Any], **options: Any) -> dict[str, Read]:
    """Opens each image like torchvision's ImageFolder, and stacks a batch of bytes."""
    of_timm = create_transform(SIDE, use_prefetcher=True, interpolation="bilinear", **options)

    def images() -> Iterator[Image.Image]:
        return (Image.open(path).convert("RGB") for _ in range(count))

    return {
        "torchvision": lambda: torch.stack([vision(image) for image in images()]),
        "timm": lambda: np.stack([of_timm(image) for image in images()]),
    }


def from_files(folder: Path, turns: int) -> str:
    rows = []
    for width, height in JPEGS:
        path = folder / f"{width}.jpg"
        write_jpeg(path, width, height)
        count = max(4, 12_000_000 // (width * height))
        row = [f"{width} x {height}, {path.stat().st_size / 1000:,.0f} kB"]
        for ways in (training(path, count, 0.08), training(path, count, 0.5), evaluation(path, count)):
            taken_s = in_turns({name: partial(spent_s, read) for name, read in ways.items()}, turns, warm_up=1)
            row.append("{} ({}, {})".format(*(f"{count / min(times_s):,.0f}" for times_s in taken_s.values())))
        rows.append(row)
    return table(["Lockstep (torchvision, timm)", "crops from 0.08", "crops from 0.5", "evaluation"], rows)


def into_the_cache(folder: Path, images: int) -> str:
    """Builds the cache of `images` files of the first size."""
    write_jpeg(folder / "one.jpg", *JPEGS[0])
    for index in range(images):
        path = folder / "classes" / str(index % 2) / f"{index}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((folder / "one.jpg").read_bytes())
    data = Folder(root=str(folder / "classes"), decode="cache", cache_dir=str(folder / "cache"), image_size=SIDE)
    return f"Decoded into the cache, per core: {images / spent_s(data.prepare):,.0f} images/s of {JPEGS[0]}."


def decoding(args: argparse.Namespace) -> str:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        read = from_files(Path(name), args.turns)
        return f"Images/s of a core, to {SIDE} x {SIDE} RGB.\n\n{read}\n\n{into_the_cache(Path(name), args.images)}"


# --- keyed ---


class Photos(Dataset[tuple[Any, int]]):
    """Like torchvision's data sets: PIL images from an array or a file."""

    def __init__(self, source: NDArray[np.uint8] | Path, count: int, transform: Callable[[Any], Any] | None) -> None:
        self.source, self.count, self.transform = source, count, transform

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, int]:
        of_file = isinstance(self.source, Path)
        image = Image.open(self.source).convert("RGB") if of_file else Image.fromarray(self.source[index])  # type: ignore[arg-type, index]
        return image if self.transform is None else self.transform(image), 0


class Unkeyed(MicroBatches):
    def samples(self, share: Share) -> Any:
        return self.dataset.__getitems__(share.keys)


def share_of(keys: list[int], place: int = 0) -> Share:
    return Share(keys, place, 0, 0, 0, MicroBatchInfo(1.0, "", None))


def rate(kind: type[MicroBatches], pictures: Pictures, workers: int) -> float:
    """Images per second."""
    order = np.random.default_rng(0).permutation(len(pictures)).reshape(-1, 64)
    shares = [share_of(keys.tolist(), 64 * number) for number, keys in enumerate(order)]
    part = Part(pictures, Split(len(pictures), 0, len(pictures), shuffled=False))
    batches = iter(from_workers(DataLoader(part, num_workers=workers), kind(part, default_convert), sampler=shares))
    next(batches)  # waits until workers have started
    began_s = time.perf_counter()
    return sum(len(batch["index"]) for batch, _ in batches) / (time.perf_counter() - began_s)


def keyed(args: argparse.Namespace) -> str:
    rows = []
    with tempfile.TemporaryDirectory() as name:
        write_jpeg(Path(name) / "x.jpg", *JPEGS[0])
        small = np.random.default_rng(0).integers(0, 256, (args.images, 32, 32, 3), dtype=np.uint8)
        crop, flip = v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip()
        cases: dict[str, tuple[Any, int, int, Any]] = {
            "32 px": (small, 32, args.images, None),
            "32 px, crop and flip": (small, 32, args.images, v2.Compose([crop, flip])),
            "224 px": (Path(name) / "x.jpg", SIDE, args.images // 8, None),
            "224 px, crop and flip": (
                Path(name) / "x.jpg",
                SIDE,
                args.images // 8,
                v2.Compose([v2.RandomResizedCrop(SIDE), flip]),
            ),
        }
        for case, (source, size, count, transform) in cases.items():
            items = Pictures(Photos(source, count, transform), {"channels": 3, "frame": Frame(size)})
            for workers in (0, 2):
                turns = {kind.__name__: partial(rate, kind, items, workers) for kind in (Unkeyed, MicroBatches)}
                unkeyed, ours = in_turns(turns, args.turns, warm_up=1).values()
                ratio = statistics.median(b / a for a, b in zip(unkeyed, ours, strict=True))
                rows.append(
                    [
                        case,
                        str(workers),
                        *(f"{statistics.median(rates):,.0f}" for rates in (unkeyed, ours)),
                        f"{ratio:.3f}",
                    ]
                )
    return table(["images", "workers", "unkeyed, images/s", "keyed", "ratio"], rows)


def main() -> None:
    parser = measuring.parser(__doc__)
    parts = parser.add_subparsers(dest="what", required=True, metavar="augment|decoding|keyed")
    part = parts.add_parser("augment")
    part.add_argument("--batch", type=int, default=32)
    part.add_argument("--turns", type=int, default=5)
    part = parts.add_parser("decoding")
    part.add_argument("--images", type=int, default=2000, help="files to decode into the cache")
    part.add_argument("--turns", type=int, default=7)
    part = parts.add_parser("keyed")
    part.add_argument("--images", type=int, default=4096)
    part.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    show({"augment": augmentation, "decoding": decoding, "keyed": keyed}[args.what](args))


if __name__ == "__main__":
    main()
