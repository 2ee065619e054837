"""Exported folders of images: the predictions of the run, for every task whose network takes images, without Lockstep; ONNX and torch.export."""

import ast
import csv
import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import without_lockstep
from pictures import COLOURS, write_classes
from PIL import Image, ImageOps

import lockstep
from lockstep.checkpoints import finding
from lockstep.data import pixels
from lockstep.errors import UserError
from lockstep.extras import export_parts, exported
from lockstep.extras.export import export

pytestmark = pytest.mark.xdist_group("export")
CPU = ["trainer.accelerator=cpu"]
TRAIN = ["data.batch_size=8", "data.image_size=12", "trainer.max_steps=4", "trainer.precision=32-true", "optim.lr=1e-3", *CPU]  # fmt: skip
LABELS = ["data=folder", "data.root=photos", "data.cache_dir=cache"]
PROJECT = {
    "pyproject.toml": "[tool.lockstep]\n",
    "src/garden/__init__.py": "import lockstep  # which an exported folder does without\n",
    "src/garden/nets/__init__.py": "",
    "src/garden/nets/small.py": """
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from garden import parts
from garden.nets.pooling import Mean

from ..numbers import WIDTH

if TYPE_CHECKING:
    import lockstep


def small(*, num_classes: int, in_channels: int, width: int = WIDTH) -> nn.Module:
    return nn.Sequential(parts.block(in_channels, width), Mean(), nn.Linear(width, num_classes))


def per_pixel(*, num_classes: int, in_channels: int, width: int = WIDTH) -> nn.Module:
    return nn.Sequential(parts.block(in_channels, width), nn.Conv2d(width, num_classes, 1))
""",
    "src/garden/nets/pooling.py": "from torch import nn\n\n\nclass Mean(nn.Module):\n    def forward(self, x):\n        return x.mean((2, 3))\n",
    "src/garden/parts.py": """
from torch import nn


def block(inside, outside):
    from . import numbers

    assert numbers.WIDTH
    return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU())
""",
    "src/garden/numbers.py": "WIDTH = 6\n",
    "src/garden/unused.py": "import lockstep\n",
    "src/garden/data.py": """
import numpy as np

from lockstep.data import Arrays, Images


class Masks(Images):
    classes = ("dark", "bright")

    def __init__(self, **images):
        super().__init__(**images)
        pixels = np.random.default_rng(0).integers(0, 256, (40, 3, 12, 12)).astype(np.uint8)
        masks = (pixels[:, 0] > 127).astype(np.uint8)
        self.train, self.test = (Arrays(input=pixels[part], target=masks[part]) for part in (slice(8, 40), slice(8)))


class Halved(Masks):
    def preprocess(self, batch):
        return super().preprocess({**batch, "input": batch["input"] // 2})
""",
}
OWN = ["model=own", "model._target_=garden.nets.small.small", "+model.width=8"]
PIXELS = ["model=own", "model._target_=garden.nets.small.per_pixel", "task=segmentation", "data=own_images"]
NUMBERS = ["data.csv=numbers.csv", "data.target=number", "task=regression"]
MASKS = ["data._target_=garden.data.Masks", "data.mean=[0.5,0.5,0.5]", "data.std=[0.25,0.25,0.25]"]
SHUFFLENET = ["model=own", "model._target_=torchvision.models.shufflenet_v2_x0_5", "+model.num_classes=3"]
RUNS = {
    "basic": LABELS,
    "own": [*LABELS, *OWN],
    "labels": [*LABELS, *OWN, "data.csv=labels.csv", "data.target=labels", "task=multilabel"],
    "number": [*LABELS, *OWN, *NUMBERS],
    "masks": [*PIXELS, *MASKS],
    "torchvision": [*LABELS, *SHUFFLENET],
    "timm": [*LABELS, "model=timm", "model.name=test_resnet", "data.image_size=32"],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Path]:
    """A project with a network of several files, and photos with class folders, labels and numbers."""
    place = tmp_path_factory.mktemp("export")
    for name, text in PROJECT.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    write_classes(place / "photos", 10)
    files = [f"{colour}/{path.name}" for colour in COLOURS for path in sorted((place / "photos" / colour).iterdir())]
    for name, target in {
        "labels": lambda i, path: "|".join(["old"] * (i % 2) + [path.split("/")[0]] * (i % 3 > 0)),
        "numbers": lambda i, _: i,
    }.items():
        rows = [f"{path},{target(i, path)}" for i, path in enumerate(files)]
        (place / f"photos/{name}.csv").write_text("\n".join(["path,target", *rows]) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        yield place
    for name in [name for name in sys.modules if name.split(".")[0] == "garden"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def run(place):
    """Trains a run once; returns its checkpoint."""

    def trained(name: str) -> Path:
        if not (place / "runs" / name).is_dir():
            lockstep.train([f"run={name}", *TRAIN, *RUNS[name]])
        return finding.tested_checkpoint(f"runs/{name}", "export")

    return trained


QUICK = ("own", "masks")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in RUNS])
def test_the_folder_predicts_files_as_the_run_does(run, name, tmp_path):
    """In this process; the next test does it in one without Lockstep."""
    made = export(run(name), tmp_path / "exported")
    model = exported.load(made)
    lockstep.predict([f"run={name}", "input=photos", f"output={tmp_path}/table.jsonl", *CPU])
    expected = [json.loads(line) for line in (tmp_path / "table.jsonl").read_text().splitlines()]
    found = list(model.predict_files(exported.files(["photos"], model.reader.endings)))
    assert len(found) == 30
    for row, other in zip(found, expected, strict=True):
        if name == "masks":
            other["mask"] = np.asarray(Image.open(tmp_path / other["mask"])).tolist()
            row["mask"] = np.asarray(row["mask"]).tolist()
        assert row == {k: pytest.approx(v, rel=1e-4, abs=1e-6) if isinstance(v, float) else v for k, v in other.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["own", "masks", "labels", "timm"])
