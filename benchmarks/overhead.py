"""What the framework costs per optimizer step: a network of one layer in a bare loop, in Lightning alone, and in Lockstep.

python benchmarks/overhead.py [--rounds 5] [--steps 400] [--out docs/measurements/speed.md]

All in one process and by turns, on a CPU with one thread: the work is Python's. Milliseconds, the median over rounds.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from omegaconf import DictConfig
from sections import write_section
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lockstep import build, strategies
from lockstep.config.compose import compose_config
from lockstep.config.instantiate import create
from lockstep.config.run_config import run_dir
from lockstep.data.datamodule import DataModule
from lockstep.launch import jobs
from lockstep.launch.start import start
from lockstep.machine import process
from lockstep.machine.world import World
from lockstep.reporting import console
from lockstep.run.report import versions
from lockstep.tasks import Classification
from lockstep.training.module import TaskModule

WARM = 50  # steps before the clock starts
BATCH = torch.zeros(64, 1, 28, 28), torch.zeros(64, dtype=torch.long)


def one_layer() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), 1e-3, fused=True)


class Clock(pl.Callback):
    def __init__(self, steps: int) -> None:
        self.steps, self.began_s, self.per_step_s = steps, 0.0, 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == WARM:
            self.began_s = time.perf_counter()
        elif trainer.global_step == WARM + self.steps:
            self.per_step_s = (time.perf_counter() - self.began_s) / self.steps


def bare(steps: int) -> float:
    net = one_layer()
    own, (image_BCHW, label_B) = optimizer(net), BATCH
    for step in range(WARM + steps):
        if step == WARM:
            began_s = time.perf_counter()
        F.cross_entropy(net(image_BCHW), label_B).backward()
        own.step()
        own.zero_grad()
    return (time.perf_counter() - began_s) / steps


class Plain(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = one_layer()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer(self.net)


def lightning_alone(steps: int) -> float:
    """A Trainer with nothing in it, on one batch again and again."""
    clock = Clock(steps)
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, callbacks=[clock], **dict.fromkeys(off, False))  # type: ignore[arg-type]
    trainer.fit(Plain(), DataLoader([BATCH] * (WARM + steps + 1), batch_size=None))  # type: ignore[arg-type]
    return clock.per_step_s


def lockstep(steps: int, *more: str) -> float:
    """All of a default run: batches from memory, normalised; seeds, log, throughput, checkpoints, schedule."""
    clock = Clock(steps)

    def job(cfg: DictConfig, world: World) -> None:
        run_dir(cfg).mkdir(parents=True, exist_ok=True)
        data = build.data(cfg)
        assert isinstance(data, DataModule)
        parallelize = partial(strategies.parallelize, sync_batchnorm=False, channels_last=False, compile=False)
        parts = {**build.optimizer(cfg), "schedule": create(cfg.schedule, "schedule")}
        trainer = build.trainer(cfg, world, data)
        trainer.callbacks.append(clock)  # type: ignore[attr-defined]
        task = Classification()
        task.bind(data.about)
        module = TaskModule(
            one_layer(), task, parallelize=parallelize, metrics=task.metrics(), network_arguments={}, **parts
        )
        build.fit(cfg, trainer, module, data)

    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        console.out.file = sys.stdout
        overrides = [
            "data.source=embedded", f"runs_dir={folder}", "trainer.precision=32-true", f"trainer.max_steps={WARM + steps + 1}",
            "trainer.accelerator=cpu", "trainer.limit_val_batches=0", *more,
        ]  # fmt: skip
        start(jobs.Job("train", jobs.script("train"), job), compose_config("train", overrides), overrides)
    return clock.per_step_s


def without_checkpoints(steps: int) -> float:
    return lockstep(steps, "trainer.enable_checkpointing=false")


WAYS: dict[str, Callable[[int], float]] = {
    "bare loop": bare,
    "Lightning alone": lightning_alone,
    "Lockstep, without checkpoints": without_checkpoints,
    "Lockstep, a checkpoint every 57 steps": lockstep,
}


def table(taken: dict[str, list[float]]) -> str:
    lines = ["| what | ms a step, median (least to most) | above the bare loop |", "| --- | --- | --- |"]
    base = statistics.median(taken["bare loop"])
    for name, seconds in taken.items():
        middle, least, most = statistics.median(seconds), min(seconds), max(seconds)
        lines.append(
            f"| {name} | {middle * 1e3:.2f} ({least * 1e3:.2f} to {most * 1e3:.2f}) | {(middle - base) * 1e3:.2f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, help="write the page there as well")
    args = parser.parse_args()
    world = World("cpu", 1, 1, "single")
    process.owned = True
    build.process(compose_config("train", []), world)
    torch.set_num_threads(1)
    taken: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(args.rounds):
        for name, way in WAYS.items():
            taken[name].append(way(args.steps))
    print(table(taken))
    if args.out:
        made = f"`python benchmarks/overhead.py --rounds {args.rounds} --steps {args.steps}` with {versions()}"
        write_section(
            args.out,
            f"# What the framework costs per step\n\nMade by {made}. A network of one layer, one thread. Checkpoints come at the end of each epoch: the embedded data have 57 steps in one, MNIST 844.\n\n{table(taken)}\n",
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
