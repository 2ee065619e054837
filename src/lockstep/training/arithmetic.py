"""How the micro-batches of a step become one update.

Either the gradients are averaged as they come, or the micro-batches are logical ranks. Logical ranks give a
bit-identical update on any number of processes (`exact.logical_ranks`, docs/exact.md).
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim import Optimizer

from lockstep.config.rules import COUNTED
from lockstep.data.sampler import index_in_step
from lockstep.errors import UserError
from lockstep.machine.world import World
from lockstep.training.optim import local_parts

Make = Callable[..., Optimizer]
dist: Any = torch.distributed
# Elements exchanged at once. With 2^24, copies and newly allocated pages tripled the time to exchange 44 MB.
AT_ONCE = 2**21

# --- Steps: how many are done, when one is complete, and when one is logged ---


def steps_done(trainer: pl.Trainer) -> int:
    """Completed optimizer steps; batches under manual optimization, where `global_step` adds up all optimizers."""
    if trainer.lightning_module.automatic_optimization:
        return int(trainer.global_step)
    return trainer.fit_loop.epoch_loop.batch_progress.total.processed  # type: ignore[attr-defined, no-any-return]


def completes_step(trainer: pl.Trainer) -> bool:
    """Whether the current micro-batch is the last of its optimizer step."""
    done = trainer.fit_loop.epoch_loop.batch_idx + 1
    return done % trainer.accumulate_grad_batches == 0 or done == trainer.num_training_batches or trainer.is_last_batch


def micro_batch_index(trainer: pl.Trainer, batch_idx: int) -> int:
    """The index within the global batch of this process's micro-batch `batch_idx` of an epoch."""
    accumulate = trainer.accumulate_grad_batches
    contiguous = trainer.strategy.contiguous_micro_batches  # type: ignore[attr-defined]
    return index_in_step(trainer.global_rank, trainer.world_size, batch_idx % accumulate, accumulate, contiguous)


def total_steps(trainer: pl.Trainer) -> float:
    """Optimizer steps of the whole run; infinite if the run has no end or its dataloader has no length."""
    steps = trainer.estimated_stepping_batches
    return math.inf if steps < 0 else steps


def logs_row(trainer: pl.Trainer) -> bool:
    """Whether a row is logged after the current micro-batch."""
    return completes_step(trainer) and steps_done(trainer) % trainer.log_every_n_steps == 0  # type: ignore[attr-defined, no-any-return]  # set by the Trainer's connector


# --- The two ways to compute a step ---


class StepArithmetic:
    """The points at which the two ways to compute a step differ. Modules and callbacks call them in both cases.

    Here Lightning and the strategy average gradients. Each process has its own batch statistics and random numbers.
    """

    evaluation_shares = 1  # micro-batches of a batch of an evaluation, unless there are more processes
    # Whether results are bit-identical on any number of processes. If not, dropout masks belong to the samples
    # (training/dropout.py).
    same_bits = False

    def seed_parts(self, trainer: pl.Trainer, batch_idx: int) -> tuple[int, int]:
        """What the random numbers of a micro-batch depend on, in addition to the run's seed."""
        accumulate = trainer.accumulate_grad_batches
        return steps_done(trainer) * accumulate + batch_idx % accumulate, trainer.global_rank

    def evaluation_parts(self, trainer: pl.Trainer, batch_idx: int) -> tuple[int, ...]:
        """What the random numbers of an evaluation batch depend on, in addition to the run's seed."""
        return batch_idx, trainer.global_rank

    def trainer_arguments(self, options: Mapping[str, Any], world: World) -> dict[str, Any]:
        """Trainer arguments that override those of the config."""
        return {}

    def gradient_norm(self, grads: list[Tensor]) -> Tensor:
        """The 2-norm of all gradients together, including the shards of other processes.

        Sums in float64. torch sums in float32: the norm of BasicNet's gradients then differs by 1e-5 to 2e-5 between
        one process and two shards, always in the same direction. After 50 clipped steps, the weights differed by 5e-5.
        """
        dtype = torch.float32 if grads[0].device.type == "mps" else torch.float64  # MPS has no float64
        shards: list[Tensor] = [grad for grad in grads if isinstance(grad, DTensor)]
        unsharded = [grad for grad in grads if not isinstance(grad, DTensor)]

        def squared_norm(parts: list[Tensor]) -> Tensor:
            return torch.stack(torch._foreach_norm(local_parts(parts), 2, dtype=dtype)).square().sum()

        total = squared_norm(shards or unsharded)
        all_reduce(total, torch.distributed.ReduceOp.SUM, grads)
        return (total + squared_norm(unsharded) if shards and unsharded else total).sqrt()

    def before_forward(self, module: pl.LightningModule, batch_idx: int) -> None:
        """Called for each micro-batch, like the next two methods."""

    def to_backward(self, module: pl.LightningModule, loss: Tensor) -> Tensor:
        """The loss to backpropagate, given the loss that Lightning has divided by the number of micro-batches."""
        return loss

    def after_backward(self, module: pl.LightningModule) -> None:
        """Leaves the gradients and buffers of the global batch after the last micro-batch of a step."""

    def add_shards_of(self, modules: list[FSDPModule]) -> None:
        """Sets how FSDP2 sums gradients over processes."""

    def optimizer_factory(self, make: Make, name: str, sharding: str | None) -> Make:
        return make


