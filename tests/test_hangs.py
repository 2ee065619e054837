"""A process that hangs, or that fails where the others do not notice, ends the whole run; and Ctrl-C on several processes."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest
from forked import until, working_in
from in_process import SMALL

from lockstep import ROOT

TWO = ["strategy=ddp", "trainer.devices=2", *SMALL, "trainer.max_epochs=500"]


STEP, IN_THIRD_STEP = "lockstep.kit.task.Task.mean_loss", "args[0].trainer.global_step == 2"
STOPPED = "os.kill(os.getpid(), signal.SIGSTOP)"


def hook(folder: Path, bodies: dict[int, str], name: str = STEP, when: str = IN_THIRD_STEP) -> dict[str, str]:
    """The environment of a command whose processes do what `bodies` has for their rank when they call `name`."""
    branches = [f"    if rank == '{rank}': {body}" for rank, body in bodies.items()]
    lines = f"""
import os, pkgutil, signal, time
owner, _, name = "{name}".rpartition(".")
owner = pkgutil.resolve_name(owner)
original = getattr(owner, name)
def hook(*args, **kwargs):
    rank = os.environ.get("RANK") if {when} else None
BRANCHES
    return original(*args, **kwargs)
setattr(owner, name, hook)
"""
    (folder / "hook.py").write_text(lines.replace("BRANCHES", "\n".join(branches)))
    return {forked.HOOK: str(folder / "hook.py")}


def torchrun(port: int, rank: int) -> dict[str, str]:
    """The environment of one of its two processes."""
    sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    return {**sizes, "TORCHELASTIC_RUN_ID": "a", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "body", "words", "elsewhere"),
    [
        (1, STOPPED, r"error: rank 1 of 2 hung \(no response; the process may be stopped\)", None),
        (0, STOPPED, r"error: \[rank 1\] rank 0 of 2, or the launcher that hosts its store, hung \(no response", None),
        (1, "time.sleep(600)", r"error: rank 1 of 2 hung \(in .*hook.py:\d+ \(hook\)\)", None),
        # A request to the store of a stopped process waits for ever, so they are monitored between `fit` and `test` too.
        (0, STOPPED, "", "lockstep.build.evaluate"),
        (1, STOPPED, "", "lockstep.build.evaluate"),
        # What rank 0 does in the end is done by it alone.
        (0, STOPPED, "", "lockstep.reporting.recorder.Recorder.__exit__"),
    ],
)
def test_a_process_that_hangs_is_named_and_all_end(rank, body, words, elsewhere, forked_command, tmp_path):
    env = hook(tmp_path, {rank: body}, elsewhere, "True") if elsewhere else hook(tmp_path, {rank: body})
    options = ["strategy.timeout_s=20", *(["trainer.max_steps=2"] if elsewhere else [])]
    started = forked_command.start("train.py", "run=a", *TWO, *options, env=env)
    until((forked_command.folder / "runs/a/logs").exists)
    began_s = time.monotonic()
    done = started.done(120)
    said = [line for line in done.err.splitlines() if line.startswith("error:")]
    assert (done.code, bool(re.match(words, said[0]))) == (1, True), done
    found = forked_command.report("a")
    assert (found["status"], f"rank {rank} of 2" in done.err) == ("failed", True), done
    assert working_in(forked_command.folder) == []
    if not elsewhere:
        assert f"rank {rank} of 2" in found["error"]
        assert time.monotonic() - began_s < 60
        assert not [line for line in said[1:] if "the connection to another process is lost" not in line], done
        logs = [path.read_text() for path in sorted((forked_command.folder / "runs/a/logs").iterdir())]
        stacks = {each for each, log in enumerate(logs) if "no batch finished for" in log}
        assert stacks == ({0, 1} if body != STOPPED else {1 - rank})
        assert any("hook.py" in log for log in logs) is (body != STOPPED)


@pytest.mark.slow
def test_a_process_that_fails_ends_one_that_is_in_no_collective(forked_command, tmp_path, port):
    """As srun starts them: nobody else ends them."""
    env = hook(tmp_path, {0: "time.sleep(600)", 1: "raise KeyError('mine')"})
    envs = [env | torchrun(port, rank) for rank in range(2)]
    first, second = [forked_command.start("train.py", "run=a", *TWO, env=env) for env in envs]
    assert "[rank 1] KeyError: 'mine'" in second.done(120).err
    began_s = time.monotonic()
    done = first.done(60)
    assert time.monotonic() - began_s < 10
    assert done.code == 1, done
    assert "error: ended because rank 1 failed" in done.err
    found = forked_command.report("a")
    assert (found["status"], found["error"]) == ("failed", "TrainingFailed: ended because rank 1 failed")


TRAINS, TESTS = (
    "lockstep.callbacks.stopping.RankAgreement.on_train_start",
    "lockstep.kit.task.Task.on_test_batch_start",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "alone", "words"),
    [
        (
            TRAINS,
            False,
            r"after \d steps?; rerun the command with resume=auto to continue\.",
        ),  # Lightning's handler was there
        (TESTS, False, r"during the test; rerun the command with resume=auto\."),
        (TESTS, True, r"to rank 1 during the test; rerun the command with resume=auto\."),
    ],
)
def test_sigterm_is_named_once_and_the_run_was_preempted(moment, alone, words, forked_command, tmp_path):
    """Sent to the command, which passes it on, or to one rank."""
    waits = f"import forked, lockstep.machine.process as p; open({str(tmp_path)!r} + '/at' + rank, 'w').close(); forked.until(lambda: p.received)"
    bodies = {1: "os.kill(os.getpid(), signal.SIGTERM)"} if alone else dict.fromkeys(range(2), waits)
    options = ["trainer.max_steps=4", "loader.eval_batch_size=20"]
    started = forked_command.start("train.py", "run=a", *TWO, *options, env=hook(tmp_path, bodies, moment, "True"))
    if not alone:
        until(lambda: all((tmp_path / f"at{rank}").exists() for rank in range(2)))
        started.process.send_signal(signal.SIGTERM)
    done = started.done(120)
    said = [line for line in done.err.splitlines() if line.startswith("error:")]
    assert (done.code, len(said)) == (1, 1), done
    assert re.fullmatch(f"error: ended by SIGTERM {words}", said[0])
    found = forked_command.report("a")
    assert (found["status"], found["error"]) == ("preempted", said[0].replace("error", "Preempted", 1))
    assert working_in(forked_command.folder) == []


@pytest.mark.slow
def test_ctrl_c_twice_ends_several_processes_at_once(forked_command, tmp_path):
    env = hook(tmp_path, {0: f"open({str(tmp_path / 'stuck')!r}, 'w'), time.sleep(600)"})
    started = forked_command.start("train.py", "run=a", *TWO, env=env)
    until((tmp_path / "stuck").exists)
    os.killpg(started.process.pid, signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):  # it waits for the step
        started.process.wait(1)
    os.killpg(started.process.pid, signal.SIGINT)
    began_s = time.monotonic()
    done = started.done(60)
    assert time.monotonic() - began_s < 5
    assert done.code == 130, done
    assert forked_command.report("a")["status"] == "interrupted"
    assert "Traceback" not in done.err
    assert working_in(forked_command.folder) == []


@pytest.mark.slow
def test_ctrl_c_under_torchrun_finishes_the_step_and_saves(command):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    data = [f"data.root={command.data}", f"data.cache_dir={command.cache}"]
    arguments = [str(ROOT / "train.py"), *data, "run=a", *TWO, "trainer.log_every_n_steps=1"]
    process = subprocess.Popen(
        [*launcher, *arguments], cwd=command.folder, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    until((command.folder / "runs/a/metrics.csv").exists)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1  # torchrun's own
    found = command.report("a")
    assert found["status"] == "interrupted"
    assert re.search(r"error: ended by SIGINT after \d+ steps?; rerun the command with resume=auto", err), err
    assert (command.folder / "runs/a/checkpoints/last.ckpt").is_file()


# A worker whose others never come: it waits for rank 0's store.
WORKER = """
from pathlib import Path
from lockstep import launch
def job(settings, data):
    from lockstep.strategies import rendezvous
    connect = rendezvous.dist.TCPStore
    def waits(*args, **kwargs):
        Path("waits").touch()
        return connect(*args, **kwargs)
    rendezvous.dist.TCPStore = waits
    launch.job("train").run(settings, data)
launch.main(launch.Job("train", job, launch.data))
"""
AGENT = (
    "import subprocess, sys; process = subprocess.Popen(sys.argv[1:]); print(process.pid, flush=True); process.wait()"
)


@pytest.mark.slow
def test_a_worker_that_waits_for_others_ends_with_its_agent(command, port):
    (command.folder / "worker.py").write_text(WORKER)
    env = torchrun(port, 0) | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    data = [f"data.root={command.data}", f"data.cache_dir={command.cache}"]
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, sys.executable, "worker.py", *data, "run=a", *TWO],
        cwd=command.folder, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip
    until((command.folder / "waits").exists)
    agent.kill()
    began_s = time.monotonic()
    _, err = agent.communicate(timeout=60)  # until the worker, which has the same pipe, ends
    assert time.monotonic() - began_s < 10
    assert err.count(f"error: torchrun's agent (process {agent.pid}) has ended, so its processes end too.") == 1, err
    assert working_in(command.folder) == []
