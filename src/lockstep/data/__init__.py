"""Data sets, the sampler (pure arithmetic), the loaders and the datamodule. Classes that configs name are free of torch."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.data.dataset import Arrays as Arrays
    from lockstep.data.dataset import Batch as Batch
    from lockstep.data.dataset import DataSet as DataSet
    from lockstep.data.folder import Folder as Folder
    from lockstep.data.images import Images as Images
    from lockstep.data.published import Cifar10 as Cifar10
    from lockstep.data.published import Mnist as Mnist

# The names of each module, which is imported when one is first used: a run on MNIST needs no other data set.
MODULES = {
    "dataset": ("Arrays", "Batch", "DataSet"),
    "folder": ("Folder",),
    "images": ("Images",),
    "published": ("Cifar10", "Mnist"),
}


def __getattr__(name: str) -> Any:
    for module, names in MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
