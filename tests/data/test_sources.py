"""The promises of a run hold for every source of data: same batches, exact resume, exact evaluation, a fingerprint."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pytest
import torchvision
from conftest import digits, write_idx
from pictures import COLOURS, picture, write_classes
from shipped_data import divided, stand_in_trainer

import lockstep
from lockstep.config.checks import resolve
from lockstep.config.instantiate import create_data
from lockstep.errors import UserError
from lockstep.extras.adapters import TorchDataset, Torchvision
from lockstep.kit.datamodule import DataModule
from lockstep.kit.folder import Folder

SIZE, BATCH, TEST = 12, 6, 21  # 21 test samples: neither two processes nor the batches divide them
# What names the data on the command line, and what changes the first training image, which a fingerprint of samples reads.
Source = tuple[list[str], Callable[[], object]]


def folder(root: Path, decode: str = "cache") -> Source:
    write_classes(root / "train", 20)
    write_classes(root / "test", 7)
    first = root / "train" / min(COLOURS) / "0.png"
    return ["data=folder", f"data.root={root}", f"data.decode={decode}"], lambda: picture((9, 9, 9), 1).save(first)


def fashion_mnist(root: Path) -> Source:
    raw = root / "FashionMNIST" / "raw"
    for count, prefix, seed in ((60, "train", 0), (TEST, "t10k", 1)):
        images, labels = digits(count, seed)
        write_idx(raw / f"{prefix}-images-idx3-ubyte", images)
        write_idx(raw / f"{prefix}-labels-idx1-ubyte", labels)
    overrides = ["data=torchvision", "data.dataset=FashionMNIST", f"data.root={root}", "data.channels=1"]
    return overrides, lambda: write_idx(raw / "train-images-idx3-ubyte", digits(60, 2)[0])


def torch_datasets(root: Path) -> Source:
    parts = [
        f"data.{part}={{_target_:torchvision.datasets.ImageFolder,root:{root / part}}}" for part in ("train", "test")
    ]
    return ["data=torch", *parts], folder(root)[1]


def huggingface(root: Path) -> Source:
    change = folder(root / "files")[1]

    def save() -> None:
        shutil.rmtree(root / "saved", ignore_errors=True)
        of_files = datasets.load_dataset("imagefolder", data_dir=str(root / "files"), cache_dir=str(root / "cache"))
        of_files.save_to_disk(root / "saved")

    save()
    return ["data=huggingface", f"data.root={root / 'saved'}"], lambda: (change(), save())


SOURCES = {
    "folder-cache": folder,
    "folder-workers": lambda root: folder(root, "workers"),
    "torchvision": fashion_mnist,
    "torch": torch_datasets,
    "huggingface": huggingface,
}
SLOW = ("huggingface", "folder-workers")


@dataclass(frozen=True)
class Case:
    name: str
    overrides: list[str]
    change: Callable[[], object]
    folder: Path

    def data(self) -> Any:
        cfg = resolve(self.overrides)
        return create_data(cfg.data, cfg.loader)

    def module(self, workers: int = 0) -> DataModule:
        made = DataModule(self.data(), batch_size=BATCH, eval_batch_size=8, num_workers=workers)
        made.trainer = stand_in_trainer()
        return made

    def steps(self, workers: int = 0, **division: int) -> list[list[tuple[int, bytes]]]:
        """Index and pixels of the samples of each step of the second epoch, as a rank's loader gives them."""
        loader = self.module(workers).train_dataloader()
        return [
            [(int(i), image.numpy().tobytes()) for i, image in zip(batch["index"], batch["input"], strict=True)]
            for batch, _ in divided(loader, seed=3, epoch=1, **division)
        ]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.xdist_group(f"source-{name}"), *[pytest.mark.slow] * (name in SLOW)])
        for name in SOURCES
    ],
)
def case(request, tmp_path_factory) -> Case:
    place = tmp_path_factory.mktemp(request.param)
    overrides, change = SOURCES[request.param](place / "data")
    cache = [f"data.cache_dir={place / 'cache'}"] if request.param != "torch" else []
    common = [f"data.image_size={SIZE}", f"loader.batch_size={BATCH}", *cache]
    return Case(request.param, [*overrides, *common], change, place)


