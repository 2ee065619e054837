"""Predictions for files that are no images: sounds, rows of tables, lines of texts, read by `read` of the data set."""

import csv
import json
import re
import subprocess
import sys
import wave
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
import torch
import without_lockstep
from pages import Text

import lockstep
from lockstep.checkpoints import finding
from lockstep.errors import UserError
from lockstep.extras import exported
from lockstep.extras.export import export

pytestmark = pytest.mark.xdist_group("files")
CPU = ["trainer.accelerator=cpu"]
OWN = ["data=own", "model=own"]
SEVERAL = [
    "data._target_=mywork.data.Several", "+data.root=sounds", "model._target_=mywork.nets.Several", "task._target_=mywork.task.OfSeveral",
]  # fmt: skip
RATE, LENGTH = 8000, 400
DATA = """
import wave
from pathlib import Path

import numpy as np
import torch

from lockstep.data import Arrays, Batch, DataSet

from mywork.sounds import Sounds


class Read(DataSet):
    def __init__(self, *, root: str) -> None:
        self.about = {**self.explained(Path(root)), "classes": ["high", "low"]}
        files = sorted(path for path in Path(root).rglob("*") if path.name.endswith(self.endings))
        parts = [self.read(path).arrays["input"] for path in files]
        inputs = np.concatenate(parts)
        targets = np.repeat([int("low" in path.name) for path in files], [len(part) for part in parts])
        self.train, self.test = (Arrays(input=inputs[part::2], target=targets[part::2]) for part in (0, 1))

    def explained(self, root: Path) -> dict:
        return {}


class Table(Read):
    unit, endings = "rows", (".csv",)

    def explained(self, root: Path) -> dict:
        values = np.concatenate([np.loadtxt(path, np.float32, delimiter=",", skiprows=1) for path in root.glob("*.csv")])
        return {"inputs": ["width", "height"], "mean": values.mean(0).tolist()}

    def read(self, path: Path) -> Arrays:
        return Arrays(input=np.loadtxt(path, np.float32, delimiter=",", skiprows=1, ndmin=2))

    def preprocess(self, batch: Batch) -> Batch:
        return {**batch, "input": batch["input"] - batch["input"].new_tensor(self.about["mean"])}

    def network_arguments(self) -> dict:
        return {"size": 2}


class Numbers(Table):  # a column of the input is called like one of the report's
    def __init__(self, *, root: str) -> None:
        super().__init__(root=root)
        self.about = {**self.about, "targets": ["acc"], "inputs": ["loss", "height"]}
        inputs = [part.arrays["input"] for part in (self.train, self.test)]
        self.train, self.test = (Arrays(input=each, target=each[:, :1] * 2) for each in inputs)


class Lines(Read):
    unit, endings = "lines", (".txt",)

    def explained(self, root: Path) -> dict:
        return {"vocabulary": sorted({c for path in root.glob("*.txt") for c in path.read_text()}), "length": 12}

    def read(self, path: Path) -> Arrays:
        known, length = {c: i for i, c in enumerate(self.about["vocabulary"])}, self.about["length"]
        lines = [line.ljust(length)[:length] for line in path.read_text().splitlines()]
        return Arrays(input=np.array([[known[c] for c in line] for line in lines]))

    def network_arguments(self) -> dict:
        return {"tokens": len(self.about["vocabulary"])}


class Pairs(torch.utils.data.Dataset):
    def __init__(self, pairs: list) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple:
        return self.pairs[index]


class Raw(Lines):  # keeps texts, and encodes them in `preprocess`

    def __init__(self, *, root: str) -> None:
        self.about = {**self.explained(Path(root)), "classes": ["high", "low"]}
        files = [(int("low" in path.name), self.read(path).arrays["input"].tolist()) for path in sorted(Path(root).glob("*.txt"))]
        lines = [(text, target) for target, texts in files for text in texts]
        self.train, self.test = (Pairs(lines[part::2]) for part in (0, 1))

    def read(self, path: Path) -> Arrays:
        return Arrays(input=np.array([line.ljust(12)[:12] for line in path.read_text().splitlines()]))

    def preprocess(self, batch: Batch) -> Batch:
        known = {c: i for i, c in enumerate(self.about["vocabulary"])}
        return {**batch, "input": torch.tensor([[known[c] for c in text] for text in batch["input"]])}


class Several(Sounds):
    def preprocess(self, batch: Batch) -> Batch:
        wave_BT = batch["input"].float() / 32768
        return {**batch, "input": wave_BT, "peak": wave_BT.amax(1, keepdim=True), "sign": (batch["input"] > 0).long()}


class Forgetful(Sounds):
    def read(self, path: Path) -> dict:
        return {"input": np.zeros(self.length)}
"""
NETS = """
import torch
from torch import Tensor, nn


class Dense(nn.Sequential):
    def __init__(self, *, size: int, num_classes: int) -> None:
        super().__init__(nn.Linear(size, 16), nn.ReLU(), nn.Linear(16, num_classes))


class Number(nn.Linear):
    def __init__(self, *, size: int) -> None:
        super().__init__(size, 1)


class Several(nn.Module):
    def __init__(self, *, size: int, num_classes: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(2, 4), nn.Linear(size + 5, num_classes)

    def forward(self, sound: dict, signs: tuple, *, scale: Tensor) -> Tensor:
        (sign_BT,) = signs
        features = [sound["wave"], sound["peak"], self.embedding(sign_BT).mean(1)]
        return self.head(torch.cat(features, 1)) * scale


class Constant(Dense):
    def forward(self, input: Tensor, times: int) -> Tensor:
        return super().forward(input) * times


class Branching(Dense):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if input.sum() > 0 else super().forward(-input)


class Bag(nn.Module):
    def __init__(self, *, tokens: int, num_classes: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(tokens, 16), nn.Linear(16, num_classes)

    def forward(self, token_BT: Tensor) -> Tensor:
        return self.head(self.embedding(token_BT).mean(1))
"""
TASK = """
from lockstep.tasks import Classification


class OfSeveral(Classification):
    def outputs(self, net, batch):
        return net({"wave": batch["input"], "peak": batch["peak"]}, (batch["sign"],), scale=batch["peak"])


class Changed(Classification):
    def outputs(self, net, batch):
        return net(batch["input"], 3)
"""
SOUNDS = Text(lockstep.ROOT / "docs/predict-export.md").files["src/mywork/sounds.py"]
KINDS = {"sounds": ("sounds.Sounds", "Dense"), "tables": ("data.Table", "Dense"), "lines": ("data.Lines", "Bag")}


