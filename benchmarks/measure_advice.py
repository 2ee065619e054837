"""Measures, on this machine, what is usually advised: workers, prefetching, persistent workers, larger batches, SyncBatchNorm.

python benchmarks/measure_advice.py [--repeat 3] [--out docs/advice.md]

Each row is compared with the default in the same round, and rounds alternate, because machines are shared: read the ratios.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

import lockstep
from lockstep.config.compose import compose_config
from lockstep.launch import jobs
from lockstep.launch.start import start
from lockstep.machine.world import World
from lockstep.run.report import versions

COMMON = [
    "data.source=embedded", "trainer.enable_progress_bar=false", "trainer.limit_val_batches=0", "trainer.enable_checkpointing=false",
    "trainer.limit_test_batches=1", "trainer.log_every_n_steps=10",
]  # fmt: skip
ALONE = ["trainer.max_epochs=3"]
WORKERS = [*ALONE, "data.num_workers=2"]
NORM = ["model=timm", "model.name=test_resnet", "data.image_size=56", "strategy=ddp", "trainer.devices=2"]
ROWS = {
    "default: no workers, batch 64": ALONE,
    "data.num_workers=1": [*ALONE, "data.num_workers=1"],
    "data.num_workers=2": WORKERS,
    "data.num_workers=2 data.prefetch_factor=8": [*WORKERS, "data.prefetch_factor=8"],
    "data.num_workers=2 data.persistent_workers=false": [*WORKERS, "data.persistent_workers=false"],
    "data.batch_size=256": [*ALONE, "data.batch_size=256"],
    "data.batch_size=1024": [*ALONE, "data.batch_size=1024"],
    "a network with batch norm, ddp x2": NORM,
    "the same with trainer.sync_batchnorm=true": [*NORM, "trainer.sync_batchnorm=true"],
}
REFERENCES = {
    name: ("a network with batch norm, ddp x2" if options[0] == NORM[0] else next(iter(ROWS)))
    for name, options in ROWS.items()
}


def fit_alone(overrides: list[str]) -> dict[str, float]:
    """Images per second from the first batch to the last, the pauses between epochs included; and the accuracy."""
    found: dict[str, float] = {}

    def timed(cfg: DictConfig, world: World) -> None:
        from lightning.pytorch.callbacks import Timer
        from stages import ready

        from lockstep import build

        data, task, trainer = ready(cfg, world)
        trainer.callbacks.append(timer := Timer())  # type: ignore[attr-defined]
        build.fit(cfg, trainer, task, data)
        images = trainer.global_step * cfg.data.batch_size
        found["images/s"] = images / timer.time_elapsed("train")
        found["accuracy"] = build.evaluate(cfg, world, data, task)["test/acc"]

    start(jobs.Job("train", jobs.script("train"), timed), compose_config("train", overrides), overrides)
    return found


def measure(options: list[str], runs_dir: str) -> dict[str, float]:
    overrides = [*COMMON, f"runs_dir={runs_dir}", *options]
    if "strategy=ddp" not in options:
        return fit_alone(overrides)
    report: dict[str, Any] = lockstep.train(overrides)
    return {"images/s": report["train/images_per_s"], "accuracy": report["test/acc"]}


def table(figures: dict[str, list[dict[str, float]]]) -> str:
    lines = ["| what | images/s, median (least to most) | ratio | accuracy |", "| --- | --- | --- | --- |"]
    for name, rounds in figures.items():
        speeds = [r["images/s"] for r in rounds]
        ratios = [r["images/s"] / other["images/s"] for r, other in zip(rounds, figures[REFERENCES[name]], strict=True)]
        lines.append(
            f"| {name} | {statistics.median(speeds):,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f}) | "
            f"{statistics.median(ratios):.2f} | {statistics.median(r['accuracy'] for r in rounds):.1%} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the table there as well")
    args = parser.parse_args()
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in ROWS}
    with tempfile.TemporaryDirectory() as runs_dir:
        for _ in range(args.repeat):
            for name, options in ROWS.items():
                figures[name].append(measure(options, runs_dir))
                print(f"{name}: {figures[name][-1]}", file=sys.stderr)
    text = table(figures)
    print(text)
    if args.out:
        made = f"`python benchmarks/measure_advice.py --repeat {args.repeat}` with {versions()}"
        args.out.write_text(f"# Advice, measured\n\nMade by {made}.\n\n{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
