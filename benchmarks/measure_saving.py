"""Measures, on this machine, what saving costs a training: of one file and of shards, in the background and not.

python benchmarks/measure_saving.py [--parameters 70] [--steps 40] [--every 10] [--threads 1] [--setups single,shards] [--out docs/measurements/speed.md]

A checkpoint of an MLP with AdamW has three numbers for each parameter. Steps are timed from the beginning of one to that of the
next; the save is in the first of them. A step with a save minus the median step of none is what training waits for; a step that
runs while another thread writes may be slower; both together, over the number of saves, is what a save costs.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from sections import write_section

from lockstep.config.compose import compose_config
from lockstep.config.run_config import run_dir
from lockstep.launch.local import received, run_processes
from lockstep.machine.world import World, world_of
from lockstep.run.report import versions

PARAMETERS = "MEASURE_PARAMETERS"  # of the environment of the processes
COMMON = [
    "data.source=embedded", "trainer.accelerator=cpu", "trainer.enable_progress_bar=false", "trainer.limit_val_batches=0", "trainer.max_epochs=1",
    "trainer.log_every_n_steps=1000", "callbacks=[]", "data.batch_size=32", "trainer.precision=32-true", "data.num_workers=0",
]  # fmt: skip
SETUPS = {
    "single": ["strategy=single"],
    "shards": ["strategy=fsdp", "trainer.devices=2", "checkpoint.sharded=true"],
}
LAYERS, PIXELS, CLASSES = 8, 28 * 28, 10
WARM_UP = 2  # steps


@dataclass
class Clock:
    """Times of one process, in seconds of the same clock."""

    steps: list[float] = field(default_factory=list)  # when each began
    saves: list[tuple[float, float]] = field(default_factory=list)  # within trainer.save_checkpoint
    writes: list[tuple[float, float]] = field(default_factory=list)

    def around(self, function: Callable[..., Any], spans: list[tuple[float, float]]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            function(*args, **kwargs)
            spans.append((began_s, time.perf_counter()))

        return timed


def mlp(parameters: int) -> Any:
    from torch import nn

    width = round((parameters / LAYERS) ** 0.5)
    hidden = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, width), *hidden, nn.Linear(width, CLASSES))


def timed_run(cfg: DictConfig, world: World) -> None:
    """One process's part of a run. Rank 0 leaves its times in the run's directory."""
    import lightning.pytorch as pl
    from benchmark_contenders import ready

    from lockstep import build
    from lockstep.checkpoints import io as checkpoint_io

    clock = Clock()

    class Steps(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            clock.steps.append(time.perf_counter())

        def on_train_epoch_end(self, *_: Any) -> None:
            clock.steps.append(time.perf_counter())

    vars(build)["network"] = lambda *_, **__: mlp(int(os.environ[PARAMETERS]))
    data, task, trainer = ready(cfg, world)
    trainer.callbacks.insert(0, Steps())  # type: ignore[attr-defined]
    trainer.save_checkpoint = clock.around(trainer.save_checkpoint, clock.saves)  # type: ignore[method-assign]
    checkpoint_io.write_or_explain = clock.around(checkpoint_io.write_or_explain, clock.writes)
    build.fit(cfg, trainer, task, data)
    if world.rank == 0:
        (run_dir(cfg) / "times.json").write_text(json.dumps(vars(clock)))


def overlaps(step: tuple[float, float], spans: list[tuple[float, float]]) -> bool:
    return any(begin < step[1] and end > step[0] for begin, end in spans)


def length(span: tuple[float, float]) -> float:
    return span[1] - span[0]


def figures(times: dict[str, Any], size_gb: float) -> dict[str, float]:
    """In seconds. The last checkpoint is saved when no step follows; the first one's memory is new."""
    marks, saves, writes = times["steps"], times["saves"], times["writes"]
    steps = list(pairwise(marks))[WARM_UP:]
    undisturbed = [length(step) for step in steps if not overlaps(step, saves + writes)]
    beside = [length(step) for step in steps if overlaps(step, writes) and not overlaps(step, saves)]
    normal_s = statistics.median(undisturbed)
    stalls = [length(step) - normal_s for step in steps if overlaps(step, saves)]
    disturbed = [length(step) for step in steps if overlaps(step, saves + writes)]
    return {
        "GB": size_gb,
        "step": normal_s,
        "first stall": stalls[0],
        "stall": statistics.median(stalls[1:] or stalls),
        "in save_checkpoint": statistics.median(map(length, saves[1:-1] or saves)),
        "write": statistics.median(map(length, writes)),
        "write per GB": statistics.median(map(length, writes)) / size_gb,
        "step beside a write": statistics.median(beside) if beside else float("nan"),
        "cost of a save": (sum(disturbed) - normal_s * len(disturbed)) / len(stalls),
    }


