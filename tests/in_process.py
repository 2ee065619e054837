"""Runs in the tests' own process, which imports torch once: small ones, what they leave, and one that several tests start from."""

import csv
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import lockstep
from lockstep.config.compose import compose_config
from lockstep.config.draft import Draft, values_of
from lockstep.config.run_config import RunConfig
from lockstep.config.settings import Settings
from lockstep.machine.files import write_json

if TYPE_CHECKING:
    import torch  # 10 s, which the process that deals out the tests need not spend

# For runs whose network does not matter: a step of BasicNet takes a tenth, a checkpoint 1 MB instead of 14.
SMALL = ["data.image_size=12", "trainer.accelerator=cpu"]
Train = Callable[..., dict[str, Any]]


class Crash(RuntimeError):
    pass


def options(mnist: Path, cache: Path) -> list[str]:
    """An epoch has 12 steps."""
    return [f"data.root={mnist}", f"data.cache_dir={cache}", "loader.batch_size=48", *SMALL]


def config_of(*overrides: str) -> RunConfig:
    """Of a command line that is not checked, because it is for another machine."""
    return Settings.of(values_of(Draft(compose_config("train", overrides)))).with_run_identity().cfg


@pytest.fixture
def train(tmp_path: Path, mnist: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Trains in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return lambda *overrides: lockstep.train([*options(mnist, cache), *overrides])


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, mnist: Path, cache: Path) -> Path:
    """The directory of a run `a` of one epoch, with a row of the log for each step."""
    folder = tmp_path_factory.mktemp("trained")
    lockstep.train([*options(mnist, cache), f"runs_dir={folder}", "run=a", "trainer.log_every_n_steps=1"])
    return folder / "a"


@pytest.fixture
def run_a(train: Train, trained: Path) -> dict[str, Any]:
    """A copy of `trained` as runs/a, to continue or to look at; its report."""
    shutil.copytree(trained, "runs/a")
    return report("a")


@pytest.fixture
def crash_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Makes training raise Crash at the end of a step."""

    from lockstep.callbacks import FiniteLoss

    def set_up(step: int) -> None:
        def crash(self: Any, trainer: Any, *_: Any) -> None:
            if trainer.global_step == step:
                raise Crash

        monkeypatch.setattr(FiniteLoss, "on_train_batch_end", crash)

    yield set_up


def report(run: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("runs", run, "report.json").read_text())
    return found


def end_before_the_test(run: str) -> None:
    """Makes a finished run look as if it had been ended while it was tested: a finished one is not tested again."""
    write_json(Path("runs", run, "report.json"), report(run) | {"status": "interrupted"})


def rows(run: str | Path) -> list[dict[str, str]]:
    """Of metrics.csv, without speed and memory."""
    measured = ("train/images_per_s", "train/peak_memory_gib")
    with Path("runs", run, "metrics.csv").open() as file:
        return [{k: v for k, v in row.items() if k not in measured} for row in csv.DictReader(file)]


def logged_steps(run: str) -> list[int]:
    return [int(row["step"]) for row in rows(run) if row["train/loss"]]


def state(path: str | Path) -> dict[str, Any]:
    """A checkpoint, by its path below runs/."""
    import torch

    found: dict[str, Any] = torch.load(Path("runs", path), weights_only=True)
    return found


def same(a: dict[str, "torch.Tensor"], b: dict[str, "torch.Tensor"]) -> bool:
    import torch

    return list(a) == list(b) and all(torch.equal(a[key], b[key]) for key in a)
