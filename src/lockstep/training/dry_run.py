"""Tries a training step and an evaluation on copies before the run folder is created.

Parts that do not fit together therefore leave no trace. The dry run uses two samples on the run's device. A network too
large to copy runs on the meta device, which has shapes but no numbers. The dry run also counts the step's operations
and determines whether the result depends on the number of processes (invariance.py).
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
from lockstep.data.dataset import Batch
from lockstep.data.sampler import Indices
from lockstep.errors import UserError
from lockstep.training import invariance
from lockstep.training.losses import first_rows, float32, one_per_sample, sample_weights, validated_columns
from lockstep.training.metrics import named_values
from lockstep.training.oom import is_oom
from lockstep.training.optim import scheduler
from lockstep.training.task import Task
from lockstep.training.workload import TaskWorkload

SAMPLES = 2
ALONE = 16  # samples whose shapes are compared
FEW = 8  # parameters that the trial optimizer step updates
LARGEST = 200_000_000  # most parameters of a network that is copied to the run's device
# Samples for a metric that cannot be computed from a few. KernelInceptionDistance needs the most: 1,000 real and 1,000
# generated samples.
MOST = 2_000
META = torch.device("meta")
log = logging.getLogger("lockstep")
Trial = Callable[[nn.Module, Task, Batch], None]


@dataclass(kw_only=True)
class DryRun:
    """A trial of a run's parts on copies.

    A callback that changes training batches has `dry_run(batch, steps)`, which returns the changed batch.
    """

    work: TaskWorkload
    device: torch.device
    samples: int  # in a micro-batch
    world: int
    steps: float  # of the run
    titles: Mapping[str, str]  # of model, data and task
    image_size: int | None
    evaluates: bool
    compiled: bool
    shipped: bool  # all classes are Lockstep's or a library's, so no error can be a bug in the user's code
    is_user_error: Callable[[BaseException], bool]
    draws: bool | None = None  # whether a step draws random numbers, if known
    logged: list[str] | None = None  # what an evaluation logs in addition to loss and count, if known

    def __call__(self, callbacks: Iterable[object] = ()) -> None:
        """Sets what the workload reports about a step: its operations, and whether processes change the result.

        Raises:
            UserError: network, data, task, optimizer, schedule or metrics do not fit together.
            Exception: raised by the user's classes in an evaluation. Their exceptions in a training step are ignored
                here: the first training step raises them again.
        """
        with warnings.catch_warnings(), invariance.same_random_numbers(self.device):
            warnings.simplefilter("ignore")  # training shows warnings
            self.validate_gathered()
            self.attempt(self.step, training=True)
            for callback in callbacks:
                if hasattr(callback, "dry_run"):
                    self.try_callback(callback)
                    self.work.flops_per_sample = None  # the counted operations are not those of every step
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
            is_user_error = self.is_user_error(cause)
            needs_numbers = not self.is_small and (training or is_user_error)
            cannot_run = (
                not isinstance(e, UserError)
                or is_oom(cause)
                or any(text in str(cause) for text in ("process group", "not attached to a"))
            )
            if needs_numbers or cannot_run or (training and not self.shipped):
                return
            if is_user_error:
                raise cause from None
            raise

    @property
    def is_small(self) -> bool:
        return sum(p.numel() for p in self.work.module.net.parameters()) <= LARGEST

    def copies(self, *, training: bool, samples: int) -> tuple[nn.Module, Task, Batch]:
        """Copies of the network and the task, and a batch."""
        module, device, source = self.work.module, self.device, self.device
        if self.is_small:
            net = copy_hooks(module.net, copy.deepcopy(module.net))
        else:
            device, source, net = META, torch.device("cpu"), on_meta(module.net)
        batch = self.work.data.example(samples, source, training=training)
        return net.to(device).train(training), module.detached_copy().to(device), move_data_to_device(batch, device)

    def step(self, net: nn.Module, task: Task, batch: Batch) -> None:
        device, module = batch["index"].device, self.work.module
        previous_states = invariance.generators(device)
        attention = sdpa_kernel(SDPBackend.MATH)  # torch 2.13 does not count the operations of its CPU kernel
        with attention, FlopCounterMode(display=False) as counter, invariance.Draws() as draws:
            with as_user_error(self.mismatch_message(batch)):
                loss_B = task.loss(task.outputs(net, batch), batch)
            loss = one_per_sample(loss_B, task, batch).sum()
            sample_weights(task, batch)
            with as_user_error(self.mismatch_message(batch)):
                loss.backward()
        self.draws = draws.any or invariance.generators(device) != previous_states
        self.work.flops_per_sample = int(counter.get_total_flops()) // len(batch["index"])
        with as_user_error("optim: {}."):
            optimizer = module.new_optimizer(net)
        with as_user_error("schedule: {}."):
            scheduler(module.parts.schedule, optimizer, self.steps)
        for parameter in list(net.parameters())[FEW:]:
            parameter.grad = None
        closure: Any = loss.detach  # Lightning passes a closure too
        with as_user_error("optim: {}."):
            optimizer.step(closure)

    def try_callback(self, callback: Any) -> None:
        """Computes the outputs for a batch that the callback has changed."""
        message = (
            f"{type(callback).__name__} does not fit model={self.titles['model']} and data={self.titles['data']}: {{}}."
        )
        with as_user_error(message):
            net, task, batch = self.copies(training=True, samples=min(SAMPLES, self.samples))
            batch = callback.dry_run(batch, self.steps)
        with as_user_error(f"{message}{getattr(callback, 'needs', '')}"):
            task.outputs(net, batch)

    @torch.no_grad()
    def evaluation(self, net: nn.Module, task: Task, batch: Batch) -> None:
        """Does on the CPU what an evaluation, the report and a prediction do with a network's outputs.

        Outputs on the meta device are replaced by ones.
        """
        module, data = self.work.module, self.work.data

        def on_cpu(tensor: Tensor) -> Tensor:
            return torch.ones_like(tensor, device="cpu") if tensor.is_meta else tensor.cpu()

        # A network that fails on the meta device may still run on a real one.
        with nullcontext() if batch["index"].is_meta else as_user_error(self.mismatch_message(batch)):
            outputs = apply_to_collection(task.outputs(net, batch), Tensor, on_cpu)
        count, title = len(batch["index"]), f"task={self.titles['task']}"
        # The same task where possible: it may keep state for its loss.
        task = module.detached_copy() if batch["index"].is_meta else task.cpu()
        batch = data.example(count, training=False)
        with as_user_error(self.mismatch_message(batch)):
            outputs = float32(first_rows(outputs, count, count))
            loss_B = task.loss(outputs, batch)
        one_per_sample(loss_B, task, batch)
        logged: list[str] = []
        with as_user_error(f"{title}: {{}}."):
            inputs_by_name = task.inputs_by_metric(outputs, batch)
            if unknown := sorted(inputs_by_name.keys() - module.parts.metrics.keys()):
                raise UserError(
                    f"`inputs_by_metric` has {unknown[0]}, but the metrics are {', '.join(module.parts.metrics)}"
                )
        for name, metric in module.parts.metrics.items():
            with as_user_error(f"task.metrics.{name} does not fit {title} and the data: {{}}."):
                inputs = inputs_by_name[name] if name in inputs_by_name else task.metric_inputs(outputs, batch)
                if not isinstance(inputs, tuple):
                    raise UserError(f"its inputs are a {type(inputs).__name__}, not a tuple of arguments")
                value = compute_metric(metric, inputs, count, data.val_split.count)
                logged += named_values(name, value, task.value_names)
        with as_user_error(f"{title}: {{}}."):
            predicted = validated_columns(task.predictions(outputs))
            columns = {"describe": task.describe(outputs, batch), **(task.targets(batch) if "target" in batch else {})}
            columns |= {} if type(task).predictions is Task.predictions else predicted  # the user's own columns
            for key, column in columns.items():
                if len(column) != count:
                    raise UserError(f"`{key}` has {len(column)} entries for {count} samples; it needs one per sample")
        self.logged = logged

    def across_processes(self) -> str:
        """Whether the network and the loss compute the same result on any number of processes, and why if not."""
        exact, draws = self.work.arithmetic.same_bits, self.draws
        verdict = invariance.SAME_BITS if exact else invariance.ROUNDING
        if self.shipped and (exact or draws is False):
            return verdict
        if self.compiled and draws is not False and not exact:
            return invariance.DIFFERS.format(
                "a compiled network draws separate random numbers in each process. Remove compile=true"
            )
        if not self.is_small:
            return invariance.UNKNOWN.format(f"the network has more than {LARGEST:,} parameters and was not tested")
        try:
            division, count = self.divisions()
        except Exception as e:
            return invariance.UNKNOWN.format(f"the forward pass could not be tested: {' '.join(str(e).split())}")
        if division.step:
            return invariance.DIFFERS.format(division.step)
        sample_note = "" if self.shipped else f"; tested with {count} training samples"
        metrics = (
            f". Evaluation metrics depend on the number of processes, because {division.evaluation}"
            if division.evaluation
            else ""
        )
        return verdict + sample_note + metrics

    def divisions(self) -> tuple[invariance.Division, int]:
        """The result of the comparison, and its number of samples.

        Compares a few samples first, then as many as a second and some memory allow.
        """
        began_s, count = time.perf_counter(), invariance.COUNT
        division = self.division(count)
        if self.shipped or division.step or division.evaluation:
            return division, count
        factor = min(invariance.SECONDS / (time.perf_counter() - began_s), invariance.BYTES / max(1, division.nbytes))
        larger_count = min(invariance.MOST, count * int(factor), self.work.data.train_split.count // 2 * 2)
        return (self.division(larger_count), larger_count) if larger_count > count else (division, count)

    def validate_gathered(self) -> None:
        """Raises UserError if a loss between samples needs the batches of all processes joined, and they cannot be."""
        task, data = self.work.module, self.work.data
        shapes: dict[str, set[torch.Size]] = {}
        if self.world > 1 and task.between_samples:
            for index in data.diverse_samples(ALONE):
                batch = data.example(np.array([index]), training=False)
                for name, value in batch.items():
                    if isinstance(value, Tensor):
                        shapes.setdefault(name, set()).add(value.shape)
        if padded := [name for name, sizes in shapes.items() if len(sizes) > 1]:
            raise UserError(
                f"task={self.titles['task']} compares the samples of all processes (between_samples), but this data pads each batch separately: "
                f"`{padded[0]}` has several shapes. Pad to a fixed length in `__getitem__`, or train in one process."
            )

    def divided(self, index_N: Indices) -> list[Batch]:
        """A batch, and its two halves as two processes would read them."""
        half = len(index_N) // 2
        parts = index_N, index_N[:half], index_N[half:]
        return [move_data_to_device(self.work.data.example(part, training=False), self.device) for part in parts]

    def division(self, count: int) -> invariance.Division:
        """Compares a batch with its halves, in double precision if the network is small enough and supports it."""
        same_bits, index_N = self.work.arithmetic.same_bits, self.work.data.diverse_samples(count)
        orders = [index_N] if self.shipped else [index_N, index_N[::-1].copy()]  # a sort by length changes one of them
        steps = [self.divided(order) for order in orders]
        parameters = sum(p.numel() for p in self.work.module.net.parameters())
        if not self.shipped and parameters <= invariance.DOUBLE and self.device.type != "mps":
            net, task, _ = self.copies(training=False, samples=1)
            with suppress(RuntimeError, TypeError):  # code that creates float32 tensors
                doubled = apply_to_collection(steps, Tensor, lambda x: x.double() if x.is_floating_point() else x)
                return invariance.process_dependence(net.double(), task.double(), doubled, exact=same_bits)
        net, task, _ = self.copies(training=False, samples=1)
        return invariance.process_dependence(net, task, steps, exact=same_bits)

    def mismatch_message(self, batch: Batch) -> str:
        shapes = [f"{name} {list(v.shape)}" for name, v in batch.items() if isinstance(v, Tensor) and name != "index"]
        size = "" if self.image_size is None else f" at data.image_size={self.image_size}"
        keys = "model, data, task" if self.image_size is None else "model, data, task, data.image_size"
        if len(batch["index"]) == 1:  # batch normalisation cannot compute statistics of 1 sample
            keys = f"loader.batch_size, because a micro-batch has 1 sample; {keys}"
        return (
            f"model={self.titles['model']}, data={self.titles['data']}{size} and task={self.titles['task']} do not fit together: {{}}. "
            f"A batch holds {', '.join(shapes)}. Change one of them: {keys}."
        )


def on_meta(net: nn.Module) -> nn.Module:
    """A copy of a network whose parameters and buffers are on the meta device."""
    copies: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device=META), requires_grad=p.requires_grad) for p in net.parameters()
    }
    copies |= {id(b): torch.empty_like(b, device=META) for b in net.buffers()}
    return copy_hooks(net, copy.deepcopy(net, copies))


def compute_metric(metric: Metric, inputs: tuple[Any, ...], count: int, available: int) -> Any:
    """The value of a metric. If a few samples are not enough, it gets as many as a validation has, at most MOST."""
    trial_metric = copy.deepcopy(metric)
    trial_metric.update(*inputs)
    try:
        return trial_metric.compute()
    except Exception:
        if (repeats := min(available, MOST) // count - 1) < 1:
            raise
        for _ in range(repeats):
            trial_metric.update(*inputs)
        return trial_metric.compute()


def is_refusal(error: Exception) -> bool:
    """Whether Lockstep itself detected the error, so its message is final."""
    return isinstance(error, UserError) and error.__cause__ is None


@contextmanager
def as_user_error(message: str) -> Iterator[None]:
    """Turns an error into a UserError with `message`, in which {} is replaced by the error."""
    try:
        yield
    except Exception as e:
        reason = " ".join(str(e).split()) or type(e).__name__
        raise UserError(message.replace("{}", reason.removesuffix("."))) from (None if is_refusal(e) else e)
