"""Folders and lists as people, file servers and spreadsheets leave them: understood as meant, or rejected with the place and the advice."""

import json
import os
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from shipped_data import shipped

import lockstep
from lockstep.errors import UserError
from lockstep.extras.adapters import HuggingFace, Torchvision
from lockstep.extras.tables import target_check
from lockstep.kit import Folder, images, published
from lockstep.kit.listing import find_inputs
from lockstep.kit.pixels import BACKGROUND, ENDINGS, Frame, Walk, to_array
from project.data import Cifar10, Mnist

CAFE = {form: unicodedata.normalize(form, "café") for form in ("NFC", "NFD")}
Build = Callable[[Path], Any]


def tiny(*paths: str | Path, kind: str | None = None) -> None:
    for number, path in enumerate(paths):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).open("wb") as file:
            Image.new("RGB", (4, 4), (number, 90, 40)).save(file, kind or "PNG")


def classes(root: Path, *names: str, count: int = 10, ending: str = "png") -> None:
    tiny(*(root / name / f"{number}.{ending}" for name in names for number in range(count)))


def opened(root: Path, **keys: Any) -> Folder:
    data = Folder(root=str(root), image_size=4, cache_dir=str(root.parent / "cache"), **keys)
    data.prepare()
    return data


def sizes(data: Folder) -> list[int]:
    return [len(data.train), len(data.val), len(data.test)]


def linked(link: Path, target: Path | str, folder: bool = True) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target, target_is_directory=folder)


def moved(source: Path, target: bytes) -> None:
    source.rename(source.with_name(os.fsdecode(target)))


def built(*steps: Build) -> Build:
    return lambda root: [step(root) for step in steps]


TWO: Build = lambda root: classes(root, "cat", "dog")  # noqa: E731
DIVIDED: Build = lambda root: [classes(root / part, "cat", "dog") for part in ("train", "test")]  # noqa: E731
WHOLE = [16, 2, 2]  # of TWO

