"""Files are written whole or not at all."""

import json
import subprocess
import sys

import pytest

from lockstep.machine import files


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_reader_sees_the_old_file_until_the_new_one_is_whole_and_an_error_keeps_it(tmp_path):
    path = tmp_path / "report.json"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), files.replacing(path) as part:
        part.write_text("half of")
        raise KeyboardInterrupt
    assert (names(tmp_path), path.read_text()) == (["report.json"], "old")
    with files.replacing(path) as part:
        part.write_text("new")
        assert path.read_text() == "old"
    assert (names(tmp_path), path.read_text()) == (["report.json"], "new")


def test_a_kill_keeps_the_old_file_and_the_next_write_leaves_no_part(tmp_path):
    path = tmp_path / "report.json"
    files.write_text(path, "old")
    killed = (
        "import os, pathlib, signal; from lockstep.machine import files\n"
        f"with files.replacing(pathlib.Path({str(path)!r})) as part:\n"
        "    part.write_text('half of'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", killed], check=False).returncode == -9
    assert path.read_text() == "old"
    files.write_text(path, "new")
    assert (names(tmp_path), path.read_text()) == (["report.json"], "new")


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    folder = tmp_path / "cache"
    (tmp_path / "cache.part").mkdir()
    (tmp_path / "cache.part" / "old").touch()  # of a process that was killed
    with pytest.raises(KeyboardInterrupt), files.replacing(folder) as part:
        part.mkdir()
        raise KeyboardInterrupt
    assert names(tmp_path) == []
    with files.replacing(folder) as part:
        part.mkdir()
        (part / "new").touch()
        assert not folder.exists()
    assert (names(tmp_path), names(folder)) == (["cache"], ["new"])


def test_json_has_no_numbers_that_json_lacks(tmp_path):
    files.write_json(tmp_path / "report.json", {"a": float("nan"), "b": float("inf"), "c": 1.5, "d": None})
    assert json.loads((tmp_path / "report.json").read_text()) == {"a": None, "b": None, "c": 1.5, "d": None}
