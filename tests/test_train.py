"""What a run can do, on one process: resume, average, stop, profile, log. In this process, to import torch once."""

import csv
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from conftest import SMALL

import lockstep
from lockstep.callbacks import FiniteLoss
from lockstep.errors import Preempted, TrainingFailed, UserError
from lockstep.reporting.loggers import MetricsCsv
from lockstep.training.module import TaskModule


class Crash(RuntimeError):
    pass


@pytest.fixture
def train(tmp_path, mnist, cache, monkeypatch):
    """Trains in a folder of its own; an epoch has 12 steps."""
    monkeypatch.chdir(tmp_path)
    base = [f"data.root={mnist}", f"data.cache_dir={cache}", "data.batch_size=48", *SMALL]
    return lambda *overrides: lockstep.train([*base, *overrides])


@pytest.fixture
def crash_at(monkeypatch):
    """Makes training raise Crash at the end of a step."""

    def set_up(step: int) -> None:
        def crash(self, trainer, *_):
            if trainer.global_step == step:
                raise Crash

        monkeypatch.setattr(FiniteLoss, "on_train_batch_end", crash)

    yield set_up


def rows(run: str) -> list[dict[str, str]]:
    with Path("runs", run, "metrics.csv").open() as file:
        return [{k: v for k, v in row.items() if k != "train/images_per_s"} for row in csv.DictReader(file)]


def state(path: str) -> dict:
    return torch.load(f"runs/{path}", weights_only=True)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("saved_at", [5, 11, 12, 17])  # 11: before the last batch of an epoch
def test_a_run_that_crashed_and_resumed_ends_bit_identical(train, crash_at, saved_at):
    options = [
        "trainer.log_every_n_steps=1",
        "schedule=cosine",
        "trainer.max_epochs=2",
        f"checkpoint.every_n_steps={saved_at}",
    ]
    whole = train("run=whole", *options)
    crash_at(saved_at + 1)
    with pytest.raises(Crash):
        train("run=parts", *options)
    assert json.loads(Path("runs/parts/report.json").read_text())["status"] == "failed"
    crash_at(-1)
    parts = train("run=parts", "resume=auto", *options)
    a, b = state("whole/checkpoints/last.ckpt"), state("parts/checkpoints/last.ckpt")
    assert same(a["state_dict"], b["state_dict"])
    assert [s["exp_avg_sq"].sum() for s in a["optimizer_states"][0]["state"].values()] == [
        s["exp_avg_sq"].sum() for s in b["optimizer_states"][0]["state"].values()
    ]
    assert a["lr_schedulers"] == b["lr_schedulers"]
    assert rows("parts") == rows("whole")
    assert (parts["test/loss"], parts["val/acc"]) == (whole["test/loss"], whole["val/acc"])


@pytest.mark.parametrize("warning", [signal.SIGTERM, signal.SIGUSR2])
def test_a_run_that_is_warned_saves_at_the_next_step_and_goes_on_from_there(train, warning, monkeypatch):
    options = ["trainer.log_every_n_steps=1", "callbacks=[default,ema]"]
    whole = train("run=whole", *options)
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR2)
    original = FiniteLoss.on_train_batch_end

    def warn(self, trainer, *args):
        original(self, trainer, *args)
        if trainer.global_step == 7:
            os.kill(os.getpid(), warning)

    monkeypatch.setattr(FiniteLoss, "on_train_batch_end", warn)
    with pytest.raises(Preempted, match=rf"ended by {warning.name} after 7 steps; .* resume=auto"):
        train("run=parts", *options)
    monkeypatch.setattr(FiniteLoss, "on_train_batch_end", original)
    assert json.loads(Path("runs/parts/report.json").read_text())["status"] == "preempted"
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR2)) == handlers
    assert state("parts/checkpoints/last.ckpt")["global_step"] == 7
    parts = train("run=parts", "resume=auto", *options)
    assert same(state("whole/checkpoints/last.ckpt")["state_dict"], state("parts/checkpoints/last.ckpt")["state_dict"])
    assert rows("parts") == rows("whole")
    assert parts["test/loss"] == whole["test/loss"]


