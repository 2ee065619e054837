"""What a run shows of itself: its first lines, its progress, and its first batch."""

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from lockstep.callbacks.timing import size_of, waited_s
from lockstep.checkpoints.resuming import values
from lockstep.config.batches import repeats
from lockstep.config.identity import model_title, title
from lockstep.errors import TrainingFailed
from lockstep.reporting.console import Line, clock, say
from lockstep.reporting.pictures import restored
from lockstep.run.report import versions
from lockstep.strategies.batch_norm import SYNCHRONISED
from lockstep.tasks.panel import Content, Gallery, Sample
from lockstep.training.panels import pictures
from lockstep.training.steps import completes_step, has_row, steps_done, total_steps
from lockstep.training.workload import workload

# --- Prints a one-line summary of the run before the first step ---

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
        work = workload(pl_module, self.data)
        cfg, world = self.cfg, trainer.world_size
        parameters = sum(p.numel() for p in pl_module.parameters())
        device = trainer.strategy.root_device.type
        replicas = f"{world} process{'es' if world > 1 else ''} on {device}"
        if cfg.strategy.traits.splits_batches:
            gpus, one = trainer.num_devices, f"ONE device ({device}): there are no two GPUs to split batches over"
            replicas = f"1 process on {gpus} GPUs" if gpus > 1 and device == "cuda" else one
        say(
            f"{cfg.run}: {model_title(cfg)} ({parameters:,} parameters) · {title(cfg.data)} from {self.samples()} · "
            f"{cfg.strategy.name}, {replicas} · {self.batches(trainer, own_loaders=work.engine_data is None)}"
            f" · {trainer.precision} · {total_steps(trainer):g} steps".replace("inf steps", "no fixed number of steps")
            + (f", {steps_done(trainer)} of them done" if steps_done(trainer) else "")
        )
        self.across_processes = work.across_processes(SYNCHRONISED)
        say(f"result: {self.across_processes}")
        if self.cfg.compile and device == "cpu":
            say(COMPILED_ON_A_CPU)
        for change in self.changes:
            say(f"changed since the checkpoint: {change}")
        for line in work.promises(world):
            say(line)

    def report_figures(self) -> dict[str, Any]:
        return {"across_processes": self.across_processes}

    def samples(self) -> str:
        known = self.facts
        parts = ("train", "val", "test") if known["data/train"] else ()
        counts = ", ".join(f"{known[f'data/{part}']:,} {part}" for part in parts)
        return f"{known['data/source']} ({counts})" if counts else str(known["data/source"])

    def batches(self, trainer: Trainer, *, own_loaders: bool) -> str:
        world, accumulate = trainer.world_size, trainer.accumulate_grad_batches
        accumulated = f" x {accumulate} accumulated" if accumulate > 1 else ""
        if own_loaders:
            return f"each process has its own batches{accumulated}"
        batch = self.cfg.data.batch_size
        copies = f", {repeats(self.cfg)} copies of each sample" if repeats(self.cfg) > 1 else ""
        return f"batch {batch} = {world} x {batch // (world * accumulate)}{accumulated}{copies}"


def differences(then: Mapping[str, Any], now: Mapping[str, Any], what: str = "") -> Iterator[str]:
    for key in {**then, **now}:
        if then.get(key) != now.get(key):
            yield f"{what}{key} was {then.get(key)} and is {now.get(key)}"


# --- Progress of training, and of an evaluation or a prediction. See reporting/console.py for how it is shown ---


def unit_of(trainer: Trainer) -> str:
    return str(getattr(trainer.datamodule, "unit", "samples"))  # type: ignore[attr-defined]


def fn_of(trainer: Trainer) -> str:
    return trainer.state.fn.value if trainer.state.fn else ""


class WithLine(Callback):
    """Ends its line with what it follows. Only rank 0 has one."""

    line: Line | None = None

    def stop(self, *_: Any) -> None:
        if self.line is not None:
            self.line.end()
            self.line = None

    on_exception = cast(Any, stop)


