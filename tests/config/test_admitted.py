"""What a config may name: a class of its key's kind, or a function that says it returns one. Nothing else is called."""

import pytest
import thin_project

from lockstep.config.instantiate import create, problems
from lockstep.errors import UserError

OWN = """
import os
import timm.models
from torch import nn
from torch.optim import AdamW
from timm.models import load_state_dict

class Net(nn.Module):
    def __init__(self, given=None):
        super().__init__()
        self.given = given

class Plain:
    pass

def net() -> nn.Module:
    return Net()

def unsaid():
    return Net()

def wipe(path="/") -> None:
    raise AssertionError("called")
"""


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    root = thin_project.write(tmp_path / "project", **{"src/kindly/__init__.py": OWN})
    monkeypatch.chdir(root)
    monkeypatch.syspath_prepend(root / "src")


@pytest.mark.parametrize(
    ("key", "target"),
    [
        ("callbacks.x", "timm.models.load_state_dict"),
        ("callbacks.x", "lockstep.extras.exported.load"),
        ("callbacks.x", "lockstep.machine.files.remove"),
        ("callbacks.x", "torchvision.datasets.utils.download_url"),
        ("callbacks.x", "torchvision.datasets.utils.extract_archive"),
        ("callbacks.x", "torch.nn.Linear"),
        ("callbacks.x", "lightning.pytorch.loggers.CSVLogger"),
        ("callbacks.x", "lightning.pytorch.Trainer"),
        ("callbacks.x", "kindly.Plain"),
        ("callbacks.x", "kindly.wipe"),
        ("callbacks.x", "kindly.load_state_dict"),
        ("model", "timm.models.load_checkpoint"),
        ("model", "timm.models.load_pretrained"),
        ("model", "torch.nn.modules.module.torch.load"),
        ("model", "torchvision.datasets.MNIST"),
        ("model", "kindly.timm.models.load_state_dict"),
        ("model", "kindly.os.system"),
        ("model", "kindly.os"),
        ("model", "kindly.wipe"),
        ("task", "timm.create_model"),
        ("task", "kindly.unsaid.__globals__"),
        ("task", "lightning.pytorch.demos.boring_classes.BoringModel"),
        ("data", "torchvision.datasets.ImageFolder"),
        ("strategy", "lockstep.strategies.base"),
        ("optim", "torch.optim.swa_utils.update_bn"),
        ("schedule", "torch.optim.AdamW"),
        ("task.metrics.x", "torchmetrics.functional.accuracy"),
        ("logger.x", "lockstep.reporting.page.write"),
        ("data.train", "torchvision.datasets.LSUN"),
        ("data.train", "timm.data.ImageDataset"),  # unpickles a class map
        ("data.train.transform", "torchvision.io.write_file"),
        ("task.net", "lockstep.machine.files.write_text"),
    ],
)
def test_what_is_not_of_the_keys_kind_is_refused(key, target):
    with pytest.raises(UserError, match=f"{key}._target_={target} "):
        create({"_target_": target}, key)


@pytest.mark.parametrize("bad", ["timm.models.load_state_dict", "os.system", "lockstep.extras.exported.load"])
@pytest.mark.parametrize(
    "around", [lambda node: {"given": node}, lambda node: {"given": [[{"a": node}]]}, lambda node: {"_args_": [node]}]
)
def test_a_node_within_a_node_is_refused_too(bad, around, tmp_path):
    with pytest.raises(UserError, match=rf"model\.\S+\._target_={bad} "):
        create({"_target_": "kindly.Net", **around({"_target_": bad, "checkpoint_path": str(tmp_path)})}, "model")


def test_an_interpolation_brings_no_other_target():
    for text in (
        "${oc.create:{_target_:timm.models.load_state_dict}}",
        r"\${oc.create:{_target_:timm.models.load_state_dict}}",
    ):
        with pytest.raises(UserError, match=r"model holds an interpolation .*load_state_dict"):
            create({"_target_": "kindly.Net", "given": text}, "model")


def test_a_name_outside_of_the_list_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "stranger.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    from lockstep.config.instantiate import network

    with pytest.raises(UserError, match=r"stranger\.Net may not be named"):
        network({"_target_": "stranger.Net"}, {"num_classes": 2})


@pytest.mark.parametrize(
    ("key", "target"),
    [
        ("model", "lockstep.models.from_timm"),
        ("model", "lockstep.models.BasicNet"),
        ("model", "timm.create_model"),
        ("model", "timm.models.resnet18"),
        ("model", "torchvision.models.resnet18"),
        ("model", "torchvision.models.segmentation.fcn_resnet50"),
        ("model", "torch.nn.Sequential"),
        ("model", "kindly.Net"),
        ("model", "kindly.net"),
        ("model", "kindly.unsaid"),
        ("optim", "torch.optim.AdamW"),
        ("optim", "timm.optim.Muon"),
        ("optim", "timm.optim.create_optimizer_v2"),
        ("optim", "kindly.AdamW"),
        ("schedule", "torch.optim.lr_scheduler.OneCycleLR"),
        ("schedule", "torch.optim.lr_scheduler.ReduceLROnPlateau"),
        ("schedule", "lockstep.training.schedules.cosine"),
        ("callbacks.x", "lightning.pytorch.callbacks.EarlyStopping"),
        ("logger.x", "lightning.pytorch.loggers.CSVLogger"),
        ("logger.x", "lockstep.reporting.loggers.wandb"),
        ("task.metrics.x", "torchmetrics.Accuracy"),
        ("strategy", "lockstep.strategies.SingleDevice"),
        ("strategy", "lightning.pytorch.strategies.DDPStrategy"),
        ("data", "lockstep.data.Mnist"),
        ("data.train", "torchvision.datasets.ImageFolder"),
        ("data.train.transform", "torchvision.transforms.Compose"),
        ("data.train.transform", "torchvision.transforms.v2.RandomCrop"),
        ("task.optimizer", "torch.optim.SGD"),
        ("task.loss", "torch.nn.CrossEntropyLoss"),
        ("callbacks.x.pruner", "optuna.pruners.MedianPruner"),
        ("task.net", "kindly.Plain"),
    ],
)
def test_what_is_of_the_keys_kind_may_be_named(key, target):
    assert list(problems({"_target_": target}, key)) == []
