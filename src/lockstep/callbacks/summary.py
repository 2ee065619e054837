"""What a run shows and measures: its summary, progress, first batch, time per activity, and speed.

Nothing is measured within a batch.
"""

import math
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from torch import nn

from lockstep.checkpoints.saving import ModelCheckpoint
from lockstep.compat.torch import Operations, is_compiled
from lockstep.config import checked
from lockstep.config.formatting import metric, pluralize
from lockstep.config.settings import Settings
from lockstep.errors import UserError
from lockstep.machine.world import peak_bytes
from lockstep.reporting.console import ProgressLine, clock, print_line
from lockstep.run import versions
from lockstep.strategies import DataParallel
from lockstep.strategies.batch_norm import NORMS, SYNCHRONISED
from lockstep.training.arithmetic import completes_step, logs_row, steps_done, total_steps
from lockstep.training.batches import Loaders
from lockstep.training.dropout import LAYERS
from lockstep.training.module import arithmetic_of

# --- The line about the result: what is known without trying, or a check ---


def dependence(loaders: Loaders, later: Collection[nn.Module], *, compiled: bool) -> str:
    """Why the result depends on the number of processes; empty if that has to be tried. `later`: frozen modules that a later epoch trains."""
    if not loaders.divided:
        return "Lockstep does not divide the batches"
    if arithmetic_of(loaders.module).same_bits:
        return ""
    modules = {name: each for name, each in loaders.module.named_modules() if each.training or each in later}
    otherwise = "" if loaders.needs_whole else ", or set exact.logical_ranks=8"
    if any(isinstance(each, NORMS) and not isinstance(each, SYNCHRONISED) for each in modules.values()):
        return f"batch normalisation uses the statistics of each process's own samples. Set trainer.sync_batchnorm=true{otherwise}"
    for name, each in modules.items():
        if isinstance(each, nn.MultiheadAttention | nn.RNNBase) and each.dropout:
            return f"{type(each).__name__} {name} draws its own dropout in each process. Set its dropout to 0 and use nn.Dropout layers{otherwise}"
    drawn = any(isinstance(each, tuple(LAYERS)) and vars(each)["p"] for each in modules.values())
    return "a compiled network draws its own dropout in each process. Remove compile=true" if compiled and drawn else ""


def rounding(precision: str) -> str:
    """BasicNet in one process and in two: 1e-2 apart after 10 steps in bf16-mixed, 7e-2 after 56; in 32-true 6e-7 and 8e-5."""
    error = torch.finfo(torch.bfloat16 if "bf16" in precision else torch.float16).eps / 2
    return f"{precision} rounds each number by up to {error:.0e} of it, which training amplifies"


def result_line(known: str, quote: tuple[str, str], precision: str) -> str:
    text, again = ("depends on the number of processes, because " + known, "") if known else quote
    parts = [text, rounding(precision)] if "16" in precision else [text]
    return f"{'; '.join(reversed(parts))}: {again}" if again else "; ".join(parts)  # the command comes last


# --- The first lines of a run ---