class Progress(WithLine):
    """Follows the whole run, in optimizer steps. It shows the figures of the last log row, so no step waits for them."""

    def __init__(self, monitor: str | None = None) -> None:
        self.monitor = monitor  # shown beside the loss
        self.row, self.row_s, self.waited_s = "", 0.0, 0.0
        self.saved_s: float | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.row_s, self.waited_s = time.monotonic(), waited_s(trainer)
        if trainer.is_global_zero:
            self.line = Line("step", total_steps(trainer), steps_done(trainer))

    def on_save_checkpoint(self, *_: Any) -> None:
        self.saved_s = time.monotonic()

    def figures(self, trainer: Trainer) -> str:
        metrics: dict[str, Any] = {**trainer.callback_metrics, **trainer.progress_bar_metrics}
        rate = f"train/{unit_of(trainer)}_per_s"
        now_s, waited = time.monotonic(), waited_s(trainer)
        share = (waited - self.waited_s) / max(1e-9, now_s - self.row_s)
        self.row_s, self.waited_s = now_s, waited
        shown = [f"loss {float(metrics['train/loss']):.4f}"] if "train/loss" in metrics else []
        shown += [f"{float(metrics[rate]):,.0f} {unit_of(trainer)}/s"] if rate in metrics else []
        shown += [] if math.isnan(share) else [f"{share:.0%} waiting for data"]
        others = dict.fromkeys(name for name in (self.monitor, *trainer.progress_bar_metrics) if name)
        shown += [f"{n} {float(metrics[n]):.4f}" for n in others if n in metrics and n not in ("train/loss", rate)]
        return " · ".join(shown)

    def show(self, trainer: Trainer, more: str = "") -> None:
        assert self.line is not None
        if not self.line.due(steps_done(trainer)):
            return
        saved = "" if self.saved_s is None else f"saved {clock(time.monotonic() - self.saved_s)} ago"
        self.line.show(f"epoch {trainer.current_epoch + 1}", steps_done(trainer), more, self.row, saved)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.line is not None and completes_step(trainer, batch_idx):
            if has_row(trainer, steps_done(trainer)):
                self.row = self.figures(trainer)
            self.show(trainer)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: int
    ) -> None:
        if self.line is not None:
            self.show(trainer, f"validation batch {batch_idx + 1:,}")

    on_train_end = cast(Any, WithLine.stop)


class PassProgress(WithLine):
    """Follows one pass over a part of the data: a validation, a test or a prediction."""

    def __init__(self) -> None:
        self.done = self.samples = 0
        self.began_s = 0.0

    def begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        counts = {"test": trainer.num_test_batches, "predict": trainer.num_predict_batches}
        self.began_s = time.monotonic()
        if trainer.is_global_zero:
            self.line = Line("batch", sum(counts.get(fn_of(trainer), trainer.num_val_batches)))

    def step(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: int
    ) -> None:
        if self.line is not None:
            self.done += 1
            self.samples += size_of(batch) * trainer.world_size
            if not self.line.due(self.done):
                return
            rate = self.samples / max(1e-9, time.monotonic() - self.began_s)
            self.line.show(fn_of(trainer), self.done, f"{rate:,.0f} {unit_of(trainer)}/s")

    on_validation_start = on_test_start = on_predict_start = begin
    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = cast(Any, step)
    on_validation_end = on_test_end = on_predict_end = cast(Any, WithLine.stop)


# --- Keeps the first training batch as the network saw it, for the report ---

SHOWN = 16  # images


class FirstBatch(pl.Callback):
    """After augmentation; the normalisation is undone. Nothing for data without images."""

    def __init__(self) -> None:
        self.samples: list[Sample] | None = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.samples is None:
            self.samples = self.taken(batch, getattr(trainer.datamodule, "about", {})) if trainer.is_global_zero else []  # type: ignore[attr-defined]

    def taken(self, batch: Any, about: dict[str, Any]) -> list[Sample]:
        named = isinstance(batch, dict)
        if not (named or isinstance(batch, list | tuple)) or not len(batch):
            return []
        given, targets = (batch.get("input"), batch.get("target")) if named else (batch[0], batch[1:][0:1] or None)
        targets = targets[0] if isinstance(targets, list | tuple) else targets
        if not isinstance(given, Tensor) or given.dim() != 4:
            return []
        given = given[:SHOWN].detach().float().cpu()  # SYNC: once a run
        image_BCHW = restored(given, about)
        index_B = batch["index"][:SHOWN].tolist() if named and "index" in batch else [None] * SHOWN
        facts = [{"target": name} for name in names(targets, about.get("classes") or ())] or [{}] * SHOWN
        rows = zip(index_B, facts, pictures(given if image_BCHW is None else image_BCHW) or (), strict=False)
        return [Sample(index, fact, image) for index, fact, image in rows]

    def report_panels(self) -> list[Content]:
        note = "The first training batch, after augmentation" + (", of the first process." if self.samples else "")
        return [Gallery("What the network saw", self.samples, note)] if self.samples else []


def names(targets: Any, classes: Any) -> list[str]:
    """The classes of the first targets, if each is one class."""
    single = isinstance(targets, Tensor) and targets.dim() == 1 and not targets.is_floating_point()
    return [str(classes[t]) if 0 <= t < len(classes) else str(t) for t in targets[:SHOWN].tolist()] if single else []
