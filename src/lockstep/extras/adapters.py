"""Data that torch or torchvision holds, as a data set. Free of torch until samples are read."""

import ast
import importlib.util
import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from lockstep.config.instantiate import problems
from lockstep.config.words import nearest, shown
from lockstep.data.cache import cache_folder, key_of
from lockstep.data.dataset import Batch, Items, bytes_of
from lockstep.data.images import Images
from lockstep.data.sampler import PARTS
from lockstep.errors import UserError

# --- Data that another library holds, as samples or rows: images, or anything else. Free of torch ---

IMAGE_SIZE = 224


class Foreign(Images):
    """Images get the treatment of images: resized to `image_size` where they are decoded, normalised on the device.

    Anything else goes to the network unchanged. The first training sample decides which it is. A subclass sets `train`,
    `val` and `test` to Samples, and `names` to what describes its targets: `classes`, `targets`, ...
    """

    names: Mapping[str, Sequence[str]]

    def __init__(self, *, image_size: int = IMAGE_SIZE, **images: Any) -> None:
        super().__init__(image_size=image_size, **images)

    @cached_property
    def first(self) -> NDArray[Any]:
        return np.asarray(self.train[np.array([0])]["input"])[0]

    def prepare(self) -> None:
        """Raises UserError for image options if the samples are not images."""
        usual = {"image_size": IMAGE_SIZE, "channels": 3}
        own = {name: getattr(self, name) for name in usual}
        given = [f"data.{name}={shown(value)}" for name, value in own.items() if value != usual[name]]
        if given and not self.holds_images:
            raise UserError(
                f"{' and '.join(given)} without effect: `input` is {self.first.dtype} of shape {self.first.shape}, no image of bytes (uint8, CHW). Leave it out."
            )

    @property
    def holds_images(self) -> bool:
        return self.first.dtype == np.uint8 and self.first.ndim == 3

    @property
    def unit(self) -> str:  # type: ignore[override]
        return "images" if self.holds_images else "samples"

    @cached_property
    def about(self) -> dict[str, Any]:
        images = super().about if self.holds_images else {}
        return {**images, **{name: list(values) for name, values in self.names.items()}}

    def network_arguments(self) -> dict[str, Any]:
        if self.holds_images:
            return super().network_arguments()
        shape = self.first.shape
        if len(shape) == 3:
            return {"in_channels": shape[0], "image_size": shape[-1]}
        return {"in_features": shape[0]} if len(shape) == 1 else {}

    def preprocess(self, batch: Batch) -> Batch:
        return super().preprocess(batch) if self.holds_images else batch


# --- Any map-style torch Dataset. Free of torch until samples are read ---

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


# --- torchvision's data sets by name. Free of torch until samples are read ---

SPLITS = {"train": ("train", "trainval", "train-standard"), "val": ("val", "valid"), "test": ("test",)}


class Torchvision(Datasets):
    """`torchvision.datasets.<dataset>(root, ...)` with its own parts. Without a test part, its validation part is the test set.

    Raises:
        UserError: there is no such data set, it has no test part, or it is neither on disk nor downloadable.
    """

    def __init__(
        self,
        *,
        dataset: str,
        root: str,
        source: str = "auto",
        arguments: Mapping[str, Any] | None = None,
        cache_dir: str | None = None,
        **images: Any,
    ) -> None:
        super().__init__(**images)
        self.dataset, self.root = dataset, Path(root).expanduser()
        self.asked, self.arguments, self.cache = source, dict(arguments or {}), cache_folder(cache_dir)

    @classmethod
    def problems(cls, data: Mapping[str, Any]) -> Iterable[str]:
        yield from super().problems(data)
        if (name := str(data.get("dataset"))) == "???":
            yield "data.dataset is missing; type data.dataset=<name>, one of torchvision.datasets, such as Flowers102."
        elif name not in (known := torchvision_names()):
            yield f"data.dataset={name} is not in torchvision.datasets{nearest(name, known)}. For another class, see data._target_=lockstep.extras.adapters.TorchDataset."
        if data.get("source") == "embedded":
            yield "data.source=embedded: no package contains torchvision's data sets. Type data.source=auto."

    @cached_property
    def given(self) -> dict[str, Any]:  # type: ignore[override]
        import torchvision

        maker = getattr(torchvision.datasets, self.dataset)
        named = inspect.signature(maker).parameters
        passes = any(parameter.kind is parameter.VAR_KEYWORD for parameter in named.values())
        downloads = "download" in named or passes
        if "split" in named and "split" not in self.arguments:
            parts = {part: self.first_of(maker, names, downloads) for part, names in SPLITS.items()}
        elif "train" in named or passes:
            parts = {part: self.made(maker, downloads, train=part == "train") for part in ("train", "test")}
        else:
            parts = {}
        if parts.get("test") is None and parts.get("val") is not None:
            parts["test"] = parts.pop("val")
            self.notice = (
                f"{self.dataset} has no test part: its validation part is the test set, and a part of train validates."
            )
        if parts.get("train") is None or parts.get("test") is None:
            raise UserError(
                f"torchvision.datasets.{self.dataset} has no test part. Type data=folder with its image files, which splits them."
            )
        return {"val": None, **parts}

    def first_of(self, maker: Any, names: tuple[str, ...], downloads: bool) -> Any:
        """The first of the splits that the data set has; None without."""
        for name in names:
            try:
                return self.made(maker, downloads, split=name)
            except ValueError as e:
                if isinstance(e, UserError) or "argument split" not in str(e):
                    raise
        return None

    def made(self, maker: Any, downloads: bool, **which: Any) -> Any:
        given = {"root": str(self.root), **self.arguments, **which}
        try:
            return maker(**given)
        except (RuntimeError, OSError) as e:
            if self.asked == "disk" or not downloads:
                how = ", or data.source=download" if downloads else ""
                raise UserError(
                    f"data.root={self.root} does not hold torchvision's {self.dataset} ({one_line(e)}). Type data.root=<folder>{how}."
                ) from None
        try:
            self.cache.mkdir(parents=True, exist_ok=True)
            key = key_of(self.dataset, [], str(self.root.resolve()))
            with FileLock(self.cache / f".{key}.lock"):  # two runs share one download
                made = maker(**given, download=True)
        except (RuntimeError, OSError) as e:
            raise UserError(
                f"{self.dataset} is not in data.root={self.root} and could not be fetched ({one_line(e)}). Type data.root=<folder> for one that "
                f"holds it; on a machine with a network, torchvision.datasets.{self.dataset}(<folder>, download=True) makes it."
            ) from None
        self.source = "download"
        return made


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def torchvision_names() -> list[str]:
    """What torchvision.datasets exports, parsed from its source, because importing it takes seconds."""
    spec = importlib.util.find_spec("torchvision")
    assert spec is not None and spec.origin is not None
    for node in ast.parse((Path(spec.origin).parent / "datasets" / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return list(ast.literal_eval(node.value))
    return []
