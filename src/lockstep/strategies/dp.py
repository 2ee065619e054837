"""One process, several GPUs: torch.nn.DataParallel, which Lightning 2 removed."""

from typing import Any

from torch import nn

from lockstep.strategies.single import Single


class DataParallel(Single):
    """Splits each batch over the GPUs for the network's forward only; loss, metrics and logging stay on the first GPU.

    Wrapping the whole LightningModule fails silently: Lightning patches `forward` on the instance, the replicas copy that patch
    bound to the original, and all of them compute on the first GPU.
    """

    strategy_name = "dp"

    def parallelize(self, net: nn.Module) -> nn.Module:
        devices: list[Any] = [device for device in self.parallel_devices or [] if device.type == "cuda"]
        return nn.DataParallel(net, device_ids=devices) if len(devices) > 1 else net
