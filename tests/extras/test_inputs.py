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
import thin_project
import torch
import without_lockstep
import your_own
from pages import Text

import lockstep
from lockstep.checkpoints import finding
from lockstep.errors import UserError
from lockstep.extras import exported
from lockstep.extras.export import export

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("files")]
CPU = ["trainer.accelerator=cpu"]
OWN = ["data=own", "model=own"]
RATE, LENGTH = 8000, 400
DATA = """
from pathlib import Path

import numpy as np
import torch
from lockstep import Arrays, DataSet
from mywork.sounds import Sounds

class Read(DataSet):
    def __init__(self, *, root):
        self.metadata = {**self.explained(Path(root)), "classes": ["high", "low"]}
        files = sorted(path for path in Path(root).rglob("*") if path.name.endswith(self.endings))
        parts = [self.read(path).arrays["input"] for path in files]
        inputs = np.concatenate(parts)
        targets = np.repeat([int("low" in path.name) for path in files], [len(part) for part in parts])
        self.train, self.test = (Arrays(input=inputs[part::2], target=targets[part::2]) for part in (0, 1))

class Table(Read):
    unit, endings = "rows", (".csv",)

    def explained(self, root):
        return {"inputs": ["width", "height"]}

    def read(self, path):
        return Arrays(input=np.loadtxt(path, np.float32, delimiter=",", skiprows=1, ndmin=2))

    def model_kwargs(self):
        return {"size": 2}

class Numbers(Table):  # a column of the input is called like one of the report's
    def __init__(self, *, root):
        super().__init__(root=root)
        self.metadata = {**self.metadata, "targets": ["acc"], "inputs": ["loss", "height"]}
        inputs = [part.arrays["input"] for part in (self.train, self.test)]
        self.train, self.test = (Arrays(input=each, target=each[:, :1] * 2) for each in inputs)

class Lines(Read):
    unit, endings = "lines", (".txt",)

    def explained(self, root):
        return {"vocabulary": sorted({c for path in root.glob("*.txt") for c in path.read_text()})}

    def read(self, path):
        return Arrays(input=self.encoded([line.ljust(12)[:12] for line in path.read_text().splitlines()]))

    def encoded(self, lines):
        return np.array([[self.metadata["vocabulary"].index(c) for c in line] for line in lines])

    def model_kwargs(self):
        return {"tokens": len(self.metadata["vocabulary"])}

class Texts(Lines):  # encodes its lines in `preprocess`
    def __init__(self, *, root):
        super().__init__(root=root)
        columns = [[column.tolist() for column in part.arrays.values()] for part in (self.train, self.test)]
        self.train, self.test = (torch.utils.data.StackDataset(*each) for each in columns)

    def read(self, path):
        return Arrays(input=np.array([line.ljust(12)[:12] for line in path.read_text().splitlines()]))

    def preprocess(self, batch):
        return {**batch, "input": torch.from_numpy(self.encoded(batch["input"]))}

class Several(Sounds):
    def preprocess(self, batch):
        wave_BT = batch["input"].float() / 32768
        return {**batch, "input": wave_BT, "peak": wave_BT.amax(1, keepdim=True), "sign": (batch["input"] > 0).long()}

class Forgetful(Sounds):
    def read(self, path):
        return {"input": np.zeros(self.length)}
"""
NETS = """
import torch
from torch import Tensor, nn

class Dense(nn.Sequential):
    def __init__(self, *, size: int, num_classes: int = 1):
        super().__init__(nn.Linear(size, 16), nn.ReLU(), nn.Linear(16, num_classes))

class Several(nn.Module):
    def __init__(self, *, size: int, num_classes: int):
        super().__init__()
        self.embedding, self.head = nn.Embedding(2, 4), nn.Linear(size + 5, num_classes)

    def forward(self, sound: dict, signs: tuple, *, scale: Tensor):
        features = [sound["wave"], sound["peak"], self.embedding(signs[0]).mean(1)]
        return self.head(torch.cat(features, 1)) * scale

class Constant(Dense):
    def forward(self, input, times: int):
        return super().forward(input) * times

class Branching(Dense):
    def forward(self, input):
        return super().forward(input) if input.sum() > 0 else super().forward(-input)

class Bag(nn.Sequential):
    def __init__(self, *, tokens: int, num_classes: int):
        super().__init__(nn.Embedding(tokens, 16), nn.Flatten(), nn.Linear(12 * 16, num_classes))
"""
TASK = """
from lockstep.kit.tasks import Classification

class OfSeveral(Classification):
    def outputs(self, net, batch):
        return net({"wave": batch["input"], "peak": batch["peak"]}, (batch["sign"],), scale=batch["peak"])

class Changed(Classification):
    def outputs(self, net, batch):
        return net(batch["input"], 3)
"""
SOUNDS = Text(lockstep.ROOT / "docs/predict-export.md").files["src/mywork/sounds.py"]
KINDS = ("sounds", "tables", "lines")
RUNS = {
    "sounds": ["data._target_=mywork.sounds.Sounds", "+data.root=sounds", "model._target_=mywork.nets.Dense"],
    "tables": ["data._target_=mywork.data.Table", "+data.root=tables", "model._target_=mywork.nets.Dense"],
    "lines": ["data._target_=mywork.data.Lines", "+data.root=lines", "model._target_=mywork.nets.Bag"],
    "texts": ["data._target_=mywork.data.Texts", "+data.root=lines", "model._target_=mywork.nets.Bag"],
    "several": ["data._target_=mywork.data.Several", "+data.root=sounds", "model._target_=mywork.nets.Several", "task._target_=mywork.task.OfSeveral"],
    "numbers": ["data._target_=mywork.data.Numbers", "+data.root=tables", "model._target_=mywork.nets.Dense", "task=regression"],
}  # fmt: skip
OPTIONS = [*OWN, "loader.batch_size=8", "trainer.max_steps=6", "trainer.precision=32-true", "optim.lr=1e-2", *CPU]


