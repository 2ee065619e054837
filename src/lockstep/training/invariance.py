"""Whether the result depends on the number of processes: tried before training, with a copy of the network.

Training samples are read and computed as one batch and as two halves, as one process and two would have them, with the masks that
dropout has in training, twice. Losses, gradients and buffers must agree, and no other random numbers may be drawn. What breaks this is
named with its file and line. A logical rank is computed whole and with seeds of its own: it must give the same when it is repeated. Not
seen: what begins later in training, or with samples, labels or sizes of a batch that were not tried.
"""

# B batch

import copy
import inspect
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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

MOVED = 0.01  # by which parameters change between steps
# samples: at least; of the first try, if a micro-batch has as many; at most, within SECONDS and BYTES of what passes between modules
COUNT, FIRST, MOST = 4, 16, 64
SECONDS, BYTES = 1.0, 2**28
DOUBLE = 50_000_000  # parameters of a network that is tried in double precision, where rounding flips no ReLU
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
SAME_BITS = "same bits on any number of processes"
ROUNDING = "the same on any number of processes, up to rounding"
# Training amplifies it: BasicNet (AdamW) in one process and under ddp on two was 1e-2 apart after 10 steps in bf16-mixed, 7e-2 after
# 56; 6e-7 and 8e-5 in 32-true.
IN_HALF = " (each number to {error:.0e} in {precision}, 6e-08 in 32-true; training amplifies it)"
DIFFERS = "differs with the number of processes, because {}"
UNKNOWN = "may differ with the number of processes, because {}"
OR_EXACT = ", or set exact.logical_ranks=8"
# Of the largest number of a tensor: rounding is at 1e-6 of it in single precision, another mask at 1.
TOLERANCE = {True: 1e-6, False: 1e-3}  # in double precision, parts of which may be computed in single; in others
NOISE = 1e-6  # of the largest number of the outputs: a loss may consist of their rounding errors


class Draws(TorchDispatchMode):
    """Notes whether an operation inside may draw random numbers, on the meta device too."""

    any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.any |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def generators(device: torch.device) -> list[object]:
    """The states of the generators of Python, NumPy and torch, which a draw changes."""
    numbers: Any = np.random.get_state()
    of_torch = [torch.get_rng_state()]
    if device.type == "cuda":
        of_torch.append(torch.cuda.get_rng_state(device))
    elif device.type == "mps":
        of_torch.append(torch.mps.get_rng_state())
    return [random.getstate(), numbers[1].tobytes(), numbers[2:], *(state.numpy().tobytes() for state in of_torch)]


@contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Leaves the generators of Python, NumPy and torch as they were, so what follows draws what it would have drawn."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    of_mps = torch.mps.get_rng_state() if device.type == "mps" else None
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        if of_mps is not None:
            torch.mps.set_rng_state(of_mps)


@dataclass(frozen=True)
class Passed:
    """What went into a module, or came out of it, and whose code it comes from: a module's, or the loss."""

    source: nn.Module
    method: str  # of it, which computed
    tree: Any  # of tensors
    drew: bool  # random numbers of a generator


@dataclass(frozen=True)
class Computed:
    """What a network and a task make of a batch."""

    passed: list[Passed]  # last what is compared: the loss and its weight, or outputs that a loss between samples joins
    noise: float  # of that, what may be rounding errors
    gradients: list[Tensor]  # of its sum
    buffers: dict[str, Tensor]

    @property
    def drawing(self) -> str:
        """What draws random numbers."""
        return next((named(passed) for passed in self.passed if passed.drew), "")


