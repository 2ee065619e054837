"""Images of any shape become squares: as torchvision makes them, in files, in tensors on the device, and with their masks."""

import io

import numpy as np
import pytest
import timm
import torch
from PIL import Image, ImageDraw
from shipped_data import divided, stand_in_trainer
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

from lockstep import Arrays, launch
from lockstep.config.checks import resolve
from lockstep.config.compose import compose_config
from lockstep.config.draft import Draft, values_of
from lockstep.config.instantiate import create_data
from lockstep.config.settings import Settings
from lockstep.errors import UserError
from lockstep.extras import exported
from lockstep.extras.adapters import TorchDataset
from lockstep.extras.export_parts import in_frame
from lockstep.kit import Folder, pixels
from lockstep.kit.augment import Flip, RandomResizedCrop
from lockstep.kit.datamodule import DataModule
from lockstep.kit.images import FRAMING, Images
from lockstep.kit.pixels import Frame, Preprocess, to_array
from lockstep.launch.resuming import restore_auto_values, with_new_defaults
from lockstep.launch.start import prepare_data

SIDE = 24
RESIZE = ("crop", "pad", "squash")
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
        left, top = (SIDE - small.width) // 2, (SIDE - small.height) // 2
        square = v2.functional.pad(small, [left, top, SIDE - small.width - left, SIDE - small.height - top])
    return np.asarray(square).astype(int)


@pytest.mark.parametrize("resize", RESIZE)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_squares_are_torchvisions(shape, resize):
    image = smooth(*shape)
    found = np.asarray(Frame(SIDE, resize).image(image)).astype(int)
    assert np.abs(found - reference(image, resize)).max() <= 1


@pytest.mark.parametrize("resize", RESIZE)
@pytest.mark.parametrize("kind", KINDS)
def test_files_of_every_kind_are_framed_alike(kind, resize):
    mode, name = KINDS[kind]
    file = io.BytesIO()
    smooth(60, 40).convert(mode).save(file, name)
    expected = reference(Image.open(file).convert("RGB"), resize)
    found = to_array(Image.open(file), channels=3, frame=Frame(SIDE, resize)).transpose(1, 2, 0)
    assert np.abs(found - expected).max() <= 1


@pytest.mark.parametrize("resize", ["crop", "pad"])
@pytest.mark.parametrize("shape", [(90, 60), (60, 90)])
def test_a_circle_stays_one(shape, resize):
    """Which is what a network has learned that was trained on squares."""
    image = Image.new("L", shape)
    x, y = (side / 2 for side in shape)
    ImageDraw.Draw(image).ellipse((x - 20, y - 20, x + 20, y + 20), 255)
    inside = to_array(image, channels=1, frame=Frame(SIDE, resize))[0] > 127
    assert inside.any(0).sum() == inside.any(1).sum() > 8
    squashed = to_array(image, channels=1, frame=Frame(SIDE))[0] > 127
    assert squashed.any(0).sum() != squashed.any(1).sum()


@pytest.mark.parametrize("resize", RESIZE)
@pytest.mark.parametrize("shape", [(60, 40), (41, 59), (24, 90), (64, 64)])
def test_tensors_on_the_device_become_what_files_become(shape, resize):
    pixels = np.asarray(smooth(*shape)).transpose(2, 0, 1)
    made = Preprocess(Frame(SIDE, resize), mean=[0.0] * 3, std=[1.0] * 3)
    found = made(torch.from_numpy(pixels.copy())[None])[0].mul(255)
    expected = to_array(Image.fromarray(pixels.transpose(1, 2, 0)), channels=3, frame=Frame(SIDE, resize))
    assert (found - torch.from_numpy(expected.astype(np.float32))).abs().max() <= 1


