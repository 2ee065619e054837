"""What a config may name, and the keys that it takes: a class of its key's kind, or a function that says it returns one, with the
arguments of its signature. Nothing else is called, and mistakes are told before any data is prepared or anything is written."""

import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import thin_project

import lockstep
from lockstep import PACKAGE
from lockstep.config import checks, project
from lockstep.config.checks import resolve
from lockstep.config.compose import needs_signature_check
from lockstep.config.draft import as_yaml
from lockstep.config.instantiate import create_object, network, problems
from lockstep.config.run_config import Component
from lockstep.config.settings import Settings
from lockstep.config.targets import accepts_keyword, matching_kwargs, parameters
from lockstep.errors import UserError

OWN = """import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import timm.models
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from timm.models import load_state_dict
from torch import nn
from torch.optim import AdamW
from torchmetrics import Metric

from lockstep import Arrays, DataSet


class Net(nn.Module):
    def __init__(self, in_channels: int, num_classes: int, *, width: int, rate: float = 0.5, kind: Literal["wide", "deep"] = "wide",
                 layers: Sequence[int] | None = None, folder: str | Path = "here", odd: "nothing.that.exists" = None, anything=None) -> None:
        super().__init__()
        self.given = (in_channels, num_classes, width, rate, kind, layers, folder, anything)

def net(**keys) -> nn.Module:
    return Net(1, 10, **keys)

def unsaid(**keys):
    return Net(1, 10, **keys)

def half(width):
    return 1 / width  # its bug

def wipe(path="/") -> None:
    raise AssertionError("called")

class Base(nn.Module):
    def __init__(self, *, width: int, depth: int = 1) -> None:
        super().__init__()
        self.width, self.depth = width, depth

class Middle(Base):
    pass

class Own(Middle):
    def __init__(self, *, gamma: float = 2.0, **given: object) -> None:
        super().__init__(**given)
        self.gamma = gamma

class Narrow(Base):
    def __init__(self, **given: object) -> None:
        super().__init__(width=1, **given)

class Open(nn.Module):
    def __init__(self, *, width: int, **rest: object) -> None:
        super().__init__()
        self.rest = rest

class Keeps(LightningDataModule):
    def __init__(self, **rest: object) -> None:
        super().__init__()
        self.rest = rest

class Saves(LightningModule):
    def __init__(self, width: int = 1, **rest: object) -> None:
        super().__init__()
        self.save_hyperparameters()

class Pops(Own):
    def __init__(self, **rest: object) -> None:
        self.other = rest.pop("other", 1)
        super().__init__(**{"depth": 4, **rest})

class Folds(DataSet):
    def __init__(self, folds: int | None = None):
        self.given = folds


class Cells(DataSet):
    train = Arrays(input=np.zeros((40, 3), np.float32), target=np.zeros(40, np.int64))
    test = Arrays(input=np.zeros((9, 3), np.float32), target=np.zeros(9, np.int64))
    metadata = {"classes": ["one", "two"]}

    def __init__(self, channels=1, image_size: list[int] | None = None, mean=None, csv: list[str] | None = None, source="disk"):
        self.source = source

    def model_kwargs(self):
        return {"in_features": 3}

class Loaders(LightningDataModule):
    def __init__(self, batch_size=1, num_workers=0, persistent_workers=False):
        pass

class Module(LightningModule):
    def __init__(self, mode="train", monitor=None):
        pass

class Bell(Callback, Metric):
    def __init__(self, sound="ding"):
        pass

def optimizer(params, lr: float | None = 1.0, nesterov=False):
    return torch.optim.SGD(params, lr, nesterov=nesterov)

def schedule(optimizer, gamma=1.0):
    pass

def linear(in_features: int, num_classes: int):
    return nn.Linear(in_features, num_classes)

class Plain:
    pass
"""
CONFIGS = {
    "configs/data/bare.yaml": "_target_: mine.Cells\n",
    "configs/optim/mine.yaml": "_target_: mine.optimizer\n",
    "configs/schedule/mine.yaml": "_target_: mine.schedule\n",
}
MODULE = ["task=lightning_module", "task._target_=mine.Module"]
DATA = ["data=own", "data._target_=mine.Cells", "loader.batch_size=8"]
CPU = ["trainer.accelerator=cpu"]
OFFERED = {"in_channels": 1, "num_classes": 10}


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    """A project with a package `mine`, which configs may name."""
    root = tmp_path_factory.mktemp("project")
    with thin_project.entered(root, "mine", **CONFIGS, **{"src/mine/__init__.py": OWN}):
        yield root


