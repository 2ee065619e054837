"""Augmentation of training batches on their device, exact for any world size. Imports torch with the first batch."""

from lockstep.augment.operation import Augmentation as Augmentation
from lockstep.augment.operation import Draws as Draws
from lockstep.augment.operation import GeometricOperation as GeometricOperation
from lockstep.augment.operation import Operation as Operation
from lockstep.augment.operation import PixelOperation as PixelOperation
from lockstep.augment.samples import ColorJitter as ColorJitter
from lockstep.augment.samples import RandAugment as RandAugment
from lockstep.augment.samples import RandomResizedCrop as RandomResizedCrop
from lockstep.augment.samples import Rotate as Rotate
from lockstep.augment.samples import SampleTransform as SampleTransform
from lockstep.augment.samples import TrivialAugment as TrivialAugment
from lockstep.augment.transforms import Cutmix as Cutmix
from lockstep.augment.transforms import Flip as Flip
from lockstep.augment.transforms import Mixup as Mixup
from lockstep.augment.transforms import MixupOrCutmix as MixupOrCutmix
from lockstep.augment.transforms import RandomErasing as RandomErasing
from lockstep.augment.transforms import Shift as Shift