def test_load_py_writes_the_same_table_where_lockstep_cannot_be_imported(run, place, name, tmp_path, monkeypatch):
    made = export(run(name), tmp_path / "exported")
    (tmp_path / "images").mkdir()
    for number, path in enumerate(sorted((place / "photos").rglob("*.png"))[:7]):
        (tmp_path / "images" / f"{number}.png").write_bytes(path.read_bytes())
    (tmp_path / "images/broken.png").write_text("")
    sideways = Image.Exif()
    sideways[0x112] = 6
    for name_of, mode in {"tall.jpg": "RGB", "tall.tif": "RGB", "grey.png": "L"}.items():
        Image.effect_noise((31, 18), 90).convert(mode).save(tmp_path / "images" / name_of, exif=sideways)
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, without_lockstep.__file__, made / "load.py", "images", "--csv", "own.csv"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    monkeypatch.setenv("LOCKSTEP_PROJECT", str(place))
    lockstep.predict([f"run={name}", f"runs_dir={place}/runs", "input=images", "output=table.csv", *CPU])
    own, table = ((tmp_path / file).read_text().replace("own-mask", "table-mask") for file in ("own.csv", "table.csv"))
    numbers = re.compile(r"\b[01]\.\d+\b")
    assert numbers.sub("", own) == numbers.sub("", table)
    assert list(map(float, numbers.findall(own))) == pytest.approx(list(map(float, numbers.findall(table))), rel=1e-4)
    for row in csv.DictReader(table.splitlines()) if name == "masks" else ():
        assert bool(row["error"]) == row["path"].endswith("broken.png") == (not row["mask"])
        if row["mask"]:
            assert Path(row["mask"]).read_bytes() == Path(row["mask"].replace("table", "own")).read_bytes()
            with Image.open(row["path"]) as image, Image.open(row["mask"]) as mask:
                assert mask.size == ImageOps.exif_transpose(image).size


def test_the_folder_of_a_sweeps_job_has_the_sweeps_name(run, place, tmp_path, monkeypatch):
    job = tmp_path / "runs/rates/0"
    shutil.copytree(run("basic").parents[1], job)
    (job.parent / "multirun.yaml").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["export.py", str(job), "--files", str(place / "photos")])
    runpy.run_path(str(lockstep.ROOT / "scripts/export.py"), run_name="export")["main"]()
    assert (tmp_path / "exports/rates-0/load.py").is_file()


# --- source files ---


def test_all_files_that_a_network_needs_are_copied_and_no_others(run, tmp_path):
    made = export(run("own"), tmp_path / "exported")
    files = {path.relative_to(made / "source").as_posix() for path in (made / "source").rglob("*.py")}
    assert files == {f"garden/{name}.py" for name in (
        "__init__", "parts", "numbers", "nets/__init__", "nets/small", "nets/pooling")}  # fmt: skip
    assert (made / "source/garden/__init__.py").read_text() == ""
    assert json.loads((made / "model.json").read_text())["target"] == "garden.nets.small.small"
    with pytest.raises(UserError, match=r"unused.py imports lockstep: the files of an exported network"):
        export_parts.needed("garden.unused")


# --- comparison ---


