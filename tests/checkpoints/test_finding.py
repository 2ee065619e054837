"""Which checkpoint a run goes on from: the newest that is whole, of one file or of shards."""

import os
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.checkpoints import sharded
from lockstep.checkpoints.finding import checkpoints, is_checkpoint, step_of
from lockstep.checkpoints.sharded import open_file
from lockstep.errors import UserError
from lockstep.machine import files

CONTENT = {"epoch": 3, "global_step": 70_000, "state_dict": {"net.w": torch.arange(5000.0)}}


def sharded_folder(folder: Path, world: int) -> Path:
    """As `world` processes leave it; without any, since no tensor is sharded here."""
    folder.mkdir(parents=True)
    for rank in range(world):
        sharded.save(CONTENT, {}, folder, rank, world)
    return folder


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("file") / "whole.ckpt"
    sharded.write(CONTENT, path)
    return path.read_bytes()


@pytest.fixture
def run(tmp_path) -> Path:
    (tmp_path / "checkpoints").mkdir()
    return tmp_path


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_that_is_cut_off_anywhere_is_not_whole(data, file, tmp_path):
    path = tmp_path / "cut.ckpt"
    path.write_bytes(file[: data.draw(st.integers(0, len(file) - 1))])
    assert not is_checkpoint(path)
    path.write_bytes(file)
    assert is_checkpoint(path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_bit_in_a_tensor_is_seen(data, file, tmp_path):
    begin = file.index(torch.arange(100.0).numpy().tobytes())
    place = begin + data.draw(st.integers(0, 4 * 5000 - 1))
    damaged = bytearray(file)
    damaged[place] ^= 1 << data.draw(st.integers(0, 7))
    (tmp_path / "damaged.ckpt").write_bytes(damaged)
    assert not is_checkpoint(tmp_path / "damaged.ckpt")


def test_no_flipped_bit_of_the_table_of_contents_gives_other_values(tmp_path):
    path, small = tmp_path / "flipped.ckpt", {"global_step": 7, "w": torch.arange(6.0)}
    sharded.write(small, path)
    whole, seen = path.read_bytes(), set()
    for place in range(whole.index(b"PK\1\2"), len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        try:
            outcome = "skipped" if not is_checkpoint(path) else "right" if same(open_file(path), small) else "wrong"
        except UserError as e:
            outcome = "named" if str(path) in str(e) else "wrong"
        seen.add(outcome)
    assert seen == {"skipped", "right", "named"}


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and a["global_step"] == b["global_step"] and torch.equal(a["w"], b["w"])


def test_what_is_something_else_is_no_checkpoint(tmp_path):
    assert not is_checkpoint(tmp_path / "absent.ckpt")
    for name, content in (("empty.ckpt", b""), ("text.ckpt", b"PK is how zip files begin")):
        (tmp_path / name).write_bytes(content)
        assert not is_checkpoint(tmp_path / name)
    (tmp_path / "folder.ckpt").mkdir()
    (tmp_path / "folder.ckpt" / "shard-x-of-y.pt").touch()
    assert not is_checkpoint(tmp_path / "folder.ckpt")


@pytest.mark.parametrize("world", [1, 2, 11])
def test_shards_are_whole_when_all_of_them_are(world, tmp_path):
    folder = sharded_folder(tmp_path / "a.ckpt", world)
    assert is_checkpoint(folder)
    assert torch.equal(sharded.load(folder)["state_dict"]["net.w"], CONTENT["state_dict"]["net.w"])
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        assert not is_checkpoint(folder), path
        path.unlink()
        assert not is_checkpoint(folder), path
        path.write_bytes(whole)
    assert is_checkpoint(folder)


@pytest.mark.parametrize("step", [0, 7, 255, 256, 70_000, 2**31 + 5])
def test_the_steps_of_a_checkpoint_are_read_without_loading_it(step, tmp_path):
    sharded.write(CONTENT | {"global_step": step}, tmp_path / "a.ckpt")
    assert step_of(tmp_path / "a.ckpt") == step
    sharded.write({"state_dict": {}}, tmp_path / "b.ckpt")
    assert step_of(tmp_path / "b.ckpt") == -1


def test_the_one_with_most_steps_is_taken_and_damaged_ones_are_told(run, file, capsys):
    for name, step in (("last.ckpt", 500), ("best-step-40.ckpt", 40), ("best-step-700.ckpt", 700), ("mine.ckpt", 9000)):
        sharded.write(CONTENT | {"global_step": step}, run / "checkpoints" / name)
    os.utime(run / "checkpoints" / "best-step-700.ckpt", (1, 1))  # times of files say nothing
    (run / "checkpoints" / "last.ckpt.part").write_bytes(file)
    names = [path.name for path in checkpoints(run)]
    assert names == ["best-step-700.ckpt", "last.ckpt", "best-step-40.ckpt"]
    assert capsys.readouterr().err == ""
    path = run / "checkpoints" / "best-step-700.ckpt"
    path.write_bytes(path.read_bytes()[:500])
    assert [path.name for path in checkpoints(run)] == names[1:]
    assert capsys.readouterr().err == f"WARNING: {path} is incomplete and is skipped.\n"


def test_shards_that_were_being_replaced_are_found(run, capsys):
    folder = run / "checkpoints"
    sharded_folder(folder / "last.ckpt.old", 2)
    sharded_folder(folder / "last.ckpt.part", 2)
    assert [path.name for path in checkpoints(run)] == ["last.ckpt.old"]
    files.take_place(folder / "last.ckpt.part", folder / "last.ckpt")
    assert sorted(path.name for path in folder.iterdir()) == ["last.ckpt"]
    assert [path.name for path in checkpoints(run)] == ["last.ckpt"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("before", ["nothing", "file", "shards"])
@pytest.mark.parametrize("after", ["file", "shards"])
def test_a_checkpoint_takes_the_place_of_another_of_either_form(before, after, run, file):
    folder = run / "checkpoints"
    path, part = folder / "last.ckpt", folder / "last.ckpt.part"
    for what, where in ((before, path), (after, part)):
        if what == "file":
            where.write_bytes(file)
        if what == "shards":
            sharded_folder(where, 2)
    files.take_place(part, path)
    assert sorted(p.name for p in folder.iterdir()) == ["last.ckpt"]
    assert path.is_dir() == (after == "shards")
    assert is_checkpoint(path)
    shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.filterwarnings("ignore")  # of torch, about TorchScript
@pytest.mark.parametrize("kind", ["object", "script"])
def test_a_file_that_could_run_code_is_refused_without_torchs_advice_to_run_it(tmp_path, kind):
    path = tmp_path / "hostile.ckpt"
    torch.save({**CONTENT, "config": {}, "x": Path("x") if kind == "object" else 1}, path)
    if kind == "script":
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("hostile/constants.pkl", b"")  # by which torch tells TorchScript
    with pytest.raises(UserError, match=r"it holds objects that could run code") as error:
        open_file(path)
    assert "weights_only" not in str(error.value)
