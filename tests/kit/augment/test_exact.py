"""The same augmented samples for every number of processes, micro-batches and workers, after a resume, and in any company."""

from functools import cache

import numpy as np
import pytest
import torch
from shipped_data import stand_in_trainer, training_batches

from lockstep import CONFIGS, Arrays
from lockstep.config.checks import resolve
from lockstep.config.run_config import RunConfig
from lockstep.config.settings import Settings
from lockstep.data.loaders import concatenate
from lockstep.data.sampler import sample_states
from lockstep.kit import Images
from lockstep.kit.augment import Augmentation
from lockstep.kit.datamodule import DataModule

OPTIONS = sorted(path.stem for path in (CONFIGS / "augment").glob("*.yaml") if path.stem != "none")
FORKS = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def operations(*options: str) -> dict:
    """As the config makes them, for images that are resized to 17 pixels."""
    return Settings.of(composed(options)).operations


def augmentation(*options: str) -> Augmentation:
    return Augmentation(operations(*options))


@cache
def composed(options: tuple[str, ...]) -> RunConfig:
    return resolve(["data.image_size=17", f"augment=[{','.join(options)}]"])


def batch_of(index_B: torch.Tensor, channels: int = 3, height: int = 21, width: int = 18) -> dict:
    random = np.random.default_rng(0)
    images = torch.from_numpy(random.integers(0, 256, (64, channels, height, width), dtype=np.uint8))
    return {"input": images[index_B], "target": index_B % 10, "index": index_B + 1000}


def applied(change: Augmentation, batch: dict, *, seed: int, epoch: int) -> dict:
    """With the places of its samples in the epoch as their indices. What a loader does is done here: each sample is seeded."""
    places, samples = batch["index"].numpy(), []
    for number, state in enumerate(
        sample_states("data", places, seed=seed, epoch=epoch).tolist() * bool(change.transforms)
    ):
        torch.manual_seed(state % 2**63)
        samples.append(change.at_reading({name: value[number : number + 1] for name, value in batch.items()}))
    return change.on_device(concatenate(samples) if samples else batch, places, seed=seed, epoch=epoch)


def rows(batch: dict, which: object = slice(None)) -> dict[str, torch.Tensor]:
    """Without the places of partners, which a part of a batch counts from its own beginning."""
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor) and name != "partner"}
    return {name: value[which] for name, value in tensors.items()}


def assert_same(made: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert made.keys() == expected.keys()
    for name, value in made.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("channels", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("option", OPTIONS)
def test_a_sample_depends_on_seed_and_epoch_and_not_on_the_others_of_its_micro_batch(option, channels):
    """Bit for bit: in batches of two to all, in any order of the pairs."""
    change, batch = augmentation(option), batch_of(torch.arange(48), channels)
    before = {name: value.clone() for name, value in rows(batch).items()}
    whole = applied(change, batch, seed=1, epoch=2)
    assert_same(rows(batch), before)
    assert whole["input"].dtype == torch.uint8
    for place in ({"seed": 1, "epoch": 1}, {"seed": 2, "epoch": 2}):
        assert not torch.equal(applied(change, batch, **place)["input"], whole["input"])
    mixed_up = (torch.tensor(np.random.default_rng(1).permutation(24))[:, None] * 2 + torch.arange(2)).flatten()
    parts = [part for size in (2, 6, 24) for part in torch.arange(48).split(size)]
    again = augmentation(option)
    for place_B in (*parts, mixed_up):
        assert_same(rows(applied(again, batch_of(place_B, channels), seed=1, epoch=2)), rows(whole, place_B))


def test_an_operation_that_is_left_out_changes_no_other():
    batch, place = batch_of(torch.arange(48)), {"seed": 0, "epoch": 0}
    both, shifted, flipped = (
        applied(augmentation(*names), batch, **place) for names in (("shift", "flip"), ("shift",), ("flip",))
    )
    assert torch.equal(applied(augmentation("flip"), shifted, **place)["input"], both["input"])
    assert not torch.equal(flipped["input"], both["input"])
    # those that mix come last
    assert list(augmentation("mixup", "flip", "cutmix", "shift").operations) == ["flip", "shift", "mixup", "cutmix"]


# --- the datamodule ---


class Data(Images):
    def __init__(self) -> None:
        super().__init__(image_size=17)
        random = np.random.default_rng(0)
        images = random.integers(0, 256, (130, 3, 21, 18), dtype=np.uint8)
        self.train = self.test = Arrays(input=images, target=np.arange(130))


def steps(
    change: dict, *, rank=0, world=1, accumulate=1, workers=0, repeats=1, done=0, epoch=0
) -> list[dict[str, torch.Tensor]]:
    """The micro-batches of one process in an epoch, from the step `done` on."""
    options = {"num_workers": workers, "repeats": repeats, "operations": change}
    data, division = DataModule(Data(), batch_size=24, eval_batch_size=8, **options), {"rank": rank, "world": world}
    data.trainer = stand_in_trainer()
    division |= {"accumulate": accumulate, "done": done * accumulate}
    return [rows(batch) for batch in training_batches(data, seed=5, epoch=epoch, **division)]


def joined(change: dict, *, world: int, accumulate: int, **options) -> list[dict[str, torch.Tensor]]:
    """The global batches of all processes: within a step micro-batch after micro-batch, within one of these rank by rank."""
    ranks = [steps(change, rank=rank, world=world, accumulate=accumulate, **options) for rank in range(world)]
    parts = [micro for several in zip(*ranks, strict=True) for micro in several]
    each = world * accumulate
    return [
        {name: torch.cat([part[name] for part in parts[first : first + each]]) for name in parts[0]}
        for first in range(0, len(parts), each)
    ]


@FORKS
@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize(
    "option", [pytest.param(option, marks=() if option == "strong" else pytest.mark.slow) for option in OPTIONS]
)
def test_global_batches_are_the_same_for_every_world_and_number_of_workers_and_after_a_resume(option, repeats):
    change, epoch = operations(option), {"repeats": repeats, "epoch": 3}
    worlds = [(2, 2, 2)] if repeats == 3 else [(4, 1, 0), (2, 3, 0), (2, 1, 2)]
    alone = steps(change, **epoch)
    assert len(alone) == 117 // (24 // repeats)
    found = [joined(change, world=w, accumulate=a, workers=workers, **epoch) for w, a, workers in worlds]
    for begin, batches in ((2, steps(change, done=2, **epoch)), *((0, batches) for batches in found)):
        for made, expected in zip(batches, alone[begin:], strict=True):
            assert_same(made, expected)


def test_copies_of_a_sample_are_neighbours_that_look_different():
    change = operations("crop", "flip")
    (first, *_), (alone, *_) = steps(change, repeats=3), steps(change)
    assert len(first["index"]) == 24
    index_B3 = first["index"].view(8, 3)
    assert (index_B3 == index_B3[:, :1]).all() and len(set(index_B3[:, 0].tolist())) == 8
    assert (first["target"].view(8, 3) == index_B3).all()
    images = first["input"].reshape(8, 3, -1)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert (images[:, one] != images[:, other]).any(1).all()
    assert torch.equal(index_B3[:, 0], alone["index"][:8])  # the order is that without copies
    data = DataModule(Data(), batch_size=24, eval_batch_size=8, repeats=2, operations=operations("strong"))
    raw = data.evaluated.preprocess(data.raw("train", np.arange(8)))  # evaluations have no copies
    assert raw["input"].shape == (8, 3, 17, 17) and "share" not in raw
