"""What a run refuses, found when it is about to begin or later: told in one message, and nothing is changed."""

import os
import shutil
import zipfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from in_process import report

import lockstep
from lockstep.callbacks import FiniteLoss
from lockstep.checkpoints import weights
from lockstep.checkpoints.finding import DATA, read_outline, step_of
from lockstep.config.settings import Settings
from lockstep.errors import TrainingFailed, UserError
from lockstep.launch import local
from lockstep.launch.exits import exit_code
from lockstep.reporting import recorder
from lockstep.run import RunFolder

pytestmark = pytest.mark.xdist_group("refused")


def contents(run: str) -> dict[str, bytes]:
    files = [path for path in Path("runs", run).rglob("*") if path.is_file() and path.name != "train.log"]
    return {str(path): path.read_bytes() for path in files}


@pytest.mark.parametrize("key", ["run", "resume", "init_from"])
def test_a_name_from_outside_the_config_writes_nowhere(train, tmp_path, monkeypatch, key):
    monkeypatch.setenv("OUTSIDE", str(tmp_path / "home"))
    told = "run=.* from .*oc.env:OUTSIDE.*is invalid" if key == "run" else "neither a checkpoint nor a run"
    with pytest.raises(UserError, match=told):
        train(f"{key}=${{oc.env:OUTSIDE}}")
    with pytest.raises(UserError, match=r"run=.* is invalid"):
        lockstep.sweep(["run=${oc.env:OUTSIDE}", "seed=1,2"])
    assert [path.name for path in tmp_path.iterdir() if path.name != "runs"] == []


PARTS = [
    "callbacks", "DataModule", "loops", "optimizer_states", "lr_schedulers", "global_step", "epoch", "window", "network",
]  # fmt: skip


def test_a_checkpoint_that_does_not_say_where_training_stopped_is_not_resumed(train, run_a):
    whole = torch.load("runs/a/checkpoints/last.ckpt", weights_only=True)
    path = Path("runs/a/checkpoints/cut.ckpt")
    cases = {part: {key: value for key, value in whole.items() if key != part} for part in PARTS}
    read_outline(Path("runs/a/checkpoints/last.ckpt")).require_position("window", "network", DATA)
    for part, content in cases.items():
        torch.save(content, path)
        with pytest.raises(UserError, match=rf"has no .*{part}.*Pass init_from={path} run="):
            read_outline(path).require_position("window", "network", DATA)
    torch.save(cases["DataModule"], path)
    with pytest.raises(UserError, match="has no DataModule"):
        train(f"resume={path}", "run=b", "trainer.max_epochs=2")
    assert not Path("runs/b").exists()


class Evil:
    def __reduce__(self):
        return os.mkdir, ("harmed",)


@pytest.mark.slow
def test_a_file_that_is_no_checkpoint_of_lockstep_is_rejected_in_one_message(train, run_a):
    folder = Path("runs/a/checkpoints")
    whole = torch.load(folder / "last.ckpt", weights_only=True)
    few = {name: whole["config"][name] for name in ("task", "data", "strategy", "trainer")}
    other = {
        "a list": [whole],
        "bare weights": whole["state_dict"],
        "of another project": {"state_dict": whole["state_dict"], "config": {"lr": 0.1}},
        "without weights": {key: value for key, value in whole.items() if key != "state_dict"},
        "without groups": whole | {"config": few},
        "hostile": whole | {"callbacks": {"x": Evil()}},
        "hostile torch": whole | {"callbacks": {"x": torch.nn.Linear(1, 1)}},
    }
    paths = {what: folder / f"{what}.ckpt" for what in [*other, "zip"]}
    for what, content in other.items():
        torch.save(content, paths[what])
    with zipfile.ZipFile(paths["zip"], "w") as archive:
        archive.writestr("photo.png", b"1")
    for rank in range(2):
        weights.save(whole, {}, folder, rank, 2)
    paths["shard"] = folder / "shard-00000-of-00002.pt"
    before = contents("a")
    for what, path in paths.items():
        for call, *more in ((train, "resume="), (train, "run=b", "init_from="), (evaluate, "checkpoint=")):
            with pytest.raises(UserError, match="is not a checkpoint of Lockstep: it") as error:
                call(*more[:-1], f"{more[-1]}{path}")
            assert "weights_only" not in str(error.value), what
            assert exit_code(lambda: call(*more[:-1], f"{more[-1]}{path}")) == 2  # noqa: B023
    assert (contents("a"), Path("runs/b").exists(), Path("harmed").exists()) == (before, False, False)


