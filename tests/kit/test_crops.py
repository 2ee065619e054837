"""Random crops are taken from whole pictures, where they are read, and not from the squares that evaluations get."""

import albumentations
import numpy as np
import pytest
import torch
from PIL import Image
from shipped_data import stand_in_trainer
from torch.utils.data import Dataset, default_convert
from torchvision.transforms import v2

from lockstep.data.loaders import MicroBatches, Share
from lockstep.data.parts import batch_of
from lockstep.data.standard import Division, StandardLoader
from lockstep.errors import UserError
from lockstep.extras.adapters import TorchDataset
from lockstep.kit import Folder
from lockstep.kit.augment import Flip, RandomResizedCrop, Rotate
from lockstep.kit.datamodule import DataModule

SIDE, LARGE = 16, (400, 300)


def crop(low: float = 0.02) -> RandomResizedCrop:
    return RandomResizedCrop(image_size=SIDE, scale=(low, max(low, 0.03)))


def stripes(vertical: bool, width: int, height: int) -> Image.Image:
    """Of six pixels: squares of 16 pixels are grey."""
    place = np.arange(width)[None, :] if vertical else np.arange(height)[:, None]
    return Image.fromarray(np.broadcast_to((place // 6 % 2 * 255).astype(np.uint8), (height, width)).copy())


@pytest.fixture
def root(tmp_path):
    for name in ("across", "down"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(12):
            shape = LARGE if i % 2 else LARGE[::-1]
            stripes(name == "across", *shape).save(tmp_path / "data" / name / f"{i}.png")
    return tmp_path / "data"


class Pictures(Dataset):
    classes = ("across", "down")

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int):
        return stripes(index % 2 == 0, *LARGE).convert("RGB"), index % 2


def module(data, operations=None, **more) -> DataModule:
    operations = {"crop": crop(), "flip": Flip()} if operations is None else operations
    made = DataModule(data, batch_size=8, eval_batch_size=8, operations=operations, **more)
    made.trainer = stand_in_trainer()
    return made


def read(data: DataModule, positions=range(8)) -> torch.Tensor:
    """Samples of the train part, as they are read."""
    part = data.train_dataloader().dataset
    batch = MicroBatches(part, default_convert)[Share([*positions], 0, 0, 0, 0, None)][0]
    assert batch["index"].tolist() == part.split.indices(np.array(positions)).tolist()
    assert batch["input"].dtype == torch.uint8 and batch["input"].shape[-2:] == (SIDE, SIDE)
    return batch["input"]


def contrast(image_BCHW: torch.Tensor) -> float:
    return float(image_BCHW.float().flatten(1).std(1).min())


@pytest.mark.parametrize("decode", ["auto", "workers", "cache"])
def test_crops_show_what_squares_have_lost(decode, root, tmp_path):
    data = Folder(root=str(root), image_size=SIDE, cache_dir=str(tmp_path / "cache"), decode=decode)
    data.prepare()
    made = module(data)
    assert contrast(made.raw("train", range(8))["input"]) < 20
    found = contrast(read(made))
    assert found < 20 if decode == "cache" else found > 60
    assert contrast(read(module(data, {"flip": Flip(), "turn": Rotate(degrees=1.0)}))) < 20  # without a crop


def test_a_torch_dataset_is_cropped_alike():
    data = TorchDataset(train=Pictures(), test=Pictures(), image_size=SIDE)
    assert contrast(batch_of(data.train, np.arange(8))["input"]) < 20 < 60 < contrast(read(module(data)))


class Masked(Pictures):
    """With a mask of the square that the network gets, and an attribute that only looks like one of Lockstep's."""

    pixels = np.zeros(3)

    def __getitem__(self, index: int):
        return {
            "input": super().__getitem__(index)[0].resize((300, 300)),
            "target": 0,
            "mask": torch.zeros(SIDE, SIDE).long(),
        }


class InMemory(Pictures):
    pixels = torch.zeros(3)

    def __getitem__(self, index: int):
        return torch.zeros(3, 40, 30, dtype=torch.uint8), index % 2


def test_masks_of_the_square_are_refused_and_tensors_are_cropped_as_they_are():
    made, masked = (
        TorchDataset(train=each(), test=each(), image_size=SIDE, classes=["a", "b"]) for each in (InMemory, Masked)
    )
    assert len(read(module(made, {"crop": crop(0.5)}))) == 8
    with pytest.raises(UserError, match=r"it cannot move int64 of shape \(16, 16\)"):
        read(module(masked, {"crop": crop(0.5)}))


@pytest.mark.parametrize(("first", "is_whole"), [
    (crop(), True), (Rotate(degrees=1.0), False), (v2.RandomResizedCrop(SIDE), True), (albumentations.RandomResizedCrop((SIDE, SIDE), p=1), True),
    (albumentations.RandomResizedCrop((SIDE, SIDE), p=0.5), False), (v2.RandomCrop(8), False),
])  # fmt: skip
def test_a_crop_that_is_always_taken_first_gets_whole_images(first, is_whole, root, tmp_path):
    data = Folder(root=str(root), image_size=SIDE, cache_dir=str(tmp_path / "cache"))
    data.prepare()
    made = module(data, {"flip on the device": Flip(), "first": first, "crop": crop()})
    assert (made.to_crop is not None) == is_whole
    read(made)


def test_a_crop_is_a_function_of_its_sample_alone(root, tmp_path):
    data = Folder(root=str(root), image_size=SIDE, cache_dir=str(tmp_path / "cache"))
    data.prepare()
    made = module(data, repeats=2)
    whole = read(made, [3, 3, 5, 5, 0, 0])
    assert torch.equal(whole[:2], read(made, [3, 3])) and not torch.equal(whole[0], whole[1])
    batch, info = next(StandardLoader(made.train_dataloader(), Division(seed=0)).items(0, 0, 1))
    after = made.augmented(batch, info.places, 0, 0)["input"]
    assert contrast(after[:, :1]) > 0.2  # what show_batch shows


def test_one_picture_is_in_memory_at_a_time(root, tmp_path, monkeypatch):
    data, order = Folder(root=str(root), image_size=SIDE, cache_dir=str(tmp_path / "cache")), []
    data.prepare()
    made, change = module(data), RandomResizedCrop.__call__
    files = type(data.files("train"))
    taken = files.__getitems__
    monkeypatch.setattr(files, "__getitems__", lambda self, indices: order.append(len(indices)) or taken(self, indices))
    monkeypatch.setattr(RandomResizedCrop, "__call__", lambda *given: order.append("crop") or change(*given))
    read(made)
    assert order == [1, "crop"] * (len(order) // 2)


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_box_cut_by_pillow_has_the_pixels_of_one_cut_from_the_whole(channels, with_mask):
    pixels = np.random.default_rng(0).integers(0, 256, (60, 90, channels), dtype=np.uint8)
    mask = {"mask": torch.from_numpy(pixels[..., 0])} if with_mask else {}
    inputs, crops = (Image.fromarray(pixels.squeeze()), torch.from_numpy(pixels).permute(2, 0, 1)), []
    for given in inputs:
        torch.manual_seed(0)
        crops.append([RandomResizedCrop(image_size=SIDE)({"input": given, **mask}) for _ in range(6)])
    for found, expected in zip(*crops, strict=True):
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
        assert found["input"].shape == (channels, SIDE, SIDE)
    assert not torch.equal(crops[0][0]["input"], crops[0][1]["input"])


@pytest.mark.parametrize("ratio", [(3 / 4, 4 / 3), (1.0, 1.0), (0.3, 1.2)])
@pytest.mark.parametrize("low", [0.01, 0.08, 0.5, 1.0])
def test_a_jpeg_scaled_by_itself_has_pixels_enough_for_the_smallest_box(low, ratio):
    change = RandomResizedCrop(image_size=SIDE, scale=(low, 1.0), ratio=ratio)
    side, theirs = change.crops_from, v2.RandomResizedCrop(SIDE, scale=(low, low), ratio=ratio)
    image = torch.zeros(3, side, 2 * side)
    drawn = [theirs.make_params([image]) for _ in range(60)]
    assert min(min(each["height"], each["width"]) for each in drawn) >= SIDE - 1


def test_a_large_jpeg_is_decoded_small_where_the_crop_allows_it(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(6):
            Image.new("RGB", (1600, 1200), (i * 40, 90, 10)).save(tmp_path / "data" / name / f"{i}.jpg")
    data = Folder(root=str(tmp_path / "data"), image_size=SIDE, cache_dir=str(tmp_path / "cache"))
    data.prepare()
    sides = {
        low: data.uncropped("train", crop(low).crops_from).__getitems__([0])["input"][0].size for low in (0.5, 0.01)
    }
    assert sides == {0.5: (200, 150), 0.01: (400, 300)}
    assert data.uncropped("train", 0).__getitems__([0])["input"][0].size == (1600, 1200)
