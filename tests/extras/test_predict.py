"""Predictions: a row for each input, once and in order, for any number of processes; what they say, and where they are written."""

import csv
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import write_mnist
from pictures import COLOURS, write_classes
from PIL import Image
from torchvision.transforms.v2 import functional as F

import lockstep
from lockstep.errors import UserError
from lockstep.extras import output_problems, tables
from lockstep.extras.prediction import lock_output

pytestmark = pytest.mark.xdist_group("predict")
CPU = ["trainer.accelerator=cpu"]
TRAIN = ["loader.batch_size=8", "trainer.max_steps=6", "trainer.precision=32-true", "optim.lr=1e-3", *CPU]


@pytest.fixture(scope="module")
def place(tmp_path_factory, forked) -> Iterator[Path]:
    """A folder with a run `photos` of coloured images, its data, and a run `digits` of MNIST's 103 test images."""
    place = tmp_path_factory.mktemp("predict")
    write_classes(place / "photos", 10)
    write_mnist(place / "mnist", 64, 103)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        common = ["data.cache_dir=cache", *TRAIN]
        lockstep.train(["run=photos", "data=folder", "data.root=photos", "data.image_size=12", *common])
        lockstep.train(["run=digits", "data.root=mnist", "data.image_size=12", "loader.eval_batch_size=10", *common])
        yield place


@pytest.fixture
def predict(place, tmp_path) -> Callable[..., list[dict]]:
    """The rows of a table, by the arguments of the command."""

    def predicted(*overrides: str, ending: str = "jsonl") -> list[dict]:
        output = tmp_path / f"table.{ending}"
        done = lockstep.predict([*overrides, f"output={output}", "overwrite=true", *CPU])
        assert Path(done["output"]) == output
        rows = read(output)
        assert len(rows) == done["count"]
        assert not list(tmp_path.glob(".lockstep-*"))
        return rows

    return predicted


def read(path: Path) -> list[dict]:
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            return list(csv.DictReader(file))
    if path.suffix == ".parquet":
        return pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist()
    text = path.read_text()
    return json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]


def close(a: list[dict], b: list[dict]) -> bool:
    return a == [{k: pytest.approx(v, rel=1e-5) if isinstance(v, float) else v for k, v in row.items()} for row in b]


# --- what is in a table ---


def test_a_part_of_the_data_has_a_row_per_sample_and_the_accuracy_of_an_evaluation(predict):
    rows = predict("run=digits", "input=test")
    assert [row["index"] for row in rows] == list(range(103))
    figures = lockstep.evaluate(["run=digits", *CPU])
    assert np.mean([row["class"] == row["target"] for row in rows]) == pytest.approx(figures["test/acc"], rel=1e-6)
    assert np.mean([row["loss"] for row in rows]) == pytest.approx(figures["test/loss"], rel=1e-5)
    assert list(rows[0]) == ["index", "target", "class", "probability", "loss"]
    assert len({row["index"] for row in predict("run=digits", "input=val")}) == 6


@pytest.mark.slow
def test_a_folder_a_glob_and_a_csv_of_its_files_say_what_its_test_part_says(predict, place):
    of_part = {row["path"]: row for row in predict("run=photos", "input=test")}
    of_folder = predict("run=photos", "input=photos")
    paths = sorted(str(path.relative_to(place)) for path in (place / "photos").rglob("*.*"))
    assert [row["path"] for row in of_folder] == paths
    assert {row["error"] for row in of_folder} == {""}
    for path, row in of_part.items():
        alone = next(each for each in of_folder if each["path"] == f"photos/{path}")
        assert (alone["class"], alone["probability"]) == (row["class"], pytest.approx(row["probability"], rel=1e-5))
        assert row["target"] == path.split("/")[0]
    globbed = predict("run=photos", "input=photos/r*/*.png")
    # batches differ in size
    assert close(globbed, [row for row in of_folder if re.match(r"photos/r.*png", row["path"])])
    for ending, between in (("csv", ","), ("tsv", "\t")):
        lines = [("target", "path"), *(("x", path) for path in reversed(of_part))]
        (place / f"photos/list.{ending}").write_text("".join(f"{between.join(line)}\n" for line in lines))
        listed = predict("run=photos", f"input=photos/list.{ending}")
        expected = [(path, "x", of_part[path]["class"]) for path in reversed(of_part)]
        assert [(row["path"], row["target"], row["class"]) for row in listed] == expected
    assert predict("run=photos", f"input={place}/photos/red/0.png")[0]["class"] in COLOURS


