"""Any map-style torch Dataset. Free of torch until samples are read."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.config.instantiate import problems
from lockstep.data.dataset import Indices
from lockstep.data.decoding import to_array
from lockstep.data.foreign import Foreign
from lockstep.data.splits import PARTS

TARGETS = ("targets", "labels")  # attributes of torchvision's Datasets
READ = 32  # samples of each part that the fingerprint reads


class Datasets(Foreign):
    """The parts of a data set as torch Datasets, in `given`; `val` may be None."""

    given: Mapping[str, Any]
    chosen_classes: Sequence[str] | None = None

    def samples(self, part: str) -> "Items":
        return Items(self.given[part], channels=self.channels, size=self.image_size)

    @cached_property
    def train(self) -> "Items":
        return self.samples("train")

    @cached_property
    def val(self) -> "Items | None":
        return None if self.given["val"] is None else self.samples("val")

    @cached_property
    def test(self) -> "Items":
        return self.samples("test")

    @cached_property
    def names(self) -> dict[str, list[str]]:  # type: ignore[override]
        found = self.chosen_classes or classes_of(self.given["train"])
        return {"classes": list(found)} if found else {}

    def prepare(self) -> None:
        if bytes_of(self.train) is None:
            self.notice = (
                "data.train returns different samples when it is read again: its transforms are random. Batches then depend on data.num_workers, "
                "and a resumed run differs. Augment on the device instead (data.random_flip, data.random_shift, or `augment` of your own data set)."
            )

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for part in PARTS:
            samples = getattr(self, part)
            for content in content_of(samples) if samples is not None else ():
                digest.update(content)
        return digest.hexdigest()


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
    def problems(cls, data: Mapping[str, Any]) -> list[str]:
        found = super().problems(data)
        for part in PARTS:
            if isinstance(node := data.get(part), Mapping):
                found.extend(problems(node, f"data.{part}", given={}))
            elif part != "val":
                found.append(
                    f"data.{part} is missing; it names a Dataset, for example data.{part}={{_target_: my_package.data.Flowers, part: {part}}}."
                )
        return found


class Items:
    """Samples of a Dataset, which returns one at a time."""

    def __init__(self, dataset: Any, *, channels: int, size: int) -> None:
        self.dataset, self.channels, self.size = dataset, channels, size

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, indices: Indices) -> Mapping[str, Any]:
        from torch.utils.data import default_collate

        samples: Mapping[str, Any] = default_collate([self.named(self.dataset[int(place)]) for place in indices])
        return samples

    def named(self, sample: Any) -> dict[str, Any]:
        found = dict(sample) if isinstance(sample, Mapping) else dict(zip(("input", "target"), sample, strict=True))
        if type(found["input"]).__module__.startswith("PIL."):
            found["input"] = np.array(to_array(found["input"], channels=self.channels, size=self.size))
        return {name: np.float32(value) if isinstance(value, float) else value for name, value in found.items()}


def classes_of(dataset: Any) -> list[str]:
    """A Dataset's class names, or class numbers; empty if it has neither."""
    if (names := getattr(dataset, "classes", None)) is not None:
        return [str(name[0] if isinstance(name, tuple) else name) for name in names]
    for name in TARGETS:
        targets = np.asarray(getattr(dataset, name, ()))
        if targets.size and targets.ndim == 1 and targets.dtype.kind in "iu":
            return [str(number) for number in range(int(targets.max()) + 1)]
    return classes_of(dataset.dataset) if hasattr(dataset, "dataset") else []  # the Dataset of a Subset


def content_of(samples: Items) -> Iterator[bytes]:
    """Bytes that identify a Dataset."""
    dataset = samples.dataset
    yield f"{type(dataset).__qualname__}{len(dataset)}".encode()
    if isinstance(own := getattr(dataset, "fingerprint", None), str):
        yield own.encode()
        return
    held: list[Any] = [getattr(dataset, name, None) for name in ("data", *TARGETS)]
    for value in [*held, *getattr(dataset, "tensors", ())]:
        array: NDArray[Any] | None = np.asarray(value) if hasattr(value, "dtype") or isinstance(value, list) else None
        if array is not None and array.dtype != object:
            yield np.ascontiguousarray(array).tobytes()
    yield bytes_of(samples) or b"random"


def bytes_of(samples: Items) -> bytes | None:
    """Bytes of some samples, whose shapes may differ. None if reading them again returns something else."""
    found = []
    for _ in range(2):
        digest = hashlib.sha256()
        for place in np.unique(np.linspace(0, len(samples) - 1, READ).astype(np.int64)):
            for value in samples.named(samples.dataset[int(place)]).values():
                digest.update(value.encode() if isinstance(value, str) else np.asarray(value).tobytes())
        found.append(digest.digest())
    return found[0] if found[0] == found[1] else None