def write_sound(path: Path, hertz: float, rate: int = RATE, length: int = LENGTH) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes((20000 * np.sin(2 * np.pi * hertz / rate * np.arange(length))).astype("<i2").tobytes())


def write_inputs(folder: Path, seed: int, count: int = 12) -> None:
    random = np.random.default_rng(seed)
    for number in range(count):
        for name, hertz in (("high", 1500), ("low", 200)):
            write_sound(folder / f"sounds/{name}-{number}.wav", hertz + random.uniform(-50, 50), length=LENGTH - number)
    for name, sign, letters in (("high", 1, "abc"), ("low", -1, "xyz")):
        rows = random.normal(sign * 2, 1, (count, 2))
        (folder / "tables").mkdir(exist_ok=True)
        np.savetxt(folder / f"tables/{name}.csv", rows, "%.4f", ",", header="width,height", comments="")
        (folder / "lines").mkdir(exist_ok=True)
        lines = ["".join(random.choice(list(letters), 9)) + " <b>"[: number % 5] for number in range(count)]
        (folder / f"lines/{name}.txt").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def place(tmp_path_factory, forked) -> Iterator[Path]:
    """A project with a run of each of KINDS, its data, and `new` files."""
    place = tmp_path_factory.mktemp("files")
    package = place / "src/mywork"
    package.mkdir(parents=True)
    (place / "pyproject.toml").write_text("[tool.lockstep]\n")
    for name, text in {"__init__": "", "data": DATA, "nets": NETS, "task": TASK, "sounds": SOUNDS}.items():
        (package / f"{name}.py").write_text(text)
    write_inputs(place, 0)
    write_inputs(place / "new", 1, 3)
    options = ["data.batch_size=8", "trainer.max_steps=6", "trainer.precision=32-true", "optim.lr=1e-2", *CPU]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        for kind, (data, net) in KINDS.items():
            named = [f"data._target_=mywork.{data}", f"+data.root={kind}", f"model._target_=mywork.nets.{net}"]
            lockstep.train([f"run={kind}", *OWN, *named, *options])
        lockstep.train(["run=several", *OWN, *SEVERAL, *options])
        yield place
    for name in [name for name in sys.modules if name.split(".")[0] == "mywork"]:
        del sys.modules[name]