# --- What may be named ---

REFUSED = {
    "callbacks.x": [
        "timm.models.load_state_dict", "lockstep.extras.exported.load", "lockstep.machine.files.remove", "torchvision.datasets.utils.download_url",
        "torchvision.datasets.utils.extract_archive", "torch.nn.Linear", "lightning.pytorch.loggers.CSVLogger", "lightning.pytorch.Trainer",
        "mine.Plain", "mine.wipe", "mine.load_state_dict",
    ],
    "model": [
        "timm.models.load_checkpoint", "timm.models.load_pretrained", "torch.nn.modules.module.torch.load", "torchvision.datasets.MNIST",
        "mine.timm.models.load_state_dict", "mine.os.system", "mine.os", "mine.wipe",
    ],
    "task": ["timm.create_model", "mine.unsaid.__globals__", "lightning.pytorch.demos.boring_classes.BoringModel"],
    "data": ["torchvision.datasets.ImageFolder"],
    "strategy": ["lockstep.strategies.base"],
    "optim": ["torch.optim.swa_utils.update_bn"],
    "schedule": ["torch.optim.AdamW"],
    "task.metrics.x": ["torchmetrics.functional.accuracy"],
    "logger.x": ["lockstep.extras.page.write_page"],
    "data.train": ["torchvision.datasets.LSUN", "timm.data.ImageDataset"],  # which unpickles a class map
    "data.train.transform": ["torchvision.io.write_file"],
    "task.net": ["lockstep.machine.files.write_text"],
}  # fmt: skip
ADMITTED = {
    "model": [
        "lockstep.kit.timm.from_timm", "project.model.BasicNet", "timm.create_model", "timm.models.resnet18", "torchvision.models.resnet18",
        "torchvision.models.segmentation.fcn_resnet50", "torch.nn.Sequential", "mine.Net", "mine.net", "mine.unsaid",
    ],
    "optim": ["torch.optim.AdamW", "timm.optim.Muon", "timm.optim.create_optimizer_v2", "mine.AdamW"],
    "schedule": [
        "torch.optim.lr_scheduler.OneCycleLR", "torch.optim.lr_scheduler.ReduceLROnPlateau", "lockstep.kit.schedules.cosine",
    ],
    "callbacks.x": ["lightning.pytorch.callbacks.EarlyStopping"],
    "logger.x": ["lightning.pytorch.loggers.CSVLogger", "lockstep.reporting.loggers.wandb"],
    "task.metrics.x": ["torchmetrics.Accuracy"],
    "strategy": ["lockstep.strategies.SingleDevice", "lightning.pytorch.strategies.DDPStrategy"],
    "data": ["project.data.Mnist"],
    "data.train": ["torchvision.datasets.ImageFolder"],
    "data.train.transform": ["torchvision.transforms.Compose", "torchvision.transforms.v2.RandomCrop"],
    "task.optimizer": ["torch.optim.SGD"],
    "task.loss": ["torch.nn.CrossEntropyLoss"],
    "callbacks.x.pruner": ["optuna.pruners.MedianPruner"],
    "task.net": ["mine.Plain"],
}  # fmt: skip


