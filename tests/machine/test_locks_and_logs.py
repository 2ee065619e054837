"""Every lock is one file of its own, and a log with hard links begins anew: what has other names keeps its content."""

import errno
import fcntl
import logging
import os
import resource
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from conftest import ROOT

from lockstep.errors import UserError
from lockstep.extras.prediction import lock_output
from lockstep.kit.cache import decode_once, one_download
from lockstep.machine import files
from lockstep.reporting.console import log_to_file
from lockstep.run import RunFolder

Within = Callable[[Path], AbstractContextManager[object]]


@contextmanager
def sweep(folder: Path):
    from lockstep.extras.study import StudySweeper

    inside = Mock(side_effect=InterruptedError)
    with suppress(InterruptedError):
        StudySweeper.sweep(SimpleNamespace(folder=folder, name="s", search_space=inside), [])
    inside.assert_called_once()
    yield


@contextmanager
def decoding(folder: Path):
    decode = Mock(return_value=({}, {}))
    decode_once(folder / "mnist", decode)
    decode.assert_called_once()
    yield


LOCKS: dict[str, tuple[Within, bool]] = {  # and whether a second process is refused, or waits
    "run": (lambda folder: RunFolder(folder).locked(0), True),
    "sweep": (sweep, True),
    "prediction": (lambda folder: lock_output(folder / "table.csv", overwrite=False), True),
    "cache": (decoding, False),
    "download": (lambda folder: one_download(folder, "mnist", Path("raw")), False),
}


@pytest.fixture(params=LOCKS)
def lock(request, tmp_path, monkeypatch) -> tuple[Callable[[], AbstractContextManager[object]], Path, bool]:
    """What holds it, the path of its file, and whether a second process is refused."""
    within, refuses = LOCKS[request.param]
    seen, whole = list[Path](), files.locked
    folder = tmp_path / "place"
    folder.mkdir()
    for module in ("machine.files", "extras.study", "extras.prediction"):
        monkeypatch.setattr(f"lockstep.{module}.locked", lambda path, *more: seen.append(path) or whole(path, *more))
    with within(tmp_path / "other"):
        pass
    return lambda: within(folder), folder / seen[0].relative_to(tmp_path / "other"), refuses


def test_the_hard_link_of_a_file_as_a_lock_keeps_its_content(lock, tmp_path):
    within, path, refuses = lock
    mine = tmp_path / "mine"
    mine.write_text("mine")
    os.link(mine, path)
    with within():
        pass
    assert mine.read_text() == "mine" and not path.exists()
    os.link(mine, path)
    with mine.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if refuses:
            with pytest.raises(UserError, match=r"in use|already|another prediction"), within():
                pass
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_lock_that_is_no_file_is_refused(kind, lock, tmp_path):
    within, path, _ = lock
    if kind == "link":
        path.symlink_to(tmp_path / "new")
    else:
        os.mkfifo(path)
    with pytest.raises(UserError, match=rf"{path.name} is a link, a pipe or a device"), within():
        pass
    assert not (tmp_path / "new").exists()


def test_a_disk_without_locks_leaves_none_for_ever_and_warns_of_nothing(lock, monkeypatch):
    within, path, _ = lock
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOSYS, "Function not implemented")))
    for _ in range(2):
        with warnings.catch_warnings(action="error"), within():
            pass
        assert not path.exists()
        for file in path.parent.rglob("about.json"):
            file.unlink()  # so it decodes again


def test_no_lock_is_made_anywhere_else():
    sources = (ROOT / "src").rglob("*.py")
    assert [path.name for path in sources if "FileLock" in path.read_text()] == ["files.py"]


def test_a_log_with_hard_links_begins_anew_without_a_copy(tmp_path):
    path, backup = tmp_path / "train.log", tmp_path / "backup"
    path.write_text("begun\n")
    os.truncate(path, 10 * 2**30)
    os.link(path, backup)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))  # as on a full disk
    try:
        with log_to_file(path):
            logging.getLogger("lockstep").info("continued")
            logging.getLogger("lockstep").info("x" * 2**17)  # which the disk does not take
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    first, *_ = path.read_text().splitlines()
    assert first.endswith("INFO continued")
    assert backup.stat().st_size == 10 * 2**30
    with backup.open("rb") as file:
        assert file.readline() == b"begun\n"


def test_rows_that_a_copy_shares_stay_in_both(tmp_path):
    folder = RunFolder(tmp_path)
    folder.metrics_log.append({"step": 1, "loss": 0.5})
    os.link(folder.metrics_log.path, tmp_path / "backup")
    folder.metrics_log.append({"step": 2, "loss": 0.25})
    assert (tmp_path / "backup").read_text().split() == ["step,loss", "1,0.5"]
    assert folder.metrics_log.path.read_text().split() == ["step,loss", "1,0.5", "2,0.25"]