# What lies in the folder; and the sizes of the parts and what was left out, or the message.
FOLDERS: dict[str, tuple[Build, list[int] | str, str | None]] = {
    # names of parts
    "Training and Testing": (lambda r: [classes(r / part, "cat", "dog") for part in ("Training", "Testing")], [18, 2, 20], None),
    "seg_train in seg_train, seg_pred": (
        lambda r: [classes(r / "seg_train/seg_train", "sea", "ice"), classes(r / "seg_test/seg_test", "sea", "ice"), classes(r, "seg_pred")],
        [18, 2, 20], "1 seg_pred/"),
    "any letter case": (lambda r: [classes(r / part, "cat", "dog") for part in ("TRAIN", "Valid", "Test")], [20, 20, 20], None),
    "a suffix": (lambda r: [classes(r / part, "cat", "dog") for part in ("train_set", "test-images", "validation data")], [20, 20, 20], None),
    "years in the names of parts": (lambda r: [classes(r / "train2017", "cat", "dog", "cow"), classes(r / "val2017", "cat", "dog")], [27, 20, 3], None),
    "numbered parts": (lambda r: [classes(r / "01_train", "cat", "dog"), classes(r / "02-test", "cat", "dog")], [18, 2, 20], None),
    "a part twice": (lambda r: [classes(r / part, "cat", "dog") for part in ("train", "training")], "train and training, which both mean the train part", None),
    "classes with numbers": (lambda r: classes(r, "0-train", "1-bus", "2-car"), [24, 3, 3], None),
    "a test and one of a year": (built(DIVIDED, lambda r: classes(r / "test_2020", "cat", "dog")), [18, 2, 20], "1 test_2020/"),
    "two years": (lambda r: [classes(r / part, "cat", "dog") for part in ("train2014", "train2017")], "train2014 and train2017, which both mean the train part", None),
    "unknown names of parts": (lambda r: [classes(r / part, "cat", "dog") for part in ("fold1", "fold2")], "contain the same folders, cat, dog: it is unclear which are the classes", None),
    "folds, one without a class": (lambda r: [classes(r / "fold1", "cat", "dog"), classes(r / "fold2", "cat", "dog"), classes(r / "fold3", "cat")], "contain the same folders, cat, dog: it is unclear which are the classes", None),
    "folds with a stray image": (lambda r: [classes(r / "fold1", "cat", "dog"), classes(r / "fold2", "cat", "dog"), tiny(r / "fold1/x.png")], "contain the same folders, cat, dog: it is unclear which are the classes", None),
    "sessions, not all the same": (lambda r: [classes(r / "session_1", "cat", "dog", "cow"), classes(r / "Session 2", "cat", "dog")], "contain the same folders, cat, cow, dog: it is unclear which", None),
    "sessions in classes": (lambda r: [classes(r / "cat", "batch1", "batch2", "batch3", count=4), classes(r / "dog", "batch1", "batch2", count=4)], WHOLE, None),
    "folds of people": (lambda r: [classes(r / name, "subject1", "subject2") for name in ("fold1", "fold2")], "contain the same folders, subject1, subject2: it is unclear which", None),
    "sessions in numbered classes": (lambda r: [classes(r / "0", "batch1", "batch2", "batch3", count=4), classes(r / "1", "batch1", "batch2", count=4)], WHOLE, None),
    "day and night, one without": (lambda r: [classes(r / "cat", "day", "night", count=5), classes(r / "dog", "day", count=10)], WHOLE, None),
    "magnifications, one missing": (lambda r: [classes(r / "benign", "40X", "100X", "200X", "400X", count=3), classes(r / "malignant", "40X", "100X", "400X", count=4)], [20, 2, 2], None),
    "sets of images in classes": (lambda r: [classes(r / "a", "cat", "dog", count=5), classes(r / "b", "cat", "cow", count=5)], WHOLE, None),
    "the same folders in classes of train": (lambda r: [classes(r / part / name, "day", "night", count=5) for part in ("train", "test") for name in ("cat", "dog")], [18, 2, 20], None),
    "folds in train": (lambda r: [classes(r / "train" / name, "0", "1", count=5) for name in ("1", "2")], WHOLE, None),
    "images and masks": (lambda r: [classes(r / name, "images", "masks") for name in ("cat", "dog")], "contain the same folders, images, masks: it is unclear which", None),
    "dates below classes": (lambda r: [classes(r / "cat", "2023", "2024-01", count=5), classes(r / "dog", "2023", count=10)], WHOLE, None),
    "an inner name twice of many": (lambda r: [classes(r / "pets", "cat", "dog", "other", count=4), classes(r / "cars", "vw", "kia", "other", count=4)], [20, 2, 2], None),
    "parts below classes": (lambda r: [classes(r / name, "train", "test") for name in ("cat", "dog")], "contain the same folders, test, train", None),
    "one folder in each class": (lambda r: [classes(r / name, "images") for name in ("n01", "n02")], WHOLE, None),
    "years beside images": (built(TWO, lambda r: [classes(r / name, "2023", "2024", count=1) for name in ("cat", "dog")]), [20, 2, 2], None),
    "test without class folders": (built(DIVIDED, lambda r: (shutil.rmtree(r / "test"), classes(r, "test"))), "photos/test has no images in class folders", None),
    "an empty test": (built(DIVIDED, lambda r: (shutil.rmtree(r / "test"), (r / "test/cat").mkdir(parents=True))), "photos/test has no images in class folders", None),
    "a class called train": (lambda r: classes(r, "train", "car"), "photos/train needs one folder of images per class", None),
    "a stranger beside train": (built(DIVIDED, lambda r: classes(r, "more")), [18, 2, 20], "1 more/"),
    "images beside the classes": (built(TWO, lambda r: tiny(r / "a.png", r / "b.png")), WHOLE, "2 images outside of class folders"),
    "an image beside the classes": (built(TWO, lambda r: tiny(r / "a.png")), WHOLE, "1 images outside of class folders"),
    # links
    "a link to the folder above": (built(TWO, lambda r: linked(r / "cat/all", "..")), WHOLE, "1 links to listed files"),
    "a link to itself": (built(TWO, lambda r: linked(r / "cat/loop", "loop")), WHOLE, "1 without an extension"),
    "links to files": (built(TWO, lambda r: [linked(r / f"cat/again/{n}.png", f"../{n}.png", False) for n in range(10)]), WHOLE, "10 links to listed files"),
    "links to files outside, twice": (
        built(lambda r: classes(r.parent / "pool", "x"), TWO, lambda r: [linked(r / f"{name}/new.png", r.parent / "pool/x/0.png", False) for name in ("cat", "dog")]),
        [17, 2, 2], "1 links to listed files"),
    "classes elsewhere": (lambda r: [classes(r.parent / "pool", "x", "y"), linked(r / "cat", r.parent / "pool/x"), linked(r / "dog", r.parent / "pool/y")], WHOLE, None),
    "masks beside images": (built(TWO, lambda r: tiny(*(r / f"{name}/{n}_mask.png" for n in range(9) for name in ("cat", "dog")), r / "cat/1_mask_1.png", r / "dog/mask.png")), [17, 2, 2], "19 masks of images"),
    "masks in all parts": (built(DIVIDED, lambda r: tiny(*(r / f"{part}/{name}/{n}_MASK.png" for part in ("train", "test") for n in range(10) for name in ("cat", "dog")))), [18, 2, 20], "40 masks of images"),
    "people with masks": (lambda r: tiny(*(r / f"{name}/{n}_{name}.png" for n in range(10) for name in ("mask", "no mask"))), WHOLE, None),
    "the folder is a link": (lambda r: [classes(r.parent / "real", "cat", "dog"), linked(r, "real")], WHOLE, None),
    "a link to a part of what is linked": (
        built(lambda r: classes(r.parent / "pool", "x"), TWO, lambda r: [linked(r / "cat/a", r.parent / "pool/x"), linked(r / "cat/b", r.parent / "pool")]),
        [24, 3, 3], "1 links to listed files"),
    "a class is a link to another": (built(TWO, lambda r: linked(r / "kitten", "cat")), "photos/kitten contains no images .* not counting links to listed files. Remove it", None),
    "val is a link to test": (built(DIVIDED, lambda r: linked(r / "val", "test")), "photos/val has no images in class folders", None),
    "a link to nothing": (built(TWO, lambda r: linked(r / "cat/lost.png", "gone.png", False)), "1 of 21 image files cannot be read:\n  cat/lost.png: .*No such file", None),
    # what file servers and systems leave
    "a NAS": (built(TWO, lambda r: [tiny(r / "cat/@eaDir/1.png/THUMB.png", r / "@eaDir/x.png"), (r / "dog/Thumbs.db").touch()]), WHOLE, "2 @eaDir/, 1 .db"),
    "an archive of a Mac": (built(TWO, lambda r: [tiny(r / "__MACOSX/cat/._1.png", r / "cat/._1.png", r / ".thumbnails/1.png")]), WHOLE, "1 __MACOSX/, 1 .thumbnails/, 1 hidden"),
    "an image that is a link to itself": (built(TWO, lambda r: linked(r / "cat/loop.png", "loop.png", False)), WHOLE, "1 links to listed files"),
    "a pipe": (built(TWO, lambda r: os.mkfifo(r / "cat/pipe.png")), WHOLE, "1 links to listed files"),
    "a folder called like an image": (built(TWO, lambda r: tiny(r / "cat/1.jpg/x.png")), [17, 2, 2], None),
    # endings
    "jfif and JPE": (lambda r: [tiny(*(r / name / f"{n}.{e}" for n in range(5)), kind="JPEG") for name in ("cat", "dog") for e in ("jfif", "JPG")], WHOLE, None),
    "heic": (built(TWO, lambda r: [(r / "cat" / f"{n}.HEIC").touch() for n in range(60)]), WHOLE, "60 .heic"),
    "no images at all": (lambda r: [(r / name).mkdir(parents=True) for name in ("cat", "dog")], "photos/cat contains no images", None),
    # names
    "a class in two Unicode forms": (lambda r: [classes(r / "train", CAFE["NFC"], "tea"), classes(r / "test", CAFE["NFD"], "tea")], [18, 2, 20], None),
    "two letter cases": (lambda r: classes(r, "Cat", "cat", "dog"), [24, 3, 3], None),
    "two letters": (lambda r: classes(r, "A", "a"), WHOLE, None),
    "a blank behind": (lambda r: classes(r, "cat", "cat ", "dog"), "has 'cat' and 'cat ', which look the same", None),
    "an invisible letter": (lambda r: classes(r, "cat", "cat\u200b", "dog"), r"has 'cat' and 'cat\\u200b', which look", None),
    "blanks inside": (lambda r: classes(r, "big cat", "big  cat", "dog"), "has 'big  cat' and 'big cat', which look", None),
    "a ligature": (lambda r: classes(r, "fish", "\ufb01sh"), WHOLE, None),
    "an upper number": (lambda r: classes(r, "mm2", "mm²"), WHOLE, None),
    "joiners": (lambda r: classes(r, "क्ष", "क्\u200dष", "क्\u200cष"), [24, 3, 3], None),
    "symbols": (lambda r: classes(r, "\\Rightarrow", "\\rightarrow", "R", "R'", "CO", "Co", count=5), [18, 6, 6], None),
    "agents and films": (lambda r: classes(r, "007", "7", "Alien", "Alien (1979)", count=5), [12, 4, 4], None),
    "classes of commas": (lambda r: classes(r, "scab", "rust", "scab, rust"), [24, 3, 3], None),
    "numbers with one image each": (lambda r: [classes(r / "train", *map(str, range(12)), count=1), classes(r / "val", "1", "2", count=1), classes(r / "test", "1", "2", count=1)], [12, 2, 2], None),
    "an underscore": (lambda r: classes(r, "big cat", "big_cat", "dog"), [24, 3, 3], None),
    "two such pairs": (lambda r: classes(r, "cat", "cat ", "dog", " dog"), r"(?s)'cat' and 'cat '.*' dog' and 'dog'", None),
    "numbers with and without a zero": (lambda r: classes(r, "01", "1", "10"), [24, 3, 3], None),
    "numbers": (lambda r: classes(r, "1", "10"), WHOLE, None),
    "long numbers": (lambda r: classes(r, "12345678901234567", "12345678901234568"), WHOLE, None),
    "a folder called None": (lambda r: classes(r, "None", "mild"), WHOLE, None),
    "numbers in brackets": (lambda r: classes(r, "pose (1)", "pose (2)"), WHOLE, None),
    "a hyphen": (lambda r: classes(r, "big-cat", "big cat", "dog"), [24, 3, 3], None),
    "marks": (lambda r: classes(r, "A", "A-", "A+", "-1", count=5), [12, 4, 4], None),
    "an archive": (lambda r: r.write_bytes(b"PK"), "photos is a file. Set data.root=<folder", None),
    "both Unicode forms in one part": (lambda r: [classes(r, CAFE["NFC"], CAFE["NFD"], count=5), classes(r, "tea")], WHOLE, None),
    "a class that is no UTF-8": (built(TWO, lambda r: moved(r / "cat", b"caf\xe9")), WHOLE, None),
    "a file that is no UTF-8": (built(TWO, lambda r: moved(r / "cat/1.png", b"\xe9.png")), WHOLE, None),
    "a broken file that is no UTF-8": (built(TWO, lambda r: [(r / "cat/1.png").write_bytes(b"x"), moved(r / "cat/1.png", b"\xe9.png")]), "1 of 20 image files cannot be read", None),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_as_it_lies(tmp_path, name):
    root = tmp_path / "photos"
    build, expected, left_out = FOLDERS[name]
    build(root)
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            opened(root)
        return
    data = opened(root)
    assert (sizes(data), data.data_info["left_out"]) == (expected, left_out)
    assert len({*data.listing.paths}) == sum(expected)
    assert all(label.encode() for label in data.metadata["classes"])  # which a name with escaped bytes is


# --- a CSV ---

ROWS = [f"im/{number}.png,{('cat', 'dog')[number % 2]}" for number in range(20)]
NUMBERS = [f"im/{number}.png,{number / 4}" for number in range(20)]
LINES = "\n".join


def cells(*values: str) -> str:
    """A CSV of 20 rows with these targets in turn."""
    return LINES(["path,target", *(f"im/{number}.png,{values[number % len(values)]}" for number in range(20))])


# The content, the kind of target; and the sizes of the parts, or the message.
LISTS: dict[str, tuple[str | bytes | Callable[[Path], str], str, list[int] | str]] = {
    # cells
    "a decimal comma": (LINES(["path,target", *NUMBERS, "im/1.png,1,5"]), "number", "line 22: .*write decimals with a point"),
    "too few cells": (LINES(["path,target,split", "im/1.png,cat,train", "im/2.png,dog"]), "class", "line 3: it has .* cells"),
    "an empty target": (LINES(["path,target", *ROWS, "im/a.png, "]), "class", "line 22: a row needs a target"),
    "no label": (LINES(["path,target", *(f"im/{n}.png,{('', 'red|round', 'red')[n % 3]}" for n in range(20))]), "labels", [16, 2, 2]),
    "nan as a class": (LINES(["path,target", *ROWS, "im/a.png,nan"]), "class", "line 22: target=nan looks like a missing value"),
    "NA as a class": (cells("cat", "NA", "dog"), "class", "line 3: target=NA looks like a missing"),
    "None as a label": (cells("red|round", "red", "red|None"), "labels", r"line 4: target=red\|None looks like a missing"),
    "none as a class": (cells("none", "mild"), "class", [16, 2, 2]),
    "nan as a number": (cells("1.5", "nan"), "number", "line 3: target=nan is not a number"),
    "two letter cases": (cells("Cat", "cat", "dog"), "class", [14, 3, 3]),
    "two letter cases of a label": (cells("red|round", "Red"), "labels", [16, 2, 2]),
    "an invisible letter": (cells("cat", "\ufeffcat", "dog"), "class", r"has 'cat' and '\\ufeffcat', which look"),
    "a hard blank": (cells("big cat", "big\xa0cat", "dog"), "class", r"has 'big cat' and 'big\\xa0cat', which look"),
    "1 and 1.0": (cells("1", "1.0", "2"), "class", [14, 3, 3]),
    "labels with commas and others": (cells('"Washington, DC|city"', "city", "DC", '"a, long, name"'), "labels", [16, 2, 2]),
    "labels between commas, none alone": (cells('"red,round"', '"red,big"'), "labels", [16, 2, 2]),
    "a list of Python": (cells("\"['red', 'round']\"", "\"['red']\""), "labels", [16, 2, 2]),
    "numbers as classes of a divided list": (LINES(["path,target,split", *(f"im/{n}.png,{n % 12},{('train', 'val', 'test')[max(n - 8, 0) // 4]}" for n in range(20))]), "class", [12, 4, 4]),
    "many names": (LINES(["path,target", *(f"im/{n}.png,bird {n % 11}" for n in range(20))]), "class", "too few for a val part"),
    "symbols": (cells("\\Rightarrow", "\\rightarrow", "R", "R'"), "class", [12, 4, 4]),
    "numbers and formulas": (cells(".5", "5", "CO", "Co"), "class", [12, 4, 4]),
    "signs": (cells("|", ";", '","', "a"), "class", [12, 4, 4]),
    "names with a comma": (cells('"Washington, DC"', "Boston"), "class", [16, 2, 2]),
    "an empty number": (LINES(["path,target", *NUMBERS, "im/a.png,"]), "number", "line 22: target= is not a number"),
    "1_000": (LINES(["path,target", *NUMBERS, "im/a.png,1_000"]), "number", "line 22: target=1_000 is not a number"),
    "NaN": (LINES(["path,target", "im/a.png,NaN", *NUMBERS]), "number", "line 2: target=NaN is not a number"),
    "more than float32 holds": (LINES(["path,target", "im/a.png,1e39", *NUMBERS]), "number", "line 2: target=1e39 is not a number"),
    "blank lines": (LINES(["path,target", "", *NUMBERS, "", "im/a.png,x"]), "number", "line 24: target=x is not a number"),
    "many wrong lines": (LINES(["path,target", *(f"im/{n}.png,x" for n in range(12))]), "number", r"line 11: (.|\n)*2 more lines have errors"),
    # what spreadsheets and Windows write
    "backslashes": (LINES(["path,target", *ROWS]).replace("/", "\\"), "class", [16, 2, 2]),
    "a drive": (LINES(["path,target", *ROWS, r"C:\im\1.png,cat"]), "class", "C:/im/1.png: .*No such file"),
    "a BOM and CRLF": (b"\xef\xbb\xbf" + "\r\n".join(["path,target", *ROWS, ""]).encode(), "class", [16, 2, 2]),
    "UTF-16": (LINES(["path,target", *ROWS]).encode("utf-16"), "class", "line 1: not a valid UTF-8 CSV"),
    "Latin-1": (LINES(["path,target", *ROWS, "im/a.png,café"]).encode("latin-1"), "class", "line 22: not a valid UTF-8 CSV"),
    "semicolons": (LINES(["path;target", *ROWS]).replace(",", ";"), "class", [16, 2, 2]),
    "semicolons and a decimal comma": ("path;target\nim/1.png;1,5\n", "number", "line 2: target=1,5 is not a number, such as 1.5"),
    "capitals and spaces": (LINES(["Path, Target", *ROWS]).replace(",", ", "), "class", [16, 2, 2]),
    "spaces around a path": (LINES(["path,target", *(f" {row}" for row in ROWS)]), "class", [16, 2, 2]),
    "an open quote": (LINES(["path,target", '"im/0.png,cat', *ROWS[1:]]), "class", "line 2: not a valid UTF-8 CSV .unexpected end"),
    "parts in a column of another name": (LINES(["path,target,set", *(f"{row},{'test' if n < 3 else 'train'}" for n, row in enumerate(ROWS))]), "class", "column set has part names. Rename it to split"),
    "parts in two columns": (LINES(["path,official_split,target,origin,split", *(f"im/{n}.png,{('val', 'test')[n < 9]},{('cat', 'dog')[n % 2]},{('train2017', 'val2017')[n % 3 > 1]},{('train', 'test')[n < 4]}" for n in range(20))]), "class", [14, 2, 4]),
    "a column with some names of parts": (LINES(["path,target,set", *(f"{row},{('test', 'train', 'other')[n % 3]}" for n, row in enumerate(ROWS))]), "class", [16, 2, 2]),
    "a column twice": (LINES(["path,target,target", *(f"{row},x" for row in ROWS)]), "class", "each once: path,target"),
    # rows with the same path
    "the same path twice": (LINES(["path,target", *ROWS, *ROWS]), "class", [32, 4, 4]),
    "two labels of a path": (LINES(["path,target", *ROWS, "./im//1.png,cat"]), "class", "line 22: im/1.png is also in an earlier line, with a different"),
    "two labels of a link": (LINES(["path,target", *ROWS, "link/1.png,cat"]), "class", "line 22: link/1.png is also in an earlier line, with a different"),
    "a path and the same from the root": (lambda at: LINES(["path,target", *ROWS, *(f"{at}/{row}" for row in ROWS), *(f"link/{row[3:]}" for row in ROWS)]), "class", [48, 6, 6]),
    "two parts of a path": (LINES(["path,target,split", "im/1.png,cat,train", "im/2.png,dog,train", "im/1.png,cat,test"]), "class", "line 4: im/1.png is also in an earlier line"),
    "quotes inside": (cells("'cat'", "cat", "dog"), "class", [14, 3, 3]),
    "an empty split": (LINES(["path,target,split", "im/1.png,cat,train", "im/2.png,dog,"]), "class", "line 3: split= is unknown; use one of train"),
    "Training and Testing": (LINES(["path,target,split", *(f"{row},{'Training' if n < 16 else 'TESTING'}" for n, row in enumerate(ROWS))]), "class", [14, 2, 4]),
    # names
    "a class in two Unicode forms": (LINES(["path,target", *(f"im/{n}.png,{('tea', CAFE['NFC'], 'tea', CAFE['NFD'])[n % 4]}" for n in range(20))]), "class", [16, 2, 2]),
}  # fmt: skip


@pytest.mark.parametrize("name", LISTS)
def test_a_csv_as_it_is_written(tmp_path, name):
    content, kind, expected = LISTS[name]
    tiny(*(tmp_path / "photos/im" / f"{name}.png" for name in (*range(20), CAFE["NFD"])))
    linked(tmp_path / "photos/link", "im")
    content = content(tmp_path / "photos") if callable(content) else content
    (tmp_path / "photos/labels.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            opened(tmp_path / "photos", csv="labels.csv", target=kind)
        return
    data = opened(tmp_path / "photos", csv="labels.csv", target=kind)
    assert sizes(data) == expected
    by_part = [
        {os.path.realpath(data.listing.base / path) for path in data.paths(part)} for part in ("train", "val", "test")
    ]
    assert sum(map(len, by_part)) == len(set.union(*by_part))  # no file is in two parts


def test_a_list_of_files_to_predict_is_read_in_the_same_way(tmp_path):
    tiny(tmp_path / "im" / "a.png")
    (tmp_path / "new.csv").write_text("Path;note\nim\\a.png;mine\n")
    assert find_inputs(str(tmp_path / "new.csv")).paths == ["im/a.png"]
    (tmp_path / "new.csv").write_text("path,target\nim/a.png,1,5\n")
    with pytest.raises(UserError, match=r"new.csv, line 2: it has"):
        find_inputs(str(tmp_path / "new.csv"))


@pytest.mark.parametrize(("metadata", "written", "expected"), [
    ({"classes": ["Big cat", "dog"]}, ["big  cat ", "DOG", "dog\u200b", "zebra", "nan", "", "dog|Big cat"], ["Big cat", "dog", "dog", "zebra", "", "", "dog|Big cat"]),
    ({"classes": ["1", "10"]}, ["1.0", "01", "10", "100"], ["1.0", "01", "10", "100"]),
    ({"classes": ["A", "a", "None"]}, ["a", "A", "None"], ["a", "A", "None"]),
    ({"classes": [CAFE["NFC"], "tea"]}, [CAFE["NFD"]], [CAFE["NFC"]]),
    ({"labels": ["red", "round"]}, ["Round; RED", "red|", "", "NA"], ["round|red", "red", "", ""]),
    ({"targets": ["price"]}, [" 1.5", "2", "", "nan"], ["1.5", "2", "", ""]),
    ({"targets": ["price"]}, ["1.5", '"1,5"'], r"new.csv, line 3: target=1,5 is not a number, such as 1.5. Correct it"),
    ({"targets": ["x", "y"]}, [" 1.5;2", "nan"], ["1.5;2", "nan"]),
    ({}, ["of; any kind", "nan"], ["of; any kind", "nan"]),
])  # fmt: skip
def test_targets_of_a_list_to_predict_are_spelled_as_in_training(tmp_path, metadata, written, expected):
    path = tmp_path / "new.csv"
    path.write_text(LINES(["path,target", *(f"im/1.png,{cell}" for cell in written)]))
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected) as error:
            find_inputs(str(path), check=target_check(metadata))
        assert "data.target" not in str(error.value)
        return
    assert find_inputs(str(path), check=target_check(metadata)).targets == expected


@pytest.mark.parametrize(("masked", "left_out"), [(10, 10), (7, 7), (0, 0)])
def test_masks_beside_images_are_not_predicted(tmp_path, masked, left_out):
    tiny(*(tmp_path / f"{n}.png" for n in range(10)), *(tmp_path / f"{n}_mask.png" for n in range(masked)))
    found = find_inputs(str(tmp_path))
    assert (len(found.paths), found.left_out) == (
        10 + masked - left_out,
        f"{left_out} masks of images" if left_out else "",
    )


# What one should look at before training, though it may be meant.
@pytest.mark.parametrize(("target", "content", "told"), [
    ("class", cells("Cat", "cat", "dog"), "Cat and cat are two separate classes of data.csv=labels.csv. If they mean the same, use"),
    ("labels", cells("red|round", "Red"), "Red and red are two separate labels of data.csv=labels.csv"),
    ("class", cells("Alien", "Alien (1979)", "007", "7", "R"), None),
    ("class", cells("A", "a", "pose (11)", "pose (12)"), None),
    ("class", cells('"Washington, DC"', "Boston"), None),
])  # fmt: skip
def test_what_may_be_a_mistake_is_a_warning(tmp_path, target, content, told):
    tiny(*(tmp_path / "photos/im" / f"{name}.png" for name in range(20)))
    (tmp_path / "photos/labels.csv").write_text(content)
    notice = opened(tmp_path / "photos", csv="labels.csv", target=target).notice
    assert notice is None if told is None else told in str(notice)


def test_a_list_to_predict_has_its_targets_beside_the_predictions(tmp_path, monkeypatch):
    """The number of a CSV is called `target`, and so is its prediction."""
    monkeypatch.chdir(tmp_path)
    tiny(*(Path("photos/im") / f"{number}.png" for number in range(20)))
    Path("photos/labels.csv").write_text(LINES(["path,target", *NUMBERS]))
    data = ["data=folder", "data.root=photos", "data.csv=labels.csv", "data.target=number", "task=regression"]
    options = ["trainer.accelerator=cpu", "data.cache_dir=cache", "data.image_size=12", "loader.batch_size=8"]
    lockstep.train([*data, "run=a", "trainer.max_steps=1", "trainer.precision=32-true", *options])
    Path("photos/new.csv").write_text("path,target\nim/1.png,0.25\nim/2.png,\nim/3.png, 7.50\n")
    lockstep.predict(["run=a", "input=photos/new.csv", "output=new.json", "gallery=true", "trainer.accelerator=cpu"])
    rows = json.loads(Path("new.json").read_text())
    assert [row["target/target"] for row in rows] == [0.25, None, 7.5]
    page = Path("new-gallery.html").read_text()
    assert "0.2500 → " in page and "Wrong" not in page
    part = lockstep.predict(["run=a", "input=test", "output=part.json", "trainer.accelerator=cpu"])
    assert part["count"] == 2 and json.loads(Path("part.json").read_text())[0].keys() >= rows[0].keys() - {"error"}


# --- which files, and how ---


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in Pillow:DeprecationWarning")
def test_all_images_that_pillow_reads_are_taken_or_counted(tmp_path):
    """Each ending under which Pillow writes an image that it reads again."""
    Image.init()
    written = set()
    for ending, kind in Image.registered_extensions().items():
        path = tmp_path / f"a{ending}"
        try:
            Image.new("RGB", (64, 64), "red").save(path, kind)
            with Image.open(path) as image:
                assert to_array(image, channels=3, frame=Frame(4)).shape == (3, 4, 4)
        except (OSError, ValueError, KeyError):  # not written, not read, or not in colours
            path.unlink(missing_ok=True)
            continue
        written.add(ending)
    found = Walk([str(tmp_path)])
    taken = {Path(path).suffix for path in found}
    assert {".jpg", ".jfif", ".avif", ".webp", ".tiff", ".jp2", ".tga"} <= taken <= {*ENDINGS}
    assert written - taken == {*+found.left_out}  # such as .ico and .pcx


@pytest.mark.parametrize("backwards", [False, True])
def test_the_order_of_a_walk_is_that_of_names_whatever_the_disk_says(tmp_path, monkeypatch, backwards):
    places = ["b.png", "a/z.png", "a/b/c.png", "a b/1.png", "a/a.png", "a.b/1.png"]
    tiny(*(tmp_path / place for place in places))
    expected = ["b.png", "a/a.png", "a/z.png", "a/b/c.png", "a b/1.png", "a.b/1.png"]
    scan = os.scandir

    class Scan:
        def __init__(self, place: str) -> None:
            with scan(place) as entries:
                self.entries = sorted(entries, key=lambda entry: entry.name, reverse=backwards)

        def __enter__(self) -> list[os.DirEntry[str]]:
            return self.entries

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(os, "scandir", Scan)
    assert [os.path.relpath(path, tmp_path) for path in Walk([str(tmp_path)])] == expected


# --- transparency and depth ---


def transparent(mode: str, background: int | tuple[int, ...]) -> Image.Image:
    """A black square in the middle of what is transparent; the colour of the latter is hidden."""
    alpha = Image.new("L", (8, 8), 0)
    alpha.paste(255, (2, 2, 6, 6))
    if mode == "RGBA":
        return Image.merge("RGBA", [*Image.new("RGB", (8, 8)).split(), alpha])
    if mode == "LA":
        return Image.merge("LA", [Image.new("L", (8, 8)), alpha])
    hidden = {"P": 7, "L": 77, "RGB": (7, 7, 7)}[mode]
    image = Image.new(mode, (8, 8), hidden)
    image.paste({"P": 0, "L": 0, "RGB": (0, 0, 0)}[mode], (2, 2, 6, 6))
    if mode == "P":
        image.putpalette([0] * 768)
    image.info["transparency"] = hidden
    return image


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "RGB"])
def test_transparency_is_composited_on_white(tmp_path, mode, channels):
    image = transparent(mode, 0)
    image.save(tmp_path / "a.png", **({"transparency": image.info["transparency"]} if image.info else {}))
    found = images.decode(tmp_path / "a.png", channels=channels, frame=Frame(8))
    expected = np.full((8, 8), 255)
    expected[2:6, 2:6] = 0
    assert BACKGROUND == "white" and (found == expected).all() and len(found) == channels


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK", "YCbCr", "RGBA", "LA"])
def test_opaque_images_keep_their_pixels(mode):
    noise = np.random.default_rng(0).integers(0, 256, (9, 11, 3)).astype(np.uint8)
    image = Image.fromarray(noise).convert("L" if mode == "LA" else "RGB").convert(mode)
    for channels, plain in ((1, "L"), (3, "RGB")):
        expected = np.asarray(image.convert(plain).resize((6, 6), Image.Resampling.BILINEAR))
        assert np.array_equal(
            to_array(image, channels=channels, frame=Frame(6)), np.moveaxis(np.atleast_3d(expected), 2, 0)
        )