def evaluate(*overrides: str) -> None:
    lockstep.evaluate([*overrides, "trainer.accelerator=cpu"])


def test_a_refused_command_leaves_the_run_as_it_was(train, run_a, make_mnist):
    shutil.copytree("runs/a", "runs/b")
    before, other = contents("a"), contents("b")
    with pytest.raises(UserError, match="trained on different data"):
        train("run=a", "resume=auto", "trainer.max_epochs=2", f"data.root={make_mnist(640, 50)}")
    with pytest.raises(UserError, match=r"model.name=resnet50d cannot be changed"):
        train("resume=a", "model=resnet50d")
    # what would repeat samples or be ignored
    fixed = ["loader.val_fraction=0.2", "loader.batch_size=24", "seed=3", "optim.lr=0.5"]
    with pytest.raises(UserError) as error:
        train("resume=a", *fixed, "trainer.max_epochs=2")
    assert {problem.split(" cannot")[0] for problem in error.value.problems} == {*fixed}
    with pytest.raises(UserError, match="is a different run"):
        train("resume=a", "run=b", "trainer.max_epochs=2")
    with pytest.raises(UserError, match=r"runs/a already exists. Pass resume=auto"):
        train("run=a", "debug=one_batch")
    with pytest.raises(UserError, match=r"does not fit the network: .*classifier"):
        train("run=c", "init_from=a", "data.image_size=16")
    assert (contents("a"), contents("b"), Path("runs/c").exists()) == (before, other, False)


def test_a_run_that_is_going_on_is_not_continued_by_a_second_command(train, run_a, monkeypatch):
    told: list[str] = []

    def second(self, trainer, *_) -> None:
        if trainer.global_step == 13:
            before = contents("a")
            for again in (["resume=auto"], ["resume=auto", "init_from=a"]):
                with pytest.raises(UserError) as error:
                    lockstep.train(["run=a", *again])
                told.extend(error.value.problems)
            assert contents("a") == before

    monkeypatch.setattr(FiniteLoss, "on_train_batch_end", second)
    assert train("run=a", "resume=auto", "trainer.max_epochs=2")["status"] == "done"
    assert len(told) == 2
    assert all(problem.startswith("runs/a is in use: another process is training there") for problem in told)
    assert not RunFolder("runs/a").is_locked()


def test_a_run_that_is_about_to_begin_is_not_touched_by_a_second_command(train, run_a):
    """Without a checkpoint, resume=auto starts over, which removes the log and the config of before."""
    shutil.rmtree("runs/a/checkpoints")
    Path("runs/a/report.json").unlink()  # which says that the run is done
    before = contents("a")
    with RunFolder("runs/a").locked(), pytest.raises(UserError, match="runs/a is in use"):
        train("run=a", "resume=auto", "trainer.max_epochs=2")
    assert {name: content for name, content in contents("a").items() if ".lock" not in name} == before


DAMAGED = {
    "config.yaml": ["", "run: [\n", "\x00\x01", "- a\n"],
    "report.json": ["", "{", "[]", "\x00"],
    "metrics.csv": ["step,train/loss\n1,abc\n", "a,b\n1,2\n", "step,a\n1,2,3\n", "\x00\n\x00\n"],
}


