"""The main job as users type it: whole commands in their own processes."""

import csv
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from lockstep import ROOT

SHORT = ["trainer.limit_train_batches=4", "trainer.accelerator=cpu"]
TWO = ["strategy=ddp", "trainer.devices=2"]


def torchrun(command, *args: str) -> subprocess.CompletedProcess:
    """train.py in two processes that torchrun starts."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    data = [f"data.root={command.data}", f"data.cache_dir={command.cache}"]
    full = [sys.executable, *launcher, str(ROOT / "train.py"), *data, *args]
    return subprocess.run(full, cwd=command.folder, capture_output=True, text=True, timeout=300)


def test_two_processes_are_one_run_with_one_voice(command):
    done = command("train.py", *TWO, "run=pair", *SHORT, "trainer.precision=32-true")
    assert done.code == 0, done
    lines = done.out.splitlines()
    (plan,) = [line for line in lines if "batch 64 = 2 x 32" in line]
    for part in (
        "pair: basic_net (1,199,882 parameters)",
        "mnist from disk",
        "ddp, 2 processes on cpu",
        "32-true",
        "4 steps",
    ):
        assert part in plan
    assert lines.index(plan) == 0
    assert sum("test accuracy" in line for line in lines) == 1
    assert lines[-1] == "evaluate it: python eval.py run=pair"
    assert done.err == ""
    assert [path.name for path in command.folder.iterdir()] == ["runs"]
    assert [path.name for path in (command.folder / "runs").iterdir()] == ["pair"]
    assert "batch 64 = 2 x 32" in (command.folder / "runs/pair/train.log").read_text()


def test_a_multirun_is_as_many_runs_as_jobs_and_a_table(command):
    done = command("train.py", "-m", "optim.lr=1e-3,3e-3", "seed=0,1", "run=sweep", *SHORT)
    assert done.code == 0, done
    sweep = command.folder / "runs/sweep"
    reports = [json.loads((sweep / str(job) / "report.json").read_text()) for job in range(4)]
    assert sorted(path.name for path in sweep.iterdir()) == ["0", "1", "2", "3", "multirun.yaml", "results.csv"]
    assert [(report["status"], report["test/count"], report["seed"]) for report in reports] == [
        ("done", 103, seed) for seed in (0, 1, 0, 1)
    ]
    assert len({report["test/loss"] for report in reports}) == 4
    with (sweep / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == [f"sweep/{job}" for job in range(4)]
    assert [float(row["test/loss"]) for row in rows] == [report["test/loss"] for report in reports]
    for job, own in enumerate(
        ("optim.lr=0.001 seed=0", "optim.lr=0.001 seed=1", "optim.lr=0.003 seed=0", "optim.lr=0.003 seed=1")
    ):
        assert any(f"sweep/{job}" in line and own in line for line in done.out.splitlines()), done
    again = command("eval.py", "run=sweep/2", f"data.cache_dir={command.cache}")
    assert again.code == 0, again
    assert json.loads((sweep / "2/eval.json").read_text())["test/loss"] == pytest.approx(
        reports[2]["test/loss"], rel=1e-6
    )


def test_a_multirun_of_two_processes_each_goes_on_after_a_job_that_cannot_run(command):
    done = command("train.py", "-m", "data.batch_size=64,63", "run=sweep", *TWO, *SHORT)
    assert done.code == 2, done
    sweep = command.folder / "runs/sweep"
    reports = [json.loads((sweep / str(job) / "report.json").read_text()) for job in range(2)]
    assert [report["status"] for report in reports] == ["done", "failed"]
    assert (reports[0]["test/count"], reports[0]["world_size"]) == (103, 2)
    assert "data.batch_size=62 or 64" in done.err
    assert sorted(path.name for path in (sweep / "1").iterdir()) == ["report.json"]


def test_a_multirun_typed_twice_harms_nothing(command):
    args = ["-m", "seed=0,1", "run=sweep", "trainer.limit_test_batches=1", *SHORT]
    assert command("train.py", *args).code == 0
    before = [(command.folder / f"runs/sweep/{job}/report.json").read_text() for job in range(2)]
    done = command("train.py", *args)
    assert done.code == 2, done
    assert "runs/sweep/0 exists" in done.err
    assert [(command.folder / f"runs/sweep/{job}/report.json").read_text() for job in range(2)] == before
    assert '"status": "done"' in before[0]


def test_ctrl_c_ends_a_multirun_as_a_whole(command):
    args = [
        "-m",
        "seed=0,1",
        "run=sweep",
        "trainer.max_epochs=500",
        "trainer.log_every_n_steps=1",
        "trainer.accelerator=cpu",
        *TWO,
    ]
    full = [
        sys.executable,
        str(ROOT / "train.py"),
        f"data.root={command.data}",
        f"data.cache_dir={command.cache}",
        *args,
    ]
    process = subprocess.Popen(
        full, cwd=command.folder, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not (command.folder / "runs/sweep/0/metrics.csv").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    assert not (command.folder / "runs/sweep/1").exists()
    assert json.loads((command.folder / "runs/sweep/0/report.json").read_text())["status"] == "interrupted"


def test_warnings_reach_the_screen(command, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import threading, warnings\n"
        "from pathlib import Path\n"
        "def warn():\n"
        "    import time\n"
        "    while not Path('runs/a/metrics.csv').exists(): time.sleep(0.01)\n"
        "    warnings.warn('something to know')\n"
        "threading.Thread(target=warn, daemon=True).start()\n"
    )
    done = command(
        "train.py",
        "run=a",
        "trainer.log_every_n_steps=1",
        "trainer.max_epochs=3",
        "trainer.accelerator=cpu",
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert done.code == 0, done
    assert done.err.count("UserWarning: something to know") == 1
    assert "something to know" in (command.folder / "runs/a/train.log").read_text()


def test_a_mistake_that_shows_late_leaves_nothing_either(command):
    done = command("train.py", *TWO, "schedule=cosine", "schedule.warmup_steps=1000", *SHORT)
    assert done.code == 2, done
    assert done.err.splitlines() == [
        "error: schedule.warmup_steps=1000 is not below the run's 4 steps. Type a smaller number."
    ]
    assert [name for name in command.files() if name != "runs"] == []


def test_a_process_that_dies_ends_the_run_and_the_report_says_so(command, tmp_path):
    """Rank 1 is killed by the system, as when memory runs out."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, threading\n"
        "if os.environ.get('LOCAL_RANK') == '1':\n"
        "    from pathlib import Path\n"
        "    def wait():\n"
        "        import time\n"
        "        while not Path('runs/dies/metrics.csv').exists(): time.sleep(0.01)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    threading.Thread(target=wait, daemon=True).start()\n"
    )
    done = command("train.py", *TWO, "run=dies", "trainer.log_every_n_steps=1", "trainer.max_epochs=500",
                   "trainer.accelerator=cpu", env={"PYTHONPATH": str(tmp_path)}, timeout_s=120)  # fmt: skip
    assert done.code == 1, done
    report = json.loads((command.folder / "runs/dies/report.json").read_text())
    assert report["status"] == "failed"
    assert report["error"]


