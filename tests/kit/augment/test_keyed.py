"""Transforms of torchvision, timm, albumentations and one's own draw by (seed, epoch, sample, copy), whoever reads the sample."""

import hashlib
import multiprocessing
import os
import random
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
import torchvision
from shipped_data import divided, stand_in_trainer, training_batches
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

from lockstep import Arrays
from lockstep.data.keyed import DEFAULTS, Generators, generators_in
from lockstep.data.loaders import concatenate
from lockstep.data.standard import Division
from lockstep.data.streams import wrap_loader
from lockstep.errors import UserError
from lockstep.extras.adapters import WrappedDataset
from lockstep.kit import Images
from lockstep.kit.augment import Augmentation, RandomResizedCrop, Rotate, SampleTransform
from lockstep.kit.datamodule import DataModule

COUNT = 60
IMAGES = np.random.default_rng(0).integers(0, 256, (COUNT, 3, 20, 18), dtype=np.uint8)


def timms() -> object:
    from timm.data.auto_augment import rand_augment_transform

    return rand_augment_transform("rand-m9-mstd0.5", {})


def timms_erasing() -> object:
    from timm.data.random_erasing import RandomErasing

    return RandomErasing(probability=0.7, mode="const", device="cpu")


def albumentations() -> object:
    a = pytest.importorskip("albumentations")
    return a.Compose([a.RandomResizedCrop(size=(16, 16)), a.HueSaturationValue(p=0.8), a.GaussNoise(p=0.5)])


def turned(sample: dict) -> dict:
    """By Python's random numbers."""
    return {**sample, "input": v2.functional.rotate(sample["input"], random.uniform(-20, 20))}


def rarely(sample: dict) -> dict:
    """By NumPy's, for few samples only: long after the first one was read."""
    image = sample["input"]
    return (
        {**sample, "input": image[:, torch.from_numpy(np.random.permutation(len(image[0])))]}
        if image[0, 0, 0] < 20
        else sample
    )


class Holding:
    """By generators of its own."""

    def __init__(self) -> None:
        self.inner = {"a": [np.random.default_rng(0)]}
        self.other = random.Random(0)

    def __call__(self, sample: dict) -> dict:
        roll = int(self.inner["a"][0].integers(9)), self.other.randrange(9)
        return {**sample, "input": sample["input"].roll(roll, (1, 2)) + self.other.randrange(20)}


def shuffled(sample: dict) -> dict:
    return {**sample, "input": sample["input"].roll(int(torch.randint(18, ())), 2), "target": sample["target"] + 100}


class Pictures(Dataset):
    """A torch Dataset with a random transform."""

    def __init__(self) -> None:
        self.transform = v2.Compose([v2.RandomCrop(16), v2.RandomErasing(0.6)])

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(torch.from_numpy(IMAGES[index])), index


class OfDataset(WrappedDataset):
    def __init__(self) -> None:
        super().__init__(image_size=16)
        self.held = {"train": Pictures(), "val": None, "test": Pictures()}


class InMemory(Images):
    def __init__(self) -> None:
        super().__init__(image_size=16)
        self.train = self.test = Arrays(input=IMAGES, target=np.arange(COUNT))


TRANSFORMS: dict[str, Callable[[], object]] = {
    "crop": lambda: RandomResizedCrop(image_size=16),
    "rotate": lambda: Rotate(degrees=40, fill=9),
    "colour jitter": lambda: v2.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1),
    "TrivialAugment": v2.TrivialAugmentWide,
    "RandAugment": v2.RandAugment,
    "several of torchvision": lambda: v2.Compose(
        [v2.RandomHorizontalFlip(), v2.RandomPhotometricDistort(), v2.RandomAffine(9)]
    ),
    "timm's RandAugment": timms,
    "timm's RandomErasing": timms_erasing,
    "albumentations": albumentations,
    "Python's numbers": lambda: turned,
    "NumPy's numbers, rarely": lambda: rarely,
    "generators of its own": Holding,
    "a function of the sample": lambda: shuffled,
}
PLACES = {"two processes": {"world": 2, "workers": 2}, "after two steps": {"done": 2}}
SLOW_PLACES = {
    "one process": {},
    "two workers": {"workers": 2},
    "accumulated": {"accumulate": 2},
    "four workers": {"workers": 4},
    "spawned": {"workers": 2, "method": "spawn"},
    "forkserver": {"workers": 2, "method": "forkserver"},
}


