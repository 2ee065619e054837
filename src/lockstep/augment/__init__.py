"""Augmentation of training batches on their device, exact for every world. Free of torch until a batch comes."""

from lockstep.augment.mixing import Cutmix as Cutmix
from lockstep.augment.mixing import Mixup as Mixup
from lockstep.augment.mixing import MixupOrCutmix as MixupOrCutmix
from lockstep.augment.operation import Augmentation as Augmentation
from lockstep.augment.operation import Draws as Draws
from lockstep.augment.operation import GeometricOperation as GeometricOperation
from lockstep.augment.operation import Operation as Operation
from lockstep.augment.operation import PixelOperation as PixelOperation
from lockstep.augment.transforms import ColorJitter as ColorJitter
from lockstep.augment.transforms import Flip as Flip
from lockstep.augment.transforms import RandAugment as RandAugment
from lockstep.augment.transforms import RandomErasing as RandomErasing
from lockstep.augment.transforms import RandomResizedCrop as RandomResizedCrop
from lockstep.augment.transforms import Rotate as Rotate
from lockstep.augment.transforms import Shift as Shift
from lockstep.augment.transforms import TrivialAugment as TrivialAugment
