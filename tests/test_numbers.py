"""What a run says of its numbers: predictions with all their digits, values that are none, columns that are taken, what is drawn, and
what its checkpoints keep of a module's hooks. In this process, but for runs of two."""

import csv
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import thin_project
import torch
from in_process import state
from torch import nn

import lockstep
from lockstep.errors import LossNotFinite, RunFailed, UserError
from lockstep.extras.page import headline_parts
from lockstep.reporting.report import primary_metric

OWN = "data=own data._target_=houses.Houses loader.batch_size=12 model=own model._target_=houses.Dense"
HOUSES = f"{OWN} optim.lr=1e-2 trainer.accelerator=cpu trainer.max_epochs=2 trainer.log_every_n_steps=1".split()
REGRESSION = ["task=regression", *HOUSES]
TWO = ["trainer.devices=2"]
slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def place(tmp_path) -> Iterator[Path]:
    with thin_project.entered(tmp_path / "project", "houses", **thin_project.package("houses")) as root:
        yield root
    sys.modules.pop("houses", None)


def module(*more: str) -> dict:
    own = "task=lightning_module task._target_=houses.Module task.monitor=val_f1 data=own data._target_=houses.Houses"
    rest = [each for each in HOUSES if not each.startswith(("model", "optim", "data=", "data._"))]
    return lockstep.train([*own.split(), *rest, "run=a", *more])


def table() -> list[dict[str, str]]:
    lockstep.predict(["run=a", "input=test", "output=p.csv", "trainer.accelerator=cpu"])
    with Path("p.csv").open() as file:
        return list(csv.DictReader(file))


# --- Digits of a regression ---


@pytest.mark.parametrize("more", [
    ["trainer.precision=bf16-mixed"],
    pytest.param(["trainer.precision=bf16-mixed", "compile=true"], marks=slow),
    pytest.param(["trainer.precision=bf16-mixed", "strategy=ddp", *TWO], marks=slow),
    pytest.param(["trainer.precision=bf16-mixed", "strategy=fsdp", *TWO], marks=slow),
])  # fmt: skip
def test_predictions_near_1500_have_their_digits_in_bf16(more, forked, monkeypatch):
    compiled = nn.Module.compile
    monkeypatch.setattr(
        nn.Module, "compile", lambda self: compiled(self, backend="eager", fullgraph=True)
    )  # no compiler
    lockstep.train([*REGRESSION, "run=a", *more])
    prices = [float(row["price"]) for row in table()]
    assert len(prices) == 30 and all(price % 4 for price in prices)
    assert len(set(prices)) > 20 and all(1400 < price < 1600 for price in prices)
    saved = state("a/checkpoints/last.ckpt")["state_dict"]
    assert all(value.dtype == torch.float32 for value in saved.values())
    assert [name.rpartition(".")[2] for name in saved] == ["weight", "bias"] * 2


@pytest.mark.parametrize(("network", "warns"), [("Dense", False), ("HeadFirst", True)])
def test_a_head_that_is_not_the_last_layer_is_told(network, warns):
    lockstep.train([*REGRESSION, "run=a", f"model._target_=houses.{network}", "trainer.precision=bf16-mixed"])
    told = "the last layer of HeadFirst, Linear, does not compute its outputs"
    assert (told in Path("runs/a/train.log").read_text()) is warns


def test_in_bf16_throughout_the_first_lines_say_what_a_number_is_worth():
    lockstep.train([*REGRESSION, "run=a", "trainer.precision=bf16-true"])
    assert "bf16-true rounds each number by up to 4e-03 of it" in Path("runs/a/train.log").read_text()


# --- Values that are no numbers ---


def test_a_loss_that_is_no_number_names_its_samples():
    with pytest.raises(LossNotFinite, match=r"in a batch of the training samples [\d, ]*\b9\b"):
        lockstep.train([*REGRESSION, "run=a", "loader.val_fraction=0.1", "+data.odd=[input,9,-inf]"])
    assert lockstep.load_report("a")["status"] == "diverged"


# --- Columns of a table of predictions ---


