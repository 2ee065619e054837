"""Data sets, the sampler (pure arithmetic), the loaders and the datamodule. Classes that configs name are free of torch."""

import importlib
from typing import TYPE_CHECKING, Any

from lockstep.data.cifar10 import Cifar10
from lockstep.data.dataset import Batch, DataSet
from lockstep.data.images import Images
from lockstep.data.mnist import Mnist
from lockstep.data.samples import Arrays

if TYPE_CHECKING:
    from lockstep.data.folder import Folder
    from lockstep.data.from_torch import TorchDataset
    from lockstep.data.from_torchvision import Torchvision
    from lockstep.data.huggingface import HuggingFace

# Imported when first used: a run on MNIST does not need them.
LAZY = {
    "Folder": "folder",
    "HuggingFace": "huggingface",
    "TorchDataset": "from_torch",
    "Torchvision": "from_torchvision",
}

__all__ = [
    "Arrays",
    "Batch",
    "Cifar10",
    "DataSet",
    "Folder",
    "HuggingFace",
    "Images",
    "Mnist",
    "TorchDataset",
    "Torchvision",
]


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(f"{__name__}.{LAZY[name]}"), name)
