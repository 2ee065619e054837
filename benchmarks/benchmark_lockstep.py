"""Lockstep by turns, and its upper bound: its own network, optimizer and precision in a bare loop over one batch."""

import time
from typing import Any

import lightning.pytorch as pl
import torch
from benchmark_turns import Turns, synchronise
from omegaconf import DictConfig
from stages import ready
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from lockstep import build
from lockstep.config.compose import compose_config
from lockstep.data.datamodule import DataModule
from lockstep.launch import jobs
from lockstep.launch.start import start
from lockstep.machine.world import World
from lockstep.training.steps import completes_step

DTYPES = {"bf16": torch.bfloat16, "16": torch.float16, "32": torch.float32, "64": torch.float64}


class ByTurns(pl.Callback):
    """The last callback: what the others do belongs to the step."""

    def __init__(self, turns: Turns, data: DataModule) -> None:
        self.turns, self.data = turns, data

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.turns.begin()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.turns.waited_s = getattr(self.data, "waited_s", None)
        if completes_step(trainer, batch_idx):
            self.turns.stepped(batch["count"] * trainer.accumulate_grad_batches)


class UpperBound(pl.Callback):
    """Takes over where training would start: everything is on its device and in its memory format by then."""

    def __init__(self, turns: Turns, data: DataModule) -> None:
        self.turns = turns

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        batch = one_batch(trainer)
        image_BCHW, label_B = batch["input"], batch["target"]
        net, (optimizer,) = pl_module.net, trainer.optimizers
        assert isinstance(net, torch.nn.Module) and net.training

        def forward_backward() -> None:
            with trainer.precision_plugin.train_step_context():
                loss = F.cross_entropy(net(image_BCHW), label_B)
            loss.backward()

        with FlopCounterMode(display=False) as counter:
            forward_backward()
        optimizer.zero_grad()
        self.turns.about["flops_per_image"] = counter.get_total_flops() / len(label_B)
        self.turns.waited_s = None
        self.turns.begin()
        # In the turn that warms up: no one else is at work now.
        self.turns.about["matmul_flops_per_s"] = matmul_rate(image_BCHW.device, str(trainer.precision))
        while True:  # until the process is told to end
            forward_backward()
            optimizer.step()
            optimizer.zero_grad()
            self.turns.stepped(len(label_B))


def one_batch(trainer: pl.Trainer) -> Any:
    """The first batch of the training, as the network gets it."""
    loader: Any = trainer.train_dataloader
    batch = trainer.precision_plugin.convert_input(next(iter(loader)))
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def matmul_rate(device: torch.device, precision: str, repeat: int = 5) -> float:
    """FLOP/s of the best of several products of large square matrices, with the settings of this process."""
    size = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(size, size, device=device, dtype=DTYPES[precision.split("-")[0]]) for _ in range(2))
    seconds = []
    for _ in range(repeat + 1):
        synchronise()
        began_s = time.perf_counter()
        torch.mm(a, b)
        synchronise()
        seconds.append(time.perf_counter() - began_s)
    return 2 * size**3 / min(seconds[1:])


def fit(
    turns: Turns, overrides: list[str], callback: type[ByTurns | UpperBound], net: torch.nn.Module | None = None
) -> None:
    """What train.py does, without the report; with another network if one is given."""

    def job(cfg: DictConfig, world: World) -> None:
        data, task, trainer = ready(cfg, world)
        task.net = net or task.net
        trainer.callbacks.append(callback(turns, data))  # type: ignore[attr-defined]
        turns.about["precision"] = str(trainer.precision)
        build.fit(cfg, trainer, task, data)
        turns.finish(build.evaluate(cfg, world, data, task)["test/acc"])

    start(jobs.Job("train", jobs.script("train"), job), compose_config("train", overrides), overrides)


def lockstep(turns: Turns, overrides: list[str]) -> None:
    fit(turns, overrides, ByTurns)


def lockstep_plain_net(turns: Turns, overrides: list[str]) -> None:
    """What the engine gives the network of the plain loop. Cross-entropy of its log-probabilities is their likelihood."""
    from benchmark_peers import BasicNet

    fit(turns, overrides, ByTurns, BasicNet())


def upper_bound(turns: Turns, overrides: list[str]) -> None:
    fit(turns, overrides, UpperBound)
