"""Data in the real on-disk formats, made here; commands run as users run them; no network."""

import gzip
import hashlib
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import forked as forked_processes
import numpy as np
import pytest
from in_process import crash_at, run_a, train, trained  # noqa: F401  # fixtures

from lockstep import ROOT
from lockstep.launch import local
from project.data import Cifar10

# A shell's background jobs ignore it, and so would what they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# A home of their own: a login, settings or a cache of the account's must not decide a test. Workers and commands inherit it.
os.environ.setdefault("UV_CACHE_DIR", str(Path("~/.cache/uv").expanduser()))  # packages only
HOME = Path(os.environ["HOME"] if "PYTEST_XDIST_WORKER" in os.environ else tempfile.mkdtemp(prefix="lockstep-home-"))
OUTSIDE = ("XDG_", "WANDB_", "MLFLOW_", "HF_", "NETRC")
for name in [name for name in os.environ if name.startswith(OUTSIDE)]:
    del os.environ[name]
os.environ["HOME"] = str(HOME)
# One thread for each process, before torch is imported: pytest runs a worker a core, and threads that wait spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["WANDB_MODE"] = "offline"
os.environ.pop("UV", None)  # commands are printed as they were typed, which `uv run pytest` does not decide
os.environ["HF_HUB_OFFLINE"] = "1"


HAS_SERVER = hasattr(os, "pidfd_open")  # of forked.py, which needs Linux
ON_LINUX = re.compile(
    r"^(?:import|from) (?:fcntl|forked|kills|limited|pty|resource|slurm|terminal)\b|\bforked", re.MULTILINE
)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Elsewhere, files whose tests need Linux are left out; None: the other rules decide."""
    is_test = collection_path.suffix == ".py" and not HAS_SERVER
    return bool(is_test and ON_LINUX.search(collection_path.read_text(encoding="utf-8"))) or None


def pytest_configure() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ and HAS_SERVER:
        forked_processes.start_server(HOME)


def pytest_unconfigure() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(HOME, ignore_errors=True)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A worker a core for all tests; some files run in this process, which imports torch once."""
    return len(os.sched_getaffinity(0)) if config.args == config.getini("testpaths") else 0


def digits(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """uint8 images_N28x28 that a network can learn in seconds: a bright bar whose place is the label."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 10, count).astype(np.uint8)
    images = random.integers(0, 60, (count, 28, 28)).astype(np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[2 * label + 3 : 2 * label + 6, 4:24] = 220
    return images, labels


def write_idx(path: Path, array: np.ndarray) -> None:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    content = header + array.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_mnist(root: Path, train_count: int, test_count: int) -> Path:
    """`root` with MNIST's four files as published, of so many made-up images."""
    for count, prefix, seed in ((train_count, "train", 0), (test_count, "t10k", 1)):
        images, labels = digits(count, seed)
        write_idx(root / "MNIST" / "raw" / f"{prefix}-images-idx3-ubyte.gz", images)
        write_idx(root / "MNIST" / "raw" / f"{prefix}-labels-idx1-ubyte.gz", labels)
    return root


def write_cifar10(root: Path, per_file: int) -> dict[str, str]:
    """`root` with CIFAR-10's six pickles, `per_file` images each. Returns their MD5s, which differ from the published ones."""
    folder = root / Cifar10.folders[0]
    folder.mkdir(parents=True)
    random = np.random.default_rng(2)
    for name in Cifar10.md5:
        labels = random.integers(0, 10, per_file)
        images = (random.integers(0, 80, (per_file, 3, 32, 32)) + 15 * labels[:, None, None, None]).astype(np.uint8)
        batch = {b"data": images.reshape(per_file, -1), b"labels": labels.tolist()}
        (folder / name).write_bytes(pickle.dumps(batch))
    return {name: hashlib.md5((folder / name).read_bytes()).hexdigest() for name in Cifar10.md5}


class Touch:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Path]]:
        return Path.touch, (self.path,)


@pytest.fixture(scope="session")
def mnist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """640 training and 103 test images: neither world sizes nor batches divide the latter."""
    return write_mnist(tmp_path_factory.mktemp("mnist"), 640, 103)


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str
    folder: Path

    def __str__(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


@dataclass(frozen=True)
class Started:
    """A command that runs, in a process group of its own."""

    process: subprocess.Popen
    out: IO[str]
    err: IO[str]
    folder: Path

    def done(self, timeout_s: float = 300) -> Done:
        """Waits for its end. A command that takes longer is killed with its whole group."""
        with self.out, self.err:
            try:
                code = self.process.wait(timeout_s)
            except BaseException:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
                raise
            self.out.seek(0)
            self.err.seek(0)
            return Done(code, self.out.read(), self.err.read(), self.folder)


@dataclass(frozen=True)
class Commands:
    """Runs train.py and eval.py in a folder of their own, on made data."""

    folder: Path
    cache: Path
    data: Path
    popen: type = subprocess.Popen

    def __call__(self, script: str, *args: str, env: dict[str, str] | None = None, timeout_s: float = 300) -> Done:
        return self.start(script, *args, env=env).done(timeout_s)

    def start(self, script: str, *args: str, env: dict[str, str] | None = None) -> Started:
        data = [f"data.root={self.data}", f"data.cache_dir={self.cache}"] if Path(script).name == "train.py" else []
        out, err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
        process = self.popen(
            [sys.executable, str(ROOT / script), *data, *args],
            cwd=self.folder,
            env={**os.environ, **(env or {})},
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        return Started(process, out, err, self.folder)

    def report(self, run: str) -> dict[str, Any]:
        """Empty if the run has none."""
        file = self.folder / "runs" / run / "report.json"
        return json.loads(file.read_text()) if file.exists() else {}

    def files(self) -> list[str]:
        """What the commands left in their folder."""
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*"))


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def command(tmp_path: Path, cache: Path, mnist: Path) -> Commands:
    folder = tmp_path / "work"
    folder.mkdir()
    return Commands(folder, cache, mnist)


@pytest.fixture(scope="module")
def shared_command(tmp_path_factory: pytest.TempPathFactory, cache: Path, mnist: Path) -> Commands:
    """As `command`, in a folder that the tests of a module share, for runs that several look at."""
    return Commands(tmp_path_factory.mktemp("work"), cache, mnist)


@pytest.fixture
def port() -> Iterator[int]:
    with local.reserve_port() as port:
        yield port


@pytest.fixture
def forked_command(command: Commands) -> Commands:
    """As `command`, forked from a server: for tests about what a command does, not about how Python starts it."""
    return replace(command, popen=forked_processes.Popen)


@pytest.fixture(scope="module")
def forked() -> Iterator[None]:
    """Runs that are started from Python fork their processes from a server."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "subprocess", forked_processes)
        yield


@pytest.fixture
def make_mnist(tmp_path: Path) -> Callable[[int, int], Path]:
    return lambda *counts: write_mnist(tmp_path / f"mnist-{counts[0]}-{counts[1]}", *counts)
