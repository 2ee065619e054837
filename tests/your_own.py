"""The pages of docs/your-own as projects: their code blocks are files, their first command is what runs."""

import importlib
import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from pages import Text
from PIL import Image

from lockstep import ROOT

FOLDER = ROOT / "docs/your-own"
# A callback of the project's: writes down the samples of every step, and kills the last process at one.
WITNESS = """import json, os, signal
from pathlib import Path

import lightning.pytorch as pl


class Witness(pl.Callback):
    def __init__(self, *, kill_at: int | None = None) -> None:
        self.kill_at = kill_at

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        step = trainer.fit_loop.epoch_loop.batch_progress.total.processed
        named = isinstance(batch, dict)
        samples = batch["index"] if named else batch[0].flatten(1).double().square().sum(1)
        with (Path(trainer.default_root_dir) / f"seen-{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "samples": samples.tolist()}) + "\\n")
        if step == self.kill_at and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def samples_seen(run: Path) -> dict[int, list[float]]:
    """Those of each step, of all processes together: their indices, or a number for each."""
    found: dict[int, list[float]] = {}
    for path in run.glob("seen-*.jsonl"):
        for row in map(json.loads, path.read_text().splitlines()):
            found.setdefault(row["step"], []).extend(row["samples"])
    return {step: sorted(samples) for step, samples in found.items()}


# --- the data that a stranger has ---


def write_flowers(root: Path) -> None:
    """30 images of each of three classes, of different sizes, coloured by class."""
    random = np.random.default_rng(0)
    for place, name in enumerate(("daisy", "rose", "tulip")):
        (root / "flowers" / name).mkdir(parents=True)
        for i in range(30):
            pixels = random.integers(0, 120, (20 + i % 3, 24, 3), dtype=np.uint8)
            pixels[..., place] += 100
            Image.fromarray(pixels).save(root / "flowers" / name / f"{i}.png")


def write_weather(root: Path) -> None:
    """90 images with a CSV of their labels: a bright band for each."""
    random, lines = np.random.default_rng(0), ["path,target"]
    (root / "weather/morning").mkdir(parents=True)
    for i in range(90):
        present = random.random(3) < 0.4
        pixels = random.integers(0, 100, (24, 24, 3), dtype=np.uint8)
        for band in np.flatnonzero(present):
            pixels[8 * band : 8 * band + 8] += 120
        Image.fromarray(pixels).save(root / f"weather/morning/{i:04}.png")
        labels = "|".join(label for label, there in zip(("rain", "snow", "wind"), present, strict=True) if there)
        lines.append(f"morning/{i:04}.png,{labels}")
    (root / "weather/labels.csv").write_text("\n".join(lines) + "\n")


def write_houses(root: Path) -> None:
    """600 rows; the price and the rent follow from the rest."""
    random = np.random.default_rng(0)
    rooms, area, age = random.integers(1, 7, 600), random.uniform(20, 160, 600), random.integers(0, 90, 600)
    price = 4 * area + 10 * rooms - 0.01 * age * area + random.normal(0, 10, 600)
    rent = 0.002 * price + np.where(age < 10, 0.4, 0) + random.normal(0, 0.02, 600)
    table = np.stack([rooms, area, age, price, rent], axis=1)
    np.savetxt(root / "houses.csv", table, "%.2f", ",", header="rooms,area,age,price,rent", comments="")


def write_text(root: Path) -> None:
    (root / "README.md").write_text((ROOT / "README.md").read_text())


DATA = {
    "folder": write_flowers,
    "data": write_flowers,
    "multilabel": write_weather,
    "regression": write_houses,
    "language-model": write_text,
}


class Page(Text):
    """A page and what its test adds to the command, to be quick and to leave nothing to chance."""

    def __init__(
        self,
        name: str,
        quick: tuple[str, ...] = (),
        command: int = 0,
        folder: Path = FOLDER,
        *,
        generated: bool = False,
    ) -> None:
        super().__init__(folder / f"{name}.md")
        self.name, self.quick, self.command = name, quick, command  # which of its commands is run
        self.generated = generated  # run in what new.py creates

    @property
    def typed(self) -> list[list[str]]:
        """The arguments of each `uv run train.py` in a console, in the order of the page."""
        console = "\n".join(content for language, content in self.blocks if language == "console")
        return [shlex.split(line) for line in re.findall(r"^\$ uv run train\.py(.*)$", console, re.MULTILINE)]

    @property
    def lines(self) -> int:
        """Of the files, without empty ones and comments."""
        lines = (line.strip() for text in self.files.values() for line in text.splitlines())
        return sum(bool(line) and not line.startswith("#") for line in lines)

    def write(self, root: Path, **more: str) -> Path:
        """Every page's package is called `mywork`, so an earlier one is forgotten, whoever left it."""
        forget()
        DATA.get(self.name, lambda _: None)(root)
        return super().write(root, **{"src/witness/__init__.py": WITNESS, **more})

    def write_in_generated(self, root: Path) -> Path:
        """The same in what new.py creates, which has a task and a network already."""
        new = pytest.importorskip("new")
        new.create(root, "mywork", None, None)
        own = {name: (root / name).read_text() for name in ("pyproject.toml", "train.py")}
        return self.write(root, **own)


def forget() -> None:
    """The next page has modules of the same names, in another folder."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("mywork", "witness")]:
        del sys.modules[name]
    sys.path[:] = [path for path in sys.path if not (Path(path) / "mywork").is_dir()]
    importlib.invalidate_caches()
