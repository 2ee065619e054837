"""The comparison of ways on records made by hand, the commands of the ways, and what a check prints if its command fails."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import check
import pytest
import thin_project
import torch

from lockstep.config.checks import resolve
from lockstep.errors import UserError
from lockstep.extras.check import compare
from lockstep.extras.check.ways import Check, Way, ways
from lockstep.extras.comparison import sketch
from lockstep.machine import system

FEW = ["data.source=embedded", "data.image_size=12", "loader.limit_train=64", "loader.batch_size=16"]


def outcome(steps: int = 3, tested: dict | None = None, **buffers: torch.Tensor) -> SimpleNamespace:
    """As `Outcome`, of a module with one weight."""
    every = {}
    for number in range(1, steps + 1):
        weight, gradient = torch.full((4,), 1.0 + number, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
        end = {"weight": sketch(weight, 1)} | {name: sketch(buffer, 1) for name, buffer in buffers.items()}
        step = {"begin": end, "gradients": {"weight": sketch(gradient, 1)}, "end": end}
        every[number] = {**step, "samples": {0: []}, "calls": {0: []}, "loss": {0: 1.0}}
    places = {"step": "Mine", "loss": "Mine", "samples": "Data", "optimizer": "SGD"}
    rank = {"steps": every, "precision": "64-true", "places": places, "of_steps": [], "of_rank_0": []}
    made = SimpleNamespace(ranks=[rank], steps=every, rows={}, tested={"test/acc": 0.5} if tested is None else tested)
    made.in_order = lambda key, number: [*every[number][key].values()]
    return made


def changed(steps: dict, key: str, factor: float, number: int) -> None:
    """Changes the weight's gradient, or the weight itself, at a step, and the weight after the last step by rounding."""
    for where, by in ((steps[3]["end"], 1 + 1e-15), (steps[number][key], factor)):
        record = where["weight"]
        where["weight"] = {**record, "sums": [sums * by for sums in record["sums"]], "bits": f"{by}"}


@pytest.mark.parametrize(("key", "factor", "number", "verdict"), [
    ("gradients", 1 + 1e-14, 1, "rounding"), ("gradients", 1.5, 1, "differs"), ("gradients", 1.5, 3, "differs"),
    ("gradients", 1 + 1e-8, 3, "rounding"),  # steps amplify rounding
    ("end", 1 + 1e-14, 3, "rounding"), ("end", 1 + 1e-6, 3, "differs"),
])  # fmt: skip
@pytest.mark.parametrize(
    "buffer", [torch.full((8, 8), -torch.inf).triu(1), torch.arange(1e5, dtype=torch.float64)], ids=["mask", "large"]
)
def test_a_constant_buffer_hides_no_difference_at_any_step(buffer, key, factor, number, verdict):
    ref, other = outcome(buffer=buffer), outcome(buffer=buffer)
    assert compare.difference("ddp", ref, other)["verdict"] == "same bits"
    changed(other.steps, key, factor, number)
    found = compare.difference("ddp", ref, other)
    assert found["verdict"] == verdict
    if verdict == "differs":
        assert (found["step"], "weight" in found["note"]) == (number, True)


@pytest.mark.parametrize(
    ("precision", "number", "verdict"),
    [("32-true", 8, "rounding"), ("32-true", 5, "differs"), ("64-true", 8, "differs")],
)
def test_in_float32_only_the_first_steps_count(precision, number, verdict):
    ref, other = outcome(steps=9), outcome(steps=9)
    ref.ranks[0]["precision"] = precision
    changed(other.steps, "gradients", 1.5, number)
    changed(other.steps, "end", 1.01, 9)
    assert compare.difference("fsdp", ref, other)["verdict"] == verdict


@pytest.mark.parametrize(("here", "there", "verdict"), [
    ({"a": 1.0}, {"a": 1.0}, "same bits"), ({"a": 1.0}, {"a": 1.1}, "differs"), ({"a": 1.0}, {"a (rank 0 only)": 1.0}, "not run"),
    ({}, {}, "not run"),
])  # fmt: skip
def test_an_evaluation_is_compared_by_its_metrics(here, there, verdict):
    other = outcome(tested=there)
    other.ranks = []
    assert compare.difference("evaluation", outcome(tested=here), other)["verdict"] == verdict