@dataclass(eq=False)
class RunSummary(Callback):
    """Before training, prints model, data, strategy, batches, precision, steps, and changes since the checkpoint."""

    loaders: Loaders
    data_info: Mapping[str, Any]
    model: str
    settings: Settings
    changes: list[str] = field(default_factory=list)
    across_processes: str | None = None
    began_s: float = 0.0  # when training began in this process
    validated_s: float = 0.0

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run may change and a reader of its metrics must see, as text."""
        config = self.settings.cfg
        nodes = {"model": config.model.node, "task": config.task.node}
        nodes["data"] = {key: config.data.get(key) for key in ("mean", "std")}
        values = {f"{group}.{key}": value for group, node in nodes.items() for key, value in node.items()}
        values |= {f"network argument {key}": value for key, value in self.settings.made_for.get("network", {}).items()}
        values |= dict(library.split(" ", 1) for library in versions().split(", "))
        values["the SHA-256 of the data"] = self.data_info["data/sha256"]
        return {key: str(value) for key, value in values.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        now = self.state_dict()
        different = [key for key in {**state, **now} if state.get(key) != now.get(key)]
        self.changes = [f"{key} was {state.get(key)} and is now {now.get(key)}" for key in different]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        config, overrides = self.settings.cfg, self.settings.overrides
        typed = [each for each in overrides or () if each.startswith(("optim.", "optim="))]
        if typed and config.optim and not any(hasattr(each, "of_config") for each in trainer.optimizers):
            raise UserError(
                f"{typed[0]} has no effect: configure_optimizers of {type(pl_module).__name__} does not call the `optimizer` of its constructor."
            )
        loaders, strategy, world = self.loaders, trainer.strategy, trainer.world_size
        processes = f"{world} process{'es' if world > 1 else ''} on {strategy.root_device.type}"
        replicas = strategy.replicas() if isinstance(strategy, DataParallel) else processes
        parameters = sum(p.numel() for p in pl_module.parameters())
        trained = sum(p.numel() for p in pl_module.parameters() if p.requires_grad)
        trained_part = f", {trained:,} trained" if trained < parameters else ""
        done = f", {steps_done(trainer)} already done" if steps_done(trainer) else ""
        steps, batches = total_steps(trainer), " and ".join(dict.fromkeys(loader.title for loader in loaders.training))
        length = "no fixed number of steps" if math.isinf(steps) else pluralize(steps, "step")
        print_line(
            f"{config.run}: {self.model} ({parameters:,} parameters{trained_part}) · {config.data.title}{self.samples()} · "
            f"{config.strategy.name}, {replicas} · {batches} · {trainer.precision} · {length}{done}"
        )
        later = {module for each in trainer.callbacks for module in getattr(each, "trained_later", ())}  # type: ignore[attr-defined]
        if trainer.is_global_zero:
            known = dependence(loaders, later, compiled=config.compile)
            quote = checked.quoted(config, self.data_info["data/sha256"], overrides)
            self.across_processes = result_line(known, quote, str(trainer.precision))
            print_line(f"result: {self.across_processes}")
        for change in self.changes:
            print_line(f"changed since the checkpoint: {change}")
        for note in dict.fromkeys(loaders.notes):
            print_line(f"data: {note}")
        self.began_s = time.perf_counter()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validated_s -= time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validated_s = 0.0 if trainer.sanity_checking else self.validated_s + time.perf_counter()

    def report_metrics(self) -> dict[str, Any]:
        """Results, and where the time of training went: waiting for data, validation, saving, and steps (the rest)."""
        strategy: Any = self.loaders.module.trainer.strategy
        saved = strategy.checkpoint_io.stalled_s
        parts = {"wait": strategy.waited_s, "validation": self.validated_s, "saving": saved}
        times = {"steps": max(0.0, time.perf_counter() - self.began_s - sum(parts.values())), **parts}
        found: dict[str, Any] = {f"time/{name}_s": seconds for name, seconds in times.items()}
        if len(self.loaders.training) == 1:  # perhaps a user's
            found["batch_size"] = self.loaders.training[0].size
        return found | {"across_processes": self.across_processes}

    def samples(self) -> str:
        """The source of the samples and the size of each part, as far as they are known."""
        info = self.data_info
        source = f" from {info['data/source']}" if info["data/source"] else ""
        counts = [(part, info[f"data/{part}"]) for part in ("train", "val", "test")]
        return f"{source} ({', '.join(f'{n:,} {part}' for part, n in counts)})" if counts[0][1] else source


# --- Progress of training, and of an evaluation or a prediction; reporting/console.py shows it ---


LOSSES = ("train/loss", "train_loss", "val/loss", "val_loss")  # of a Task, of a LightningModule
# Lightning's attributes for the number of batches of a standalone evaluation or prediction
BATCHES = {"validate": "num_val_batches", "test": "num_test_batches", "predict": "num_predict_batches"}


class Progress(Callback):
    """A line on rank 0: training in optimizer steps; a standalone validation, test or prediction in batches.

    It shows the metrics of the last log row, so no step waits for them.
    """

    def __init__(self, monitor: str | None = None) -> None:
        self.monitor = monitor  # shown next to the loss
        self.line: ProgressLine | None = None
        self.row = ""
        self.saved_s: float | None = None
        self.what, self.batches, self.samples, self.began_s = "", 0, 0, 0.0  # of an evaluation or prediction

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self.line = ProgressLine("step", total_steps(trainer), steps_done(trainer))

    def on_save_checkpoint(self, *_: Any) -> None:
        self.saved_s = time.monotonic()

    def latest_row(self, trainer: Trainer) -> str:
        metrics: dict[str, Any] = {**trainer.callback_metrics, **trainer.progress_bar_metrics}
        parts = [f"loss {float(metrics['train/loss']):.4f}"] if "train/loss" in metrics else []
        parts += [speed for each in trainer.callbacks if isinstance(each, Throughput) for speed in each.latest()]  # type: ignore[attr-defined]
        shown = (self.monitor, *trainer.progress_bar_metrics)
        names = dict.fromkeys(name for name in shown if name in metrics and name != "train/loss")
        return " · ".join(parts + [f"{name} {metric(name, float(metrics[name]))}" for name in names])

    def show(self, trainer: Trainer, detail: str = "") -> None:
        if self.line is not None and self.line.due(steps_done(trainer)):
            saved = "" if self.saved_s is None else f"saved {clock(time.monotonic() - self.saved_s)} ago"
            self.line.show(f"epoch {trainer.current_epoch + 1}", steps_done(trainer), detail, self.row, saved)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self.line is not None and completes_step(trainer):
            if logs_row(trainer):
                self.row = self.latest_row(trainer)
            self.show(trainer)

    def begin_pass(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.what = trainer.state.fn.value if trainer.state.fn else ""
        if trainer.is_global_zero and self.what in BATCHES:  # not a validation within training
            self.began_s, self.line = time.monotonic(), ProgressLine("batch", sum(getattr(trainer, BATCHES[self.what])))

    def pass_on(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, loader: int = 0
    ) -> None:
        if self.what == "fit":
            return self.show(trainer, f"validation batch {batch_idx + 1:,}")
        count = None if trainer.predicting else trainer.strategy.samples(loader)  # type: ignore[attr-defined]
        self.batches += 1
        self.samples += (count or batch_size_of(batch)) * trainer.world_size
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
        elif self.line is not None and not trainer.sanity_checking:
            self.line.print_above(self.validation_row(trainer))

    def validation_row(self, trainer: Trainer) -> str:
        """The losses and the monitored metric, which is marked if its checkpoint will be the best so far."""
        metrics, savers = trainer.callback_metrics, trainer.checkpoint_callbacks
        texts = {name: metric(name, float(metrics[name])) for name in (*LOSSES, self.monitor) if name in metrics}
        saver = next((each for each in savers if isinstance(each, ModelCheckpoint)), None)
        if saver is not None and saver.save_top_k and self.monitor in texts:
            new, scores, ranked = saver.ranking(trainer)
            texts[self.monitor] += " best" * (ranked[0] == new and math.isfinite(scores[new][0]))
        assert self.line
        position = [f"epoch {trainer.current_epoch + 1}", f"step {steps_done(trainer):,}"]
        shown = (f"{'loss' if name in LOSSES[:2] else name} {text}" for name, text in texts.items())  # fits 80 columns
        return " · ".join([*position, *shown, clock(time.monotonic() - self.line.began_s)])

    on_validation_start = on_test_start = on_predict_start = begin_pass
    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = cast(Any, pass_on)
    on_train_end = on_test_end = on_predict_end = on_exception = cast(Any, end)


# --- Training speed over all processes, fraction of time waiting for data (both without validation), and memory ---


def unit_of(trainer: Trainer) -> str:
    return str(getattr(trainer.datamodule, "unit", "samples"))  # type: ignore[attr-defined]


def synchronise_device(trainer: Trainer) -> None:
    """Waits for the GPU to finish, because the CPU measures the time."""
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize()


def batch_size_of(batch: Any) -> int:
    """Number of samples: the first dimension, else 0."""
    try:
        return int(extract_batch_size(batch))
    except MisconfigurationException:
        return 0


def samples_in_all(trainer: Trainer, batch: Any) -> float:
    """The number of samples of all processes in a micro-batch.

    Users' loaders report it, unless they form batches themselves.
    """
    strategy: Any = trainer.strategy
    counts = [record.samples for record in strategy.records(0) if record.samples is not None]
    is_whole = any(loader.batch_scope == "all" for loader in strategy.loaders_of(strategy.micro_batch))
    return sum(counts) if counts else batch_size_of(batch) * (1 if is_whole else trainer.world_size)


class Throughput(Callback):
    """Measures windows of `log_every_n_steps` steps.

    The first window includes warm-up and compiling; it counts only if it is the only one. The operations of the first
    micro-batch are counted.
    """

    def __init__(self) -> None:
        self.counted, self.flops = ExitStack(), Operations()
        self.flops_per_sample: float | None = None
        self.unit = "samples"
        self.windows: list[tuple[float, float, float]] = []  # samples, seconds, seconds spent waiting for data
        self.waited_s = 0.0
        self.first_step_s: float | None = None  # includes compiling
        self.samples = 0.0
        self.began_s: float | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self.began_s is None:
            self.began_s, self.unit = time.perf_counter(), unit_of(trainer)
            self.waited_s = trainer.strategy.waited_s  # type: ignore[attr-defined]
        if self.first_step_s is None and not is_compiled(pl_module):  # torch does not compile what a mode sees
            self.counted.enter_context(self.flops)

    def on_exception(self, *_: Any) -> None:
        self.counted.close()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.samples += (samples := samples_in_all(trainer, batch))
        self.counted.close()
        if self.first_step_s is None and self.began_s is not None:
            self.flops_per_sample = self.flops.total * trainer.world_size / samples if samples else None
            synchronise_device(trainer)  # SYNC: once a run
            self.first_step_s = time.perf_counter() - self.began_s
        if logs_row(trainer):
            self.close(trainer)
            self.began_s = time.perf_counter()  # includes the wait for the next batch
            for each in self.windows[-1:]:
                pl_module.log(f"train/{self.unit}_per_s", torch.tensor(each[0] / each[1]))
                if (peak := peak_bytes(trainer.strategy.root_device)) is not None:
                    pl_module.log("train/peak_memory_gib", peak / 2**30)

    def close(self, trainer: Trainer) -> None:
        if self.began_s is not None and self.samples:
            synchronise_device(trainer)  # SYNC: once every log_every_n_steps
            waited = trainer.strategy.waited_s  # type: ignore[attr-defined]
            self.windows.append((self.samples, time.perf_counter() - self.began_s, waited - self.waited_s))
            self.waited_s = waited
        self.samples, self.began_s = 0, None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.close(trainer)

    on_train_epoch_end = on_validation_start

    def latest(self) -> list[str]:
        """The last window, for a line of progress."""
        return [f"{n / s:,.0f} {self.unit}/s · {w / s:.0%} waiting for data" for n, s, w in self.windows[-1:]]

    def report_metrics(self) -> dict[str, float | None]:
        """Metrics of the whole run."""
        windows = self.windows[1:] or self.windows or [(0, 0, 0)]
        samples, seconds, waited = (sum(column) for column in zip(*windows, strict=True))
        rate, flops = samples / seconds if seconds else None, self.flops_per_sample
        return {
            f"train/{self.unit}_per_s": rate,
            "train/flops_per_s": flops * rate if flops and rate else None,
            "train/data_wait_share": waited / seconds if seconds else None,
            "train/first_step_s": self.first_step_s,
        }
