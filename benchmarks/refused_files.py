"""A case of benchmarks/refused.py, and those of damaged data files."""

import gzip
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    """A command line of train.py. `key` must be in the message; `works` says that it has to be accepted instead, `may_work` that it may be."""

    family: str
    args: tuple[str, ...]
    key: str
    files: dict[str, bytes] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    what: str = ""  # is in the files
    works: bool = False
    may_work: bool = False

    @property
    def shown(self) -> str:
        return self.name[:150]

    @property
    def name(self) -> str:
        env = [f"{name}={value}" for name, value in self.env.items()]
        return " ".join([*env, *self.args]) + (f" ({self.what})" if self.what else "")


def idx(count: int, *shape: int, kind: int = 8) -> bytes:
    """An idx file of `count` things of `shape`."""
    sizes = b"".join(n.to_bytes(4, "big") for n in (count, *shape))
    total = count
    for n in shape:
        total *= n
    return bytes([0, 0, kind, 1 + len(shape)]) + sizes + bytes(i % 10 for i in range(total))


def mnist(folder: str, train: bytes, test: bytes, train_labels: bytes, test_labels: bytes) -> dict[str, bytes]:
    contents = {"train-images-idx3": train, "train-labels-idx1": train_labels}
    contents |= {"t10k-images-idx3": test, "t10k-labels-idx1": test_labels}
    return {f"{folder}/{name}-ubyte": content for name, content in contents.items()}


def digits(folder: str = "own", **other: bytes) -> dict[str, bytes]:
    good = {"train": idx(64, 12, 12), "test": idx(32, 12, 12), "train_labels": idx(64), "test_labels": idx(32)}
    return mnist(folder, **{**good, **other})


def picture(side: int = 8) -> bytes:
    return b"P6 %d %d 255\n" % (side, side) + bytes(side * side * 3)


def pictures(**other: bytes) -> dict[str, bytes]:
    """A folder of two classes; `other` by file name, of class `a`."""
    found = {f"own/{part}/{kind}/{i}.ppm": picture() for part in ("train", "test") for kind in "ab" for i in range(32)}
    return found | {f"own/train/a/{name}.ppm": content for name, content in other.items()}


def data() -> Iterator[Case]:
    own, family = ("data.root=own",), "data files"
    for what, files, named in (
        ("test images of another size", digits(test=idx(32, 14, 14)), "t10k-images"),
        ("no test images", digits(test=idx(0, 12, 12), test_labels=idx(0)), "t10k-images"),
        ("no training images", digits(train=idx(0, 12, 12), train_labels=idx(0)), "train-images"),
        ("images of 0 pixels", digits(train=idx(64, 0, 12), test=idx(32, 0, 12)), "train-images"),
        ("a dimension that is gigantic", digits(train=bytes([0, 0, 8, 3]) + b"\xff" * 12), "train-images"),
        ("labels above 9", digits(train_labels=idx(64)[:8] + bytes([200]) * 64), "train-labels"),
        ("fewer labels", digits(train_labels=idx(63)), "train-labels"),
        ("numbers of another kind", digits(train=idx(64, 12, 12, kind=9)), "train-images"),
        ("a cut-off file", digits(train=idx(64, 12, 12)[:500]), "train-images"),
        ("an empty file", digits(train=b""), "train-images"),
        ("a file of text", digits(train=b"hello"), "train-images"),
        ("bytes that follow", digits(train=idx(64, 12, 12) + b"x"), "train-images"),
    ):
        yield Case(family, own, named, files, what=what)
    packed = {f"{name}.gz": gzip.compress(content) for name, content in digits().items()}
    name = "own/train-images-idx3-ubyte.gz"
    bomb = gzip.compress(idx(64, 12, 12)) + gzip.compress(bytes(2**24)) * 256  # 4 GB
    for what, content in {
        "a bomb": bomb, "cut off": packed[name][:-9], "cut off early": packed[name][:20], "a wrong checksum": packed[name][:-6] + bytes(6),
        "two bytes": b"\x1f\x8b", "nothing": b"", "text": b"text" * 99,
    }.items():  # fmt: skip
        yield Case(family, own, "train-images", {**packed, name: content}, what=f"archive: {what}")
    yield Case(family, own, "", packed, what="archives", works=True)
    yield Case(family, own, "own", {"own": b"a file"}, what="data.root is a file")
    folder = ("data=folder", "data.root=own")
    yield Case(family, folder, "", pictures(), what="good", works=True)
    for content in (b"", b"text", picture()[:50], b"P6 0 0 255\n", b"P6 99999 99999 255\n" + bytes(50)):
        yield Case(family, folder, "broken.ppm", pictures(broken=content), what=f"a file of {content[:15]!r}")
    for table in (b"", b"path,target", b"a,b\n1,2", b"path,target\nnothing.ppm,a\n", b"path,target\n,\n", b"\xff\xfe\0\0",
                  b"path,target,split\ntrain/a/0.ppm,a,abc\n", b"path,target\ntrain/a/0.ppm\n", b"path,target\n\0\n",
                  b"path,target,split\ntrain/a/0.ppm,a,test\n", b"path,target\ntrain/a/0.ppm,a\n", b'path,target\n"' + b"x" * 200_000):  # fmt: skip
        yield Case(
            family,
            (*folder, "data.csv=list.csv"),
            "list.csv",
            {**pictures(), "own/list.csv": table},
            what=repr(table[:50]),
        )
    yield Case(family, folder, "own", {"own/a/0.txt": b"x"}, what="no images")
    yield Case(family, folder, "own", {"own/a/0.ppm": picture()}, what="one class")