def test_a_run_that_is_warned_while_it_is_tested_ends_and_is_tested_again(train, monkeypatch):
    whole = train("run=whole")
    original = TaskModule.test_step

    def warned(self, *args):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *args)

    monkeypatch.setattr(TaskModule, "test_step", warned)
    with pytest.raises(Preempted, match="ended by SIGTERM"):
        train("run=parts", "data.eval_batch_size=50")
    monkeypatch.setattr(TaskModule, "test_step", original)
    assert train("run=parts", "resume=auto")["test/loss"] == whole["test/loss"]


def test_auto_starts_a_run_that_is_not_there_and_passes_over_a_damaged_checkpoint(train):
    train("run=a", "resume=auto", "trainer.max_epochs=2")
    folder = Path("runs/a/checkpoints")
    best = next(folder.glob("best-*.ckpt"))
    with (folder / "last.ckpt").open("r+b") as file:
        file.truncate(100_000)
    os.utime(folder / "last.ckpt")  # it is the newest
    report = train("run=a", "resume=auto", "trainer.max_epochs=3")
    assert report["resumed_from"] == str(best)
    assert report["train/steps"] == 36
    assert [path.name for path in Path("runs").iterdir()] == ["a"]


def test_a_resumed_run_keeps_its_config_and_takes_what_is_said_anew(train, mnist):
    train("run=a", "optim=sgd", "optim.lr=0.01", "model.dropout_fc=0.1")
    lockstep.train(["resume=a", "trainer.max_epochs=2"])
    config = lockstep.checkpoints.resuming.load_config(Path("runs/a/config.yaml"))
    assert (config.optim.lr, config.model.dropout_fc, config.trainer.max_epochs, config.data.root) == (
        0.01,
        0.1,
        2,
        str(mnist),
    )
    assert config.resume is None


def contents(run: str) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes()
        for path in Path("runs", run).rglob("*")
        if path.is_file() and path.name != "train.log"
    }


def test_a_refused_resume_leaves_the_run_as_it_was(train, make_mnist):
    train("run=a")
    before = contents("a")
    with pytest.raises(UserError, match="trained on other data"):
        train("run=a", "resume=auto", "trainer.max_epochs=2", f"data.root={make_mnist(640, 50)}")
    for override, told in (
        ("model=resnet50d", "model.name=resnet50d cannot be changed"),
        ("data.val_fraction=0.2", "data.val_fraction"),
    ):
        with pytest.raises(UserError, match=told):
            train("resume=a", override)
    train("run=b")
    other = contents("b")
    with pytest.raises(UserError, match="is another run"):
        train("resume=a", "run=b", "trainer.max_epochs=2")
    assert contents("a") == before
    assert contents("b") == other


def test_a_run_that_died_before_its_first_checkpoint_begins_anew(train, crash_at):
    crash_at(3)
    with pytest.raises(Crash):
        train("run=a", "resume=auto", "trainer.log_every_n_steps=1")
    crash_at(-1)
    report = train("run=a", "resume=auto", "trainer.log_every_n_steps=1")
    assert (report["train/steps"], report["resumed_from"]) == (12, None)
    assert [row["step"] for row in rows("a") if row["train/loss"]] == [str(step) for step in range(12)]


def test_more_steps_go_on_where_max_steps_ended_a_run(train):
    options = ["trainer.log_every_n_steps=1"]
    train("run=whole", "trainer.max_steps=17", *options)
    train("run=parts", "trainer.max_steps=7", *options)
    train("run=parts", "resume=auto", "trainer.max_steps=17", *options)
    losses = [[row["train/loss"] for row in rows(run) if row["train/loss"]] for run in ("whole", "parts")]
    assert len(losses[0]) == 17
    assert losses[0] == losses[1]
    assert same(state("whole/checkpoints/last.ckpt")["state_dict"], state("parts/checkpoints/last.ckpt")["state_dict"])