@pytest.mark.parametrize("key", REFUSED)
def test_what_is_not_of_the_keys_kind_is_refused(key):
    for target in REFUSED[key]:
        with pytest.raises(UserError, match=f"{key}._target_={target} "):
            create_object(Component(target), key)


@pytest.mark.parametrize("key", ADMITTED)
def test_what_is_of_the_keys_kind_may_be_named(key):
    assert [problem for target in ADMITTED[key] for problem in problems({"_target_": target}, key)] == []


@pytest.mark.parametrize("bad", ["timm.models.load_state_dict", "os.system", "lockstep.extras.exported.load"])
def test_a_node_within_a_node_is_refused_too(bad, tmp_path):
    node = Component(bad, {"checkpoint_path": str(tmp_path)}).node
    for around in ({"given": node}, {"given": [[{"a": node}]]}, {"_args_": [node]}):
        with pytest.raises(UserError, match=rf"model\.\S+\._target_={bad} "):
            create_object(Component("mine.Open", {"width": 1, **around}), "model")


@pytest.mark.parametrize("escaped", ["", "\\"])
def test_an_interpolation_brings_no_other_target(escaped):
    with pytest.raises(UserError, match=r"model contains an escaped interpolation: .*load_state_dict"):
        given = escaped + "${oc.create:{_target_:timm.models.load_state_dict}}"
        create_object(Component("mine.Open", {"width": 1, "given": given}), "model")


def test_a_name_outside_of_the_list_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "stranger.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"stranger\.Net is not allowed in a config"):
        network(Component("stranger.Net"), {"num_classes": 2})


# --- Its arguments ---


def made(target: str, key: str = "model", offered: dict[str, object] | None = None, **keys: object):
    return create_object(Component(target, keys), key, **(offered or {}))


def told(target: str, **keys) -> tuple[str, ...]:
    with pytest.raises(UserError) as error:
        made(target, offered=OFFERED, **keys)
    return error.value.problems


def test_keys_that_fit_make_the_object():
    given = {"rate": 1, "kind": "deep", "layers": [1, 2], "folder": "there", "odd": 3, "anything": {"a": None}}
    net = made("mine.Net", offered=OFFERED, width=3, **given)
    assert net.given == (1, 10, 3, 1, "deep", [1, 2], "there", {"a": None})
    assert made("mine.Net", offered=OFFERED, width=3, layers=None).given[5] is None


def test_keys_that_do_not_fit_are_told_at_once_with_what_does():
    wrong = told("mine.Net", witdh=4, rate="fast", kind="high", layers=[1, "two"], folder=3)
    assert [problem.partition("; expected")[0] for problem in wrong] == [
        "model.witdh is not an argument of mine.Net (did you mean width?); it accepts in_channels, num_classes, width, rate, kind, layers, folder, "
        "odd, anything, name.",
        "model.rate=fast is invalid", "model.kind=high is invalid", "model.layers=[1, 'two'] is invalid", "model.folder=3 is invalid",
        "model.width is missing: mine.Net needs it. Set +model.width=<value>. The data and the task provide in_channels, num_classes.",
    ]  # fmt: skip
    kinds = ["float", "Literal['wide', 'deep']", "Sequence[int] | None", "str | pathlib"]
    assert all(kind in problem for kind, problem in zip(kinds, wrong[1:-1], strict=True))
    for width in (2.5, "3", True):  # a text of digits is a text
        (problem,) = told("mine.Net", width=width)
        assert problem == f"model.width={str(width).lower()} is invalid; expected int."


ABSENT = {
    "mine.Nte": r"model._target_=mine.Nte does not exist: .*did you mean Net\?",
    "mine.nets.Net": "model._target_=mine.nets.Net does not exist: .*mine.nets",
    "os.system": "model._target_=os.system is not allowed in a config; .* lockstep, torch.nn, .*mine",
    "???": "model._target_ is missing. Set it to a class",
}


