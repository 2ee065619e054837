"""Augmentation of training batches on their device, exact for every world. Classes that configs name are free of torch."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.augment.draws import Draws as Draws
    from lockstep.augment.erasing import RandomErasing as RandomErasing
    from lockstep.augment.geometry import Flip as Flip
    from lockstep.augment.geometry import RandomResizedCrop as RandomResizedCrop
    from lockstep.augment.geometry import Rotate as Rotate
    from lockstep.augment.geometry import Shift as Shift
    from lockstep.augment.jitter import ColorJitter as ColorJitter
    from lockstep.augment.mixing import Cutmix as Cutmix
    from lockstep.augment.mixing import Mixup as Mixup
    from lockstep.augment.mixing import MixupOrCutmix as MixupOrCutmix
    from lockstep.augment.operation import GeometricOperation as GeometricOperation
    from lockstep.augment.operation import Operation as Operation
    from lockstep.augment.operation import PixelOperation as PixelOperation
    from lockstep.augment.policies import RandAugment as RandAugment
    from lockstep.augment.policies import TrivialAugment as TrivialAugment

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


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(f"{__name__}.{MODULES[name]}"), name)