def test_the_samples_of_a_report_name_their_files(predict):
    files = {"/".join(Path(row["path"]).parts[-2:]): row for row in predict("run=photos", "input=test")}
    panels = lockstep.load_report("runs/photos").panels
    galleries = [
        panels["Largest losses"].samples,
        *(g.samples for title, g in panels.items() if title == "Random samples"),
    ]
    samples = [sample for gallery in galleries for sample in gallery]
    assert samples
    assert all(files[sample.facts["file"]]["target"] == sample.facts["target"] for sample in samples)


def test_the_most_probable_classes_and_all_probabilities_come_on_request(predict, place):
    rows = predict("run=photos", "input=test", "top_k=5", "probabilities=true")
    for row in rows:
        wide = {name: row[f"probability/{name}"] for name in COLOURS}
        ranked = sorted(wide, key=wide.get, reverse=True)
        assert [row["class"], row["class_2"], row["class_3"]] == ranked
        assert [row["probability"], row["probability_2"], row["probability_3"]] == [wide[name] for name in ranked]
        assert "class_4" not in row
    data = torch.load(place / "runs/photos/checkpoints/last.ckpt", weights_only=True)["DataModule"]["about"]
    row = next(row for row in rows if row["path"].endswith(".png"))
    with Image.open(place / "photos" / row["path"]) as image:
        square = F.center_crop(F.resize(image.convert("RGB"), [12]), [12, 12])
        pixels = np.asarray(square).transpose(2, 0, 1)
    mean, std = (torch.tensor(data[key]).view(-1, 1, 1) for key in ("mean", "std"))
    with torch.inference_mode():
        logits_BK = lockstep.load_model("runs/photos")(((torch.tensor(pixels) / 255 - mean) / std)[None])
    expected = dict(zip(data["classes"], logits_BK.softmax(1)[0].tolist(), strict=True))
    assert {name: row[f"probability/{name}"] for name in expected} == pytest.approx(expected, rel=1e-4)


# --- order and count ---


@pytest.mark.parametrize(
    ("strategy", "world"),
    [("ddp", 2), pytest.param("ddp", 3, marks=pytest.mark.slow), pytest.param("fsdp", 2, marks=pytest.mark.slow), pytest.param("dp", 1, marks=pytest.mark.slow)],
)  # fmt: skip
def test_the_table_is_the_same_for_every_number_of_processes(predict, strategy, world):
    """Of 103 samples in batches of 10, and of 30 files in one batch: neither is divided by the processes."""
    several = [f"strategy={strategy}", *([f"trainer.devices={world}"] if world > 1 else [])]
    for given in (["run=digits", "input=test"], ["run=photos", "input=photos/*/*.*"]):
        assert close(predict(*given, *several), predict(*given))


# --- broken files ---