@pytest.mark.slow
@pytest.mark.parametrize("name", ["basic", "own", "number", "masks", "labels", "timm", "torchvision"])
def test_onnx_and_torch_export_give_the_outputs_of_the_network_for_any_batch_and_any_size(run, name, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    made = export(run(name), tmp_path / "exported", ["onnx", "pt2"])
    model = exported.load(made)
    side = model.reader.normalise.image_size
    session = runtime.InferenceSession(str(made / "model.onnx"), providers=["CPUExecutionProvider"])
    (given,), (output,) = session.get_inputs(), session.get_outputs()
    assert (given.name, given.type) == ("image", "tensor(uint8)")
    assert output.name == ("values" if name == "number" else "probabilities")
    graph = torch.export.load(made / "model.pt2").module()
    random = np.random.default_rng(0)
    for batch in (1, 5, 100):
        for size in ((side, side), (37, 50)):
            images = random.integers(0, 256, (batch, 3, *size)).astype(np.uint8)
            expected = model.outputs(torch.from_numpy(images))
            torch.testing.assert_close(graph(torch.from_numpy(images)), expected, atol=1e-4, rtol=0)
            found = session.run(None, {"image": images})[0]
            torch.testing.assert_close(torch.from_numpy(found), expected, atol=1e-4, rtol=0)
    card = (made / "README.md").read_text()
    assert all(f"- `{file}`: " in card for file in ("load.py", "model.onnx", "model.pt2"))


def test_a_graph_that_differs_is_refused_with_the_difference_and_nothing_is_kept(run, tmp_path, monkeypatch):
    checkpoint = run("own")

    def wrong(model, formats, part, examples):
        (part / "model.onnx").write_text("")
        return {"model.onnx": lambda image_BCHW: model.outputs(image_BCHW) + 0.01 * (len(image_BCHW) == 1)}

    monkeypatch.setattr(export_parts, "write_graphs", wrong)
    with pytest.raises(UserError, match=r"model.onnx differs from the network by 0.01 on 3 samples in batches of 1"):
        export(checkpoint, tmp_path / "exported", ["onnx"])

    def frozen(model, *_):
        def run(image_BCHW):
            assert len(image_BCHW) == 1, "Got invalid dimensions for input: image"
            return model.outputs(image_BCHW)

        return {"model.onnx": run}

    monkeypatch.setattr(export_parts, "write_graphs", frozen)
    with pytest.raises(UserError, match=r"model.onnx does not run on a batch of 5: Got invalid dimensions"):
        export(checkpoint, tmp_path / "exported", ["onnx"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_data_that_prepares_its_images_otherwise_is_found_out(run, tmp_path):
    lockstep.train(["run=halved", *TRAIN, *RUNS["masks"], "data._target_=garden.data.Halved"])
    with pytest.raises(UserError, match=r"load.py differs from the network by .* on 8 samples"):
        export(finding.tested_checkpoint("runs/halved", "export"), tmp_path / "exported")
    lockstep.predict(["run=halved", "input=photos", f"output={tmp_path}/table.csv", *CPU])
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 31


def test_without_the_runs_data_other_images_are_needed(run, tmp_path):
    checkpoint = tmp_path / "moved.ckpt"
    content = torch.load(run("own"), weights_only=True)
    content["config"]["data"] |= {"root": "nowhere", "cache_dir": str(tmp_path / "none")}
    torch.save(content, checkpoint)
    with pytest.raises(UserError, match=r"it cannot be read: data.root=nowhere .* Pass --files <folder>"):
        export(checkpoint, tmp_path / "exported")
    made = export(checkpoint, tmp_path / "again", files="photos")
    assert "on 30 images" in (made / "README.md").read_text()


# --- what is refused, and the card ---


@pytest.mark.slow
def test_of_a_task_with_its_own_predictions_the_networks_outputs_are_exported(place, run, tmp_path):
    (place / "src/garden/task.py").write_text(
        "from lockstep.tasks import Classification\n"
        "class Own(Classification):\n    def predictions(self, output):\n        return {'best': output.argmax(1)}\n"
    )
    lockstep.train(["run=task", *TRAIN, *RUNS["own"], "task._target_=garden.task.Own"])
    made = export(finding.tested_checkpoint("runs/task", "export"), tmp_path / "exported")
    images = torch.randint(0, 256, (2, 3, 20, 20), dtype=torch.uint8)
    rows = exported.load(made).predict(images)
    assert [len(row["output"]) for row in rows] == [3, 3]
    assert "returns what the network itself returns" in (made / "README.md").read_text()


def test_packages_that_onnx_needs_are_named(run, tmp_path, monkeypatch):
    monkeypatch.setattr(export_parts, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"--onnx needs onnx, onnxscript, onnxruntime, which are not installed"):
        export(run("own"), tmp_path / "exported", ["onnx"])


def test_the_card_has_the_data_the_figures_and_what_differs(run, place, tmp_path):
    made = export(run("own"), tmp_path / "exported")
    report = json.loads((place / "runs/own/report.json").read_text())
    card = (made / "README.md").read_text()
    for said in (
        f"sha256: `{report['data/sha256']}`", "classes: blue, green, red", f"| test/acc | {report['test/acc']:.4f} | 3 |",
        "- `data.image_size=12`", "- `++model.width=8`", f"with {report['parameters']:,} parameters", "torch 2.", "(MIT)",
        "`source` has the licence of the project", "is not known here", "python load.py <folder or files>",
    ):  # fmt: skip
        assert said in card, said
    assert "`seed=" not in card
    assert {path.name for path in made.iterdir()} == {
        "model.safetensors", "model.json", "config.yaml", "classes.json", "preprocessing.json", "preprocess.py", "load.py", "README.md", "source"
    }  # fmt: skip
    assert len({path.stat().st_mode for path in made.iterdir() if path.is_file()}) == 1


@pytest.mark.parametrize("source", [pixels, exported], ids=lambda module: module.__name__)
def test_a_copied_file_imports_only_what_the_folder_needs(source):
    tree = ast.parse(Path(source.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    packages = {name.partition(".")[0] for name in names}
    assert packages - sys.stdlib_module_names <= {"torch", "numpy", "PIL", "timm", "torchvision", "safetensors"}
