"""Tries command lines and files that cannot work, and counts how they are refused.

python benchmarks/refused.py [--only <text>] [--every 3] [--jobs 2] [--save <file>]

A case is refused well if train.py ends with exit code 2 and messages that name the key, without a traceback, before the run's
directory is made, and leaves no file. Some of these need torch: whether a network takes the images is known once it is made. Each case is a process forked from one that has imported torch, as imports would take most of the time;
the table adds the time that they take to the cases that need them. The cases are in refused_cases.py. `--save` keeps the
verdicts. Needs Linux.
"""

import contextlib
import json
import os
import resource
import runpy
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import measuring
from measuring import ArgumentParser, made_by
from refused_cases import Case, cases, digits

from lockstep import ROOT
from lockstep.machine.world import World

LIMIT_S = 20.0  # a case that trains longer than this was accepted
MEMORY_BYTES = 3 * 2**30  # of data, so an archive that unpacks to more ends in a MemoryError
WELL, LATE, DIM, TRACEBACK, SILENT = "refused well", "late", "unclear", "traceback", "accepted in silence"
LEFT, WORKS, WRONGLY = "left files", "works", "refused wrongly"
WITH_TORCH = "of these with torch"
COLUMNS = (WELL, WITH_TORCH, LATE, DIM, LEFT, TRACEBACK, SILENT)
STAGES = {b"r": "run", b"t": "torch", b"c": "classes"}  # the letters that a process writes, the last stage first
BASE = ["data.root=own", "data.source=disk", "data.batch_size=16", "data.image_size=12", "trainer.accelerator=cpu", "trainer.max_steps=2",
        "trainer.limit_val_batches=1", "trainer.limit_test_batches=1", "trainer.enable_progress_bar=false"]  # fmt: skip
MADE = ("a wrong value", "a key is", "a name is misspelt")  # families made from the schema's keys


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


def note_stages(stages: int) -> None:
    """Makes this process write how far it has come; and run the processes of a run in this one."""
    from lockstep.launch import local, start
    from lockstep.reporting.recorder import Recorder

    def note(letter: bytes, call: Any) -> Any:
        def noting(*args: Any, **kwargs: Any) -> Any:
            os.write(stages, letter)
            return call(*args, **kwargs)

        return noting

    def alone(script: Path, cfg: Any, world: World, **_: bool) -> None:
        with local.held_port() as port:
            os.environ.update(local.environment(world, port))
        local.load(script)(cfg, world)

    stage: Any = start
    recorder: Any = Recorder
    check, check_imported = stage.check, note(b"c", stage.check)
    stage.check = lambda cfg, **given: (check_imported if given.get("imported") else check)(cfg, **given)
    stage.identify = note(b"t", stage.identify)
    recorder.open = note(b"r", recorder.open)
    launch: Any = local
    launch.run_processes = alone


