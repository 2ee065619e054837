"""One process on one device."""

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lockstep.strategies.base import OneFormat


class Single(OneFormat, SingleDeviceStrategy):
    """Lightning's, on the device that the Trainer chose."""

    strategy_name = "single"

    def __init__(self) -> None:
        super().__init__()
        self.parallel_devices: list[torch.device] | None = None  # set by the Trainer

    @property
    def root_device(self) -> torch.device:
        return self.parallel_devices[0] if self.parallel_devices else super().root_device