@pytest.mark.parametrize("target", ABSENT)
def test_a_class_that_is_not_there_or_not_trusted_is_named(target):
    (problem,) = told(target)
    assert re.match(ABSENT[target], problem)


def test_an_argument_that_a_function_hands_on_is_checked_by_the_one_that_gets_it():
    assert made("mine.unsaid", width=3).given[2] == 3
    with pytest.raises(UserError, match=r"model\.witdh: .* got an unexpected keyword argument"):
        made("mine.unsaid", width=3, witdh=4)


def test_an_error_inside_a_component_is_its_own():
    with pytest.raises(ZeroDivisionError):
        made("mine.half", width=0)
    with pytest.raises(TypeError, match="unsupported operand"):
        made("mine.half", width="wide")


def named(target: str) -> list[str]:
    return [name for name, parameter in parameters(target).items() if accepts_keyword(parameter)]


def test_a_class_that_hands_arguments_on_takes_those_of_its_base_classes_too():
    assert named("mine.Own") == ["gamma", "width", "depth"]
    assert matching_kwargs("mine.Own", {"width": 3, "classes": 10}) == {"width": 3}
    net = made("mine.Own", offered={"width": 3}, gamma=1.0, depth=2)
    assert (net.width, net.depth, net.gamma) == (3, 2, 1.0)
    assert made("mine.Narrow", depth=2).width == 1  # which it gives itself
    assert made("mine.Open", width=1, other=2).rest == {"other": 2}
    assert made("mine.Keeps", "data", root="photos").rest == {"root": "photos"}
    assert made("mine.Saves", "task", width=2, anything=3).hparams == {"width": 2, "anything": 3}
    assert named("mine.Pops") == ["gamma", "width", "depth"]
    assert matching_kwargs("mine.Pops", {"width": 3, "classes": 10}) == {"width": 3}
    assert "num_classes" in parameters("timm.models.VisionTransformerDistilled")
    assert told("mine.Own", width=1, depth="two")[0].startswith("model.depth=two is invalid; expected int")
    assert told("mine.Own", width=1, depht=2)[0].startswith("model.depht: ")
    assert "given" not in parameters(
        "lockstep.kit.tasks.Classification"
    )  # all of it is passed on, so a misspelt key is told at once


# --- The keys of a command ---


def found(*overrides: str) -> list[str]:
    """What is told of a command: by the check that imports nothing, or else once the user's classes are imported."""
    model = [] if MODULE[0] in overrides else ["model=basic_net"]
    try:
        settings = Settings.of(resolve([*model, *CPU, *overrides]))
    except UserError as e:
        return [*e.problems]
    as_yaml(settings.cfg)  # which holds nothing that was refused
    return checks.check_classes(settings, shipped=needs_signature_check(overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        [*DATA, "+data.channels=4", "+data.image_size=[224,320]", "+data.mean=[0,0,0,0]", "+data.csv=[a,b]", "+data.source=s3",
         "model=own", "model._target_=mine.Open", "+model.width=3", "+model.pretrained=imagenet", "+model.checkpoint_path=here",
         "optim=mine", "+optim.lr=null", "+optim.nesterov=true", "schedule=mine", "+schedule.gamma=-1"],
        [*MODULE, "task.mode=train", "data=own", "data._target_=mine.Loaders", "+data.batch_size=7", "+data.num_workers=0", "+data.persistent_workers=false"],
        ["data=bare"],
    ],
    ids=["all of a task's", "module and loaders", "bare data"],
)  # fmt: skip
def test_a_key_of_ones_own_class_may_mean_anything(overrides):
    assert found(*overrides) == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([*DATA, "loader.batch_size=9", "loader.persistent_workers=true", "strategy=ddp", "trainer.devices=2", "model=own", "model._target_=mine.Base",
          "+model.mode=x", "optim=mine", "+optim.metrics=3", "+optim.lr=high", "+callbacks.bell._target_=mine.Bell", "+callbacks.bell.name=x"],
         ["model.mode is not an argument of mine.Base", "optim.metrics is not an argument of mine.optimizer",
          "optim.lr=high is invalid; expected float | None", "callbacks.bell.name is not an argument",
          "loader.persistent_workers=true has no effect without workers", "Set loader.batch_size=8 or 10"]),
        ([*DATA, "loader.batch_size=0"], ["loader.batch_size=0 is invalid"]),
        ([*DATA, "~loader.batch_size"], ["loader.batch_size is missing from the config, and the engine needs it"]),
        ([*DATA, "+data.batch_size=8"], ["data.batch_size=8 is a key of the loader. Set loader.batch_size=8, which"]),
        (["data=own", "data._target_=mine.Folds", "+data.folds=3"], ["data.folds=3 is a key of the loader. Set loader.folds=3, which"]),
        ([*MODULE, "task.monitor=val_loss", "task.mode=train"], ["checkpoint.mode=train is invalid; expected one of max, min"]),
        (["callbacks=[early_stopping]", "checkpoint.monitor=null", *MODULE], ["callbacks.early_stopping.monitor is null"]),
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
    problems = [text for text in found(*overrides) if not text.startswith(others)]
    assert [sum(text in problem for problem in problems) for text in said] == [1] * len(problems), problems


