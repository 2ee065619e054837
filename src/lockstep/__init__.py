"""Lockstep: train PyTorch models with the same result under any strategy. `from lockstep import train`."""

import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from lockstep.config import formatting
    from lockstep.data import parts, sampler
    from lockstep.data.dataset import Arrays, Batch, DataSet, Sound, add_arrays, is_pillow, leaves_of
    from lockstep.data.keyed import Generators
    from lockstep.data.sampler import Indices
    from lockstep.errors import DataChanged, UserError, did_you_mean, explain_os_error, raise_problems
    from lockstep.extras import testing
    from lockstep.extras.frozen import frozen
    from lockstep.machine import files, system, world
    from lockstep.reporting.report import Report
    from lockstep.training import losses, optim
    from lockstep.training.dropout import rand
    from lockstep.training.metrics import Measured
    from lockstep.training.module import Module

# What projects and lockstep.kit use. docs/python.md lists them.
__all__ = [
    "Arrays", "Batch", "DataChanged", "DataSet", "Generators", "Indices", "Measured", "Module", "Sound", "UserError", "add_arrays",
    "did_you_mean", "evaluate", "explain_os_error", "files", "formatting", "frozen", "is_pillow", "leaves_of", "load_model", "load_report", "losses",
    "optim", "parts", "predict", "raise_problems", "rand", "sampler", "sweep", "system", "testing", "train", "world",
]  # fmt: skip
__version__ = "0.3.0"

PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parents[1]  # the checkout, with train.py, configs/ and scripts/ next to src/; a wheel contains them
WHEEL = (PACKAGE / "template").is_dir()
# The project that new projects are copied from. Commands use it where there is no project.
TEMPLATE = PACKAGE / "template" if WHEEL else ROOT
CONFIGS = PACKAGE / "configs"
DOCS = (PACKAGE if WHEEL else ROOT) / "docs"  # the documentation of this version, in Markdown


# Where they are. Imported on first access: some need torch.
HOMES = {
    "config": ("formatting",),
    "data": ("parts", "sampler"),
    "data.dataset": ("Arrays", "Batch", "DataSet", "Sound", "add_arrays", "is_pillow", "leaves_of"),
    "data.keyed": ("Generators",),
    "data.sampler": ("Indices",),
    "errors": ("DataChanged", "UserError", "did_you_mean", "explain_os_error", "raise_problems"),
    "extras": ("testing",),
    "extras.frozen": ("frozen",),
    "machine": ("files", "system", "world"),
    "training": ("losses", "optim"),
    "training.dropout": ("rand",),
    "training.metrics": ("Measured",),
    "training.module": ("Module",),
}
LATER = {name: f"lockstep.{home}.{name}" for home, names in HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return pkgutil.resolve_name(LATER[name])


def train(overrides: list[str] | None = None) -> "Report":
    """Runs `python train.py <overrides>` from Python or a notebook and returns its report, as `load_report` does.

    Raises:
        UserError: the config or the input is invalid; nothing was started.
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
    """Runs `python predict.py <overrides>` from Python; returns `output` (the path of the table), `count` and `broken`.

    Raises the same errors as `train`.
    """
    from lockstep.launch.cli import call

    return call("predict", overrides)


def sweep(overrides: list[str]) -> list[dict[str, Any]]:
    """Runs `python train.py -m <overrides>` from Python; returns a row for each job: its report, with `overrides`.

    The row of a failed job has `status` and, if the job had started, `error`.

    Raises:
        UserError: an override is invalid; nothing was started.
        KeyboardInterrupt: Ctrl-C, which ends the whole sweep.
    """
    from lockstep.launch.cli import sweep

    return sweep(overrides)


def load_model(what: str | Path) -> "nn.Module":
    """The bare network of a run (a name or `runs/<name>`) or a checkpoint, with weights, on the CPU in evaluation mode.

    For a run, loads the checkpoint that was tested. If the task is your own LightningModule, returns that module.

    Raises:
        UserError: there is no such checkpoint, or it is damaged.
    """
    from lockstep.checkpoints.finding import tested_checkpoint
    from lockstep.machine import process

    with process.restore_process_state():
        path = tested_checkpoint(str(what), "load_model")
        from lockstep.build import load_module
        from lockstep.checkpoints.weights import read

        checkpoint = read(path)
        module = load_module(checkpoint)
        return module if checkpoint.network is None else getattr(module, "net", module)


def load_report(run: str | Path) -> "Report":
    """The report of a run (a name or `runs/<name>`): the dict of report.json.

    It also has `curves`, `panels`, `frame()` and `folder`. A notebook shows it as the page report.html. The report of
    an unfinished run contains the values so far.

    Raises:
        UserError: there is no such run, or one of its files is damaged.
    """
    from lockstep.reporting.report import Report
    from lockstep.run import find_run

    return Report(find_run(run, "runs", needs="report.json"))
