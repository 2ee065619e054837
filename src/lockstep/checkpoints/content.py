"""Checkpoints as they lie on disk: what is in them, and the network that they hold. Free of Lightning."""

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lockstep.checkpoints import shards
from lockstep.errors import UserError
from lockstep.models.network import network

DATA = "DataModule"  # where Lightning keeps the datamodule's state


def read(path: Path) -> dict[str, Any]:
    """A checkpoint's content on the CPU; a folder of shards is put together."""
    loaded: dict[str, Any] = shards.load(path) if path.is_dir() else shards.open_file(path)
    return loaded


def network_of(content: dict[str, Any]) -> dict[str, Tensor]:
    """The network's state, with its own keys. Of a run with an average of its weights, that average."""
    state: dict[str, Tensor] = content["state_dict"]
    return {key.removeprefix("net."): value for key, value in state.items() if key.startswith("net.")}


def load_weights(net: nn.Module, path: Path) -> None:
    """Loads a checkpoint's weights into `net`, strictly. Raises UserError that lists what does not fit."""
    fill(net, network_of(read(path)), path)


def fill(net: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    own = net.state_dict()
    missing, extra = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    shapes = [
        f"{k} {tuple(weights[k].shape)} instead of {tuple(own[k].shape)}"
        for k in sorted(own.keys() & weights.keys())
        if weights[k].shape != own[k].shape
    ]
    if missing or extra or shapes:
        parts = (
            [f"missing: {', '.join(missing[:5])}"] * bool(missing)
            + [f"not wanted: {', '.join(extra[:5])}"] * bool(extra)
            + shapes[:5]
        )
        raise UserError(
            f"{path} does not fit the network: {'; '.join(parts)}. Choose the model and data that it was trained with."
        )
    net.load_state_dict(weights, strict=getattr(net, "strict_loading", True))


def load_network(path: Path) -> nn.Module:
    """The network of a checkpoint with its weights, for evaluation."""
    content = read(path)
    net = network(content["config"]["model"], content["network"], with_weights=False)
    fill(net, network_of(content), path)
    return net.eval()


def holds_module(path: Path) -> bool:
    """Whether it is a checkpoint of a LightningModule of the user's, whose network nobody but itself knows."""
    return "module_arguments" in read(path)