def digests(
    made: dict, data: Images, *, workers=0, world=1, accumulate=1, done=0, repeats=1, method="fork"
) -> list[str]:
    """Of the global batches of the second epoch, whatever the order of micro-batches within them, from the step `done` on."""
    default = multiprocessing.get_start_method(allow_none=True)
    steps: dict[int, dict[int, list[str]]] = {}
    multiprocessing.set_start_method(method, force=True)
    try:
        for rank in range(world):
            options = {"num_workers": workers, "repeats": repeats, "operations": made}
            module = DataModule(data, batch_size=12, eval_batch_size=8, **options)
            module.trainer = stand_in_trainer()
            division = {"rank": rank, "world": world, "accumulate": accumulate, "done": done * accumulate}
            for number, finished in enumerate(training_batches(module, seed=5, epoch=1, **division)):
                of_step = steps.setdefault(number // accumulate, {})
                for index, *values in zip(*(finished[name] for name in ("index", "input", "target")), strict=True):
                    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in values)).hexdigest()
                    of_step.setdefault(int(index), []).append(digest)
    finally:
        multiprocessing.set_start_method(default, force=True)
    return [hashlib.sha256(repr(sorted(of_step.items())).encode()).hexdigest() for of_step in steps.values()]


@pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning", "ignore:This DataLoader will create"
)
@pytest.mark.parametrize("place", [*PLACES, *(pytest.param(place, marks=pytest.mark.slow) for place in SLOW_PLACES)])
@pytest.mark.parametrize("name", [*TRANSFORMS, "a torch Dataset's"])
def test_batches_are_the_same_wherever_they_are_read(name, place):
    def found(**options):
        torch.manual_seed(0)
        random.seed(1)
        data, made = (InMemory(), {"x": TRANSFORMS[name]()}) if name in TRANSFORMS else (OfDataset(), {})
        return digests(made, data, **options)

    options = {**PLACES, **SLOW_PLACES}[place]
    expected = found()
    assert len(set(expected)) == 54 // 12
    assert found(**options) == expected[options.get("done", 0) :]


@pytest.mark.parametrize("name", [*TRANSFORMS, "a torch Dataset's"])
def test_copies_and_epochs_differ_and_the_process_draws_as_before(name):
    data, made = (InMemory(), {"x": TRANSFORMS[name]()}) if name in TRANSFORMS else (OfDataset(), {})
    module = DataModule(data, batch_size=12, eval_batch_size=8, repeats=2, operations=made)
    module.trainer = stand_in_trainer()
    states = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]
    loader = module.train_dataloader()
    batches = [torch.cat([batch["input"] for batch, _ in divided(loader, seed=5, epoch=epoch)]) for epoch in (0, 0, 1)]
    assert states == [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]
    assert torch.equal(batches[0], batches[1]) and not torch.equal(batches[0], batches[2])
    assert (batches[0][::2] != batches[0][1::2]).any()


OF_MODULE = np.random.default_rng(1)


class Everywhere:
    of_class = np.random.default_rng(2)

    def __init__(self) -> None:
        nested: object = random.Random(3)
        for _ in range(20):
            nested = [nested]
        self.held = {
            "a": [np.random.default_rng(4)],
            "b": (np.random.RandomState(5), {"c": torch.Generator()}),
            "d": nested,
        }

    def draws(self) -> list[Callable[[], object]]:
        nested = self.held["d"]
        while isinstance(nested, list):
            nested = nested[0]
        a, (b, c) = self.held["a"][0], self.held["b"]
        others = [nested.random, lambda: torch.rand((), generator=c["c"]).item(), b.rand, a.random]
        return [
            OF_MODULE.random,
            self.of_class.random,
            random.random,
            np.random.randn,
            lambda: torch.rand(()).item(),
            *others,
        ]


@pytest.mark.parametrize(
    "form",
    [lambda found: found, lambda found: found.draws, lambda found: partial(print, found), lambda found: lambda: found],
)
def test_generators_are_found_wherever_an_object_holds_them(form):
    holder, state_B = Everywhere(), np.arange(4, dtype=np.uint64)
    found = Generators(form(holder))
    for draw in holder.draws():
        random.seed(0)
        np.random.seed(0)
        np.random.randn()  # NumPy keeps the second one for later
        first = found.each(len(state_B), lambda: state_B, lambda place, draw=draw: draw() if place == 1 else 0)
        assert np.random.randn() == np.random.RandomState(0).randn(2)[1]
        draw()
        assert found.each(len(state_B), lambda: state_B, lambda place, draw=draw: draw() if place == 1 else 0) == first
    assert len(found.used) == len(holder.draws())


