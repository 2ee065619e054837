"""Processes of one machine: all end well, or all end. Most are forked (tests/forked.py), to start at once."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import forked as forked_processes
import pytest
import torch.distributed
from forked import until

from lockstep import ROOT
from lockstep.config.checks import resolve
from lockstep.config.settings import Settings
from lockstep.errors import Preempted, ProcessDied, RunFailed
from lockstep.launch import local
from lockstep.machine import process
from lockstep.machine.world import World

WORLD = World("cpu", 2, 1, "ddp")
# A process of a run: leaves its job and its id, then does what the test says for its rank.
WORKER = """
import json, os, sys, time
from pathlib import Path
from lockstep.launch import local, start
from lockstep.machine import files, process
job, local_rank, folder = local.received_handover(), os.environ["LOCAL_RANK"], Path(__file__).parent
files.write_json(folder / f"rank{local_rank}", {"pid": os.getpid(), "run": job.work.cfg.run, "rank": job.work.world.rank,
                                                "notebook": process.in_notebook()})
while not all((folder / f"rank{other}").exists() for other in range(job.work.world.size)):
    time.sleep(0.01)
def told(what):
    path = folder / f"{what}{local_rank}"
    return path.read_text() if path.exists() else None
if told("fail"):
    sys.exit(int(told("fail")))
if told("killed"):
    os.kill(os.getpid(), 9)
if (folder / "wait").exists():
    time.sleep(600)
print(f"hello from {local_rank}", flush=True)
"""
PARENT = """
import sys
from pathlib import Path
from lockstep.config.settings import Settings
from lockstep.launch import local, start
from lockstep.config.checks import resolve
from lockstep.launch.exits import exit_code
from lockstep.machine import process
from lockstep.machine.world import World
def run():
    with process.recording_signals():
        local.run_processes(Path(sys.argv[1]), Settings(resolve(["run=r"]), World("cpu", 2, 1, "ddp")))
sys.exit(exit_code(run))
"""
# A job that is done while gloo's threads still let go of tensors: in 5 of 6 pairs, one was aborted as Python was taken down.
BUSY = """
import atexit, sys, time
from pathlib import Path
from lockstep import launch
class Witness:
    def __del__(self):
        print("taken down", flush=True)
def job(settings, data):
    import torch
    import torch.distributed as dist
    sys.modules["witness"] = Witness()
    atexit.register(print, "exit handler")
    dist.init_process_group("gloo", rank=settings.world.rank, world_size=settings.world.size)
    x = torch.ones(200_000)
    works = [dist.all_reduce(x.clone(), async_op=True) for _ in range(300)]
    works[3].wait()
    print("done")
    here = Path(__file__).parent
    (here / f"done{settings.world.rank}").touch()
    while not (here / f"done{1 - settings.world.rank}").exists():  # whose sums this one's end could break off
        time.sleep(0.01)
launch.main(launch.Job("train", job, lambda settings: None))
"""


@pytest.fixture(autouse=True)
def no_signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A run clears them when it starts; these tests start only its processes, and leave handlers behind."""
    monkeypatch.setattr(process, "received", [])
    with process.restore_process_state():
        yield


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    (tmp_path / "worker.py").write_text(WORKER)
    return tmp_path / "worker.py"


def started(worker: Path) -> list[int]:
    """Waits until both processes are there; returns their ids."""
    paths = [worker.parent / f"rank{i}" for i in range(2)]
    until(lambda: all(path.exists() for path in paths))
    return [json.loads(path.read_text())["pid"] for path in paths]


def run_both(script: Path) -> None:
    local.run_processes(script, Settings(resolve(["run=r"]), WORLD))


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_each_process_gets_the_resolved_job_and_its_rank_also_off_the_main_thread(worker, capfd, monkeypatch):
    monkeypatch.setattr(process, "in_notebook", lambda: True)
    thread = threading.Thread(target=run_both, args=(worker,))
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    jobs = [json.loads((worker.parent / f"rank{i}").read_text()) for i in range(2)]
    assert [(job["run"], job["rank"], job["notebook"]) for job in jobs] == [("r", 0, True), ("r", 1, True)]
    assert capfd.readouterr().out == "hello from 0\n"  # only rank 0 talks