def test_shipped_classes_are_left_to_the_check_that_imports_nothing(monkeypatch):
    monkeypatch.setattr(checks, "problems", lambda *_: pytest.fail("their signatures are looked at"))
    assert found("strategy=ddp", "callbacks=[default,ema,early_stopping,lr_monitor]") == []


def test_a_source_that_only_ones_own_data_knows_stays_in_the_config():
    disk = SimpleNamespace(source="disk", eval_batch_size=None, evaluated=SimpleNamespace(bytes_in_memory=0))
    for given, expected in (("s3", "s3"), ("auto", "disk")):
        settings = Settings.of(resolve([*DATA, *CPU, f"+data.source={given}"]))
        assert settings.with_auto_resolved(disk).cfg.data.get("source") == expected


def test_all_mistakes_are_told_before_data_is_prepared(monkeypatch):
    monkeypatch.setattr("mine.Cells.prepare", lambda _: pytest.fail("it is prepared"))
    with pytest.raises(UserError) as error:
        lockstep.train([*DATA, *CPU, "model=basic_net", "+model.widht=64", "+task.monitr=x", "callbacks=[ema]", "+callbacks.ema.dcay=1",
                        "+logger.csv.delimiter=x", "+data.chanels=1", "+optim.amsgrad=x"])  # fmt: skip
    assert {problem.split()[0] for problem in error.value.problems} == {
        "model.widht", "task.monitr", "callbacks.ema.dcay", "logger.csv.delimiter", "data.chanels", "optim.amsgrad=x",
    }  # fmt: skip
    assert not Path("runs").exists()


def test_data_without_the_engines_keys_trains_with_an_optimizer_that_says_nothing_of_partials(tmp_path):
    own = ["data=bare", "loader.batch_size=8", "model=own", "model._target_=mine.linear", "optim=mine", "+optim.lr=0.1"]
    report = lockstep.train([*own, "run=a", f"runs_dir={tmp_path}", *CPU])
    assert (report["status"], report["train/steps"]) == ("done", 4)
    assert report["evaluated"] == "test/loss | test/count | test/acc"


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
        (PACKAGE / "kit/images.py", "lockstep.kit.images", False),
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
    assert project.is_user_code_error(raised(file, module)) is users
    assert not project.is_user_code_error(UserError("a refusal"))


def test_what_is_no_name_of_a_class_is_told_although_runs_are_named_by_it():
    with pytest.raises(UserError) as error:
        resolve(["data._target_=5", "model._target_=[1]"])
    assert [text.partition(" ")[0] for text in error.value.problems] == ["model._target_=[1]", "data._target_=5"]
