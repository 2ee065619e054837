"""The base classes of augmentation's operations. Free of torch, so a config is checked before torch is imported.

An operation gets training batches on their device, before `preprocess`: images are bytes (uint8, BCHW). It knows nothing of
processes, seeds or epochs. All its randomness comes from `draws`, which is a function of (seed, epoch, sample).
"""

# B batch · C channel · H W pixel

from typing import TYPE_CHECKING, Any, ClassVar

from lockstep.config.schema import Kind
from lockstep.config.words import shown
from lockstep.data.dataset import Batch
from lockstep.data.images import spatial
from lockstep.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.augment.draws import Draws


class Operation:
    """Changes a batch. To stay exact, a sample's result depends on that sample and its `draws` alone; and to stay fast, an
    operation reads no value of a tensor (`.item()`, `if tensor`, boolean indexing), for which the CPU would wait."""

    mixes: ClassVar[bool] = False  # whether it mixes samples with their partners; runs after those that do not

    def __call__(self, batch: Batch, draws: "Draws") -> Batch:
        raise NotImplementedError


class PixelOperation(Operation):
    """Changes the pixels of images and leaves everything in its place."""

    def change(self, image_BCHW: "Tensor", draws: "Draws") -> "Tensor":
        """Of bytes, to bytes."""
        raise NotImplementedError

    def __call__(self, batch: Batch, draws: "Draws") -> Batch:
        return {**batch, "input": self.change(images_of(batch, draws.name), draws)}


class GeometricOperation(Operation):
    """Moves pixels, and the masks of a batch with their images."""

    uncovers: bool = False  # whether pixels appear that no pixel of the image has moved to
    mask_fill: int | None = None  # their value in masks

    def plan(self, height: int, width: int, draws: "Draws") -> Any:
        """What the draws decide, for images of this size."""
        raise NotImplementedError

    def move(self, value_BCHW: "Tensor", plan: Any, *, is_mask: bool) -> "Tensor":
        """Images of bytes; or masks of any type, whose values cannot be mixed."""
        raise NotImplementedError

    def __call__(self, batch: Batch, draws: "Draws") -> Batch:
        height, width = images_of(batch, draws.name).shape[-2:]
        return self.moved(batch, self.plan(height, width, draws), draws.name)

    def moved(self, batch: Batch, plan: Any, name: str) -> Batch:
        masks = masks_of(batch, name)
        if masks and self.uncovers and self.mask_fill is None:
            raise UserError(
                f"{name} uncovers pixels, and `{next(iter(masks))}` needs a value for them. Type {name}.mask_fill=<value>, "
                f"for example the task's ignore_index; or leave it out: ~{name}."
            )
        done = {"input": self.move(batch["input"], plan, is_mask=False)}
        for key, mask in masks.items():
            moved = self.move(mask.reshape(len(mask), -1, *mask.shape[-2:]), plan, is_mask=True)
            done[key] = moved.reshape(*mask.shape[:-2], *moved.shape[-2:])
        return {**batch, **done}


def images_of(batch: Batch, name: str) -> "Tensor":
    """The images of a batch. Raises UserError if `input` is something else."""
    image: Tensor | None = batch.get("input")
    if image is None:
        raise UserError(f"{name} changes `input`, and a batch holds {', '.join(batch)}. Leave it out: ~{name}.")
    if image.dim() != 4 or image.element_size() != 1 or image.is_floating_point():
        raise UserError(
            f"{name} changes images of bytes (uint8, BCHW); `input` is {str(image.dtype).removeprefix('torch.')} of shape "
            f"{tuple(image.shape)}. Leave it out: ~{name}."
        )
    return image


def masks_of(batch: Batch, name: str) -> Batch:
    """Values with a number for each pixel. Raises UserError for others that may refer to places in the images."""
    found = spatial(batch)
    for key, value in found.items():
        if value.shape[-2:] != batch["input"].shape[-2:]:
            raise UserError(
                f"{name} cannot move `{key}` of shape {tuple(value.shape)} with images of {tuple(batch['input'].shape[-2:])}. "
                f"Leave it out: ~{name}; or write an operation of your own that can (docs/augment.md)."
            )
    return found


def check(operation: Operation, **kinds: Kind) -> None:
    """Raises ValueError if an attribute is of another kind than its name says."""
    wrong = [
        f"{name}={shown(value)} is not possible; it takes {kind.takes}, for example {kind.example}"
        for name, kind in kinds.items()
        if not kind.accepts(value := getattr(operation, name))
    ]
    if wrong:
        raise ValueError("; ".join(wrong))


def check_rising(operation: Operation, *names: str) -> None:
    for name in names:
        if (value := getattr(operation, name)) != sorted(value):
            raise ValueError(f"{name}={value} is not possible: the lower number comes first")
