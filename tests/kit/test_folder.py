"""A folder of image files: which are found, how they are divided, how they are decoded, and what is rejected."""

import io
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from pictures import COLOURS, picture, write_classes, write_pictures
from PIL import Image

from lockstep import Arrays
from lockstep.data.splits import splits
from lockstep.errors import UserError
from lockstep.kit import folder
from lockstep.kit.augment import RandomResizedCrop
from lockstep.kit.folder import Folder
from lockstep.kit.images import Files, Packed
from lockstep.kit.pixels import Frame, to_array

PLACES = np.arange(4)


@pytest.fixture
def root(tmp_path) -> Path:
    return write_classes(tmp_path / "photos", 20)


def made(root: Path, **changes) -> Folder:
    return Folder(root=str(root), **{"image_size": 8, "cache_dir": str(root.parent / "cache"), **changes})


def sizes(data: Folder) -> list[int]:
    return [len(data.train), len(data.val), len(data.test)]


def content(samples) -> list[tuple]:
    """The samples of a part as values that can be compared."""
    everything = samples.__getitems__(np.arange(len(samples)))
    return [(i.tobytes(), t.tobytes()) for i, t in zip(everything["input"], everything["target"], strict=True)]


# --- which files ---


def counts(data: Folder) -> list[list[int]]:
    """The images of each class, by part."""
    return [np.bincount(part[np.arange(len(part))]["target"]).tolist() for part in (data.train, data.val, data.test)]


def test_a_part_of_every_class_is_held_out_as_long_as_it_lasts(root, tmp_path):
    data = made(root)
    data.prepare()
    assert (data.notice, data.data_info) == (None, {"skipped": 0, "left_out": None})
    assert counts(data) == [[16] * 3, [2] * 3, [2] * 3]
    assert len({sample for part in (data.train, data.val, data.test) for sample in content(part)}) == 60
    write_pictures(root / "green", "green", 40)
    assert counts(made(root, test_fraction=0.3, val_fraction=0.5)) == [[7, 14, 7], [7, 14, 7], [6, 12, 6]]
    for colour, count in zip(COLOURS, (1, 2, 3), strict=True):
        write_pictures(tmp_path / "few" / colour, colour, count)
    assert counts(made(tmp_path / "few")) == [[1, 1, 1], [0, 0, 1], [0, 1, 1]]


def test_images_are_found_at_any_depth_and_what_is_no_image_is_ignored(root):
    write_pictures(root / "red" / "2024" / "may", "red", 4)
    write_pictures(root / ".thumbnails", "red", 4)
    (root / "red" / "notes.txt").write_text("mine")
    (root / "red" / "._1.jpg").write_bytes(b"of a Mac")
    (root / "red" / "0.png").rename(root / "red" / "0.PNG")
    data = made(root)
    assert sum(sizes(data)) == 64
    assert data.metadata["classes"] == list(COLOURS)


def test_with_folds_the_engine_divides_train_and_nothing_else_is_held_out(root):
    for decode in ("cache", "workers"):
        data = made(root, folds=3, decode=decode)
        assert (len(data.train), data.val, len(data.test)) == (54, None, 6)
        assert content(data.test) == content(made(root).test)


@pytest.mark.parametrize("name", ["val", "valid", "validation", None])
def test_parts_are_taken_as_they_are_and_a_missing_one_from_train(tmp_path, name):
    root = tmp_path / "divided"
    for part, count in (("train", 10), (name, 5), ("test", 7)):
        if part:
            write_classes(root / part, count)
    (root / "notes").mkdir()
    assert sizes(made(root)) == ([30, 15, 21] if name else [27, 3, 21])
    if name:
        with pytest.raises(UserError, match=r"its own validation part. Remove loader.folds, or that part"):
            splits(made(root, folds=3), batch_size=2, folds=3)