class LogicalRanks(StepArithmetic):
    """Splits each step into `count` micro-batches, the logical ranks, regardless of which process computes them.

    Each logical rank has its own forward pass, random numbers and batch statistics, and starts from the same buffers.
    Gradients and statistics are summed in one fixed tree, so a step is bit-identical on any number of processes.
    """

    same_bits = True

    def __init__(self, count: int) -> None:
        self.count = self.evaluation_shares = count
        self.sums = TreeReduction()  # of the gradients, and of each logical rank's buffers as one vector
        self.first: list[Tensor] = []  # the gradients of the step's first logical rank
        self.before: list[Tensor] = []  # the buffers before the step
        self.losses: dict[int, Tensor] = {}  # the losses of the current step, by logical rank

    def seed_parts(self, trainer: pl.Trainer, batch_idx: int) -> tuple[int, int]:
        return steps_done(trainer), micro_batch_index(trainer, batch_idx)

    def evaluation_parts(self, trainer: pl.Trainer, batch_idx: int) -> tuple[int, ...]:
        return (batch_idx * trainer.world_size + trainer.global_rank,)

    def trainer_arguments(self, options: Mapping[str, Any], world: World) -> dict[str, Any]:
        """Deterministic kernels on GPUs, and counts in micro-batches.

        The config counts steps, on any number of processes; the Trainer counts micro-batches.
        """
        accumulate = self.count // world.size
        counts = {key: options[key] * accumulate for key in COUNTED if type(options[key]) is int}
        deterministic = options["deterministic"] or world.accelerator == "cuda"
        return {**counts, "accumulate_grad_batches": accumulate, "deterministic": deterministic}

    def before_forward(self, module: pl.LightningModule, batch_idx: int) -> None:
        """Resets the buffers to their values before the step."""
        trainer, buffers = module.trainer, list(module.buffers())
        self.rank, self.part = micro_batch_index(trainer, batch_idx), batch_idx % trainer.accumulate_grad_batches
        if self.part == 0:
            assert not self.first, "the micro-batches before this one are not a whole step"
            self.before, self.losses = [buffer.clone() for buffer in buffers], {}
            return
        for buffer, saved in zip(buffers, self.before, strict=True):
            buffer.copy_(saved)

    def to_backward(self, module: pl.LightningModule, loss: Tensor) -> Tensor:
        """Undoes Lightning's division, which could round the smallest numbers of each gradient.

        `after_backward` divides the sum of the gradients instead.
        """
        undivided = loss * module.trainer.accumulate_grad_batches
        self.losses[self.rank] = undivided.detach()
        return undivided

    @torch.no_grad()
    def after_backward(self, module: pl.LightningModule) -> None:
        trainer = module.trainer
        trainable = [p for p in module.parameters() if p.requires_grad]
        # Running means and the like. Counters are left out: they have the same value after each logical rank.
        buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
        # A parameter without a gradient gets zeros: it may have a gradient in a different logical rank.
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trainable]
        for parameter in trainable:
            parameter.grad = None
        if self.part == 0:
            self.first = grads
        gradients = local_parts(grads)
        # Divided before summing, so constant values do not change, not even the largest float.
        scaled = [(buffer / self.count).reshape(-1) for buffer in buffers]
        statistics = torch.cat([gradients[0].new_zeros(0), *scaled])
        contiguous = trainer.strategy.contiguous_micro_batches  # type: ignore[attr-defined]
        # If not contiguous, a logical rank's neighbours are in other processes, and the strategy has already summed the
        # gradients of all processes.
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
        for parameter, gradient in zip(trainable, self.first, strict=True):
            parameter.grad = gradient  # the total is stored in the first logical rank's gradients
        self.first, self.before = [], []

    def gradient_norm(self, grads: list[Tensor]) -> Tensor:
        """Bit-identical however the gradients are divided among processes; infinite if any gradient is not finite.

        Squares of float32 are exact in float64. The squares of a tensor are rounded to integers with a common exponent,
        to 2^-36 of the largest square for 2^26 elements. Sums of integers do not depend on their order.
        """
        local = local_parts(grads)
        maxima = [grad.abs().max() if grad.numel() else grad.new_zeros(()) for grad in local]
        largest = torch.stack([maximum.double() for maximum in maxima]).nan_to_num(nan=torch.inf, posinf=torch.inf)
        all_reduce(largest, torch.distributed.ReduceOp.MAX, grads)
        # `unit` and `grid` have one value per tensor and are equal in all processes.
        unit = torch.exp2(torch.frexp(largest).exponent.double())
        grid = torch.exp2(unit.new_tensor([62.0 - grad.numel().bit_length() for grad in grads]))
        triples = zip(local, unit, grid, strict=True)
        total = torch.stack([((grad.double() / u).square() * g).round().long().sum() for grad, u, g in triples])
        all_reduce(total, torch.distributed.ReduceOp.SUM, grads)
        norm = (total.double() / grid * (unit / unit.max()).square()).sum().sqrt() * unit.max()
        return norm.where(largest.isfinite().all(), torch.inf)

    def add_shards_of(self, modules: list[FSDPModule]) -> None:
        """In tree order, without dividing."""
        comm: Any = TreeReduceScatter()
        for module in modules:
            module.set_custom_reduce_scatter(comm)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def optimizer_factory(self, make: Make, name: str, sharding: str | None) -> Make:
        """`sharding`: the strategy, if it shards. Raises UserError if sharding would change the optimizer's results."""
        parameters = inspect.signature(make).parameters
        if sharding and "fused" not in parameters:  # torch has fused kernels for element-wise optimizers
            raise UserError(
                f"optim: {name} may not work element by element, so exact.logical_ranks={self.count} is not supported "
                f"with strategy={sharding}. Choose a different optimizer, or set strategy=ddp."
            )
        # foreach=False: the first step is not fused, and this makes it compute element by element
        return partial(make, foreach=False) if "foreach" in parameters else make