def write_sound(path: Path, hertz: float, length: int = LENGTH) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes((20000 * np.sin(2 * np.pi * hertz / RATE * np.arange(length))).astype("<i2").tobytes())


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
    """A project with each of RUNS, their data, and `new` files."""
    files = {"__init__": "", "data": DATA, "nets": NETS, "task": TASK, "sounds": SOUNDS}
    package = {f"src/mywork/{name}.py": text for name, text in files.items()}
    with thin_project.entered(tmp_path_factory.mktemp("files"), "mywork", **package) as place:
        write_inputs(place, 0)
        write_inputs(place / "new", 1, 3)
        for name, overrides in RUNS.items():
            lockstep.train([f"run={name}", *OPTIONS, *overrides])
        yield place
    your_own.forget()


@pytest.fixture(scope="module")
def exports(place) -> dict[str, Path]:
    """The folders of all runs, with graphs for torch."""
    tested = {name: finding.tested_checkpoint(f"runs/{name}", "export") for name in RUNS}
    return {name: export(path, place / "exported" / name, ["pt2"]) for name, path in tested.items()}


def predicted(*overrides: str, output: Path) -> list[dict]:
    lockstep.predict([*overrides, f"output={output}", "overwrite=true", *CPU])
    return [json.loads(line) for line in output.read_text().splitlines()]


def predicted_by_folder(folder: Path, files: Path | str) -> list[dict]:
    model = exported.load(folder)
    return list(model.predict_files(model.files([str(files)])))


def close(row: dict) -> dict:
    return {name: pytest.approx(value, rel=1e-4) if isinstance(value, float) else value for name, value in row.items()}


