"""Random crops are taken from whole pictures, where they are read, and not from the squares that evaluations get."""

import albumentations
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision.transforms import v2

from lockstep.data.datamodule import DataModule
from lockstep.errors import UserError
from lockstep.extras.adapters import TorchDataset
from lockstep.kit import Folder
from lockstep.kit.augment import Augmentation, Draws, Flip, RandomResizedCrop, Rotate

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


def module(data, augment=None, **more) -> DataModule:
    augment = Augmentation({"crop": crop(), "flip": Flip()} if augment is None else augment)
    return DataModule(data, batch_size=8, eval_batch_size=8, augment=augment, **more)


def read(data: DataModule, index_B=range(8), **more) -> torch.Tensor:
    batch = data.reader("train", training=True, **more)(np.array(index_B), 0)
    assert batch["count"] == len(index_B) and batch["index"].tolist() == [*index_B]
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
    assert contrast(data.train[np.arange(8)]["input"]) < 20 < 60 < contrast(read(module(data)))


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


@pytest.mark.parametrize("made", [Masked, InMemory])
def test_masks_of_the_square_and_tensors_are_cropped_as_they_are(made):
    data = TorchDataset(train=made(), test=made(), image_size=SIDE, classes=["a", "b"])
    found = module(data, {"crop": crop(0.5)})
    assert (found.to_crop is None) == (made is Masked) and len(read(found)) == 8


@pytest.mark.parametrize(("first", "is_whole"), [
    (crop(), True), (Rotate(degrees=1.0), False), (v2.RandomResizedCrop(SIDE), True), (albumentations.RandomResizedCrop((SIDE, SIDE), p=1), True),
    (albumentations.RandomResizedCrop((SIDE, SIDE), p=0.5), False), (v2.RandomCrop(8), False),
])  # fmt: skip
def test_a_crop_that_is_always_taken_first_gets_whole_images(first, is_whole, root, tmp_path):
    data = Folder(root=str(root), image_size=SIDE, cache_dir=str(tmp_path / "cache"))
    data.prepare()
    made = module(data, {"flip on the device": Flip(), "first": first, "crop": crop()})
    assert (made.to_crop is not None) == is_whole
    assert made.transforms == ("keyed, own boxes, of whole images" if is_whole else "keyed, own boxes")
    read(made)


def test_a_run_whose_crops_were_of_squares_is_not_resumed(root, tmp_path):
    data = Folder(root=str(root), image_size=SIDE, cache_dir=str(tmp_path / "cache"))
    data.prepare()
    state = module(data).state_dict()
    module(data).load_state_dict(state)
    with pytest.raises(UserError, match="crops were taken from resized squares"):
        module(data).load_state_dict(state | {"transforms": "keyed, own boxes"})
    turned = {"turn": Rotate(degrees=1.0)}
    module(data, turned).load_state_dict(state | {"transforms": "keyed"})


def test_a_crop_is_a_function_of_its_sample_alone(root, tmp_path):
    data = Folder(root=str(root), image_size=SIDE, cache_dir=str(tmp_path / "cache"))
    data.prepare()
    made = module(data, repeats=2)
    index_B = np.array([3, 3, 5, 5, 0, 0])
    whole = read(made, index_B)
    assert torch.equal(whole[2:4], read(made, index_B[2:4])) and not torch.equal(whole[0], whole[1])
    assert torch.equal(whole, torch.cat([read(made, index_B[at : at + 2]) for at in (0, 2, 4)]))
    after = made.preprocessed(made.raw("train", index_B), training=True, repeats=2)["input"]
    assert contrast(after[:, :1]) > 0.2  # what show_batch shows


def test_one_picture_is_in_memory_at_a_time(root, tmp_path, monkeypatch):
    data, order = Folder(root=str(root), image_size=SIDE, cache_dir=str(tmp_path / "cache")), []
    data.prepare()
    made, change = module(data), RandomResizedCrop.change
    files = type(data.files("train"))
    taken = files.__getitem__
    monkeypatch.setattr(files, "__getitem__", lambda self, indices: order.append(len(indices)) or taken(self, indices))
    monkeypatch.setattr(RandomResizedCrop, "change", lambda *given: order.append("crop") or change(*given))
    read(made)
    assert order == [1, "crop"] * 8


