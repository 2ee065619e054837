"""Tries a training step and an evaluation on copies before the run's directory is made, so parts that do not fit together leave no trace.

Two samples on the run's device. A network too large to be copied runs on the meta device, which has shapes but no numbers. Also counts
the step's operations, and finds out whether the result depends on the number of processes (invariance.py).
"""

import copy
import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from torchmetrics import Metric

from lockstep.compat.torch import copy_hooks
from lockstep.data.dataset import Batch, Indices
from lockstep.errors import UserError
from lockstep.training import invariance
from lockstep.training.losses import first_rows, float32, one_per_sample, validated_columns, weight_of
from lockstep.training.metrics import named
from lockstep.training.oom import ran_out
from lockstep.training.schedules import scheduler
from lockstep.training.task import Task
from lockstep.training.workload import TaskWorkload

SAMPLES = 2
ALONE = 16  # samples whose shapes are compared
FEW = 8  # parameters whose update is tried
LARGEST = 200_000_000  # parameters of a network that is copied to the run's device
# Samples of a metric that computes nothing of a few. KernelInceptionDistance needs the most: 1,000 real and 1,000 generated ones.
MOST = 2_000
META = torch.device("meta")
log = logging.getLogger("lockstep")
Trial = Callable[[nn.Module, Task, Batch], None]


