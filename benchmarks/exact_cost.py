"""What `exact.shards` costs: images/s and memory against the ordinary mode, as tables in Markdown.

python benchmarks/exact_cost.py [--rounds 3] [--only BasicNet] [--equal]

All modes of a round run one after the other; figures are ratios within a round, and their median over the rounds is shown.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

TRAIN = str(Path(__file__).parents[1] / "train.py")
COMMON = [
    "data.source=embedded", "data.batch_size=64", "trainer.accelerator=cpu", "trainer.limit_val_batches=0", "trainer.limit_test_batches=0",
    "trainer.enable_progress_bar=false", "trainer.log_every_n_steps=10", "trainer.max_epochs=1000", "trainer.enable_checkpointing=false",
]  # fmt: skip
RECIPES = {
    "BasicNet": ["trainer.max_steps=150"],
    "ResNet-18 at 32 pixels": ["model=timm", "model.name=resnet18", "data.image_size=32", "trainer.max_steps=50"],
}
WORLDS, SHARDS = (1, 2, 4), (None, 1, 2, 4, 8)
Mode = tuple[int, int | None]  # processes, and shards


def modes(*, equal: bool) -> list[Mode]:
    """With `equal`, several processes with a logical rank each, and without."""
    every = [(world, shards) for world in WORLDS for shards in SHARDS if shards is None or shards >= world]
    return [(world, shards) for world, shards in every if not equal or (world > 1 and shards in (None, world))]


def measured(mode: Mode, recipe: str, run: Path) -> tuple[float, float]:
    """Images per second, and GiB of the process that needs most."""
    world, shards = mode
    place = ["strategy=ddp", f"trainer.devices={world}"] if world > 1 else []
    exact = [f"exact.shards={shards}"] if shards else []
    typed = [TRAIN, *COMMON, *RECIPES[recipe], *place, *exact, f"runs_dir={run.parent}", f"run={run.name}"]
    subprocess.run([sys.executable, *typed], check=True, stdout=subprocess.DEVNULL)
    report = json.loads((run / "report.json").read_text())
    return report["train/images_per_s"], report["peak_memory_bytes"] / 2**30


def table(rounds: list[dict[Mode, tuple[float, float]]], recipe: str) -> Iterator[str]:
    yield f"| {recipe} | ordinary | " + " | ".join(f"`shards={s}`" for s in SHARDS if s) + " |"
    yield "| --- |" + " --- |" * len(SHARDS)
    for world in WORLDS:
        cells = []
        for shards in SHARDS:
            found = [each[world, shards] for each in rounds if (world, shards) in each]
            if not found:  # not measured, or not possible
                cells.append("")
                continue
            memory = statistics.median(gib for _, gib in found)
            share = statistics.median(each[world, shards][0] / each[world, None][0] for each in rounds)
            speed = f"{statistics.median(rate for rate, _ in found):.0f} images/s" if shards is None else f"{share:.2f}"
            cells.append(f"{speed}, {memory:.2f} GiB")
        name = "one process" if world == 1 else f"ddp, {world} processes"
        if any(cells):
            yield f"| {name} | " + " | ".join(cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="recipes whose name has this in it")
    parser.add_argument("--equal", action="store_true", help="as many logical ranks as processes, and no others")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for recipe in (name for name in RECIPES if args.only in name):
            rounds = []
            for number in range(args.rounds):
                runs = {m: Path(folder) / f"{recipe[0]}-{number}-{m[0]}-{m[1]}" for m in modes(equal=args.equal)}
                found = {mode: measured(mode, recipe, run) for mode, run in runs.items()}
                rounds.append(found)
                print(f"round {number + 1}: {found}", file=sys.stderr, flush=True)
            print("\n".join(table(rounds, recipe)), end="\n\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
