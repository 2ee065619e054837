"""Keys of one's own classes are a matter of their signatures; mistakes are told before any data is prepared."""

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import thin_project

import lockstep
from lockstep import PACKAGE
from lockstep.config import project
from lockstep.config.checks import check_classes
from lockstep.config.compose import compose_config
from lockstep.config.settings import Settings
from lockstep.errors import UserError

OWN = """
import numpy as np

from lockstep.data import Arrays, DataSet


class Cells(DataSet):
    prepared = False
    train = Arrays(input=np.zeros((40, 3), np.float32), target=np.zeros(40, np.int64))
    test = Arrays(input=np.zeros((9, 3), np.float32), target=np.zeros(9, np.int64))
    about = {"classes": ["one", "two"]}

    def __init__(self, channels=1, image_size: list[int] | None = None, mean=None, csv: list[str] | None = None, source="disk"):
        self.source = source

    def prepare(self):
        Cells.prepared = True

    def network_arguments(self):
        return {"in_features": 3}


def base(module, name):
    # of a library by its name, which is what tells a kind without importing it
    return type(name, (), {"__module__": module})


class Loaders(base("lightning.pytorch.core.datamodule", "LightningDataModule")):
    def __init__(self, batch_size=1, num_workers=0, persistent_workers=False):
        pass


def net(width: int, pretrained: str | None = None, checkpoint_path=None):
    pass


def optimizer(params, lr: float | None = 1.0, nesterov=False):
    pass


def schedule(optimizer, gamma=1.0):
    pass


class Module(base("lightning.pytorch.core.module", "LightningModule")):
    def __init__(self, mode="train", monitor=None):
        pass


class Bell(base("lightning.pytorch.callbacks.callback", "Callback"), base("torchmetrics.metric", "Metric")):
    def __init__(self, sound="ding"):
        pass
"""
MODULE = ["task=lightning_module", "task._target_=mine.Module"]
DATA = ["data=own", "data._target_=mine.Cells", "data.batch_size=8"]
CPU = ["trainer.accelerator=cpu"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project with the package `mine`, whose classes are found without torch."""
    bare = {
        "configs/project.yaml": "defaults: [lockstep]\n",
        "configs/data/bare.yaml": "_target_: mine.Cells\nbatch_size: 8\n",
        "configs/optim/mine.yaml": "_target_: mine.optimizer\n",
        "configs/schedule/mine.yaml": "_target_: mine.schedule\n",
    }
    root = thin_project.write(tmp_path / "project", **bare, **{"src/mine/__init__.py": OWN})
    monkeypatch.chdir(root)
    monkeypatch.syspath_prepend(root / "src")
    yield root
    sys.modules.pop("mine", None)


def found(*overrides: str) -> list[str]:
    """What the checks say once the user's classes are imported."""
    model = [] if MODULE[0] in overrides else ["model=basic_net"]
    return check_classes(Settings.of(compose_config("train", [*model, *CPU, *overrides])))


@pytest.mark.parametrize(
    "overrides",
    [
        [*DATA, "+data.channels=4", "+data.image_size=[224,320]", "+data.mean=[0,0,0,0]", "+data.csv=[a,b]", "+data.source=s3"],
        ["model=own", "model._target_=mine.net", "+model.width=3", "+model.pretrained=imagenet", "+model.checkpoint_path=here"],
        ["optim=mine", "+optim.lr=null", "+optim.nesterov=true"],
        ["schedule=mine", "+schedule.gamma=-1"],
        [*MODULE, "task.mode=train"],
        ["data=own", "data._target_=mine.Loaders", "data.num_workers=0", "data.persistent_workers=false",
         *(f"~data.{key}" for key in ("eval_batch_size", "val_fraction", "limit_train", "on_device", "prefetch_factor", "repeats", "folds", "fold",
                                      "balance"))],
        ["data=bare"],
    ],
    ids=["data", "model", "optim", "schedule", "module", "loaders", "bare data"],
)  # fmt: skip
def test_a_key_of_ones_own_class_may_mean_anything(overrides):
    assert found(*overrides) == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model=own", "model._target_=mine.net", "+model.mode=x"], "model.mode is not an argument of mine.net"),
        (["optim=mine", "+optim.metrics=3"], "optim.metrics is not an argument of mine.optimizer"),
        (["optim=mine", "+optim.lr=high"], "optim.lr=high is invalid; expected float | None"),
        (["+callbacks.bell._target_=mine.Bell", "+callbacks.bell.name=x"], "callbacks.bell.name is not an argument"),
        (["task._target_=mine.Module", "+task.metrics.f1._target_=mine.Bell", "+task.metrics.f1.sond=x"],
         "task.metrics.f1.sond is not an argument of mine.Bell (did you mean sound?)"),
        ([*MODULE, "task.monitor=val_loss", "task.mode=train"], "checkpoint.mode=train is invalid; expected one of max, min"),
        ([*DATA, "data.batch_size=0"], "data.batch_size=0 is invalid"),
        ([*DATA, "~data.batch_size"], "data.batch_size is missing: it is the global batch"),
        ([*DATA, "data.batch_size=9", "strategy=ddp", "trainer.devices=2"], "Set data.batch_size=8 or 10"),
        ([*DATA, "data.persistent_workers=false"], "data.persistent_workers=false has no effect without workers"),
        (["callbacks=[early_stopping]", "checkpoint.monitor=null", *MODULE], "callbacks.early_stopping.monitor is null"),
    ],
)  # fmt: skip
def test_what_a_class_does_not_take_is_told(overrides, said):
    others = (
        "task.loss ",
        "task.label_smoothing ",
        "task.class_weights ",
        "task.metrics has",
        "model, optim, schedule would",
    )
    (problem,) = [text for text in found(*overrides) if not text.startswith(others)]
    assert said in problem


