"""The main job as users type it: forked from a server. The README's and the wheel's tests start interpreters of their own."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import warnings

import forked
import pytest
from in_process import SMALL

from lockstep import ROOT
from lockstep.reporting.console import log_to_file

SHORT = ["trainer.limit_train_batches=4", *SMALL]
TWO = ["strategy=ddp", "trainer.devices=2"]


def torchrun(command, *args: str) -> subprocess.CompletedProcess:
    """train.py in two processes that torchrun starts."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    data = [f"data.root={command.data}", f"data.cache_dir={command.cache}"]
    full = [sys.executable, *launcher, str(ROOT / "train.py"), *data, *args]
    return subprocess.run(full, cwd=command.folder, capture_output=True, text=True, timeout=300)


def report(command, run: str) -> dict:
    return json.loads((command.folder / "runs" / run / "report.json").read_text())


def hook(folder, *lines: str) -> dict[str, str]:
    """The environment of a command whose processes do this first."""
    (folder / "hook.py").write_text("\n".join(lines))
    return {forked.HOOK: str(folder / "hook.py")}


def test_two_processes_are_one_run_with_one_voice(forked_command):
    command = forked_command
    small = ["trainer.limit_train_batches=4", "trainer.accelerator=cpu"]
    done = command("train.py", *TWO, "run=pair", *small, "trainer.precision=32-true")
    assert done.code == 0, done
    lines = done.out.splitlines()
    parts = "pair: basic_net (1,199,882 parameters)", "mnist from disk", "ddp, 2 processes on cpu", "32-true", "4 steps"
    assert all(part in lines[0] for part in [*parts, "batch 64 = 2 x 32"]), done
    assert done.out.count("batch 64 = 2 x 32") == 1
    assert sum("test accuracy" in line for line in lines) == 1
    assert re.fullmatch(r"evaluate it: python \S*/eval.py run=pair", lines[-1])  # tests/config/test_project.py runs it
    assert done.err == ""
    assert [path.name for path in command.folder.iterdir()] == ["runs"]
    assert [path.name for path in (command.folder / "runs").iterdir()] == ["pair"]
    assert "batch 64 = 2 x 32" in (command.folder / "runs/pair/train.log").read_text()


def test_with_json_standard_output_has_the_result_and_nothing_else(forked_command):
    command = forked_command
    done = command("train.py", "--json", *TWO, "run=pair", *SHORT)
    assert (done.code, json.loads(done.out)) == (0, report(command, "pair")), done
    assert done.err.startswith("pair: basic_net (")
    for args, told in (
        (["-m", "seed=0,1"], "--json prints the result of one run, so it has no effect with -m. Remove one."),
        (["--help"], "so it has no effect with --help."),
        (["--cfg=job"], "so it has no effect with --cfg=job."),
        (["optim.lr=-1"], "optim.lr=-1"),
    ):
        done = command("train.py", "--json", *args)
        assert (done.code, done.out, told in done.err) == (2, "", True), done


