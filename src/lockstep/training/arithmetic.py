"""How the micro-batches of a step become one update: averaged as they come, or as logical ranks with the same bits on any number of
processes (`exact.shards`, docs/exact.md)."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lockstep.config.rules import COUNTED
from lockstep.errors import UserError
from lockstep.machine.world import World
from lockstep.training.steps import micro_batch_index, steps_done
from lockstep.training.tree_reduction import TreeReduceScatter, TreeReduction, add_over_processes

if TYPE_CHECKING:
    from lockstep.training.module import TaskModule

Make = Callable[..., Optimizer]


class StepArithmetic:
    """The joints of a step at which its two ways differ. `TaskModule` and the callbacks call them without asking which way it is.

    Here Lightning and the strategy average gradients. Each process keeps its own batch statistics and draws its own random numbers.
    """

    evaluation_sums = 1  # in how many sums an evaluation adds up its losses
    same_bits = False  # on any number of processes; otherwise dropout masks belong to the samples (training/dropout.py)

    def seed_parts(self, trainer: pl.Trainer, batch_idx: int) -> tuple[int, int]:
        """What the random numbers of a micro-batch depend on, besides the run's seed."""
        accumulate = trainer.accumulate_grad_batches
        return steps_done(trainer) * accumulate + batch_idx % accumulate, trainer.global_rank

    def trainer_arguments(self, config: dict[str, Any], world: World) -> dict[str, Any]:
        """Arguments of the Trainer in place of those of the config."""
        return {}

    def gradient_norm(self, grads: list[Tensor]) -> Tensor:
        """The 2-norm of all gradients together, including other processes' shards.

        Summed in float64. torch sums in float32, where the norm of BasicNet's gradients differs by 1e-5 to 2e-5 between one
        process and two shards, always in the same direction; after 50 clipped steps the weights were 5e-5 apart.
        """
        exact = torch.float32 if grads[0].device.type == "mps" else torch.float64  # MPS has no float64
        squared = torch.stack(torch._foreach_norm(local_parts(grads), 2, dtype=exact)).square().sum()
        all_reduce(squared, torch.distributed.ReduceOp.SUM, grads)
        return squared.sqrt()

    def division(self, accumulate: int) -> str | None:
        """The key that divides each process's samples of a step into `accumulate` micro-batches, if one does."""
        return self.key_of(accumulate, 1) if accumulate > 1 else None

    def key_of(self, accumulate: int, world: int) -> str | None:
        """What to set for `accumulate` micro-batches a step in each process; None if it is not possible."""
        return f"trainer.accumulate_grad_batches={accumulate}"

    def before_forward(self, module: "TaskModule", batch_idx: int) -> None:
        """Of each micro-batch, like the next two."""

    def to_backward(self, module: "TaskModule", loss: Tensor) -> Tensor:
        """The loss that Lightning divides by the number of micro-batches and calls backward on."""
        return loss

    def after_backward(self, module: "TaskModule") -> None:
        """After the last micro-batch of a step, gradients and buffers are those of the global batch."""

    def evaluation_sum(self, module: "TaskModule", batch_idx: int) -> int:
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
    statistics are added in one fixed tree (tree_reduction.py), so a step has the same bits on any number of processes.
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

    def trainer_arguments(self, config: dict[str, Any], world: World) -> dict[str, Any]:
        """Deterministic kernels on GPUs. The config counts steps, on any number of processes, where the Trainer counts micro-batches."""
        parts = self.count // world.size
        counts = {key: config[key] * parts for key in COUNTED if type(config[key]) is int}
        deterministic = config["deterministic"] or world.accelerator == "cuda"
        return {**counts, "accumulate_grad_batches": parts, "deterministic": deterministic}

    def evaluation_sum(self, module: "TaskModule", batch_idx: int) -> int:
        return (batch_idx * module.trainer.world_size + module.trainer.global_rank) % self.count

    def before_forward(self, module: "TaskModule", batch_idx: int) -> None:
        """The buffers are as they were before the step."""
        trainer, buffers = module.trainer, list(module.net.buffers())
        self.rank, self.part = micro_batch_index(trainer, batch_idx), batch_idx % trainer.accumulate_grad_batches
        if self.part == 0:
            assert not self.first, "the micro-batches before this one are no whole step"
            self.before, self.losses = [buffer.clone() for buffer in buffers], {}
            return
        for buffer, before in zip(buffers, self.before, strict=True):
            buffer.copy_(before)

    def to_backward(self, module: "TaskModule", loss: Tensor) -> Tensor:
        """Undoes Lightning's division, which could round the smallest numbers of each gradient. `after_backward` divides their sum."""
        self.losses[self.rank] = loss.detach()
        return loss * module.trainer.accumulate_grad_batches

    @torch.no_grad()
    def after_backward(self, module: "TaskModule") -> None:
        net, trainer = module.net, module.trainer
        trained = [p for p in net.parameters() if p.requires_grad]
        # running means and their like, not counters, which each logical rank leaves the same
        buffers = [buffer for buffer in net.buffers() if buffer.is_floating_point()]
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

    def division(self, accumulate: int) -> str | None:
        return f"exact.shards={self.count}"

    def key_of(self, accumulate: int, world: int) -> str | None:
        return f"exact.shards={world * accumulate} in a new run" if accumulate.bit_count() == 1 else None

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
                f"optim: {name} is not known to work element by element, so exact.shards={self.count} is not possible "
                f"with strategy={sharding}. Name another optimizer, or type strategy=ddp."
            )
        # the first step, which is not fused, computes element by element
        return partial(make, foreach=False) if "foreach" in takes else make

    def prepared(self, optimizer: Optimizer, device: torch.device) -> Optimizer:
        return padded_fused(optimizer) if optimizer.defaults.get("fused") and device.type == "cpu" else optimizer