def test_shipped_classes_are_left_to_the_check_that_imports_nothing():
    before = set(sys.modules)
    assert found("strategy=ddp", "callbacks=[default,ema,early_stopping,lr_monitor]") == []
    assert not {"torch", "lightning"} & (set(sys.modules) - before)


def test_a_source_that_only_ones_own_data_knows_stays_in_the_config():
    given = compose_config("train", [*DATA, "+data.source=s3"])
    assert Settings.of(given).identified("disk").cfg.data.source == "s3"


def test_all_mistakes_are_told_before_data_is_prepared():
    with pytest.raises(UserError) as error:
        lockstep.train([*DATA, *CPU, "model=basic_net", "+model.widht=64", "+task.monitr=x", "callbacks=[ema]", "+callbacks.ema.dcay=1",
                        "+logger.csv.delimiter=x", "+data.chanels=1", "+optim.amsgrad=x"])  # fmt: skip
    assert {problem.split()[0] for problem in error.value.problems} == {
        "model.widht", "task.monitr", "callbacks.ema.dcay", "logger.csv.delimiter", "data.chanels", "optim.amsgrad=x",
    }  # fmt: skip
    assert not sys.modules["mine"].Cells.prepared
    assert not Path("runs").exists()


def test_data_without_the_engines_keys_trains_with_an_optimizer_that_says_nothing_of_partials():
    with Path("src/mine/__init__.py").open("a") as file:
        file.write(
            "import torch\n\ndef linear(in_features: int, num_classes: int):\n    return torch.nn.Linear(in_features, num_classes)\n"
        )
        file.write("\ndef plain(params, lr: float):\n    return torch.optim.SGD(params, lr)\n")
    report = lockstep.train(
        [
            "data=bare",
            "model=own",
            "model._target_=mine.linear",
            "optim=mine",
            "optim._target_=mine.plain",
            "+optim.lr=0.1",
            "run=a",
            *CPU,
        ]
    )
    assert (report["status"], report["train/steps"], report["evaluated"]) == (
        "done",
        4,
        "test/loss | test/count | test/acc",
    )


# --- whose bug it is ---


def raised(file: Path, module: str) -> ValueError:
    """An error of a function in `file`."""
    names = {"__name__": module}
    exec(compile("def fail():\n    raise ValueError", str(file), "exec"), names)
    with pytest.raises(ValueError) as error:
        names["fail"]()
    assert error.value.__traceback__ is not None
    return error.value.with_traceback(error.value.__traceback__.tb_next)


@pytest.mark.parametrize(
    ("file", "module", "users"),
    [
        (PACKAGE / "data/images.py", "lockstep.data.images", False),
        (PACKAGE.with_name("lockstep_flowers") / "net.py", "lockstep_flowers.net", True),
        (Path(sysconfig.get_path("purelib"), "torch/nn/modules/linear.py"), "torch.nn.modules.linear", False),
        (Path(sysconfig.get_path("purelib"), "bouquet/net.py"), "bouquet.net", True),  # the project's, installed
        (Path(sysconfig.get_path("purelib"), "monai/nets.py"), "monai.nets", True),
        (Path(sysconfig.get_path("purelib"), "bouquet_of_others/net.py"), "bouquet_of_others.net", False),
        (Path("src/bouquet/train.py"), "bouquet.train", True),
        (Path("train.py"), "__main__", True),
    ],
)
def test_code_of_the_project_is_the_users_wherever_it_is_installed(folder, file, module, users):
    (folder / "pyproject.toml").write_text('[tool.lockstep]\npackages = ["monai"]\n')
    assert project.of_users_code(raised(file, module)) is users


def test_a_refusal_is_nobodys_bug(folder):
    assert not project.of_users_code(UserError("no"))