@pytest.mark.parametrize("more", [["+data.target=error"], ["task._target_=houses.Renamed"]])
def test_a_column_of_locksteps_own_is_refused(more):
    lockstep.train([*REGRESSION, "run=a", *more])
    with pytest.raises(
        UserError,
        match=r"the predictions have a column error, .* Reserved names: index, path, row, error and target/",
    ):
        lockstep.predict(["run=a", "input=test", "output=a.csv", "trainer.accelerator=cpu"])
    assert not Path("a.csv").exists()


@pytest.mark.parametrize("more", [[], pytest.param(["strategy=ddp", *TWO], marks=slow)])
def test_a_modules_column_of_that_name_is_refused_at_the_first_batch(more, forked, capfd):
    module("+task.column=error")
    with pytest.raises((UserError, RunFailed)) as refused:
        lockstep.predict(["run=a", "input=test", "output=p.csv", "trainer.accelerator=cpu", *more])
    told = "the predictions have a column error, a name that Lockstep uses in tables of predictions"
    assert told in str(refused.value) + capfd.readouterr().err
    assert [path.name for path in Path().glob("p.csv*")] == []


# --- What is drawn, and the headline ---


def test_all_that_a_module_logs_is_drawn_and_the_headline_is_what_is_monitored():
    report = module("trainer.precision=auto")
    assert report["precision"] == "32-true"
    page = Path("runs/a/report.html").read_text()
    titles = re.findall("<h3>([^<]+)<", page)
    assert titles[:5] == ["loss_a", "loss", "f1", "return", "Speed"]
    assert not {"epoch", "test_loss", "test_f1"} & set(titles)
    with_headline = headline_parts(None, report)
    assert (with_headline["name"], with_headline["number"]) == ("Test_f1", "0.7500")


@pytest.mark.parametrize(("monitor", "name"), [
    ("val_f1", "test_f1"), ("valid/f1", "test_f1"), ("f1", "test_f1"), ("val_mae", "test_f1"), (None, "test_f1"),
    ("auc_val", "auc test"), ("train_loss_a", "test_f1"),
])  # fmt: skip
def test_the_headline_is_the_test_metric_of_what_is_monitored_or_the_first_that_is_no_loss(monitor, name):
    tested = ["test_loss", "test_loss_a", "test_f1", "raw/test_f1", "auc/test"]
    report = {"status": "done", "monitor": monitor, "evaluated": " | ".join(tested), **dict.fromkeys(tested, 0.5)}
    assert primary_metric(report)[0] == name


# --- Checkpoints of a module's own callbacks and hooks ---


@pytest.mark.parametrize("folder", ["", "deep/er/folder"])
def test_a_model_checkpoint_of_the_modules_own_saves(folder):
    module(f"+task.folder='{folder}'")
    there = Path(folder or "runs/a/own-checkpoints")
    assert (there / "last.ckpt").is_file() and len(list(there.glob("epoch=*.ckpt"))) == 1
    assert Path("runs/a/checkpoints/last.ckpt").is_file()


@pytest.mark.parametrize("more", [[], pytest.param(["strategy=ddp", *TWO], marks=slow)])
def test_hyperparameters_that_a_hook_writes_are_left_out_if_they_cannot_be_loaded(more, forked):
    assert module("+task.hook=hyperparameters", *more)["status"] == "done"
    assert state("a/checkpoints/last.ckpt")["hyper_parameters"] == {"width": 3}
    log = Path("runs/a/train.log").read_text()
    assert log.count("checkpoints omit hyper_parameters.loss: only plain values are saved") == 1


@pytest.mark.parametrize(("hook", "more"), [
    ("all", []), *(pytest.param(hook, ["strategy=ddp", *TWO], marks=slow) for hook in ("all", "rank0")),
])  # fmt: skip
def test_a_state_that_cannot_be_loaded_is_left_out(hook, more, forked):
    assert module(f"+task.hook={hook}", *more)["status"] == "done"
    assert "mine" not in state("a/checkpoints/last.ckpt")
    assert Path("runs/a/train.log").read_text().count("checkpoints omit mine: only plain values are saved") == 1
