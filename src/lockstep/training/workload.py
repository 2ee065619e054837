"""What a run trains: a task on Lockstep's batches, or the user's own LightningModule. Everything that depends on which is a method here."""

import gc
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.config.settings import Settings
from lockstep.config.words import metric
from lockstep.data.datamodule import DataModule
from lockstep.errors import UserError
from lockstep.panel import Content
from lockstep.run import tested
from lockstep.training.arithmetic import StepArithmetic
from lockstep.training.batches import HOOKS, DataSetLoaders, Loaders
from lockstep.training.invariance import DIFFERS, IN_HALF, NORMS, ROUNDING, SAME_BITS, UNKNOWN
from lockstep.training.losses import validated_columns
from lockstep.training.metrics import TestPanels
from lockstep.training.task import Task

Columns = dict[str, Any]
Headline = tuple[str, str, tuple[float, float] | None]  # name, value, 95% interval if there is a simple one
Curve = tuple[str, str, tuple[str, ...]]  # title, unit, columns of metrics.csv
CURVES, LINES = 24, 8  # charts of what is logged besides the task's own; lines of one chart
OF_RANK_0 = " (rank 0 only)"
STAGE = re.compile(r"(train|val|valid|validation)[/_]([^/]+)(/.+)?")
STAGES = re.compile(r"(?:^|[\W_])(?:train|val|valid|validation|test)(?=$|[\W_])")


def headline(report: Mapping[str, Any]) -> tuple[str, str]:
    """Name and value of the test metric that corresponds to the monitored one, or of the first, or else of the monitored one; without
    any, how far the run has come."""
    monitor, metrics = str(report.get("monitor")), tested(report)
    plain = {name: STAGES.sub("", name).strip("/_") for name in (*metrics, monitor)}  # without the stage
    metrics = [name for name in metrics if not name.endswith(OF_RANK_0)]
    names = [name for name in metrics if plain[name] == plain[monitor]]
    names += [*metrics, *(name for name in report if name == monitor)]
    names += [name for name in report if name.startswith("val") and STAGE.fullmatch(name) and name != "val/count"]
    if names:
        return names[0], metric(names[0], report[names[0]])
    if report["status"] == "done":
        return "Result", "no evaluation logged a metric"
    step = report.get("train/steps")
    place = f"the log ends at step {step:,}" if step else "before the first row of the log"
    return str(report["status"]).capitalize(), place