def test_rank_0_alone_can_open_the_port_of_the_run(port):
    """Two runs that begin at once had the same: each let go of its port until rank 0 had imported torch."""
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    served = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, multi_tenant=True)
    assert served.port == port


@pytest.mark.slow  # two processes that import torch, and end as Python does
def test_a_process_that_is_done_runs_its_exit_handlers_and_is_not_aborted(tmp_path, capfd):
    (tmp_path / "busy.py").write_text(BUSY)
    run_both(tmp_path / "busy.py")
    assert capfd.readouterr().out == "done\nexit handler\n"


NO_DISK = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full, a disk without room")


@NO_DISK
@pytest.mark.parametrize(
    ("output", "code"), [(">/dev/full", 0), (">&- 2>&-", 3), ("2>/dev/full", 3), ("| true", 0), (">ascii", 0)]
)
def test_a_screen_that_fails_changes_neither_the_run_nor_its_exit_code(output, code, tmp_path):
    python = f"""
import sys
from pathlib import Path
from lockstep.machine import process
process.protect_streams()
for stream in (sys.stdout, sys.stderr) * 999:
    print("a word \u00b7", file=stream, flush=stream is sys.stderr)
Path("done").write_text("not the screen")
process.exit_process({code})
"""
    (tmp_path / "run.py").write_text(python)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = ["bash", "-o", "pipefail", "-c", f'"{sys.executable}" run.py {output}']
    ascii_only = {"PYTHONIOENCODING": "ascii"} if output == ">ascii" else {}
    done = subprocess.run(command, env=environment | ascii_only, cwd=tmp_path, stderr=subprocess.DEVNULL)
    assert done.returncode == code
    assert (tmp_path / "done").read_text() == "not the screen"


def on_full_disk(place: Path, *command: str) -> tuple[int, str]:
    """The exit code and standard error of a script whose standard output cannot be written."""
    with Path("/dev/full").open("w") as full, (place / "err").open("w+") as err:
        started = forked_processes.Popen([sys.executable, *command], cwd=place, stdout=full, stderr=err)
        code = started.wait(300)
        err.seek(0)
        return code, err.read()


UNWRITTEN = "error: standard output could not be written: No space left on device.\n"


@NO_DISK
@pytest.mark.parametrize("command", [
    "scripts/runs.py", "scripts/runs.py --json", "scripts/new.py new", "train.py --help", "train.py --cfg job", "src/lockstep/__main__.py --help",
])  # fmt: skip
def test_output_that_cannot_be_written_is_exit_code_1(command, tmp_path):
    (tmp_path / "runs").mkdir()
    script, *args = command.split()
    assert on_full_disk(tmp_path, str(ROOT / script), *args) == (1, UNWRITTEN)


@NO_DISK
@pytest.mark.parametrize(
    "options", [["--json"], pytest.param(["strategy=ddp", "trainer.devices=2"], marks=pytest.mark.slow)]
)
def test_a_run_without_a_screen_is_done_and_its_log_has_every_line(forked_command, options):
    data = [f"data.root={forked_command.data}", "data.image_size=12", "trainer.accelerator=cpu"]
    code, err = on_full_disk(forked_command.folder, str(ROOT / "train.py"), "run=a", "debug=one_batch", *data, *options)
    assert (code, err.count(UNWRITTEN)) == (1, 1), err
    assert forked_command.report("a")["status"] == "done"
    log = (forked_command.folder / "runs/a/train.log").read_text()
    assert " \u00b7 " in log and "result: " in log
    assert "evaluate it: " in log.splitlines()[-1]


