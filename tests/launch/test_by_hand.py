"""train.py shows each object of a run: any of them can be made by hand, and the keys that it leaves without effect are rejected."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import thin_project
from in_process import options, report

import lockstep
from lockstep import ROOT
from lockstep.config.targets import imports_no_torch, source_bases
from lockstep.errors import UserError
from lockstep.launch import local

LINEAR = (
    "build.module(config, datamodule)",
    "build.module(config, datamodule, net=torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(144, 10)))",
)
LIGHTNING = (
    "    return build.module(config, datamodule)",
    """    class Lit(torch.nn.Sequential, pl.LightningModule):
        def training_step(self, batch, batch_idx):
            return torch.nn.functional.cross_entropy(self(batch["input"]), batch["target"])

        validation_step = training_step

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Lit(torch.nn.Flatten(), torch.nn.Linear(144, 10))""",
)
DATA = (
    "return launch.data(config)",
    "import numpy as np; from lockstep import Arrays, DataSet; made = DataSet(); made.metadata = {'classes': list('0123456789')}; "
    "made.train = made.test = Arrays(input=np.ones((480, 1, 12, 12), np.float32), target=np.arange(480) % 10); return made",
)


def changed(*changes: tuple[str, str]) -> str:
    """The text of train.py with changes in its code."""
    text = (
        (ROOT / "train.py")
        .read_text()
        .replace(
            "from lockstep import launch\n",
            "import torch\nimport lightning.pytorch as pl\n\nfrom lockstep import launch\n",
        )
    )
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


@pytest.fixture
def change(train, monkeypatch) -> Callable[..., None]:
    """Makes `train` run a changed train.py."""
    monkeypatch.setattr(local, "script", lambda _: Path("train.py"))
    return lambda *changes: Path("train.py").write_text(changed(*changes))


def test_a_network_by_hand_is_trained_and_named_and_its_group_has_no_keys(change, train):
    change(LINEAR)
    train("run=hand", "trainer.max_steps=2")
    found = report("hand")
    assert (found["model"], found["parameters"], found["status"]) == ("Sequential", 1450, "done")
    with pytest.raises(
        UserError, match=r"model.dropout_fc=0.1 has no effect: train.py creates this object itself. Remove it."
    ):
        train("run=other", "trainer.max_steps=2", "model.dropout_fc=0.1")
    assert not Path("runs/other").exists()
    with pytest.raises(UserError, match=r"the network of this run is created in its train\.py"):
        lockstep.load_model("hand")


def test_a_lightning_module_by_hand_is_trained(change, train):
    change(LIGHTNING)
    train("run=hand", "trainer.max_steps=2", "task.monitor=null")
    assert (report("hand")["model"], report("hand")["status"]) == ("Lit", "done")
    with pytest.raises(UserError, match=r"optim\.lr=1 has no effect"):
        train("run=other", "trainer.max_steps=2", "task.monitor=null", "optim.lr=1")


def test_a_data_set_by_hand_is_trained_on(change, monkeypatch, tmp_path):
    change(DATA)
    some = ["trainer.accelerator=cpu", "trainer.max_steps=2", "loader.batch_size=48"]
    linear = ["model=own", "model._target_=project.model.BasicNet", "+model.image_size=12"]
    found = lockstep.train(["run=hand", *some, *linear])
    assert (found["data/train"], found["status"]) == (432, "done")
    with pytest.raises(UserError, match=r"data\.root=x has no effect"):
        lockstep.train(["run=other", *some, *linear, "data.root=x"])
    monkeypatch.setattr(local, "script", lambda name: ROOT / f"{name}.py")
    Path("x.png").write_bytes(b"")
    with pytest.raises(UserError, match="cannot read files"):  # MNIST, the default of the config, could
        lockstep.predict(["run=hand", "input=x.png"])


@pytest.mark.slow  # two processes of Python's own
def test_eval_uses_the_network_of_train(tmp_path, mnist, cache):
    root = thin_project.write(tmp_path / "bouquet", **{"train.py": changed(LINEAR)})
    (root / "eval.py").write_text((ROOT / "eval.py").read_text())
    for command in (["train.py", *options(mnist, cache), "run=hand", "trainer.max_steps=2"], ["eval.py", "run=hand"]):
        done = subprocess.run([sys.executable, *command], cwd=root, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    evaluated, trained = (json.loads((root / f"runs/hand/{name}.json").read_text()) for name in ("eval", "report"))
    assert evaluated["test/loss"] == pytest.approx(trained["test/loss"], rel=1e-6)


def test_the_source_of_a_class_says_what_it_is_without_an_import():
    lightning = "lightning.pytorch.core.module.LightningModule"
    assert source_bases("project.module.Classifier") == [
        "project.module.Classifier", "lockstep.kit.tasks.classification.Classification", "lockstep.kit.task.Task",
        "lockstep.training.module.Module", lightning,
    ]  # fmt: skip
    assert source_bases("lightning.pytorch.demos.boring_classes.BoringModel")[1:] == [lightning]
    assert source_bases("lockstep.Module")[1:] == [lightning]
    assert source_bases("torch.nn.Linear") is source_bases("project.model.nosuch") is None
    assert (imports_no_torch("project.data.Mnist"), imports_no_torch("project.model.BasicNet")) == (True, False)
    assert (imports_no_torch("lockstep.kit.Folder"), imports_no_torch("lockstep.kit.tasks.Regression")) == (True, False)


def test_each_eval_py_uses_the_train_py_of_its_own_folder(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(
            f"def data(config): ...\ndef module(config, data): ...\nNAME = {name!r}\n"
        )
        text = (ROOT / "eval.py").read_text().replace("import data, module", "import NAME, data, module")
        (tmp_path / name / "eval.py").write_text(text + "\nassert data.__globals__['NAME'] == NAME\n")
        job = local.load(tmp_path / name / "eval.py")
        assert job.data.__globals__["NAME"] == name
        assert "train" not in sys.modules and str(tmp_path / name) not in sys.path