@pytest.fixture
def broken(place, tmp_path) -> Path:
    folder = tmp_path / "some"
    write_classes(folder, 2)
    (folder / "a.png").write_bytes(b"")
    whole = (folder / "blue/0.png").read_bytes()
    (folder / "red/cut.png").write_bytes(whole[: len(whole) // 2])
    (folder / "list.csv").write_text("path\na.png\nblue/0.png\nnowhere.png\n")
    return folder


def test_broken_files_have_a_row_with_the_reason_and_the_others_their_prediction(predict, broken, capsys):
    rows = predict("run=photos", f"input={broken}")
    bad = [row for row in rows if row["error"]]
    assert [Path(row["path"]).name for row in bad] == ["a.png", "cut.png"]
    assert all(row["class"] is None and row["probability"] is None for row in bad)
    assert len([row for row in rows if row["class"] in COLOURS]) == len(rows) - 2 == 6
    assert re.search(r"WARNING: 2 of 8 files cannot be read(.|\n)*red/cut.png", capsys.readouterr().err)
    of_list = predict("run=photos", f"input={broken}/list.csv", ending="csv")
    assert [bool(row["error"]) for row in of_list] == [True, False, True]
    assert "No such file" in of_list[2]["error"]
    with pytest.raises(UserError, match=r"none of 1 files can be read:\n  .*a\.png: cannot identify"):
        lockstep.predict(["run=photos", f"input={broken}/a.png", f"output={broken}/none/table.csv", *CPU])
    assert not (broken / "none").exists()


@pytest.mark.slow
def test_broken_files_are_where_they_belong_by_workers_and_by_several_processes(predict, broken):
    asked = ["run=photos", f"input={broken}", "loader.eval_batch_size=3"]
    expected = predict(*asked)
    assert predict(*asked, "loader.num_workers=2") == expected
    assert close(predict(*asked, "strategy=ddp", "trainer.devices=2"), expected)


def test_a_prediction_leaves_the_folders_of_others_and_no_part_of_its_own(predict, tmp_path):
    for name in ("table.jsonl.parts", "table.jsonl.part"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-0.jsonl").write_text("mine")
    assert len(predict("run=digits", "input=test")) == 103
    assert {path.name for path in tmp_path.iterdir()} == {"table.jsonl", "table.jsonl.part", "table.jsonl.parts"}
    assert all(path.read_text() == "mine" for path in tmp_path.glob("*/rank-0.jsonl"))


# --- files ---


def test_two_predictions_do_not_write_one_table(predict, tmp_path):
    output, args = tmp_path / "table.jsonl", ("run=digits", "input=test")
    with lock_output(output, overwrite=False), pytest.raises(UserError, match="another prediction is writing it"):
        predict(*args)
    assert list(tmp_path.glob("table*")) == []
    predict(*args)
    with pytest.raises(UserError, match="exists"), lock_output(output, overwrite=False):  # written since it was asked
        pass
    assert not (tmp_path / ".table.jsonl.lock").exists()


def test_every_format_says_the_same(predict, broken):
    asked = ["run=photos", f"input={broken}", "top_k=2"]
    expected = predict(*asked)
    assert predict(*asked, ending="json") == predict(*asked, ending="parquet") == expected
    texts = [{name: "" if v is None else str(v) for name, v in row.items()} for row in expected]
    assert predict(*asked, ending="csv") == texts


def test_parquet_has_the_types_of_a_row_that_could_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "CHUNK", 2)
    rows = [{"path": str(i), "error": "broken"} for i in range(4)] + [{"path": "4", "price": 0.5, "error": ""}]
    parquet = pytest.importorskip("pyarrow.parquet")
    tables.write_table(tmp_path / "a.parquet", ".parquet", rows[-1], iter(rows))
    assert parquet.read_table(tmp_path / "a.parquet")["price"].to_pylist() == [None] * 4 + [0.5]


def test_the_default_is_a_file_beside_the_checkpoint_and_it_is_not_overwritten(place, tmp_path):
    asked = ["run=digits", "input=test", *CPU]
    done = lockstep.predict(asked)
    assert done["output"] == "runs/digits/predictions.csv"
    assert json.loads(Path("runs/digits/predict.json").read_text()) == done
    with pytest.raises(UserError, match=r"predictions.csv already exists. Set a different file, or overwrite=true"):
        lockstep.predict(asked)
    assert lockstep.predict([*asked, "overwrite=true"])["count"] == 103
    moved = shutil.copy(place / "runs/photos/checkpoints/last.ckpt", tmp_path / "moved.ckpt")  # without its data
    gone = ["data.root=nowhere", "data.cache_dir=nowhere"]
    done = lockstep.predict([f"checkpoint={moved}", "input=photos", *gone, *CPU])
    assert (done["output"], done["count"]) == (str(tmp_path / "predictions.csv"), 30)


def test_the_gallery_is_one_file_with_the_pictures_and_what_is_said_of_them(predict, place, tmp_path):
    (place / "odd").mkdir()
    Image.new("RGB", (20, 20), COLOURS["red"]).save(place / "odd/<b>&.png")
    (row,) = predict("run=photos", "input=odd", "gallery=true")
    page = (tmp_path / "table-gallery.html").read_text()
    assert page.count('<img src="data:image/png;base64,') == 1
    assert "<small>&lt;b&gt;&amp;.png</small>" in page and "<b>&.png" not in page
    assert f"<b>{row['class']}</b>" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")  # it needs no network


def test_the_gallery_begins_with_the_largest_losses_and_marks_what_is_wrong(predict, tmp_path):
    rows = predict("run=digits", "input=test", "gallery=true")
    page = (tmp_path / "table-gallery.html").read_text()
    assert f"{len(rows)} of {len(rows)} shown, the largest losses first" in page
    worst = sorted(rows, key=lambda row: -row["loss"])
    assert re.findall(r"<small>#(\d+)</small>", page) == [str(row["index"]) for row in worst]
    wrong = sum(row["class"] != row["target"] for row in rows)
    assert 0 < page.count('<figure data-right="wrong">') == wrong < len(rows)
    assert f"<dt>Wrong</dt><dd>{wrong} of {len(rows)}</dd>" in page
    assert f"<b>{worst[0]['target']} → {worst[0]['class']}</b><small>probability " in page


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], r"input is missing; set input=<input>"),
        (["input=photos", "top_k=0", "gallery=2"], r"top_k=0 is invalid(.|\n)*gallery=2 is invalid"),
        (["input=fotos", "output=a.xls"], r"the file extension must be one of .csv, .json, .jsonl, .parquet"),
        (["input=fotos"], r"input=fotos does not exist. Pass a folder of images, a glob in quotes"),
        (["input=empty"], r"input=empty has no images"),
        (["input=photos/*.tif"], r"input=photos/\*.tif has no images"),
        (["input=bad.csv"], r"bad.csv has no column path; it has file"),
        (["input=photos", "output=photos.csv"], r"output=photos.csv already exists"),
        (["input=photos", "trainer.limit_test_batches=2"], r"trainer.limit_test_batches=2 has no effect in a prediction"),
        (["input=photos", "optim.lr=1"], r"optim.lr=1 has no effect in a prediction"),
    ],
)  # fmt: skip
def test_a_mistake_is_refused(place, given, said):
    (place / "empty").mkdir(exist_ok=True)
    (place / "photos.csv").mkdir(exist_ok=True)
    (place / "bad.csv").write_text("file\nx.png\n")
    before = sorted(place.rglob("*"))
    with pytest.raises(UserError, match=said):
        lockstep.predict(["run=photos", *given, *CPU])
    assert sorted(place.rglob("*")) == before


def test_parquet_without_pyarrow_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "Run uv pip install pyarrow, or set output=a.csv" in next(output_problems(Path("a.parquet"), False))


def test_a_mistake_is_told_by_the_command(forked_command):
    for args, said in {
        ("input=x",): "Pass either run=<name> or checkpoint=<path>",
        ("run=a", "input=x", "-m"): "handles one run at a time",
    }.items():
        done = forked_command("predict.py", *args)
        assert (done.code, said in done.err) == (2, True), done
