"""Lockstep's guarantees as checks for a project's tests, on the project's data, task and model."""

import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lockstep.config.checks import resolve
from lockstep.launch import cli, local
from lockstep.machine.system import kill_this_process

STEPS = 8
QUICK = [
    "trainer.accelerator=cpu", "trainer.precision=32-true", "trainer.max_epochs=null", f"trainer.max_steps={STEPS}",
    "trainer.log_every_n_steps=1", "trainer.enable_progress_bar=false", "loader.batch_size=8", "loader.eval_batch_size=16",
    "optim=sgd", "optim.lr=0.01", "checkpoint.every_n_steps=2",
]  # fmt: skip
TWO = ["strategy=ddp", "trainer.devices=2"]
TOLERANCE = 1e-5  # relative difference of all weights as one vector: rounding after 8 steps of SGD
LIMIT_S = 600


@dataclass
class Project:
    """Short runs of a project in fp32: eight steps of eight samples. Select small data with `overrides`."""

    runs_dir: Path
    overrides: list[str]

    @cached_property
    def quick(self) -> list[str]:
        """QUICK, without keys of groups that the project does not use: a LightningModule has its own optimizers."""
        cfg = resolve(self.overrides)
        unused = [group for group in ("optim", "loader") if not getattr(cfg, group)]
        return [override for override in QUICK if not override.startswith(tuple(unused))]

    def command(self, run: str, *extra: str) -> list[str]:
        return [f"run={run}", f"runs_dir={self.runs_dir}", *self.quick, *self.overrides, *extra]

    @cached_property
    def single(self) -> dict[str, Any]:
        return cli.call("train", self.command("single"))


def assert_same_result(project: Project) -> None:
    """One process and two reach the same weights up to rounding, and count every test sample once."""
    import torch

    from lockstep.checkpoints.weights import read

    reports = [project.single, cli.call("train", project.command("pair", *TWO))]
    assert reports[0]["train/steps"] == reports[1]["train/steps"] > 0
    # a LightningModule counts its samples itself
    assert [report.get("test/count", reports[0]["data/test"]) for report in reports] == [reports[0]["data/test"]] * 2
    states = [read(project.runs_dir / r["run"] / "checkpoints" / "last.ckpt").state_dict for r in reports]
    one, two = (torch.cat([t.double().flatten() for t in state.values()]) for state in states)
    difference = float((two - one).norm() / one.norm())
    assert difference < TOLERANCE, f"the weights differ by {difference:.1e} of their norm"


class KillAt(pl.Callback):
    """Kills its process with SIGKILL after a step, once a checkpoint exists."""

    def __init__(self, *, step: int | None) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.step is not None and trainer.global_step >= self.step:  # several optimizers count several steps a batch
            while not (Path(trainer.default_root_dir) / "checkpoints" / "last.ckpt").exists():  # it is being written
                time.sleep(0.01)
            kill_this_process()


def assert_survives_a_kill(project: Project) -> None:
    """A run that is killed during training and rerun is bit-identical to an uninterrupted run."""
    from lockstep.extras import comparison

    report = project.single
    killed = project.command("killed", "resume=auto", "+callbacks.kill._target_=lockstep.extras.testing.KillAt")
    command = [sys.executable, str(local.script("train")), *killed, f"+callbacks.kill.step={STEPS - 3}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode in (-9, 9), done.stdout + done.stderr
    assert cli.call("train", [*killed, "+callbacks.kill.step=null"])["resumed_from"]
    runs = [comparison.find(name, project.runs_dir) for name in (report["run"], "killed")]
    differences = comparison.compare(*runs, exact=True, tolerance=0)
    assert {name: differences[name] for name in ("log", "metrics", "weights") if differences[name]} == {}


def assert_evaluates_alike(project: Project) -> None:
    """An evaluation of the checkpoint repeats the metrics of the run's report."""
    report = project.single
    again = cli.call("eval", ["run=single", f"runs_dir={project.runs_dir}", "trainer.accelerator=cpu"])
    for name in [name for name in report if name.startswith("test/")]:
        assert abs(again[name] - report[name]) <= 1e-6 * abs(report[name]), f"{name}: {again[name]} | {report[name]}"