def predicted(*overrides: str, output: Path) -> list[dict]:
    lockstep.predict([*overrides, f"output={output}", "overwrite=true", *CPU])
    return [json.loads(line) for line in output.read_text().splitlines()]


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_predicted_as_the_same_samples_of_the_run_without_its_data(place, tmp_path, kind):
    of_part = predicted(f"run={kind}", "input=test", output=tmp_path / "part.jsonl")
    of_files = predicted(f"run={kind}", f"input={kind}", "data.root=gone", output=tmp_path / "files.jsonl")
    assert {row["error"] for row in of_files} == {""}
    of_test = of_files[1::2]
    assert [row["class"] for row in of_part] == [row["class"] for row in of_test]
    assert [row["probability"] for row in of_part] == pytest.approx([row["probability"] for row in of_test], rel=1e-5)
    several = ["strategy=ddp", "trainer.devices=2", "data.eval_batch_size=5"]
    if kind == "sounds":
        assert [row["path"] for row in of_files] == sorted(str(path) for path in Path(kind).iterdir())
        shared = predicted(f"run={kind}", f"input={kind}", *several, output=tmp_path / "ddp.jsonl")
        assert [row["class"] for row in shared] == [row["class"] for row in of_files]
    else:
        rows = [(str(path), row) for path in sorted(Path(kind).iterdir()) for row in range(12)]
        assert [(row["path"], row["row"]) for row in of_files] == rows


def test_a_list_of_files_gives_their_targets_and_what_cannot_be_read_is_said(place, tmp_path, capsys):
    write_sound(tmp_path / "in/slow.wav", 200, rate=4000)
    (tmp_path / "in/no.wav").write_text("no sound")
    write_sound(tmp_path / "in/good.wav", 200)
    (tmp_path / "in/list.csv").write_text("path,target\nslow.wav,low\nno.wav,high\ngood.wav,high\n")
    rows = predicted("run=sounds", f"input={tmp_path}/in/list.csv", output=tmp_path / "table.jsonl")
    assert [(row["target"], row["error"]) for row in rows] == [
        ("low", "its rate is 4000 Hz"), ("high", "file does not start with RIFF id"), ("high", "")]  # fmt: skip
    assert "2 of 3 files cannot be read" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:loadtxt")
def test_files_without_samples_or_with_other_shapes_are_rows_with_the_reason(place, tmp_path):
    """By predict.py and by load.py of an exported folder."""
    files = {"a": "width,height\n", "b": "width,height\n1,2\n3,4\n", "c": "width\n1\n", "d": "no,numbers\nx,y\n"}
    (tmp_path / "in").mkdir()
    for name, text in files.items():
        (tmp_path / f"in/{name}.csv").write_text(text)
    reasons = ["it holds no samples", "", "", "its input has the shape (1,), and that", "could not convert string 'x'"]
    rows = predicted("run=tables", f"input={tmp_path}/in", output=tmp_path / "table.jsonl")
    made = export(finding.tested_checkpoint("runs/tables", "export"), tmp_path / "exported")
    model = exported.load(made)
    for found in (rows, list(model.predict_files(exported.files([str(tmp_path / "in")], model.reader.endings)))):
        assert [Path(row["path"]).name[0] for row in found] == list("abbcd")
        assert all(row["error"].startswith(why) for row, why in zip(found, reasons, strict=True)), found
        assert [bool(row.get("class")) for row in found] == [not why for why in reasons]


def test_texts_that_preprocess_encodes_are_exported(place, tmp_path):
    options = ["data._target_=mywork.data.Raw", "+data.root=lines", "model._target_=mywork.nets.Bag", *CPU]
    lockstep.train(["run=raw", *OWN, *options, "data.batch_size=8", "trainer.max_steps=2", "trainer.precision=32-true"])
    expected = predicted("run=raw", "input=new/lines", output=tmp_path / "table.jsonl")
    model = exported.load(export(finding.tested_checkpoint("runs/raw", "export"), tmp_path / "exported"))
    rows = list(model.predict_files(exported.files(["new/lines"], model.reader.endings)))
    assert [(row["class"], row["error"]) for row in rows] == [(row["class"], "") for row in expected]


