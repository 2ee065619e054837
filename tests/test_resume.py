"""Invariant 3 on one process: a run that was cut off goes on where it was, whatever cut it off. tests/test_kills.py kills."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import yaml
from in_process import Crash, logged_steps, options, report, rows, same, state

import lockstep
from lockstep.callbacks import FiniteLoss
from lockstep.checkpoints.saving import LastCheckpoint
from lockstep.config.compose import compose_config
from lockstep.config.schema import CLOSED
from lockstep.errors import Preempted
from lockstep.launch import resuming
from lockstep.launch.exits import exit_code
from lockstep.machine import process as machine_signals
from lockstep.reporting.loggers import MetricsCsv
from lockstep.run import RunFolder
from lockstep.training.module import TaskModule

pytestmark = pytest.mark.xdist_group("resume")
TWO_EPOCHS = ["trainer.log_every_n_steps=1", "schedule=cosine", "trainer.max_epochs=2", "callbacks=[default,ema]"]
FIGURES = ("test/loss", "test/acc", "val/acc", "checkpoint", "train/steps")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, mnist, cache) -> Path:
    """The directory of a run of two epochs that nothing cut off."""
    folder = tmp_path_factory.mktemp("whole")
    lockstep.train([*options(mnist, cache), *TWO_EPOCHS, f"runs_dir={folder}", "run=whole"])
    return folder / "whole"


def assert_ended_alike(run: str, whole: Path) -> None:
    a, b = state(whole / "checkpoints/last.ckpt"), state(f"{run}/checkpoints/last.ckpt")
    assert same(a["state_dict"], b["state_dict"])
    moments = [[s["exp_avg_sq"].sum() for s in c["optimizer_states"][0]["state"].values()] for c in (a, b)]
    assert moments[0] == moments[1]
    assert a["lr_schedulers"] == b["lr_schedulers"]
    assert rows(run) == rows(whole)
    for figure in FIGURES:
        assert report(run)[figure] == report(whole)[figure], figure


@pytest.mark.parametrize(
    "saved_at",
    [11, *(pytest.param(step, marks=pytest.mark.slow) for step in (5, 12, 17))],
)  # 11: before the last batch of an epoch
def test_a_run_that_crashed_and_resumed_ends_bit_identical(train, crash_at, whole, saved_at):
    crash_at(saved_at + 1)
    with pytest.raises(Crash):
        train("run=parts", *TWO_EPOCHS, f"checkpoint.every_n_steps={saved_at}")
    assert report("parts")["status"] == "failed"
    crash_at(-1)
    train("run=parts", "resume=auto", *TWO_EPOCHS, f"checkpoint.every_n_steps={saved_at}")
    assert_ended_alike("parts", whole)


def test_a_validation_after_the_last_step_survives_a_test_that_is_cut_off(train, monkeypatch):
    """`trainer.max_steps` ends this run within its first epoch, so it is validated once training is over."""

    def crash(self) -> None:
        raise Crash

    within = ["trainer.max_steps=4", "trainer.log_every_n_steps=10", "run=parts"]
    with monkeypatch.context() as patched, pytest.raises(Crash):
        patched.setattr(TaskModule, "on_test_start", crash, raising=False)
        train(*within)
    (validated,) = rows("parts")
    train(*within, "resume=auto")
    first, tested = rows("parts")
    assert float(validated["val/acc"]) == float(first["val/acc"]) == report("parts")["val/acc"]
    assert tested["test/acc"] and not tested["val/acc"]


@pytest.mark.parametrize(
    ("warning", "status", "code"),
    [
        (signal.SIGTERM, "preempted", 1),
        (signal.SIGINT, "interrupted", 130),
        pytest.param(signal.SIGUSR2, "preempted", 1, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, "preempted", 1, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_warned_saves_at_the_next_step_and_goes_on_from_there(
    train, whole, warning, status, code, monkeypatch
):
    def warn(self, trainer, *_) -> None:
        if trainer.global_step == 7:
            os.kill(os.getpid(), warning)

    default = signal.default_int_handler if warning is signal.SIGINT else signal.SIG_DFL
    before = signal.signal(warning, default)  # the tests may run under nohup
    try:
        with monkeypatch.context() as warned:
            warned.setattr(LastCheckpoint, "on_train_batch_end", warn)
            with pytest.raises(Preempted, match=rf"ended by {warning.name} after 7 steps; .* resume=auto") as error:
                train("run=parts", *TWO_EPOCHS)
        assert signal.getsignal(warning) is default
    finally:
        signal.signal(warning, before)
    assert (error.value.exit_code, report("parts")["status"]) == (code, status)
    assert state("parts/checkpoints/last.ckpt")["global_step"] == 7
    train("run=parts", "resume=auto", *TWO_EPOCHS)
    assert_ended_alike("parts", whole)


@pytest.mark.parametrize("hook", ["setup", pytest.param("on_validation_end", marks=pytest.mark.slow)])
def test_sigterm_ends_with_exit_code_1_at_any_moment(hook, train, monkeypatch):
    """Lightning's handler, which is there before the first step, raises SystemExit: with code 0 in 2.6.6, with 143 in later ones."""
    sent = []

    def warn(*_, **__) -> None:
        if not sent:
            sent.append(os.kill(os.getpid(), signal.SIGTERM))

    monkeypatch.setattr(FiniteLoss, hook, warn)
    assert exit_code(lambda: train("run=parts", "trainer.max_epochs=2")) == 1
    assert report("parts")["status"] == "preempted"


