"""What a run shows of itself: its first lines, its progress, and its first batch."""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor

from lockstep.callbacks.timing import size_of, unit_of, waited_s
from lockstep.data.datamodule import DataModule
from lockstep.errors import TrainingFailed
from lockstep.reporting.console import Line, clock, say
from lockstep.reporting.panels import restored
from lockstep.run.report import versions
from lockstep.strategies import DataParallel
from lockstep.strategies.batch_norm import SYNCHRONISED
from lockstep.tasks.panel import Content, Gallery, Sample
from lockstep.training.panels import pictures
from lockstep.training.steps import completes_step, has_row, steps_done, total_steps
from lockstep.training.workload import workload

# --- The first lines of a run ---

COMPILED_ON_A_CPU = (
    "compile=true may slow a CPU down: resnet50d at 336 px in bf16-mixed ran at 2.5 images/s, and at 5.0 without it, after a first "
    "step of 104 s (torch 2.13). Compare a few steps without it."
)


@dataclass(eq=False)
class RankAgreement(Callback):
    """Ends the run if a process has another value than rank 0. The keys are verbs, such as `computes in precision`."""

    values: Mapping[str, object]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for what, own in self.values.items():
            self.check(trainer, what, own)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.check(trainer, "continues after step", steps_done(trainer))

    @staticmethod
    def check(trainer: Trainer, what: str, own: object) -> None:
        first = trainer.strategy.broadcast(own)
        if own != first:
            raise TrainingFailed(
                f"rank {trainer.global_rank} {what} {own}, but rank 0 {first}: all nodes must see the same files. Check runs_dir and "
                "data.root. On different hardware set trainer.precision=32-true, or bf16-mixed."
            )


@dataclass(eq=False)
class RunSummary(Callback):
    """Prints model, data, strategy, batches, precision and steps before the first step, and what changed since the checkpoint."""

    data: LightningDataModule
    data_info: Mapping[str, Any]
    model: str
    data_name: str
    config: Mapping[str, Any]  # plain values, as in the checkpoint
    changes: list[str] = field(default_factory=list)
    across_processes: str | None = None

    def state_dict(self) -> dict[str, Any]:
        libraries = dict(each.split(" ", 1) for each in versions().split(", "))
        return {"versions": libraries, "data": self.data_info["data/sha256"]}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """What a resumed run may change, and a reader of its metrics must know."""
        saved = checkpoint["config"]
        for group in ("model", "task"):
            self.changes += differences(saved[group] or {}, self.config[group] or {}, f"{group}.")
        then, now = ({k: config["data"].get(k) for k in ("mean", "std")} for config in (saved, self.config))
        self.changes += differences(then, now, "data.")
        arguments = getattr(pl_module, "network_arguments", {})
        self.changes += differences(checkpoint.get("network", {}), arguments, "the network's argument ")
        before, here = checkpoint["callbacks"].get(self.state_key), self.state_dict()
        if before:
            self.changes += differences(before["versions"], here["versions"])
            self.changes += differences({"data": before["data"]}, {"data": here["data"]}, "the SHA-256 of the ")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        work = workload(pl_module, self.data)
        parameters = sum(p.numel() for p in pl_module.parameters())
        done = f", {steps_done(trainer)} of them done" if steps_done(trainer) else ""
        steps = f"{total_steps(trainer):g} steps".replace("inf steps", "no fixed number of steps")
        say(
            f"{self.config['run']}: {self.model} ({parameters:,} parameters) · {self.data_name} from {self.samples()} · "
            f"{self.config['strategy']['name']}, {self.replicas(trainer)} · {self.batches(trainer, work.engine_data)} · {trainer.precision} · {steps}{done}"
        )
        self.across_processes = work.across_processes(SYNCHRONISED)
        say(f"result: {self.across_processes}")
        if self.config["compile"] and trainer.strategy.root_device.type == "cpu":
            say(COMPILED_ON_A_CPU)
        for change in self.changes:
            say(f"changed since the checkpoint: {change}")
        for line in work.promises(trainer.world_size):
            say(line)

    def report_figures(self) -> dict[str, Any]:
        return {"across_processes": self.across_processes}

    def samples(self) -> str:
        source = self.data_info["data/source"]
        counts = [(part, self.data_info[f"data/{part}"]) for part in ("train", "val", "test")]
        return f"{source} ({', '.join(f'{n:,} {part}' for part, n in counts)})" if counts[0][1] else str(source)

    @staticmethod
    def replicas(trainer: Trainer) -> str:
        strategy, world = trainer.strategy, trainer.world_size
        device = strategy.root_device.type
        if not isinstance(strategy, DataParallel):
            return f"{world} process{'es' if world > 1 else ''} on {device}"
        if len(strategy.gpus) > 1:
            return f"1 process on {len(strategy.gpus)} GPUs"
        return f"ONE device ({device}): there are no two GPUs to split batches over"

    @staticmethod
    def batches(trainer: Trainer, data: DataModule | None) -> str:
        world, accumulate = trainer.world_size, trainer.accumulate_grad_batches
        accumulated = f" x {accumulate} accumulated" if accumulate > 1 else ""
        if data is None:
            return f"each process has its own batches{accumulated}"
        batch, copies = data.batch_size, data.repeats
        repeated = f", {copies} copies of each sample" if copies > 1 else ""
        return f"batch {batch} = {world} x {batch // (world * accumulate)}{accumulated}{repeated}"


def differences(then: Mapping[str, Any], now: Mapping[str, Any], what: str = "") -> Iterator[str]:
    for key in {**then, **now}:
        if then.get(key) != now.get(key):
            yield f"{what}{key} was {then.get(key)} and is {now.get(key)}"


