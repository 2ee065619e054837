"""Data that another library holds, as a data set: torch Datasets, and torchvision's by name. Free of torch until samples are read."""

import ast
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.config.instantiate import problems
from lockstep.config.words import shown
from lockstep.data.cache import cache_folder, one_download
from lockstep.data.dataset import Batch, Items, bytes_of, classes_of
from lockstep.data.images import Images
from lockstep.data.pixels import reason
from lockstep.data.sampler import PARTS
from lockstep.errors import UserError, did_you_mean

IMAGE_SIZE = 224


class Wrapped(Images):
    """The parts of a data set as torch Datasets, in `held`; `val` may be None. A subclass may override `open_part` and `names` instead.

    Images get the treatment of images: resized to `image_size` where they are decoded, normalised on the device. Anything
    else goes to the network unchanged. The first training sample decides which it is.
    """

    held: Mapping[str, Any]

    def __init__(self, *, image_size: int = IMAGE_SIZE, **images: Any) -> None:
        super().__init__(image_size=image_size, **images)

    @classmethod
    def for_files(cls, about: Mapping[str, Any]) -> Any:
        return Images.for_files(about)

    def open_part(self, part: str) -> Any:
        dataset = self.held[part]
        return None if dataset is None else Items(dataset, channels=self.channels, size=self.image_size)

    @cached_property
    def names(self) -> dict[str, list[str]]:
        """What describes the targets: `classes`, `targets`, ..."""
        names = class_names(self.held["train"])
        return {"classes": names} if names else {}

    @cached_property
    def first(self) -> NDArray[Any]:
        return np.asarray(self.train[np.array([0])]["input"])[0]

    @property
    def holds_images(self) -> bool:
        return self.first.dtype == np.uint8 and self.first.ndim == 3

    def prepare(self) -> None:
        """Raises UserError for image options if the samples are not images."""
        usual = {"image_size": IMAGE_SIZE, "channels": 3}
        options = [f"data.{key}={shown(value)}" for key in usual if (value := getattr(self, key)) != usual[key]]
        if options and not self.holds_images:
            raise UserError(
                f"{' and '.join(options)} {'have' if len(options) > 1 else 'has'} no effect: `input` is {self.first.dtype} of shape {self.first.shape}, not an image of bytes (uint8, CHW). Remove it."
            )
        if bytes_of(self.train) is None:
            self.notice = (
                "data.train returns different samples when it is read again: its transforms are random. Batches then depend on data.num_workers, "
                "and a resumed run differs. Augment on the device instead, exactly: augment=standard (docs/augment.md)."
            )

    @property
    def unit(self) -> str:  # type: ignore[override]
        return "images" if self.holds_images else "samples"

    @cached_property
    def about(self) -> dict[str, Any]:
        return {**(super().about if self.holds_images else {}), **self.names}

    def network_arguments(self) -> dict[str, Any]:
        if self.holds_images:
            return super().network_arguments()
        shape = self.first.shape
        if len(shape) == 3:
            return {"in_channels": shape[0], "image_size": shape[-1]}
        return {"in_features": shape[0]} if len(shape) == 1 else {}

    def preprocess(self, batch: Batch) -> Batch:
        return super().preprocess(batch) if self.holds_images else batch


def class_names(dataset: Any) -> list[str]:
    """A Dataset's class names, or class numbers; empty if it has neither."""
    if (names := getattr(dataset, "classes", None)) is not None:
        return [str(name[0] if isinstance(name, tuple) else name) for name in names]
    if (class_N := classes_of(dataset)) is not None and len(class_N):
        return [str(number) for number in range(int(class_N.max()) + 1)]
    return class_names(dataset.dataset) if hasattr(dataset, "dataset") else []  # of a Subset


# --- Any map-style torch Dataset ---


class TorchDataset(Wrapped):
    """`train`, `test` and optionally `val`: Datasets whose samples are (input, target) or a dict; PIL images become bytes.

    `classes`: class names, if the training Dataset has neither `classes` nor `targets`. A Dataset may have an attribute
    `fingerprint`; otherwise it is computed from the arrays it holds and some of its samples.
    """

    def __init__(
        self, *, train: Any, test: Any, val: Any = None, classes: Sequence[str] | None = None, **images: Any
    ) -> None:
        super().__init__(**images)
        self.held = {"train": train, "val": val, "test": test}
        if classes:
            self.names = {"classes": list(classes)}

    @classmethod
    def problems(cls, data: Mapping[str, Any]) -> Iterable[str]:
        yield from super().problems(data)
        for part in PARTS:
            if isinstance(node := data.get(part), Mapping):
                yield from problems(node, f"data.{part}", given={})
            elif part != "val":
                yield f"data.{part} is missing; it names a Dataset, for example data.{part}={{_target_: my_package.data.Flowers, part: {part}}}."