@pytest.mark.parametrize("code", [None, 143])
def test_lightnings_own_end_after_sigterm_is_exit_code_1(code, monkeypatch):
    monkeypatch.setattr(machine_signals, "received", [signal.SIGTERM])

    def end() -> None:
        raise SystemExit(code)

    assert exit_code(end) == 1


def test_ctrl_c_twice_ends_at_once(train, monkeypatch):
    def interrupt(self, trainer, *_) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("not reached")

    monkeypatch.setattr(FiniteLoss, "on_train_batch_end", interrupt)
    assert exit_code(lambda: train("run=parts")) == 130
    assert report("parts")["status"] == "interrupted"
    assert machine_signals.received == [signal.SIGINT] * 2  # launchers pass on both


def test_a_run_that_is_warned_while_it_is_tested_ends_and_is_tested_again(train, trained, monkeypatch):
    original = TaskModule.test_step

    def warned(self, *args):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *args)

    monkeypatch.setattr(TaskModule, "test_step", warned)
    with pytest.raises(Preempted, match="ended by SIGTERM"):
        train("run=parts", "data.eval_batch_size=50")
    monkeypatch.setattr(TaskModule, "test_step", original)
    assert train("run=parts", "resume=auto")["test/loss"] == pytest.approx(report(trained)["test/loss"], rel=1e-6)


def test_auto_passes_over_a_damaged_checkpoint(train, run_a):
    folder = Path("runs/a/checkpoints")
    best = next(folder.glob("best-*.ckpt"))
    with (folder / "last.ckpt").open("r+b") as file:
        file.truncate(100_000)
    os.utime(folder / "last.ckpt")  # it is the newest
    again = train("run=a", "resume=auto", "trainer.max_epochs=2")
    assert again["resumed_from"] == str(best)
    assert again["train/steps"] == 24
    assert [path.name for path in Path("runs").iterdir()] == ["a"]


def test_a_resumed_run_keeps_its_config_and_takes_what_is_said_anew(train, mnist):
    train("run=a", "optim=sgd", "optim.lr=0.01", "model.dropout_fc=0.1", "debug=one_batch")
    lockstep.train(["resume=a", "trainer.max_epochs=2"])
    config = RunFolder("runs/a").config()
    found = (config.optim.lr, config.model.dropout_fc, config.trainer.max_epochs, config.data.root)
    assert found == (0.01, 0.1, 2, str(mnist))
    assert config.resume is None


