"""Networks. They know shapes and classes, but not how they are trained."""

from lockstep.models.basic_net import BasicNet
from lockstep.models.from_timm import from_timm

__all__ = ["BasicNet", "from_timm"]
