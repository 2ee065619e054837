"""Checks before training whether the result depends on the number of processes, with a copy of the network.

Training samples are read and computed as one batch and as two halves, as one process and two processes would do it,
with the dropout masks of training, twice. Losses, gradients and buffers must agree, and no other random numbers may be
drawn. Whatever violates this is reported with its file and line. A logical rank is computed whole and with its own
seeds: it must give the same result when it is repeated. Not detected: effects that start later in training, or that
need samples, labels or batch sizes that were not tested.
"""

# B batch

import copy
import inspect
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.data.dataset import Batch
from lockstep.training import dropout
from lockstep.training.losses import weighted_loss
from lockstep.training.task import Task

MOVED = 0.01  # scale of the parameter changes between steps
# Samples: those of the first comparison, and the maximum, within SECONDS and BYTES of the tensors that pass between modules.
COUNT, MOST = 4, 64
SECONDS, BYTES = 1.0, 2**28
DOUBLE = 50_000_000  # most parameters of a network that is tested in double precision, where rounding flips no ReLU
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
SAME_BITS = "bit-identical on any number of processes"
ROUNDING = "the same on any number of processes, up to rounding"
# Training amplifies rounding errors. BasicNet (AdamW) in one process and under ddp in two processes: a difference of
# 1e-2 after 10 steps in bf16-mixed and of 7e-2 after 56; in 32-true, 6e-7 and 8e-5.
IN_HALF = " (relative error per number: {error:.0e} in {precision}, 6e-08 in 32-true; training amplifies it)"
DIFFERS = "depends on the number of processes, because {}"
UNKNOWN = "may depend on the number of processes, because {}"
OR_EXACT = ", or set exact.logical_ranks=8"
# Relative to the largest number of a tensor. In single precision, rounding is at 1e-6 and a different mask at 1.
# Keys: whether the tensor has double precision. Parts of such a network may still compute in single precision.
TOLERANCE = {True: 1e-6, False: 1e-3}
NOISE = 1e-6  # relative to the largest number of the outputs: a loss may consist of their rounding errors


class Draws(TorchDispatchMode):
    """Records whether any operation in its context may draw random numbers, on the meta device too."""

    any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.any |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def generators(device: torch.device) -> list[object]:
    """The states of the random generators of Python, NumPy and torch. Every draw changes them."""
    numpy_state: Any = np.random.get_state()
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    elif device.type == "mps":
        states.append(torch.mps.get_rng_state())
    return [random.getstate(), numpy_state[1].tobytes(), numpy_state[2:], *(x.numpy().tobytes() for x in states)]


@contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Restores the random generators of Python, NumPy and torch on exit, so later draws do not change."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    mps_state = torch.mps.get_rng_state() if device.type == "mps" else None
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if mps_state is not None:
            torch.mps.set_rng_state(mps_state)


@dataclass(frozen=True)
class ModuleValue:
    """The input or output of a module, and the code that computed it: that of a module, or the loss."""

    source: nn.Module
    method: str  # the method of `source` that computed it
    tree: Any  # of tensors
    drew: bool  # whether it drew random numbers from a generator


@dataclass(frozen=True)
class StepResult:
    """The results of a network and a task for a batch."""

    # The last entry is the result to compare: the loss and its weight, or the outputs if the loss is between samples.
    passed: list[ModuleValue]
    noise: float  # size of the rounding errors that the result may have
    gradients: list[Tensor]  # of the sum of the result
    buffers: dict[str, Tensor]
    step: Tensor | None = None  # the loss of the task's own `training_step`, times the number of samples

    @property
    def drawing(self) -> str:
        """The first code that draws random numbers; empty if none does."""
        return next((describe_module(passed) for passed in self.passed if passed.drew), "")