def test_batches_are_the_same_for_every_number_of_processes_and_workers_and_after_a_resume(case):
    alone = case.steps()
    assert len(alone) > 5
    assert case.steps(done=4) == alone[4:]
    both = [case.steps(rank=rank, world=2, workers=workers) for rank, workers in ((0, 2), (1, 0))]
    assert [first + second for first, second in zip(*both, strict=True)] == alone


def test_an_evaluation_by_two_processes_takes_each_sample_once(case):
    loaders = [divided(*case.module().test_dataloader(), rank=rank, world=2, trains=False) for rank in (0, 1)]
    taken = [batch["index"].tolist() for loader in loaders for batch, _ in loader]
    assert sorted(index for batch in taken for index in batch) == list(range(TEST))


@pytest.mark.slow
def test_a_run_trains_and_tests(case):
    report = lockstep.train([f"runs_dir={case.folder / 'runs'}", "trainer.accelerator=cpu", *case.overrides])
    assert (report["unit"], report["test/count"], report.get("data/skipped", 0)) == ("images", TEST, 0)


def test_a_checkpoint_describes_the_data_and_fits_no_data_with_a_changed_image(case):
    saved = case.module().state_dict()
    assert len(saved["about"]["mean"]) == (1 if case.name == "torchvision" else 3)  # of the channels that were chosen
    names = list(COLOURS) if case.name != "torchvision" else torchvision.datasets.FashionMNIST.classes
    assert saved["about"]["classes"] == names
    assert case.data().bytes_in_memory == (81 * (3 * SIZE * SIZE + 8) if case.name == "folder-cache" else None)
    case.module().load_state_dict(saved)
    case.change()  # the last test of a source: its data is different now
    assert case.data().fingerprint != saved["sha256"]
    with pytest.raises(UserError, match="trained on different data"):
        case.module().load_state_dict(saved)


IMAGE_FOLDER = {"_target_": "torchvision.datasets.ImageFolder", "root": "x"}
TORCH, FILES = {"train": IMAGE_FOLDER, "test": IMAGE_FOLDER}, {"target": "class", "csv": None, "channels": 3}


@pytest.mark.parametrize(("kind", "node", "message"), [
    (Folder, FILES, None),
    (Folder, {**FILES, "channels": 1, "mean": [0.5], "std": [0.2]}, None),
    (Folder, {**FILES, "channels": 1, "mean": [0.5, 0.5, 0.5]}, "3 numbers, but the images need 1"),
    (Folder, {**FILES, "target": "label"}, "data.target=label is unknown; use one of class, labels, number (did you mean labels?)"),
    (Folder, {**FILES, "target": "number"}, "data.target=number needs a list of files and targets. Set data.csv=<file>"),
    (TorchDataset, {**TORCH, "val": None}, None),
    (TorchDataset, {**TORCH, "train": "???"}, "data.train is missing. Set it to a Dataset"),
    (TorchDataset, {**TORCH, "test": {**IMAGE_FOLDER, "rot": "x"}},
     "data.test.rot is not an argument of torchvision.datasets.ImageFolder (did you mean root?)"),
    (TorchDataset, {**TORCH, "val": {"_target_": "os.system"}}, "data.val._target_=os.system is not allowed in a config"),
    (Torchvision, {"dataset": "CIFAR100"}, None),
    (Torchvision, {"dataset": "FashonMNIST"}, "data.dataset=FashonMNIST is not in torchvision.datasets (did you mean FashionMNIST?)"),
    (Torchvision, {"dataset": "wrap_dataset_for_transforms_v2"}, "is not in torchvision.datasets"),  # an exported function
    (Torchvision, {"dataset": "???"}, "data.dataset is missing. Set data.dataset=<name>"),
    (Torchvision, {"dataset": "CIFAR100", "source": "embedded"}, "no package contains"),
])  # fmt: skip
def test_mistakes_in_a_node_are_named_before_anything_is_read(kind, node, message):
    problems = list(kind.problems(node))
    assert problems == [] if message is None else message in problems[0]
