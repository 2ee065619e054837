"""The content of a checkpoint, and its network. Free of Lightning."""

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lockstep.checkpoints import shards
from lockstep.checkpoints.weights import load_into
from lockstep.errors import UserError
from lockstep.models.network import network

DATA = "DataModule"  # Lightning's key for the datamodule's state
# What every checkpoint of a run has, at its top and in its loop.
POSITION = (
    "state_dict",
    "optimizer_states",
    "lr_schedulers",
    "callbacks",
    "loops",
    "epoch",
    "global_step",
    "accumulate_grad_batches",
    "config",
)
LOOP = (
    "state_dict",
    "epoch_progress",
    "epoch_loop.state_dict",
    "epoch_loop.batch_progress",
    "epoch_loop.automatic_optimization.optim_progress",
)


def read(path: Path) -> dict[str, Any]:
    """A checkpoint on the CPU; the shards of a folder are joined."""
    return shards.load(path) if path.is_dir() else shards.open_file(path)


def refuse_without_position(path: Path, own: tuple[str, ...]) -> None:
    """Raises UserError for a checkpoint without the parts from which training continues; `own` are those of this kind of run."""
    found = shards.open_file(path / shards.REST if path.is_dir() else path)
    parts = found if isinstance(found, dict) else {}
    loop = parts["loops"].get("fit_loop") if isinstance(parts.get("loops"), dict) else None
    missing = [name for name in (*POSITION, *own) if name not in parts]
    missing += [] if parts.get("callbacks", True) else ["callbacks"]
    missing += [f"loops.fit_loop.{name}" for name in LOOP if "loops" in parts and name not in (loop or ())]
    if missing:
        raise UserError(
            f"{path} does not say where training stopped: it has no {', '.join(missing)}. Type init_from={path} run=<another name> to "
            "start a new run from its weights."
        )


def network_of(content: dict[str, Any]) -> dict[str, Tensor]:
    """The network's weights under its own keys; if the run averaged its weights, the average."""
    state: dict[str, Tensor] = content["state_dict"]
    return {key.removeprefix("net."): value for key, value in state.items() if key.startswith("net.")}


def load_network(path: Path) -> nn.Module | None:
    """The network of a checkpoint with its weights, in evaluation mode; None if a user's LightningModule defines its own."""
    content = read(path)
    if "network" not in content:
        return None
    net = network(content["config"]["model"], content["network"], with_weights=False)
    load_into(net.state_dict(), network_of(content), path)
    return net.eval()


def load_module_weights(module: Any, path: Path) -> None:
    """Loads the weights of a user's LightningModule, as Lightning does. Raises UserError when the checkpoint does not fit."""
    content = read(path)
    module.on_load_checkpoint(content)
    load_into(module.state_dict(), content["state_dict"], path)
