"""Whether the result depends on the number of processes: tried before training, with a copy of the network.

A forward of four samples, with the masks that dropout has in training, must draw no other random numbers, and give what two forwards
of two of them give. What does otherwise is named with its file and line. A logical rank is forwarded whole and with seeds of its own: its
forward, repeated with the same seeds, must give the same.
"""

# B batch

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
from lockstep.tasks import Task
from lockstep.training import dropout
from lockstep.training.losses import samples_at

COUNT = 4  # samples
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
SAME_BITS = "same bits on any number of processes"
ROUNDING = "the same on any number of processes, up to rounding"
DIFFERS = "differs with the number of processes, because {}"
UNKNOWN = "may differ with the number of processes, because {}"
TOLERANCE = 1e-3  # of the largest number of a tensor: rounding is at 1e-6 of it, another mask at 1
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

    source: nn.Module | Task
    tree: Any  # of tensors
    drew: bool  # random numbers of a generator
    noise: float  # what may be rounding errors


@torch.no_grad()
def forward(net: nn.Module, task: Task, batch: Batch, first: int = 0) -> list[Passed]:
    """Everything that passes between the modules of a network, and the loss, in order.

    `first`: the place of the first sample in the global batch. Each call has the same random numbers and buffers.
    """
    device = batch["index"].device
    passed, stack, state = list[Passed](), [net], generators(device)

    def keep(source: nn.Module | Task, tree: Any, noise: float = 0.0) -> None:
        nonlocal state
        before, state = state, generators(device)
        kept = apply_to_collection(tree, Tensor, lambda tensor: tensor.detach().clone())
        passed.append(Passed(source, kept, state != before, noise))

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        keep(stack[-1], (args, kwargs))
        stack.append(module)

    hooks = [m.register_forward_pre_hook(enter, with_kwargs=True) for m in net.modules()]
    hooks += [m.register_forward_hook(lambda *hooked: keep(stack.pop(), hooked[-1])) for m in net.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in net.buffers()]
    dropout.begin(dropout.MicroBatch(0, 0, {device: range(first, first + len(batch["index"]))}))
    try:
        with same_random_numbers(device):
            outputs = task.outputs(net, batch)
            keep(task, task.loss(outputs, batch), NOISE * largest(outputs))
    finally:
        dropout.begin(None)
        for hook in hooks:
            hook.remove()
        for buffer, before in buffers:
            buffer.copy_(before)
    return passed


def joined(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """The tensors of two halves of the samples in the form of the whole: along the dimension that the samples change."""
    a, b = parts[0], parts[-1]
    if a.shape == like.shape or not a.dim() == b.dim() == like.dim():
        return a
    sizes = zip(a.shape, b.shape, like.shape, strict=True)
    longer = next((d for d, (of_a, of_b, both) in enumerate(sizes) if of_a + of_b == both), None)
    return a if longer is None else torch.cat([a, b], longer)


def largest(tree: Any) -> float:
    """The largest finite number of a tree of tensors."""
    numbers = [torch.zeros(1)]
    apply_to_collection(tree, Tensor, lambda tensor: numbers.append(tensor[tensor.isfinite()].abs().double().cpu()))
    return torch.cat(numbers).max().item()


def differ(whole: Any, parts: Sequence[Any], noise: float) -> bool:
    """Whether trees of tensors differ: `whole` from that of a second forward, or from those of two forwards of a half each.

    Raises:
        ValueError: a list has neither as many entries, nor one for each sample.
    """
    if isinstance(whole, Mapping):
        return any(differ(value, [part[key] for part in parts], noise) for key, value in whole.items())
    if isinstance(whole, list | tuple):
        same = all(len(part) == len(whole) for part in parts)
        entries = zip(*parts, strict=True) if same else ((entry,) for part in parts for entry in part)
        return any(differ(*pair, noise) for pair in zip(whole, entries, strict=True))
    if not isinstance(whole, Tensor):
        return False
    a, b = whole.double(), joined(parts, whole).double()
    most = noise + TOLERANCE * largest(a)
    return a.shape != b.shape or not torch.allclose(a, b, rtol=0, atol=most, equal_nan=True)


def differing(whole: list[Passed], *forwards: list[Passed]) -> list[int]:
    """The places where a second forward, or two of a half each, pass something different from `whole`.

    Raises:
        ValueError: the forwards call different modules.
    """
    if any([each.source for each in forward] != [each.source for each in whole] for forward in forwards):
        raise ValueError("its forward calls different modules for different samples")
    pairs = ((passed, [forward[place].tree for forward in forwards]) for place, passed in enumerate(whole))
    return [place for place, (passed, trees) in enumerate(pairs) if differ(passed.tree, trees, passed.noise)]


def named(source: nn.Module | Task) -> str:
    """A module's class, with the file and line of the code that computes."""
    kind: Any = source.original if isinstance(source, dropout.ByRow) else type(source)
    code: Any = getattr(kind, "loss" if isinstance(source, Task) else "forward")
    try:
        file, line = Path(str(inspect.getsourcefile(code))), inspect.getsourcelines(code)[1]
    except (OSError, TypeError):
        return kind.__name__
    is_own = file.is_relative_to(Path.cwd()) and not file.is_relative_to(
        sys.prefix
    )  # an environment may be in the project
    place = file.relative_to(Path.cwd()) if is_own else kind.__module__
    return f"{kind.__name__} ({place}:{line})"


def why_not(net: nn.Module, task: Task, batch: Batch, *, exact: bool = False) -> str:
    """Why a step depends on how its samples are divided; empty if it does not. `net` and `task` are copies, `batch` has COUNT samples.

    `exact`: they are divided among logical ranks, whichever process computes them.

    Raises:
        Exception: of the user's classes, or because this cannot be tried.
    """
    both = nn.ModuleList([net, task]).train()
    for module in both.modules():
        if isinstance(module, NORMS):
            module.eval()  # statistics of a batch are not what is tried
    if not exact:
        dropout.by_row(both)
    whole = forward(net, task, batch)
    told = "each process draws its own random numbers in {}. Use an nn.Dropout layer there"
    draw = [passed.source for passed in whole if passed.drew]
    if draw and not exact:
        return told.format(named(draw[0])) + ", or set exact.logical_ranks=8"
    again = differing(whole, forward(net, task, batch))
    if again:  # from a generator of its own, which nobody seeds for a step
        return told.format(named(whole[again[0]].source))
    if exact:
        return ""
    half = COUNT // 2

    def divided(whole: list[Passed]) -> list[int]:
        """Where two forwards of half of the samples each pass something else."""
        halves = [{**samples_at(batch, slice(first, first + half), COUNT), "count": half} for first in (0, half)]
        return differing(whole, forward(net, task, halves[0]), forward(net, task, halves[1], first=half))

    apart = divided(whole)
    if task.between_samples:  # whose loss is of the whole global batch in training
        apart = [place for place in apart if whole[place].source is not task]
    if not apart:
        return ""
    both.eval()  # no masks: what differs now depends on the other samples of the batch
    coupled = divided(forward(net, task, batch))
    for place in apart:
        if place not in coupled:
            return (
                f"the dropout masks in or before {named(whole[place].source)} do not follow the samples. Keep the samples in the first "
                "dimension, in the order of the batch, or set exact.logical_ranks=8"
            )
    return f"what {named(whole[apart[0]].source)} computes for a sample depends on the other samples of its process"