def test_a_finished_run_typed_again_changes_no_figure(train):
    first = train("run=a", "resume=auto", "trainer.max_epochs=2")
    log = rows("a")
    again = train("run=a", "resume=auto", "trainer.max_epochs=2")
    assert rows("a") == log
    for figure in ("test/loss", "test/acc", "val/acc", "checkpoint", "train/steps"):
        assert again[figure] == first[figure]


def test_the_printed_path_of_a_checkpoint_can_be_typed(train):
    report = train("run=a")
    path = f"runs/a/{report['checkpoint']}"
    again = lockstep.evaluate([f"checkpoint={path}", "trainer.accelerator=cpu"])
    assert again["test/loss"] == pytest.approx(report["test/loss"], rel=1e-6)
    assert train("run=b", f"init_from={path}", "debug=one_batch")["status"] == "done"
    assert train(f"resume={path}", "trainer.max_epochs=2")["train/steps"] == 24


def test_a_directory_is_never_taken_twice(train):
    train("run=a", "debug=one_batch")
    before = Path("runs/a/report.json").read_text()
    with pytest.raises(UserError, match=r"runs/a exists. Type resume=auto"):
        train("run=a", "debug=one_batch")
    assert Path("runs/a/report.json").read_text() == before


def test_a_folder_that_was_there_keeps_its_files_when_a_run_cannot_start(train):
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/notes.txt").write_text("mine")
    with pytest.raises(UserError, match="warmup_steps"):
        train("run=a", "schedule=cosine", "schedule.warmup_steps=1000")
    assert {path.name for path in Path("runs/a").iterdir() if path.is_file()} == {"notes.txt", "train.log"}
    assert Path("runs/a/notes.txt").read_text() == "mine"


def test_weights_alone_start_a_new_run(train):
    train("run=a")
    report = train("run=b", "init_from=a", "debug=one_batch", "optim=sgd", "optim.lr=0")
    assert report["resumed_from"] is None
    tested = [state(f"{run}/" + json.loads(Path(f"runs/{run}/report.json").read_text())["checkpoint"]) for run in "ab"]
    assert same(*(checkpoint["state_dict"] for checkpoint in tested))
    with pytest.raises(UserError, match=r"does not fit the network: .*classifier"):
        train("run=c", "init_from=a", "data.image_size=32")
    assert not Path("runs/c").exists()


def test_a_run_from_weights_can_be_typed_again(train, crash_at):
    train("run=y")
    options = ["init_from=y", "optim=sgd", "optim.lr=0", "trainer.max_epochs=2", "trainer.log_every_n_steps=1"]
    train("run=whole", *options)
    for step in (3, 14):  # before and after its first checkpoint
        crash_at(step)
        with pytest.raises(Crash):
            train("run=x", "resume=auto", *options)
    assert json.loads(Path("runs/x/report.json").read_text())["resumed_from"] is None
    crash_at(-1)
    best = state("y/" + json.loads(Path("runs/y/report.json").read_text())["checkpoint"])
    assert same(state("x/checkpoints/last.ckpt")["state_dict"], best["state_dict"])
    shutil.rmtree("runs/y")  # what it began from is of no effect any more
    done = train("run=x", "resume=auto", *options)
    assert done["resumed_from"] == "runs/x/checkpoints/last.ckpt"
    assert rows("x") == rows("whole")
    config = Path("runs/whole/config.yaml").read_text()
    assert Path("runs/x/config.yaml").read_text() == config.replace("run: whole", "run: x")
    again = train("run=x", "resume=auto", *options)
    assert rows("x") == rows("whole")
    for figure in ("test/loss", "test/acc", "val/acc", "checkpoint", "train/steps"):
        assert again[figure] == done[figure]