@pytest.mark.parametrize("frame", [
    Frame(SIDE, "crop", 0.875, "bicubic"),
    *(pytest.param(frame, marks=pytest.mark.slow) for frame in (
        Frame(SIDE, "crop"), Frame(SIDE, "crop", 1.15), Frame(SIDE, "pad", 1.0, "bicubic"), Frame(SIDE, "pad", 0.9), Frame(SIDE, "squash", 0.9),
    )),
])  # fmt: skip
def test_exported_graphs_have_the_same_frame_for_images_of_every_size(frame):
    dynamic, example = torch.export.Dim.DYNAMIC, torch.zeros(2, 3, SIDE + 3, SIDE + 4)

    class Framed(torch.nn.Module):
        def forward(self, x):
            return in_frame(x, frame)

    graph = torch.export.export(
        Framed(), (example,), dynamic_shapes={"x": {0: dynamic, 2: dynamic, 3: dynamic}}
    ).module()
    made = Preprocess(frame, mean=[0.0] * 3, std=[1 / 255] * 3)
    for width, height in SHAPES:
        if 1 in frame.fitted(height, width)[0]:  # a line: the graph ends with an error
            continue
        image = torch.from_numpy(np.array(smooth(width, height)).transpose(2, 0, 1)).expand(3, -1, -1, -1)
        assert (graph(image.float()) - made(image)).abs().max() < 1e-2, (width, height)


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
    told = rf"images of 48 x 24 pixels are cropped or padded \(data.resize={resize}, data.crop_pct=1\), but `{name}` would not move with"
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
    metadata = trained.metadata
    assert (Images.for_files(metadata).read(tmp_path / "a.png")["input"] == expected).all()
    numbers = {key: metadata[key] for key in ("image_size", "channels", "mean", "std", "resize")}
    assert (exported.Images(pixels, **numbers).read(tmp_path / "a.png")["input"] == expected).all()