@pytest.mark.parametrize("bits", [np.random.MT19937, np.random.PCG64])
@pytest.mark.parametrize("pending", [False, True])
def test_the_state_of_a_generator_changes_with_each_draw_and_comes_back(bits, pending):
    own, others = generators_in(*DEFAULTS), (np.random.Generator(bits(1)), np.random.RandomState(1), random.Random(1))
    draws = (
        lambda: torch.rand(3).tolist(), np.random.rand, random.random, others[0].random, others[1].randn, others[2].random,
        lambda: random.gauss(0, 1), np.random.randn, lambda: np.random.binomial(10, 0.3),
    )  # fmt: skip
    generators = [*own, *generators_in(*others)]
    twister = np.random.get_bit_generator()
    np.random.set_bit_generator(twister if bits is np.random.MT19937 else bits(2))
    try:
        for _ in range(1 + pending):  # the first of a pair of normal numbers leaves the second
            random.gauss(0, 1)
            np.random.randn()
        for draw in draws:
            before = [generator.state() for generator in generators]
            assert before == [generator.state() for generator in generators]
            first = draw()
            assert sum(old != generator.state() for old, generator in zip(before, generators, strict=True)) == 1
            for old, generator in zip(before, generators, strict=True):
                generator.restore(old)
            assert draw() == first
    finally:
        np.random.set_bit_generator(twister)


def test_what_is_drawn_later_is_read_again_with_a_seed():
    generators = Generators(None)
    state_B = np.arange(9, dtype=np.uint64)
    assert (
        generators.each(len(state_B), lambda: state_B, lambda place: place) == [*range(9)] and generators.used == set()
    )
    first = generators.each(len(state_B), lambda: state_B, lambda place: random.random() if place > 6 else 0)
    assert generators.used == {2}
    assert generators.each(len(state_B), lambda: state_B, lambda place: random.random() if place > 6 else 0) == first


# --- masks, boxes and other values ---


class Boxes(Dataset):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict:
        box = torch.tensor([[2.0, 2, 12, 12]] * (1 + index % 3))
        boxes = tv_tensors.BoundingBoxes(box, format="XYXY", canvas_size=(20, 18))
        image = torch.zeros(3, 20, 18, dtype=torch.uint8)
        image[:, 2:12, 2:12] = 200
        return {
            "input": image,
            "target": {"boxes": boxes, "labels": torch.ones(len(box))},
            "mask": (image[0] > 0).long(),
        }


def test_masks_and_boxes_move_with_their_images():
    class Data(WrappedDataset):
        def __init__(self) -> None:
            super().__init__()
            self.held = {"train": Boxes(), "val": None, "test": Boxes()}

    change = {"x": v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop(16, padding=2)])}
    module = DataModule(Data(), batch_size=12, eval_batch_size=8, operations=change)
    module.trainer = stand_in_trainer()
    batch, _ = next(divided(module.train_dataloader()))
    assert batch["input"].shape == (12, 3, 16, 16) and batch["mask"].shape == (12, 16, 16)
    assert torch.equal(batch["mask"], (batch["input"][:, 0] > 0).long())
    for image, target in zip(batch["input"], batch["target"], strict=True):
        x0, y0, x1, y1 = target["boxes"][0].int().tolist()
        inside = image[0, y0:y1, x0:x1]
        assert inside.numel() == (image[0] > 0).sum() and (inside == 200).all()
    assert len({tuple(target["boxes"][0].tolist()) for target in batch["target"]}) > 3


def albumentations_flip() -> object:
    return pytest.importorskip("albumentations").HorizontalFlip(p=1)


BOXES = tv_tensors.BoundingBoxes(torch.ones(1, 4), format="XYXY", canvas_size=(20, 18))