def test_an_average_is_what_is_validated_tested_and_saved(train):
    options = ["trainer.max_epochs=2", "optim=sgd", "optim.lr=0.01"]
    plain = train("run=plain", *options)
    averaged = train("run=ema", *options, "callbacks=[default,ema]", "callbacks.ema.decay=0.8")
    checkpoint = state("ema/checkpoints/last.ckpt")
    assert same(checkpoint["current_model_state"], state("plain/checkpoints/last.ckpt")["state_dict"])
    assert not same(checkpoint["state_dict"], checkpoint["current_model_state"])
    assert averaged["test/loss"] != plain["test/loss"]
    again = lockstep.evaluate(["run=ema", "trainer.accelerator=cpu"])
    assert again["test/loss"] == pytest.approx(averaged["test/loss"], rel=1e-6)


def test_a_run_stops_early(train):
    report = train("callbacks=[default,early_stopping]", "callbacks.early_stopping.patience=1", "optim=sgd", "optim.lr=0",
                   "optim.momentum=0", "optim.nesterov=false", "trainer.max_epochs=10")  # fmt: skip
    assert report["train/epochs"] == 2


def test_a_loss_that_is_no_number_ends_the_run_with_advice(train):
    with pytest.raises(TrainingFailed, match=r"the loss is (nan|inf) at step \d+ .* lower optim.lr"):
        train("run=a", "optim=sgd", "optim.lr=1e30", "trainer.log_every_n_steps=2")
    report = json.loads(Path("runs/a/report.json").read_text())
    assert (report["status"], "optim.lr" in report["error"]) == ("failed", True)


def test_a_loss_that_is_no_number_is_seen_in_a_short_run_too(train):
    with pytest.raises(TrainingFailed):
        train("run=a", "optim=sgd", "optim.lr=1e30", "trainer.limit_train_batches=5")
    assert json.loads(Path("runs/a/report.json").read_text())["status"] == "failed"


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precisions_train(train, precision):
    report = train(f"trainer.precision={precision}", "trainer.max_epochs=3", "optim.lr=3e-3")
    assert (report["precision"], report["test/count"]) == (precision, 103)
    assert report["test/acc"] > 0.5


@pytest.mark.parametrize(
    "wrong", ["+optim.foo=1", "trainer.val_check_interval=1000", "trainer.limit_train_batches=0.001"]
)
def test_what_torch_or_lightning_refuses_is_told_and_leaves_nothing(train, wrong):
    with pytest.raises(UserError):
        train("run=a", wrong)
    assert not Path("runs/a").exists()


def test_a_run_without_an_end_is_ended_by_time(train):
    report = train("trainer.max_epochs=-1", "trainer.max_time=00:00:00:02")
    assert report["status"] == "done"
    assert report["train/steps"] > 0


def test_weights_to_start_from_are_not_needed_again(train, tmp_path):
    import timm

    weights = tmp_path / "weights.pth"
    torch.save(timm.create_model("test_resnet", num_classes=10, in_chans=1).state_dict(), weights)
    model = ["model=timm", "model.name=test_resnet", f"model.checkpoint_path={weights}"]
    report = train("run=a", *model, "data.batch_size=63", "debug=one_batch", "data.image_size=28")
    weights.unlink()
    again = lockstep.evaluate(["run=a", "strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu"])
    assert again["test/loss"] == pytest.approx(report["test/loss"], rel=1e-5)
    with pytest.raises(UserError, match=r"optim.lr=7 has no effect in an evaluation"):
        lockstep.evaluate(["run=a", "optim.lr=7"])


def test_seed_0_is_a_seed_and_null_draws_one(train):
    a, b, c = (
        train(f"run={run}", f"seed={seed}", "debug=one_batch") for run, seed in (("a", 0), ("b", 0), ("c", "null"))
    )
    assert a["seed"] == b["seed"] == 0
    assert a["test/loss"] == b["test/loss"] != c["test/loss"]
    assert isinstance(c["seed"], int)


def test_a_recipe_can_be_typed_again(train):
    first = train("run=a", "experiment=mnist_basic_net", "resume=auto", "trainer.max_epochs=1")
    again = train("run=a", "experiment=mnist_basic_net", "resume=auto", "trainer.max_epochs=2")
    assert (first["train/steps"], again["train/steps"]) == (12, 24)
    assert again["resumed_from"] == "runs/a/checkpoints/last.ckpt"


