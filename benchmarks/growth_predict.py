"""Measures how the memory of predict.py grows with the number of files: a line for each number.

python benchmarks/growth_predict.py [--files 10000,100000,200000,1000000]

The files are simulated: a CSV lists their paths, and a black image stands for each, so the disk and Pillow are left out. Peak
resident memory of one process that predicts them in turn; what a number adds to the peak of the one before is what it cost.
"""

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

import lockstep
from lockstep.data.dataset import Indices
from lockstep.data.images import InputFiles

CPU = ["trainer.accelerator=cpu", "data.num_workers=0", "trainer.enable_progress_bar=false"]
PATH = "2026/november/{:012}.jpg"


def black(self: InputFiles, indices: Indices) -> dict[str, object]:
    shape = (len(indices), self.channels, self.size, self.size)
    return {"input": np.zeros(shape, np.uint8), "problem": [""] * len(indices)}


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measured(counts: list[int], folder: Path) -> Iterator[tuple[int, int, int, float]]:
    """Files, peak memory after them, bytes of the table, seconds; in a folder of its own. Trains a small network first."""
    for name in ("a", "b"):
        (folder / "data" / name).mkdir(parents=True)
        for number in range(10):
            Image.new("L", (8, 8), number).save(folder / "data" / name / f"{number}.png")
    run = [
        "data=folder",
        f"data.root={folder}/data",
        f"data.cache_dir={folder}/cache",
        "data.channels=1",
        "data.image_size=8",
    ]
    lockstep.train(["run=small", f"runs_dir={folder}/runs", *run, "data.batch_size=8", "trainer.max_steps=1", *CPU])
    InputFiles.__getitem__ = black  # type: ignore[method-assign]
    for count in counts:
        with (folder / "list.csv").open("w") as file:
            file.writelines(["path\n", *(f"{PATH.format(number)}\n" for number in range(count))])
        output, began_s = folder / f"{count}.csv", time.perf_counter()
        lockstep.predict(
            [
                "run=small",
                f"runs_dir={folder}/runs",
                f"input={folder}/list.csv",
                f"output={output}",
                "data.eval_batch_size=1000",
                *CPU,
            ]
        )
        yield count, peak_bytes(), output.stat().st_size, time.perf_counter() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", default="10000,100000,200000,1000000")
    counts = [int(count) for count in parser.parse_args().files.split(",")]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        rows = list(measured(counts, Path(folder)))
    print("| files | peak memory, MiB | table, MiB | files/s |\n| ---: | ---: | ---: | ---: |")
    for count, peak, size, seconds in rows:
        print(f"| {count:,} | {peak / 2**20:,.0f} | {size / 2**20:,.1f} | {count / seconds:,.0f} |")


if __name__ == "__main__":
    main()