@dataclass(kw_only=True)
class DryRun:
    """A callback that changes training batches has `dry_run(batch, steps)`, which returns the changed batch."""

    work: TaskWorkload
    device: torch.device
    samples: int  # of a micro-batch
    world: int
    steps: float  # of the run
    titles: Mapping[str, str]  # of model, data and task
    image_size: int | None
    evaluates: bool
    compiled: bool
    shipped: bool  # all classes are Lockstep's or a library's, so no error can be a bug of the user's
    is_user_error: Callable[[BaseException], bool]
    draws: bool | None = None  # random numbers in a step, if known
    logged: list[str] | None = None  # what an evaluation logs besides loss and count, if known

    def __call__(self, callbacks: Iterable[object] = ()) -> None:
        """Sets what the workload reports of a step: its operations, and whether processes change the result.

        Raises:
            UserError: network, data, task, optimizer, schedule or metrics do not fit together.
            Exception: of the user's own classes in an evaluation. Those in a training step are left to training, whose first shows them.
        """
        with warnings.catch_warnings(), invariance.same_random_numbers(self.device):
            warnings.simplefilter("ignore")  # training shows them
            self.validate_gathered()
            self.attempt(self.step, training=True)
            for callback in callbacks:
                if hasattr(callback, "dry_run"):
                    self.try_callback(callback)
                    self.work.flops_per_sample = None  # not those of every step
            if self.evaluates:
                self.attempt(self.evaluation, training=False)
            self.work.trial = self.across_processes()

    def attempt(self, trial: Trial, *, training: bool) -> None:
        try:
            trial(*self.copies(training=training, samples=min(SAMPLES, self.samples)))
        except Exception as e:
            cause = e.__cause__ or e
            if is_refusal(e):
                raise
            log.info("the dry run ended early: %s", e)
            is_users = self.is_user_error(cause)
            needs_numbers = not self.is_small and (training or is_users)
            cannot_run = (
                not isinstance(e, UserError)
                or ran_out(cause)
                or any(words in str(cause) for words in ("process group", "not attached to a"))
            )
            if needs_numbers or cannot_run or (training and not self.shipped):
                return
            if is_users:
                raise cause from None
            raise

    @property
    def is_small(self) -> bool:
        return sum(p.numel() for p in self.work.module.net.parameters()) <= LARGEST

    def copies(self, *, training: bool, samples: int) -> tuple[nn.Module, Task, Batch]:
        """Of the network and the task, and a batch."""
        module, device, source = self.work.module, self.device, self.device
        if self.is_small:
            net = copy_hooks(module.net, copy.deepcopy(module.net))
        else:
            device, source, net = META, torch.device("cpu"), on_meta(module.net)
        batch = self.work.data.example(samples, source, training=training)
        return net.to(device).train(training), module.copied().to(device), move_data_to_device(batch, device)

    def step(self, net: nn.Module, task: Task, batch: Batch) -> None:
        device, module = batch["index"].device, self.work.module
        before = invariance.generators(device)
        attention = sdpa_kernel(SDPBackend.MATH)  # torch counts no operations of its kernel for CPUs (2.13)
        with attention, FlopCounterMode(display=False) as counter, invariance.Draws() as draws:
            with refused(self.misfit(batch)):
                loss_B = task.loss(task.outputs(net, batch), batch)
            loss = one_per_sample(loss_B, task, batch).sum()
            weight_of(task, batch)
            with refused(self.misfit(batch)):
                loss.backward()
        self.draws = draws.any or invariance.generators(device) != before
        self.work.flops_per_sample = int(counter.get_total_flops()) // len(batch["index"])
        with refused("optim: {}."):
            optimizer = module.new_optimizer(net)
        with refused("schedule: {}."):
            scheduler(module.parts.schedule, optimizer, self.steps)
        for parameter in list(net.parameters())[FEW:]:
            parameter.grad = None
        closure: Any = loss.detach  # Lightning gives one too
        with refused("optim: {}."):
            optimizer.step(closure)

    def try_callback(self, callback: Any) -> None:
        """The outputs for a batch that the callback has changed."""
        words = (
            f"{type(callback).__name__} does not fit model={self.titles['model']} and data={self.titles['data']}: {{}}."
        )
        with refused(words):
            net, task, batch = self.copies(training=True, samples=min(SAMPLES, self.samples))
            batch = callback.dry_run(batch, self.steps)
        with refused(f"{words}{getattr(callback, 'needs', '')}"):
            task.outputs(net, batch)

    @torch.no_grad()
    def evaluation(self, net: nn.Module, task: Task, batch: Batch) -> None:
        """What an evaluation, the report and a prediction do with a network's outputs, on the CPU. Those of the meta device become ones."""
        module, data = self.work.module, self.work.data

        def on_cpu(tensor: Tensor) -> Tensor:
            return torch.ones_like(tensor, device="cpu") if tensor.is_meta else tensor.cpu()

        # a network that cannot run without numbers may run with them
        with nullcontext() if batch["index"].is_meta else refused(self.misfit(batch)):
            outputs = apply_to_collection(task.outputs(net, batch), Tensor, on_cpu)
        count, title = len(batch["index"]), f"task={self.titles['task']}"
        # the same one, which may keep something for its loss
        task = module.copied() if batch["index"].is_meta else task.cpu()
        batch = data.example(count, training=False)
        with refused(self.misfit(batch)):
            outputs = float32(first_rows(outputs, count, count))
            loss_B = task.loss(outputs, batch)
        one_per_sample(loss_B, task, batch)
        logged: list[str] = []
        with refused(f"{title}: {{}}."):
            own = task.inputs_by_metric(outputs, batch)
            if unknown := sorted(own.keys() - module.parts.metrics.keys()):
                raise UserError(
                    f"`inputs_by_metric` has {unknown[0]}, but the metrics are {', '.join(module.parts.metrics)}"
                )
        for name, metric in module.parts.metrics.items():
            with refused(f"task.metrics.{name} does not fit {title} and the data: {{}}."):
                inputs = own[name] if name in own else task.metric_inputs(outputs, batch)
                if not isinstance(inputs, tuple):
                    raise UserError(f"its inputs are a {type(inputs).__name__}, not a tuple of arguments")
                value = computed(metric, inputs, count, data.val_split.count)
                logged += named(name, value, task.value_names)
        with refused(f"{title}: {{}}."):
            predicted = validated_columns(task.predictions(outputs))
            columns = {"describe": task.describe(outputs, batch), **(task.targets(batch) if "target" in batch else {})}
            columns |= {} if type(task).predictions is Task.predictions else predicted  # columns of the user's own
            for what, column in columns.items():
                if len(column) != count:
                    raise UserError(f"`{what}` has {len(column)} entries for {count} samples; it needs one per sample")
        self.logged = logged

    def across_processes(self) -> str:
        """Whether the network and the loss compute the same on any number of processes, and why not."""
        exact, draws = self.work.arithmetic.same_bits, self.draws
        good = invariance.SAME_BITS if exact else invariance.ROUNDING
        if self.shipped and (exact or draws is False):
            return good
        if self.compiled and draws is not False and not exact:
            return invariance.DIFFERS.format(
                "a compiled network draws random numbers of each process's own. Remove compile=true"
            )
        if not self.is_small:
            return invariance.UNKNOWN.format(f"it has more than {LARGEST:,} parameters, and no copy of it was tried")
        try:
            division, count = self.divisions()
        except Exception as e:
            return invariance.UNKNOWN.format(f"its forward could not be tried: {' '.join(str(e).split())}")
        if division.step:
            return invariance.DIFFERS.format(division.step)
        tried = "" if self.shipped else f"; tried with {count} training samples"
        metrics = (
            f". Metrics of an evaluation differ with it, because {division.evaluation}" if division.evaluation else ""
        )
        return good + tried + metrics

    def divisions(self) -> tuple[invariance.Division, int]:
        """What was found out with so many samples: a few, then as many as a second and some memory allow."""
        few = invariance.COUNT if self.shipped else invariance.FIRST
        began_s, count = time.perf_counter(), max(invariance.COUNT, min(few, self.samples // 2 * 2))
        found = self.division(count)
        if self.shipped or found.step or found.evaluation:
            return found, count
        times = min(invariance.SECONDS / (time.perf_counter() - began_s), invariance.BYTES / max(1, found.nbytes))
        more = min(invariance.MOST, count * int(times), self.work.data.train_split.count // 2 * 2)
        return (self.division(more), more) if more > count else (found, count)

    def validate_gathered(self) -> None:
        """Raises UserError: the batches of processes cannot be joined to one, for a loss between samples."""
        task, data = self.work.module, self.work.data
        shapes: dict[str, set[torch.Size]] = {}
        if self.world > 1 and task.between_samples:
            for index in data.varied(ALONE):
                batch = data.example(np.array([index]), training=False)
                for name, value in batch.items():
                    if isinstance(value, Tensor):
                        shapes.setdefault(name, set()).add(value.shape)
        if padded := [name for name, found in shapes.items() if len(found) > 1]:
            raise UserError(
                f"task={self.titles['task']} compares the samples of all processes (between_samples), but this data pads each batch by itself: "
                f"`{padded[0]}` has several shapes. Pad to a fixed length in `__getitem__`, or train in one process."
            )

    def divided(self, index_N: Indices) -> list[Batch]:
        """A batch, and its two halves as two processes would read them."""
        half = len(index_N) // 2
        parts = index_N, index_N[:half], index_N[half:]
        return [move_data_to_device(self.work.data.example(part, training=False), self.device) for part in parts]

    def division(self, count: int) -> invariance.Division:
        """In double precision where the network is not too large for it and computes in it."""
        exact, index_N = self.work.arithmetic.same_bits, self.work.data.varied(count)
        orders = [index_N] if self.shipped else [index_N, index_N[::-1].copy()]  # a sort by length changes one of them
        steps = [self.divided(order) for order in orders]
        parameters = sum(p.numel() for p in self.work.module.net.parameters())
        if not self.shipped and parameters <= invariance.DOUBLE and self.device.type != "mps":
            net, task, _ = self.copies(training=False, samples=1)
            with suppress(RuntimeError, TypeError):  # code that makes float32 tensors of its own
                doubled = apply_to_collection(steps, Tensor, lambda x: x.double() if x.is_floating_point() else x)
                return invariance.why_not(net.double(), task.double(), doubled, exact=exact)
        net, task, _ = self.copies(training=False, samples=1)
        return invariance.why_not(net, task, steps, exact=exact)

    def misfit(self, batch: Batch) -> str:
        shapes = [f"{name} {list(v.shape)}" for name, v in batch.items() if isinstance(v, Tensor) and name != "index"]
        size = "" if self.image_size is None else f" at data.image_size={self.image_size}"
        keys = "model, data, task" if self.image_size is None else "model, data, task, data.image_size"
        if len(batch["index"]) == 1:  # batch normalisation has no statistics of it
            keys = f"loader.batch_size, because a micro-batch has 1 sample; {keys}"
        return (
            f"model={self.titles['model']}, data={self.titles['data']}{size} and task={self.titles['task']} do not fit together: {{}}. "
            f"A batch holds {', '.join(shapes)}. Change one of them: {keys}."
        )


def on_meta(net: nn.Module) -> nn.Module:
    """A copy of a network whose parameters and buffers have no numbers."""
    copies: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device=META), requires_grad=p.requires_grad) for p in net.parameters()
    }
    copies |= {id(b): torch.empty_like(b, device=META) for b in net.buffers()}
    return copy_hooks(net, copy.deepcopy(net, copies))


def computed(metric: Metric, inputs: tuple[Any, ...], count: int, available: int) -> Any:
    """What a metric computes. One that computes nothing of a few samples gets as many as a validation has, at most MOST."""
    one = copy.deepcopy(metric)
    one.update(*inputs)
    try:
        return one.compute()
    except Exception:
        if (more := min(available, MOST) // count - 1) < 1:
            raise
        for _ in range(more):
            one.update(*inputs)
        return one.compute()


def is_refusal(error: Exception) -> bool:
    """Whether Lockstep itself found something wrong, so the message is final."""
    return isinstance(error, UserError) and error.__cause__ is None


@contextmanager
def refused(words: str) -> Iterator[None]:
    """An error becomes a UserError with `words`, whose {} is the error."""
    try:
        yield
    except Exception as e:
        reason = " ".join(str(e).split()) or type(e).__name__
        raise UserError(words.replace("{}", reason.removesuffix("."))) from (None if is_refusal(e) else e)