def test_the_cache_knows_the_colour_behind_transparency(tmp_path, monkeypatch):
    classes(tmp_path / "photos", "cat", "dog")
    before = opened(tmp_path / "photos").keys
    monkeypatch.setattr("lockstep.kit.folder.BACKGROUND", "black")
    assert not {*opened(tmp_path / "photos").keys.values()} & {*before.values()}


@pytest.mark.parametrize("largest", [65535, 4095])
def test_a_16_bit_pgm_keeps_its_shades(tmp_path, largest):
    shades = np.array([[0, largest // 2, largest]], ">u2")
    (tmp_path / "a.pgm").write_bytes(b"P5 3 1 %d\n" % largest + shades.tobytes())
    with Image.open(tmp_path / "a.pgm") as image:
        assert to_array(image, channels=1, frame=Frame(3))[0, 0].tolist() == [0, 127, 255]
    Image.fromarray(np.ones((3, 3), np.int32)).save(tmp_path / "a.tif")
    with Image.open(tmp_path / "a.tif") as image, pytest.raises(ValueError, match="its pixels have 32 bits"):
        to_array(image, channels=1, frame=Frame(3))


# --- images where a published data set should be ---


@pytest.mark.parametrize("names", [("cat", "dog"), ("",)])
@pytest.mark.parametrize("dataset", ["Flowers102", "MNIST", "CIFAR10"])
def test_a_folder_of_images_does_not_become_one_of_torchvisions(tmp_path, monkeypatch, dataset, names):
    monkeypatch.chdir(tmp_path)
    classes(Path("photos"), *names, count=2)
    told = rf"data.root=photos has {'cat, dog' if len(names) > 1 else '0.png, 1.png'}: torchvision's {dataset} is not there .* data=folder data.root=photos"
    with pytest.raises(UserError, match=told):
        lockstep.train(["data=torchvision", f"data.dataset={dataset}", "data.root=photos", "trainer.accelerator=cpu"])
    assert (
        sorted(next(os.walk("photos"))[1]) == [*filter(None, names)] and not Path("runs").exists()
    )  # nothing is downloaded


def test_a_root_that_other_data_shares_gets_torchvisions(tmp_path, monkeypatch):
    """Only some of its folders hold images."""
    classes(tmp_path, "mine", count=2)
    (tmp_path / "MNIST/raw").mkdir(parents=True)
    monkeypatch.setattr("torchvision.datasets.MNIST.download", lambda _: (_ for _ in ()).throw(OSError("no network")))
    data = Torchvision(dataset="MNIST", root=str(tmp_path), image_size=28, cache_dir=str(tmp_path / "cache"))
    with pytest.raises(UserError, match=r"was not downloaded .no network"):
        data.prepare()


def test_a_folder_of_images_is_no_table_of_hugging_face(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    classes(Path("photos"), "cat", "dog")
    with pytest.raises(UserError, match=r"data.root=photos has cat, dog: it is not .*data=folder data.root=photos"):
        HuggingFace(root="photos", cache_dir="cache").prepare()


@pytest.mark.parametrize(("kind", "root"), [(Mnist, "photos"), (Cifar10, "photos"), (Mnist, "data")])
def test_a_folder_of_images_does_not_become_a_published_data_set(tmp_path, monkeypatch, kind, root):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kind, "fetch", None)  # nothing is downloaded into it
    classes(Path(root), "cat", "dog")
    data = kind(root=root, image_size=28, cache_dir="cache")
    with pytest.raises(
        UserError,
        match=rf"data.root={root} has cat, dog; it should contain .*for your own images, set data=folder data.root={root}",
    ):
        data.prepare()


@pytest.mark.parametrize(("kind", "left", "told"), [
    (Mnist, "MNIST/raw/train-images-idx3-ubyte.gz", None), (Cifar10, "cifar-10-python.tar.gz", "no network"),
    (Cifar10, "cifar-10-batches-py/data_batch_1", "no network"), (Mnist, "", "data.root=mine is a file; it should contain"),
])  # fmt: skip
def test_an_unfinished_download_goes_on(tmp_path, monkeypatch, kind, left, told):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kind, "fetch", lambda _: (_ for _ in ()).throw(ConnectionError("no network")))
    Path("mine", left).parent.mkdir(parents=True, exist_ok=True)
    Path("mine", left).write_bytes(b"cut off")
    data = kind(root="mine", image_size=28, cache_dir="cache")
    if told is None:
        data.prepare()
        assert data.source == "embedded"  # after it was tried to go on
        return
    with pytest.raises(UserError, match=told):
        data.prepare()


def test_the_default_root_may_hold_other_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny(Path("data/flowers/daisy/1.png"))
    monkeypatch.setattr(Mnist, "fetch", lambda _: (_ for _ in ()).throw(ConnectionError("no network")))
    data = Mnist(root="data", image_size=28, cache_dir="cache")
    data.prepare()
    assert data.source == "embedded" and shipped("data", "mnist")["root"] == str(published.DEFAULT_ROOT)


# --- a run: what its first lines, its report and its predictions say ---


def test_a_run_on_what_a_file_server_left(tmp_path, monkeypatch, capfd):
    """Non-UTF-8 names, thumbnails, a link to the folder above, and black shapes on transparent ground, which it tells apart by their shape."""
    monkeypatch.chdir(tmp_path)
    root, shapes = tmp_path / "photos", {"wide": (0, 6, 16, 10), "high": (6, 0, 10, 16)}
    for name, box in shapes.items():
        (root / name / "@eaDir").mkdir(parents=True)
        for number in range(20):
            image = Image.new("RGBA", (16, 16), (0, 0, 0, 0))
            image.paste((0, 0, 0, 255), box)
            image.save(root / name / f"{number}.png")
        image.save(root / name / "@eaDir" / "thumb.png")
    linked(root / "wide/all", "..")
    (root / "high/1.heic").touch()
    moved(root / "high/2.png", b"\xe9.png")
    moved(root / "high", b"h\xe9")
    options = ["trainer.accelerator=cpu", "trainer.precision=32-true"]
    data = ["data=folder", "data.root=photos", "data.image_size=12", "loader.batch_size=8", "data.cache_dir=cache"]
    report = lockstep.train([*data, "run=a", "trainer.max_steps=30", "optim.lr=1e-3", "seed=1", *options])
    left_out = "2 @eaDir/, 1 .heic, 1 links to listed files"
    assert (report["data/train"], report["test/acc"], report["data/left_out"]) == (32, 1.0, left_out)
    page = Path("runs/a/report.html").read_text(encoding="utf-8")
    assert left_out in page and r"h\xe9" in page
    lockstep.evaluate(["run=a", *options])
    assert capfd.readouterr().err.count(f"left out of the data: {left_out}") == 2
    done = lockstep.predict(["run=a", "input=photos", *options])
    assert f"left out of input=photos: {left_out}" in capfd.readouterr().err
    rows = Path(done["output"]).read_text(encoding="utf-8", errors="surrogateescape").splitlines()[1:]
    assert len(rows) == 40 and all((r"h\xe9" in row) == ("h\udce9/" in row) for row in rows)


def test_a_root_whose_path_is_not_utf_8_is_rejected_before_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    classes(tmp_path / "photos", "cat", "dog")
    moved(tmp_path / "photos", b"phot\xf3s")
    with pytest.raises(UserError, match=r"data\.root=phot.s is invalid; expected a path in UTF-8"):
        lockstep.train(["data=folder", 'data.root="phot\udcf3s"'])
    assert [path.name for path in Path().iterdir()] == ["phot\udcf3s"]  # no run
