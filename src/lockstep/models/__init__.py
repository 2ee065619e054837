"""Networks from libraries. They depend on shapes and classes, not on how they are trained."""

from lockstep.models.from_timm import from_timm

__all__ = ["from_timm"]
