"""Images of any shape become squares: as torchvision makes them, in files, in tensors on the device, and with their masks."""

import io

import numpy as np
import pytest
import torch
from omegaconf import open_dict
from PIL import Image, ImageDraw
from torch.utils.data import Dataset
from torchvision.transforms import v2

from lockstep.config.compose import compose_config
from lockstep.config.settings import Settings
from lockstep.data import pixels
from lockstep.data.images import Images
from lockstep.data.pixels import RESIZE, Preprocess, fitted, framed, mask_image, to_array
from lockstep.errors import UserError
from lockstep.extras import exported
from lockstep.extras.adapters import TorchDataset
from lockstep.launch.resuming import completed
from lockstep.machine.world import World

SIDE = 24
SHAPES = [(60, 40), (40, 60), (41, 59), (64, 64), (13, 57), (24, 24), (24, 90), (300, 20), (10, 9)]  # width, height
KINDS = {
    "JPEG": ("RGB", "JPEG"), "PNG": ("RGB", "PNG"), "WebP": ("RGB", "WEBP"), "BMP": ("RGB", "BMP"), "TIFF": ("RGB", "TIFF"), "GIF": ("P", "GIF"),
    "PPM": ("RGB", "PPM"), "grey PNG": ("L", "PNG"), "transparent PNG": ("RGBA", "PNG"), "palette PNG": ("P", "PNG"), "CMYK JPEG": ("CMYK", "JPEG"),
}  # fmt: skip


def smooth(width: int, height: int) -> Image.Image:
    coarse = np.random.default_rng(width).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def reference(image: Image.Image, resize: str) -> np.ndarray:
    if resize == "squash":
        square = v2.functional.resize(image, [SIDE, SIDE])
    elif resize == "crop":
        square = v2.functional.center_crop(v2.functional.resize(image, [SIDE]), [SIDE, SIDE])
    else:
        small = v2.functional.resize(image, None, max_size=SIDE)
        left, top = round((SIDE - small.width) / 2), round((SIDE - small.height) / 2)
        square = v2.functional.pad(small, [left, top, SIDE - small.width - left, SIDE - small.height - top])
    return np.asarray(square).astype(int)


@pytest.mark.parametrize("resize", RESIZE)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_squares_are_torchvisions(shape, resize):
    image = smooth(*shape)
    found = np.asarray(framed(image, SIDE, resize)).astype(int)
    assert np.abs(found - reference(image, resize)).max() <= 1


@pytest.mark.parametrize("resize", RESIZE)
@pytest.mark.parametrize("kind", KINDS)
def test_files_of_every_kind_are_framed_alike(kind, resize):
    mode, name = KINDS[kind]
    file = io.BytesIO()
    smooth(60, 40).convert(mode).save(file, name)
    expected = reference(Image.open(file).convert("RGB"), resize)
    found = to_array(Image.open(file), channels=3, size=SIDE, resize=resize).transpose(1, 2, 0)
    assert np.abs(found - expected).max() <= 1


@pytest.mark.parametrize("resize", ["crop", "pad"])
@pytest.mark.parametrize("shape", [(90, 60), (60, 90)])
def test_a_circle_stays_one(shape, resize):
    """Which is what a network has learned that was trained on squares."""
    image = Image.new("L", shape)
    x, y = (side / 2 for side in shape)
    ImageDraw.Draw(image).ellipse((x - 20, y - 20, x + 20, y + 20), 255)
    inside = to_array(image, channels=1, size=SIDE, resize=resize)[0] > 127
    assert inside.any(0).sum() == inside.any(1).sum() > 8
    squashed = to_array(image, channels=1, size=SIDE, resize="squash")[0] > 127
    assert squashed.any(0).sum() != squashed.any(1).sum()


def test_a_strip_of_any_length_takes_no_memory():
    assert framed(Image.new("L", (60_000, 1), 7), 512, "crop").getextrema() == (7, 7)


@pytest.mark.parametrize("resize", RESIZE)
@pytest.mark.parametrize("shape", [(60, 40), (41, 59), (24, 90), (64, 64)])
def test_tensors_on_the_device_become_what_files_become(shape, resize):
    pixels = np.asarray(smooth(*shape)).transpose(2, 0, 1)
    made = Preprocess(image_size=SIDE, mean=[0.0] * 3, std=[1.0] * 3, resize=resize)
    found = made(torch.from_numpy(pixels.copy())[None])[0].mul(255)
    expected = to_array(Image.fromarray(pixels.transpose(1, 2, 0)), channels=3, size=SIDE, resize=resize)
    assert (found - torch.from_numpy(expected.astype(np.float32))).abs().max() <= 1


def batch(width: int, height: int, **more) -> dict:
    image = torch.zeros(2, 1, height, width, dtype=torch.uint8)
    image[:, :, 8:20, 16:30] = 255
    return {"input": image, "mask": (image[:, 0] > 0).long(), "target": torch.zeros(2, dtype=torch.long), **more}


def data(resize: str) -> Images:
    return Images(image_size=SIDE, channels=1, mean=[0.0], std=[1.0], resize=resize)