def test_a_drawn_seed_is_drawn_once(train):
    first = train("run=a", "seed=null", "resume=auto")
    again = train("run=a", "seed=null", "resume=auto", "trainer.max_epochs=2")
    assert again["seed"] == first["seed"]
    assert again["train/steps"] == 24


def test_workers_deal_out_the_same_batches(train):
    options = ["trainer.max_epochs=2", "trainer.log_every_n_steps=1"]
    train("run=without", *options)
    train("run=with", *options, "data.num_workers=2", "data.prefetch_factor=3", "data.persistent_workers=false")
    assert rows("with") == rows("without")


@pytest.mark.parametrize("preset", ["one_batch", "limit", "profiler"])
def test_debug_presets(train, preset):
    report = train("run=a", f"debug={preset}")
    steps, count = {"one_batch": (1, 103), "limit": (24, 103), "profiler": (12, 103)}[preset]
    assert (report["train/steps"], report["test/count"]) == (steps, count)
    assert Path("runs/a/fit-profile.txt").exists() == (preset == "profiler")


def test_the_same_batch_can_be_overfitted(train):
    train("run=a", "debug=overfit", "trainer.max_epochs=60", "model.dropout_conv=0", "model.dropout_fc=0")
    losses = [float(row["train/loss"]) for row in rows("a") if row["train/loss"]]
    assert len(losses) == 60
    assert losses[-1] < 0.05 < 2 < losses[0]


def test_several_loggers_write_at_once_and_the_id_of_wandb_is_kept(train):
    train("run=a", "logger=[wandb,tensorboard]", "trainer.log_every_n_steps=4")
    folder = Path("runs/a")
    assert b"test/acc" in b"".join(path.read_bytes() for path in folder.glob("tensorboard/events.out.tfevents.*"))
    assert [row["step"] for row in rows("a")] == ["3", "7", "11", "11", "12"]  # rows, validation, test
    # offline-run-<time>-<id>, and -1 where two begin in the same second
    ids = {path.name.split("-")[3] for path in folder.glob("wandb/offline-run-*")}
    train("run=a", "logger=[wandb,tensorboard]", "resume=auto", "trainer.max_epochs=2")
    assert {path.name.split("-")[3] for path in folder.glob("wandb/offline-run-*")} == ids
    assert len(ids) == 1


def test_a_run_without_callbacks_and_loggers_has_its_metrics_all_the_same(train):
    report = train("run=a", "callbacks=[]", "logger=[]", "trainer.limit_train_batches=4", "trainer.log_every_n_steps=2")
    assert (report["status"], report["train/steps"], report["train/images_per_s"]) == ("done", 4, None)
    assert [row["step"] for row in rows("a") if row["train/loss"]] == ["1", "3"]
    assert float(rows("a")[-1]["test/loss"]) == report["test/loss"]
    assert train("run=a", "resume=auto", "callbacks=[]", "trainer.max_epochs=2")["train/steps"] == 8


def test_a_run_that_was_moved_keeps_its_best_checkpoints(train):
    train("run=a", "checkpoint.save_top_k=2", "trainer.max_epochs=2")
    best = {path.name for path in Path("runs/a/checkpoints").glob("best-*")}
    Path("runs/a").rename("runs/b")
    lockstep.train(["resume=b", "trainer.max_epochs=3"])
    assert [path.name for path in Path("runs").iterdir()] == ["b"]
    callback = next(s for name, s in state("b/checkpoints/last.ckpt")["callbacks"].items() if "ModelCheckpoint" in name)
    there = {path.name for path in Path("runs/b/checkpoints").glob("best-*")}
    assert {Path(path).name for path in callback["best_k_models"]} == there
    assert len(there) == 2
    assert there & best
    assert all(Path(path).parent == Path("runs/b/checkpoints").resolve() for path in callback["best_k_models"])