class Process:
    """Copies of a network and a task with separate state. They share parameters and random generators.

    Generators are shared because those of real processes may differ in seed.
    """

    def __init__(self, both: nn.Module, *, keeps: bool) -> None:
        """`keeps`: whether results hold the tensors that modules pass, which show where two results first differ."""
        self.keeps, self.nbytes = keeps, 0
        values = (value for module in both.modules() for value in vars(module).values())
        shared = [*both.parameters(), *(value for value in values if isinstance(value, GENERATORS))]
        self.both: Any = copy.deepcopy(both, {id(value): value for value in shared})
        if any(isinstance(module, dropout.RowDropout) for module in both.modules()):
            dropout.use_row_masks(self.both)  # a copy has torch's layers

    def __call__(self, batch: Batch, first: int = 0) -> StepResult:
        """Each call starts with the same random numbers. `first`: the index of the first sample in the global batch."""
        net, task = self.both
        batch = dict(batch)
        device, count = batch["index"].device, len(batch["index"])
        passed, stack, state = list[ModuleValue](), [net], generators(device)

        def record(source: nn.Module, tree: Any, method: str = "forward") -> None:
            nonlocal state
            previous_state, state = state, generators(device)
            is_kept = self.keeps or source is task
            values = apply_to_collection(tree, Tensor, lambda tensor: tensor.detach().clone()) if is_kept else None
            self.nbytes += sum(tensor.nbytes for tensor in tensors(tree))
            passed.append(ModuleValue(source, method, values, state != previous_state))

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            record(stack[-1], (args, kwargs))
            stack.append(module)

        hooks = [m.register_forward_pre_hook(enter, with_kwargs=True) for m in net.modules()]
        hooks += [m.register_forward_hook(lambda *call: record(stack.pop(), call[-1])) for m in net.modules()]
        dropout.begin(dropout.MicroBatch(0, 0, {device: range(first, first + count)}))
        try:
            with same_random_numbers(device):
                outputs = task.outputs(net, batch)
                loss = weighted_loss(task, outputs, batch)
                record(task, outputs if task.between_samples else loss, "loss")
                for hook in hooks:  # backward may recompute activations
                    hook.remove()
                step = own_step(net, task, batch) if self.both.training and not task.between_samples else None
                losses = loss[0].sum() if step is None else step
                sums = [x.square().sum() for x in tensors(outputs)] if task.between_samples else [losses]
                if self.both.training and (sums := [x for x in sums if x.requires_grad]):
                    torch.stack(sums).sum().backward()
        finally:
            dropout.begin(None)
            for hook in hooks:
                hook.remove()
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.both.parameters()]
            self.both.zero_grad()
        buffers = {name: buffer.clone() for name, buffer in self.both.named_buffers()}
        return StepResult(passed, NOISE * largest_number(outputs), gradients, buffers, step)


def own_step(net: nn.Module, task: Task, batch: Batch) -> Tensor | None:
    """The loss of the task's own `training_step`, with means over this batch, times its samples; None without one."""
    if type(task).training_step is Task.training_step:
        return None
    without_trainer = {
        "net": net,
        "forward": lambda batch: task.outputs(net, batch),
        # not divided by the sum of the weights: the mean of two halves is then that of the whole
        "mean": lambda values_B, weight_B=None, **_: (values_B if weight_B is None else values_B * weight_B).mean(),
        "mean_loss": lambda output, batch: weighted_loss(task, output, batch)[0].mean(),
        "log": lambda *_, **__: None,
    }
    vars(task).update(without_trainer)
    try:
        loss: Any = task.training_step(apply_to_collection(batch, Tensor, Tensor.clone), 0)
    finally:
        for name in without_trainer:
            del vars(task)[name]
    loss = loss["loss"] if isinstance(loss, Mapping) else loss
    return None if loss is None else loss * len(batch["index"])


def tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    values = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list | tuple) else ()
    return [tensor for value in values for tensor in tensors(value)]


def join_halves(halves: Sequence[Tensor], like: Tensor) -> Tensor:
    """The tensors of two halves, concatenated along the dimension that depends on the number of samples."""
    a, b = halves[0], halves[-1]
    for dim in range(like.dim() if a.dim() == b.dim() == like.dim() and a.shape != like.shape else 0):
        other_dims = [x.shape[:dim] + x.shape[dim + 1 :] for x in (a, b, like)]
        if other_dims[0] == other_dims[1] == other_dims[2] and a.shape[dim] + b.shape[dim] == like.shape[dim]:
            return torch.cat([a, b], dim)
    return a


def largest_number(tree: Any) -> float:
    """The largest finite number of a tree of tensors."""
    finite = ((x[x.isfinite()] * 1.0).abs().double() for x in tensors(tree))  # bool tensors have no abs
    return max((x.max().item() for x in finite if x.numel()), default=0.0)


