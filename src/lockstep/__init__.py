"""Lockstep: train PyTorch models with the same result under any strategy. `from lockstep import train`."""

import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from lockstep.extras import testing as testing
    from lockstep.extras.frozen import Frozen
    from lockstep.reporting.report import Report
    from lockstep.training.dropout import rand as rand
    from lockstep.training.module import Module as Module

    frozen = Frozen

__version__ = "0.1.0"

PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parents[1]  # the checkout, with train.py, configs/ and scripts/ beside src/; a wheel contains them
WHEEL = (PACKAGE / "template").is_dir()
TEMPLATE = (
    PACKAGE / "template" if WHEEL else ROOT
)  # the project that a new one is copied from, and that runs where there is none
CONFIGS = PACKAGE / "configs"


# Imported when asked for: they need torch.
LATER = {
    "Module": "lockstep.training.module:Module",
    "frozen": "lockstep.extras.frozen:Frozen",
    "rand": "lockstep.training.dropout:rand",
    "testing": "lockstep.extras.testing",
}


def __getattr__(name: str) -> Any:
    if name not in LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return pkgutil.resolve_name(LATER[name])


def train(overrides: list[str] | None = None) -> "Report":
    """Runs `python train.py <overrides>` from Python or a notebook and returns its report, as `load_report` does.

    Raises:
        UserError: the config or the input is wrong; nothing was started.
        RunFailed: a process of the run failed.
        TrainingFailed: training failed for a known reason, such as OutOfMemory or a loss that is NaN.
    """
    from lockstep.launch.cli import call

    report: Report = call("train", overrides or [])
    return report


def evaluate(overrides: list[str]) -> dict[str, Any]:
    """Runs `python eval.py <overrides>` from Python and returns the metrics. Raises the same errors as `train`."""
    from lockstep.launch.cli import call

    return call("eval", overrides)


def predict(overrides: list[str]) -> dict[str, Any]:
    """Runs `python predict.py <overrides>` from Python; returns `output`, the path of the table, `count` and `broken`.

    Raises the same errors as `train`.
    """
    from lockstep.launch.cli import call

    return call("predict", overrides)


def sweep(overrides: list[str]) -> list[dict[str, Any]]:
    """Runs `python train.py -m <overrides>` from Python; returns a row for each job: its report, with `overrides`.

    A job that failed is a row too, with `status` and, if it began, `error`.

    Raises:
        UserError: an override is wrong; nothing was started.
        KeyboardInterrupt: Ctrl-C, which ends the sweep as a whole.
    """
    from lockstep.launch.cli import sweep

    return sweep(overrides)


def load_model(what: str | Path) -> "nn.Module":
    """The bare network of a run (a name or `runs/<name>`) or of a checkpoint, with its weights, on the CPU in evaluation mode.

    Of a run, it loads the checkpoint that was tested. If the task is your own LightningModule, returns that module.

    Raises:
        UserError: there is no such checkpoint, or it is damaged.
    """
    from lockstep.checkpoints.finding import tested_checkpoint
    from lockstep.checkpoints.weights import load_network, read
    from lockstep.machine import process

    with process.restored():
        path = tested_checkpoint(str(what), "load_model")
        if (net := load_network(path)) is not None:
            return net
        from lockstep import build

        return build.load_module(read(path).component("task"), path).eval()


def load_report(run: str | Path) -> "Report":
    """The report of a run (a name or `runs/<name>`): the dict of report.json, with `curves`, `panels`, `frame()` and `folder`.

    A notebook shows it as the page report.html. Of a run that is still going on, it holds what is known by now.

    Raises:
        UserError: there is no such run, or a file of it is damaged.
    """
    from lockstep.reporting.report import Report
    from lockstep.run import find_run

    return Report(find_run(run, "runs", needs="report.json"))