def local_parts(grads: list[Tensor]) -> list[Tensor]:
    """Themselves, or this process's shards of them."""
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]


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


# --- The padded fused step: fused optimizers on CPUs with the same bits however tensors are divided among processes ---
#
# torch's fused kernels (2.13) compute whole vectors of elements with other instructions than the elements that are left at the end
# of a tensor, which round differently. Here the optimizer gets the whole vectors of each tensor, and the rest of it padded to a vector.
# A step of AdamW on the 11 million parameters of ResNet-18 takes 6 ms fused and 45 ms otherwise, on one thread.

VECTOR = 64  # bytes: of AVX-512, and a multiple of the vectors of AVX2 and NEON


class PaddedFusedStep(Optimizer):
    """The first base of an optimizer's class, whose step gets padded vectors.

    A step before which a parameter has no state is not fused: it makes the states.
    """

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad(), self.padded():
            super().step()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # torch's mark: the step of the second base calls the hooks

    @contextmanager
    def padded(self) -> Iterator[None]:
        """Swaps parameters for their parts, within the block."""
        whole = [group["params"] for group in self.param_groups]
        trained = [[p for p in params if p.grad is not None] for params in whole]
        fused = all(self.state.get(p) for params in trained for p in params)
        ends: list[tuple[Tensor, Tensor]] = []  # the ends of tensors, and where they are during the step
        try:
            for group, params in zip(self.param_groups, trained, strict=True):
                group["fused"] = fused
                if fused:
                    group["params"] = [part for p in params for part in self.parts(p, ends)]
            yield
        finally:
            for end, there in ends:
                end.copy_(there)
            for group, params in zip(self.param_groups, whole, strict=True):
                for part in group["params"] if group["params"] is not params else ():
                    del self.state[part]
                group["params"], group["fused"] = params, True

    def parts(self, p: Tensor, ends: list[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
        """What stands for a parameter during a step, with gradients and states. Its end is noted in `ends`."""
        state = self.state[p]
        # a value of each element; the step counter is no such value
        names = [name for name, value in state.items() if isinstance(value, Tensor) and name != "step"]
        assert p.grad is not None
        flat = [value.detach().view(-1) for value in local_parts([p, p.grad, *(state[name] for name in names)])]
        size = VECTOR // flat[0].element_size()
        rest = len(flat[0]) % size
        whole = len(flat[0]) - rest
        yield self.part([each[:whole] for each in flat], names, state)
        if rest:
            padded = [torch.cat([each[whole:], each.new_zeros(size - rest)]) for each in flat]
            ends += [(each[whole:], there[:rest]) for each, there in zip(flat, padded, strict=True)]
            counted = {"step": state["step"].clone()} if "step" in state else {}
            yield self.part(padded, names, {**state, **counted})

    def part(self, flat: list[Tensor], names: list[str], state: dict[str, Any]) -> Tensor:
        made, made.grad, *values = flat
        self.state[made] = {**state, **dict(zip(names, values, strict=True))}
        return made


def padded_fused(optimizer: Optimizer) -> Optimizer:
    """`optimizer`, whose fused steps are padded from now on."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not p.is_contiguous():  # shards are
                p.data = p.data.contiguous()
    kind: Any = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (PaddedFusedStep, kind), {"__module__": kind.__module__})
    return optimizer
