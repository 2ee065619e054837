"""Transforms that a config names, as docs/augment.md shows them; and where the group has no effect."""

import random
import re
import shlex
from collections.abc import Iterator

import pytest
import thin_project
import torch
from torchvision.transforms import InterpolationMode, v2
from your_own import forget

from lockstep import CONFIGS, ROOT
from lockstep.config.checks import check_classes, resolve
from lockstep.config.settings import Settings
from lockstep.errors import UserError
from lockstep.kit.augment import Augmentation, Rotate

PAGE = (ROOT / "docs/augment.md").read_text()
FILES = dict(re.findall(r"^```\w+\n# (\S+/\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
COMMANDS = [shlex.split(line, comments=True) for line in re.findall(r"^\$ uv run train\.py(.*)$", PAGE, re.MULTILINE)]
LOADERS = """import lightning.pytorch as pl

class Loaders(pl.LightningDataModule):
    def __init__(self, batch_size=1):
        super().__init__()

class Module(pl.LightningModule):
    pass

def drawn(sample):
    return sample
"""


@pytest.fixture
def project(tmp_path, monkeypatch) -> Iterator[None]:
    bare = {
        "configs/project.yaml": "defaults: [lockstep, {override model: basic_net}, {override data: mnist}]\n",
        "configs/data/bare.yaml": "_target_: mywork.loaders.Loaders\n",
    }
    forget()
    root = thin_project.write(tmp_path / "project", **FILES, **bare, **{"src/mywork/loaders.py": LOADERS})
    monkeypatch.chdir(root)
    monkeypatch.syspath_prepend(root / "src")
    yield
    forget()


def settings(*overrides: str) -> Settings:
    return Settings.of(resolve(["trainer.accelerator=cpu", *overrides]))


def problems(*overrides: str) -> str:
    try:
        return "\n".join(check_classes(settings(*overrides)))
    except UserError as e:
        return "\n".join(e.problems)


def test_the_transforms_of_the_page_change_each_image_by_its_own_numbers(project):
    assert problems(*COMMANDS[-1]) == ""
    change = Augmentation(settings(*COMMANDS[-1]).operations)
    assert (list(change.transforms), list(change.operations)) == (["affine", "posterize"], ["shift", "flip"])
    del change.transforms["affine"]
    samples = [
        {"input": torch.full((1, 1, 12, 12), 171, dtype=torch.uint8), "index": torch.tensor([i])} for i in range(8)
    ]
    random.seed(0)
    made = torch.cat([change.at_reading(sample)["input"] for sample in samples])
    assert len(set(made.flatten().tolist())) > 2 and int(made.min()) >= 128


MODULE = "task=lightning_module task._target_=mywork.loaders.Module"


@pytest.mark.parametrize(("typed", "told"), [
    ("augment=mine +augment.posterize.least=1", "augment.posterize.least is not an argument"),
    ("augment=mine augment.posterize.fewest=abc", "augment.posterize.fewest=abc is invalid"),
    ("augment=mine +augment.affine.sheer=1", "augment.affine.sheer is not an argument"),
    ("augment=mine augment.affine.degrees=[-5]", "augment.affine: "),
    ("augment=mine augment.posterize._target_=mywork.transforms.Posterise", "No module named 'mywork.transforms.Posterise'"),
    ("+augment.x._target_=mywork.loaders.drawn +augment.x._partial_=true", ""),
    ("+augment.x._target_=torch.nn.Linear +augment.x.in_features=1 +augment.x.out_features=1", "is not allowed here: augment.x accepts a subclass of"),
    ("+augment.x._target_=timm.data.dataset.ImageDataset +augment.x.root=x", "is not allowed here: augment.x accepts a subclass of"),
    ("+augment.x._target_=timm.data.auto_augment.rand_augment_transform +augment.x.config_str=rand-m9 +augment.x.hparams={}", ""),
    ("+augment.x={_target_:torchvision.transforms.v2.RandomApply,transforms:[{_target_:torchvision.transforms.v2.GaussianBlur,kernel_size:3}]}", ""),
    ("+augment.x={_target_:albumentations.Compose,transforms:[{_target_:albumentations.HorizontalFlip}]}", ""),
    ("+augment.x={_target_:albumentations.load,filepath_or_buffer:x}", "is not allowed here"),
    ("augment=flip data=bare", "augment.flip has no effect: mywork.loaders.Loaders creates its own batches. Set augment=none."),
    (f"augment=standard {MODULE}", ""),
])  # fmt: skip
def test_its_keys_are_checked_and_what_has_no_effect_is_told(project, typed, told):
    assert told in (found := problems(*typed.split())) and bool(told) == bool(found)


def test_every_option_is_in_the_table_of_the_page():
    table = PAGE.partition("## What is exact")[0]
    assert [path.stem for path in (CONFIGS / "augment").glob("*.yaml") if f"`{path.stem}`" not in table] == []


def test_torchvision_gets_an_interpolation_of_its_own_type(monkeypatch):
    """Its 0.26 takes no text, which later ones do."""
    monkeypatch.setattr(v2, "RandomRotation", lambda *given, **named: [*given, *named.values()])
    option = Rotate(degrees=15.0)
    assert InterpolationMode(option.interpolation) in option.transform


@pytest.mark.parametrize("repeats", [1, 2, 4])
def test_copies_lengthen_an_epoch_and_stay_in_one_micro_batch(repeats):
    found = settings(f"loader.repeats={repeats}", "trainer.accumulate_grad_batches=2", "augment=mixup")
    assert found.epoch_batches(640) == 640 // (64 // repeats) * 2
    assert found.micro_batch_divisor[0] == 2 * repeats
    assert found.accumulations == [count for count in (1, 2, 4, 8, 16, 32) if 64 // count % (2 * repeats) == 0]
