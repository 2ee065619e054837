"""Prints a one-line summary of the run before the first step."""

from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from omegaconf import DictConfig, OmegaConf

from lockstep.checkpoints.changes import values
from lockstep.config.batches import repeats
from lockstep.config.identity import model_title, title
from lockstep.config.instantiate import has_own_loaders
from lockstep.data.datamodule import DataModule
from lockstep.errors import TrainingFailed
from lockstep.reporting.console import say
from lockstep.reporting.provenance import versions
from lockstep.strategies.batch_norm import SYNCHRONISED
from lockstep.training.foreign import promises
from lockstep.training.invariance import DIFFERS, NORMS, SAME_BITS, UNKNOWN
from lockstep.training.module import TaskModule
from lockstep.training.steps import steps_done, total_steps

COMPILED_ON_A_CPU = (
    "compile=true may slow a CPU down: resnet50d at 336 px in bf16-mixed ran at 2.5 images/s, and at 5.0 without it, after a first "
    "step of 104 s (torch 2.13). Compare a few steps without it."
)
# What a resumed run may change, and a reader of its figures must know.
COMPARED = ("model", "task", "data.mean", "data.std")
FILES = "all nodes must see the same files. Check runs_dir and data.root."


class Plan(Callback):
    """Prints model, data, strategy, batches, precision and steps, and checks that all processes agree on them."""

    def __init__(self, cfg: DictConfig, data: LightningDataModule, facts: Mapping[str, Any]) -> None:
        self.cfg, self.data, self.facts = cfg, data, facts
        self.changes: list[str] = []  # since the checkpoint
        self.across_processes: str | None = None

    def state_dict(self) -> dict[str, Any]:
        libraries = dict(each.split(" ", 1) for each in versions().split(", "))
        return {"versions": libraries, "data": self.facts["data/sha256"]}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        saved = OmegaConf.create(checkpoint["config"])
        for key in COMPARED:
            self.changes += differences(values(saved, key), values(self.cfg, key))
        offered = getattr(pl_module, "network_arguments", {})
        self.changes += differences(checkpoint.get("network", {}), offered, "the network's argument ")
        before, here = checkpoint["callbacks"].get(self.state_key), self.state_dict()
        if before:
            self.changes += differences(before["versions"], here["versions"])
            self.changes += differences({"data": before["data"]}, {"data": here["data"]}, "the SHA-256 of the ")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.agree(trainer, "is the run", self.cfg.run)
        words = "the nodes have different hardware. Type trainer.precision=32-true, or bf16-mixed."
        self.agree(trainer, "computes in precision", self.cfg.trainer.precision, words)
        self.agree(trainer, "starts from", self.cfg.resume or self.cfg.init_from or "new weights")
        self.agree(trainer, "has data with SHA-256", self.facts["data/sha256"])

    def agree(self, trainer: Trainer, what: str, own: object, words: str = FILES) -> None:
        """Raises TrainingFailed if this process found another value than rank 0."""
        first = trainer.strategy.broadcast(own)
        if own != first:
            raise TrainingFailed(f"rank {trainer.global_rank} {what} {own}, but rank 0 {first}: {words}")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.agree(trainer, "continues after step", steps_done(trainer))
        cfg, world = self.cfg, trainer.world_size
        parameters = sum(p.numel() for p in pl_module.parameters())
        device = trainer.strategy.root_device.type
        replicas = f"{world} process{'es' if world > 1 else ''} on {device}"
        if cfg.strategy.traits.splits_batches:
            gpus, one = trainer.num_devices, f"ONE device ({device}): there are no two GPUs to split batches over"
            replicas = f"1 process on {gpus} GPUs" if gpus > 1 and device == "cuda" else one
        say(
            f"{cfg.run}: {model_title(cfg)} ({parameters:,} parameters) · {title(cfg.data)} from {self.samples()} · "
            f"{cfg.strategy.name}, {replicas} · {self.batches(trainer)}"
            f" · {trainer.precision} · {total_steps(trainer):g} steps".replace("inf steps", "no fixed number of steps")
            + (f", {steps_done(trainer)} of them done" if steps_done(trainer) else "")
        )
        self.across_processes = across_processes(pl_module, self.data)
        say(f"result: {self.across_processes}")
        if self.cfg.compile and device == "cpu":
            say(COMPILED_ON_A_CPU)
        for change in self.changes:
            say(f"changed since the checkpoint: {change}")
        if not isinstance(pl_module, TaskModule):
            say(promises(pl_module, self.data, world))

    def report_figures(self) -> dict[str, Any]:
        return {"across_processes": self.across_processes}

    def samples(self) -> str:
        known = self.facts
        parts = ("train", "val", "test") if known["data/train"] else ()
        counts = ", ".join(f"{known[f'data/{part}']:,} {part}" for part in parts)
        return f"{known['data/source']} ({counts})" if counts else str(known["data/source"])

    def batches(self, trainer: Trainer) -> str:
        world, accumulate = trainer.world_size, trainer.accumulate_grad_batches
        accumulated = f" x {accumulate} accumulated" if accumulate > 1 else ""
        if has_own_loaders(self.cfg):
            return f"each process has its own batches{accumulated}"
        batch = self.cfg.data.batch_size
        copies = f", {repeats(self.cfg)} copies of each sample" if repeats(self.cfg) > 1 else ""
        return f"batch {batch} = {world} x {batch // (world * accumulate)}{accumulated}{copies}"


def across_processes(module: LightningModule, data: LightningDataModule) -> str:
    """How the result depends on the number of processes."""
    if not isinstance(data, DataModule):
        return DIFFERS.format("the dataloaders are your own, so each process has its own batches")
    if not isinstance(module, TaskModule):
        return UNKNOWN.format(f"the steps of {type(module).__name__} are its own, and were not tried")
    if module.logical_ranks:
        return SAME_BITS
    apart = [m for m in module.net.modules() if isinstance(m, NORMS) and m.training and not isinstance(m, SYNCHRONISED)]
    if apart:
        return DIFFERS.format(
            "batch normalisation has statistics of each process's own samples. Set trainer.sync_batchnorm=true, or exact.shards=8"
        )
    return module.across_processes


def differences(then: Mapping[str, Any], now: Mapping[str, Any], what: str = "") -> Iterator[str]:
    for key in {**then, **now}:
        if then.get(key) != now.get(key):
            yield f"{what}{key} was {then.get(key)} and is {now.get(key)}"
