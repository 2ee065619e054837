"""Augmentation of training batches on their device, exact for every world. Classes that configs name are free of torch."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.augment.draws import Draws as Draws
    from lockstep.augment.mixing import Cutmix as Cutmix
    from lockstep.augment.mixing import Mixup as Mixup
    from lockstep.augment.mixing import MixupOrCutmix as MixupOrCutmix
    from lockstep.augment.operation import GeometricOperation as GeometricOperation
    from lockstep.augment.operation import Operation as Operation
    from lockstep.augment.operation import PixelOperation as PixelOperation
    from lockstep.augment.policies import RandAugment as RandAugment
    from lockstep.augment.policies import TrivialAugment as TrivialAugment
    from lockstep.augment.transforms import ColorJitter as ColorJitter
    from lockstep.augment.transforms import Flip as Flip
    from lockstep.augment.transforms import RandomErasing as RandomErasing
    from lockstep.augment.transforms import RandomResizedCrop as RandomResizedCrop
    from lockstep.augment.transforms import Rotate as Rotate
    from lockstep.augment.transforms import Shift as Shift

# The module of each name, imported when the name is first used.
MODULES = {
    "ColorJitter": "transforms",
    "Cutmix": "mixing",
    "Draws": "draws",
    "Flip": "transforms",
    "GeometricOperation": "operation",
    "Mixup": "mixing",
    "MixupOrCutmix": "mixing",
    "Operation": "operation",
    "PixelOperation": "operation",
    "RandAugment": "policies",
    "RandomErasing": "transforms",
    "RandomResizedCrop": "transforms",
    "Rotate": "transforms",
    "Shift": "transforms",
    "TrivialAugment": "policies",
}


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(f"{__name__}.{MODULES[name]}"), name)
