"""Multiruns: strategies side by side, jobs on slots of the machine, and Optuna's sweeps. Commands and jobs are forked."""

import csv
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import forked
import optuna
import pytest
from forked import until, working_in
from in_process import SMALL

from lockstep.launch.local import reserve_port

pytestmark = pytest.mark.slow
# Holds the jobs of these numbers at their third step, until the system warns or kills them.
HELD = "TEST_HELD"
HOLD = """
import os, time
from pathlib import Path
from lockstep.callbacks import FiniteLoss
from lockstep.machine import process
original = FiniteLoss.on_train_batch_end
def hook(self, trainer, *args):
    original(self, trainer, *args)
    held = Path(trainer.default_root_dir).name in os.environ["TEST_HELD"].split(",") and trainer.global_step == 3
    while held and not process.received:
        time.sleep(0.01)
FiniteLoss.on_train_batch_end = hook
"""
SHORT = ["trainer.limit_train_batches=4", "trainer.enable_progress_bar=false", *SMALL]
SPACE = ["optim.lr=tag(log,interval(1e-5,1e-2))", "optim=adamw,sgd"]
SLOTS = ["hydra/launcher=slots", "hydra.launcher.jobs=2"]


@pytest.fixture
def command(forked_command):
    return forked_command


def study(folder: Path, name: str) -> optuna.Study:
    return optuna.load_study(study_name=name, storage=f"sqlite:///{folder}/runs/{name}/study.db")


def holding(folder: Path, *jobs: int) -> dict[str, str]:
    """The environment of a multirun some of whose jobs are held."""
    (folder / "hold.py").write_text(HOLD)
    return {forked.HOOK: str(folder / "hold.py"), HELD: ",".join(map(str, jobs))}


def test_jobs_run_side_by_side_and_one_that_fails_stops_no_other(command):
    typed = ["strategy=ddp,fsdp", "seed=0,1", "loader.batch_size=64,63", "trainer.devices=2", "run=side"]
    done = command("train.py", "-m", *typed, *SLOTS, *SHORT)
    assert done.code == 2, done
    reports = [command.report(f"side/{job}") for job in range(8)]
    assert [r["status"] for r in reports] == ["done", "failed"] * 4
    good = reports[::2]
    assert [(r["strategy"], r["seed"], r["world_size"], r["test/count"]) for r in good] == [
        ("ddp", 0, 2, 103), ("ddp", 1, 2, 103), ("fsdp", 0, 2, 103), ("fsdp", 1, 2, 103)
    ]  # fmt: skip
    assert good[0]["test/loss"] == pytest.approx(good[2]["test/loss"], rel=0.05)  # dropout is on
    assert good[0]["test/loss"] != good[1]["test/loss"]
    assert "loader.batch_size=62 or 64" in (command.folder / "runs/side/1.log").read_text()
    begun = [done.out.index(f"side/{job} begins") for job in (0, 1)]
    assert max(begun) < done.out.index("side/0 done")  # the second did not wait for the first
    with (command.folder / "runs/side/results.csv").open() as file:
        assert [row["status"] for row in csv.DictReader(file)] == ["done", "failed"] * 4


def test_a_job_that_fails_in_training_stops_no_other_and_the_exit_code_is_its_own(command):
    loss = ["optim=sgd", "optim.lr=1e30,1e-3", "trainer.log_every_n_steps=1", "trainer.precision=32-true"]
    done = command("train.py", "-m", *loss, "run=failing", *SHORT)
    assert done.code == 1, done
    assert [command.report(f"failing/{job}")["status"] for job in (0, 1)] == ["diverged", "done"]
    assert (done.err.count("error: "), done.out.count("test accuracy")) == (1, 1)  # each job's own


@pytest.mark.parametrize(("warning", "status"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "preempted")])
def test_a_multirun_that_is_ended_saves_its_jobs_and_goes_on_when_it_is_typed_again(warning, status, command, tmp_path):
    args = ["-m", "seed=0,1,2", "strategy=ddp", "trainer.devices=2", "run=ended", "trainer.max_epochs=2",
            "trainer.log_every_n_steps=1", *SLOTS, *SMALL]  # fmt: skip
    started = command.start("train.py", *args, env=holding(tmp_path, 0, 1))
    until(lambda: all((command.folder / f"runs/ended/{job}/metrics.csv").exists() for job in (0, 1)))
    send = os.killpg if warning is signal.SIGINT else os.kill  # a terminal sends it to all
    send(started.process.pid, warning)
    done = started.done(120)
    assert done.code == 130, done
    until(lambda: not working_in(command.folder))
    assert [command.report(f"ended/{job}").get("status") for job in range(3)] == [status, status, None]
    done = command("train.py", *args, "resume=auto")
    assert done.code == 0, done
    reports = [command.report(f"ended/{job}") for job in range(3)]
    assert [(r["status"], r["train/steps"]) for r in reports] == [("done", 18)] * 3
    assert [r["resumed_from"] is not None for r in reports] == [True, True, False]