def test_damaged_files_of_a_run_are_named(run_a):
    whole = {name: Path("runs/a", name).read_bytes() for name in DAMAGED}
    for name, damages in DAMAGED.items():
        for content in damages:
            Path("runs/a", name).write_bytes(content.encode() + b"\xff" * (content == "\x00"))
            before = contents("a")
            with pytest.raises(UserError, match=rf"runs/a/{name} is damaged"):
                lockstep.train(["run=a", "resume=auto", "trainer.max_epochs=2"])
            if name != "metrics.csv":
                with pytest.raises(UserError, match=rf"runs/a/{name} is damaged"):
                    lockstep.evaluate(["run=a"])
            assert contents("a") == before, (name, content)
        Path("runs/a", name).write_bytes(whole[name])


def test_a_folder_that_cannot_be_written_is_refused_before_anything_starts(train, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to("nowhere")
    before = sorted(tmp_path.iterdir())
    for place in ("file", "loop", "gone", "/proc", "n" * 300, "file/below"):
        for key in ("runs_dir", *(["data.cache_dir"] if place != "/proc" else [])):
            with pytest.raises(UserError, match=rf"(?s){key}: .* cannot be written|{key}=n+ is invalid"):
                train(f"{key}={place}")
    with pytest.raises(UserError, match=r"run=n+ is invalid"):
        train(f"run={'n' * 300}")
    assert sorted(tmp_path.iterdir()) == before


def test_a_run_whose_config_could_not_be_written_can_be_typed_again(train, monkeypatch):
    def full(file: Path, _: object) -> None:
        file.with_name("config.yaml.part").write_text("")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(recorder, "write_text", full)
        with pytest.raises(OSError, match="No space"):
            train("run=a", "debug=one_batch")
    assert train("run=a", "debug=one_batch")["status"] == "done"


def test_a_folder_that_was_there_keeps_its_files_when_a_run_cannot_start(train):
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/notes.txt").write_text("mine")
    with pytest.raises(UserError, match="limit_test_batches"):
        train("run=a", "trainer.limit_test_batches=0.1")
    Path("runs/a/metrics.csv").mkdir()
    with pytest.raises(UserError, match=r"runs/a/metrics.csv is damaged: .*it is not a regular file"):
        train("run=a", "debug=one_batch")
    assert {path.name for path in Path("runs/a").iterdir()} == {"metrics.csv", "notes.txt"}
    assert Path("runs/a/notes.txt").read_text() == "mine"


def test_files_that_are_removed_under_a_run_do_not_end_it(train, monkeypatch):
    removed = []

    def remove(self, trainer, *_) -> None:
        if trainer.global_step == 5:
            path = Path("runs/a", removed[-1])
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    monkeypatch.setattr(FiniteLoss, "on_train_batch_end", remove)
    for name in ("config.yaml", "metrics.csv", "checkpoints"):
        removed.append(name)
        assert train("run=a", "trainer.log_every_n_steps=2")["status"] == "done"
        if name == "metrics.csv":
            assert [row["step"] for row in RunFolder("runs/a").metrics()][:2] == [6, 8]
        shutil.rmtree("runs")
    removed.append(".")
    for noticed_by in ("trainer.log_every_n_steps=2", "checkpoint.every_n_steps=7"):
        with pytest.raises(TrainingFailed, match="runs/a was removed during the run"):
            train("run=a", noticed_by)
        assert not Path("runs/a").exists()


def test_what_was_trained_while_a_command_waited_is_not_removed(train, monkeypatch):
    locked = RunFolder.locked

    @contextmanager
    def after_another(self, patience_s):
        with locked(self, patience_s):
            self.checkpoints.mkdir()
            self.config_file.write_text("of the run that was in the folder")
            torch.save({"global_step": 5}, self.checkpoints / "last.ckpt")
            yield

    monkeypatch.setattr(RunFolder, "locked", after_another)
    with pytest.raises(UserError, match=r"was trained by a different command in the meantime\. Rerun the command"):
        train("run=a", "resume=auto")
    assert RunFolder("runs/a").config_file.read_text() == "of the run that was in the folder"


def test_the_error_of_a_job_is_recorded_by_its_run_alone(train, run_a, monkeypatch):
    running = '{"status": "running"}'
    reports = {"a": running, "b": running, "c": "{"}  # damaged: the error that ended the run is what counts

    def fail(_: object, settings: Settings, data: object) -> None:
        settings.folder.report_file.write_text(reports[settings.folder.path.name])
        raise RuntimeError("the real error")

    monkeypatch.setattr(local, "run_in_this_process", fail)
    for call, run in ((evaluate, "a"), (train, "b"), (train, "c")):
        with pytest.raises(RuntimeError, match="the real error"):
            call(f"run={run}")
    assert [report(run)["status"] for run in "ab"] == ["running", "failed"]  # an evaluation says nothing of the run


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("run=a optim=sgd optim.momentum=0", "momentum"),
        ("run=a trainer.limit_train_batches=0.001", "check 0.001 of the `train_dataloader`"),
        ("run=a trainer.limit_test_batches=0.1", "limit_test_batches=0.1 of 1 leaves no batches to test"),
        ("run=a trainer.min_steps=50", "trainer.min_steps=50 is more than the run's 12 steps"),
        ("run=a trainer.accumulate_grad_batches=2 trainer.val_check_interval=5", r"=5 counts micro-batches .* Set trainer.val_check_interval=4"),
        ("run=a data.root=nowhere data.source=disk", r"data.root=nowhere does not exist.*train-images-idx3-ubyte.gz"),
        ("run=a loader.batch_size=100000", r"more than the 576 training images.*loader.batch_size=576"),
        ("run=a resume=auto trainer.devices=abc", r"^trainer\.devices=abc is invalid"),
        ("resume=auto trainer.devices=abc", r"^resume=auto continues .*Pass run=<name> as well"),  # before its processes are known
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_told_and_leaves_nothing(train, wrong, told):
    with pytest.raises(UserError, match=told):
        train(*wrong.split())
    assert not Path("runs/a").exists()


@pytest.mark.parametrize("seen_by", ["trainer.log_every_n_steps=2", "trainer.limit_train_batches=5"])
def test_a_loss_that_is_no_number_ends_the_run_with_advice(train, seen_by):
    with pytest.raises(TrainingFailed, match=r"the loss is (nan|inf) at step \d+ .* lower optim.lr"):
        train("run=a", "optim=sgd", "optim.lr=1e30", seen_by)
    assert (report("a")["status"], "optim.lr" in report("a")["error"]) == ("diverged", True)


def test_a_mistake_found_after_a_checkpoint_was_saved_costs_no_file(train, monkeypatch):
    """A run without a checkpoint is removed, as one that was refused when it began."""
    at: list[int] = []

    def refuse(self, trainer, *_):
        if trainer.global_step == at[-1]:
            raise UserError("a mistake")

    def fails(step: int, *more: str) -> None:
        at.append(step)
        with pytest.raises(UserError, match="a mistake"):
            train("run=a", "checkpoint.every_n_steps=2", "trainer.max_steps=8", *more)

    monkeypatch.setattr(FiniteLoss, "on_train_batch_end", refuse)
    fails(1)
    assert not Path("runs/a").exists()
    for more in ([], ["resume=auto"]):  # step 4, then 6
        fails(5 + len(more), *more)
        assert (report("a")["status"], report("a")["error"]) == ("failed", "UserError: a mistake")
        assert Path("runs/a/report.html").is_file()
    assert step_of(Path("runs/a/checkpoints/last.ckpt")) == 4
    before = contents("a")
    monkeypatch.setattr(FiniteLoss, "on_train_start", lambda self, trainer, _: refuse(self, trainer), raising=False)
    fails(4, "resume=auto")  # before its first step
    assert contents("a") == before
    at.append(-1)
    assert train("run=a", "resume=auto")["status"] == "done"
