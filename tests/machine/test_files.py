"""Files are written whole or not at all."""

import json
import os
import subprocess
import sys

import pytest

from lockstep.machine import files


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_reader_sees_the_old_file_until_the_new_one_is_whole_and_an_error_keeps_it(tmp_path):
    path = tmp_path / "report.json"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), files.atomic_replace(path) as part:
        part.write_text("half of")
        raise KeyboardInterrupt
    assert (names(tmp_path), path.read_text()) == (["report.json"], "old")
    with files.atomic_replace(path) as part:
        part.write_text("new")
        assert path.read_text() == "old"
    assert (names(tmp_path), path.read_text()) == (["report.json"], "new")


def test_a_kill_keeps_the_old_file_and_a_write_a_day_later_leaves_no_part(tmp_path):
    path = tmp_path / "report.json"
    files.write_text(path, "old")
    killed = (
        "import os, pathlib, signal; from lockstep.machine import files\n"
        f"with files.atomic_replace(pathlib.Path({str(path)!r})) as part:\n"
        "    part.write_text('half of'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", killed], check=False).returncode == -9
    assert path.read_text() == "old"
    files.write_text(path, "new")
    (part,) = (path for path in tmp_path.iterdir() if path.suffix == ".part")
    assert path.read_text() == "new", "a part that another process may be writing stays"
    for place in (part / "report.json", part):
        os.utime(place, (1, 1))
    files.write_text(path, "new")
    assert names(tmp_path) == ["report.json"]


def test_only_parts_of_ours_are_removed(tmp_path):
    mine = [
        "report.json.part",
        "report.json.parts",
        "report.json.old",
        ".report.json.part",
        ".lockstep-notes.part",
        ".lockstep-a.part",
    ]
    for name in mine:
        (tmp_path / name).mkdir()
        (tmp_path / name / "kept").touch()
    (tmp_path / ".lockstep-01234567.part").symlink_to(tmp_path / "report.json.part")
    (tmp_path / ".lockstep-12345678.part").touch()  # no folder
    files.remove_parts(tmp_path, age_s=0)
    files.write_text(tmp_path / "report.json", "new")
    assert names(tmp_path) == sorted([*mine, ".lockstep-01234567.part", ".lockstep-12345678.part", "report.json"])
    assert all((tmp_path / name / "kept").exists() for name in mine)


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    folder = tmp_path / "cache"
    with pytest.raises(KeyboardInterrupt), files.atomic_replace(folder) as part:
        part.mkdir()
        raise KeyboardInterrupt
    assert names(tmp_path) == []
    with files.atomic_replace(folder) as part:
        part.mkdir()
        (part / "new").touch()
        assert not folder.exists()
    assert (names(tmp_path), names(folder)) == (["cache"], ["new"])


def test_json_has_no_numbers_that_json_lacks(tmp_path):
    files.write_json(tmp_path / "report.json", {"a": float("nan"), "b": float("inf"), "c": 1.5, "d": None})
    assert json.loads((tmp_path / "report.json").read_text()) == {"a": None, "b": None, "c": 1.5, "d": None}


def test_a_file_never_replaces_a_folder(tmp_path):
    for name in ("docs", "docs.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kept").touch()
    for write in (
        lambda: files.write_text(tmp_path / "docs", "x"),
        lambda: files.write_csv(tmp_path / "docs", ["a"], []),
    ):
        with pytest.raises(IsADirectoryError):
            write()
    assert (names(tmp_path), names(tmp_path / "docs"), names(tmp_path / "docs.old")) == (["docs", "docs.old"], ["kept"], ["kept"])  # fmt: skip
    with files.atomic_replace(tmp_path / "docs", over_folder=True) as part:  # a checkpoint over one in shards
        part.touch()
    assert (names(tmp_path), (tmp_path / "docs").is_file()) == (["docs"], True)


def test_tables_are_utf_8_and_take_any_name(tmp_path):
    files.write_csv(tmp_path / "a.csv", ["name"], [{"name": "é\udcff"}])
    assert (tmp_path / "a.csv").read_bytes() == "name\r\né\\udcff\r\n".encode()