@pytest.mark.parametrize(("make", "more", "told"), [
    (lambda: torchvision.transforms.RandomCrop(9), {"target": torch.zeros(4, 20, 18)}, r"it moves only the image, not `target`"),
    (v2.RandomHorizontalFlip, {"target": torch.zeros(4, 5, 4)}, r"it cannot move float32 of shape \(5, 4\)"),
    (v2.RandomHorizontalFlip, {"target": [{"boxes": torch.zeros(1, 4)}] * 4}, r"it cannot move float32 of shape \(1, 4\)"),
    (v2.RandomHorizontalFlip, {"input": torch.rand(4, 3, 20, 18)}, r"it needs uint8 images \(CHW\), but `input` is float32"),
    (lambda: v2.ToDtype(torch.float32, scale=True), {}, r"it returns float32 of shape \(3, 20, 18\). Images stay uint8"),
    (lambda: v2.RandomCrop(90), {}, r"augment.x, sample 0: ValueError: Required crop size"),
    (lambda: Rotate(degrees=9), {"target": torch.zeros(4, 20, 18)}, r"it uncovers pixels, .* mask_fill=<value>. Or remove it: ~augment.x"),
    (v2.TrivialAugmentWide, {"target": torch.zeros(4, 20, 18)}, r"augment.x, sample 0: TypeError: .*Mask"),
    (albumentations_flip, {"target": [BOXES] * 4}, r"albumentations moves only images and masks \(H, W\) here, not `target`"),
    (albumentations_flip, {"target": torch.zeros(4, 2, 20, 18)}, r"albumentations moves only images and masks \(H, W\) here"),
])  # fmt: skip
def test_what_a_transform_cannot_keep_true_is_refused(make, more, told):
    with pytest.raises(UserError, match=told):
        read(make(), {**four(), **more})


def four() -> dict:
    return {"input": torch.from_numpy(IMAGES[:4]), "target": torch.arange(4), "index": torch.arange(4)}


def row(value: object, index: int) -> object:
    return {n: row(v, index) for n, v in value.items()} if isinstance(value, dict) else value[index : index + 1]


def read(transform: object, batch: dict) -> dict:
    """What a loader collates: each sample is changed where it is read."""
    made = Augmentation({"x": transform})
    return concatenate([made.at_reading(row(batch, index)) for index in range(len(batch["index"]))])


@pytest.mark.parametrize("make", [lambda: lambda sample: {**sample, "input": sample["input"] // 2}])
@pytest.mark.parametrize(
    "target", [torch.zeros(4, 5, 4), [{"boxes": torch.zeros(1, 4)}] * 4, {"boxes": torch.zeros(4, 2, 4)}]
)
def test_what_only_changes_pixels_takes_any_target(make, target):
    made = read(make(), {**four(), "target": target})
    assert repr(made["target"]) == repr(target) and not torch.equal(made["input"], four()["input"])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool, torch.float32])
def test_albumentations_moves_masks_of_any_type(dtype):
    batch = {**four(), "target": (four()["input"][:, 0] > 99).to(dtype)}
    made = read(albumentations_flip(), batch)
    assert torch.equal(made["input"], batch["input"].flip(-1)) and torch.equal(made["target"], batch["target"].flip(-1))


def test_a_bug_of_ones_own_shows_its_place():
    def wrong(sample: dict) -> dict:
        return {"input": sample["inptu"]}

    with pytest.raises(KeyError, match="inptu") as error:
        read(wrong, four())
    assert error.value.__notes__ == ["in augment.x, sample 0"] and error.traceback[-1].name == "wrong"


def test_a_sample_that_is_read_again_has_not_been_changed():
    def counts(sample: dict) -> dict:
        sample["target"]["count"] += 1
        sample["input"] += 1
        return {**sample, "input": sample["input"] + random.randrange(1)}

    batch = {**four(), "target": {"count": torch.zeros(4)}}
    made = read(counts, batch)
    assert made["target"]["count"].tolist() == [1.0] * 4 and torch.equal(made["input"], four()["input"] + 1)
    assert not batch["target"]["count"].any()


def test_uncovered_pixels_are_filled():
    batch = {
        "input": torch.full((40, 3, 20, 20), 200, dtype=torch.uint8),
        "target": torch.ones(40, 20, 20),
        "index": torch.arange(40),
    }
    made = read(Rotate(degrees=45, interpolation="nearest", fill=7, mask_fill=-1), batch)
    assert {*made["target"].unique().tolist()} == {-1.0, 1.0}
    assert {*made["input"].unique().tolist()} == {7, 200}


def test_what_is_known_without_torch_is_the_class():
    assert isinstance(Augmentation({"x": v2.RandomHorizontalFlip()}).transforms["x"], SampleTransform)
    with pytest.raises(ValueError, match="the lower number must come first"):
        RandomResizedCrop(image_size=9, scale=(1.0, 0.5))


def test_what_cannot_be_seeded_is_noted():
    def unseeded(sample: dict) -> dict:
        return {**sample, "input": sample["input"] + os.urandom(1)[0]}

    made = {"a": v2.RandomHorizontalFlip(), "b": unseeded}
    module = DataModule(InMemory(), batch_size=12, eval_batch_size=8, operations=made)
    module.trainer = stand_in_trainer()
    (note,) = [each for each in wrap_loader(module.train_dataloader(), Division(seed=0)).notes if "seed" in each]
    assert "returns different samples for the same seed" in note
