"""Lockstep's exceptions, and how each ends a run. UserErrors are for users to correct: exit code 2, no traceback."""

import difflib
from bdb import BdbQuit
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


class UserError(ValueError):
    """States the given value, the valid options and the fix. `problems` holds one message per problem."""

    status, exit_code = "refused", 2

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class UnsafeCheckpoint(UserError):
    """A checkpoint contains objects that could run code. No crash can cause this, so it is never skipped silently."""

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(f"{path} is not a checkpoint of Lockstep: it contains objects that could run code ({name}).")


class TrainingFailed(RuntimeError):
    """Training cannot continue, for a reason that needs no traceback."""

    status, exit_code = "failed", 1
    alike = False  # whether all processes raise the same error, so only rank 0 reports it

    def __init__(self, message: str, *, alike: bool | None = None) -> None:
        super().__init__(message)
        self.alike = self.alike if alike is None else alike


class Preempted(TrainingFailed):
    """The system announced that it will end the run. Everything that could be saved is saved."""

    status = "preempted"
    alike = True


class Interrupted(Preempted):
    """Ctrl-C; everything is saved."""

    status = "interrupted"
    exit_code = 130


class SaveFailed(TrainingFailed):
    """A checkpoint or a result could not be written; earlier ones are intact."""


class FolderRemoved(TrainingFailed):
    """The folder of a run was removed during the run."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"{folder} was removed during the run, or os.chdir left its parent. Start the run again.")


class DataChanged(TrainingFailed):
    """The dataset changed while the run was using it."""


class LossNotFinite(TrainingFailed):
    """The loss is NaN or infinite, in one process or in all."""

    status, alike = "diverged", True


class RendezvousFailed(TrainingFailed):
    """The processes of a run could not connect to each other."""


class ProcessDied(TrainingFailed):
    """A process of the run ended before it could report an error."""


class OutOfMemory(TrainingFailed):
    """Memory ran out."""


class RunFailed(RuntimeError):
    """A process of the run failed and has reported its error itself."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message, exit_code)  # both, so it can be pickled: a sweep's job may run in another process
        self.exit_code = exit_code
        self.status = "refused" if exit_code == 2 else "failed"

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Outcome:
    status: str  # done, failed, refused, preempted, interrupted or pruned
    exit_code: int
    error: str | None = None
    is_explained: bool = True  # the message explains the error, so no traceback is printed


def outcome_of(error: BaseException | None) -> Outcome:
    """How a run ended, given its exception. Decided only here."""
    if error is None:
        return Outcome("done", 0)
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, UserError | TrainingFailed | RunFailed):
        return Outcome(error.status, error.exit_code, message)
    if isinstance(error, Exception) and not isinstance(error, BdbQuit):  # `quit` in the debugger is an interrupt
        return Outcome("failed", 1, message, is_explained=False)
    return Outcome("interrupted", 130, message, is_explained=False)


def raise_problems(problems: Iterable[str]) -> None:
    """Raises one UserError for all `problems`, or returns if there are none."""
    unique = list(dict.fromkeys(problems))
    if unique:
        raise UserError(*unique)


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, its cause or context, the cause of that, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """A hint for the end of a message: the most similar of `names`, if one is similar."""
    candidates = list(names)
    same = [each for each in candidates if each.lower() == name.lower()]
    close = same or difflib.get_close_matches(name, candidates)
    if len(name) < 5:  # dpp is ddp with one wrong letter, rather than dp with one more
        close.sort(key=lambda each: len(each) != len(name))
    return f" (did you mean {close[0]}?)" if close else ""


@contextmanager
def explain_os_error(what: str, advice: str) -> Iterator[None]:
    """Raises UserError in place of an OSError, such as an unreadable folder or a full disk."""
    try:
        yield
    except OSError as e:
        name = f"{e.filename}: " if e.filename and str(e.filename) not in what else ""
        raise UserError(f"{what}: {name}{e.strerror or ' '.join(map(str, e.args))}. {advice}") from None
