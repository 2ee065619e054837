"""Runs that earlier versions left, as they are stored in tests/stored: they go on, are evaluated and load."""

# stored/0.2/task was killed after step 17 of 24, between two rows of the log; its last checkpoint has 15 steps. The others ended after step 15.
# All were made at 5f859c29, the last commit of 0.2:
#   python train.py run=task <OPTIONS>
#   python train.py run=sharded <OPTIONS> <SHORT> trainer.max_steps=15 strategy=fsdp trainer.devices=2 checkpoint.sharded=true
#   python train.py -m run=sweep <OPTIONS> <SHORT> trainer.max_steps=15 optim.lr=0.01,0.03      without the checkpoint of the first job
#   python train.py run=module <MODULE> trainer.max_steps=15
# stored/0.1/task is of 0048f8e5, whose config had the keys of the loader in `data`.

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch

import lockstep
from lockstep.errors import UserError

STORED = Path(__file__).parent / "stored"
SMALL = "trainer.accelerator=cpu data.source=embedded data.image_size=6 loader.batch_size=16 loader.limit_train=192 optim=sgd optim.lr=0.02"
OPTIONS = f"{SMALL} trainer.max_epochs=2 trainer.log_every_n_steps=4 trainer.precision=32-true checkpoint.every_n_steps=5 task=classification augment=[shift] augment.shift.pixels=1".split()
TRAINER = "trainer.accelerator=cpu trainer.precision=32-true trainer.log_every_n_steps=4 checkpoint.every_n_steps=5"
MODULE = f"{TRAINER} task=lightning_module data=none task._target_=lightning.pytorch.demos.boring_classes.BoringModel".split()
PROJECT = '[project]\nname = "stored"\nversion = "0"\n\n[tool.lockstep]\npackages = ["lightning"]\n'
COLUMNS = "step", "train/loss", "train/lr", "val/loss", "val/acc", "test/loss", "test/acc"


@pytest.fixture
def stored(tmp_path, monkeypatch) -> Path:
    """A copy of the stored runs, in the folder that this process works in."""
    monkeypatch.chdir(tmp_path)
    Path("pyproject.toml").write_text(PROJECT)
    shutil.copytree(STORED / "0.2", "runs")
    return tmp_path / "runs"


def rows(run: Path) -> list[dict[str, float]]:
    with (run / "metrics.csv").open(newline="") as file:
        return [{name: float(row[name]) for name in COLUMNS if row.get(name)} for row in csv.DictReader(file)]


@pytest.mark.parametrize(
    "run", ["task", *(pytest.param(run, marks=pytest.mark.slow) for run in ("sweep/1", "sharded"))]
)
def test_a_stored_run_is_not_resumed_but_its_weights_load(run, stored, forked):
    """It would go on with other random numbers."""
    alone = ["strategy=single", "trainer.devices=1", "checkpoint.sharded=false"]
    with pytest.raises(UserError, match=r"saved by an earlier version of Lockstep.*lockstep==0\.2.*init_from="):
        lockstep.train([f"run={run}", "resume=auto", "trainer.max_steps=24", *alone])
    found = lockstep.evaluate([f"run={run}", "trainer.accelerator=cpu", "strategy=single", "trainer.devices=1"])
    assert found["test/count"] == 1000
    new = lockstep.train(["run=new", *OPTIONS, f"init_from={run}", "trainer.max_steps=1", "optim.lr=0"])
    assert new["test/acc"] == found["test/acc"]


def test_a_stored_run_is_evaluated_predicts_and_loads(stored):
    found = lockstep.evaluate(["run=task", "trainer.accelerator=cpu"])
    assert found["test/count"] == 1000 and 0 <= found["test/acc"] <= 1
    assert lockstep.predict(["run=task", "input=test", "trainer.accelerator=cpu"])["count"] == 1000
    assert lockstep.load_model("task")(torch.zeros(2, 1, 6, 6)).shape == (2, 10)
    assert lockstep.load_report("task")["status"] == json.loads((stored / "task/report.json").read_text())["status"]


@pytest.mark.filterwarnings("ignore:You passed in a `.*_dataloader` but have no", "ignore:.*sync_dist=True")
def test_a_stored_run_of_a_lightning_module_is_evaluated_and_its_weights_load(stored):
    with pytest.raises(UserError, match=r"saved by an earlier version of Lockstep.*lockstep==0\.2.*init_from="):
        lockstep.train(["run=module", "resume=auto", "trainer.max_steps=24"])
    assert lockstep.evaluate(["run=module", "trainer.accelerator=cpu"])["run"] == "module"
    new = lockstep.train(["run=new", *MODULE, "init_from=module", "trainer.max_steps=1"])
    assert new["status"] == "done"
    assert lockstep.load_model("module").state_dict().keys() == lockstep.load_model("new").state_dict().keys()


def test_of_a_run_of_0_1_the_weights_load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(STORED / "0.1", "runs")
    checkpoint = "runs/task/checkpoints/last.ckpt"
    with pytest.raises(UserError, match=r"saved by an earlier version of Lockstep.*lockstep==0\.2"):
        lockstep.train(["run=task", "resume=auto"])
    for call, given in (
        (lockstep.evaluate, ["run=task"]),
        (lockstep.predict, [f"checkpoint={checkpoint}", "input=test"]),
    ):
        with pytest.raises(
            UserError, match=r"made by Lockstep 0\.1\. To continue, .* install lockstep==0\.2\. Its weights load"
        ):
            call(given)
    assert lockstep.load_model("task")(torch.zeros(2, 1, 6, 6)).shape == (2, 10)
    report = lockstep.train(["run=next", *OPTIONS, f"init_from={checkpoint}", "trainer.max_steps=1"])
    assert report["status"] == "done"


def test_the_table_of_a_stored_sweep(stored, capsys):
    assert [row["status"] for row in (lockstep.load_report(f"sweep/{job}") for job in (0, 1))] == ["done", "done"]
    assert lockstep.load_report("sweep/0").settings["optim.lr"] == 0.01