def test_going_back_to_an_older_checkpoint_drops_what_came_later(train):
    options = ["trainer.log_every_n_steps=1", "checkpoint.save_top_k=3", "trainer.max_epochs=3"]
    train("run=a", *options)
    files = {path.name for path in Path("runs/a/checkpoints").iterdir()}
    before = rows("a")
    train("resume=runs/a/checkpoints/best-step-12.ckpt", "trainer.max_steps=15")
    assert [row["step"] for row in rows("a") if row["train/loss"]] == [str(step) for step in range(15)]
    assert not {"best-step-24.ckpt", "best-step-36.ckpt"} & {path.name for path in Path("runs/a/checkpoints").iterdir()}
    report = train("run=a", "resume=auto", "trainer.max_steps=-1", *options)
    assert report["resumed_from"].endswith("last.ckpt")
    assert rows("a") == before
    assert {path.name for path in Path("runs/a/checkpoints").iterdir()} == files


def test_tensorboard_shows_each_step_once_after_a_crash(train, crash_at):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = ["run=a", "logger=tensorboard", "trainer.log_every_n_steps=1", "checkpoint.every_n_steps=4"]
    crash_at(7)
    with pytest.raises(Crash):
        train(*options)
    crash_at(-1)
    train(*options, "resume=auto")
    events = EventAccumulator("runs/a/tensorboard").Reload()
    steps = [event.step for event in events.Scalars("train/loss")]
    assert steps == list(range(12))


def test_a_row_that_a_kill_cut_off_is_no_row(tmp_path):
    logger = MetricsCsv(run_dir=tmp_path, run="a")
    for step in (9, 10, 11):
        logger.log_metrics({"loss": 0.5 + step}, step)
    path = tmp_path / "metrics.csv"
    path.write_bytes(path.read_bytes()[: -len("1,11.5\r\n")])
    assert path.read_text().endswith("\n1")  # of 11
    logger.cut(11)
    assert path.read_text().split() == ["step,loss", "9,9.5", "10,10.5"]


def test_what_would_repeat_samples_or_be_ignored_cannot_be_changed_in_a_resumed_run(train):
    train("run=a", "debug=one_batch")
    with pytest.raises(UserError) as error:
        lockstep.train(["resume=a", "data.batch_size=24", "seed=3", "optim.lr=0.5", "trainer.max_epochs=2"])
    assert [problem.split(" cannot")[0] for problem in error.value.problems] == [
        "data.batch_size=24",
        "seed=3",
        "optim.lr=0.5",
    ]


def test_validating_within_an_accumulated_step_is_refused(train):
    with pytest.raises(
        UserError, match=r"val_check_interval=5 counts micro-batches .* Type trainer.val_check_interval=4"
    ):
        train("run=a", "trainer.accumulate_grad_batches=2", "trainer.val_check_interval=5")
    with pytest.raises(UserError, match=r"after 7 micro-batches, within a step of 2"):
        train("run=a", "trainer.accumulate_grad_batches=2", "trainer.val_check_interval=0.3")
    assert not Path("runs/a").exists()


def test_a_stopped_run_stays_stopped_until_it_gets_more_patience(train):
    options = ["run=a", "callbacks=[default,early_stopping]", "optim=sgd", "optim.lr=0", "optim.momentum=0",
               "optim.nesterov=false", "trainer.max_epochs=10", "resume=auto"]  # fmt: skip
    epochs = [
        train(*options, f"callbacks.early_stopping.patience={patience}")["train/epochs"] for patience in (1, 1, 3)
    ]
    assert epochs == [2, 2, 4]


def test_without_checkpoints_the_weights_at_the_end_are_tested(train):
    report = train("run=a", "trainer.enable_checkpointing=false")
    assert (report["checkpoint"], report["test/count"], report["status"]) == (None, 103, "done")
    assert list(Path("runs/a/checkpoints").iterdir()) == []


def test_a_cut_off_file_of_data_is_named(train, mnist, tmp_path):
    shutil.copytree(mnist, tmp_path / "cut")
    path = tmp_path / "cut/MNIST/raw/train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte.gz is cut off or damaged"):
        train("run=a", f"data.root={tmp_path / 'cut'}")
    assert not Path("runs").exists()
