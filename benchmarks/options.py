"""What options cost: images per second of runs with them, against a run without, in alternating rounds on this machine.

python benchmarks/options.py advice [--rounds 3] [--out docs/measurements/speed.md]    # workers, prefetching, batch size, SyncBatchNorm
python benchmarks/options.py exact [--rounds 3] [--only ResNet]                        # exact.shards, on 1, 2 and 4 processes

Machines are shared: read the ratios, which are taken within a round.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sections import write_section

from lockstep import ROOT
from lockstep.run.report import versions

TRAIN = ROOT / "train.py"
COMMON = [
    "data.source=embedded", "trainer.accelerator=cpu", "trainer.enable_progress_bar=false", "trainer.limit_val_batches=0",
    "trainer.enable_checkpointing=false", "trainer.log_every_n_steps=10",
]  # fmt: skip
THREE_EPOCHS = ["trainer.max_epochs=3"]
NORM = ["model=timm", "model.name=test_resnet", "data.image_size=56", "strategy=ddp", "trainer.devices=2"]
DEFAULT, NORM_NAME = "default: no workers, batch 64", "a network with batch norm, ddp x2"
ADVICE = {  # name: the run that it is compared with, options
    DEFAULT: (DEFAULT, THREE_EPOCHS),
    "data.num_workers=1": (DEFAULT, [*THREE_EPOCHS, "data.num_workers=1"]),
    "data.num_workers=2": (DEFAULT, [*THREE_EPOCHS, "data.num_workers=2"]),
    "data.num_workers=2 data.prefetch_factor=8": (
        DEFAULT,
        [*THREE_EPOCHS, "data.num_workers=2", "data.prefetch_factor=8"],
    ),
    "data.num_workers=2 data.persistent_workers=false": (
        DEFAULT,
        [*THREE_EPOCHS, "data.num_workers=2", "data.persistent_workers=false"],
    ),
    "data.batch_size=256": (DEFAULT, [*THREE_EPOCHS, "data.batch_size=256"]),
    "data.batch_size=1024": (DEFAULT, [*THREE_EPOCHS, "data.batch_size=1024"]),
    NORM_NAME: (NORM_NAME, NORM),
    "the same with trainer.sync_batchnorm=true": (NORM_NAME, [*NORM, "trainer.sync_batchnorm=true"]),
}
RECIPES = {
    "BasicNet": ["trainer.max_steps=150", "trainer.max_epochs=1000"],
    "ResNet-18 at 32 pixels": ["model=timm", "model.name=resnet18", "data.image_size=32", "trainer.max_steps=50"],
}
WORLDS, SHARDS = (1, 2, 4), (None, 1, 2, 4, 8)


def exact(recipe: str) -> dict[str, tuple[str, list[str]]]:
    """Worlds and numbers of logical ranks of a recipe, each compared with the ordinary mode on as many processes."""
    found = {}
    for world in WORLDS:
        place = ["strategy=ddp", f"trainer.devices={world}"] if world > 1 else []
        base = f"{recipe}, {world} process{'es' * (world > 1)}"
        for shards in SHARDS:
            if shards is None or shards >= world:
                ranks = (
                    [f"exact.shards={shards}", "trainer.limit_test_batches=1"]
                    if shards
                    else ["trainer.limit_test_batches=1"]
                )
                found[base + (f", exact.shards={shards}" if shards else "")] = (
                    base,
                    [*RECIPES[recipe], *place, *ranks],
                )
    return found


def measure(rows: dict[str, tuple[str, list[str]]], rounds: int, runs_dir: str) -> dict[str, list[dict[str, Any]]]:
    """Reports of runs, each a process of its own, so that its peak of memory is its own."""
    reports: dict[str, list[dict[str, Any]]] = {name: [] for name in rows}
    for number in range(rounds):
        for place, (name, (_, options)) in enumerate(rows.items()):
            run = f"{number}-{place}"
            command = [sys.executable, str(TRAIN), *COMMON, f"runs_dir={runs_dir}", f"run={run}", *options]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            reports[name].append(json.loads(Path(runs_dir, run, "report.json").read_text()))
            print(f"{name}: {rate(reports[name][-1]):,.0f} images/s", file=sys.stderr)
    return reports


def rate(report: dict[str, Any]) -> float:
    """Images per second of the whole training: with its first steps and the pauses between epochs."""
    return float(report["train/steps"] * report["batch_size"] / (report["time/wait_s"] + report["time/steps_s"]))


def table(rows: dict[str, tuple[str, list[str]]], reports: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    yield "| what | images/s, median (least to most) | ratio | test accuracy | peak memory, GiB |"
    yield "| --- | --- | --- | --- | --- |"
    for name, (base, _) in rows.items():
        speeds, others = [rate(report) for report in reports[name]], [rate(report) for report in reports[base]]
        ratio = statistics.median(speed / other for speed, other in zip(speeds, others, strict=True))
        accuracy = statistics.median(report["test/acc"] for report in reports[name])
        memory = statistics.median(report["peak_memory_bytes"] for report in reports[name]) / 2**30
        spread = f"{statistics.median(speeds):,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})"
        yield f"| {name} | {spread} | {ratio:.2f} | {accuracy:.1%} | {memory:.2f} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("advice", "exact"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="recipes whose name contains this (exact)")
    parser.add_argument("--out", type=Path, help="write the section there as well")
    args = parser.parse_args()
    recipes = [recipe for recipe in RECIPES if args.only in recipe]
    rows = ADVICE if args.what == "advice" else {k: v for recipe in recipes for k, v in exact(recipe).items()}
    with tempfile.TemporaryDirectory() as runs_dir:
        text = "\n".join(table(rows, measure(rows, args.rounds, runs_dir)))
    print(text)
    if args.out:
        title = {"advice": "Advice, measured", "exact": "What logical ranks cost"}[args.what]
        made = f"Made by `python benchmarks/options.py {args.what} --rounds {args.rounds}` with {versions()}."
        write_section(args.out, f"# {title}\n\n{made}\n\n{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
