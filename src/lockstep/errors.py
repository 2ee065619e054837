"""The one exception for what a user can put right; it ends the command with exit code 2 and no traceback."""

import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

ENTRY_SCRIPTS = ("train.py", "eval.py")


class UserError(ValueError):
    """Says what was given, what is possible and what to type. `problems` holds one sentence or more for each."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class TrainingFailed(RuntimeError):
    """Training cannot go on, for a reason that needs no traceback; exit code 1."""


class Preempted(TrainingFailed):
    """The system has warned that it is going to end the run; everything is saved."""

    status = "preempted"  # in report.json


class NotSaved(TrainingFailed):
    """A checkpoint could not be written; those before it are as they were."""


class Pruned(TrainingFailed):
    """A sweep has given up this trial."""

    status = "pruned"


class OutOfMemory(TrainingFailed):
    """Memory ran out. `accumulate` is the trainer.accumulate_grad_batches to go on with; None where no number helps."""

    def __init__(self, message: str, accumulate: int | None = None) -> None:
        super().__init__(message, accumulate)  # both, for pickle: a job of a sweep may run elsewhere
        self.accumulate = accumulate

    def __str__(self) -> str:
        return str(self.args[0])


class RunFailed(RuntimeError):
    """A process of the run ended with an error that it has reported itself."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message, exit_code)  # both, for pickle: a job of a sweep may run elsewhere
        self.exit_code = exit_code

    def __str__(self) -> str:
        return str(self.args[0])


def raise_problems(problems: Iterable[str]) -> None:
    """Raises one UserError for all `problems`, or returns when there are none."""
    found = list(dict.fromkeys(problems))
    if found:
        raise UserError(*found)


def of_users_code(error: BaseException) -> bool:
    """Whether code that is neither Lockstep's nor an installed package's takes part in an error: a bug to be shown, not a
    refusal to be explained."""
    if "Original Traceback" in str(error):  # torch's words for an error in a process that loads data
        return not isinstance(error, UserError)
    known = [str(Path(__file__).parent), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))]
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    own = [name for name in frames if not name.startswith("<") and not any(name.startswith(place) for place in known)]
    return any(Path(name).name not in ENTRY_SCRIPTS for name in own) and not isinstance(error, UserError)
