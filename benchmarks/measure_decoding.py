"""Measures, on this machine, what reading images from files costs: by a worker, once into the cache,
and a run on that cache.

python benchmarks/measure_decoding.py [--images 2000] [--train 6000] [--turns 3] [--out docs/measurements/speed.md]

All times are of the processor: what one core does, however busy the machine is. The images are noise
over a smooth pattern, as JPEG of quality 90: 60 kB at 500 x 375. The run on the cache and the run on the same images in MNIST's
files take turns; the best of each counts.
"""

import argparse
import gzip
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image
from sections import write_section

import lockstep
from lockstep.data import Folder
from lockstep.data.images import Files
from lockstep.run.report import versions

SIZES = ((500, 375), (1600, 1200), (4000, 3000))
SIZE = 224


def write_jpeg(path: Path, width: int, height: int) -> None:
    random = np.random.default_rng(0)
    pattern = Image.fromarray(random.integers(0, 255, (height // 25, width // 25, 3), dtype=np.uint8))
    smooth = np.asarray(pattern.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    noisy = (smooth + random.integers(-12, 12, smooth.shape)).clip(0, 255).astype(np.uint8)
    Image.fromarray(noisy).save(path, quality=90)


def rate(work: Callable[[], object], images: int) -> float:
    """Images per second of processor time."""
    began_s = time.process_time()
    work()
    return images / (time.process_time() - began_s)


def decoding(folder: Path) -> list[str]:
    rows = []
    for width, height in SIZES:
        path = folder / f"{width}.jpg"
        write_jpeg(path, width, height)
        count = max(8, 60_000_000 // (width * height))
        files = Files(folder, [path.name] * count, np.zeros(count), channels=3, size=SIZE)
        found = rate(lambda files=files, count=count: files[np.arange(count)], count)  # type: ignore[misc]
        rows.append(f"| {width} x {height}, {path.stat().st_size / 1000:,.0f} kB | {found:,.0f} |")
    return rows


def caching(folder: Path, images: int) -> str:
    """Building the cache of `images` files of the first size, only checking them, and opening the cache again."""
    write_jpeg(folder / "one.jpg", *SIZES[0])
    content = (folder / "one.jpg").read_bytes()
    for place in range(images):
        path = folder / "classes" / str(place % 2) / f"{place}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def opened(decode: str) -> float:
        began_s = time.process_time()
        data = Folder(root=str(folder / "classes"), decode=decode, cache_dir=str(folder / "cache"), image_size=SIZE)
        data.prepare()
        assert len(data.train)
        return time.process_time() - began_s

    built_s, checked_s, again_s = opened("cache"), opened("workers"), opened("cache")
    return f"| {images:,} | {images / built_s:,.0f} | {images / checked_s:,.0f} | {again_s:.2f} |"


def runs(folder: Path, train: int, turns: int) -> str:
    """Processor seconds of BasicNet's default run on the cache of a folder, and on MNIST's files with the same images."""
    random = np.random.default_rng(0)
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for prefix, part, count in (("train", "train", train), ("t10k", "test", 1000)):
        labels = (np.arange(count) % 10).astype(np.uint8)
        images = (random.integers(0, 200, (count, 28, 28)) + 5 * labels[:, None, None]).astype(np.uint8)
        for kind, array, dimensions in (("images-idx3", images, 3), ("labels-idx1", labels, 1)):
            header = bytes([0, 0, 8, dimensions]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
            (raw / f"{prefix}-{kind}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes(), 1))
        for place, (image, label) in enumerate(zip(images, labels, strict=True)):
            path = folder / "digits" / part / str(label) / f"{place}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
    common = [f"runs_dir={folder}/runs", f"data.cache_dir={folder}/cache", "trainer.enable_progress_bar=false"]
    sources = {
        "folder": ["data=folder", f"data.root={folder}/digits", "data.channels=1", "data.image_size=28"],
        "arrays": ["data=mnist", f"data.root={folder}"],
    }
    spent_s: dict[str, list[float]] = {name: [] for name in sources}
    for turn in range(turns + 1):  # the first one imports and decodes
        for name, overrides in sources.items():
            began_s = time.process_time()
            lockstep.train([*overrides, *common, f"run={name}-{turn}", "data.eval_batch_size=1000"])
            spent_s[name].append(time.process_time() - began_s)
    folder_s, arrays_s = (min(spent_s[name][1:]) for name in ("folder", "arrays"))
    return f"| {folder_s:.2f} | {arrays_s:.2f} | {folder_s / arrays_s:.3f} |"


def page(folder: Path, images: int, train: int, turns: int, command: str) -> str:
    return "\n".join(
        [
            "# What reading images from files costs\n",
            f"JPEG of quality 90 to {SIZE} x {SIZE} RGB. Made by `{command}` with {versions()}.\n",
            "| file | images/s of a worker, per core |\n| --- | --- |",
            *decoding(folder),
            f"\n{SIZES[0][0]} x {SIZES[0][1]}, from files to a data set that is ready, per core. `checked`: before a run with `data.decode=workers`.\n",
            "| files | decoded into the cache, images/s | checked, images/s | opened again, s |\n| --- | --- | --- | --- |",
            caching(folder, images),
            f"\nBasicNet, batch 64, {train:,} images of 28 x 28, best of {turns} turns: seconds of processor time of a whole run.\n",
            "| folder, decoded into the cache | the same images in MNIST's files | ratio |\n| --- | --- | --- |",
            runs(folder, train, turns),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000, help="files of the cache that is built")
    parser.add_argument("--train", type=int, default=6000, help="training images of the runs")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the section there as well")
    args = parser.parse_args()
    command = f"python benchmarks/measure_decoding.py --images {args.images} --train {args.train} --turns {args.turns}"
    with tempfile.TemporaryDirectory() as folder:
        text = page(Path(folder), args.images, args.train, args.turns, command)
    print(text)
    if args.out:
        write_section(args.out, text)


if __name__ == "__main__":
    main()