def test_boxes_are_distributed_as_torchvisions():
    """Left, top, width and height of the box, read off an image that says where each pixel was."""
    width, height = LARGE
    y, x = np.mgrid[:height, :width]
    image = np.stack([x * 255 / width, y * 255 / height, 0 * x], -1).round().astype(np.uint8)

    class One(Dataset):
        def __len__(self) -> int:
            return 600

        def __getitem__(self, index: int):
            return Image.fromarray(image), index % 2

    def boxes(image_BCHW: torch.Tensor) -> np.ndarray:
        left, right = (image_BCHW[:, 0, :, place].float().mean(1) for place in (0, -1))
        top, bottom = (image_BCHW[:, 1, place].float().mean(1) for place in (0, -1))
        return torch.stack([left, top, right - left, bottom - top], 1).numpy()

    change = RandomResizedCrop(image_size=SIDE)
    data = TorchDataset(train=One(), test=One(), image_size=SIDE, classes=["a", "b"])
    found = boxes(read(module(data, {"crop": change}), range(480)))
    torch.manual_seed(0)
    theirs, whole = v2.RandomResizedCrop(SIDE), torch.from_numpy(image).permute(2, 0, 1)
    expected = boxes(torch.stack([theirs(whole) for _ in range(480)]))
    for ours, reference in zip(
        found.T, expected.T, strict=True
    ):  # Kolmogorov and Smirnov: a chance of 1 in 1,000 for each
        values = np.sort(np.concatenate([ours, reference]))
        shares = [np.searchsorted(np.sort(each), values, side="right") / len(each) for each in (ours, reference)]
        assert np.abs(shares[0] - shares[1]).max() < 1.95 * np.sqrt(2 / 480)


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_box_cut_by_pillow_has_the_pixels_of_one_cut_from_the_whole(channels, with_mask):
    pixels = np.random.default_rng(0).integers(0, 256, (60, 90, channels), dtype=np.uint8)
    image, of_all = Image.fromarray(pixels.squeeze()), {"index": torch.arange(6), "count": 6}
    of_all |= {"mask": torch.from_numpy(pixels[None, ..., 0]).repeat(6, 1, 1)} if with_mask else {}
    whole = torch.from_numpy(pixels).permute(2, 0, 1).expand(6, -1, -1, -1)
    draws = [Draws("augment.crop", np.arange(6), seed=0, epoch=0) for _ in range(2)]
    found, expected = (
        RandomResizedCrop(image_size=SIDE)({"input": given, **of_all}, of)
        for given, of in zip(([image] * 6, whole), draws, strict=True)
    )
    assert found.keys() == expected.keys() and all(
        torch.equal(v, found[n]) for n, v in expected.items() if n != "count"
    )
    assert found["input"].shape == (6, channels, SIDE, SIDE) and not torch.equal(found["input"][0], found["input"][1])


@pytest.mark.parametrize("ratio", [(3 / 4, 4 / 3), (1.0, 1.0), (0.3, 0.6), (2.0, 3.0)])
@pytest.mark.parametrize(("height", "width"), [(10, 400), (400, 10), (7, 12)])
def test_where_no_box_fits_the_middle_is_taken_as_by_torchvision(height, width, ratio):
    change = RandomResizedCrop(image_size=SIDE, scale=(1.0, 1.0), ratio=ratio)
    expected = change.transform.make_params([torch.zeros(3, height, width)])
    never = [[1.0, 0.999 * (height > width)]] * 10 + [[0.5, 0.5]]  # the whole area, at an odd ratio
    assert change.box(height, width, never) == tuple(expected[name] for name in ("top", "left", "height", "width"))


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
    sides = {low: data.uncropped("train", crop(low).crops_from)[np.array([0])]["input"][0].size for low in (0.5, 0.01)}
    assert sides == {0.5: (200, 150), 0.01: (400, 300)}
    assert data.uncropped("train", 0)[np.array([0])]["input"][0].size == (1600, 1200)
