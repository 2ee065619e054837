"""Whether the result depends on the number of processes: tried before training, with a copy of the network.

Training samples are read and computed as one batch and as two halves, as one process and two would have them, with the masks that
dropout has in training. Losses, gradients, and what passes between modules must agree, no other random numbers may be drawn, and no
buffer may be written. What breaks this is named with its file and line. A logical rank is computed whole and with seeds of its own: it
must give the same when it is repeated.
"""

# B batch

import inspect
import math
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
from lockstep.training.losses import weighted_loss

COUNT, MOST = 4, 64  # samples of the first try; at most, within SECONDS and BYTES of what passes between modules
SECONDS, BYTES = 1.0, 2**28
DOUBLE = 50_000_000  # parameters of a network that is tried in double precision, where rounding flips no ReLU
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
SAME_BITS = "same bits on any number of processes"
ROUNDING = "the same on any number of processes, up to rounding"
# Measured: BasicNet, AdamW, one process and ddp on two. After 56 steps 7e-2 and 8e-5: training amplifies rounding.
IN_HALF = " (after 10 steps weights are about 1e-2 apart in {}, 1e-6 in 32-true)"
DIFFERS = "differs with the number of processes, because {}"
UNKNOWN = "may differ with the number of processes, because {}"
OR_EXACT = ", or set exact.logical_ranks=8"
# Of the largest number of a tensor: rounding is at 1e-6 of it in single precision, another mask at 1.
TOLERANCE = {True: 1e-4, False: 1e-3}  # in double precision; in others
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


@dataclass(frozen=True)
class Computed:
    """What a network and a task make of a batch."""

    passed: list[Passed]  # the loss and its weight last
    gradients: list[Tensor]  # of the sum of the losses
    buffers: dict[str, Tensor]  # that were written


def forward(net: nn.Module, task: Task, batch: Batch, first: int = 0) -> Computed:
    """Each call starts with the same random numbers and buffers. `first`: the place of the first sample in the global batch."""
    device, both = batch["index"].device, nn.ModuleList([net, task])
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
    before = {name: buffer.clone() for name, buffer in both.named_buffers()}
    written: dict[str, Tensor] = {}
    dropout.begin(dropout.MicroBatch(0, 0, {device: range(first, first + len(batch["index"]))}))
    try:
        with same_random_numbers(device):
            outputs = task.outputs(net, batch)
            loss = weighted_loss(task, outputs, batch)
            keep(task, loss, NOISE * largest(outputs))
            for hook in hooks:  # activations may be computed again
                hook.remove()
            if loss[0].requires_grad:
                loss[0].sum().backward()
    finally:
        dropout.begin(None)
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            for name, buffer in both.named_buffers():
                if name in before and not torch.equal(buffer, before[name]):
                    written[name] = buffer.clone()
                    buffer.copy_(before[name])
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in both.parameters()]
        both.zero_grad()
    return Computed(passed, gradients, written)


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
    most = noise + TOLERANCE[whole.dtype == torch.float64] * largest(a)
    return a.shape != b.shape or not torch.allclose(a, b, rtol=0, atol=most, equal_nan=True)


def differing(whole: Computed, *parts: Computed, as_stored: bool = True) -> list[int]:
    """The places where a second forward, or two of a half each, pass something different from `whole`; its length for gradients.

    Without `as_stored` halves hold their samples in another form than the whole, such as less padding: only losses and gradients count.

    Raises:
        ValueError: the forwards call different modules.
    """
    loss, last = whole.passed[-1], len(whole.passed) - 1
    apart = [last] if differ(loss.tree, [part.passed[-1].tree for part in parts], loss.noise) else []
    if as_stored:
        sources = [passed.source for passed in whole.passed]
        if any([each.source for each in part.passed] != sources for part in parts):
            raise ValueError("its forward calls different modules for different samples")
        trees = ([part.passed[place].tree for part in parts] for place in range(last))
        apart = [p for p, tree in enumerate(trees) if differ(whole.passed[p].tree, tree, 0.0)] + apart
    if largest(loss.tree[0]) > loss.noise and steps_differ(whole.gradients, *(part.gradients for part in parts)):
        apart.append(last + 1)
    return apart


