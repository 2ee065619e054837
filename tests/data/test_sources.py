"""The promises of a run hold for every source of data: same batches, exact resume, exact evaluation, a fingerprint."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from conftest import digits, write_idx
from pictures import COLOURS, picture, write_classes
from shipped_data import stand_in_trainer

import lockstep
from lockstep.callbacks import FiniteLoss
from lockstep.config.compose import compose_config
from lockstep.config.instantiate import create_data
from lockstep.data.datamodule import DataModule

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


def torchvision(root: Path) -> Source:
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
    "torchvision": torchvision,
    "torch": dataset,
    "huggingface": huggingface,
}

SLOW = ("torch", "huggingface", "torchvision", "folder-workers")


@dataclass(frozen=True)
class Case:
    name: str
    source: Source
    folder: Path

    def overrides(self, *more: str) -> list[str]:
        cache = [f"data.cache_dir={self.folder / 'cache'}"] if self.name != "torch" else []
        return [*self.source.overrides, f"data.image_size={SIZE}", f"data.batch_size={BATCH}", *cache, *more]

    def train(self, run: str, *more: str) -> dict:
        options = ["trainer.accelerator=cpu", "trainer.log_every_n_steps=1", "schedule=cosine",
                   "checkpoint.every_n_steps=4", "data.eval_batch_size=8"]  # fmt: skip
        return lockstep.train([f"runs_dir={self.folder / 'runs'}", f"run={run}", *options, *self.overrides(*more)])

    def state(self, run: str) -> dict:
        return torch.load(self.folder / "runs" / run / "checkpoints" / "last.ckpt", weights_only=True)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.xdist_group(f"source-{name}"), *[pytest.mark.slow] * (name in SLOW)])
        for name in SOURCES
    ],
)
def case(request, tmp_path_factory) -> Case:
    place = tmp_path_factory.mktemp(request.param)
    return Case(request.param, SOURCES[request.param](place / "data"), place)


@pytest.fixture(scope="module")
def whole(case, forked) -> dict:
    return case.train("whole")


def batches(case: Case, *, rank: int = 0, world: int = 1, workers: int = 0) -> list[list[tuple[int, bytes]]]:
    """Index and pixels of the samples of each step of the second epoch, as a rank's loader gives them."""
    cfg = compose_config("train", case.overrides())
    module = DataModule(create_data(cfg.data), batch_size=BATCH, eval_batch_size=8, num_workers=workers, seed=3)
    module.trainer = stand_in_trainer(rank=rank, world=world)
    loader = module.train_dataloader()
    loader.sampler.set_epoch(1)
    return [
        [(int(i), image.numpy().tobytes()) for i, image in zip(batch["index"], batch["input"], strict=True)]
        for batch in loader
    ]


def test_batches_are_the_same_for_every_number_of_processes_and_workers(case):
    alone = batches(case)
    assert len(alone) > 5
    assert batches(case, workers=2) == alone
    both = [batches(case, rank=rank, world=2, workers=workers) for rank, workers in ((0, 2), (1, 0))]
    assert [first + second for first, second in zip(*both, strict=True)] == alone


def test_only_what_is_held_in_memory_can_be_kept_on_the_gpu(case):
    data = create_data(compose_config("train", case.overrides()).data)
    if case.name == "folder-cache":
        assert data.bytes_in_memory == 81 * (3 * SIZE * SIZE + 8)
        return
    with pytest.raises(lockstep.errors.UserError, match=r"data.on_device=true has no effect"):
        DataModule(data, batch_size=BATCH, eval_batch_size=8, on_device=True)


def test_a_run_that_crashed_in_mid_epoch_and_resumed_is_bit_identical(case, whole, monkeypatch):
    def crash(self, trainer, *_):
        if trainer.global_step == 6:
            raise RuntimeError("crash")

    with monkeypatch.context() as patch:
        patch.setattr(FiniteLoss, "on_train_batch_end", crash)
        with pytest.raises(RuntimeError, match="crash"):
            case.train("parts")
    parts = case.train("parts", "resume=auto")
    assert parts["resumed_from"] is not None
    a, b = case.state("whole"), case.state("parts")
    assert a["global_step"] == b["global_step"] > 6
    assert all(torch.equal(a["state_dict"][key], b["state_dict"][key]) for key in a["state_dict"])
    assert parts["test/loss"] == whole["test/loss"]


def test_an_evaluation_by_two_processes_counts_each_sample_once(case, whole):
    more = ["strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu"]
    # Processes of tests/forked.py are daemons, which have no workers.
    metrics = lockstep.evaluate(["run=whole", f"runs_dir={case.folder / 'runs'}", "data.num_workers=0", *more])
    assert (metrics["test/count"], whole["test/count"]) == (TEST, TEST)
    assert metrics["test/acc"] == pytest.approx(whole["test/acc"], abs=1e-9)
    assert metrics["test/loss"] == pytest.approx(whole["test/loss"], rel=1e-5)


def test_the_data_is_described_in_the_checkpoint(case, whole):
    about = case.state("whole")["DataModule"]["about"]
    assert len(about["mean"]) == (1 if case.name == "torchvision" else 3)  # numbers of the channels that were chosen
    names = list(COLOURS) if case.name != "torchvision" else [
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]  # fmt: skip
    assert about["classes"] == names
    assert whole["unit"] == "images"
    assert whole.get("data/skipped", 0) == 0
    assert whole["data/sha256"] == case.state("whole")["DataModule"]["sha256"]


def test_a_changed_image_is_different_data(case, whole):
    case.source.change()  # the last test of a source: its data is different now
    assert create_data(compose_config("train", case.overrides()).data).fingerprint != whole["data/sha256"]
    with pytest.raises(lockstep.errors.UserError, match="trained on different data"):
        case.train("whole", "resume=auto", "trainer.max_epochs=2")
