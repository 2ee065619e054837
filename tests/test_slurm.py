"""Runs on a real SLURM of two nodes: submitted, requeued, at its time limit, and when a node is lost."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import forked
import pytest
import slurm
from forked import until
from in_process import SMALL, report

from lockstep import ROOT
from lockstep.extras import comparison

pytestmark = [
    pytest.mark.xdist_group("slurm"),
    pytest.mark.full,
    pytest.mark.skipif(slurm.missing() is not None, reason=str(slurm.missing())),
]
OPTIONS = [
    "strategy=ddp", *SMALL, "trainer.max_epochs=4", "trainer.log_every_n_steps=1", "augment=[shift]", "augment.shift.pixels=2",
    "checkpoint.every_n_steps=10", "callbacks=[default,ema]", "schedule=cosine", "trainer.enable_progress_bar=false",
]  # fmt: skip
STEPS, HELD_AT = 36, 15
# Holds a job that has not been put back into the queue at step HELD_AT, until the system warns or ends it.
HOLD = f"""
import os, sys, time
from importlib import abc
def hold():
    from lockstep.callbacks import FiniteLoss
    from lockstep.machine import process as signals
    original = FiniteLoss.on_train_batch_end
    def hook(self, trainer, *args):
        original(self, trainer, *args)
        while trainer.global_step == {HELD_AT} and not signals.received:
            time.sleep(0.05)
    FiniteLoss.on_train_batch_end = hook
class Finder(abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "lockstep.build":
            sys.meta_path.remove(self)
            hold()
if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
    sys.meta_path.insert(0, Finder())
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Cluster]:
    cluster = slurm.Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def place(shared_command) -> Path:
    """A folder with the undisturbed run of two processes on this machine, `alone`."""
    done = replace(shared_command, popen=forked.Popen)("train.py", "run=alone", "trainer.devices=2", *OPTIONS)
    assert done.code == 0, done
    for name in ("train.py", "configs"):
        (shared_command.folder / name).symlink_to(ROOT / name)
    return shared_command.folder


@pytest.fixture
def data(shared_command) -> list[str]:
    return [f"data.root={shared_command.data}", f"data.cache_dir={shared_command.cache}"]


def identical(place: Path, run: str) -> None:
    one, other = (comparison.find(name, place / "runs") for name in ("alone", run))
    found = comparison.compare(one, other, exact=True, tolerance=0)
    assert comparison.agree(found), found


def submit(cluster: slurm.Cluster, place: Path, *options: str, overrides: list[str]) -> str:
    script = str(ROOT / "scripts/slurm.sbatch")
    command = ["sbatch", "--parsable", "--nodes=2", *options, script, *OPTIONS, *overrides]
    env = {**cluster.env, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}  # as the undisturbed one has it
    return subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, check=True).stdout.strip()