def test_a_run_older_than_a_key_takes_its_default(train, run_a):
    """As after a fork has added a key of its own."""
    config = Path("runs/a/config.yaml")
    saved = yaml.safe_load(config.read_text())
    for group in CLOSED:
        saved[group].clear()
    saved["trainer"]["accelerator"] = "cpu"
    config.write_text(yaml.safe_dump(saved))
    assert lockstep.evaluate(["run=a", "trainer.accelerator=cpu"])["test/acc"] == run_a["test/acc"]
    assert train("resume=a", "trainer.max_epochs=2")["train/steps"] == 24


def test_a_run_that_died_before_its_first_checkpoint_begins_anew(train, crash_at):
    crash_at(3)
    with pytest.raises(Crash):
        train("run=a", "resume=auto", "trainer.log_every_n_steps=1")
    crash_at(-1)
    again = train("run=a", "resume=auto", "trainer.log_every_n_steps=1")
    assert (again["train/steps"], again["resumed_from"]) == (12, None)
    assert logged_steps("a") == list(range(1, 13))


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
    typed = [
        "run=a",
        "resume=auto",
        "experiment=mnist_basic_net",
        "seed=0",
        "data.mean=model",
        "data.std=model",
        "data.batch_size=48",
    ]
    cfg = resuming.for_training(compose_config("train", typed), typed)
    assert (cfg.data.mean, cfg.data.std) == ([0.1307], [0.3081])


@pytest.mark.slow
def test_a_run_from_weights_can_be_typed_again(train, run_a, crash_at):
    best = state(f"a/{run_a['checkpoint']}")
    common = ["init_from=a", "optim=sgd", "optim.lr=0", "trainer.max_epochs=2", "trainer.log_every_n_steps=1"]
    train("run=whole", *common)
    for step in (3, 14):  # before and after its first checkpoint
        crash_at(step)
        with pytest.raises(Crash):
            train("run=x", "resume=auto", *common)
    assert report("x")["resumed_from"] is None
    crash_at(-1)
    assert same(state("x/checkpoints/last.ckpt")["state_dict"], best["state_dict"])
    shutil.rmtree("runs/a")  # what it began from is of no effect any more
    done = train("run=x", "resume=auto", *common)
    assert done["resumed_from"] == "runs/x/checkpoints/last.ckpt"
    assert rows("x") == rows("whole")
    config = Path("runs/whole/config.yaml").read_text()
    assert Path("runs/x/config.yaml").read_text() == config.replace("run: whole", "run: x")


def test_a_run_that_was_moved_keeps_its_best_checkpoints(train):
    train("run=a", "checkpoint.save_top_k=2", "trainer.max_epochs=2")
    best = {path.name for path in Path("runs/a/checkpoints").glob("best-*")}
    Path("runs/a").rename("runs/b")
    lockstep.train(["resume=b", "trainer.max_epochs=3"])
    assert [path.name for path in Path("runs").iterdir()] == ["b"]
    callback = next(s for name, s in state("b/checkpoints/last.ckpt")["callbacks"].items() if "ModelCheckpoint" in name)
    there = {path.name for path in Path("runs/b/checkpoints").glob("best-*")}
    assert set(callback["kept"]) == there
    assert len(there) == 2
    assert there & best


def test_going_back_to_an_older_checkpoint_drops_what_came_later(train):
    common = ["trainer.log_every_n_steps=1", "checkpoint.save_top_k=3", "trainer.max_epochs=3"]
    train("run=a", *common)
    files = {path.name for path in Path("runs/a/checkpoints").iterdir()}
    before = rows("a")
    train("resume=runs/a/checkpoints/best-step-12.ckpt", "trainer.max_steps=15")
    assert logged_steps("a") == list(range(1, 16))
    assert not {"best-step-24.ckpt", "best-step-36.ckpt"} & {path.name for path in Path("runs/a/checkpoints").iterdir()}
    again = train("run=a", "resume=auto", "trainer.max_steps=-1", *common)
    assert again["resumed_from"].endswith("last.ckpt")
    assert rows("a") == before
    assert {path.name for path in Path("runs/a/checkpoints").iterdir()} == files


