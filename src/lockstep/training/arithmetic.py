"""How the micro-batches of a step become one update: averaged as they come, or as logical ranks with the same bits on any number of
processes (`exact.logical_ranks`, docs/exact.md)."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim import Optimizer

from lockstep.config.rules import COUNTED
from lockstep.data.sampler import place_in_step
from lockstep.errors import UserError
from lockstep.machine.world import World
from lockstep.training.optim import local_parts, padded_fused

if TYPE_CHECKING:
    from lockstep.training.task import Task

Make = Callable[..., Optimizer]
dist: Any = torch.distributed
AT_ONCE = 2**21  # elements: with 2^24, copies and new pages made an exchange of 44 MB three times as long

# --- Steps: how many are done, when one is complete, and when it has a log row ---


def steps_done(trainer: pl.Trainer) -> int:
    """Optimizer steps done; batches under manual optimization, where `trainer.global_step` counts every optimizer's steps."""
    if trainer.lightning_module.automatic_optimization:
        return int(trainer.global_step)
    total: Any = trainer.fit_loop.epoch_loop.batch_progress.total
    return int(total.processed)


def completes_step(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Whether the micro-batch `batch_idx` of an epoch is the last of its optimizer step."""
    last = batch_idx + 1 == trainer.num_training_batches or trainer.is_last_batch
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or last


def micro_batch_index(trainer: pl.Trainer, batch_idx: int) -> int:
    """Which micro-batch of its global batch the micro-batch `batch_idx` of an epoch is, in this process."""
    parts = trainer.accumulate_grad_batches
    contiguous: bool = trainer.strategy.contiguous_micro_batches  # type: ignore[attr-defined]
    return place_in_step(trainer.global_rank, trainer.world_size, batch_idx % parts, parts, contiguous)


def total_steps(trainer: pl.Trainer) -> float:
    """Optimizer steps of the whole run; infinite where it has no end, or its dataloader no length."""
    steps = trainer.estimated_stepping_batches
    return math.inf if steps < 0 else steps


def has_row(trainer: pl.Trainer, step: int) -> bool:
    """Whether the log has a row after `step` optimizer steps."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # the Trainer gets it from its connector
    return step % every == 0


# --- The two ways of a step ---


class StepArithmetic:
    """The joints of a step at which its two ways differ. `Task` and the callbacks call them without asking which way it is.

    Here Lightning and the strategy average gradients. Each process keeps its own batch statistics and draws its own random numbers.
    """

    evaluation_sums = 1  # in how many sums an evaluation adds up its losses
    same_bits = False  # on any number of processes; otherwise dropout masks belong to the samples (training/dropout.py)

    def seed_parts(self, trainer: pl.Trainer, batch_idx: int) -> tuple[int, int]:
        """What the random numbers of a micro-batch depend on, besides the run's seed."""
        accumulate = trainer.accumulate_grad_batches
        return steps_done(trainer) * accumulate + batch_idx % accumulate, trainer.global_rank

    def evaluation_parts(self, trainer: pl.Trainer, batch_idx: int) -> tuple[int, ...]:
        """What the random numbers of a batch of an evaluation depend on, besides the run's seed."""
        return batch_idx, trainer.global_rank

    def trainer_arguments(self, given: Mapping[str, Any], world: World) -> dict[str, Any]:
        """Arguments of the Trainer in place of those of the config."""
        return {}

    def gradient_norm(self, grads: list[Tensor]) -> Tensor:
        """The 2-norm of all gradients together, including other processes' shards.

        Summed in float64. torch sums in float32, where the norm of BasicNet's gradients differs by 1e-5 to 2e-5 between one
        process and two shards, always in the same direction; after 50 clipped steps the weights were 5e-5 apart.
        """
        exact = torch.float32 if grads[0].device.type == "mps" else torch.float64  # MPS has no float64
        shards: list[Tensor] = [grad for grad in grads if isinstance(grad, DTensor)]
        whole = [grad for grad in grads if not isinstance(grad, DTensor)]

        def squared(parts: list[Tensor]) -> Tensor:
            return torch.stack(torch._foreach_norm(local_parts(parts), 2, dtype=exact)).square().sum()

        total = squared(shards or whole)
        all_reduce(total, torch.distributed.ReduceOp.SUM, grads)
        return (total + squared(whole) if shards and whole else total).sqrt()

    def key_of(self, accumulate: int, world: int) -> str | None:
        """What to set for `accumulate` micro-batches a step in each process; None if it is not possible."""
        return f"trainer.accumulate_grad_batches={accumulate}"

    def before_forward(self, module: pl.LightningModule, batch_idx: int) -> None:
        """Of each micro-batch, like the next two."""

    def to_backward(self, module: pl.LightningModule, loss: Tensor) -> Tensor:
        """What backward gets for a loss that Lightning has divided by the number of micro-batches."""
        return loss

    def after_backward(self, module: pl.LightningModule) -> None:
        """After the last micro-batch of a step, gradients and buffers are those of the global batch."""

    def evaluation_sum(self, module: "Task", batch_idx: int) -> int:
        """The sum that a batch of an evaluation belongs to."""
        return 0

    def add_shards_of(self, modules: list[FSDPModule]) -> None:
        """Sets how FSDP2 adds gradients over processes."""

    def optimizer_factory(self, make: Make, name: str, sharding: str | None) -> Make:
        return make

    def prepared(self, optimizer: Optimizer, device: torch.device) -> Optimizer:
        return optimizer


class LogicalRanks(StepArithmetic):
    """A step has `count` micro-batches, the logical ranks, whichever process computes them.

    Each is forwarded by itself, with its own random numbers and batch statistics, from the same buffers. Their gradients and their
    statistics are added in one fixed tree, so a step has the same bits on any number of processes.
    """

    same_bits = True

    def __init__(self, count: int) -> None:
        self.count = self.evaluation_sums = count
        self.sums = TreeReduction()  # of gradients, and of the buffers after each logical rank as one vector
        self.first: list[Tensor] = []  # the gradients of the step's first logical rank
        self.before: list[Tensor] = []  # the buffers before the step
        self.losses: dict[int, Tensor] = {}  # of the current step, by logical rank

    def seed_parts(self, trainer: pl.Trainer, batch_idx: int) -> tuple[int, int]:
        return steps_done(trainer), micro_batch_index(trainer, batch_idx)

    def evaluation_parts(self, trainer: pl.Trainer, batch_idx: int) -> tuple[int, ...]:
        return (batch_idx * trainer.world_size + trainer.global_rank,)

    def trainer_arguments(self, given: Mapping[str, Any], world: World) -> dict[str, Any]:
        """Deterministic kernels on GPUs. The config counts steps, on any number of processes, where the Trainer counts micro-batches."""
        parts = self.count // world.size
        counts = {key: given[key] * parts for key in COUNTED if type(given[key]) is int}
        deterministic = given["deterministic"] or world.accelerator == "cuda"
        return {**counts, "accumulate_grad_batches": parts, "deterministic": deterministic}

    def evaluation_sum(self, module: "Task", batch_idx: int) -> int:
        return self.evaluation_parts(module.trainer, batch_idx)[0] % self.count

    def before_forward(self, module: pl.LightningModule, batch_idx: int) -> None:
        """The buffers are as they were before the step."""
        trainer, buffers = module.trainer, list(module.buffers())
        self.rank, self.part = micro_batch_index(trainer, batch_idx), batch_idx % trainer.accumulate_grad_batches
        if self.part == 0:
            assert not self.first, "the micro-batches before this one are no whole step"
            self.before, self.losses = [buffer.clone() for buffer in buffers], {}
            return
        for buffer, before in zip(buffers, self.before, strict=True):
            buffer.copy_(before)

    def to_backward(self, module: pl.LightningModule, loss: Tensor) -> Tensor:
        """Undoes Lightning's division, which could round the smallest numbers of each gradient. `after_backward` divides their sum."""
        whole = loss * module.trainer.accumulate_grad_batches
        self.losses[self.rank] = whole.detach()
        return whole

    @torch.no_grad()
    def after_backward(self, module: pl.LightningModule) -> None:
        trainer = module.trainer
        trained = [p for p in module.parameters() if p.requires_grad]
        # running means and their like, not counters, which each logical rank leaves the same
        buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
        # A parameter without a gradient has zeros: it may have one in another logical rank.
        taken = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        for parameter in trained:
            parameter.grad = None
        if self.part == 0:
            self.first = taken
        gradients = local_parts(taken)
        # divided first, so constants stay as they are, even the largest number
        shares = [(buffer / self.count).reshape(-1) for buffer in buffers]
        statistics = torch.cat([gradients[0].new_zeros(0), *shares])
        contiguous = trainer.strategy.contiguous_micro_batches  # type: ignore[attr-defined]
        # otherwise a logical rank's neighbours are in other processes, and the strategy has added the gradients of all
        if not contiguous and buffers:
            add_over_processes([statistics])
        self.sums.add([*gradients, statistics])
        if self.part + 1 < trainer.accumulate_grad_batches:
            return
        *gradients, statistics = self.sums.total()
        if contiguous:
            add_over_processes([*gradients, statistics])
        torch._foreach_mul_(gradients, 1 / self.count)
        for buffer, mean in zip(buffers, statistics.split([b.numel() for b in buffers]), strict=True):
            buffer.copy_(mean.view(buffer.shape))
        for parameter, gradient in zip(trained, self.first, strict=True):
            parameter.grad = gradient  # the total is in the memory of the first logical rank's
        self.first, self.before = [], []

    def gradient_norm(self, grads: list[Tensor]) -> Tensor:
        """With the same bits however the gradients are divided among processes; infinite if one is not finite.

        Squares of float32 are exact in float64. Those of a tensor are rounded to integers of a common exponent, to 2^-36 of the
        largest for 2^26 elements; sums of integers do not depend on their order.
        """
        local = local_parts(grads)
        most = [grad.abs().max() if grad.numel() else grad.new_zeros(()) for grad in local]
        largest = torch.stack([each.double() for each in most]).nan_to_num(nan=torch.inf, posinf=torch.inf)
        all_reduce(largest, torch.distributed.ReduceOp.MAX, grads)
        # of each tensor; equal in all processes, as the next two are
        unit = torch.exp2(torch.frexp(largest).exponent.double())
        grid = torch.exp2(unit.new_tensor([62.0 - grad.numel().bit_length() for grad in grads]))
        parts = zip(local, unit, grid, strict=True)
        total = torch.stack([((grad.double() / u).square() * g).round().long().sum() for grad, u, g in parts])
        all_reduce(total, torch.distributed.ReduceOp.SUM, grads)
        norm = (total.double() / grid * (unit / unit.max()).square()).sum().sqrt() * unit.max()
        return norm.where(largest.isfinite().all(), torch.inf)

    def key_of(self, accumulate: int, world: int) -> str | None:
        return f"exact.logical_ranks={world * accumulate} in a new run" if accumulate.bit_count() == 1 else None

    def add_shards_of(self, modules: list[FSDPModule]) -> None:
        """In the order of a tree, undivided."""
        comm: Any = TreeReduceScatter()
        for module in modules:
            module.set_custom_reduce_scatter(comm)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def optimizer_factory(self, make: Make, name: str, sharding: str | None) -> Make:
        """`sharding`: the strategy, if it shards. Raises UserError if that would change what the optimizer computes."""
        takes = inspect.signature(make).parameters
        if sharding and "fused" not in takes:  # torch has fused kernels for those that work so
            raise UserError(
                f"optim: {name} is not known to work element by element, so exact.logical_ranks={self.count} is not possible "
                f"with strategy={sharding}. Name a different optimizer, or set strategy=ddp."
            )
        # the first step, which is not fused, computes element by element
        return partial(make, foreach=False) if "foreach" in takes else make

    def prepared(self, optimizer: Optimizer, device: torch.device) -> Optimizer:
        return padded_fused(optimizer) if optimizer.defaults.get("fused") and device.type == "cpu" else optimizer


def all_reduce(x: Tensor, op: Any, grads: list[Tensor]) -> None:
    """Over the processes that `grads` are sharded over, if they are."""
    for group in {grad.device_mesh.get_group() for grad in grads if isinstance(grad, DTensor)}:
        torch.distributed.all_reduce(x, op, group=group)


@torch.no_grad()
def scale_gradients(grads: list[Tensor], factor: Tensor) -> None:
    if grads:
        torch._foreach_mul_(local_parts(grads), factor.to(grads[0].dtype))


@torch.no_grad()
def clip_by_norm(grads: list[Tensor], most: float, arithmetic: StepArithmetic) -> None:
    """Like torch.nn.utils.clip_grad_norm_, but equal under every strategy."""
    if grads:
        scale_gradients(grads, (most / (arithmetic.gradient_norm(grads) + 1e-6)).clamp(max=1.0))


# --- Sums in the order of a tree ---
#
# Sums whose bits do not depend on which process computes which part: the addends are leaves of one fixed binary tree.
#
# A ring all-reduce adds in an order that depends on the number of processes, and float additions round. Here a leaf is a logical
# rank. Each process adds up a whole subtree. Then the processes exchange their sums and add those in the order of the tree. Two
# alternatives cost more: gathering all sums sends as many times more bytes as there are processes, and integers of a common
# exponent take twice the bytes and an exchange of exponents first.


def tree_sum(parts: Tensor) -> Tensor:
    """The sum over dimension 0, whose size is a power of two: neighbours in pairs, then neighbouring pairs, and so on."""
    while len(parts) > 1:
        parts = parts[::2] + parts[1::2]
    return parts[0]


class TreeReduction:
    """Adds lists of tensors that come one after the other, in the order of `tree_sum`, in place."""

    def __init__(self) -> None:
        self.count = 0
        self.sums: list[list[Tensor]] = []  # one for each bit of `count`: of so many neighbours

    def add(self, tensors: list[Tensor]) -> None:
        self.count += 1
        self.sums.append(tensors)
        while len(self.sums) > self.count.bit_count():  # the last two are of equally many neighbours
            right = self.sums.pop()
            torch._foreach_add_(self.sums[-1], right)

    def total(self) -> list[Tensor]:
        """The sum of all lists, whose number must be a power of two; the next `add` begins a new sum."""
        assert len(self.sums) == 1, "the number of lists is no power of two"
        self.count = 0
        return self.sums.pop()


def reduce_scatter(mine: Tensor, group: Any = None) -> Tensor:
    """This process's part of the sum of all processes' vectors. Their length is a multiple of the number of processes."""
    parts = torch.empty_like(mine)
    dist.all_to_all_single(parts, mine, group=group)
    return tree_sum(parts.view(dist.get_world_size(group), -1))


def gather(mine: Tensor) -> Tensor:
    """The vectors of all processes, one after the other. For 11 MB of each of four processes gloo's own takes 78 ms, this 27."""
    repeated = mine.repeat(dist.get_world_size())
    found = torch.empty_like(repeated)
    dist.all_to_all_single(found, repeated)
    return found


def add_over_processes(tensors: Sequence[Tensor]) -> None:
    """Replaces each tensor by the sum over all processes. It sends as many bytes as a ring."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world == 1:
        return
    for bucket in buckets(tensors):
        parts = [part.reshape(-1) for part in bucket]
        total = parts[0] if len(parts) == 1 else torch.cat(parts)
        if world == 2:  # one addition, which has no order
            dist.all_reduce(total)
        else:
            total = gather(reduce_scatter(F.pad(total, (0, -len(total) % world))))[: len(total)]
        for part, found in zip(bucket, total.split([len(part) for part in parts]), strict=True):
            if found.data_ptr() != part.data_ptr():  # a large tensor was added up in its place
                part.copy_(found.view(part.shape))


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype that are exchanged at once, or a part of a large one, which needs no copy."""
    small: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        for part in tensor.view(-1).split(AT_ONCE) if tensor.is_contiguous() else [tensor]:
            if part.numel() > AT_ONCE // 4:
                yield [part]
                continue
            bucket = small.setdefault(tensor.dtype, [])
            if sum(each.numel() for each in bucket) + part.numel() > AT_ONCE:
                yield list(bucket)
                bucket.clear()
            bucket.append(part)
    yield from small.values()


class TreeReduceScatter:
    """What FSDP2 calls in place of torch's reduce-scatter (`set_custom_reduce_scatter`)."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        assert op == dist.ReduceOp.SUM
        output_tensor.copy_(reduce_scatter(input_tensor, group))
