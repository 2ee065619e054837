"""Batteries: data sets, images, augmentation, tasks and panels. They use only what `lockstep.__all__` names, as a project does.

The names here do not import torch.
"""

from lockstep.kit.folder import Folder
from lockstep.kit.images import Images
from lockstep.kit.published import Published, download, read_idx

__all__ = ["Folder", "Images", "Published", "download", "read_idx"]
