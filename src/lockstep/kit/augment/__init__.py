"""Augmentation of training batches on their device, exact for any world size. Imports torch with the first batch."""

from lockstep.kit.augment.operation import Draws as Draws
from lockstep.kit.augment.operation import GeometricOperation as GeometricOperation
from lockstep.kit.augment.operation import Operation as Operation
from lockstep.kit.augment.operation import PixelOperation as PixelOperation
from lockstep.kit.augment.samples import Augmentation as Augmentation
from lockstep.kit.augment.samples import RandomResizedCrop as RandomResizedCrop
from lockstep.kit.augment.samples import Rotate as Rotate
from lockstep.kit.augment.samples import SampleTransform as SampleTransform
from lockstep.kit.augment.transforms import Cutmix as Cutmix
from lockstep.kit.augment.transforms import Flip as Flip
from lockstep.kit.augment.transforms import Mixup as Mixup
from lockstep.kit.augment.transforms import MixupOrCutmix as MixupOrCutmix
from lockstep.kit.augment.transforms import RandomErasing as RandomErasing
from lockstep.kit.augment.transforms import Shift as Shift