def rows(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def ended(cluster: slurm.Cluster, job: str, place: Path) -> None:
    """Waits for the job's success; a requeued one would wait two minutes, so that a broken node does not eat all jobs."""
    hastened: list[str] = []  # how often it had been put back
    lost: list[float] = []  # a job that is being requeued is FAILED for a moment

    def over() -> bool:
        state = cluster.job(job)
        if state["JobState"] == "PENDING" and state["Reason"] == "BeginTime" and state["Restarts"] not in hastened:
            hastened.append(state["Restarts"])  # not at once: the credential of the last start is still revoked
            cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now+5")
        lost[:] = [*lost, time.monotonic()] if state["JobState"] in ("FAILED", "TIMEOUT", "CANCELLED") else []
        assert not lost or lost[-1] - lost[0] < 15, (place / f"slurm-{job}.out").read_text()
        return state["JobState"] == "COMPLETED"

    until(over, 400, f"the end of job {job}")


def went_on(cluster: slurm.Cluster, place: Path, job: str, run: str) -> None:
    """The job was put back into the queue, and its run ended with the bits of the undisturbed one."""
    ended(cluster, job, place)
    assert int(cluster.job(job)["Restarts"]) >= 1
    found = report(place / "runs" / run)
    assert (found["status"], found["train/steps"]) == ("done", STEPS)
    assert found["resumed_from"].endswith("last.ckpt")
    identical(place, run)


TWO_NODES = ["hydra/launcher=slurm", "trainer.num_nodes=2", "trainer.devices=1"]


def typed(cluster: slurm.Cluster, place: Path, *args: str, **environment: str) -> subprocess.Popen:
    """A multirun on the cluster; submitit's words about SLURM's missing accounting go with its output."""
    env = {**cluster.env, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "train.py", "-m", *TWO_NODES, *args]
    return subprocess.Popen(command, cwd=place, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def holding(place: Path) -> str:
    """The option of sbatch with which the job is held."""
    (place / "hold").mkdir(exist_ok=True)
    (place / "hold" / "sitecustomize.py").write_text(HOLD)
    return f"--export=ALL,PYTHONPATH={place / 'hold'}"


def held(place: Path, run: str) -> None:
    """Waits until the run has logged the step at which it is held."""
    until(lambda: rows(place / "runs" / run / "metrics.csv") >= HELD_AT, 300, f"step {HELD_AT}")


@pytest.mark.slow
def test_a_submitted_multirun_gives_the_result_of_one_machine_and_one_job_stops_no_other(cluster, place, data):
    process = typed(cluster, place, *OPTIONS, "run=sweep", "loader.batch_size=63,64", *data)
    out, _ = process.communicate(timeout=400)
    assert process.returncode == 2, out  # of the job that cannot run
    assert sorted(path.name for path in (place / "runs/sweep").iterdir() if path.name.isdigit()) == ["0", "1"]
    assert [report(place / "runs" / f"sweep/{job}")["status"] for job in range(2)] == ["failed", "done"]
    done = report(place / "runs" / "sweep/1")
    assert (done["train/steps"], done["world_size"], done["nodes"]) == (STEPS, 2, 2)
    assert "sweep/1" in out
    identical(place, "sweep/1")


@pytest.mark.full
def test_tasks_of_srun_are_the_processes_without_a_number_per_node(cluster, place, data):
    srun = ["srun", "--ntasks=2", "--nodes=1", sys.executable, "train.py", "run=tasks", *OPTIONS, *data]
    environment = {**cluster.env, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(srun, cwd=place, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert report(place / "runs/tasks")["world_size"] == 2
    identical(place, "tasks")


@pytest.mark.full
def test_nodes_with_unequal_tasks_are_an_error_before_a_folder(cluster, place, data):
    srun = [
        "srun",
        "--ntasks=4",
        "--nodes=2",
        "--distribution=block:block:block,pack",
        sys.executable,
        "train.py",
        "run=uneven",
    ]
    done = subprocess.run(srun, cwd=place, env=cluster.env, capture_output=True, text=True, timeout=400)
    assert (done.returncode, "each node needs the same number of processes" in done.stderr) == (2, True), done.stderr
    assert not (place / "runs/uneven").exists()


@pytest.mark.full
def test_ctrl_c_takes_the_jobs_back(cluster, place, data):
    process = typed(cluster, place, *OPTIONS, "run=stopped", "seed=0,1", "trainer.max_epochs=500", *data)
    until(lambda: all(rows(place / f"runs/stopped/{job}/metrics.csv") > 5 for job in range(2)), 300, "both jobs")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    until(lambda: not cluster.run("squeue", "-h").strip(), 60, "the end of all jobs")


@pytest.mark.full
def test_trials_of_a_search_are_jobs_of_slurm(cluster, place, data):
    search = [
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=2",
        "hydra.sweeper.n_jobs=2",
        "hydra/sweeper/pruner=median",
    ]
    process = typed(cluster, place, *OPTIONS, *search, "optim.lr=interval(1e-4,1e-2)", "run=search", *data)
    out, _ = process.communicate(timeout=400)
    assert process.returncode == 0, out
    reports = [report(place / "runs" / f"search/{trial}") for trial in range(2)]
    assert [found["status"] for found in reports] == ["done", "done"]
    best = max(found["val/acc"] for found in reports)
    assert f"val/acc={best:.6g}" in (place / "runs/search/experiment/best.yaml").read_text()


def requeue(cluster: slurm.Cluster, job: str) -> None:
    cluster.run("scontrol", "requeue", job)


def lose_a_node(cluster: slurm.Cluster, _job: str) -> None:
    cluster.kill_node("n2")
    until(lambda: cluster.states()["n2"].startswith("down"), 60, "the loss of n2")
    cluster.start_node("n2")


@pytest.mark.slow
@pytest.mark.parametrize("event", [requeue, lose_a_node])
def test_a_run_that_is_requeued_or_loses_a_node_goes_on_in_its_own_directory(cluster, place, data, event):
    job = submit(cluster, place, holding(place), overrides=data)
    run = f"basic_net-mnist-{job}.0"
    held(place, run)
    event(cluster, job)
    went_on(cluster, place, job, run)


@pytest.mark.full
def test_before_its_time_limit_a_run_saves_and_goes_back_into_the_queue(cluster, place, data):
    # SLURM looks every 30 s, and warns up to a minute early: here after 40 to 100 s. The run is held until then.
    options = ["--time=2", "--signal=USR2@20", holding(place)]
    job = submit(cluster, place, *options, overrides=["run=limited", *data])
    went_on(cluster, place, job, "limited")
    assert "SIGUSR2: everything is saved" in (place / f"slurm-{job}.out").read_text()


@pytest.mark.full
def test_submitit_requeues_a_job_before_its_time_limit(cluster, place, data):
    process = typed(cluster, place, *OPTIONS, "run=warned", *data, PYTHONPATH=holding(place).rpartition("=")[2])
    try:
        held(place, "warned/0")
        (job,) = cluster.run("squeue", "-h", "-o", "%A").split()
        cluster.run("scancel", "--signal=USR2", job)  # what SLURM does signal_delay_s before the limit
        went_on(cluster, place, job, "warned/0")
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0, out
    finally:
        process.kill()
        process.communicate()
