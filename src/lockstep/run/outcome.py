"""How a run ended. Decided here, from the exception, and nowhere else. Free of torch."""

from dataclasses import dataclass

from lockstep.errors import RunFailed, TrainingFailed, UserError


@dataclass(frozen=True)
class Outcome:
    status: str  # done, failed, refused, preempted, interrupted or pruned
    exit_code: int
    error: str | None = None
    is_explained: bool = True  # the message says everything: no traceback


def outcome_of(error: BaseException | None) -> Outcome:
    if error is None:
        return Outcome("done", 0)
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, UserError | TrainingFailed | RunFailed):
        return Outcome(error.status, error.exit_code, message)
    if isinstance(error, Exception):
        return Outcome("failed", 1, message, is_explained=False)
    return Outcome("interrupted", 130, message, is_explained=False)