@pytest.mark.full
def test_a_sweep_that_was_killed_runs_what_is_missing(command, tmp_path):
    """Twelve trials, two at a time, some pruned; everything is killed when four have ended and two are running."""
    args = [*SPACE, *SLOTS, "hydra/sweeper=optuna", "hydra.sweeper.n_trials=12", "hydra.sweeper.n_jobs=2", "hydra.sweeper.sampler.seed=1",
            "hydra/sweeper/pruner=median", "hydra.sweeper.pruner.n_startup_trials=2", "run=search", "trainer.val_check_interval=2",
            "trainer.limit_train_batches=8", *SMALL,
            "trainer.precision=32-true"]  # which trials are pruned, and when, depends on it  # fmt: skip
    started = command.start("train.py", "-m", *args, env=holding(tmp_path, 4, 5))
    until(lambda: all((command.folder / f"runs/search/{number}/config.yaml").exists() for number in (4, 5)), 300)
    os.killpg(started.process.pid, signal.SIGKILL)
    started.done()
    until(lambda: not working_in(command.folder))
    left = [t for t in study(command.folder, "search").trials if t.state.name == "RUNNING"]
    assert [t.number for t in left] == [4, 5]
    done = command("train.py", "-m", *args, timeout_s=600)
    assert done.code == 0, done
    trials = study(command.folder, "search").trials
    assert [t.number for t in trials] == list(range(12))
    assert {t.state.name for t in trials} == {"COMPLETE", "PRUNED"}
    assert [trials[t.number].params for t in left] == [t.params for t in left]  # run again, not asked anew
    for trial in trials:
        own = command.report(f"search/{trial.number}")
        assert own["status"] == ("pruned" if trial.state.name == "PRUNED" else "done")
        if trial.state.name == "COMPLETE":
            assert trial.value == own["val/acc"]
    pruned = [max(trial.intermediate_values) for trial in trials if trial.state.name == "PRUNED"]
    assert min(pruned) < 8  # before its end; which trials are compared when depends on what runs side by side
    folder = command.folder / "runs/search"
    with (folder / "trials.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 12
    assert (folder / "study.html").stat().st_size > 100_000
    again = command("train.py", "-m", *args)  # nothing is missing
    assert again.code == 0, again
    assert len(study(command.folder, "search").trials) == 12
    assert "begins" not in again.out
    wrong = command("train.py", "-m", "--config-dir", str(folder), "experiment=best,worst", "run=both")
    assert wrong.code == 2, wrong
    assert "no option best" not in wrong.err  # it is found there
    assert "experiment=best,worst: experiment has no option worst" in wrong.err
    best = command("train.py", "--config-dir", str(folder), "experiment=best", "run=best", *SMALL,
                   f"data.root={command.data}", env={"OMP_NUM_THREADS": "1"})  # fmt: skip  # as many as each of two jobs had
    assert best.code == 0, best
    assert command.report("best")["val/acc"] == study(command.folder, "search").best_value


@pytest.mark.full
def test_failed_trials_and_such_without_a_number_are_recorded_and_end_nothing(command):
    done = command("train.py", "-m", "hydra/sweeper=optuna", "hydra/sweeper/sampler=grid", "hydra.sweeper.n_trials=9", "run=grid",
                   "optim.lr=1e30,1e-3", "loader.batch_size=63,64", "strategy=single", "trainer.accumulate_grad_batches=2", *SHORT)  # fmt: skip
    assert done.code == 0, done
    trials = study(command.folder, "grid").trials
    assert len(trials) == 4
    assert trials[-1].state.name == "FAIL"  # the grid's sampler stops the study at the last one
    good = [t for t in trials if t.state.name == "COMPLETE"]
    assert [(t.params["optim.lr"], t.params["loader.batch_size"]) for t in good] == [(0.001, 64)]
    assert all(t.user_attrs["error"] for t in trials if t.state.name == "FAIL")


@pytest.mark.full
def test_two_objectives_leave_a_front(command):
    done = command("train.py", "-m", "hydra/sweeper=optuna", "hydra/sweeper/sampler=random", "hydra.sweeper.sampler.seed=0",
                   "hydra.sweeper.objective=[val/loss,parameters]", "hydra.sweeper.n_trials=2", "run=front", "optim.lr=interval(1e-4,1e-2)",
                   *SHORT)  # fmt: skip
    assert done.code == 0, done
    front = study(command.folder, "front").best_trials
    assert [d.name for d in study(command.folder, "front").directions] == ["MINIMIZE", "MINIMIZE"]
    assert len(list((command.folder / "runs/front/experiment").glob("best-*.yaml"))) == len(front)
    assert "Pareto" in (command.folder / "runs/front/study.html").read_text()
    again = ["-m", "hydra/sweeper=optuna", "run=front", "optim.lr=interval(1e-4,1e-2)", "hydra.sweeper.n_trials=3"]
    other = command("train.py", *again, "hydra.sweeper.objective=val/acc")
    assert (other.code, "optimises ['val/loss', 'parameters']" in other.err) == (2, True), other
    (command.folder / "runs/front/study.db").unlink()
    other = command("train.py", *again)
    assert (other.code, "runs of a different study (0, 1)" in other.err.replace("(1, 0)", "(0, 1)")) == (2, True), other


def test_what_cannot_be_searched_for_is_told(command):
    wrong = ["hydra.sweeper.objective=[val/acc,val/loss]", "hydra/sweeper/pruner=median"]
    done = command("train.py", "-m", "hydra/sweeper=optuna", "optim.lr=interval(1e-4,1e-2)", *wrong)
    assert (done.code, "trials are pruned by one validation metric" in done.err) == (2, True), done
    assert "Traceback" not in done.err and command.files() == []


PROGRAMS = sorted(Path("/usr/lib/postgresql").glob("*/bin"))


@pytest.fixture
def postgres() -> Iterator[str]:
    """The URL of a PostgreSQL server of our own. It refuses to run as root, so it belongs to Debian's user for it."""
    if not PROGRAMS or os.geteuid() != 0:
        pytest.skip("PostgreSQL is not installed (bash scripts/install_test_systems.sh), or this is not root")
    folder = Path(tempfile.mkdtemp())  # pytest's own folders are closed to other users
    shutil.chown(folder, "postgres")
    folder.chmod(0o755)
    with reserve_port() as port:
        pass
    become = ["runuser", "-u", "postgres", "--"]
    initdb = [*become, PROGRAMS[-1] / "initdb", "-A", "trust", "-D", folder / "data"]
    subprocess.run(initdb, check=True, capture_output=True)
    options = ["-D", folder / "data", "-p", str(port), "-k", folder, "-c", "listen_addresses=127.0.0.1"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen([PROGRAMS[-1] / "postgres", *options], user="postgres", stdout=log, stderr=log)
    try:
        ready = [PROGRAMS[-1] / "pg_isready", "-h", "127.0.0.1", "-p", str(port)]
        until(lambda: subprocess.run(ready, capture_output=True).returncode == 0, 60)
        yield f"postgresql+psycopg://postgres:s3cret-w0rd@127.0.0.1:{port}/postgres"
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)
        shutil.rmtree(folder)


@pytest.mark.full
def test_two_machines_work_on_one_study_in_a_database(command, postgres):
    args = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=6", "hydra.sweeper.study_name=shared", f"hydra.sweeper.storage={postgres}",
            "hydra/sweeper/pruner=median", "optim.lr=interval(1e-4,1e-2)", *SHORT]  # fmt: skip
    both = [command.start("train.py", "-m", *args, f"run={name}") for name in ("here", "there")]
    for started in both:
        done = started.done()
        assert done.code == 0, done
    storage = optuna.storages.RDBStorage(postgres)
    trials = optuna.load_study(study_name="shared", storage=storage).trials
    storage.remove_session()
    storage.engine.dispose()
    assert 6 <= len(trials) <= 7  # both may ask for the last one
    assert {t.state.name for t in trials} <= {"COMPLETE", "PRUNED"}
    owners = {t.number: t.user_attrs["sweep"].split("@")[0] for t in trials}
    assert set(owners.values()) == {"here", "there"}
    for number, owner in owners.items():
        assert command.report(f"{owner}/{number}")["status"] in ("done", "pruned")
    for path in (command.folder / "runs").rglob("*"):  # a password is nowhere
        assert path.is_dir() or b"s3cret-w0rd" not in path.read_bytes(), path
