"""torchvision's data sets by name. Free of torch until samples are read."""

import ast
import importlib.util
import inspect
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from filelock import FileLock

from lockstep.config.words import nearest
from lockstep.data.cache import cache_folder, key_of
from lockstep.data.from_torch import Datasets
from lockstep.errors import UserError

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
            yield f"data.dataset={name} is not in torchvision.datasets{nearest(name, known)}. For another class, see data._target_=lockstep.data.TorchDataset."
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