@pytest.mark.parametrize("resize", ["crop", "squash"])
def test_masks_are_cropped_with_their_images(resize):
    made = data(resize).preprocess(batch(48, 24))
    assert made["mask"].shape == (2, SIDE, SIDE) and 0 < made["mask"].sum() < made["mask"].numel()
    assert torch.equal(made["mask"], (made["input"][:, 0] > 0.5).long())


@pytest.mark.parametrize(("resize", "more", "name"), [
    ("pad", {}, "mask"), ("crop", {"boxes": [{"boxes": torch.ones(1, 4)}] * 2}, "boxes"), ("pad", {"mask": None, "points": torch.ones(2, 3, 2)}, "points"),
])  # fmt: skip
def test_what_would_stay_in_its_place_is_refused(resize, more, name):
    given = {key: value for key, value in batch(48, 24, **more).items() if value is not None}
    told = rf"data.resize={resize} changes the shape of images of 48 x 24 pixels, and `{name}` would not move with them"
    with pytest.raises(UserError, match=told):
        data(resize).preprocess(given)
    assert data("squash").preprocess(given)["input"].shape == (2, 1, SIDE, SIDE)
    square = batch(48, 48, **{key: value for key, value in more.items() if value is not None})
    assert data(resize).preprocess(square)["input"].shape == (2, 1, SIDE, SIDE)


@pytest.mark.parametrize("resize", RESIZE)
def test_predictions_and_exported_folders_frame_as_training(resize, tmp_path):
    smooth(60, 40).save(tmp_path / "a.png")
    trained = Images(image_size=SIDE, resize=resize)
    expected = trained.read(tmp_path / "a.png")["input"]
    about = trained.about
    assert (Images.for_files(about).read(tmp_path / "a.png")["input"] == expected).all()
    numbers = {key: about[key] for key in ("image_size", "channels", "mean", "std", "resize")}
    assert (exported.Images(pixels, **numbers).read(tmp_path / "a.png")["input"] == expected).all()


@pytest.mark.parametrize("resize", RESIZE)
@pytest.mark.parametrize("shape", [(96, 48), (48, 96), (48, 48)])
def test_predicted_masks_lie_on_what_the_file_shows(shape, resize):
    """Where the network saw it; elsewhere they are 255."""
    width, height = shape
    whole = np.zeros((height, width), np.uint8)
    whole[height // 4 : height // 2, width // 3 : width // 2] = 1
    square = to_array(Image.fromarray(whole * 255), channels=1, size=SIDE, resize=resize)[0]
    found = np.asarray(mask_image((square > 127).astype(int), shape, resize))
    assert found.shape == (height, width)
    seen = found != 255
    assert seen.mean() == (SIDE * SIDE * 4 / (width * height) if resize == "crop" else 1)
    assert (found[seen] == whole[seen]).mean() > 0.97 and found[seen].any()


def test_checkpoints_of_older_versions_are_of_squashed_images(tmp_path):
    smooth(60, 40).save(tmp_path / "a.png")
    about = {key: value for key, value in Images(image_size=SIDE).about.items() if key != "resize"}
    expected = Images(image_size=SIDE, resize="squash").read(tmp_path / "a.png")["input"]
    assert (Images.for_files(about).read(tmp_path / "a.png")["input"] == expected).all()


@pytest.mark.parametrize("name", ["folder", "mnist"])
def test_runs_of_older_versions_go_on_with_squashed_images(name):
    saved = compose_config("train", [f"data={name}"])
    with open_dict(saved):
        assert saved.data.pop("resize") == "crop"
    node = Settings(completed(saved), World("cpu", 1, 1, "single")).plain("data")
    assert "resize" not in node and Images(image_size=SIDE).resize == "squash"


class Scenes(Dataset):
    """As torchvision's data sets with masks or boxes: a PIL image, and what belongs to it."""

    def __init__(self, target, shape=(48, 24)) -> None:
        self.target, self.shape, self.pixels = target, shape, np.zeros(3)  # a name that is its own

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict:
        return {"input": smooth(*self.shape), "target": index % 2, "mask": self.target}


@pytest.mark.parametrize("target", [torch.zeros(SIDE, SIDE).long(), torch.zeros(24, 48).long(), torch.ones(2, 4)])
def test_masks_and_boxes_of_pil_images_are_refused_where_they_would_not_move(target):
    made = TorchDataset(train=Scenes(target), test=Scenes(target), image_size=SIDE, resize="crop")
    with pytest.raises(UserError, match="images of 48 x 24 pixels, and `mask` would not move with them"):
        made.train[np.arange(2)]
    for resize, shape in (("squash", (48, 24)), ("crop", (48, 48))):
        held = Scenes(target, shape)
        assert "mask" in TorchDataset(train=held, test=held, image_size=SIDE, resize=resize).train[np.arange(2)]


def test_the_middle_is_kept():
    assert fitted(40, 60, 24, "crop") == ((24, 36), (0, 6))
    assert fitted(40, 60, 24, "pad") == ((16, 24), (-4, 0))
    assert fitted(40, 60, 24, "squash") == ((24, 24), (0, 0))
