"""Lockstep: train PyTorch models with the same result under any strategy. `from lockstep import train`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

__version__ = "0.1.0"

PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parents[1]  # the checkout, with configs/, train.py and scripts/ beside src/; a wheel contains them
WHEEL = (PACKAGE / "configs").is_dir()
CONFIGS = PACKAGE / "configs" if WHEEL else ROOT / "configs"


def train(overrides: list[str] | None = None) -> dict[str, Any]:
    """Runs `python train.py <overrides>` from Python or a notebook and returns its report.json.

    Raises:
        UserError: the config or the input is wrong; nothing was started.
        RunFailed: a process of the run failed.
        TrainingFailed: training failed for a known reason, such as OutOfMemory or a loss that is NaN.
    """
    from lockstep.launch.call import call

    return call("train", overrides or [])


def evaluate(overrides: list[str]) -> dict[str, Any]:
    """Runs `python eval.py <overrides>` from Python and returns the figures. Raises the same errors as `train`."""
    from lockstep.launch.call import call

    return call("eval", overrides)


def load_model(what: str | Path) -> "nn.Module":
    """The bare network of a run (a name or `runs/<name>`) or of a checkpoint, with its weights, on the CPU in evaluation mode.

    Of a run, it loads the checkpoint that was tested. If the task is your own LightningModule, returns that module.

    Raises:
        UserError: there is no such checkpoint, or it is damaged.
    """
    from lockstep.checkpoints.content import holds_module, load_network
    from lockstep.checkpoints.finding import tested_checkpoint
    from lockstep.machine import process

    with process.restored():
        path = tested_checkpoint(str(what), "load_model")
        if not holds_module(path):
            return load_network(path)
        from lockstep import build

        return build.load_module(path)