def steps_differ(whole: list[Tensor], *parts: list[Tensor]) -> bool:
    """Whether the gradients of a batch differ from the sum of those of its halves, or from those of a second forward."""
    most = max((gradient.norm().item() for gradient in whole), default=0.0)
    for gradient, *others in zip(whole, *parts, strict=True):
        allowed = 10 * TOLERANCE[gradient.dtype == torch.float64] * gradient.norm().item() + NOISE * most
        if (gradient - torch.stack(others).sum(0)).norm().item() > allowed:
            return True
    return False


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


@dataclass(frozen=True)
class Division:
    """Why a step, and why an evaluation, depends on how its samples are divided; empty if they do not."""

    step: str = ""
    evaluation: str = ""
    nbytes: int = 0  # of what passed between modules


def why_not(net: nn.Module, task: Task, whole: Batch, halves: Sequence[Batch], *, exact: bool = False) -> Division:
    """Tries a division. `net` and `task` are copies; `halves` has the samples of `whole`, each read by itself.

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
    as_stored = holds_the_same(whole, halves)

    def tried() -> tuple[Computed, list[Computed]]:
        first = forward(net, task, whole)
        return first, [forward(net, task, half, i * len(half["index"])) for i, half in enumerate(halves)]

    def source(place: int) -> str:
        return named(first.passed[min(place, len(first.passed) - 1)].source)

    def drawing(computed: Computed) -> str:
        return next((named(passed.source) for passed in computed.passed if passed.drew), "")

    first, parts = tried()
    if not exact and (name := drawing(first)):
        return Division(f"each process draws its own random numbers in {name}. Use an nn.Dropout layer there{OR_EXACT}")
    if again := differing(first, forward(net, task, whole)):  # nobody seeds its generator, or sets its state back
        return Division(f"{source(again[0])} draws from a generator of its own, or keeps a state from batch to batch")
    if exact:
        return Division()
    if name := next((name for name in first.buffers if not same_buffer(name, first, *parts)), ""):
        own = name.partition(".")[2]  # its name in the network or the task
        return Division(f"the buffer {own} is written from the samples of each process. Set exact.logical_ranks=8")
    # with `between_samples`, the loss is of the whole global batch, here and in an evaluation
    compared = len(first.passed) - 1 if task.between_samples else math.inf

    def apart(whole: Computed, parts: list[Computed]) -> list[int]:
        return [place for place in differing(whole, *parts, as_stored=as_stored) if place < compared]

    depends = "what {} computes for a sample depends on the other samples of its process"
    depends += "" if as_stored else ", such as their padding"
    if divided := apart(first, parts):
        for module in both.modules():
            if isinstance(module, dropout.ByRow):
                module.eval()
        if coupled := apart(*tried()):  # without masks
            return Division(f"{depends.format(source(coupled[0]))}. Set exact.logical_ranks=8")
        return Division(
            f"the dropout masks in or before {source(divided[0])} do not follow the samples. Keep the samples in the first dimension, in "
            f"the order of the batch{OR_EXACT}"
        )
    both.eval()
    evaluated, parts = tried()
    if name := drawing(evaluated):
        return Division("", f"{name} draws random numbers in it", nbytes_of(first))
    coupled = apart(evaluated, parts)
    return Division("", depends.format(source(coupled[0])) if coupled else "", nbytes_of(first))


def holds_the_same(whole: Batch, halves: Sequence[Batch]) -> bool:
    """Whether halves of a batch that were read by themselves hold what the whole holds: no other padding, no other numbers of nodes."""
    stored, *others = ({name: value for name, value in batch.items() if name != "count"} for batch in (whole, *halves))
    try:
        return not differ(stored, others, 0.0)
    except ValueError:
        return False


def same_buffer(name: str, *computed: Computed) -> bool:
    """Whether all forwards wrote the same into it, such as how often they were called."""
    return all(name in each.buffers and torch.equal(each.buffers[name], computed[0].buffers[name]) for each in computed)


def nbytes_of(computed: Computed) -> int:
    sizes = list[int]()
    apply_to_collection([passed.tree for passed in computed.passed], Tensor, lambda tensor: sizes.append(tensor.nbytes))
    return sum(sizes)


def in_double(tree: Any) -> Any:
    return apply_to_collection(tree, Tensor, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