@pytest.mark.parametrize(
    ("files", "expected", "words"),
    [
        ({"fail1": "3"}, RunFailed("", 1), "ended with exit code 3"),
        pytest.param({"fail0": "2"}, RunFailed("", 2), "ended with exit code 2", marks=pytest.mark.slow),
        (
            {"killed1": "9"},
            ProcessDied(""),
            "rank 1 was killed by SIGKILL; .*memory",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else None,
)
def test_one_that_fails_ends_all_and_is_reported_once(files, expected, words, worker, capfd, monkeypatch, forked):
    monkeypatch.setattr(local, "FAILING_S", 0.5)
    for name, text in {"wait": "", **files}.items():
        (worker.parent / name).write_text(text)
    with pytest.raises(type(expected), match=words) as error:
        run_both(worker)
    assert getattr(error.value, "exit_code", 1) == getattr(expected, "exit_code", 1)
    assert all(gone(pid) for pid in started(worker))
    assert capfd.readouterr() == ("", "")


def test_processes_that_a_warning_ends_before_they_train_were_preempted(worker, forked):
    (worker.parent / "wait").touch()
    warning = threading.Thread(target=lambda: started(worker) and process.received.append(signal.SIGTERM))
    warning.start()
    with pytest.raises(Preempted, match=r"ended by SIGTERM before anything could be saved; rerun the command"):
        run_both(worker)
    warning.join()


@pytest.mark.parametrize(
    ("code", "done", "files", "waits"),
    [
        (3, [], [".lockstep-abcdefgh.part/last.ckpt"], True),  # a checkpoint is being written
        (3, [], ["last.ckpt"], False),
        pytest.param(0, [], [], True, marks=pytest.mark.slow),
        pytest.param(0, ["1"], [], True, marks=pytest.mark.slow),  # the first one may be uploading a checkpoint
        (0, ["0"], [], False),  # the other hangs after the last collective
    ],
)
def test_the_last_process_has_time_for_what_it_does(code, done, files, waits, tmp_path, monkeypatch):
    monkeypatch.setattr(local, "FAILING_S", 0.0)
    monkeypatch.setattr(local, "EXIT_S", 0.0)
    for name in [*done, *files]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    ended = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"])
    assert ended.wait(60) == code
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as last:
        ends = threading.Timer(1.0, lambda: last.communicate(b"\n"))
        ends.start() if waits else None
        assert local.wait([ended, last], [tmp_path / "0", tmp_path / "1"], tmp_path) == code
        assert last.poll() == (0 if waits else None)
        ends.join() if waits else last.kill()


def test_a_process_that_ignores_two_ctrl_c_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(local, "GRACE_S", 0.0)
    monkeypatch.setattr(process, "received", [signal.SIGINT] * 2)
    ignores = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); print('ready', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", ignores], stdin=-1, stdout=-1) as child:
        child.stdout.readline()
        assert local.wait([child]) == 0
        assert child.poll() is None
        child.kill()


@pytest.mark.parametrize(("how", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 1), (signal.SIGINT, 130)])
def test_none_is_left_when_the_parent_is_ended(worker, how, code):
    (worker.parent / "wait").touch()
    (worker.parent / "parent.py").write_text(PARENT)
    command = [sys.executable, str(worker.parent / "parent.py"), str(worker)]
    parent = forked_processes.Popen(command, stderr=subprocess.DEVNULL)
    pids = started(worker)
    parent.send_signal(how)
    assert parent.wait(60) == code
    until(lambda: all(gone(pid) for pid in pids))


def test_a_process_without_a_pipe_ends_with_its_parent_too():
    child = """
import time
from lockstep.machine import process
process.end_with_parent(has_pipe=False, message="the parent is gone")
print("begun", flush=True)
time.sleep(600)"""
    command = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", command], stdout=-1, stderr=-1, text=True) as parent:
        assert parent.stdout.readline() == "begun\n"
        parent.kill()
        assert parent.communicate(timeout=60)[1] == "the parent is gone\n"  # it reads until the child ends as well
