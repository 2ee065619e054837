"""Which checkpoint a run goes on from: the newest that is whole, of one file or of shards."""

import os
import zipfile
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.checkpoints import finding, weights
from lockstep.checkpoints.finding import checkpoints, is_checkpoint, step_of
from lockstep.checkpoints.weights import PLACEHOLDER, row_range, rows_between
from lockstep.errors import UserError
from lockstep.machine import files

CONTENT = {"epoch": 3, "global_step": 70_000, "state_dict": {"net.w": torch.arange(5000.0)}}


def sharded_folder(folder: Path, world: int) -> Path:
    """As `world` processes leave it; without any, since no tensor is sharded here."""
    folder.mkdir(parents=True)
    for rank in range(world):
        weights.save(CONTENT, {}, folder, rank, world)
    return folder


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("file") / "whole.ckpt"
    weights.write(CONTENT, path)
    assert step_of(path) == CONTENT["global_step"]
    return path.read_bytes()


@pytest.fixture
def run(tmp_path) -> Path:
    (tmp_path / "checkpoints").mkdir()
    return tmp_path


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_that_is_cut_off_or_has_a_flipped_bit_in_a_tensor_is_not_whole(data, file, tmp_path):
    path = tmp_path / "a.ckpt"
    path.write_bytes(file)
    assert is_checkpoint(path)
    path.write_bytes(file[: data.draw(st.integers(0, len(file) - 1))])
    assert not is_checkpoint(path)
    place = file.index(torch.arange(100.0).numpy().tobytes()) + data.draw(st.integers(0, 4 * 5000 - 1))
    damaged = bytearray(file)
    damaged[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(damaged)
    assert not is_checkpoint(path)


def test_no_flipped_bit_of_the_table_of_contents_gives_other_values(tmp_path):
    path, small = tmp_path / "flipped.ckpt", {"global_step": 7, "w": torch.arange(6.0)}
    weights.write(small, path)
    whole, seen = path.read_bytes(), set()

    def same(found: dict) -> bool:
        return found.keys() == small.keys() and found["global_step"] == 7 and torch.equal(found["w"], small["w"])

    for place in range(whole.index(b"PK\1\2"), len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        try:
            outcome = "skipped" if not is_checkpoint(path) else "right" if same(weights.load(path)) else "wrong"
        except UserError as e:
            outcome = "named" if str(path) in str(e) else "wrong"
        seen.add(outcome)
    assert seen == {"skipped", "right", "named"}


def test_what_is_something_else_is_no_checkpoint(tmp_path):
    (tmp_path / "empty.ckpt").touch()
    (tmp_path / "text.ckpt").write_bytes(b"PK is how zip files begin")
    with zipfile.ZipFile(tmp_path / "bomb.ckpt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1_000_000))
    (tmp_path / "zero.ckpt").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "fifo.ckpt")
    for folder in ("shards.ckpt", "strange.ckpt"):
        (tmp_path / folder).mkdir()
    (tmp_path / "strange.ckpt/shard-x-of-y.pt").touch()
    for name in ("shard-00000-of-00001.pt", "rest.pt"):
        os.mkfifo(tmp_path / "shards.ckpt" / name)
    found = [*tmp_path.iterdir(), tmp_path / "absent.ckpt"]
    assert [path.name for path in found if is_checkpoint(path)] == []


@pytest.mark.parametrize("world", [1, 2, 11])
def test_shards_are_whole_when_all_of_them_are(world, tmp_path):
    folder = sharded_folder(tmp_path / "a.ckpt", world)
    assert is_checkpoint(folder)
    assert torch.equal(weights.load(folder)["state_dict"]["net.w"], CONTENT["state_dict"]["net.w"])
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        assert not is_checkpoint(folder), path
        path.unlink()
        assert not is_checkpoint(folder), path
        path.write_bytes(whole)
    assert is_checkpoint(folder)


def test_the_one_with_most_steps_is_taken_and_damaged_ones_are_told(run, file, capsys, monkeypatch):
    for name, step in (("last.ckpt", 500), ("best-step-40.ckpt", 40), ("best-step-700.ckpt", 700), ("mine.ckpt", 9000)):
        weights.write(CONTENT | {"global_step": step}, run / "checkpoints" / name)
    os.utime(run / "checkpoints" / "best-step-700.ckpt", (1, 1))  # times of files say nothing
    (run / "checkpoints" / "last.ckpt.part").write_bytes(file)
    names = [path.name for path in checkpoints(run)]
    assert names == ["best-step-700.ckpt", "last.ckpt", "best-step-40.ckpt"]
    assert capsys.readouterr().err == ""
    path = run / "checkpoints" / "best-step-700.ckpt"
    path.write_bytes(path.read_bytes()[:500])
    assert [path.name for path in checkpoints(run)] == names[1:]
    assert capsys.readouterr().err == f"WARNING: {path} is incomplete or a link, and is skipped.\n"
    read = Mock(wraps=is_checkpoint)
    monkeypatch.setattr(finding, "is_checkpoint", read)
    os.mkfifo(run / "checkpoints" / "best-step-8000.ckpt")  # whose opening would wait for ever
    with zipfile.ZipFile(run / "checkpoints" / "best-step-9000.ckpt", "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("archive/data.pkl", bytes(10**8))
    assert next(checkpoints(run)).name == "last.ckpt"
    assert read.call_count == 1  # checksums of gigabytes: not of those that nobody asks for


@pytest.mark.parametrize("form", ["file", "shards"])
def test_shards_that_were_being_replaced_are_found(form, run, file, capsys):
    """By a checkpoint of either form, which then takes their place."""
    folder = run / "checkpoints"
    sharded_folder(folder / "last.ckpt.old", 2)
    new = folder / "last.ckpt.part"
    new.write_bytes(file) if form == "file" else sharded_folder(new, 2)
    assert [path.name for path in checkpoints(run)] == ["last.ckpt.old"]
    if form == "file":
        (folder / "last.ckpt.old").rename(folder / "last.ckpt")  # as LastCheckpoint.tidy does
    files.take_place(new, folder / "last.ckpt")
    assert [path.name for path in folder.iterdir()] == [path.name for path in checkpoints(run)] == ["last.ckpt"]
    assert (folder / "last.ckpt").is_dir() == (form == "shards")
    assert capsys.readouterr().err == ""


@pytest.mark.filterwarnings("ignore")  # of torch, about TorchScript
@pytest.mark.parametrize("kind", ["object", "script"])
def test_a_file_that_could_run_code_is_refused_without_torchs_advice_to_run_it(tmp_path, kind):
    path = tmp_path / "hostile.ckpt"
    torch.save({**CONTENT, "config": {}, "x": Path("x") if kind == "object" else 1}, path)
    if kind == "script":
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("hostile/constants.pkl", b"")  # by which torch tells TorchScript
    with pytest.raises(UserError, match=r"it contains objects that could run code") as error:
        weights.load(path)
    assert "weights_only" not in str(error.value)


# --- The arithmetic of shards: any number of processes reads what any other number has written ---

WORLDS = st.integers(1, 9)


@settings(max_examples=200, deadline=None)
@given(rows=st.integers(1, 40), wrote=WORLDS, reads=WORLDS)
def test_each_process_gets_its_rows_whoever_wrote_them(rows, wrote, reads):
    tensor = torch.arange(rows * 6.0).view(rows, 2, 3)
    written = [row_range(rows, rank, wrote) for rank in range(wrote)]
    shards = [{"first": a, "shape": list(tensor.shape), "rows": tensor[a:b]} for a, b in written]
    mine = [rows_between(shards, *row_range(rows, rank, reads)) for rank in range(reads)]
    chunks = [*tensor.chunk(reads), *[tensor[:0]] * reads]  # as torch divides a tensor
    assert all(torch.equal(own, chunk) for own, chunk in zip(mine, chunks, strict=False))


# --- Parts of a checkpoint that do not belong together ---


def two_shards(folder: Path, step: int) -> Path:
    """Five rows of one tensor, as two processes save them."""
    folder.mkdir()
    tensor, content = torch.arange(10.0).view(5, 2), {"global_step": step, "w": PLACEHOLDER + "w"}
    for rank in range(2):
        begin, end = row_range(5, rank, 2)
        shard = {"first": begin, "shape": [5, 2], "rows": tensor[begin:end].clone()}
        weights.save(content, {PLACEHOLDER + "w": shard}, folder, rank, 2)
    return folder


def test_shards_are_placed_by_their_records(tmp_path):
    a, b = (two_shards(tmp_path / name, step=step) for name, step in (("a", 7), ("b", 8)))
    first, second = finding.shard_files(a)
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    assert torch.equal(weights.load(a)["w"], torch.arange(10.0).view(5, 2))
    second.write_bytes(contents[1])
    with pytest.raises(UserError, match="a is damaged: its shards do not fit together"):
        weights.load(a)
    first.write_bytes(finding.shard_files(b)[0].read_bytes())
    with pytest.raises(UserError, match=r"shard-00000-of-00002\.pt is of a different step than rest\.pt"):
        weights.load(a)


def test_a_link_to_itself_is_no_checkpoint(tmp_path):
    link = tmp_path / "bad.ckpt"
    link.symlink_to(link)
    with pytest.raises(UserError, match=r"checkpoint=.*bad\.ckpt does not exist"):
        finding.locate_checkpoint(str(link), "checkpoint", str(tmp_path), finding.newest_checkpoint)