def all_reduce(x: Tensor, op: Any, grads: list[Tensor]) -> None:
    """All-reduces `x` over the processes that `grads` are sharded over, if they are sharded."""
    for group in {grad.device_mesh.get_group() for grad in grads if isinstance(grad, DTensor)}:
        torch.distributed.all_reduce(x, op, group=group)


@torch.no_grad()
def scale_gradients(grads: list[Tensor], factor: Tensor) -> None:
    if grads:
        torch._foreach_mul_(local_parts(grads), factor.to(grads[0].dtype))


@torch.no_grad()
def clip_by_norm(grads: list[Tensor], max_norm: float, arithmetic: StepArithmetic) -> None:
    """Like torch.nn.utils.clip_grad_norm_, but with the same result under every strategy."""
    if grads:
        scale_gradients(grads, (max_norm / (arithmetic.gradient_norm(grads) + 1e-6)).clamp(max=1.0))


class ExactClipping(Precision):
    """First base class of a Trainer's precision plugin: clips with the same result under every strategy."""

    arithmetic: StepArithmetic

    def clip_gradients(
        self, optimizer: Optimizer, clip_val: float = 0.0, gradient_clip_algorithm: str = GradClipAlgorithmType.NORM
    ) -> None:
        optimizer, scaler = getattr(optimizer, "optimizer", optimizer), getattr(self, "scaler", None)
        if clip_val <= 0:
            return
        if scaler is not None and optimizer.defaults.get("fused"):  # otherwise unscaled in the step, after clipping
            scaler.unscale_(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            torch.nn.utils.clip_grad_value_(parameters, clip_val)
        else:
            clip_by_norm([p.grad for p in parameters if p.grad is not None], clip_val, self.arithmetic)


# --- Sums in tree order ---
#
# The addends are leaves of one fixed binary tree, so the bits of a sum do not depend on which process computes which
# part.
#
# A ring all-reduce adds in an order that depends on the number of processes, and float additions round. Here each leaf
# is a logical rank. Each process sums a whole subtree; the processes then exchange their sums and add them in tree
# order. Two alternatives cost more. Gathering all sums multiplies the bytes sent by the number of processes. Integers
# with a common exponent take twice the bytes, and the processes must exchange exponents first.


def tree_sum(parts: Tensor) -> Tensor:
    """The sum over dimension 0, whose size is a power of two: adds neighbours, then neighbouring pairs, and so on."""
    while len(parts) > 1:
        parts = parts[::2] + parts[1::2]
    return parts[0]


class TreeReduction:
    """Sums lists of tensors in place, one list at a time, in the order of `tree_sum`."""

    def __init__(self) -> None:
        self.count = 0
        self.sums: list[list[Tensor]] = []  # one for each 1 bit of `count`: the sum of that many neighbours

    def add(self, tensors: list[Tensor]) -> None:
        self.count += 1
        self.sums.append(tensors)
        while len(self.sums) > self.count.bit_count():  # the last two sum equally many neighbours
            right = self.sums.pop()
            torch._foreach_add_(self.sums[-1], right)

    def total(self) -> list[Tensor]:
        """The sum of all lists. Their number must be a power of two. The next `add` starts a new sum."""
        assert len(self.sums) == 1, "the number of lists is not a power of two"
        self.count = 0
        return self.sums.pop()


def reduce_scatter(vector: Tensor, group: Any = None) -> Tensor:
    """This process's part of the sum of all processes' vectors. Their length is a multiple of the process count."""
    received = torch.empty_like(vector)
    dist.all_to_all_single(received, vector, group=group)
    return tree_sum(received.view(dist.get_world_size(group), -1))


def gather(vector: Tensor) -> Tensor:
    """The concatenated vectors of all processes.

    For 11 MB from each of four processes, gloo's all-gather takes 78 ms and this takes 27 ms.
    """
    repeated = vector.repeat(dist.get_world_size())
    gathered = torch.empty_like(repeated)
    dist.all_to_all_single(gathered, repeated)
    return gathered


def add_over_processes(tensors: Sequence[Tensor]) -> None:
    """Replaces each tensor by its sum over all processes. Sends as many bytes as a ring all-reduce."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world == 1:
        return
    for bucket in buckets(tensors):
        parts = [part.reshape(-1) for part in bucket]
        total = parts[0] if len(parts) == 1 else torch.cat(parts)
        if world == 2:  # a single addition has no order
            dist.all_reduce(total)
        else:
            total = gather(reduce_scatter(F.pad(total, (0, -len(total) % world))))[: len(total)]
        for part, summed in zip(bucket, total.split([len(part) for part in parts]), strict=True):
            if summed.data_ptr() != part.data_ptr():  # a large tensor was summed in place
                part.copy_(summed.view(part.shape))


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of tensors of one dtype to exchange at once. A part of a large tensor is its own group, without a copy."""
    small: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        for part in tensor.view(-1).split(AT_ONCE) if tensor.is_contiguous() else [tensor]:
            if part.numel() > AT_ONCE // 4:
                yield [part]
                continue
            bucket = small.setdefault(tensor.dtype, [])
            if sum(other.numel() for other in bucket) + part.numel() > AT_ONCE:
                yield list(bucket)
                bucket.clear()
            bucket.append(part)
    yield from small.values()


class TreeReduceScatter:
    """The reduce-scatter that FSDP2 calls instead of torch's (`set_custom_reduce_scatter`)."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        assert op == dist.ReduceOp.SUM
        output_tensor.copy_(reduce_scatter(input_tensor, group))
