"""One process per device with the whole network each; torch's DistributedDataParallel averages gradients."""

from collections.abc import Callable
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy

from lockstep.strategies.one_format import OneFormat


class ReplicatedStrategy(OneFormat, DDPStrategy):
    """Lightning's, with checkpoints that fit every strategy."""


def communication_hook(name: str | None) -> dict[str, Any]:
    """Arguments of DDPStrategy for a hook that compresses gradients on the wire."""
    if name is None:
        return {}
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    hooks: dict[str, Callable[..., Any]] = {
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
        "powersgd": powerSGD_hook.powerSGD_hook,
    }
    # Vogels et al., "PowerSGD" (2019); exact all-reduce for the first 1,000 steps, as torch's documentation advises
    state = (
        powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=1000)
        if name == "powersgd"
        else None
    )
    return {"ddp_comm_hook": hooks[name], "ddp_comm_state": state}


def ddp(
    *,
    environment: ClusterEnvironment | None,
    sharded_checkpoints: bool,
    bucket_cap_mb: float,
    gradient_as_bucket_view: bool,
    static_graph: bool,
    find_unused_parameters: bool,
    comm_hook: str | None,
    name: str = "ddp",
) -> ReplicatedStrategy:
    return ReplicatedStrategy(
        cluster_environment=environment,
        bucket_cap_mb=bucket_cap_mb,
        gradient_as_bucket_view=gradient_as_bucket_view,
        static_graph=static_graph,
        find_unused_parameters=find_unused_parameters,
        **communication_hook(comm_hook),
    )