def differ(whole: Any, parts: Sequence[Any], noise: float = 0.0) -> bool:
    """Whether trees of tensors differ: `whole` from that of a second forward pass, or from those of its two halves."""
    if isinstance(whole, Mapping):
        return any(differ(value, [part.get(key) for part in parts], noise) for key, value in whole.items())
    if isinstance(whole, list | tuple):  # of equal lengths, or with one entry per sample
        same_length = all(len(part) == len(whole) for part in parts)
        entries = list(zip(*parts, strict=True)) if same_length else [(entry,) for part in parts for entry in part]
        return len(entries) != len(whole) or any(differ(*pair, noise) for pair in zip(whole, entries, strict=True))
    if not isinstance(whole, Tensor) or not all(isinstance(part, Tensor) for part in parts):
        return isinstance(whole, Tensor)
    a, b = whole.double(), join_halves(parts, whole).double()
    tolerance = noise + TOLERANCE[whole.dtype == torch.float64] * largest_number(a)
    return a.shape != b.shape or not torch.allclose(a, b, rtol=0, atol=tolerance, equal_nan=True)


def steps_differ(whole: list[Tensor], *parts: list[Tensor]) -> bool:
    """Whether the gradients of a batch differ from the sum of its halves' gradients, or from those of a second run."""
    largest_norm = max((gradient.norm().item() for gradient in whole), default=0.0)
    for gradient, *others in zip(whole, *parts, strict=True):
        tolerance = 10 * TOLERANCE[gradient.dtype == torch.float64] * gradient.norm().item() + NOISE * largest_norm
        if (gradient - torch.stack(others).sum(0)).norm().item() > tolerance:
            return True
    return False


def describe_module(passed: ModuleValue) -> str:
    """The class of a module, with the file and line of the code that computes."""
    cls: Any = passed.source.original if isinstance(passed.source, dropout.RowDropout) else type(passed.source)
    function: Any = getattr(cls, passed.method)
    try:
        file, line = Path(str(inspect.getsourcefile(function))), inspect.getsourcelines(function)[1]
    except (OSError, TypeError):
        return cls.__name__
    # an environment may be inside the project
    is_project_file = file.is_relative_to(Path.cwd()) and not file.is_relative_to(sys.prefix)
    location = file.relative_to(Path.cwd()) if is_project_file else cls.__module__
    return f"{cls.__name__} ({location}:{line})"


@dataclass(frozen=True)
class Division:
    """Why a step and an evaluation depend on how their samples are divided; empty if they do not."""

    step: str = ""
    evaluation: str = ""
    nbytes: int = 0  # of the tensors that passed between modules


def why_differ(whole: StepResult, *parts: StepResult, as_stored: bool = True) -> str:
    """What differs between a forward pass and a second one, or its two halves; empty if nothing differs.

    `as_stored`: the halves hold their samples in the same form as the whole. Otherwise the form differs, for example in
    padding, and so do the tensors that modules pass.
    """
    (*passed, result), *others = ([record.tree for record in computed.passed] for computed in (whole, *parts))
    if differ(result, [other[-1] for other in others], whole.noise):
        types = [[type(record.source) for record in computed.passed] for computed in (whole, *parts)]
        pairs = zip(passed, *others, strict=False) if as_stored and types.count(types[0]) == len(types) else ()
        index = next((index for index, (tree, *other_trees) in enumerate(pairs) if differ(tree, other_trees)), -1)
        return f"the result of {describe_module(whole.passed[index])} for a sample"
    if whole.step is not None:
        total = torch.stack([step for part in parts if (step := part.step) is not None]).sum()
        if (total - whole.step).abs() > TOLERANCE[total.dtype == torch.float64] * whole.step.abs() + whole.noise:
            return f"the loss of {describe_module(replace(whole.passed[-1], method='training_step'))}"
    if largest_number(result) > whole.noise and steps_differ(whole.gradients, *(part.gradients for part in parts)):
        return f"the gradient of a sample in {describe_module(whole.passed[0])} or its loss"
    return ""


def compute_all(processes: Sequence[Process], batches: Sequence[Batch]) -> list[StepResult]:
    """One process computes the whole batch, two processes compute a half each."""
    offsets = 0, 0, len(batches[1]["index"])
    return [process(batch, offset) for process, batch, offset in zip(processes, batches, offsets, strict=True)]