def measure(args: argparse.Namespace, setup: str, background: bool, runs_dir: Path) -> dict[str, float]:
    run = f"{setup}-{'background' if background else 'at-once'}"
    options = [*SETUPS[setup], f"checkpoint.background={str(background).lower()}", f"checkpoint.every_n_steps={args.every}"]  # fmt: skip
    cfg = compose_config(
        "train", [*COMMON, *options, f"trainer.limit_train_batches={args.steps}", f"runs_dir={runs_dir}", f"run={run}"]
    )
    run_processes(Path(__file__).resolve(), cfg, world_of(cfg))
    checkpoint = run_dir(cfg) / "checkpoints" / "last.ckpt"
    files = [checkpoint] if checkpoint.is_file() else list(checkpoint.iterdir())
    size_gb = sum(path.stat().st_size for path in files) / 1e9
    for path in files:
        path.unlink()
    return figures(json.loads((run_dir(cfg) / "times.json").read_text()), size_gb)


def table(rows: dict[str, dict[str, float]]) -> str:
    columns = list(next(iter(rows.values())))
    lines = ["| | " + " | ".join(columns) + " |", "| --- " * (len(columns) + 1) + "|"]
    for name, row in rows.items():
        cells = ("-" if value != value else f"{value:.2f}" for value in row.values())
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=70, help="millions of them")
    parser.add_argument("--steps", type=int, default=40, help="of one epoch; the embedded data has 112")
    parser.add_argument("--every", type=int, default=10, help="steps between two saves")
    parser.add_argument(
        "--threads", type=int, help="of a process that trains; fewer than cores leave one for the writer"
    )
    parser.add_argument("--setups", default=",".join(SETUPS), help="single, and shards: fsdp x2")
    parser.add_argument("--out", type=Path, help="write the table there as well")
    args = parser.parse_args()
    os.environ[PARAMETERS] = str(round(args.parameters * 1e6))
    if args.threads:
        os.environ["OMP_NUM_THREADS"] = str(args.threads)
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for setup in args.setups.split(","):
            for background in (False, True):
                name = f"{setup}, {'in the background' if background else 'at once'}"
                rows[name] = measure(args, setup, background, Path(folder))
                print(f"{name}: {rows[name]}", file=sys.stderr)
    print(text := table(rows))
    if args.out:
        options = f"--parameters {args.parameters:g} --steps {args.steps} --every {args.every} --setups {args.setups}"
        options += f" --threads {args.threads}" if args.threads else ""
        write_section(args.out, f"{HEADER.format(options=options, versions=versions())}\n{text}\n")
    return 0


HEADER = """# What saving costs a training

Seconds, medians. `stall`: what a step with a save takes longer than one without; the first is apart, for its memory is new.
`in save_checkpoint`: the part of it within Lightning's call. `write`: to the disk, fsync included. `cost of a save`: stall and
what steps beside a write take longer, together. Made by `python benchmarks/measure_saving.py {options}` with {versions}.
"""

if __name__ == "__main__":
    if (job := received()) and job.world:
        timed_run(job.config, job.world)
    else:
        sys.exit(main())