@pytest.mark.slow  # five processes: 40 s; tests/test_interchange.py has the same in forked ones
def test_shards_are_saved_resumed_and_evaluated_on_one_process(command):
    fsdp = ["strategy=fsdp", "trainer.devices=2", "checkpoint.sharded=true", "trainer.accelerator=cpu"]
    done = command("train.py", "run=shards", *fsdp)
    assert done.code == 0, done
    folder = command.folder / "runs/shards"
    assert len(list((folder / "checkpoints/last.ckpt").glob("shard-*.pt"))) == 2
    done = command("train.py", "run=shards", "resume=auto", "trainer.max_epochs=2", *fsdp)
    assert done.code == 0, done
    report = json.loads((folder / "report.json").read_text())
    assert report["train/steps"] == 18
    done = command("eval.py", "run=shards", "trainer.accelerator=cpu", f"data.cache_dir={command.cache}")
    assert done.code == 0, done
    assert json.loads((folder / "eval.json").read_text())["test/loss"] == pytest.approx(report["test/loss"], rel=1e-6)


def test_torchrun_starts_the_same_job(command):
    done = torchrun(command, "strategy=ddp", *SHORT)
    assert done.returncode == 0, done.stderr
    (run,) = (command.folder / "runs").iterdir()
    report = json.loads((run / "report.json").read_text())
    assert (report["status"], report["world_size"], report["test/count"]) == ("done", 2, 103)
    assert done.stdout.count("test accuracy") == 1


@pytest.mark.slow
def test_processes_that_see_other_files_end_at_once_and_say_so(command):
    """As two nodes whose runs_dir is not shared: rank 0 finds a checkpoint to go on from, rank 1 finds none."""
    done = command("train.py", "run=a", "runs_dir=disk0/runs", *SHORT)
    assert done.code == 0, done
    done = torchrun(command, "strategy=ddp", "run=a", "resume=auto", "runs_dir=disk${oc.env:RANK}/runs", *SHORT)
    assert done.returncode == 1
    assert "rank 1 starts from new weights, and rank 0 disk0/runs/a/checkpoints/last.ckpt" in done.stderr
    assert "all nodes must see the same files" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "precision"), [(["strategy=single"], "bf16-mixed"), (TWO, "32-true")])
def test_resnet50d_at_336_pixels(command, strategy, precision):
    done = command("train.py", *strategy, "model=resnet50d", "data.image_size=336", "data.batch_size=4", "data.eval_batch_size=4",
                   "trainer.limit_train_batches=2", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1",
                   f"trainer.precision={precision}", "trainer.accelerator=cpu", "run=big")  # fmt: skip
    assert done.code == 0, done
    report = json.loads((command.folder / "runs/big/report.json").read_text())
    assert (report["train/steps"], report["parameters"] > 23_000_000, report["precision"]) == (2, True, precision)


@pytest.mark.slow
def test_compiled_and_uncompiled_checkpoints_have_the_same_keys(command):
    import torch

    from lockstep.models import BasicNet

    done = command("train.py", "compile=true", "run=compiled", *SHORT)
    assert done.code == 0, done
    content = torch.load(command.folder / "runs/compiled/checkpoints/last.ckpt", weights_only=True)
    assert list(content["state_dict"]) == [f"net.{key}" for key in BasicNet().state_dict()]
    done = command("eval.py", "run=compiled", "compile=false", f"data.cache_dir={command.cache}")
    assert done.code == 0, done
