"""Lockstep: train PyTorch models with the same result under any strategy. `from lockstep import train`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

__version__ = "0.1.0"

PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parents[
    1
]  # the checkout, where configs/, train.py and scripts/ lie beside src/; a wheel has them inside
WHEEL = (PACKAGE / "configs").is_dir()
CONFIGS = PACKAGE / "configs" if WHEEL else ROOT / "configs"


def train(overrides: list[str] | None = None) -> dict[str, Any]:
    """Runs `python train.py <overrides>` from Python or a notebook and returns its report.json.

    Raises:
        UserError: the config or the input is wrong; nothing was started.
        RunFailed: a process of the run failed.
        TrainingFailed: it went wrong in a known way: OutOfMemory, a loss that is no number.
    """
    from lockstep.launch.call import call

    return call("train", overrides or [])


def evaluate(overrides: list[str]) -> dict[str, Any]:
    """Runs `python eval.py <overrides>` from Python and returns the figures. Raises as `train` does."""
    from lockstep.launch.call import call

    return call("eval", overrides)


def load_model(what: str | Path) -> "nn.Module":
    """The bare network of a run (`runs/<name>`, or its name) or of a checkpoint, with its weights, for evaluation, on the CPU.

    image_BCHW to logits_BK; of a run, the checkpoint that was tested. Where the task is a LightningModule of your own, that
    module itself.

    Raises:
        UserError: there is none, or it is damaged.
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
