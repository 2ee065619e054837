"""Exported folders of images: the predictions of the run, for every task whose network takes images, without Lockstep; ONNX and torch.export."""

import csv
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import export as export_script
import numpy as np
import pytest
import thin_project
import torch
import without_lockstep
from pictures import COLOURS, write_classes
from PIL import Image, ImageOps
from safetensors.torch import load_file

import lockstep
from lockstep.checkpoints import finding
from lockstep.errors import UserError
from lockstep.extras import export_parts, exported
from lockstep.extras.export import export
from lockstep.kit import pixels

pytestmark = pytest.mark.xdist_group("export")
CPU = ["trainer.accelerator=cpu"]
TRAIN = ["loader.batch_size=8", "data.image_size=12", "trainer.max_steps=4", "trainer.precision=32-true", "optim.lr=1e-3", *CPU]  # fmt: skip
LABELS = ["data=folder", "data.root=photos", "data.cache_dir=cache"]
PROJECT = {
    "src/garden/__init__.py": "import lockstep  # which an exported folder does without\n",
    "src/garden/nets/__init__.py": "",
    "src/garden/nets/small.py": """
from typing import TYPE_CHECKING

from torch import nn

from garden import parts
from garden.nets.pooling import Mean

from ..numbers import WIDTH

if TYPE_CHECKING:
    import lockstep


def small(*, num_classes: int, in_channels: int, width: int = WIDTH, per_pixel: bool = False) -> nn.Module:
    head = [nn.Conv2d(width, num_classes, 1)] if per_pixel else [Mean(), nn.Linear(width, num_classes)]
    return nn.Sequential(parts.block(in_channels, width), *head)
""",
    "src/garden/nets/pooling.py": "from torch import nn\nclass Mean(nn.Module):\n    def forward(self, x):\n        return x.mean((2, 3))\n",
    "src/garden/nets/pair.py": """
import torch
from torch import nn

from garden import parts
from garden.nets.pooling import Mean


class Scaled(nn.Module):
    def forward(self, x, *, by):
        return x * by


class Head(nn.Linear):
    def forward(self, x, *, mask=None):
        return super().forward(x)


class Pair(nn.Module):
    def __init__(self, *, num_classes, in_channels):
        super().__init__()
        self.encoder = nn.Sequential(parts.block(in_channels, 6), Mean())
        self.activation = nn.ReLU(inplace=True)
        self.decoder = nn.ModuleDict({"layers": nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6)), "scaled": Scaled()})
        self.head, self.decay = Head(6, num_classes), nn.Linear(6, 1)

    def forward(self, x):
        features = self.encoder(x)
        features -= 2 * self.encoder(x.flip(-1).relu())  # in place: no longer what the encoder returned
        features = self.decoder["layers"](features)
        features = self.decoder["scaled"](x=features, by=features.abs().amax(1, keepdim=True))
        return self.head(self.activation(features), mask=None)
""",
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
from lockstep import Arrays
from lockstep.kit import Images

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
    "src/garden/task.py": """
from lockstep.kit.tasks import Classification

class Own(Classification):
    def predictions(self, output):
        return {'best': output.argmax(1)}
""",
}
OWN = ["model=own", "model._target_=garden.nets.small.small", "+model.width=8"]
PIXELS = [*OWN, "+model.per_pixel=true", "task=segmentation", "data=own_images"]
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
    "task": [*LABELS, *OWN, "task._target_=garden.task.Own"],
    "halved": [*PIXELS, *MASKS, "data._target_=garden.data.Halved"],
    "pair": [*LABELS, "model=own", "model._target_=garden.nets.pair.Pair"],
    "timm": [*LABELS, "model=timm", "model.name=test_resnet", "data.image_size=32"],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Path]:
    """A project with a network of several files, and photos with class folders, labels and numbers."""
    with thin_project.entered(tmp_path_factory.mktemp("export"), "garden", **PROJECT) as place:
        photos = write_classes(place / "photos", 10)
        files = [f"{colour}/{path.name}" for colour in COLOURS for path in sorted((photos / colour).iterdir())]
        labels = ["|".join(["old"] * (i % 2) + [path.split("/")[0]] * (i % 3 > 0)) for i, path in enumerate(files)]
        for name, targets in {"labels": labels, "numbers": range(len(files))}.items():
            rows = [f"{path},{target}\n" for path, target in zip(files, targets, strict=True)]
            (photos / f"{name}.csv").write_text("".join(["path,target\n", *rows]))
        yield place


