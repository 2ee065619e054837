"""Data sets of the user's that draw random numbers, or that are ready only after `prepare`, are the same in each process and each start."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import thin_project

DATA = """
import torch
from lockstep import Arrays, DataSet

class Drawn(DataSet):
    def __init__(self, *, fixed: bool = False, late: str = "") -> None:
        super().__init__()
        self.metadata = {"classes": ["a", "b"]}
        self.fixed, self.late, self.shift = fixed, late, torch.randn(1).item()
        if not late:
            self.draw()

    def draw(self):
        if self.fixed:
            torch.manual_seed(0)
        parts = 0.01 * self.shift + torch.randn(192, 1, 8, 8).numpy()
        self.train = Arrays(input=parts[:160], target=(parts[:160].mean((1, 2, 3)) > 0).astype("int64"))
        self.test = Arrays(input=parts[160:], target=(parts[160:].mean((1, 2, 3)) > 0).astype("int64"))

    def prepare(self):
        if self.late == "prepare":
            self.draw()

    def open_part(self, part):
        if self.late == "open_part" and part == "train":
            self.draw()
        return self.__dict__.get(part)
"""
OVERRIDES = ["data=own", "data._target_=drawn.Drawn", "model=own", "model._target_=project.model.BasicNet", "+model.image_size=8",
             "trainer.accelerator=cpu", "trainer.max_steps=2", "loader.batch_size=16", "trainer.precision=32-true", "+model.dropout_fc=0",
             "+model.dropout_conv=0"]  # fmt: skip


def run(root: Path, name: str, *more: str) -> dict:
    done = subprocess.run(
        [sys.executable, "train.py", f"run={name}", *OVERRIDES, *more],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((root / f"runs/{name}/report.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("option", ["fixed=true", "fixed=false", "late=prepare", "late=open_part"])
def test_one_process_and_two_and_another_start_have_the_same_data_and_first_weights(option, tmp_path):
    root = thin_project.write(tmp_path / "p", **{"src/drawn.py": DATA})
    one, again = (run(root, name, f"+data.{option}") for name in ("one", "again"))
    two = run(root, "two", f"+data.{option}", "strategy=ddp", "trainer.devices=2")
    assert one["data/sha256"] == again["data/sha256"] == two["data/sha256"]
    assert one["test/loss"] == again["test/loss"] == pytest.approx(two["test/loss"], rel=1e-5)


@pytest.mark.slow
def test_what_lightning_rejects_in_fit_is_one_line_and_leaves_no_folder(forked_command):
    done = forked_command(
        "train.py", "run=a", "trainer.accelerator=cpu", "trainer.limit_val_batches=0.0001", timeout_s=120
    )
    assert (done.code, "error: You requested to check 0.0001" in done.err) == (2, True), done
    assert not (forked_command.folder / "runs/a").exists()
