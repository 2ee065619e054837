"""Networks of libraries. They know shapes and classes, but not how they are trained."""

from lockstep.models.from_timm import from_timm

__all__ = ["from_timm"]
