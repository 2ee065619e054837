"""Runs the cases of refused_cases.py, each in a process of its own, and says how each was refused."""

import contextlib
import os
import resource
import runpy
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refused_files import Case, digits

from lockstep import ROOT
from lockstep.machine.world import World

LIMIT_S = 20.0  # a case that trains longer than this was accepted
MEMORY_BYTES = 3 * 2**30  # of data, so an archive that unpacks to more ends in a MemoryError
WELL, LATE, DIM, TRACEBACK, SILENT = "refused well", "late", "unclear", "traceback", "accepted in silence"
STAGES = {b"r": "run", b"t": "torch", b"c": "classes"}  # the letters that a process writes, the last stage first
LEFT, WORKS, WRONGLY = "left files", "works", "refused wrongly"
BASE = ["data.root=own", "data.source=disk", "data.batch_size=16", "data.image_size=12", "trainer.accelerator=cpu", "trainer.max_steps=2",
        "trainer.limit_val_batches=1", "trainer.limit_test_batches=1", "trainer.enable_progress_bar=false"]  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What became of a case. `stage`: config (nothing but the config was read), classes, torch (everything was made), or run."""

    family: str
    name: str
    verdict: str
    elapsed_s: float
    stage: str
    code: int
    message: str


def verdict(case: Case, code: int | None, message: str, stage: str, left: list[str]) -> str:
    """`code` is None for a case that ran too long."""
    if case.works or (case.may_work and code == 0):
        return WORKS if code == 0 else WRONGLY
    if code == 0 or (code is None and stage == "run"):
        return SILENT
    if code != 2 or "Traceback" in message:
        return TRACEBACK
    if stage == "run":
        return LATE
    if left:
        return LEFT
    told = [line for line in message.splitlines() if not line.startswith("WARNING")]
    good = any("error: " in line for line in told) and any(case.key in line for line in told)
    return WELL if good else DIM


# --- a case in a process of its own ---


def lay_out(case: Case, folder: Path) -> None:
    files = case.files if any(name.partition("/")[0] == "own" for name in case.files) else {**digits(), **case.files}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def noted(stages: int) -> None:
    """Makes this process write how far it has come; and run the processes of a run in this one."""
    from lockstep.launch import jobs, local, start
    from lockstep.reporting.recorder import Recorder

    def note(letter: bytes, call: Any) -> Any:
        def noting(*args: Any, **kwargs: Any) -> Any:
            os.write(stages, letter)
            return call(*args, **kwargs)

        return noting

    def alone(script: Path, cfg: Any, world: World) -> None:
        with local.held_port() as port:
            os.environ.update(local.environment(world, port))
        jobs.load(script)(cfg, world)

    stage: Any = start
    recorder: Any = Recorder
    check, check_imported = stage.check, note(b"c", stage.check)
    stage.check = lambda cfg, **given: (check_imported if given.get("imported") else check)(cfg, **given)
    stage.identify = note(b"t", stage.identify)
    recorder.open = note(b"r", recorder.open)
    local.run_processes = alone


def child(case: Case, folder: Path, cache: Path, stages: int) -> None:
    """Becomes `python train.py` in `folder`."""
    import torch

    os.setsid()
    os.chdir(folder)
    with Path(folder, os.pardir, f"{folder.name}.err").open("wb") as file:
        os.dup2(file.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ.update({"WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", **case.env})
    torch.set_num_threads(1)
    noted(stages)
    typed = [arg.partition("=")[0] for arg in case.args] + ["data.source"] * ("data=folder" in case.args)
    sys.argv[:] = [
        "train.py",
        *(arg for arg in BASE if arg.partition("=")[0] not in typed),
        f"data.cache_dir={cache}",
        *case.args,
    ]
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")


def forked(case: Case, folder: Path, cache: Path, stages: int) -> int:
    if pid := os.fork():
        return pid
    code = 0
    try:
        child(case, folder, cache, stages)
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    finally:
        sys.stderr.flush()
        os._exit(code)


@dataclass
class Running:
    case: Case
    folder: Path
    read: int
    before: set[Path]
    began_s: float

    def ended(self, pid: int, cost: dict[str, float]) -> Outcome | None:
        """The outcome, once the process has ended or has run too long."""
        elapsed_s = time.monotonic() - self.began_s
        done, status = os.waitpid(pid, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if done else None
        if not done and elapsed_s < LIMIT_S:
            return None
        with contextlib.suppress(ProcessLookupError):  # it, and what it has started
            os.killpg(pid, signal.SIGKILL)
        if not done:
            os.waitpid(pid, 0)
        letters = os.read(self.read, 100)
        os.close(self.read)
        stage = next((name for letter, name in STAGES.items() if letter in letters), "config")
        asked = stage == "classes" and any("_target_" in arg or arg[0] == "+" for arg in self.case.args)
        imports = "torch" if stage in ("torch", "run") or asked else "config"
        message = self.folder.with_suffix(".err").read_text(errors="replace")
        left = sorted(str(path.relative_to(self.folder)) for path in set(self.folder.rglob("*")) - self.before)
        what = verdict(self.case, code, message, stage, left)
        return Outcome(
            self.case.family,
            self.case.shown,
            what,
            elapsed_s + cost[imports],
            stage,
            -1 if code is None else code,
            message[-600:],
        )


def tried(every: list[Case], jobs: int, cost: dict[str, float]) -> Iterator[Outcome]:
    """Runs `jobs` cases at once."""
    assert threading.active_count() == 1, "forking a process with threads is not safe"
    waiting, running = list(enumerate(every)), dict[int, Running]()
    with tempfile.TemporaryDirectory() as place:
        cache = Path(place, "cache")
        while waiting or running:
            while waiting and len(running) < jobs:
                number, case = waiting.pop(0)
                folder = Path(place, str(number))
                folder.mkdir()
                lay_out(case, folder)
                before = set(folder.rglob("*"))
                read, write = os.pipe()
                os.write(write, b".")
                pid = forked(case, folder, cache, write)
                os.close(write)
                running[pid] = Running(case, folder, read, before, time.monotonic())
            for pid, each in list(running.items()):
                if (outcome := each.ended(pid, cost)) is not None:
                    del running[pid]
                    yield outcome
            time.sleep(0.01)