@pytest.fixture(scope="module")
def run(place):
    """Trains a run once; returns its checkpoint."""

    @cache
    def trained(name: str) -> Path:
        lockstep.train([f"run={name}", *TRAIN, *RUNS[name]])
        return finding.tested_checkpoint(f"runs/{name}", "export")

    return trained


@pytest.fixture(scope="module")
def folder(run, place):
    """Exports a run once."""
    return cache(lambda name: export(run(name), place / "exported" / name))


SLOW = ("basic", "labels", "number", "torchvision", "timm")


@pytest.mark.parametrize("name", ["own", *(pytest.param(name, marks=pytest.mark.slow) for name in ("masks", *SLOW))])
def test_load_py_writes_the_same_table_where_lockstep_cannot_be_imported(folder, place, name, tmp_path, monkeypatch):
    made = folder(name)
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
    asked = [f"run={name}", f"runs_dir={place}/runs", *CPU]
    lockstep.predict([*asked, "input=images", "output=table.csv"])
    own, table = ((tmp_path / file).read_text().replace("own-mask", "table-mask") for file in ("own.csv", "table.csv"))
    numbers = re.compile(r"\b[01]\.\d+\b")
    assert numbers.sub("", own) == numbers.sub("", table)
    assert list(map(float, numbers.findall(own))) == pytest.approx(list(map(float, numbers.findall(table))), rel=1e-4)
    if name == "masks":
        for row in csv.DictReader(table.splitlines()):
            assert bool(row["error"]) == row["path"].endswith("broken.png") == (not row["mask"])
            if row["mask"]:
                assert Path(row["mask"]).read_bytes() == Path(row["mask"].replace("table", "own")).read_bytes()
                with Image.open(row["path"]) as image, Image.open(row["mask"]) as mask:
                    assert mask.size == ImageOps.exif_transpose(image).size
        lockstep.predict([*asked, "input=test", "gallery=true", "output=part.csv"])
        assert "<b>" not in Path("part-gallery.html").read_text()  # a mask is drawn, and the loss is no prediction


