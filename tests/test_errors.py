"""One table says how each kind of error ends a run. Others show it of memory, lost processes and signals."""

import pytest

from lockstep.errors import RunFailed, UserError, outcome_of
from lockstep.extras.pruning import Pruned


class HTTPError(Exception):
    status = 404  # other libraries' errors have such attributes too
    exit_code = 7


@pytest.mark.parametrize(
    ("error", "status", "exit_code", "is_explained"),
    [
        (None, "done", 0, True),
        (UserError("wrong"), "refused", 2, True),
        (Pruned("no better"), "pruned", 1, True),
        (RunFailed("another process", 2), "refused", 2, True),
        (RunFailed("another process"), "failed", 1, True),
        (HTTPError("not found"), "failed", 1, False),
        (KeyboardInterrupt(), "interrupted", 130, False),
    ],
)
def test_how_a_run_ended(error, status, exit_code, is_explained):
    outcome = outcome_of(error)
    assert (outcome.status, outcome.exit_code, outcome.is_explained) == (status, exit_code, is_explained)
    assert outcome.error is None if error is None else outcome.error.startswith(type(error).__name__)
