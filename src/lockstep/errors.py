"""The one exception for what a user can put right; it ends the command with exit code 2 and no traceback."""

from collections.abc import Iterable


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
