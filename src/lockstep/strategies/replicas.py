"""Strategies with the whole network on each device.

One device, several devices of one process (DataParallel), or one process per device (DistributedDataParallel).
"""

import gc
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from lockstep.strategies.base import PortableCheckpoint, networks_of
from lockstep.strategies.rendezvous import rendezvous
from lockstep.training.optim import add_base

# --- One process: on one device, or on several GPUs with torch.nn.DataParallel, which Lightning 2 removed ---


class SingleDevice(PortableCheckpoint, SingleDeviceStrategy):
    """Lightning's SingleDeviceStrategy, on the device that the Trainer chose."""

    parallel_devices: list[torch.device] | None = None  # set by the Trainer

    @property
    def root_device(self) -> torch.device:
        return self.parallel_devices[0] if self.parallel_devices else super().root_device


class Replicas(nn.DataParallel):
    """torch's DataParallel, with the caller's precision in the threads of the replicas.

    Autocast's dtype is per thread. torch 2.13 opens autocast in each replica's thread without a dtype, so bf16-mixed
    would compute in float16, without loss scaling.
    """

    def parallel_apply(self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        device = self.src_device_obj.type
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        # one instance per replica, because it stores its thread's state
        in_precision = [torch.autocast(device, dtype=dtype, enabled=enabled)(replica) for replica in replicas]
        return super().parallel_apply(in_precision, inputs, kwargs)


class Replicated(nn.Module):
    """First base class of a network whose forward is computed by a replica on each GPU."""

    gpus: list[torch.device]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not any(True for _ in self.parameters()):  # a replica has tensors instead
            return super().forward(*args, **kwargs)
        return Replicas(self, device_ids=self.gpus)(*args, **kwargs)  # type: ignore[arg-type]


class DataParallel(SingleDevice):
    """Splits each batch over the GPUs for the forward of networks only; loss, metrics and logging stay on the first GPU.

    Wrapping the whole LightningModule fails silently: Lightning patches `forward` on the instance, the replicas copy
    that patch still bound to the original, and all of them compute on the first GPU.
    """

    @property
    def gpus(self) -> list[torch.device]:
        return [device for device in self.parallel_devices or [] if device.type == "cuda"]

    def device_rows(self, rows: range) -> dict[torch.device, range]:
        """Divides a batch as torch's DataParallel does: equal parts, the last one smaller."""
        size = -(-len(rows) // max(1, len(self.gpus)))
        parts = {gpu: rows[i * size : (i + 1) * size] for i, gpu in enumerate(self.gpus)}
        return {gpu: part for gpu, part in parts.items() if part} or super().device_rows(rows)

    def replicas(self) -> str:
        """The devices, as the first lines of a run show them."""
        if len(self.gpus) > 1:
            return f"1 process on {len(self.gpus)} GPUs"
        return f"ONE device ({self.root_device.type}): splitting batches needs at least two GPUs"

    def divide(self, module: pl.LightningModule) -> None:
        for net in networks_of(module) if len(self.gpus) > 1 else ():
            add_base(net, Replicated, gpus=self.gpus)


# --- One process per device; torch's DistributedDataParallel averages gradients ---


class DDP(PortableCheckpoint, DDPStrategy):
    """Lightning's DDP, with exact resume and with checkpoints that load under every strategy."""

    resumed = False
    parameters: Sequence[nn.Parameter] = ()
    averaged: Sequence[bool] = []  # which of them had a gradient when DDP wrapped the module
    lacks_order = False  # whether this wrapper has had no backward yet

    def __init__(
        self,
        *,
        bucket_cap_mb: float,
        gradient_as_bucket_view: bool,
        static_graph: bool,
        find_unused_parameters: bool,
        comm_hook: str | None,
        timeout_s: float,
    ) -> None:
        self.timeout, self.is_static = timedelta(seconds=timeout_s), static_graph
        super().__init__(
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            find_unused_parameters=find_unused_parameters,
            timeout=self.timeout,
            ddp_comm_hook=getattr(default_hooks, f"{comm_hook}_compress_hook") if comm_hook else None,
        )

    def setup_environment(self) -> None:
        self.contiguous_micro_batches = self.arithmetic.same_bits
        rendezvous(self, self.timeout)
        super().setup_environment()

    def configure_ddp(self) -> None:
        """With logical ranks the network is not wrapped: training/arithmetic.py adds gradients by a tree reduction."""
        if self.contiguous_micro_batches:
            for tensor in self.lightning_module.state_dict(keep_vars=True).values():
                torch.distributed.broadcast(tensor.detach(), 0)
            return
        super().configure_ddp()
        self.parameters = [*self.lightning_module.parameters()]
        self.averaged = [p.requires_grad for p in self.parameters]
        self.lacks_order = True

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Not in the step: with several micro-batches, gradients are not averaged there."""
        self.wrap_again()
        if self.resumed and self.gradient_order:
            self.rebuild_buckets()
        self.resumed = False

    def wrap_again(self) -> None:
        """If the module has unfrozen parameters: DDP averages only the gradients that it knew of at first."""
        if self.averaged != [p.requires_grad for p in self.parameters]:
            self.model = self.lightning_module
            gc.collect()  # ends the previous wrapper's hooks
            self.configure_ddp()

    def on_train_start(self) -> None:
        self.resumed = not self.contiguous_micro_batches and self.lightning_module.trainer.global_step > 0

    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Records the order of gradients in the first backward of a wrapper."""
        order: list[int] = []
        hooks = [
            p.register_post_accumulate_grad_hook(lambda _, index=index: order.append(index))  # type: ignore[misc]
            for index, p in enumerate(self.parameters if self.lacks_order else ())
            if p.requires_grad
        ]
        detached = super().backward(*args, **kwargs)
        for hook in hooks:
            hook.remove()
        if order:
            self.lacks_order = False
            is_dense = all(p.grad is None or p.grad.layout == torch.strided for p in self.parameters)
            self.gradient_order = order if is_dense else []
        return detached

    def rebuild_buckets(self) -> None:
        """Gives DDP the gradient buckets of the interrupted run, by a backward of zeros in the order of its gradients.

        DDP rebuilds its buckets after its first backward, in the order in which gradients arrived. With three or more
        processes the last bit of the summed gradients depends on the buckets.
        """
        assert self.model is not None
        self.lacks_order = False
        rest = [] if self.is_static else [index for index, averaged in enumerate(self.averaged) if averaged]
        order = [*dict.fromkeys([*self.gradient_order, *rest])]

        def zero() -> Tensor:
            total = torch.zeros((), device=self.root_device)
            for p in (self.parameters[index] for index in reversed(order)):  # autograd begins with the last
                total = total + (p.real if p.is_complex() else p).sum() * 0.0
            return total

        module: Any = self.lightning_module
        module.forward = zero  # of this object, for one call
        try:
            self.model().backward()
        finally:
            del module.forward
        module.zero_grad()