@pytest.mark.slow
@pytest.mark.parametrize("name", ["own", "masks", *SLOW])
def test_onnx_and_torch_export_give_the_outputs_of_the_network_for_any_batch_and_any_size(run, name, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    made = export(run(name), tmp_path / "exported", ["onnx", "pt2"])
    model = exported.load(made)
    side = model.reader.frame.size
    session = runtime.InferenceSession(str(made / "model.onnx"), providers=["CPUExecutionProvider"])
    (given,), (output,) = session.get_inputs(), session.get_outputs()
    assert (given.name, given.type) == ("image", "tensor(uint8)")
    assert output.name == ("values" if name == "number" else "probabilities")
    graph = torch.export.load(made / "model.pt2").module()
    for batch, size in itertools.product((1, 5, 100), ((side, side), (37, 50))):
        images = torch.randint(0, 256, (batch, 3, *size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        expected = model.outputs(images)
        torch.testing.assert_close(graph(images), expected, atol=1e-4, rtol=0)
        found = torch.from_numpy(session.run(None, {"image": images.numpy()})[0])
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    card = (made / "README.md").read_text()
    assert all(f"- `{file}`: " in card for file in ("load.py", "model.onnx", "model.pt2"))


def test_the_folder_has_the_files_that_a_network_needs_and_a_card(run, folder, place):
    made = folder("own")
    assert {path.name for path in made.iterdir()} - {"__pycache__"} == {  # another test may have run load.py there
        "model.safetensors", "model.json", "config.yaml", "classes.json", "preprocessing.json", "preprocess.py", "load.py", "README.md", "source", "requirements.txt"
    }  # fmt: skip
    assert len({path.stat().st_mode for path in made.iterdir() if path.is_file()}) == 1
    files = {path.relative_to(made / "source").as_posix() for path in (made / "source").rglob("*.py")}
    assert files == {f"garden/{name}.py" for name in (
        "__init__", "parts", "numbers", "nets/__init__", "nets/small", "nets/pooling")}  # fmt: skip
    assert (made / "source/garden/__init__.py").read_text() == ""
    report, card = json.loads((place / "runs/own/report.json").read_text()), (made / "README.md").read_text()
    for said in (
        f"sha256: `{report['data/sha256']}`", "classes: blue, green, red", f"| test/acc | {report['test/acc']:.4f} | 3 |",
        "- `data.image_size=12`", "- `+model.width=8`", f"with {report['parameters']:,} parameters", "torch 2.", "(MIT)",
        "`source` has the licence of the project", "is unknown: ask", "python load.py <folder or files>",
        "returns probabilities of the 3 classes.", "`pip install -r requirements.txt` installs what it needs: ",
    ):  # fmt: skip
        assert said in card, said
    assert "`seed=" not in card
    packages = [line.partition("==") for line in (made / "requirements.txt").read_text().splitlines()]
    assert [name for name, *_ in packages] == ["numpy", "safetensors", "torch", "pillow"]
    assert all(version(name).startswith(number) for name, _, number in packages)


# --- one network of several ---


NETWORK = """
import sys

import torch
from load import load

threads, given, made = sys.argv[1:]
torch.set_num_threads(int(threads))
torch.save(load().outputs(*torch.load(given)), made)
"""


def outputs_without_lockstep(folder: Path, inputs: tuple, place: Path) -> torch.Tensor:
    """Of an exported folder, in a process of its own."""
    given, made, script = place / "given.pt", place / "made.pt", folder / "outputs.py"
    torch.save(inputs, given)
    script.write_text(NETWORK)
    command = [sys.executable, without_lockstep.__file__, script, str(torch.get_num_threads()), given, made]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return torch.load(made)


@pytest.mark.slow
def test_a_network_within_the_network_is_exported_alone_and_takes_the_same_images(
    run, place, tmp_path, monkeypatch, capsys
):
    """By the command, which also takes run=<name>. The encoder is called twice, and its outputs are changed in place."""
    run("pair")
    for network, use in (("decoder.layers", "Its README.md shows how to call it."), ("encoder", "load.py <file>")):
        monkeypatch.setattr(sys, "argv", ["export.py", "run=pair", "--network", network])
        export_script.main()
        assert capsys.readouterr().out.rstrip().endswith(use)
    made = Path("exports/pair-encoder").rename(tmp_path / "exported").resolve()
    encoder = lockstep.load_model("pair").encoder
    images = torch.randint(0, 256, (3, 3, 20, 30), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    model = exported.load(made)
    with torch.inference_mode():
        expected = encoder(model.reader.normalise(images))
    assert torch.equal(outputs_without_lockstep(made, (images,), tmp_path), expected)
    saved, state = load_file(made / "model.safetensors"), encoder.state_dict()
    assert saved.keys() == state.keys() and all(torch.equal(saved[name], state[name]) for name in state)
    assert [len(row["output"]) for row in model.predict(images)] == [6, 6, 6]  # no classes: it returns features
    card = (made / "README.md").read_text()
    for said in (
        "# pair: encoder, trained on folder", f"The network `encoder` of pair, with {sum(p.numel() for p in encoder.parameters())} parameters,",
        "returns what the network itself returns", "These are the metrics of the whole model, which contains this network.",
        "model.outputs(image_BCHW)",
    ):  # fmt: skip
        assert said in card, said


@pytest.mark.parametrize(("network", "inputs"), [
    pytest.param("decoder.layers", ["float32 of shape (batch, 6)"], marks=pytest.mark.slow),
    ("decoder.scaled", ["float32 of shape (batch, 6)", "float32 of shape (batch, 1)"]),
    pytest.param("encoder.0", [], marks=pytest.mark.slow),
])  # fmt: skip
def test_a_network_that_gets_features_takes_these(run, tmp_path, network, inputs):
    """Also one that changes them in place, and one that gets them by names. As a graph, too."""
    made = export(run("pair"), tmp_path / "exported", ["pt2"], network=network)
    model, net = exported.load(made), lockstep.load_model("pair").get_submodule(network)
    x, by = torch.randn(4, 6), torch.rand(4, 1)
    given = {"decoder.layers": (x,), "decoder.scaled": (x, by)}.get(network, (torch.zeros(2, 3, 12, 12).byte(),))
    with torch.inference_mode():
        expected = {"decoder.layers": lambda: net(x.clone()), "decoder.scaled": lambda: net(x, by=by)}.get(
            network, lambda: net(model.reader.normalise(*given))
        )()
    graph = torch.export.load(made / "model.pt2").module()
    assert torch.equal(outputs_without_lockstep(made, given, tmp_path), expected)
    torch.testing.assert_close(graph(*given), expected, atol=1e-5, rtol=0)
    assert (f"It takes {' and '.join(inputs)} and" if inputs else "It takes images") in (made / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("network", ["encoder", "decoder.layers", "decoder.scaled"])
def test_onnx_of_a_network_within_the_network(run, tmp_path, network):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    made = export(run("pair"), tmp_path / "exported", ["onnx"], network=network)
    session = runtime.InferenceSession(str(made / "model.onnx"), providers=["CPUExecutionProvider"])
    assert len(session.get_inputs()) == 1 + (network == "decoder.scaled")
    assert "probabilities" not in (made / "README.md").read_text().replace("probabilities of", "")


@pytest.mark.parametrize(("network", "said"), [
    ("encodr", r"--network=encodr is not called when Pair runs on a batch \(did you mean encoder\?\). Pass the name of a network that is called: encoder, activation, head, "),
    ("decay", r"--network=decay is not called when Pair runs on a batch\. .*: encoder, "),
    ("decoder", r"--network=decoder is not called .* encoder.0, encoder.1, decoder.layers, "),
    ("head", r"the network head cannot be exported: Pair uses NoneType besides tensors. Call it with tensors"),
])  # fmt: skip
def test_a_network_that_cannot_be_exported_is_named_with_those_that_can(run, tmp_path, network, said):
    with pytest.raises(UserError, match=said):
        export(run("pair"), tmp_path / "exported", network=network)
    assert list(tmp_path.iterdir()) == []


# --- what is refused, and the comparison ---


@pytest.mark.parametrize(("wrong", "said"), [
    (lambda model, images: model.outputs(images) + 0.01 * (len(images) == 1),
     r"model.onnx differs from the network by 0.01 on 3 samples in batches of 1"),
    (lambda model, images: model.outputs(images.view(1, 3, 12, 12)), r"model.onnx does not run on a batch of 5: shape"),
])  # fmt: skip
def test_a_graph_that_differs_is_refused_and_nothing_is_kept(run, tmp_path, monkeypatch, wrong, said):
    monkeypatch.setattr(export_parts, "write_graphs", lambda model, *_: {"model.onnx": partial(wrong, model)})
    with pytest.raises(UserError, match=said):
        export(run("own"), tmp_path / "exported", ["onnx"])
    assert list(tmp_path.iterdir()) == []


def test_packages_that_cannot_be_had_are_named(run, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"unused.py imports lockstep: the files of an exported network"):
        export_parts.required_modules("garden.unused")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"--onnx needs onnx, onnxscript, onnxruntime, which are not installed"):
        export(run("own"), tmp_path / "exported", ["onnx"])


@pytest.mark.slow
def test_data_that_prepares_its_images_otherwise_is_found_out(run, tmp_path):
    with pytest.raises(UserError, match=r"load.py differs from the network by .* on 8 samples"):
        export(run("halved"), tmp_path / "exported")
    lockstep.predict(["run=halved", "input=photos", f"output={tmp_path}/table.csv", *CPU])
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 31


@pytest.mark.slow
def test_of_a_task_with_its_own_predictions_the_networks_outputs_are_exported(folder):
    made = folder("task")
    rows = exported.load(made).predict(torch.randint(0, 256, (2, 3, 20, 20), dtype=torch.uint8))
    assert [len(row["output"]) for row in rows] == [3, 3]
    assert "returns what the network itself returns" in (made / "README.md").read_text()


def test_without_the_runs_data_other_images_are_needed(run, place, tmp_path, monkeypatch):
    """By the command, which gives the folder of a sweep's job the sweep's name."""
    job, content = tmp_path / "runs/rates/0", torch.load(run("own"), weights_only=True)
    content["config"]["data"] |= {"root": "nowhere", "cache_dir": str(tmp_path / "none")}
    (job / "checkpoints").mkdir(parents=True)
    (job.parent / "multirun.yaml").write_text("")
    torch.save(content, job / "checkpoints/moved.ckpt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCKSTEP_PROJECT", str(place))
    monkeypatch.setattr(sys, "argv", ["export.py", str(job / "checkpoints/moved.ckpt")])
    with pytest.raises(UserError, match=r"cannot be read: data.root=nowhere .* Pass --files <folder>"):
        export_script.main()
    sys.argv += ["--files", str(place / "photos")]
    export_script.main()
    assert "on 30 images" in (tmp_path / "exports/rates-0/README.md").read_text()


@pytest.mark.parametrize("kind", ["pipe", "device", "missing"])
def test_load_py_opens_regular_files_alone_and_predicts_the_others(kind, tmp_path, monkeypatch, capsys):
    path = tmp_path / "\x1b]0;x.png"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    good = tmp_path / "ok.png"
    good.touch()

    def read(opened: Path) -> dict:
        assert opened == good
        return {"input": np.zeros(2, np.uint8)}

    reader = SimpleNamespace(read=read, normalise=lambda image_BN: image_BN.float())
    model = exported.Model(lambda image_BN: image_BN, reader, pixels, None, [], ["a", "b"], "softmax", None)
    monkeypatch.setattr(exported, "load", lambda: model)
    monkeypatch.setattr(sys, "argv", ["load.py", str(path), str(good)])
    exported.main()
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("x.png: cannot be read: it is not a regular file") and "\x1b" not in first
    assert second == f"{good}: class a, probability 0.5"