class Process:
    """Copies of a network and a task with a state of their own. They share parameters, and generators: real ones may differ in seed."""

    def __init__(self, both: nn.Module) -> None:
        values = (value for module in both.modules() for value in vars(module).values())
        shared = [*both.parameters(), *(value for value in values if isinstance(value, GENERATORS))]
        self.both: Any = copy.deepcopy(both, {id(value): value for value in shared})
        if any(isinstance(module, dropout.ByRow) for module in both.modules()):
            dropout.by_row(self.both)  # a copy has layers of torch's own

    def __call__(self, batch: Batch, first: int = 0) -> Computed:
        """Each call starts with the same random numbers. `first`: the place of the first sample in the global batch."""
        net, task = self.both
        batch = dict(batch)
        device, count = batch["index"].device, len(batch["index"])
        passed, stack, state = list[Passed](), [net], generators(device)

        def keep(source: nn.Module, tree: Any, method: str = "forward") -> None:
            nonlocal state
            before, state = state, generators(device)
            kept = apply_to_collection(tree, Tensor, lambda tensor: tensor.detach().clone())
            passed.append(Passed(source, method, kept, state != before))

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            keep(stack[-1], (args, kwargs))
            stack.append(module)

        hooks = [m.register_forward_pre_hook(enter, with_kwargs=True) for m in net.modules()]
        hooks += [m.register_forward_hook(lambda *hooked: keep(stack.pop(), hooked[-1])) for m in net.modules()]
        dropout.begin(dropout.MicroBatch(0, 0, {device: range(first, first + count)}))
        try:
            with same_random_numbers(device):
                outputs = task.outputs(net, batch)
                loss = weighted_loss(task, outputs, batch)
                keep(task, outputs if task.between_samples else loss, "loss")
                for hook in hooks:  # activations may be computed again
                    hook.remove()
                sums = [x.square().sum() for x in tensors(outputs)] if task.between_samples else [loss[0].sum()]
                if self.both.training and (sums := [x for x in sums if x.requires_grad]):
                    torch.stack(sums).sum().backward()
        finally:
            dropout.begin(None)
            for hook in hooks:
                hook.remove()
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.both.parameters()]
            self.both.zero_grad()
        buffers = {name: buffer.clone() for name, buffer in self.both.named_buffers()}
        return Computed(passed, NOISE * largest(outputs), gradients, buffers)


def tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    values = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list | tuple) else ()
    return [tensor for value in values for tensor in tensors(value)]


