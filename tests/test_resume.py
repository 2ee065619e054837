"""Invariant 3 on one process: a run that was cut off goes on where it was, whatever cut it off. tests/test_kills.py kills."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import yaml
from in_process import Crash, end_before_the_test, logged_steps, options, report, rows, same, state

import lockstep
from lockstep.callbacks import FiniteLoss
from lockstep.checkpoints.saving import LastCheckpoint
from lockstep.config.compose import compose_config
from lockstep.config.draft import Draft
from lockstep.config.run_config import CLOSED
from lockstep.errors import Preempted, UserError
from lockstep.kit.task import Task
from lockstep.launch import resuming
from lockstep.launch.exits import exit_code
from lockstep.machine import process as machine_signals
from lockstep.run import RunFolder

pytestmark = pytest.mark.xdist_group("resume")
TWO_EPOCHS = ["trainer.log_every_n_steps=1", "schedule=cosine", "trainer.max_epochs=2", "callbacks=[default,ema]"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, mnist, cache) -> Path:
    """The directory of a run of two epochs that nothing cut off."""
    folder = tmp_path_factory.mktemp("whole")
    lockstep.train([*options(mnist, cache), *TWO_EPOCHS, f"runs_dir={folder}", "run=whole"])
    return folder / "whole"


@pytest.mark.parametrize(
    ("warning", "status", "code", "saved_at"),
    [
        (signal.SIGTERM, "preempted", 1, 11),  # before the last batch of an epoch
        pytest.param(signal.SIGINT, "interrupted", 130, 9, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR2, "preempted", 1, 12, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, "preempted", 1, 17, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_was_warned_and_then_crashed_ends_bit_identical(
    train, crash_at, whole, warning, status, code, saved_at, monkeypatch
):
    """It saves at the next step when it is warned, and goes on from there."""

    def warn(self, trainer, *_) -> None:
        if trainer.global_step == 7:
            os.kill(os.getpid(), warning)

    typed = ["run=parts", *TWO_EPOCHS, f"checkpoint.every_n_steps={saved_at}"]
    default = signal.default_int_handler if warning is signal.SIGINT else signal.SIG_DFL
    before = signal.signal(warning, default)  # the tests may run under nohup
    try:
        with monkeypatch.context() as warned:
            warned.setattr(LastCheckpoint, "on_train_batch_end", warn)
            with pytest.raises(Preempted, match=rf"ended by {warning.name} after 7 steps; .* resume=auto") as error:
                train(*typed)
        assert signal.getsignal(warning) is default
    finally:
        signal.signal(warning, before)
    assert (error.value.exit_code, report("parts")["status"]) == (code, status)
    assert state("parts/checkpoints/last.ckpt")["global_step"] == 7
    crash_at(saved_at + 1)
    with pytest.raises(Crash):
        train(*typed, "resume=auto")
    assert report("parts")["status"] == "failed"
    assert state("parts/checkpoints/last.ckpt")["global_step"] == saved_at
    crash_at(-1)
    train(*typed, "resume=auto")
    a, b = state(whole / "checkpoints/last.ckpt"), state("parts/checkpoints/last.ckpt")
    assert same(a["state_dict"], b["state_dict"])
    moments = [[s["exp_avg_sq"].sum() for s in c["optimizer_states"][0]["state"].values()] for c in (a, b)]
    assert moments[0] == moments[1]
    assert a["lr_schedulers"] == b["lr_schedulers"]
    assert rows("parts") == rows(whole)
    for figure in ("test/loss", "test/acc", "val/acc", "checkpoint", "train/steps"):
        assert report("parts")[figure] == report(whole)[figure], figure


def test_a_run_that_is_warned_while_it_is_tested_ends_and_is_tested_again(train, monkeypatch):
    """`trainer.max_steps` ends this run within its first epoch, so it is validated once training is over."""
    original = Task.on_test_batch_start

    def warned(self, *args):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *args)

    typed = ["trainer.max_steps=4", "trainer.log_every_n_steps=10", "loader.eval_batch_size=50", "run=parts"]
    with monkeypatch.context() as patched, pytest.raises(Preempted, match="ended by SIGTERM"):
        patched.setattr(Task, "on_test_batch_start", warned)
        train(*typed)
    (validated,) = rows("parts")
    train(*typed, "resume=auto")
    first, tested = rows("parts")
    assert float(validated["val/acc"]) == float(first["val/acc"]) == report("parts")["val/acc"]
    assert tested["test/acc"] and not tested["val/acc"]
    again = lockstep.evaluate(["run=parts", "trainer.accelerator=cpu"])
    assert again["test/loss"] == pytest.approx(report("parts")["test/loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("hook", "signals", "code", "status"),
    [
        ("setup", [signal.SIGTERM], 1, None),  # before the first step: there is no folder
        pytest.param("on_validation_end", [signal.SIGTERM], 1, "preempted", marks=pytest.mark.slow),
        ("on_train_batch_end", [signal.SIGINT] * 2, 130, "interrupted"),
    ],
)
def test_sigterm_ends_at_any_moment_and_ctrl_c_twice_at_once(hook, signals, code, status, train, monkeypatch):
    left = list(signals)

    def warn(*_, **__) -> None:
        while left:
            os.kill(os.getpid(), left.pop())
        assert signals == [signal.SIGTERM], "not reached"

    monkeypatch.setattr(FiniteLoss, hook, warn)
    assert exit_code(lambda: train("run=parts", "trainer.max_epochs=2", "trainer.num_sanity_val_steps=0")) == code
    assert (report("parts")["status"] if Path("runs/parts").exists() else None) == status
    assert machine_signals.received == signals  # launchers pass on both


def test_a_resumed_run_keeps_its_config_and_takes_what_is_said_anew(train, mnist, capsys):
    """A number is a name of a run, too."""
    train("run=0", "optim=sgd", "optim.lr=0.01", "model.dropout_fc=0.1", "debug=one_batch")
    lockstep.train(["resume=0"])
    assert "runs/0 is already finished after 1 step" in capsys.readouterr().out
    lockstep.train(["resume=0", "trainer.max_epochs=2"])
    saved = Draft.of_run(RunFolder("runs/0"))
    found = [saved.get(key) for key in ("optim.lr", "model.dropout_fc", "trainer.max_epochs", "data.root", "resume")]
    assert found == [0.01, 0.1, 2, str(mnist), None]


def test_a_command_that_removes_a_key_can_be_typed_again(train, crash_at):
    typed = ["run=a", "augment=light", "~augment.flip", "~callbacks.throughput", "checkpoint.every_n_steps=1"]
    crash_at(3)
    with pytest.raises(Crash):
        train(*typed)
    crash_at(-1)
    train(*typed, "resume=auto")
    saved = Draft.of_run(RunFolder("runs/a"))
    assert (list(saved.node("augment")), saved.has("callbacks.throughput")) == (["shift"], False)


def test_a_callback_that_is_added_to_a_run_watches_the_runs_own_metric():
    saved = Draft(compose_config("train", ["checkpoint.monitor=val/loss", "checkpoint.mode=min"]))
    added = ["callbacks=[default,early_stopping]"]
    merged = resuming.merge_saved(saved, Draft(compose_config("train", added)), added)
    assert [merged.get(f"callbacks.early_stopping.{key}") for key in ("monitor", "mode")] == ["val/loss", "min"]


def test_a_run_older_than_a_key_takes_its_default(train, run_a):
    """As after a fork has added a key of its own."""
    config = Path("runs/a/config.yaml")
    saved = yaml.safe_load(config.read_text())
    for group in CLOSED:
        saved[group].clear()
    saved["trainer"]["accelerator"] = "cpu"
    saved["loader"]["batch_size"] = 48  # which may not change
    config.write_text(yaml.safe_dump(saved))
    assert lockstep.evaluate(["run=a", "trainer.accelerator=cpu"])["test/acc"] == run_a["test/acc"]
    assert train("resume=a", "trainer.max_epochs=2")["train/steps"] == 24


@pytest.mark.slow
def test_a_recipe_can_be_typed_again_and_its_seed_is_drawn_once(train):
    common = ["run=a", "experiment=mnist_basic_net", "seed=null", "resume=auto"]
    first = train(*common, "trainer.max_epochs=1")
    again = train(*common, "trainer.max_epochs=2")
    assert (first["train/steps"], again["train/steps"]) == (12, 24)
    assert again["resumed_from"] == "runs/a/checkpoints/last.ckpt"
    assert again["seed"] == first["seed"]


def test_a_recipe_that_is_typed_again_keeps_the_normalisation_of_the_run(run_a):
    """A newer timm may say something else of the network."""
    own = ["experiment=mnist_basic_net", "seed=0", "data.mean=model", "data.std=model", "loader.batch_size=48"]
    typed = ["run=a", "resume=auto", *own]
    draft = resuming.for_training(Draft(compose_config("train", typed)), typed)
    assert (draft.get("data.mean"), draft.get("data.std")) == ([0.1307], [0.3081])


@pytest.mark.slow
def test_a_run_from_weights_can_be_typed_again(train, run_a, crash_at, capsys):
    best = state(f"a/{run_a['checkpoint']}")
    common = ["init_from=a", "optim=sgd", "optim.lr=0", "trainer.max_epochs=2", "trainer.log_every_n_steps=1"]
    train("run=whole", *common)
    for step in (3, 14):  # before and after its first checkpoint
        crash_at(step)
        capsys.readouterr()
        with pytest.raises(Crash):
            train("run=x", "resume=auto", *common)
        told = "runs/x has no checkpoint yet: training starts from step 0."
        assert (told in capsys.readouterr().err) == (step == 14)
    assert report("x")["resumed_from"] is None
    crash_at(-1)
    assert same(state("x/checkpoints/last.ckpt")["state_dict"], best["state_dict"])
    shutil.rmtree("runs/a")  # what it began from is of no effect any more
    done = train("run=x", "resume=auto", *common)
    assert done["resumed_from"] == "runs/x/checkpoints/last.ckpt"
    assert rows("x") == rows("whole")
    config = Path("runs/whole/config.yaml").read_text()
    assert Path("runs/x/config.yaml").read_text() == config.replace("run: whole", "run: x")


@pytest.mark.slow
def test_a_run_that_was_moved_goes_back_to_an_older_checkpoint_and_drops_what_came_later(train):
    def files() -> set[str]:
        return {path.name for path in Path("runs/b/checkpoints").iterdir()}

    common = ["trainer.log_every_n_steps=1", "checkpoint.save_top_k=3", "trainer.max_epochs=3"]
    train("run=a", *common)
    Path("runs/a").rename("runs/b")
    before, saved = rows("b"), files()
    train("resume=runs/b/checkpoints/best-step-12.ckpt", "trainer.max_steps=15")
    assert logged_steps("b") == list(range(1, 16))
    assert not {"best-step-24.ckpt", "best-step-36.ckpt"} & files()
    again = train("run=b", "resume=auto", "trainer.max_steps=-1", *common)
    assert again["resumed_from"].endswith("last.ckpt")
    assert [path.name for path in Path("runs").iterdir()] == ["b"]
    assert (rows("b"), files()) == (before, saved)
    lockstep.train(["resume=b", "trainer.max_epochs=4"])
    callback = next(s for name, s in state("b/checkpoints/last.ckpt")["callbacks"].items() if "ModelCheckpoint" in name)
    assert set(callback["kept"]) == files() - {"last.ckpt"}
    assert len(files()) == len(saved)  # the worst of four is gone


@pytest.mark.filterwarnings("ignore:Be aware that when using")  # Lightning's, of a ModelCheckpoint with another monitor
@pytest.mark.parametrize(
    "lost", ["checkpoint", *(pytest.param(lost, marks=pytest.mark.slow) for lost in ("its score", "its row"))]
)
def test_the_validation_metrics_are_those_of_the_tested_checkpoint(train, lost):
    """A better one may be gone, or was the best of another metric, or its row was moved away with the log."""
    wild = ["schedule=step", "schedule.milestones=[0.5]", "schedule.gamma=1000"]  # the second epoch makes it worse
    first = train("run=a", "trainer.max_epochs=2", *wild)
    assert first["checkpoint"] == "checkpoints/best-step-12.ckpt"
    if lost == "its row":
        end_before_the_test("a")
        Path("runs/a/metrics.csv").unlink()
        again = lockstep.train(["resume=a"])
        assert (again["checkpoint"], again["val/acc"]) == (first["checkpoint"], first["val/acc"])
        return
    if lost == "checkpoint":
        Path("runs/a", first["checkpoint"]).unlink()
    monitored = ["checkpoint.monitor=val/loss", "checkpoint.mode=min"] if lost == "its score" else []
    again = lockstep.train(["resume=a", "trainer.max_epochs=3", *monitored])
    assert again["checkpoint"] == "checkpoints/best-step-36.ckpt"
    (row,) = (row for row in rows("a") if row["step"] == "36" and row["val/acc"])
    assert (again["val/acc"], again["val/loss"]) == (float(row["val/acc"]), float(row["val/loss"]))
    assert again["val/loss"] != first["val/loss"]


def test_a_refused_return_to_an_older_checkpoint_leaves_the_last_one(train):
    train("run=a", "trainer.max_epochs=2", "checkpoint.save_top_k=2", "trainer.accumulate_grad_batches=2")
    before = {path: path.read_bytes() for path in Path("runs/a/checkpoints").iterdir()}
    with pytest.raises(UserError, match="within a step of 2"):  # found when the loaders are there
        lockstep.train(["resume=runs/a/checkpoints/best-step-12.ckpt", "trainer.val_check_interval=0.13"])
    assert {path: path.read_bytes() for path in Path("runs/a/checkpoints").iterdir()} == before


@pytest.mark.parametrize("continued", [False, True])
def test_a_run_whose_checkpoints_are_missing_does_not_start_over(train, run_a, crash_at, continued):
    if continued:  # it has not saved one yet
        crash_at(13)
        with pytest.raises(Crash):
            lockstep.train(["resume=a", "run=b", "trainer.max_epochs=2"])
        crash_at(-1)
    else:
        shutil.copytree("runs/a", "runs/b", ignore=shutil.ignore_patterns("checkpoints"))
    before = {path: path.read_bytes() for path in Path("runs/b").glob("*") if path.is_file()}
    with pytest.raises(UserError, match="it is done or continued a different run"):
        train("run=b", "resume=auto")
    assert {path: path.read_bytes() for path in Path("runs/b").glob("*") if path.is_file()} == before


def test_a_finished_run_whose_continuation_fails_at_once_stays_finished(run_a, crash_at):
    files = [Path("runs/a", name) for name in ("report.json", "config.yaml", "report.html")]
    before = [path.read_bytes() for path in files]
    crash_at(13)
    with pytest.raises(Crash):
        lockstep.train(["resume=a", "trainer.max_epochs=2"])
    assert [path.read_bytes() for path in files] == before
    crash_at(-1)
    assert lockstep.train(["resume=a", "trainer.max_epochs=2"])["train/steps"] == 24


@pytest.mark.parametrize("ended_at", [13, pytest.param(25, marks=pytest.mark.slow)])
def test_a_continuation_that_the_system_restarts_goes_on(train, run_a, crash_at, monkeypatch, ended_at):
    """Before and after the first checkpoint in its own folder."""
    typed = ["resume=a", "run=b", "trainer.max_epochs=3"]
    crash_at(ended_at)
    with pytest.raises(Crash):
        lockstep.train(typed)
    crash_at(-1)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again = lockstep.train(typed)
    assert (again["train/steps"], again["restarts"]) == (36, 1)
    assert again["resumed_from"] == f"runs/{'a' if ended_at == 13 else 'b'}/checkpoints/last.ckpt"


def test_a_restart_with_the_name_of_another_run_does_not_touch_that_run(train, run_a, monkeypatch):
    shutil.copytree("runs/a", "runs/other")
    before = {path: path.read_bytes() for path in Path("runs/other").rglob("*") if path.is_file()}
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # torchrun restarts what was refused as well
    with pytest.raises(UserError, match="runs/other is a different run"):
        lockstep.train(["resume=a", "run=other", "trainer.max_epochs=3"])
    assert {path: path.read_bytes() for path in Path("runs/other").rglob("*") if path.is_file()} == before


def test_a_stopped_run_stays_stopped_until_it_gets_more_patience(train):
    common = ["run=a", "callbacks=[default,early_stopping]", "optim=sgd", "optim.lr=0", "optim.momentum=0",
              "optim.nesterov=false", "trainer.max_epochs=10", "trainer.limit_train_batches=2", "resume=auto"]  # fmt: skip
    epochs = [train(*common, f"callbacks.early_stopping.patience={patience}")["train/epochs"] for patience in (1, 1, 3)]
    assert epochs == [2, 2, 4]
    assert Path("runs/a/train.log").read_text().count("callbacks.early_stopping ended training: Monitored metric") == 2


@pytest.mark.parametrize("typed", [
    ["run=a", "resume=auto"],
    ["resume=runs/a/checkpoints/best-step-12.ckpt", "run=b"],
    ["resume=a", "strategy=ddp", "trainer.devices=2", "trainer.log_every_n_steps=2"],
    ["resume=a", "trainer.max_epochs=-1", "trainer.max_steps=12"],
    ["resume=a", "trainer.max_steps=12"],
])  # fmt: skip
def test_a_finished_run_with_nothing_left_to_train_is_left_as_it_is(train, run_a, capsys, typed):
    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()}

    before = contents()
    assert train(*typed) == run_a
    assert "runs/a is already finished after 12 steps. To continue, raise" in capsys.readouterr().out
    assert contents() == before


@pytest.mark.slow
def test_a_run_that_ended_early_is_finished_until_what_ended_it_changes(train, capsys):
    common = ["run=a", "resume=auto", "trainer.max_epochs=-1", "trainer.limit_train_batches=1"]
    first = train(*common, "trainer.max_time=00:00:00:01")
    assert train(*common, "trainer.max_time=00:00:00:01") == first
    assert f"already finished after {first['train/steps']:,} step" in capsys.readouterr().out
    assert train(*common, "trainer.max_time=00:00:00:02")["train/steps"] > first["train/steps"]