# --- torchvision's data sets by name ---

SPLITS = {"train": ("train", "trainval", "train-standard"), "val": ("val", "valid"), "test": ("test",)}


class Torchvision(Wrapped):
    """`torchvision.datasets.<dataset>(root, ...)` with its own parts. Without a test part, its validation part is the test set.

    Raises:
        UserError: there is no such data set, it has no test part, or it is neither on disk nor downloadable.
    """

    source = "disk"

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
            yield "data.dataset is missing; set data.dataset=<name>, one of torchvision.datasets, such as Flowers102."
        elif name not in (known := torchvision_names()):
            yield f"data.dataset={name} is not in torchvision.datasets{did_you_mean(name, known)}. For another class, see data._target_=lockstep.extras.adapters.TorchDataset."
        if data.get("source") == "embedded":
            yield "data.source=embedded: no package contains torchvision's data sets. Set data.source=auto."

    @cached_property
    def held(self) -> dict[str, Any]:  # type: ignore[override]
        import torchvision

        make = getattr(torchvision.datasets, self.dataset)
        named = inspect.signature(make).parameters
        passes = any(parameter.kind is parameter.VAR_KEYWORD for parameter in named.values())
        downloads = "download" in named or passes
        parts: dict[str, Any] = dict.fromkeys(PARTS)
        if "split" in named and "split" not in self.arguments:
            parts |= {part: self.first_split(make, names, downloads) for part, names in SPLITS.items()}
        elif "train" in named or passes:
            parts |= {part: self.make(make, downloads, train=part == "train") for part in ("train", "test")}
        if parts["test"] is None and parts["val"] is not None:
            parts |= {"test": parts["val"], "val": None}
            self.notice = (
                f"{self.dataset} has no test part: its validation part is the test set, and a part of train validates."
            )
        if parts["train"] is None or parts["test"] is None:
            raise UserError(
                f"torchvision.datasets.{self.dataset} has no test part. Set data=folder with its image files, which splits them."
            )
        return parts

    def first_split(self, make: Callable[..., Any], names: Iterable[str], downloads: bool) -> Any:
        """The first of the splits that the data set has; None without."""
        for name in names:
            try:
                return self.make(make, downloads, split=name)
            except ValueError as e:
                if isinstance(e, UserError) or "argument split" not in str(e):
                    raise
        return None

    def make(self, make: Callable[..., Any], downloads: bool, **which: Any) -> Any:
        """From the disk, or else downloaded."""
        arguments = {"root": str(self.root), **self.arguments, **which}
        try:
            return make(**arguments)
        except (RuntimeError, OSError) as e:
            if self.asked == "disk" or not downloads:
                how = ", or data.source=download" if downloads else ""
                raise UserError(
                    f"data.root={self.root} does not hold torchvision's {self.dataset} ({reason(e)}). Set data.root=<folder>{how}."
                ) from None
        try:
            with one_download(self.cache, self.dataset, self.root):
                dataset = make(**arguments, download=True)
        except (RuntimeError, OSError) as e:
            raise UserError(
                f"{self.dataset} is not in data.root={self.root} and could not be fetched ({reason(e)}). Set data.root=<folder> for one that "
                f"holds it; on a machine with a network, torchvision.datasets.{self.dataset}(<folder>, download=True) makes it."
            ) from None
        self.source = "download"
        return dataset


def torchvision_names() -> list[str]:
    """The data sets of torchvision.datasets, by its source, because importing it takes seconds."""
    spec = importlib.util.find_spec("torchvision")
    assert spec is not None and spec.origin is not None
    module = ast.parse((Path(spec.origin).parent / "datasets" / "__init__.py").read_text())
    exported = next(
        node.value for node in module.body if isinstance(node, ast.Assign) and ast.unparse(node).startswith("__all__")
    )
    return [name for name in ast.literal_eval(exported) if name[0].isupper()]  # it exports a function, too
