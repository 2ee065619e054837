"""All operations of a run, in their order."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lockstep.augment.draws import Draws
from lockstep.augment.operation import Operation
from lockstep.data.dataset import Batch


class Augmentation:
    """Applies operations in the order of the mapping; those that mix samples come last."""

    def __init__(self, operations: Mapping[str, Operation]) -> None:
        self.operations = dict(sorted(operations.items(), key=lambda item: item[1].mixes))  # a stable sort

    def __call__(self, batch: Batch, *, seed: int, epoch: int, repeats: int = 1) -> Batch:
        """Of a training batch on its device, before `preprocess`.

        `repeats`: each sample is in the result so many times, with different draws (Hoffer et al., "Augment your batch", 2020).
        """
        batch = repeated(batch, repeats) if repeats > 1 else batch
        for name, operation in self.operations.items():
            draws = Draws(f"augment.{name}", batch["index"], seed=seed, epoch=epoch, repeats=repeats)
            batch = operation(batch, draws)
        return batch


def repeated(batch: Batch, times: int) -> Batch:
    """Each sample `times` times in a row. On the device: samples are read and copied once."""

    def of(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.repeat_interleave(times, 0) if value.dim() else value
        return [each for each in value for _ in range(times)] if isinstance(value, list) else value

    return {**{name: of(value) for name, value in batch.items()}, "count": batch["count"] * times}
