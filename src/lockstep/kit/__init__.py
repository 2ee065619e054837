"""Batteries: data sets, images, augmentation, tasks and panels. They use only what `lockstep.__all__` names, as a project does.

The names here do not import torch.
"""

from lockstep.kit.folder import Folder as Folder
from lockstep.kit.images import Images as Images
from lockstep.kit.published import Published as Published
from lockstep.kit.published import download as download
from lockstep.kit.published import read_idx as read_idx
