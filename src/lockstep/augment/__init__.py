"""Augmentation of training batches on their device, exact for every world. Classes that configs name are free of torch."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.augment.draws import Draws
    from lockstep.augment.erasing import RandomErasing
    from lockstep.augment.geometry import Flip, RandomResizedCrop, Rotate, Shift
    from lockstep.augment.jitter import ColorJitter
    from lockstep.augment.mixing import Cutmix, Mixup, MixupOrCutmix
    from lockstep.augment.operation import GeometricOperation, Operation, PixelOperation
    from lockstep.augment.policies import RandAugment, TrivialAugment

# The module of each name, imported when the name is first used.
MODULES = {
    "ColorJitter": "jitter",
    "Cutmix": "mixing",
    "Draws": "draws",
    "Flip": "geometry",
    "GeometricOperation": "operation",
    "Mixup": "mixing",
    "MixupOrCutmix": "mixing",
    "Operation": "operation",
    "PixelOperation": "operation",
    "RandAugment": "policies",
    "RandomErasing": "erasing",
    "RandomResizedCrop": "geometry",
    "Rotate": "geometry",
    "Shift": "geometry",
    "TrivialAugment": "policies",
}

__all__ = [
    "ColorJitter",
    "Cutmix",
    "Draws",
    "Flip",
    "GeometricOperation",
    "Mixup",
    "MixupOrCutmix",
    "Operation",
    "PixelOperation",
    "RandAugment",
    "RandomErasing",
    "RandomResizedCrop",
    "Rotate",
    "Shift",
    "TrivialAugment",
]


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(f"{__name__}.{MODULES[name]}"), name)
