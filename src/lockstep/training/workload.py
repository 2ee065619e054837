"""What a run trains: a task on Lockstep's batches, or the user's own LightningModule.

What differs between the two in training is a method here; pages and tables ask `task`.
"""

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

from lockstep.config.formatting import metric
from lockstep.config.settings import Settings
from lockstep.kit.panels import Content
from lockstep.run import metrics_of_test
from lockstep.training.arithmetic import StepArithmetic
from lockstep.training.batches import HOOKS, Loaders
from lockstep.training.metrics import TestPanels
from lockstep.training.task import Task

Headline = tuple[str, str, tuple[float, float] | None]  # name, value, and the 95% interval if there is a simple one
OF_RANK_0 = " (rank 0 only)"
STAGE = re.compile(r"(train|val|valid|validation)[/_]([^/]+)(/.+)?")
STAGES = re.compile(r"(?:^|[\W_])(?:train|val|valid|validation|test)(?=$|[\W_])")


def primary_metric(report: Mapping[str, Any]) -> tuple[str, str]:
    """Name and value of a run's primary metric.

    This is the test metric that corresponds to the monitored one, else the first test metric, else the monitored
    metric. Without any metric: the run's progress.
    """
    monitor, metrics = str(report.get("monitor")), metrics_of_test(report)
    names_without_stage = {name: STAGES.sub("", name).strip("/_") for name in (*metrics, monitor)}
    metrics = [name for name in metrics if not name.endswith(OF_RANK_0)]
    names = [name for name in metrics if names_without_stage[name] == names_without_stage[monitor]]
    names += [*metrics, *(name for name in report if name == monitor)]
    names += [name for name in report if name.startswith("val") and STAGE.fullmatch(name) and name != "val/count"]
    if names:
        return names[0], metric(names[0], report[names[0]])
    if report["status"] == "done":
        return "Result", "no evaluation logged a metric"
    step = report.get("train/steps")
    progress = f"the log ends at step {step:,}" if step else "the log has no rows"
    return str(report["status"]).capitalize(), progress


class Workload:
    """The user's own LightningModule and its data."""

    # Checkpoint keys that hold the module's position, in addition to its weights.
    position: tuple[str, ...] = ("plateau",)
    task: Task | None = None
    model_kwargs: Mapping[str, Any] = {}

    def __init__(
        self, module: pl.LightningModule, data: pl.LightningDataModule, arithmetic: StepArithmetic | None = None
    ) -> None:
        self.module, self.data, self.arithmetic = module, data, arithmetic or StepArithmetic()
        self.title = type(module).__name__  # the class that decides what is logged
        self.loaders = Loaders(data, module)
        self.of_rank_0: set[str] = set()  # logged names whose values are from rank 0 only

    @property
    def needs_whole(self) -> str:
        """Why a micro-batch that does not fit in memory cannot be divided; empty if it can."""
        if not self.module.automatic_optimization:
            return f"{self.title} uses manual optimization."
        strategy: Any = self.module.trainer.strategy
        return f"{self.title} gathers the global batch." if strategy.gathers else ""

    def network_title(self, settings: Settings) -> str:
        """The display name of the network, or of the module if it creates its own network."""
        return settings.model_title if "task" in settings.built_groups else self.title

    def marked(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """`metrics` with names that are marked if their values are from rank 0 only."""
        return {f"{name}{OF_RANK_0}" if name in self.of_rank_0 else name: value for name, value in metrics.items()}

    def evaluates(self, step: str, loader: str) -> bool:
        """Whether both a step and its dataloader exist."""
        return is_overridden(f"{step}_step", self.module) and self.loaders.provides(f"{loader}_dataloader")

    def collect_panels(self, panels: list[Content], *, compiled: bool) -> None:
        """Adds the panels of the next test to `panels`, if there are any."""

    def primary_metric(self, report: Mapping[str, Any]) -> Headline:
        """The report's primary metric."""
        return *primary_metric(report), None

    def before_step(self, batch: Any) -> None:
        """Called before each training micro-batch."""

    def problems(self, settings: Settings) -> Iterator[str]:
        """Messages about what the module and the data define that would be ignored or is not supported."""
        cfg, is_manual = settings.cfg, not self.module.automatic_optimization
        if not any(map(self.loaders.provides, HOOKS)):
            yield f"data=none has no batches, and {self.title} has no train_dataloader. Add it to the module, or set the data: data=mnist, or data=own data._target_=<your LightningDataModule>."
        if self.arithmetic.same_bits and is_manual:
            yield f"exact.logical_ranks computes each step several times, but {self.title} uses manual optimization, whose steps change the weights. Remove it."
        for key in ("accumulate_grad_batches", "gradient_clip_val") if is_manual else ():
            if (value := cfg.get(f"trainer.{key}")) not in (None, 1 if key == "accumulate_grad_batches" else None):
                yield f"trainer.{key}={value} has no effect: {self.title} uses manual optimization, and does this itself. Remove it."
        if "dataloader_iter" in inspect.signature(self.module.training_step).parameters:
            yield f"{self.title}.training_step takes dataloader_iter, so Lockstep cannot track its batches. Change it to take batch and batch_idx."
        if (monitor := cfg.checkpoint.monitor) and not self.evaluates("validation", "val"):
            yield f"checkpoint.monitor={monitor} has no effect: {self.title} or the data has no validation. Set task.monitor=null."


class TaskWorkload(Workload):
    position = ("window", "network")
    module: Task
    task: Task

    def __init__(self, module: Task, data: pl.LightningDataModule) -> None:
        super().__init__(module, data, module.parts.arithmetic)
        self.task, self.model_kwargs = module, module.parts.model_kwargs

    def network_title(self, settings: Settings) -> str:
        return settings.model_title if "model" in settings.built_groups else type(self.module.net).__name__

    def before_step(self, batch: Any) -> None:
        cast(Any, self.module.trainer.strategy).before_step(batch)

    def collect_panels(self, panels: list[Content], *, compiled: bool) -> None:
        self.module.parts.test_panels = TestPanels(self.task, panels, compiled=compiled)

    def primary_metric(self, report: Mapping[str, Any]) -> Headline:
        if "test/count" not in report:
            return super().primary_metric(report)
        return *self.task.primary_metric(report), self.task.interval(report)