# --- Progress of training, and of an evaluation or a prediction. See reporting/console.py for how it is shown ---


class Progress(Callback):
    """A line on rank 0: training in optimizer steps; a validation, test or prediction by itself in batches.

    It shows the metrics of the last log row, so no step waits for them.
    """

    def __init__(self, monitor: str | None = None) -> None:
        self.monitor = monitor  # shown beside the loss
        self.line: Line | None = None
        self.row, self.began_s, self.waited_s = "", 0.0, 0.0
        self.saved_s: float | None = None
        self.what, self.batches, self.samples = "", 0, 0  # of a pass

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.began_s, self.waited_s = time.monotonic(), waited_s(trainer)
        if trainer.is_global_zero:
            self.line = Line("step", total_steps(trainer), steps_done(trainer))

    def on_save_checkpoint(self, *_: Any) -> None:
        self.saved_s = time.monotonic()

    def latest_row(self, trainer: Trainer) -> str:
        metrics: dict[str, Any] = {**trainer.callback_metrics, **trainer.progress_bar_metrics}
        now_s, waited = time.monotonic(), waited_s(trainer)
        fraction = (waited - self.waited_s) / max(1e-9, now_s - self.began_s)
        self.began_s, self.waited_s = now_s, waited
        shown = [f"loss {float(metrics['train/loss']):.4f}"] if "train/loss" in metrics else []
        speed = f"train/{unit_of(trainer)}_per_s"
        shown += [f"{float(metrics[speed]):,.0f} {unit_of(trainer)}/s"] if speed in metrics else []
        shown += [] if math.isnan(fraction) else [f"{fraction:.0%} waiting for data"]
        names = dict.fromkeys(
            name for name in (self.monitor, *trainer.progress_bar_metrics) if name and name in metrics
        )
        return " · ".join(shown + [f"{n} {float(metrics[n]):.4f}" for n in names if n not in ("train/loss", speed)])

    def show(self, trainer: Trainer, more: str = "") -> None:
        if self.line is not None and self.line.due(steps_done(trainer)):
            saved = "" if self.saved_s is None else f"saved {clock(time.monotonic() - self.saved_s)} ago"
            self.line.show(f"epoch {trainer.current_epoch + 1}", steps_done(trainer), more, self.row, saved)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.line is not None and completes_step(trainer, batch_idx):
            if has_row(trainer, steps_done(trainer)):
                self.row = self.latest_row(trainer)
            self.show(trainer)

    def begin_pass(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.what = trainer.state.fn.value if trainer.state.fn else ""
        counts = {
            "validate": trainer.num_val_batches,
            "test": trainer.num_test_batches,
            "predict": trainer.num_predict_batches,
        }
        if trainer.is_global_zero and self.what in counts:  # not a validation within training
            self.began_s, self.line = time.monotonic(), Line("batch", sum(counts[self.what]))

    def pass_on(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: int
    ) -> None:
        if self.what == "fit":
            return self.show(trainer, f"validation batch {batch_idx + 1:,}")
        self.batches, self.samples = self.batches + 1, self.samples + size_of(batch) * trainer.world_size
        if self.line is not None and self.line.due(self.batches):
            speed = self.samples / max(1e-9, time.monotonic() - self.began_s)
            self.line.show(self.what, self.batches, f"{speed:,.0f} {unit_of(trainer)}/s")

    def end(self, trainer: Trainer, *_: Any) -> None:
        if self.line is not None:
            self.line.end()
            self.line = None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.what != "fit":
            self.end(trainer)

    on_validation_start = on_test_start = on_predict_start = begin_pass
    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = cast(Any, pass_on)
    on_train_end = on_test_end = on_predict_end = on_exception = cast(Any, end)


# --- The first training batch as the network saw it, for the report ---

SHOWN = 16  # images


class FirstBatch(Callback):
    """After augmentation; the normalisation is undone. Nothing for data without images."""

    samples: list[Sample] | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.samples is None:
            metadata = getattr(trainer.datamodule, "about", {})  # type: ignore[attr-defined]
            self.samples = samples_of(batch, metadata) if trainer.is_global_zero else []

    def report_panels(self) -> list[Content]:
        note = "The first training batch, after augmentation" + (", of the first process." if self.samples else "")
        return [Gallery("What the network saw", self.samples, note)] if self.samples else []


def samples_of(batch: Any, metadata: dict[str, Any]) -> list[Sample]:
    """The first images of a named batch or of a tuple `(images, targets)`; none if there are no images."""
    if not isinstance(batch, dict):
        batch = dict(zip(("input", "target"), batch, strict=False)) if isinstance(batch, list | tuple) else {}
    images, target, index = batch.get("input"), batch.get("target"), batch.get("index")
    if not isinstance(images, Tensor) or images.dim() != 4:
        return []
    images = images[:SHOWN].detach().float().cpu()  # SYNC: once a run
    image_BCHW, classes = restored(images, metadata), metadata.get("classes") or ()
    index_B = [None] * SHOWN if index is None else index[:SHOWN].tolist()
    single = isinstance(target, Tensor) and target.dim() == 1 and not target.is_floating_point()
    target_B = [str(classes[t]) if 0 <= t < len(classes) else str(t) for t in target[:SHOWN].tolist()] if single else []
    facts: list[dict[str, Any]] = [{"target": name} for name in target_B] or [{}] * SHOWN
    shown = pictures(images if image_BCHW is None else image_BCHW) or ()
    return [Sample(*row) for row in zip(index_B, facts, shown, strict=False)]