@pytest.mark.parametrize("kind", [*KINDS, "texts", "several"])
def test_files_are_predicted_as_the_samples_of_the_run_and_by_an_exported_folder(place, exports, tmp_path, kind):
    """Without the run's data."""
    files = {"texts": "lines", "several": "sounds"}.get(kind, kind)
    of_part = predicted(f"run={kind}", "input=test", output=tmp_path / "part.jsonl")
    of_files = predicted(f"run={kind}", f"input={files}", "data.root=gone", output=tmp_path / "files.jsonl")
    rows = (None,) if files == "sounds" else range(12)
    expected = [(str(path), row, "") for path in sorted(Path(files).iterdir()) for row in rows]
    assert [(row["path"], row.get("row"), row["error"]) for row in of_files] == expected
    for row, other in zip(of_part, of_files[1::2], strict=True):
        assert (row["class"], row["probability"]) == (other["class"], pytest.approx(other["probability"], rel=1e-5))
    if kind == "sounds":
        several = ["strategy=ddp", "trainer.devices=2", "loader.eval_batch_size=5"]
        shared = predicted(f"run={kind}", f"input={files}", *several, output=tmp_path / "ddp.jsonl")
        assert shared == [close(row) for row in of_files]
    assert predicted_by_folder(exports[kind], files) == [close(row) for row in of_files]
    model, graph = exported.load(exports[kind]), torch.export.load(exports[kind] / "model.pt2").module()
    samples = [sample for _, sample in model.samples(model.files([files]))]
    for count in (1, 4):
        inputs = model.arguments(samples[:count])
        torch.testing.assert_close(graph(*inputs), model.outputs(*inputs), atol=1e-5, rtol=0)
    assert "- `model.pt2`: " in (exports[kind] / "README.md").read_text()
    if kind == "tables":  # where Lockstep is not installed
        command = [
            sys.executable,
            without_lockstep.__file__,
            exports[kind] / "load.py",
            files,
            "--csv",
            tmp_path / "own.csv",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        rows = list(csv.DictReader((tmp_path / "own.csv").read_text().splitlines()))
        assert [(row["path"], row["class"]) for row in rows] == [(row["path"], row["class"]) for row in of_files]


@pytest.mark.filterwarnings("ignore:loadtxt")
def test_files_without_samples_or_with_other_shapes_are_rows_with_the_reason(place, exports, tmp_path):
    """By predict.py and by load.py of an exported folder."""
    files = {"a": "width,height\n", "b": "width,height\n1,2\n3,4\n", "c": "width\n1\n", "d": "no,numbers\nx,y\n"}
    (tmp_path / "in").mkdir()
    for name, text in files.items():
        (tmp_path / f"in/{name}.csv").write_text(text)
    reasons = [
        "it contains no samples",
        "",
        "",
        "its input has shape (1,), but in other",
        "could not convert string 'x'",
    ]
    rows = predicted("run=tables", f"input={tmp_path}/in", output=tmp_path / "table.jsonl")
    for found in (rows, predicted_by_folder(exports["tables"], tmp_path / "in")):
        assert [Path(row["path"]).name[0] for row in found] == list("abbcd")
        assert all(row["error"].startswith(why) for row, why in zip(found, reasons, strict=True)), found
        assert [bool(row.get("class")) for row in found] == [not why for why in reasons]


def test_mistakes_are_named(place, tmp_path):
    asked = ["run=sounds", f"output={tmp_path}/a.csv", *CPU]
    with pytest.raises(UserError, match=r"input=lines has no clips"):
        lockstep.predict([*asked, "input=lines"])
    with pytest.raises(AttributeError, match="no attribute 'length'") as caught:
        lockstep.predict([*asked, "input=sounds", "data._target_=mywork.data.Forgetful"])
    assert caught.value.__notes__ == ["Forgetful.read can use only self.metadata, because __init__ was not called."]
    assert list(tmp_path.iterdir()) == []


def test_the_gallery_shows_sounds_rows_and_lines(place, tmp_path):
    names = ("h#1", "p%20", "q?x=1", "two words")  # of files; in the page they are addresses
    for name in names:
        write_sound(tmp_path / f"in/{name}.wav", 200)
    pages = {}
    for kind, files in {"sounds": tmp_path / "in", "tables": "new/tables", "lines": "new/lines"}.items():
        rows = predicted(f"run={kind}", f"input={files}", "gallery=true", output=tmp_path / f"{kind}.jsonl")
        pages[kind] = (tmp_path / f"{kind}-gallery.html").read_text()
        assert f"{len(rows)} of {len(rows)} shown, the least certain first" in pages[kind]
    sources = re.findall(r'<audio controls preload="none" src="([^"]+)">', pages["sounds"])
    assert len(sources) == pages["sounds"].count('<svg class="wave"') == len(names)
    assert {(tmp_path / unquote(source)).resolve() for source in sources} == set((tmp_path / "in").iterdir())
    assert not any(letter in "".join(sources) for letter in "#? ")
    first = next(csv.DictReader((place / "new/tables/high.csv").read_text().splitlines()))
    assert f"<small>width {float(first['width']):,.4f}</small>" in pages["tables"]
    line = (place / "new/lines/low.txt").read_text().splitlines()[2].ljust(12)[:12]
    assert f'<p class="tokens">{line.replace("<", "&lt;")}</p>' in pages["lines"]


def test_the_gallery_and_the_report_of_a_regression_tell_target_prediction_and_columns_apart(place, tmp_path):
    rows = predicted("run=numbers", "input=test", "gallery=true", output=tmp_path / "t.jsonl")
    row = max(rows, key=lambda row: row["loss"])
    page = (tmp_path / "t-gallery.html").read_text()
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
            browser.show(driver, tmp_path / "table-gallery.html", width=width, dark=dark)
            assert driver.execute_script("return document.documentElement.scrollWidth") <= width
            paper = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
            assert paper == ("rgb(18, 20, 24)" if dark else "rgb(255, 255, 255)")
        loaded = """const done = arguments[0], all = [...document.querySelectorAll('audio')];
          Promise.all(all.map(a => new Promise(ok => { a.onloadedmetadata = a.onerror = () => ok(a.duration); a.preload = 'auto'; a.load() }))).then(done)"""
        durations = driver.execute_async_script(loaded)
        assert durations == pytest.approx([LENGTH / RATE] * 6 if kind == "sounds" else [], abs=0.01)
        assert driver.get_log("browser") == []


# --- exported folders ---


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "several"])
def test_onnx_takes_what_the_network_takes(place, tmp_path, kind):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    made = export(finding.tested_checkpoint(f"runs/{kind}", "export"), tmp_path / "exported", ["onnx"])
    names = [each.name for each in runtime.InferenceSession(str(made / "model.onnx")).get_inputs()]
    assert len(names) == 4 if kind == "several" else names == ["input"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["task._target_=mywork.task.Changed", "model._target_=mywork.nets.Constant"], "Changed uses int besides tensors. Call it once"),
        (["model._target_=mywork.nets.Branching"], r"--pt2: torch cannot export this network"),
    ],
)  # fmt: skip
def test_what_cannot_be_exported_is_refused_before_the_first_step_of_a_run_that_asks(place, changed, said):
    with pytest.raises(UserError, match=said):
        lockstep.train(["run=asked", *OPTIONS, *RUNS["sounds"], *changed, "callbacks=[default,exportable]"])
    assert not Path("runs/asked").exists()


def test_a_trial_export_changes_no_bit_of_the_run(place):
    on_trial = lockstep.train(["callbacks=[default,exportable]", *OPTIONS, *RUNS["several"]])
    assert on_trial["test/loss"] == lockstep.load_report("runs/several")["test/loss"]