def become(case: Case, folder: Path, stages: int) -> None:
    """Becomes `python train.py` in `folder`."""
    import torch

    os.setsid()
    os.chdir(folder)
    with folder.with_suffix(".err").open("wb") as file:
        os.dup2(file.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ.update({"WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", **case.env})
    torch.set_num_threads(1)
    note_stages(stages)
    typed = [arg.partition("=")[0] for arg in case.args] + ["data.source"] * ("data=folder" in case.args)
    base = [arg for arg in BASE if arg.partition("=")[0] not in typed]
    sys.argv[:] = ["train.py", *base, f"data.cache_dir={folder.parent / 'cache'}", *case.args]
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")


class Running:
    """A case in a process forked from this one."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        files = case.files if any(name.startswith("own") for name in case.files) else {**digits(), **case.files}
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        folder.mkdir(exist_ok=True)
        self.before, self.began_s = set(folder.rglob("*")), time.monotonic()
        self.read, write = os.pipe()
        os.write(write, b".")
        self.pid = os.fork()
        if not self.pid:
            self.child(write)
        os.close(write)

    def child(self, stages: int) -> None:
        code = 0
        try:
            become(self.case, self.folder, stages)
        except SystemExit as e:
            code = e.code if isinstance(e.code, int) else 1
        except BaseException:
            traceback.print_exc()
            code = 1
        finally:
            sys.stderr.flush()
            os._exit(code)

    def outcome(self, cost_s: dict[str, float]) -> Outcome | None:
        """Once the process has ended or has run too long."""
        elapsed_s = time.monotonic() - self.began_s
        done, status = os.waitpid(self.pid, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if done else None
        if not done and elapsed_s < LIMIT_S:
            return None
        with contextlib.suppress(ProcessLookupError):  # it, and what it has started
            os.killpg(self.pid, signal.SIGKILL)
        if not done:
            os.waitpid(self.pid, 0)
        letters = os.read(self.read, 100)
        os.close(self.read)
        stage = next((name for letter, name in STAGES.items() if letter in letters), "config")
        asked = stage == "classes" and any("_target_" in arg or arg[0] == "+" for arg in self.case.args)
        elapsed_s += cost_s["torch" if stage in ("torch", "run") or asked else "config"]
        message = self.folder.with_suffix(".err").read_text(errors="replace")
        left = sorted(str(path.relative_to(self.folder)) for path in set(self.folder.rglob("*")) - self.before)
        what, family = verdict(self.case, code, message, stage, left), self.case.family
        return Outcome(family, self.case.shown, what, elapsed_s, stage, -1 if code is None else code, message[-600:])


def import_s(what: str) -> float:
    """The seconds of `import what` in a new process; the faster of two."""
    taken = []
    for _ in range(2):
        began_s = time.monotonic()
        subprocess.run([sys.executable, "-c", f"import {what}"], check=True)
        taken.append(time.monotonic() - began_s)
    return min(taken)


def tried(every: list[Case], jobs: int) -> Iterator[Outcome]:
    """Runs `jobs` cases at once."""
    config_s = import_s("lockstep.launch.start, lockstep.config.compose")
    cost_s = {"config": config_s, "torch": config_s + import_s("lockstep.build")}
    import lockstep.build
    import lockstep.launch.start
    import lockstep.reporting.page
    import lockstep.training.oom  # noqa: F401

    assert threading.active_count() == 1, "forking a process with threads is not safe"
    waiting, running = list(enumerate(every)), list[Running]()
    with tempfile.TemporaryDirectory() as place:
        while waiting or running:
            while waiting and len(running) < jobs:
                number, case = waiting.pop(0)
                running.append(Running(case, Path(place, str(number))))
            for each in list(running):
                if (outcome := each.outcome(cost_s)) is not None:
                    running.remove(each)
                    yield outcome
            time.sleep(0.01)


# --- the table ---


def table(outcomes: list[Outcome]) -> str:
    rows = []
    refusable = [o for o in outcomes if o.verdict not in (WORKS, WRONGLY)]
    for family in [*dict.fromkeys(o.family for o in refusable), "all"]:
        own = [o for o in refusable if family in (o.family, "all")]
        counts = Counter(o.verdict for o in own)
        counts[WITH_TORCH] = sum(o.verdict == WELL and o.stage == "torch" for o in own)
        times = [o.elapsed_s for o in own]
        late = f"{statistics.quantiles(times, n=20, method='inclusive')[-1]:.1f}" if len(times) > 1 else ""
        rows.append([family, str(len(own)), *(str(counts[name]) for name in COLUMNS), late])
    return measuring.table(["family", "cases", *COLUMNS, "s, 95th percentile"], rows)


def page(outcomes: list[Outcome]) -> str:
    works = Counter(o.verdict for o in outcomes)
    bad = sorted((o for o in outcomes if o.verdict not in (WELL, WORKS)), key=lambda o: (o.verdict, o.family))
    rest = "\n".join(f"- {o.verdict}: `{o.name}`" for o in bad)
    must = f"Of {works[WORKS] + works[WRONGLY]} command lines that must work, {works[WORKS]} did."
    return f"{table(outcomes)}\n\n{must}\n\nNot refused well:\n\n{rest or 'none'}\n"


def thinned(every: list[Case], step: int) -> list[Case]:
    made = [case for case in every if case.family.startswith(MADE)]
    left_out = {id(case) for place, case in enumerate(made) if place % step}
    return [case for case in every if id(case) not in left_out]


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose family or command line has this text")
    parser.add_argument("--every", type=int, default=1, help="take every n-th case of the families made from keys")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--save", type=Path, help="keep the verdicts")
    args = parser.parse_args()
    chosen = thinned([case for case in cases() if args.only in case.family or args.only in case.name], args.every)
    outcomes = []
    for outcome in tried(chosen, args.jobs):
        outcomes.append(outcome)
        if args.save:  # a call that is cut off keeps what it has
            args.save.write_text(json.dumps([asdict(each) for each in outcomes], indent=0))
        if args.only or outcome.verdict not in (WELL, WORKS):
            print(f"{outcome.verdict:20} {outcome.elapsed_s:5.1f} s  {outcome.name}", file=sys.stderr, flush=True)
    print(made_by())
    print(page(outcomes))
    return int(any(outcome.verdict not in (WELL, WORKS) for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
