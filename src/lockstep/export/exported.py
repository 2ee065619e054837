"""Loads this folder: a trained network, its classes and its preprocessing. Needs torch, and timm for timm's networks.

from load import load
model = load(".")                          # the folder of this file, or another one
model.classify(image_BCHW)                 # uint8 images of any size, 0 to 255: [("seven", 0.98), ...]

python load.py <image> ...
"""

# B batch · C channel · H W pixel · K class

import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn


@dataclass(frozen=True)
class Model:
    """A network for evaluation, with its classes and preprocessing."""

    net: nn.Module
    preprocess: Any  # uint8 images_BCHW of any size to the input of `net`
    classes: list[str]
    channels: int

    @torch.inference_mode()
    def probabilities(self, image_BCHW: Tensor) -> Tensor:
        """probability_BK of uint8 images."""
        probability_BK: Tensor = self.net(self.preprocess(image_BCHW)).softmax(1)
        return probability_BK

    def classify(self, image_BCHW: Tensor) -> list[tuple[str, float]]:
        """The most probable class of each image and its probability."""
        values, places = self.probabilities(image_BCHW).max(1)
        return [(self.classes[place], value) for place, value in zip(places.tolist(), values.tolist(), strict=True)]


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"exported_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def load(folder: str | Path = Path(__file__).parent) -> Model:
    """The model of an exported folder, on the CPU."""
    folder = Path(folder)
    about = json.loads((folder / "model.json").read_text())
    if about["timm"]:
        import timm

        net = timm.create_model(about["timm"], **about["arguments"])
    else:
        net = getattr(module(folder / "network.py"), about["class"])(**about["arguments"])
    net.load_state_dict(load_file(folder / "model.safetensors"))
    images = json.loads((folder / "preprocessing.json").read_text())
    channels = images.pop("channels")
    classes = json.loads((folder / "classes.json").read_text())
    return Model(net.eval(), module(folder / "preprocess.py").Preprocess(**images), classes, channels)


def image(path: str, channels: int) -> Tensor:
    """uint8 image_1CHW of a file, in grey for networks of one channel."""
    from torchvision.io import ImageReadMode, read_image

    image_CHW: Tensor = read_image(path, ImageReadMode.GRAY if channels == 1 else ImageReadMode.RGB)
    return image_CHW[None]


if __name__ == "__main__":
    model = load()
    for path in sys.argv[1:]:
        ((name, probability),) = model.classify(image(path, model.channels))
        print(f"{path}: {name} ({probability:.1%})")