def test_ways_without_a_common_step_have_failed():
    other = outcome()
    other.steps = {7: other.steps[1]}
    assert compare.difference("resumed", outcome(), other)["verdict"] == "failed"


def test_a_way_drops_the_keys_that_it_sets_and_those_of_loggers_and_strategies(tmp_path):
    typed = [
        "logger=wandb", "logger.wandb.mode=offline", "++strategy.timeout_s=7", "trainer.enable_checkpointing=false",
        "trainer.devices=2", "strategy=fsdp", "optim.lr=0.1",
    ]  # fmt: skip
    cfg = resolve(["data.source=embedded"])
    made = Check(tmp_path, typed, cfg, None, 0, 5)
    for way in ways(cfg, "64-true"):
        command = made.command(way)
        assert not {*typed[:-1]} & {*command} - {"trainer.devices=2", "strategy=fsdp"}
        if way.name != "evaluation on two processes":
            assert resolve(command).optim.get("lr") == 0.1
            assert resolve(command).trainer.enable_checkpointing


def test_no_more_processes_run_at_once_than_fit_into_memory(tmp_path, monkeypatch):
    started: list = []

    def start(*_) -> list:
        assert not any(each.is_alive() for each in started)
        started.append(multiprocessing.Process(target=int))
        started[-1].start()
        return started[-1:]

    monkeypatch.setattr(Check, "processes", start)
    Check(tmp_path, [], None, None, 0, 5, peak_bytes=system.memory_bytes()).run([Way("a"), Way("b")])


BUGGY = """import lightning.pytorch as pl
import torch


class Fails(pl.LightningModule):
    def training_step(self, batch, batch_idx):
        raise RuntimeError("my own bug")

    def configure_optimizers(self):
        self.weight = torch.nn.Parameter(torch.ones(1))
        return torch.optim.SGD([self.weight])

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.arange(8.0), batch_size=2)
"""


def lockstep_check(folder: Path, *overrides: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "lockstep", "check", *overrides, f"runs_dir={folder / 'runs'}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env={**os.environ, "TMPDIR": str(folder)}, **pipes)


@pytest.mark.slow
def test_a_command_that_fails_prints_its_traceback(tmp_path):
    module = {"src/mine/__init__.py": BUGGY}
    with thin_project.entered(tmp_path / "project", "mine", **module) as root:
        process = lockstep_check(root, "task=lightning_module", "task._target_=mine.Fails", "data=none")
        printed, errors = process.communicate()
    assert (process.returncode, printed) == (1, "")
    assert "RuntimeError: my own bug" in errors


@pytest.mark.slow
def test_sigterm_ends_every_process_and_removes_the_folder(tmp_path):
    with thin_project.entered(tmp_path / "project", "mine") as root:
        process = lockstep_check(root, "steps=1000", *FEW)
        while not (folders := [*root.glob("lockstep-check-*/*/runs/*/metrics.csv")]):
            assert process.poll() is None, process.communicate()
        os.kill(process.pid, signal.SIGTERM)
        process.communicate()  # ends only when no process has its pipes
    assert folders and process.returncode == 143
    assert not [*root.glob("lockstep-check-*")]


@pytest.mark.parametrize(("typed", "told"), [
    (["from="], "from= needs a run"), (["resume=auto"], "use from="), (["steps=1"], "expected a number from 2"),
    (["model.fc=[64]"], "model.fc"),
])  # fmt: skip
def test_invalid_commands_are_refused(typed, told, monkeypatch):
    monkeypatch.setattr(check.project, "enter", lambda _: None)  # it would last
    with pytest.raises(UserError, match=told):
        check.main(typed)


def test_a_check_from_a_run_is_not_quoted(monkeypatch, capsys):
    from lockstep.extras import check as package

    result = package.Result([compare.found("ddp on two processes", "same bits")], [], [301, 302], "cpu", "64-true", {})
    monkeypatch.setattr(package, "measure", lambda *_, **__: result)
    monkeypatch.setattr(check.project, "enter", lambda _: None)
    monkeypatch.setattr(check, "store", lambda _: pytest.fail("it was stored"))
    assert check.main(["from=first", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == [301, 302]
