"""What must be equal on all ranks: the names of the parameters before the first step, their values at each checkpoint.

Ranks that drift apart train different networks, and a checkpoint holds only rank 0's.
"""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from itertools import zip_longest

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lockstep.errors import TrainingFailed
from lockstep.machine.world import all_gather_objects

DRIFTED = 1e-3  # a larger difference is an error, a smaller one a warning
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
log = logging.getLogger("lockstep")


def require_same_names(module: nn.Module) -> None:
    """Compares names, shapes and dtypes in their order, by which DDP and FSDP2 pair tensors. Every rank must call it.

    Raises:
        TrainingFailed: ranks have different parameters or buffers.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    own = [f"{name} {'' if is_lazy(t) else tuple(t.shape)} {t.dtype}" for name, t in tensors]
    of_rank_0, *others = all_gather_objects(own)
    for rank, names in enumerate(others, 1):
        for expected, name in zip_longest(of_rank_0, names, fillvalue="nothing"):
            if name != expected:
                raise TrainingFailed(
                    f"rank {rank} has {name} where rank 0 has {expected}, and ranks pair parameters and buffers by their order. Create "
                    "layers in the same order on every rank, not in that of a set."
                )


@torch.no_grad()
def require_same_values(module: nn.Module, optimizers: Sequence[Optimizer], device: torch.device, step: int) -> None:
    """Compares the parameters and optimizer states that each rank has whole. Every rank must call it.

    Raises:
        TrainingFailed: ranks are more than DRIFTED apart.
    """
    tensors = dict(replicated(module, optimizers))
    if not tensors:  # all are shards
        return
    sums = dict(zip(tensors, torch.stack([sum_of_bits(t).to(device) for t in tensors.values()]).tolist(), strict=True))
    digest = hashlib.sha256(str(sums).encode()).hexdigest()  # of few bytes, however many the ranks and tensors are
    if len({*all_gather_objects(digest)}) == 1:
        return
    by_rank = all_gather_objects(sums)
    names = dict.fromkeys(name for each in by_rank for name in each)
    different = [name for name in names if len({each.get(name) for each in by_rank}) > 1]
    on_all = [tensors[name].to(device) for name in different if all(name in each for each in by_rank)]
    distance = max(map(distance_from_rank_0, on_all), default=torch.inf)
    more = f" and {len(different) - 1} more" if len(different) > 1 else ""
    message = (
        f"after step {step}, {different[0]}{more} differ by up to {distance:.1e} between the ranks, and a checkpoint holds only rank 0's. Look for a hook, "
        "callback or optimizer that depends on the rank, or on a batch, loss or generator of one rank; average over the ranks what it reads. Random "
        "numbers in training_step are those of a rank's samples, those of on_before_optimizer_step and of optimizers are the same on all ranks."
    )
    if not distance <= DRIFTED:
        raise TrainingFailed(f"the ranks have drifted apart: {message}")
    log.warning("%s", message)


def replicated(module: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, Tensor]]:
    """Without buffers: DDP copies rank 0's before each forward."""
    values: dict[str, object] = dict(module.named_parameters())
    names: dict[Tensor, str] = {p: name for name, p in module.named_parameters()}
    for i, optimizer in enumerate(optimizers):
        states = [(names.get(p, "?"), state) for p, state in optimizer.state.items()]
        states += [(f"group {j} of optimizer {i}", group) for j, group in enumerate(optimizer.param_groups)]
        values |= {f"{key} of {name}": value for name, state in states for key, value in state.items()}
    for name, value in values.items():
        tensor = torch.tensor(value) if isinstance(value, float) else value
        if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor) and tensor.numel():
            yield name, torch.view_as_real(tensor) if tensor.is_complex() else tensor


def sum_of_bits(tensor: Tensor) -> Tensor:
    """100 million float32 take 0.12 s on two cores, as long as reading them; as int32, which torch converts, 2.1 s."""
    flat = tensor.contiguous().view(-1)
    size = flat.element_size()
    if (flat.numel() * size) % 8 == 0 and (flat.storage_offset() * size) % 8 == 0:
        size = 8
    return flat.view(INTEGERS[size]).sum(dtype=torch.int64)


def distance_from_rank_0(tensor: Tensor) -> float:
    """The largest of all ranks."""
    reference = tensor.clone()
    torch.distributed.broadcast(reference, 0)
    distance = (tensor.double() - reference.double()).abs().max().nan_to_num(nan=torch.inf)
    torch.distributed.all_reduce(distance, torch.distributed.ReduceOp.MAX)
    return distance.item()