def test_a_stopped_run_stays_stopped_until_it_gets_more_patience(train):
    common = ["run=a", "callbacks=[default,early_stopping]", "optim=sgd", "optim.lr=0", "optim.momentum=0",
              "optim.nesterov=false", "trainer.max_epochs=10", "trainer.limit_train_batches=2", "resume=auto"]  # fmt: skip
    epochs = [train(*common, f"callbacks.early_stopping.patience={patience}")["train/epochs"] for patience in (1, 1, 3)]
    assert epochs == [2, 2, 4]


def test_tensorboard_shows_each_step_once_after_a_crash(train, crash_at):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    common = ["run=a", "logger=tensorboard", "trainer.log_every_n_steps=1", "checkpoint.every_n_steps=4"]
    crash_at(7)
    with pytest.raises(Crash):
        train(*common)
    crash_at(-1)
    train(*common, "resume=auto")
    events = EventAccumulator("runs/a/tensorboard").Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 13))


def test_a_row_that_a_kill_cut_off_is_no_row(tmp_path):
    logger = MetricsCsv(tmp_path)
    for step in (9, 10, 11):
        logger.log_metrics({"loss": 0.5 + step}, step)
    path = tmp_path / "metrics.csv"
    path.write_bytes(path.read_bytes()[: -len("1,11.5\r\n")])
    assert path.read_text().endswith("\n1")  # of 11
    RunFolder(tmp_path).cut(10)
    assert path.read_text().split() == ["step,loss", "9,9.5", "10,10.5"]


@pytest.fixture
def changed_files(run_a):
    """The files of runs/a that differ from what they were when the test began."""

    def contents() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in Path("runs/a").rglob("*") if path.is_file()}

    before = contents()
    return lambda: sorted(name for name, content in {**before, **contents()}.items() if before.get(name) != content)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["resume=a"], "set trainer.max_epochs=2 to continue"),
        (["run=a", "resume=auto"], "set trainer.max_epochs=2 to continue"),
        (["resume=runs/a/checkpoints/best-step-12.ckpt", "run=b"], "set trainer.max_epochs=2 to continue"),
        (["resume=a", "strategy=ddp", "trainer.devices=2"], "set trainer.max_epochs=2 to continue"),
        (["resume=a", "trainer.max_epochs=1", "trainer.log_every_n_steps=2"], "set trainer.max_epochs=2 to continue"),
        (["resume=a", "trainer.max_epochs=-1", "trainer.max_steps=12"], "set trainer.max_steps=24 to continue"),
        (["resume=a", "trainer.max_steps=12"], "set trainer.max_epochs=2 trainer.max_steps=24 to continue"),
    ],
)
def test_a_finished_run_with_nothing_left_to_train_is_left_as_it_is(train, run_a, changed_files, capsys, typed, said):
    assert train(*typed) == run_a
    assert f"a is already finished: 12 of 12 steps; {said}" in capsys.readouterr().out
    assert changed_files() == []
    assert not Path("runs/b").exists()


def test_an_evaluation_under_another_strategy_has_its_own_file(run_a, changed_files, forked):
    lockstep.evaluate(["run=a", "strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu"])
    assert [name for name in changed_files() if "/logs/" not in name] == ["runs/a/eval.json"]
    assert report("a") == run_a


@pytest.mark.slow
def test_a_run_that_ended_early_is_finished_until_what_ended_it_changes(train, capsys):
    common = ["run=a", "resume=auto", "trainer.max_epochs=-1", "trainer.limit_train_batches=1"]
    first = train(*common, "trainer.max_time=00:00:00:01")
    assert train(*common, "trainer.max_time=00:00:00:01") == first
    assert f"{first['train/steps']:,} steps; set trainer.max_time=<longer> to continue" in capsys.readouterr().out
    assert train(*common, "trainer.max_time=00:00:00:02")["train/steps"] > first["train/steps"]


def test_a_number_is_a_name_of_a_run(train, capsys):
    options = ["run=0", "resume=auto", "debug=one_batch"]
    train(*options)
    train(*options)
    assert "0 is already finished: 1 of 1 step" in capsys.readouterr().out