def test_a_multirun_is_as_many_runs_as_jobs_and_a_table_and_typed_twice_harms_nothing(forked_command):
    command, args = forked_command, ["-m", "optim.lr=1e-3,3e-3", "seed=0,1", "run=sweep", *SHORT]
    done = command("train.py", *args)
    assert done.code == 0, done
    sweep = command.folder / "runs/sweep"
    reports = [report(command, f"sweep/{job}") for job in range(4)]
    assert {path.name for path in sweep.iterdir()} == {*"0123", "multirun.yaml", "results.csv", "spread.csv"}
    assert {(each["status"], each["test/count"]) for each in reports} == {("done", 103)}
    assert [each["seed"] for each in reports] == [0, 1, 0, 1]
    assert len({each["test/loss"] for each in reports}) == 4
    with (sweep / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == [f"sweep/{job}" for job in range(4)]
    assert [float(row["test/loss"]) for row in rows] == [each["test/loss"] for each in reports]
    overrides = [f"optim.lr={lr} seed={seed}" for lr in (0.001, 0.003) for seed in (0, 1)]
    for job, own in enumerate(overrides):
        assert any(f"sweep/{job}" in line and own in line for line in done.out.splitlines()), done
    again = command("eval.py", "run=sweep/2", f"data.cache_dir={command.cache}")
    assert again.code == 0, again
    figures = json.loads((sweep / "2/eval.json").read_text())
    assert figures["test/loss"] == pytest.approx(reports[2]["test/loss"], rel=1e-6)
    done = command("train.py", *args)
    assert done.code == 2, done
    assert "runs/sweep/0 already exists" in done.err
    assert [report(command, f"sweep/{job}") for job in range(4)] == reports


def test_ctrl_c_ends_a_multirun_as_a_whole(forked_command):
    options = ["seed=0,1", "run=sweep", "trainer.max_epochs=500", "trainer.log_every_n_steps=1", *SMALL, *TWO]
    started = forked_command.start("train.py", "-m", *options)
    sweep = forked_command.folder / "runs/sweep"
    forked.until((sweep / "0/metrics.csv").exists)
    os.killpg(started.process.pid, signal.SIGINT)  # as a terminal does: to the command and to all its processes
    done = started.done(60)
    assert done.code == 130, done
    assert not (sweep / "1").exists()
    found = report(forked_command, "sweep/0")
    assert found["status"] == "interrupted"
    ended = re.search(
        r"ended by SIGINT after \d+ steps?; rerun the command with resume=auto to continue", found["error"]
    )
    assert (sweep / "0/checkpoints/last.ckpt").is_file()
    assert done.err.count("error:") == 1, done
    assert ended and ended[0] in done.err
    assert done.err.count("press Ctrl-C again to end it at once") == 1


FAILURES = {  # of rank 1 in step 3: the status of the run, and a line on the screen
    "return loss * float('nan')": ("diverged", "error: the loss is nan at step 3 (epoch 0) on rank 1, in a batch of"),
    "raise KeyError('mine')": ("failed", "[rank 1] KeyError: 'mine'"),
    "os.kill(os.getpid(), signal.SIGSEGV)": (
        "failed",
        "error: rank 1 was killed by SIGSEGV; the other processes ended too",
    ),
    "os.kill(os.getpid(), signal.SIGTERM)": ("preempted", "error: ended by SIGTERM to rank 1 after"),  # all save
}
FAILING = [pytest.param(code, *ends, marks=[pytest.mark.slow] * ("nan" not in code)) for code, ends in FAILURES.items()]


@pytest.mark.parametrize(("code", "status", "line"), FAILING)
def test_a_rank_that_fails_alone_ends_all_and_its_words_are_on_the_screen(code, status, line, forked_command, tmp_path):
    env = hook(
        tmp_path,
        "import os, signal",
        "from lockstep.kit.task import Task",
        "original = Task.mean_loss",
        "def hook(self, *args):",
        "    loss = original(self, *args)",
        "    if self.trainer.global_step == 2 and self.trainer.global_rank == 1:",
        f"        {code}",
        "    return loss",
        "Task.mean_loss = hook",
    )
    options = ["trainer.log_every_n_steps=1", "checkpoint.every_n_steps=1", "trainer.max_epochs=500"]
    done = forked_command("train.py", "run=a", *TWO, *options, *SMALL, env=env, timeout_s=120)
    assert done.code == 1, done
    found = report(forked_command, "a")
    assert (found["status"], bool(found["error"])) == (status, True)
    assert any(told.startswith(line) for told in done.err.splitlines()), done
    assert done.err.count("Traceback") == ("KeyError" in line), done
    if "nan" in line or status == "preempted":
        assert done.err.count("error:") == 1, done
        assert (forked_command.folder / "runs/a/checkpoints/last.ckpt").is_file()


def test_a_failed_process_of_torchrun_does_not_wait_for_exit_handlers(forked_command, tmp_path):
    """Lightning's own one, `destroy_process_group`, waits for the others."""
    env = hook(
        tmp_path,
        "import atexit, time, lightning.pytorch as pl",
        "def fit(*_, **__):",
        "    atexit.register(time.sleep, 600)",
        "    raise KeyError('mine')",
        "pl.Trainer.fit = fit",
    )
    env |= {"TORCHELASTIC_RUN_ID": "a", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # fmt: skip
    done = forked_command("train.py", "run=a", *SMALL, env=env, timeout_s=120)
    assert done.code == 1, done
    assert "KeyError: 'mine'" in done.err


def test_warnings_reach_the_screen_and_the_log(tmp_path, capsys):
    with warnings.catch_warnings(), log_to_file(tmp_path / "train.log"):
        warnings.simplefilter("always")
        warnings.warn("something to know", stacklevel=1)
    assert capsys.readouterr().err.count("UserWarning: something to know") == 1
    assert "something to know" in (tmp_path / "train.log").read_text()


@pytest.mark.slow
def test_torchrun_starts_the_same_job(command):
    done = torchrun(command, "strategy=ddp", *SHORT)
    assert done.returncode == 0, done.stderr
    (run,) = (command.folder / "runs").iterdir()
    found = report(command, run.name)
    assert (found["status"], found["world_size"], found["test/count"]) == ("done", 2, 103)
    assert done.stdout.count("test accuracy") == 1


@pytest.mark.slow
def test_processes_that_see_other_files_end_at_once_and_say_so(command, forked_command):
    """As two nodes whose runs_dir is not shared: rank 0 finds a checkpoint to go on from, rank 1 finds none."""
    done = forked_command("train.py", "run=a", "runs_dir=disk0/runs", *SHORT)
    assert done.code == 0, done
    longer = ["run=a", "resume=auto", "trainer.max_epochs=2"]
    done = torchrun(command, "strategy=ddp", "runs_dir=disk${oc.env:RANK}/runs", *SHORT, *longer)
    assert done.returncode == 1
    assert "rank 1 starts from new weights, but rank 0 starts from disk0/runs/a/checkpoints/last.ckpt" in done.stderr
    assert "all nodes must see the same files" in done.stderr
