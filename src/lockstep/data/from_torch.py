"""Any map-style torch Dataset. Free of torch until samples are read."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from lockstep.config.instantiate import problems
from lockstep.data.foreign import Foreign
from lockstep.data.samples import Items, bytes_of
from lockstep.data.splits import PARTS

TARGETS = ("targets", "labels")  # where torchvision's Datasets keep them


class Datasets(Foreign):
    """The parts of a data set as torch Datasets, in `given`; `val` may be None."""

    given: Mapping[str, Any]
    chosen_classes: Sequence[str] | None = None

    def open_part(self, part: str) -> Items | None:
        given = self.given[part]
        return None if given is None else Items(given, channels=self.channels, size=self.image_size)

    @cached_property
    def names(self) -> dict[str, list[str]]:  # type: ignore[override]
        found = self.chosen_classes or classes_of(self.given["train"])
        return {"classes": list(found)} if found else {}

    def prepare(self) -> None:
        super().prepare()
        if bytes_of(self.train) is None:
            self.notice = (
                "data.train returns different samples when it is read again: its transforms are random. Batches then depend on data.num_workers, "
                "and a resumed run differs. Augment on the device instead, exactly: augment=standard (docs/augment.md)."
            )


class TorchDataset(Datasets):
    """`train`, `test` and optionally `val`: Datasets whose samples are (input, target) or a dict; PIL images become bytes.

    `classes`: class names, if the training Dataset has neither `classes` nor `targets`. A Dataset may have an attribute
    `fingerprint`; otherwise it is computed from the arrays it holds and some of its samples.
    """

    def __init__(
        self, *, train: Any, test: Any, val: Any = None, classes: Sequence[str] | None = None, **images: Any
    ) -> None:
        super().__init__(**images)
        self.given, self.chosen_classes = {"train": train, "val": val, "test": test}, classes

    @classmethod
    def problems(cls, data: Mapping[str, Any]) -> Iterable[str]:
        yield from super().problems(data)
        for part in PARTS:
            if isinstance(node := data.get(part), Mapping):
                yield from problems(node, f"data.{part}", given={})
            elif part != "val":
                yield f"data.{part} is missing; it names a Dataset, for example data.{part}={{_target_: my_package.data.Flowers, part: {part}}}."


def classes_of(dataset: Any) -> list[str]:
    """A Dataset's class names, or class numbers; empty if it has neither."""
    if (names := getattr(dataset, "classes", None)) is not None:
        return [str(name[0] if isinstance(name, tuple) else name) for name in names]
    for name in TARGETS:
        targets = np.asarray(getattr(dataset, name, ()))
        if targets.size and targets.ndim == 1 and targets.dtype.kind in "iu":
            return [str(number) for number in range(int(targets.max()) + 1)]
    return classes_of(dataset.dataset) if hasattr(dataset, "dataset") else []  # of a Subset
