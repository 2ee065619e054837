"""Augmentation of training batches on their device, exact for any world size. Imports torch with the first batch."""

from lockstep.kit.augment.operation import Draws, GeometricOperation, Operation, PixelOperation
from lockstep.kit.augment.samples import Augmentation, RandomResizedCrop, Rotate, SampleTransform
from lockstep.kit.augment.transforms import Cutmix, Flip, Mixup, MixupOrCutmix, RandomErasing, Shift

__all__ = [
    "Augmentation", "Cutmix", "Draws", "Flip", "GeometricOperation", "Mixup", "MixupOrCutmix", "Operation", "PixelOperation", "RandomErasing",
    "RandomResizedCrop", "Rotate", "SampleTransform", "Shift",
]  # fmt: skip
