"""One process, several GPUs: torch.nn.DataParallel, which Lightning 2 removed."""

from typing import Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn


class DataParallelStrategy(SingleDeviceStrategy):
    """Splits each batch over the GPUs for the network's forward alone; loss, metrics and logging stay on the first.

    Wrapping the whole LightningModule would not do: Lightning patches `forward` on the instance, the replicas copy
    that patch bound to the original, and all of them would compute on the first device in silence.
    """

    strategy_name = "dp"

    def __init__(self) -> None:
        super().__init__()
        self.parallel_devices: list[torch.device] | None = None  # set by the Trainer

    @property
    def root_device(self) -> torch.device:
        return self.parallel_devices[0] if self.parallel_devices else self._root_device

    def parallelize(self, net: nn.Module) -> nn.Module:
        devices: list[Any] = [device for device in self.parallel_devices or [] if device.type == "cuda"]
        return nn.DataParallel(net, device_ids=devices) if len(devices) > 1 else net


def dp(*, environment: ClusterEnvironment | None, sharded_checkpoints: bool, name: str = "dp") -> DataParallelStrategy:
    return DataParallelStrategy()