def test_names_of_sounds_are_addresses_in_the_gallery(place, tmp_path):
    for name in ("h#1", "p%20", "q?x=1", "two words"):
        write_sound(tmp_path / f"in/{name}.wav", 200)
    predicted("run=sounds", f"input={tmp_path}/in", "gallery=true", output=tmp_path / "t.jsonl")
    shown = re.findall(r'preload="none" src="([^"]+)">', (tmp_path / "t.jsonl.html").read_text())
    assert {(tmp_path / unquote(src)).resolve() for src in shown} == set((tmp_path / "in").iterdir())
    assert not any(letter in "".join(shown) for letter in "#? ")


def test_mistakes_are_named(place, tmp_path):
    with pytest.raises(UserError, match=r"input=lines holds no clips \(files that end in .wav\)"):
        lockstep.predict(["run=sounds", "input=lines", f"output={tmp_path}/a.csv", *CPU])
    with pytest.raises(UserError, match=r"none of 1 files can be read:\n  pyproject.toml: file does not start"):
        lockstep.predict(["run=sounds", "input=pyproject.toml", f"output={tmp_path}/a.csv", *CPU])
    forgets = ["data._target_=mywork.data.Forgetful", "input=sounds", f"output={tmp_path}/a.csv"]
    with pytest.raises(AttributeError, match="no attribute 'length'") as caught:
        lockstep.predict(["run=sounds", *forgets, *CPU])
    assert caught.value.__notes__ == ["Forgetful.read has self.about only: __init__ was not called."]
    assert list(tmp_path.iterdir()) == []


def test_the_gallery_shows_sounds_rows_and_lines(place, tmp_path):
    pages = {}
    for kind in KINDS:
        predicted(f"run={kind}", f"input=new/{kind}", "gallery=true", output=tmp_path / f"{kind}.jsonl")
        pages[kind] = (tmp_path / f"{kind}.jsonl.html").read_text()
        assert "6 of 6 shown, the least certain first" in pages[kind]
    files = re.findall(r'<audio controls preload="none" src="([^"]+)">', pages["sounds"])
    assert len(files) == pages["sounds"].count('<svg class="wave"') == 6
    assert {(tmp_path / file).resolve() for file in files} == set((place / "new/sounds").iterdir())
    first = next(csv.DictReader((place / "new/tables/high.csv").read_text().splitlines()))
    assert f"<small>width {float(first['width']):,.4f}</small>" in pages["tables"]
    line = (place / "new/lines/low.txt").read_text().splitlines()[2].ljust(12)[:12]
    assert f'<p class="tokens">{line.replace("<", "&lt;")}</p>' in pages["lines"]


def test_the_gallery_and_the_report_of_a_regression_tell_target_prediction_and_columns_apart(place, tmp_path):
    options = ["data._target_=mywork.data.Numbers", "+data.root=tables", "model._target_=mywork.nets.Number", *CPU]
    lockstep.train(["run=numbers", *OWN, "task=regression", *options, "data.batch_size=8", "trainer.max_steps=2"])
    rows = predicted("run=numbers", "input=test", "gallery=true", output=tmp_path / "t.jsonl")
    row = max(rows, key=lambda row: row["loss"])
    page = (tmp_path / "t.jsonl.html").read_text()
    assert page.split("<b>")[1].split("</b>")[0] == f"{row['target/acc']:,.4f} → {row['acc']:,.4f}"
    (gallery,) = (panel for panel in lockstep.load_report("runs/numbers").panels.values() if hasattr(panel, "samples"))
    facts = gallery.samples[0].facts
    assert facts["loss"] == pytest.approx(row["loss"], rel=1e-3)
    assert facts["input loss"] == pytest.approx(row["target/acc"] / 2, rel=1e-5)