@pytest.mark.parametrize(("change", "message"), [
    (lambda root: (root / "empty").mkdir(), r"photos/empty contains no images .*Remove it"),
    (lambda root: [(root / name).rename(root.parent / name) for name in ("red", "blue")], r"needs one folder of images per class, and at least two classes"),
    (lambda root: root.rename(root.parent / "x"), r"photos does not exist. Set data.root="),
    (lambda root: (root / "test").mkdir(), r"has test/ but no train/. Move the training classes into .*photos/train"),
    (lambda root: [write_classes(root / "train", 3), write_pictures(root / "test" / "rde", "red", 3)],
     r"no training image of class rde"),
    (lambda root: [write_classes(root / name, 2) for name in ("train", "val", "validation")],
     r"photos has val and validation, which both mean the val part. Merge them."),
])  # fmt: skip
def test_a_folder_that_is_not_as_it_should_be_is_rejected(root, change, message):
    change(root)
    with pytest.raises(UserError, match=message):
        made(root).prepare()


# --- a CSV ---


def listed(root: Path, rows: list[str], header: str = "path,target") -> Path:
    (root / "labels.csv").write_text("\n".join([header, *rows]) + "\n", encoding="utf-8-sig")
    return root


def paths(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*.*") if path.suffix != ".csv")


def test_a_csv_gives_several_labels_or_a_number_and_says_the_part(root):
    words = {"red": "warm|bright", "green": " cold ; bright", "blue": ""}
    rows = [f"{path},{words[path.split('/')[0]]}" for path in paths(root)]
    data = made(listed(root, rows), csv="labels.csv", target="labels")
    assert data.metadata["labels"] == ["bright", "cold", "warm"]
    targets = data.train.__getitems__(np.arange(len(data.train)))["target"]
    assert targets.dtype == np.float32
    assert {tuple(row) for row in targets} == {(1, 0, 1), (1, 1, 0), (0, 0, 0)}
    parts = ["train"] * 50 + ["valid"] * 6 + ["test"] * 4
    rows = [f"{path},{place / 4},{part}" for place, (path, part) in enumerate(zip(paths(root), parts, strict=True))]
    data = made(listed(root, rows, "path,target,split"), csv="labels.csv", target="number")
    assert (sizes(data), data.metadata["targets"], data.metadata["classes"]) == ([50, 6, 4], ["target"], [])
    assert data.test.__getitems__(PLACES)["target"].tolist() == [[14.0], [14.25], [14.5], [14.75]]


@pytest.mark.parametrize(("rows", "header", "target", "message"), [
    (["red/0.png,red"], "image,label", "class", r"has no column path and no column target; it has image, label"),
    (["red/0.png,red", "../x.png,red"], "path,target", "class", r"line 3: path=../x.png is outside"),
    (["/etc/passwd,red"], "path,target", "class", r"line 2: path=/etc/passwd is outside"),
    (["red/0.png,red,tset"], "path,target,split", "class", r"line 2: split=tset is unknown; use one of train, val"),
    (["red/0.png,red,test"], "path,target,split", "class", r"no row with split=train"),
    (["red/0.png,1", "red/1.jpg,nan"], "path,target", "number", r"line 3: target=nan is not a number"),
    (["red/0.png,red", "red/1.jpg,red"], "path,target", "class", r"has only one class, red"),
    (["red/0.png,a,train", "red/1.jpg,b,test", "red/2.png,a,val"], "path,target,split", "class", r"no training image of class b"),
    ([], "path,target", "class", r"lists no images"),
    (None, "", "class", r"photos/labels.csv does not exist. data.csv is a file in data.root"),
    (["red/0.png,1", "red/1.jpg,2"], "path,target", "number", r"2 images: too few for a val part"),
])  # fmt: skip
def test_a_csv_that_is_wrong_is_rejected(root, rows, header, target, message):
    if rows is not None:
        listed(root, rows, header)
    with pytest.raises(UserError, match=message):
        made(root, csv="labels.csv", target=target).prepare()


# --- decoding ---


@pytest.mark.parametrize("channels", [1, 3])
def test_cache_and_workers_give_the_same_pixels(root, channels, monkeypatch):
    cached = made(root, channels=channels)
    assert isinstance(cached.train, Arrays)
    monkeypatch.setattr(folder, "CACHE_BYTES", 60 * channels * 8 * 8 - 1)  # beyond, workers decode
    read = made(root, channels=channels)
    assert (type(read.train), read.bytes_in_memory) == (Files, None)
    for part in ("train", "val", "test"):
        assert content(getattr(cached, part)) == content(getattr(read, part))
    assert read.train.__getitems__(PLACES)["input"].shape == (4, channels, 8, 8)
    assert cached.fingerprint == read.fingerprint
    assert content(pickle.loads(pickle.dumps(read.train))) == content(read.train)


@pytest.mark.parametrize("decode", ["auto", "cache", "workers"])
@pytest.mark.parametrize("room", [60, 59, 0], ids=["all", "all but train", "none"])
@pytest.mark.parametrize("crops", [False, True])
def test_an_evaluation_reads_what_training_has_stored(root, decode, room, crops, monkeypatch):
    monkeypatch.setattr(folder, "CACHE_BYTES", room * 3 * 8 * 8)
    trained, evaluated = (made(root, decode=decode, presize=None if decode == "cache" else 2) for _ in range(2))
    trained.operations, evaluated.evaluates = {"crop": RandomResizedCrop(image_size=8)} if crops else {}, True
    parts = {part for part, form in trained.stored.items() if isinstance(form, Frame)}
    held = {"val", "test"} if room and decode != "workers" else set()
    is_train = decode == "cache" or (decode == "auto" and room == 60 and not crops)
    assert parts == ({"val", "test"} if decode == "cache" else held) | ({"train"} if is_train else set())
    assert evaluated.stored == {**trained.stored, "train": None}


def test_files_are_read_once_until_one_changes(root, tmp_path, monkeypatch):
    first = made(root).fingerprint
    monkeypatch.setattr(folder, "read_all", None)
    assert made(root).fingerprint == first
    assert len(list((tmp_path / "cache").glob("folder-*[0-9a-f]"))) == 3  # one of each part
    monkeypatch.undo()
    path = root / "red" / "0.png"
    later_ns = path.stat().st_mtime_ns + 10**9
    os.utime(path, ns=(later_ns, later_ns))  # the same content at another time
    assert made(root).fingerprint == first
    picture(COLOURS["blue"], 7).save(path)
    assert made(root).fingerprint != first
    picture(COLOURS["red"], 3).save(path)
    (root / "red").rename(root / "rot")  # a class of a different name is different data
    assert made(root).fingerprint != first


def test_a_large_jpeg_is_nearly_what_it_is_without_its_own_scaling(tmp_path):
    random = np.random.default_rng(0)
    small = Image.fromarray(random.integers(0, 255, (15, 20, 3), dtype=np.uint8))
    small.resize((800, 600), Image.Resampling.BICUBIC).save(tmp_path / "a.jpg", quality=95)
    full = Image.open(tmp_path / "a.jpg").convert("RGB").resize((64, 64), Image.Resampling.BILINEAR)
    scaled = to_array(Image.open(tmp_path / "a.jpg"), channels=3, frame=Frame(64))
    assert np.abs(scaled.astype(int) - np.asarray(full).transpose(2, 0, 1)).mean() < 1


def test_an_image_is_upright_and_grey_of_16_bits_keeps_its_shades():
    upright = Image.new("RGB", (8, 8), (0, 0, 0))
    upright.paste((255, 255, 255), (0, 0, 8, 4))  # the upper half is white
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = 6  # to be turned clockwise by a quarter
    upright.transpose(Image.Transpose.ROTATE_90).save(file, "JPEG", exif=exif, quality=100)
    found = to_array(Image.open(file), channels=1, frame=Frame(8))
    assert found[0, 1].mean() > 200 > 50 > found[0, 6].mean()
    image = Image.fromarray(np.array([[0, 20_000], [40_000, 65_535]], np.uint16))
    assert to_array(image, channels=1, frame=Frame(2)).tolist() == [[[0, 78], [156, 255]]]
    with pytest.raises(ValueError, match="its pixels have 32 bits"):
        to_array(Image.fromarray(np.ones((2, 2), np.float32)), channels=1, frame=Frame(2))


# --- broken files ---


def damage(root: Path, count: int) -> None:
    """`count` JPEGs that are cut off, and a file that is no image."""
    for path in sorted(root.glob("*/*.jpg"))[:count]:
        path.write_bytes(path.read_bytes()[:-200])
    (root / "red" / "0.png").write_bytes(b"no image")


@pytest.mark.parametrize("decode", ["cache", "workers"])
def test_broken_files_are_listed_at_once_with_the_key_that_skips_them(root, decode):
    rows = [*(f"{path},{path.split('/')[0]}" for path in paths(root)), "red/lost.png,red"]  # it is not there
    with pytest.raises(UserError, match=r"1 of 61 image files cannot be read:\n  red/lost.png: .*No such file"):
        made(listed(root, rows), csv="labels.csv", decode=decode).prepare()
    damage(root, 12)
    with pytest.raises(UserError) as error:
        made(root, decode=decode).prepare()
    first, *lines, more, advice = str(error.value).splitlines()
    assert first == "13 of 60 image files cannot be read:"
    assert lines[0].startswith("  blue/1.jpg: image file is truncated") and len(lines) == 10
    assert more == "  and 3 more"
    assert advice == "Repair or remove them, or set data.skip_broken=true to train without them."


def test_broken_files_are_skipped_where_that_is_asked_for(root):
    whole = made(root)
    before = {sample for part in (whole.train, whole.val, whole.test) for sample in content(part)}
    damage(root, 4)
    by_mode = [made(root, decode=decode, skip_broken=True) for decode in ("cache", "workers")]
    again = made(root, skip_broken=True, decode="cache", cache_dir=str(root.parent / "again"))
    digests = [[cached.sha256 for cached in data.cached.values()] for data in (again, by_mode[0])]
    assert digests[0] == digests[1]  # a reason holds nothing of the process
    for data in by_mode:
        data.prepare()
        assert data.data_info["skipped"] == 5
        assert "5 broken image files of data.root=" in data.notice
        assert sum(sizes(data)) == 55
        assert {sample for part in (data.train, data.val, data.test) for sample in content(part)} < before
        assert set(content(data.test)) <= set(content(whole.test))  # the others stay where they were
    assert by_mode[0].fingerprint == by_mode[1].fingerprint != whole.fingerprint
    for path in root.glob("*/*"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match="all images of the val part are broken"):
        len(made(root, skip_broken=True).val)


@pytest.mark.parametrize("crops", [True, False])
def test_files_are_stored_smaller_where_that_is_asked_for(tmp_path, crops):
    """What is decoded once is not; small files and broken ones stay what they are."""
    root, random = tmp_path / "photos", np.random.default_rng(0)
    for index, name in enumerate(["cat", "dog"] * 20):
        (root / name).mkdir(parents=True, exist_ok=True)
        shape = (90, 120, 3) if index % 4 else (12, 14, 3)
        coarse = Image.fromarray(random.integers(0, 256, (4, 5, 3), dtype=np.uint8))
        coarse.resize(shape[1::-1], Image.Resampling.BICUBIC).save(
            root / name / f"{index}.{'png' if index % 2 else 'jpg'}"
        )
    (root / "cat" / "0.jpg").write_bytes(b"broken")
    options = {
        "root": str(root),
        "cache_dir": str(tmp_path / "cache"),
        "image_size": 8,
        "resize": "crop",
        "skip_broken": True,
    }
    plain, data = (Folder(**options, presize=presize) for presize in (None, 4))
    for each in (plain, data):
        each.operations = {"crop": RandomResizedCrop(image_size=8)} if crops else {}
        told = each.storage_plan()
        assert (each is data and not crops) if told is None else "images. " in told and str(tmp_path / "cache") in told
        each.prepare()
    assert data.storage_plan() is None and data.fingerprint == plain.fingerprint and sizes(data) == sizes(plain)
    assert isinstance(data.val, Arrays) and content(data.val) == content(plain.val)
    if not crops:
        assert "data.presize=4 has no effect" in data.notice and isinstance(data.train, Arrays)
        return
    assert isinstance(data.train, Packed) and "1 broken image" in data.notice
    again = pickle.loads(pickle.dumps(data.train))
    assert len(pickle.dumps(data.train)) < 20_000 and content(again) == content(data.train)
    for place in range(len(data.train)):
        found, original = (each.uncropped("train", 0).__getitems__([place])["input"][0].size for each in (data, plain))
        assert found == ((43, 32) if original == (120, 90) else original)
        squares = [each.train.__getitems__([place])["input"].astype(int) for each in (data, plain)]
        assert np.abs(squares[0] - squares[1]).mean() < 3
