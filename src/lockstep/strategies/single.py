"""One process: on one device, or on several GPUs with torch.nn.DataParallel, which Lightning 2 removed."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

from lockstep.strategies.base import PortableCheckpoint


class SingleDevice(PortableCheckpoint, SingleDeviceStrategy):
    """Lightning's, on the device that the Trainer chose."""

    strategy_name = "single"

    def __init__(self) -> None:
        super().__init__()
        self.parallel_devices: list[torch.device] | None = None  # set by the Trainer

    @property
    def root_device(self) -> torch.device:
        return self.parallel_devices[0] if self.parallel_devices else super().root_device


class Replicas(nn.DataParallel):
    """torch's, with the caller's precision in the threads of the replicas.

    The dtype of autocast belongs to a thread. torch 2.13 opens autocast in each replica's thread without a dtype, so bf16-mixed
    computed in float16, without loss scaling.
    """

    def parallel_apply(self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        device = self.src_device_obj.type
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        # an instance for each, because it notes its thread's state
        in_precision = [torch.autocast(device, dtype=dtype, enabled=enabled)(replica) for replica in replicas]
        return super().parallel_apply(in_precision, inputs, kwargs)


class DataParallel(SingleDevice):
    """Splits each batch over the GPUs for the network's forward only; loss, metrics and logging stay on the first GPU.

    Wrapping the whole LightningModule fails silently: Lightning patches `forward` on the instance, the replicas copy that patch
    bound to the original, and all of them compute on the first GPU.
    """

    strategy_name = "dp"

    @property
    def gpus(self) -> list[torch.device]:
        return [device for device in self.parallel_devices or [] if device.type == "cuda"]

    def device_rows(self, rows: range) -> dict[torch.device, range]:
        """As torch's DataParallel divides a batch: equal parts, the last one smaller."""
        part = -(-len(rows) // max(1, len(self.gpus)))
        parts = {gpu: rows[i * part : (i + 1) * part] for i, gpu in enumerate(self.gpus)}
        return {gpu: own for gpu, own in parts.items() if own} or super().device_rows(rows)

    def replicas(self) -> str:
        """For the first lines of a run."""
        if len(self.gpus) > 1:
            return f"1 process on {len(self.gpus)} GPUs"
        return f"ONE device ({self.root_device.type}): there are no two GPUs to split batches over"

    def parallelize(self, net: nn.Module) -> nn.Module:
        devices: list[Any] = self.gpus
        return Replicas(net, device_ids=devices) if len(devices) > 1 else net