def test_the_report_draws_and_plays_sounds(place):
    gallery = lockstep.load_report("runs/sounds").panels["Largest losses"]
    sound = gallery.samples[0].facts["sound"]
    sample = np.frombuffer((place / "sounds/high-0.wav").read_bytes()[44:], "<i2")
    assert (sound.rate, len(sound.wave_T), sound.wave_T.dtype) == (RATE, len(sample), np.int16)
    page = Path("runs/sounds/report.html").read_text()
    assert page.count('<svg class="wave"') == page.count('src="data:audio/wav;base64,') == len(gallery.samples) == 12


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of selenium
@pytest.mark.parametrize("kind", KINDS)
def test_the_gallery_fits_its_window_and_its_sounds_can_be_played(place, tmp_path, kind):
    browser = pytest.importorskip("browser")  # of benchmarks, which a copy may leave out
    if why := browser.missing():
        pytest.skip(why)
    predicted(f"run={kind}", f"input=new/{kind}", "gallery=true", output=tmp_path / "table.jsonl")
    with browser.browser() as driver:
        for width, dark in ((1280, False), (360, True)):
            browser.show(driver, tmp_path / "table.jsonl.html", width=width, dark=dark)
            assert driver.execute_script("return document.documentElement.scrollWidth") <= width
            paper = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
            assert paper == ("rgb(18, 20, 24)" if dark else "rgb(255, 255, 255)")
        loaded = """const done = arguments[0], all = [...document.querySelectorAll('audio')];
          Promise.all(all.map(a => new Promise(ok => { a.onloadedmetadata = a.onerror = () => ok(a.duration); a.preload = 'auto'; a.load() }))).then(done)"""
        durations = driver.execute_async_script(loaded)
        assert durations == pytest.approx([LENGTH / RATE] * 6 if kind == "sounds" else [], abs=0.01)
        assert driver.get_log("browser") == []


# --- exported folders ---


@pytest.mark.parametrize("kind", [*KINDS, "several"])
def test_an_exported_folder_predicts_files_as_the_run_does(place, tmp_path, kind):
    made = export(finding.tested_checkpoint(f"runs/{kind}", "export"), tmp_path / "exported", ["pt2"])
    files = f"new/{kind if kind in KINDS else 'sounds'}"
    expected = predicted(f"run={kind}", f"input={files}", output=tmp_path / "table.jsonl")
    model = exported.load(made)
    rows = list(model.predict_files(exported.files([files], model.reader.endings)))
    assert len(rows) == 6
    for row, other in zip(rows, expected, strict=True):
        assert row == {k: pytest.approx(v, rel=1e-4) if isinstance(v, float) else v for k, v in other.items()}
    graph = torch.export.load(made / "model.pt2").module()
    samples = [sample["input"] for _, sample in model.samples(exported.files([files], model.reader.endings))]
    for count in (1, 4):
        batch = {"input": torch.tensor(np.stack(samples[:count]))}
        inputs = exported.filled(model.inputs, model.reader.preprocess(batch))
        expected = exported.ACTIVATIONS["softmax"](model.call(*inputs))
        torch.testing.assert_close(graph(*inputs), expected, atol=1e-5, rtol=0)
    assert "- `model.pt2`: " in (made / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "several"])
def test_onnx_takes_what_the_network_takes(place, tmp_path, kind):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    made = export(finding.tested_checkpoint(f"runs/{kind}", "export"), tmp_path / "exported", ["onnx"])
    names = [each.name for each in runtime.InferenceSession(str(made / "model.onnx")).get_inputs()]
    assert len(names) == 4 if kind == "several" else names == ["input"]


def test_load_py_needs_no_lockstep(place, tmp_path):
    made = export(finding.tested_checkpoint("runs/tables", "export"), tmp_path / "exported")
    script = [sys.executable, without_lockstep.__file__, made / "load.py"]
    command = [*script, place / "new/tables", "--csv", "own.csv"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((tmp_path / "own.csv").read_text().splitlines()))
    assert [f"{Path(row['path']).name} {row['row']}" for row in rows] == [
        f"{n}.csv {row}" for n in ("high", "low") for row in range(3)
    ]
    assert {row["class"] for row in rows} <= {"high", "low"}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["task._target_=mywork.task.Changed", "model._target_=mywork.nets.Constant"], "Changed uses int besides tensors for a batch"),
        (["model._target_=mywork.nets.Branching"], r"--pt2: torch cannot export this network"),
    ],
)  # fmt: skip
def test_what_cannot_be_exported_is_refused_before_the_first_step_of_a_run_that_asks(place, changed, said):
    asked = ["run=asked", *OWN, "data._target_=mywork.sounds.Sounds", "+data.root=sounds", *changed]
    with pytest.raises(UserError, match=said):
        lockstep.train([*asked, "callbacks=[default,exportable]", "data.batch_size=8", "trainer.max_steps=2", *CPU])
    assert not Path("runs/asked").exists()


def test_a_trial_export_changes_no_bit_of_the_run(place):
    options = [*OWN, *SEVERAL, "data.batch_size=8", "trainer.max_steps=3", *CPU]
    plain, on_trial = (lockstep.train([f"callbacks=[{more}]", *options]) for more in ("default", "default,exportable"))
    assert plain["test/loss"] == on_trial["test/loss"]
