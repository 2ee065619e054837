"""Data sets, the sampler (pure arithmetic), the loaders and the datamodule. What a config names here is free of torch."""

from lockstep.data.cifar10 import Cifar10
from lockstep.data.dataset import Arrays, Batch, DataSet
from lockstep.data.images import Images
from lockstep.data.mnist import Mnist

__all__ = ["Arrays", "Batch", "Cifar10", "DataSet", "Images", "Mnist"]