class Workload:
    """The user's own LightningModule and its data."""

    # what a checkpoint holds of the module, besides its weights, to continue from
    position: tuple[str, ...] = ("plateau",)
    sanity_val_steps = 2  # of Lightning, before training
    task: Task | None = None
    flops_per_sample: int | None = None  # of forward and backward, counted by dry_run.py
    network_arguments: Mapping[str, Any] = {}

    def __init__(
        self, module: pl.LightningModule, data: pl.LightningDataModule, arithmetic: StepArithmetic | None = None
    ) -> None:
        self.module, self.data, self.arithmetic = module, data, arithmetic or StepArithmetic()
        self.title = type(module).__name__  # of the class that decides what is logged
        self.loaders = DataSetLoaders(data, module) if isinstance(data, DataModule) else Loaders(data, module)
        # why a micro-batch that does not fit in memory cannot be divided; empty if it can
        self.needs_whole = "" if module.automatic_optimization else f"{self.title} has manual optimization."
        self.of_rank_0: set[str] = set()  # names of what was logged and is not of all processes

    def network_title(self, settings: Settings) -> str:
        """The display name of the network, or of a module that makes its own."""
        return settings.model_title if "task" in settings.asked else self.title

    def marked(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The names of what is not of all processes say so."""
        return {f"{name}{OF_RANK_0}" if name in self.of_rank_0 else name: value for name, value in metrics.items()}

    def across_processes(self, synchronised: tuple[type[nn.Module], ...], precision: str) -> str:
        """How the result depends on the number of processes. `synchronised`: batch norms with statistics of all processes."""
        if not self.loaders.divided:
            return UNKNOWN.format("Lockstep does not divide the batches")
        if self.arithmetic.same_bits:
            return f"{SAME_BITS}, where a step of {self.title} depends on its batch, parameters, buffers and torch's random numbers alone; what it counts itself counts each logical rank"
        return UNKNOWN.format(f"the steps of {self.title} are its own, and were not tried")

    def promises(self, world: int, precision: str) -> list[str]:
        """Lines on which of Lockstep's promises hold, where not all do."""
        own = (
            f"the loss is averaged as the module does it; test metrics are the module's own; it computes in {precision}"
        )
        resume = f"{'exact resume' if world < 3 else 'resume to float rounding'} of what state_dict holds"  # see DDP.rebuild_buckets
        kept = f"the same batches, {resume} and " if self.loaders.divided else ""
        promised = f"task: {self.title}'s own steps: {kept}one-format checkpoints hold; {own}"
        return [promised, *(f"data: {note}" for note in dict.fromkeys(self.loaders.notes))]

    def evaluates(self, step: str, loader: str) -> bool:
        """Whether there is both a step and a dataloader for it."""
        return is_overridden(f"{step}_step", self.module) and self.loaders.provides(f"{loader}_dataloader")

    def collect_panels(self, panels: list[Content], *, compiled: bool) -> None:
        """`panels` gets those of the next test, if it has any."""

    def columns(self, top_k: int) -> tuple[Callable[[Any], Columns], Sequence[str]]:
        """From what `predict_step` returns to the columns of a table; and the names of the values of wide columns."""
        if not any(is_overridden(name, self.module) for name in ("predict_step", "forward")):
            raise UserError(
                f"{self.title} has no predict_step and no forward. Add one: it gets a batch and returns a tensor with a row per sample, or a dict of columns."
            )
        return columns_of_module, ()

    def headline(self, report: Mapping[str, Any]) -> Headline:
        """Of the report's main metric."""
        return *headline(report), None

    def curves(self, logged: Iterable[str]) -> list[Curve]:
        """The report's curves, from the names of what was logged: those of training and validation by metric, then the others."""
        groups: dict[tuple[bool, str], list[str]] = {}
        for name in logged:
            if not name.endswith("/count"):
                found = STAGE.fullmatch(name)
                groups.setdefault((not found, found[2] if found else name), []).append(name)
        shown = [(name, groups[key, name][:LINES]) for key, name in sorted(groups, key=itemgetter(0))[:CURVES]]
        return [
            (f"{name}{OF_RANK_0}" if self.of_rank_0 & {*names} else name, "", tuple(names)) for name, names in shown
        ]

    def highest(self, name: str) -> float:
        """The largest value that a logged metric can have."""
        return math.inf

    def before_step(self, batch: Any) -> None:
        """Before each micro-batch of training."""

    def dry_run(self, trial: Callable[["TaskWorkload"], list[str]]) -> list[str] | None:
        """What an evaluation will log, found out by `trial`; None where Lightning's sanity check tries it."""
        return None

    def steps_alone(self, trainer: pl.Trainer, size: int) -> Iterator[Optimizer] | None:
        """The optimizer after each of two steps with micro-batches of that size in this process alone, which change the weights. None: they
        are the module's own."""
        return None

    def problems(self, settings: Settings) -> Iterator[str]:
        """What the module and the data define but would be ignored, or cannot do."""
        cfg, manual = settings.cfg, not self.module.automatic_optimization
        if not any(map(self.loaders.provides, HOOKS)):
            yield f"data=none has no batches, and {self.title} has no train_dataloader. Add it to the module, or name the data: data=mnist, or data=own data._target_=<your LightningDataModule>."
        if self.arithmetic.same_bits and manual:
            yield f"exact.logical_ranks computes each step several times, but {self.title} has manual optimization, whose steps change the weights. Remove it."
        for key in ("accumulate_grad_batches", "gradient_clip_val") if manual else ():
            if (value := cfg.get(f"trainer.{key}")) not in (None, 1 if key == "accumulate_grad_batches" else None):
                yield f"trainer.{key}={value} has no effect: {self.title} has manual optimization, and does this itself. Remove it."
        if "dataloader_iter" in inspect.signature(self.module.training_step).parameters:
            yield f"{self.title}.training_step takes dataloader_iter, so nobody else knows its batches. Let it take batch and batch_idx."
        if (monitor := cfg.checkpoint.monitor) and not self.evaluates("validation", "val"):
            yield f"checkpoint.monitor={monitor} has no effect: {self.title} or the data has no validation. Set task.monitor=null."


class TaskWorkload(Workload):
    position = ("window", "network")
    sanity_val_steps = 0  # dry_run.py tries an evaluation
    module: Task
    data: DataModule
    task: Task

    def __init__(self, module: Task, data: DataModule) -> None:
        super().__init__(module, data, module.parts.arithmetic)
        data.fills = True
        self.needs_whole = f"{self.title}.between_samples needs it whole." if module.between_samples else ""
        self.task, self.network_arguments = module, module.parts.network_arguments
        self.trial = UNKNOWN.format("it was not tried")  # how processes change the result, found out by dry_run.py

    def network_title(self, settings: Settings) -> str:
        return settings.model_title if "model" in settings.asked else type(self.module.net).__name__

    def across_processes(self, synchronised: tuple[type[nn.Module], ...], precision: str) -> str:
        norms = (m for m in self.module.net.modules() if isinstance(m, NORMS) and m.training)
        if not self.arithmetic.same_bits and not all(isinstance(m, synchronised) for m in norms):
            return DIFFERS.format(
                "batch normalisation has statistics of each process's own samples. Set trainer.sync_batchnorm=true, or exact.logical_ranks=8"
            )
        if "16" not in precision:
            return self.trial
        error = torch.finfo(torch.bfloat16 if "bf16" in precision else torch.float16).eps / 2
        return self.trial.replace(ROUNDING, ROUNDING + IN_HALF.format(error=error, precision=precision))

    def promises(self, world: int, precision: str) -> list[str]:
        rounded = (
            f"task: predictions have about 3 significant digits in {precision}; with trainer.precision=bf16-mixed, 7"
        )
        return [rounded] if self.task.float32_head and precision in ("bf16-true", "16-true") else []

    def before_step(self, batch: Any) -> None:
        cast(Any, self.module.trainer.strategy).before_step(batch)

    def dry_run(self, trial: Callable[["TaskWorkload"], list[str]]) -> list[str]:
        return trial(self)

    def steps_alone(self, trainer: pl.Trainer, size: int) -> Iterator[Optimizer]:
        module, device = self.module, trainer.strategy.root_device
        module.parts.arithmetic = StepArithmetic()  # logical ranks hold gradients
        module.zero_grad(set_to_none=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        module.to(device).train()
        optimizer = module.new_optimizer()
        for _ in range(2):  # gradients and the optimizer's state exist only from the second step on
            batch = trainer.precision_plugin.convert_input(self.data.example(size, device))
            with trainer.precision_plugin.train_step_context():
                loss = module.loss(module(batch), batch).mean()
            loss.backward()
            optimizer.step()
            yield optimizer

    def collect_panels(self, panels: list[Content], *, compiled: bool) -> None:
        self.module.parts.test_panels = TestPanels(self.task, panels, compiled=compiled)

    def columns(self, top_k: int) -> tuple[Callable[[Any], Columns], Sequence[str]]:
        if top_k > 1 and type(self.task).top is Task.top:
            raise UserError(f"top_k={top_k} has no effect: {self.title} does not rank classes. Remove it.")
        return partial(columns_of_task, self.task, top_k), self.task.value_names

    def headline(self, report: Mapping[str, Any]) -> Headline:
        if "test/count" not in report:
            return super().headline(report)
        return *self.task.headline(report), self.task.interval(report)

    def curves(self, logged: Iterable[str]) -> list[Curve]:
        sets = self.module.parts.of_stage("val")
        own = [
            (
                title,
                unit,
                tuple(
                    n.replace("val/", f"{part}/", 1) for n in names for part in (sets if n.startswith("val/") else [""])
                ),
            )
            for title, unit, names in self.task.curves()
        ]
        drawn = {name for _, _, names in own for name in names}
        return [*own, *super().curves(name for name in logged if name not in drawn)]

    def highest(self, name: str) -> float:
        """As torchmetrics declares it: 1 for fractions."""
        metrics, metric = self.module.parts.metrics, name.partition("/")[2].partition("/")[0]
        return float(getattr(metrics.get(metric), "plot_upper_bound", None) or math.inf)


def columns_of_task(task: Task, top_k: int, output: tuple[Any, Any]) -> Columns:
    """Targets and loss, if the batch has targets, and the task's predictions."""
    network_output, batch = output
    known = "target" in batch
    columns = (task.targets(batch) if known else {}) | validated_columns(task.predictions(network_output))
    if top_k > 1:
        columns |= task.top(network_output, top_k)
    if known and not task.between_samples:  # where a sample has no loss of its own
        columns.setdefault("loss", task.loss(network_output, batch))
    return columns


def columns_of_module(output: Any) -> Columns:
    if isinstance(output, Mapping):
        return validated_columns(output, targets=True)
    if isinstance(output, Tensor | list | tuple):
        return {"output": output}
    raise UserError(
        f"predict_step returned {type(output).__name__}. Return a tensor or a list with a value per sample, or a dict of them by column."
    )
