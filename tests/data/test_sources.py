"""The promises of a run hold for every source of data: same batches, exact resume, exact evaluation, a fingerprint."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torchvision
from conftest import digits, write_idx
from pictures import COLOURS, picture, write_classes
from shipped_data import stand_in_trainer

import lockstep
from lockstep.config.compose import compose_config
from lockstep.config.instantiate import create_data
from lockstep.data.datamodule import DataModule
from lockstep.errors import UserError

SIZE, BATCH, TEST = 12, 6, 21  # 21 test samples: neither two processes nor the batches divide them


@dataclass(frozen=True)
class Source:
    overrides: list[str]
    change: Callable[[], None]  # of the first training image, which a fingerprint of samples reads


def folder(root: Path, *more: str) -> Source:
    write_classes(root / "train", 20)
    write_classes(root / "test", 7)
    return Source(
        ["data=folder", f"data.root={root}", *more],
        lambda: picture((9, 9, 9), 1).save(root / "train" / min(COLOURS) / "0.png"),
    )


def fashion_mnist(root: Path) -> Source:
    raw = root / "FashionMNIST" / "raw"
    for count, prefix, seed in ((60, "train", 0), (TEST, "t10k", 1)):
        images, labels = digits(count, seed)
        write_idx(raw / f"{prefix}-images-idx3-ubyte", images)
        write_idx(raw / f"{prefix}-labels-idx1-ubyte", labels)

    def change() -> None:
        content = bytearray((raw / "train-images-idx3-ubyte").read_bytes())
        content[-1] ^= 1
        (raw / "train-images-idx3-ubyte").write_bytes(content)

    return Source(["data=torchvision", "data.dataset=FashionMNIST", f"data.root={root}", "data.channels=1"], change)


def dataset(root: Path) -> Source:
    source = folder(root)
    nodes = [
        f"data.{part}={{_target_:torchvision.datasets.ImageFolder,root:{root / part}}}" for part in ("train", "test")
    ]
    return Source(["data=torch", *nodes], source.change)


def huggingface(root: Path) -> Source:
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(COLOURS))})

    def table(each: int, first: int = 0) -> datasets.Dataset:
        places = [(label, number) for label in range(3) for number in range(each)]
        pictures = [picture(list(COLOURS.values())[i], first + i + 3 * number) for i, number in places]
        return datasets.Dataset.from_dict({"image": pictures, "label": [i for i, _ in places]}, features=features)

    def save(first: int) -> None:
        datasets.DatasetDict(train=table(20, first), test=table(TEST // 3, 500)).save_to_disk(root / f"{first}")
        (root / "link").unlink(missing_ok=True)
        (root / "link").symlink_to(root / f"{first}")

    root.mkdir()
    save(0)
    return Source(["data=huggingface", f"data.root={root / 'link'}"], lambda: save(1))


SOURCES = {
    "folder-cache": lambda root: folder(root, "data.decode=cache"),
    "folder-workers": lambda root: folder(root, "data.decode=workers"),
    "torchvision": fashion_mnist,
    "torch": dataset,
    "huggingface": huggingface,
}


@dataclass(frozen=True)
class Case:
    name: str
    source: Source
    folder: Path

    @property
    def overrides(self) -> list[str]:
        cache = [f"data.cache_dir={self.folder / 'cache'}"] if self.name != "torch" else []
        return [*self.source.overrides, f"data.image_size={SIZE}", f"data.batch_size={BATCH}", *cache]

    def data(self) -> Any:
        return create_data(compose_config("train", self.overrides).data)

    def module(self, workers: int = 0, **place: int) -> DataModule:
        made = DataModule(self.data(), batch_size=BATCH, eval_batch_size=8, num_workers=workers, seed=3)
        made.trainer = stand_in_trainer(**place)
        return made

    def steps(self, **place: int) -> list[list[tuple[int, bytes]]]:
        """Index and pixels of the samples of each step of the second epoch, as a rank's loader gives them."""
        loader = self.module(**place).train_dataloader()
        loader.sampler.set_epoch(1)
        return [
            [(int(i), image.numpy().tobytes()) for i, image in zip(batch["index"], batch["input"], strict=True)]
            for batch in loader
        ]


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.xdist_group(f"source-{name}")) for name in SOURCES]
)
def case(request, tmp_path_factory) -> Case:
    place = tmp_path_factory.mktemp(request.param)
    return Case(request.param, SOURCES[request.param](place / "data"), place)


def test_batches_are_the_same_for_every_number_of_processes_and_workers_and_after_a_resume(case):
    alone = case.steps()
    assert len(alone) > 5
    assert case.steps(workers=2) == alone
    assert case.steps(done=4) == alone[4:]
    both = [case.steps(rank=rank, world=2, workers=workers) for rank, workers in ((0, 2), (1, 0))]
    assert [first + second for first, second in zip(*both, strict=True)] == alone


def test_an_evaluation_by_two_processes_takes_each_sample_once(case):
    loaders = [case.module(rank=rank, world=2).test_dataloader() for rank in (0, 1)]
    taken = [batch["index"][: batch["count"]].tolist() for loader in loaders for batch in loader]
    assert sorted(index for batch in taken for index in batch) == list(range(TEST))


def test_only_what_is_held_in_memory_can_be_kept_on_the_gpu(case):
    data = case.data()
    if case.name == "folder-cache":
        assert data.bytes_in_memory == 81 * (3 * SIZE * SIZE + 8)
        return
    with pytest.raises(UserError, match=r"data.on_device=true has no effect"):
        DataModule(data, batch_size=BATCH, eval_batch_size=8, on_device=True)


@pytest.mark.slow
def test_a_run_trains_and_tests(case):
    report = lockstep.train([f"runs_dir={case.folder / 'runs'}", "trainer.accelerator=cpu", *case.overrides])
    assert (report["unit"], report["test/count"], report.get("data/skipped", 0)) == ("images", TEST, 0)


def test_a_checkpoint_describes_the_data_and_fits_no_data_with_a_changed_image(case):
    saved = case.module().state_dict()
    assert len(saved["about"]["mean"]) == (1 if case.name == "torchvision" else 3)  # of the channels that were chosen
    names = list(COLOURS) if case.name != "torchvision" else torchvision.datasets.FashionMNIST.classes
    assert saved["about"]["classes"] == names
    case.module().load_state_dict(saved)
    case.source.change()  # the last test of a source: its data is different now
    assert case.data().fingerprint != saved["sha256"]
    with pytest.raises(UserError, match="trained on different data"):
        case.module().load_state_dict(saved)