@pytest.mark.parametrize("resize", RESIZE)
@pytest.mark.parametrize("shape", [(96, 48), (48, 96), (48, 48)])
def test_predicted_masks_lie_on_what_the_file_shows(shape, resize):
    """Where the network saw it; elsewhere they are 255."""
    width, height = shape
    whole = np.zeros((height, width), np.uint8)
    whole[height // 4 : height // 2, width // 3 : width // 2] = 1
    square = to_array(Image.fromarray(whole * 255), channels=1, frame=Frame(SIDE, resize))[0]
    found = np.asarray(Frame(SIDE, resize).mask((square > 127).astype(int), shape))
    assert found.shape == (height, width)
    seen = found != 255
    assert seen.mean() == (SIDE * SIDE * 4 / (width * height) if resize == "crop" else 1)
    assert (found[seen] == whole[seen]).mean() > 0.97 and found[seen].any()


def test_checkpoints_of_older_versions_are_of_squashed_images(tmp_path):
    smooth(60, 40).save(tmp_path / "a.png")
    metadata = {key: value for key, value in Images(image_size=SIDE).metadata.items() if key not in FRAMING}
    expected = Images(image_size=SIDE, resize="squash").read(tmp_path / "a.png")["input"]
    assert (Images.for_files(metadata).read(tmp_path / "a.png")["input"] == expected).all()


@pytest.mark.parametrize("name", ["folder", "mnist"])
def test_runs_of_older_versions_go_on_with_squashed_images(name):
    saved = Draft(compose_config("train", [f"data={name}"]))
    for key in FRAMING:
        saved = saved.replace({}, without=[f"data.{key}"])
    data = values_of(with_new_defaults(saved)).data
    assert not {*FRAMING} & data.kwargs.keys() and Images(image_size=SIDE).frame == Frame(
        SIDE, "squash", 1.0, "bilinear"
    )


def test_an_evaluation_on_other_files_frames_them_as_its_run():
    """`data=folder data.root=<other>` of eval.py and predict.py brings the defaults, which are of no network."""
    composed = Draft(compose_config("train", ["data=folder", "model=timm", "model.name=test_vit"]))
    own = {"resize": "squash", "crop_pct": 0.9, "interpolation": "bicubic", "mean": [0.5] * 3}
    saved = composed.replace({f"data.{key}": value for key, value in own.items()})
    found = restore_auto_values(composed, saved)
    assert {key: found.get(f"data.{key}") for key in own} == own and {*own} == {*FRAMING, "mean"}


class Scenes(Dataset):
    """As torchvision's data sets with masks or boxes: a PIL image, and what belongs to it."""

    def __init__(self, target, shape=(48, 24)) -> None:
        self.target, self.shape, self.pixels = target, shape, np.zeros(3)  # a name that is its own

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict:
        return {"input": smooth(*self.shape), "target": index % 2, "mask": self.target}


def scenes(target, shape=(48, 24), **options) -> TorchDataset:
    held = Scenes(target, shape)
    return TorchDataset(train=held, test=held, image_size=SIDE, **options)


@pytest.mark.parametrize("target", [torch.zeros(SIDE, SIDE).long(), torch.ones(2, 4)])
def test_masks_and_boxes_of_pil_images_are_refused_where_they_would_not_move(target):
    with pytest.raises(UserError, match=r"images of 48 x 24 pixels are cropped .* but `mask` would not move with them"):
        scenes(target, resize="crop").train[0]
    with pytest.raises(UserError, match=r"48 x 48 pixels .*crop_pct=0\.8\), but `mask`"):
        scenes(target, (48, 48), resize="crop", crop_pct=0.8).train[0]
    for resize, shape in (("squash", (48, 24)), ("crop", (48, 48))):
        assert torch.equal(scenes(target, shape, resize=resize).train[0]["mask"], target)


PLACE = (12, 6, 30, 18)  # left, top, right, bottom in an image of 48 x 24


def on_scene(kind: str):
    left, top, right, bottom = PLACE
    mask = np.zeros((24, 48), np.uint8)
    mask[top:bottom, left:right] = 1
    if kind == "boxes":
        return tv_tensors.BoundingBoxes(torch.tensor([PLACE]).float(), format="XYXY", canvas_size=(24, 48))
    return {
        "array": mask,
        "mask": tv_tensors.Mask(torch.from_numpy(mask)),
        "pillow": Image.fromarray(mask),
        "dict": {"mask": torch.from_numpy(mask)},
    }[kind]


@pytest.mark.parametrize(("resize", "crop_pct"), [("crop", 1.0), ("crop", 0.8), ("squash", 1.0), ("pad", 1.0)])
@pytest.mark.parametrize("kind", ["boxes", "array", "mask", "pillow", "dict"])
def test_masks_and_boxes_of_pil_images_move_with_them(kind, resize, crop_pct):
    """To the places of the same pixels."""
    made = scenes(on_scene(kind), resize=resize, crop_pct=crop_pct)
    if resize == "pad" and kind != "boxes":
        with pytest.raises(UserError, match="`mask` would not move with them"):
            made.train[0]
        return
    found = made.train[0]["mask"]
    (height, width), (top, left) = made.frame.fitted(24, 48)
    x, y = width / 48, height / 24
    expected = [edge * by - start for edge, by, start in zip(PLACE, (x, y, x, y), (left, top, left, top), strict=True)]
    if kind == "boxes":
        assert found.tolist() == [pytest.approx([min(SIDE, max(0, edge)) for edge in expected], abs=1e-4)]
        assert found.canvas_size == (SIDE, SIDE)
        return
    rows, columns = np.nonzero(np.asarray(found["mask"] if kind == "dict" else found))
    seen = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
    assert np.abs(np.clip(expected, 0, SIDE) - seen).max() <= 0.5


@pytest.mark.parametrize(("resize", "crop_pct"), [("crop", 1.0), ("crop", 0.8), ("squash", 1.0), ("pad", 1.0)])
@pytest.mark.parametrize("nested", [False, True])
def test_boxes_of_images_in_memory_move_with_them(resize, crop_pct, nested):
    """As those of PIL images."""
    expected = scenes(on_scene("boxes"), resize=resize, crop_pct=crop_pct).train[0]["mask"]
    made = Images(image_size=SIDE, resize=resize, crop_pct=crop_pct)
    targets = [{"boxes": on_scene("boxes"), "labels": torch.ones(1)}] * 2 if nested else [on_scene("boxes")] * 2
    found = made.preprocess({"input": torch.zeros(2, 3, 24, 48, dtype=torch.uint8), "target": targets})["target"][0]
    assert torch.equal(found["boxes"] if nested else found, expected)


def test_pad_and_squash_keep_the_edges_though_the_network_crops():
    """`data.crop_pct=model` is what belongs to the network's own way."""
    for resize, crop_pct in (("model", 0.95), ("crop", 0.95), ("pad", 1.0), ("squash", 1.0)):
        cfg = resolve(["data=folder", "model=timm", "model.name=test_vit", f"data.resize={resize}", "data.root=x"])
        assert Settings.of(cfg).with_pretraining_values().cfg.data.get("crop_pct") == crop_pct


def test_what_lies_on_an_image_moves_with_its_random_crop():
    """Boxes and masks of a torch Dataset, from the whole image: the mask marks the pixels that are bright."""
    left, top, right, bottom = PLACE
    image = np.zeros((24, 48), np.uint8)
    image[top:bottom, left:right] = 255

    class Marked(Scenes):
        def __getitem__(self, index: int) -> dict:
            return {"input": Image.fromarray(image), "target": 0, "mask": on_scene("mask"), "boxes": on_scene("boxes")}

    held = Marked(None)
    data = TorchDataset(train=held, test=held, image_size=SIDE, channels=1, resize="crop")
    crop, flip = RandomResizedCrop(image_size=SIDE, scale=(0.3, 0.9)), Flip()
    operations = {"crop": crop, "flip": flip}
    made = DataModule(data, batch_size=6, eval_batch_size=4, operations=operations, val_fraction=0.25)
    made.trainer = stand_in_trainer()
    assert made.to_crop is not None
    found, _ = next(divided(made.train_dataloader()))
    assert found["input"].shape == (6, 1, SIDE, SIDE) and found["mask"].shape == (6, SIDE, SIDE)
    for image_CHW, mask, boxes in zip(found["input"], found["mask"], found["boxes"], strict=True):
        bright = (image_CHW[0] > 127).int() - mask.int()
        assert bright.abs().float().mean() < 0.1  # the edge alone: bilinear and nearest
        rows, columns = np.nonzero(mask.numpy())
        if len(rows):
            assert (
                np.abs(
                    np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]) - boxes.numpy()[0]
                ).max()
                <= 1
            )