def joined(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """The tensors of two halves of the samples in the form of the whole: along the dimension that the samples change."""
    a, b = parts[0], parts[-1]
    for d in range(like.dim() if a.dim() == b.dim() == like.dim() and a.shape != like.shape else 0):
        outer = [x.shape[:d] + x.shape[d + 1 :] for x in (a, b, like)]
        if outer[0] == outer[1] == outer[2] and a.shape[d] + b.shape[d] == like.shape[d]:
            return torch.cat([a, b], d)
    return a


def largest(tree: Any) -> float:
    """The largest finite number of a tree of tensors."""
    finite = ((x[x.isfinite()] * 1.0).abs().double() for x in tensors(tree))  # truth values have no abs
    return max((x.max().item() for x in finite if x.numel()), default=0.0)


def differ(whole: Any, parts: Sequence[Any], noise: float = 0.0) -> bool:
    """Whether trees of tensors differ: `whole` from that of a second forward, or from those of two forwards of a half each."""
    if isinstance(whole, Mapping):
        return any(differ(value, [part.get(key) for part in parts], noise) for key, value in whole.items())
    if isinstance(whole, list | tuple):  # with as many entries each, or with one for each sample
        same = all(len(part) == len(whole) for part in parts)
        entries = list(zip(*parts, strict=True)) if same else [(entry,) for part in parts for entry in part]
        return len(entries) != len(whole) or any(differ(*pair, noise) for pair in zip(whole, entries, strict=True))
    if not isinstance(whole, Tensor) or not all(isinstance(part, Tensor) for part in parts):
        return isinstance(whole, Tensor)
    a, b = whole.double(), joined(parts, whole).double()
    most = noise + TOLERANCE[whole.dtype == torch.float64] * largest(a)
    return a.shape != b.shape or not torch.allclose(a, b, rtol=0, atol=most, equal_nan=True)


def steps_differ(whole: list[Tensor], *parts: list[Tensor]) -> bool:
    """Whether the gradients of a batch differ from the sum of those of its halves, or from those of a second forward."""
    most = max((gradient.norm().item() for gradient in whole), default=0.0)
    for gradient, *others in zip(whole, *parts, strict=True):
        allowed = 10 * TOLERANCE[gradient.dtype == torch.float64] * gradient.norm().item() + NOISE * most
        if (gradient - torch.stack(others).sum(0)).norm().item() > allowed:
            return True
    return False


def named(passed: Passed) -> str:
    """A module's class, with the file and line of the code that computes."""
    kind: Any = passed.source.original if isinstance(passed.source, dropout.ByRow) else type(passed.source)
    code: Any = getattr(kind, passed.method)
    try:
        file, line = Path(str(inspect.getsourcefile(code))), inspect.getsourcelines(code)[1]
    except (OSError, TypeError):
        return kind.__name__
    is_own = file.is_relative_to(Path.cwd()) and not file.is_relative_to(sys.prefix)  # of an environment in the project
    place = file.relative_to(Path.cwd()) if is_own else kind.__module__
    return f"{kind.__name__} ({place}:{line})"


@dataclass(frozen=True)
class Division:
    """Why a step, and why an evaluation, depends on how its samples are divided; empty if they do not."""

    step: str = ""
    evaluation: str = ""
    nbytes: int = 0  # of what passed between modules


def why_differ(whole: Computed, *parts: Computed, as_stored: bool = True) -> str:
    """What differs between a forward and a second one, or two of a half each; empty if nothing does.

    Without `as_stored` halves hold their samples in another form than the whole, such as less padding, and so does what modules pass.
    """
    (*passed, made), *others = ([each.tree for each in computed.passed] for computed in (whole, *parts))
    if differ(made, [other[-1] for other in others], whole.noise):
        kinds = [[type(each.source) for each in computed.passed] for computed in (whole, *parts)]
        places = zip(passed, *others, strict=False) if as_stored and kinds.count(kinds[0]) == len(kinds) else ()
        place = next((place for place, (tree, *rest) in enumerate(places) if differ(tree, rest)), -1)
        return f"what {named(whole.passed[place])} computes for a sample"
    if largest(made) > whole.noise and steps_differ(whole.gradients, *(part.gradients for part in parts)):
        return f"the gradient of a sample in {named(whole.passed[0])} or its loss"
    return ""


def all_computed(processes: Sequence[Process], batches: Sequence[Batch]) -> list[Computed]:
    """By one process the whole of a batch, by two a half each."""
    firsts = 0, 0, len(batches[1]["index"])
    return [process(batch, first) for process, batch, first in zip(processes, batches, firsts, strict=True)]


def not_repeated(both: nn.Module, whole: Batch) -> str:
    """Why a second forward differs, which starts with the same random numbers and buffers; empty if it does not."""
    process = Process(both)
    first = process(whole)
    with torch.no_grad():
        for buffer, before in zip(process.both.buffers(), both.buffers(), strict=True):
            buffer.copy_(before)
    what = why_differ(first, process(whole))  # nobody seeds its generator, or sets its state back
    return f"{what} depends on a generator of its own, or on a state kept from batch to batch" if what else ""


def why_not(net: nn.Module, task: Task, steps: Sequence[Sequence[Batch]], *, exact: bool = False) -> Division:
    """Tries steps and an evaluation. `net` and `task` are copies; each of `steps` has a batch, and its two halves, read by themselves.

    Parameters change between the steps, so one that starts at zero hides nothing.
    `exact`: samples are divided among logical ranks, whichever process computes them.

    Raises:
        Exception: of the user's classes, or because this cannot be tried.
    """
    both = nn.ModuleList([net, task]).train()
    for module in both.modules():
        if isinstance(module, NORMS):
            module.eval()  # statistics of a batch are not what is tried
    if exact:
        return Division(not_repeated(both, steps[0][0]))
    dropout.by_row(both)
    as_stored = not any(differ(whole, halves) for whole, *halves in steps)

    def tried() -> tuple[list[Process], list[Computed], str]:
        """One process beside two, to the first step that differs."""
        processes = [Process(both) for _ in range(3)]
        for batches in steps:
            computed = all_computed(processes, batches)
            if what := why_differ(*computed, as_stored=as_stored):
                break
            with torch.no_grad():
                for parameter in filter(lambda parameter: parameter.requires_grad, both.parameters()):
                    parameter.add_(MOVED * torch.randn_like(parameter))
        return processes, computed, what

    processes, (first, *parts), what = tried()
    if name := first.drawing:
        return Division(
            f"each process draws its own random numbers in {name}. Use lockstep.rand or an nn.Dropout layer there{OR_EXACT}"
        )
    written = [n for n, x in first.buffers.items() if any(differ(x, [part.buffers.get(n)]) for part in parts)]
    if written:
        own = written[0].partition(".")[2]  # its name in the network or the task
        return Division(f"the buffer {own} is written from the samples of each process. Set exact.logical_ranks=8")
    depends = f"{{}} depends on the other samples of its process{'' if as_stored else ', such as their padding'}"
    if what:
        if again := not_repeated(both, steps[0][0]):
            return Division(again)
        for module in both.modules():
            if isinstance(module, dropout.ByRow):
                module.eval()
        if coupled := tried()[2]:  # without masks
            return Division(f"{depends.format(coupled)}. Set exact.logical_ranks=8")
        return Division(
            f"{what} depends on dropout masks that do not follow the samples. Keep the samples in the first dimension, in the order of the "
            f"batch{OR_EXACT}"
        )
    for process in processes:
        process.both.eval()
    nbytes = sum(tensor.nbytes for tensor in tensors([passed.tree for passed in first.passed]))
    evaluated, *parts = all_computed(processes, steps[-1])
    if name := evaluated.drawing:
        return Division("", f"{name} draws random numbers in it", nbytes)
    coupled = why_differ(evaluated, *parts, as_stored=as_stored)
    return Division("", coupled and depends.format(coupled), nbytes)
