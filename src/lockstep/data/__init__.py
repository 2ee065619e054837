"""Data sets, the sampler, the loaders and the datamodule. Classes that configs name do not import torch."""

from lockstep.data.dataset import Arrays as Arrays
from lockstep.data.dataset import Batch as Batch
from lockstep.data.dataset import DataSet as DataSet
from lockstep.data.dataset import Sound as Sound
from lockstep.data.folder import Folder as Folder
from lockstep.data.images import Images as Images
from lockstep.data.published import Published as Published
from lockstep.data.published import download as download
from lockstep.data.published import read_idx as read_idx