# --- as the network was pretrained ---


@pytest.mark.parametrize(
    "name",
    [
        "test_resnet",
        "test_vit",
        "mobilenetv3_large_100",
        "dm_nfnet_f0",
        "convnext_tiny.in12k_ft_in1k_384",
        "mixer_b16_224",
        "volo_d4_448",  # crop_pct is 1.15
    ],
)
def test_evaluation_has_timms_pixels(name, tmp_path):
    """In files of every kind and of several shapes, one of them a JPEG that could scale itself."""
    timm_config = timm.data.resolve_data_config(pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
    theirs = timm.data.create_transform(**{**timm_config, "input_size": (3, 48, 48)}, normalize=False)
    cfg = resolve(["data=folder", "model=timm", f"model.name={name}", "data.image_size=48", f"data.root={tmp_path}"])
    node = Settings.of(cfg).with_pretraining_values().cfg.data.node
    ours = Images(**{key: node[key] for key in ("image_size", "mean", "std", *FRAMING)})
    assert (node["mean"], node["std"]) == (list(timm_config["mean"]), list(timm_config["std"]))
    for kind, (mode, form) in KINDS.items():
        for shape in ((60, 40), (41, 59), (48, 48), (900, 700) if form == "JPEG" else (30, 50)):
            path = tmp_path / "image"
            smooth(*shape).convert(mode).save(path, form)
            with Image.open(path) as image:
                expected = np.asarray(theirs(white(image)))
            found = ours.read(path)["input"]
            assert np.array_equal(found, expected), (kind, shape)


def white(image: Image.Image) -> Image.Image:
    """In colour, on white where it is transparent: timm's readers have black there."""
    if image.has_transparency_data:
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def test_what_a_command_prepares_is_what_its_processes_read(tmp_path, monkeypatch):
    """Though the values of the network are settled only where torch is imported."""
    for index, name in enumerate(["cat", "dog"] * 20):
        (tmp_path / "photos" / name).mkdir(parents=True, exist_ok=True)
        smooth(60, 40).save(tmp_path / "photos" / name / f"{index}.png")
    where = [f"data.root={tmp_path / 'photos'}", f"data.cache_dir={tmp_path / 'cache'}"]
    network = ["model=timm", "model.name=test_vit"]
    settings = Settings.of(resolve(["data=folder", *network, "data.image_size=32", "loader.batch_size=8", *where]))
    prepare_data(launch.job("train"), settings)
    monkeypatch.setattr("lockstep.kit.folder.read_all", None)
    data = create_data(settings.with_pretraining_values().cfg.data, settings.cfg.loader)
    data.prepare()
    assert data.frame == Frame(32, "crop", 0.95, "bicubic") and isinstance(data.train, Arrays)


def test_evaluation_may_have_a_different_size(tmp_path):
    """Of files, where they are decoded; of arrays, on the device; in predictions and exported folders as well."""
    root = tmp_path / "photos"
    for index, name in enumerate(["cat", "dog"] * 20):
        (root / name).mkdir(parents=True, exist_ok=True)
        smooth(60, 40 + index).save(root / name / f"{index}.png")
    options = {"image_size": SIDE, "eval_size": 32, "resize": "crop", "crop_pct": 0.8}
    for more in ({}, {"decode": "workers"}, {"folds": 4}):
        data = Folder(root=str(root), cache_dir=str(tmp_path / "cache"), **options, **more)
        made = DataModule(data, batch_size=8, eval_batch_size=8, folds=more.get("folds"), fold=0)
        made.trainer = stand_in_trainer()
        assert made.raw("train", [0, 1])["input"].shape[-1] == SIDE
        assert made.val_dataloader()[0].dataset[0]["input"].shape[-2:] == (32, 32)
        batch, path = made.test_dataloader()[0].dataset[0], data.listing.base / data.paths("test")[0]
        whole = Frame(32, "crop", 0.8).image(Image.open(path).convert("RGB"))
        assert np.array_equal(batch["input"][0], np.asarray(whole).transpose(2, 0, 1))
        assert np.array_equal(data.read(path)["input"], batch["input"][0])
        assert data.metadata["image_size"] == 32 and data.model_kwargs()["image_size"] == SIDE
    arrays = Images(**{**options, "crop_pct": 1.0}, mean=[0.5] * 3, std=[0.5] * 3)
    arrays.train = arrays.test = Arrays(input=np.zeros((8, 3, 20, 20), np.uint8), target=np.arange(8) % 2)
    made = DataModule(arrays, batch_size=4, eval_batch_size=4)
    batches = (
        made.augmented(made.raw("train", [0, 1]), range(2), 0, 0),
        made.evaluated.preprocess(made.raw("train", [0, 1])),
    )
    assert [batch["input"].shape[-1] for batch in batches] == [SIDE, 32] and made.evaluated.train is arrays.train


def test_the_middle_is_kept():
    assert Frame(24, "crop").fitted(40, 60) == ((24, 36), (0, 6))
    assert Frame(24, "pad").fitted(40, 60) == ((16, 24), (-4, 0))
    assert Frame(24, "squash").fitted(40, 60) == ((24, 24), (0, 0))


def test_images_of_floats_are_refused():
    """Which a network would see divided by 255."""

    class Photos(Images):
        mean, std, classes = (0.5,), (0.5,), ("a", "b")

        def __init__(self, dtype):
            super().__init__(image_size=8)
            self.train = self.test = Arrays(input=np.zeros((4, 1, 8, 8), dtype), target=np.zeros(4, np.int64))

    assert Photos(np.uint8).metadata["image_size"] == 8
    with pytest.raises(UserError, match="Photos: images are uint8, from 0 to 255, but `input` is float32"):
        _ = Photos(np.float32).metadata