def why_not_repeatable(both: nn.Module, whole: Batch, *, keeps: bool = False) -> str:
    """Why a second forward pass from the same random numbers and buffers differs; empty if it does not."""
    process = Process(both, keeps=keeps)
    first = process(whole)
    with torch.no_grad():
        for buffer, initial in zip(process.both.buffers(), both.buffers(), strict=True):
            buffer.copy_(initial)
    source = why_differ(first, process(whole))  # nothing seeds its own generator or resets its own state
    if source and not keeps and (named := why_not_repeatable(both, whole, keeps=True)):
        return named
    return f"{source} depends on its own random generator, or on state kept between batches" if source else ""


def evaluation_dependence(
    processes: Sequence[Process], batches: Sequence[Batch], dependence: str, *, as_stored: bool
) -> str:
    """Why an evaluation depends on the number of processes; empty if it does not."""
    for process in processes:
        process.both.eval()
    whole, *parts = compute_all(processes, batches)
    if drawing := whole.drawing:
        return f"{drawing} draws random numbers during evaluation"
    if not (source := why_differ(whole, *parts, as_stored=as_stored)):
        return ""
    for process in processes:
        process.keeps = True
    named = why_differ(*compute_all(processes, batches), as_stored=as_stored)
    return dependence.format(named or source)


def process_dependence(
    net: nn.Module, task: Task, steps: Sequence[Sequence[Batch]], *, exact: bool = False
) -> Division:
    """Why the result depends on the number of processes, from trial steps and an evaluation.

    `net` and `task` are copies. Each of `steps` has a batch and its two halves, read separately. Parameters change
    between the steps, so a parameter that starts at zero hides nothing.
    `exact`: samples are divided among logical ranks, regardless of which process computes them.

    Raises:
        Exception: from the user's classes, or because the comparison cannot run.
    """
    both = nn.ModuleList([net, task]).train()
    for module in both.modules():
        if isinstance(module, NORMS):
            module.eval()  # batch statistics are not checked here
    if exact:
        return Division(why_not_repeatable(both, steps[0][0]))
    dropout.use_row_masks(both)
    as_stored = not any(differ(whole, halves) for whole, *halves in steps)

    def compare_processes(*, keeps: bool = False) -> tuple[list[Process], list[StepResult], str]:
        """Compares one process with two, up to the first step that differs."""
        processes = [Process(both, keeps=keeps) for _ in range(3)]
        for batches in steps:
            computed = compute_all(processes, batches)
            if difference := why_differ(*computed, as_stored=as_stored):
                break
            with torch.no_grad():
                for parameter in filter(lambda parameter: parameter.requires_grad, both.parameters()):
                    parameter.add_(MOVED * torch.randn_like(parameter))
        return processes, computed, difference

    processes, (first, *parts), difference = compare_processes()
    if drawing := first.drawing:
        return Division(
            f"each process draws its own random numbers in {drawing}. Use lockstep.rand or an nn.Dropout layer instead (set the dropout of torch's own layers to 0){OR_EXACT}"
        )
    affected = [key for key, x in first.buffers.items() if any(differ(x, [part.buffers.get(key)]) for part in parts)]
    if affected:
        buffer = affected[0].partition(".")[2]  # without the prefix of the network or the task
        return Division(
            f"the buffer {buffer} is updated from the samples of each process separately. Set exact.logical_ranks=8"
        )
    dependence = f"{{}} depends on the other samples of its process{'' if as_stored else ', such as their padding'}"
    if difference:
        if reason := why_not_repeatable(both, steps[0][0]):
            return Division(reason)
        difference = compare_processes(keeps=True)[2] or difference
        for module in both.modules():
            if isinstance(module, dropout.RowDropout):
                module.eval()
        if source := compare_processes(keeps=True)[2]:  # without masks
            return Division(f"{dependence.format(source)}. Set exact.logical_ranks=8")
        return Division(
            f"{difference} depends on dropout masks that do not follow the samples. Keep the samples in the first dimension, in the order of the batch{OR_EXACT}"
        )
    nbytes = processes[0].nbytes // len(steps)
    return Division("", evaluation_dependence(processes, steps[-1], dependence, as_stored=as_stored), nbytes)
