"""The promises of a run hold for every source of data: same batches, exact resume, exact evaluation, a fingerprint."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import datasets
import pytest
from conftest import digits, write_idx
from pictures import COLOURS, picture, write_classes
from shipped_data import divided, stand_in_trainer
from torchvision.datasets import FashionMNIST

import lockstep
from lockstep.config.checks import resolve
from lockstep.config.instantiate import create_data
from lockstep.errors import UserError
from lockstep.kit.datamodule import DataModule

SIZE, BATCH, TEST = 12, 6, 21  # 21 test samples: neither two processes nor the batches divide them


# Each source writes its files and returns the overrides that select them. `changed`: the first training image differs.
def folder(root: Path, changed: bool, decode: str = "cache") -> list[str]:
    write_classes(root / "train", 20)
    write_classes(root / "test", 7)
    if changed:
        picture((9, 9, 9), 1).save(root / "train" / min(COLOURS) / "0.png")
    return ["data=folder", f"data.root={root}", f"data.decode={decode}"]


def fashion_mnist(root: Path, changed: bool) -> list[str]:
    for count, prefix, seed in ((60, "train", 2 if changed else 0), (TEST, "t10k", 1)):
        images, labels = digits(count, seed)
        write_idx(root / f"FashionMNIST/raw/{prefix}-images-idx3-ubyte", images)
        write_idx(root / f"FashionMNIST/raw/{prefix}-labels-idx1-ubyte", labels)
    return ["data=torchvision", "data.dataset=FashionMNIST", f"data.root={root}", "data.channels=1"]


def torch_datasets(root: Path, changed: bool) -> list[str]:
    folder(root, changed)
    node = "{{_target_:torchvision.datasets.ImageFolder,root:{}}}"
    return ["data=torch", *(f"data.{part}={node.format(root / part)}" for part in ("train", "test"))]


def huggingface(root: Path, changed: bool) -> list[str]:
    folder(root / "files", changed)
    tables = datasets.load_dataset("imagefolder", data_dir=str(root / "files"), cache_dir=str(root / "cache"))
    tables.save_to_disk(root / "saved")
    return ["data=huggingface", f"data.root={root / 'saved'}"]


SOURCES = {
    "folder-cache": folder,
    "folder-workers": lambda root, changed: folder(root, changed, "workers"),
    "torchvision": fashion_mnist,
    "torch": torch_datasets,
    "huggingface": huggingface,
}
SLOW = ("huggingface", "folder-workers")


@dataclass(frozen=True)
class Case:
    name: str
    root: Path
    overrides: list[str]

    def module(self, workers: int = 0) -> DataModule:
        cfg = resolve(self.overrides)
        module = DataModule(create_data(cfg.data, cfg.loader), batch_size=BATCH, eval_batch_size=8, num_workers=workers)
        module.trainer = stand_in_trainer()
        return module

    def steps(self, workers: int = 0, **division: int) -> list[list[tuple]]:
        """Index and pixels of the samples of each step of the second epoch, as a rank's loader gives them."""
        batches = divided(self.module(workers).train_dataloader(), seed=3, epoch=1, **division)
        return [[*zip(batch["index"].tolist(), batch["input"].tolist(), strict=True)] for batch, _ in batches]


@pytest.fixture(scope="module", params=[
    pytest.param(name, marks=[pytest.mark.xdist_group(f"source-{name}"), *[pytest.mark.slow] * (name in SLOW)])
    for name in SOURCES
])  # fmt: skip
def case(request, tmp_path_factory) -> Case:
    root = tmp_path_factory.mktemp(request.param) / "data"
    overrides = [*SOURCES[request.param](root, False), f"data.image_size={SIZE}", f"loader.batch_size={BATCH}"]
    return Case(request.param, root, overrides)


def test_any_division_and_a_resume_have_the_same_samples(case):
    alone = case.steps()
    assert len(alone) > 5
    assert case.steps(done=4) == alone[4:]
    first, second = case.steps(rank=0, world=2, workers=2), case.steps(rank=1, world=2)
    assert [one + other for one, other in zip(first, second, strict=True)] == alone
    loaders = [divided(*case.module().test_dataloader(), rank=rank, world=2, trains=False) for rank in (0, 1)]
    evaluated = [index for loader in loaders for batch, _ in loader for index in batch["index"].tolist()]
    assert sorted(evaluated) == [*range(TEST)]


@pytest.mark.slow
def test_a_run_trains_and_tests(case, tmp_path):
    report = lockstep.train([f"runs_dir={tmp_path}", "trainer.accelerator=cpu", *case.overrides])
    assert (report["unit"], report["test/count"], report.get("data/skipped", 0)) == ("images", TEST, 0)


def test_a_checkpoint_describes_its_data_and_rejects_others(case):
    module = case.module()
    saved = module.state_dict()
    classes, channels = (FashionMNIST.classes, 1) if case.name == "torchvision" else ([*COLOURS], 3)
    assert (saved["about"]["classes"], len(saved["about"]["mean"])) == (classes, channels)
    assert module.dataset.bytes_in_memory == (81 * (3 * SIZE * SIZE + 8) if case.name == "folder-cache" else None)
    case.module().load_state_dict(saved)
    shutil.rmtree(case.root)
    SOURCES[case.name](case.root, True)  # in the last test of a source
    with pytest.raises(UserError, match="trained on different data"):
        case.module().load_state_dict(saved)


TRAIN, HELD = (f"data.{part}={{_target_:torchvision.datasets.ImageFolder,root:x}}" for part in ("train", "test"))


@pytest.mark.parametrize(("overrides", "message"), [
    ("data=folder data.channels=1 data.mean=[0.5,0.5,0.5]", "3 numbers, but the images need 1"),
    ("data=folder data.target=label", "data.target=label is unknown; use one of class, labels, number (did you mean labels?)"),
    ("data=folder data.target=number", "data.target=number needs a list of files and targets. Set data.csv=<file>"),
    (f"data=torch {HELD}", "data.train is missing. Set it to a Dataset"),
    (f"data=torch {TRAIN} {HELD.replace('root', 'rot')}", "data.test.rot is not an argument of torchvision.datasets.ImageFolder (did you mean root?)"),
    (f"data=torch {TRAIN} {HELD} data.val={{_target_:os.system}}", "data.val._target_=os.system is not allowed in a config"),
    ("data=torchvision data.dataset=FashonMNIST", "data.dataset=FashonMNIST is not in torchvision.datasets (did you mean FashionMNIST?)"),
    ("data=torchvision data.dataset=wrap_dataset_for_transforms_v2", "is not in torchvision.datasets"),  # an exported function
    ("data=torchvision", "data.dataset=??? is not in torchvision.datasets. Set data.dataset=<name>"),
    ("data=torchvision data.dataset=CIFAR100 data.source=embedded", "no package contains"),
])  # fmt: skip
def test_mistakes_in_a_node_are_named(overrides, message):
    with pytest.raises(UserError, match=re.escape(message)):
        resolve(overrides.split())
