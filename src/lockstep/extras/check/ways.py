"""The ways of running that a check compares, and their processes: forked from this one, which has imported everything."""

import json
import multiprocessing
import os
import re
import runpy
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from lockstep.config.compose import key_of
from lockstep.config.run_config import RunConfig
from lockstep.config.settings import Settings
from lockstep.extras.check.compare import Outcome
from lockstep.extras.check.record import PLAN
from lockstep.launch import local
from lockstep.machine import system
from lockstep.machine.process import end_with_parent
from lockstep.machine.world import World, gpu_count

ONE, FLOAT32 = "one process", "one process in float32"
KILLED, RESUMED, LOGICAL = "killed", "killed and resumed", "logical ranks"
WORKERS, EVALUATION = "two workers", "evaluation on two processes"
NOT_SHOWN = (ONE, FLOAT32, KILLED, LOGICAL)  # what others are compared with, or continue
HANGS = "strategy.timeout_s=300"  # after which a process that waits for another one ends
FIXED = (
    "logger=[csv]", "trainer.enable_progress_bar=false", "trainer.min_steps=null", "trainer.min_epochs=null", "trainer.log_every_n_steps=1", "trainer.num_sanity_val_steps=0",
    "trainer.limit_val_batches=2", "trainer.limit_test_batches=2", "trainer.enable_checkpointing=true", "+callbacks.lockstep_check._target_=lockstep.extras.check.record.Recorder",
)  # fmt: skip


@dataclass(frozen=True)
class Way:
    """A command, and what it is compared with."""

    name: str
    overrides: Sequence[str] = ()
    processes: int = 1
    against: str = ONE
    after: str = ""  # the way in a copy of whose folder it starts

    @property
    def folder(self) -> str:
        return re.sub(r"\W+", "-", self.name)


def ways(config: RunConfig, precision: str) -> list[Way]:
    """The first one shows whether the command works in that precision. fsdp has no float64."""
    wide = f"trainer.precision={precision}"
    narrow = "trainer.precision=32-true" if precision == "64-true" else wide
    single, ddp = ["trainer.devices=1", "strategy=single", wide], ["trainer.devices=2", "strategy=ddp", HANGS, wide]
    accumulate = f"trainer.accumulate_grad_batches={2 * config.trainer.accumulate_grad_batches}"
    logical = f"exact.logical_ranks={config.exact.logical_ranks or 2}"
    return [
        Way(ONE, single),
        Way("one process again", single),
        Way("accumulation", [*single, accumulate]),
        Way(FLOAT32, [*single[:2], narrow]),
        Way("ddp on two processes", ddp, 2),
        Way("fsdp on two processes", ["trainer.devices=2", "strategy=fsdp", HANGS, narrow], 2, FLOAT32),
        Way(WORKERS, [*single, *(["loader.num_workers=2"] if Settings.of(config).loader else [])]),
        Way(KILLED, single),
        Way(RESUMED, [*single, "resume=auto"], after=KILLED),
        Way(LOGICAL, [*single, logical]),
        Way("resumed on two processes", [*ddp, "resume=auto"], 2, after=KILLED),
        Way("logical ranks on two processes", [*ddp, logical], 2, LOGICAL),
        Way(EVALUATION, ddp[:3], 2, after=ONE),
    ]


@dataclass
class Check:
    """The folders and processes of a check of a command."""

    folder: Path
    overrides: Sequence[str]
    cfg: RunConfig
    resume: Path | None  # the checkpoint to start from
    start: int  # its step
    steps: int
    traced: int | None = None  # the step whose layers are recorded; None: the first
    peak_bytes: int = 1  # of a process

    def command(self, way: Way) -> list[str]:
        """Without the keys of `overrides` that the check sets."""
        place = [f"run={way.folder}", f"runs_dir={self.folder / 'runs'}", *way.overrides]
        place += ["trainer.accelerator=cpu"] if gpu_count() < 2 else []
        if way.name == EVALUATION:
            return place
        resume = [f"resume={self.resume}"] if self.resume and not way.after else []
        workers = ["loader.num_workers=0"] if Settings.of(self.cfg).loader and way.name != WORKERS else []
        fixed = [*place, *resume, *workers, *FIXED, f"checkpoint.every_n_steps={self.steps // 2}"]
        replaced = {*map(key_of, fixed), "resume", "debug_rank", "trainer.num_nodes"}
        kept = ((key_of(override), override) for override in self.overrides)
        return [*(o for k, o in kept if k not in replaced and not k.startswith(("strategy.", "logger."))), *fixed]

    def environment(self, way: Way, rank: int, port: int) -> dict[str, str]:
        """As torchrun sets it, if there are several processes."""
        records, middle = self.folder / "records" / way.folder, self.start + self.steps // 2 + 1
        records.mkdir(parents=True, exist_ok=True)
        plan = {"folder": str(records), "last": self.start + self.steps, "noted": middle, "traced": self.traced}
        plan["kill"] = middle * (way.name == KILLED)
        env = {"TORCHELASTIC_RUN_ID": "check"} if way.processes > 1 else {}
        env |= local.environment(World("cpu", way.processes, 1, "", rank), port)
        return {**env, "OMP_NUM_THREADS": "1", PLAN: json.dumps(plan)}

    def run_folder(self, name: str) -> Path:
        return self.folder / "runs" / Way(name).folder

    def outcome(self, name: str) -> Outcome:
        return Outcome(self.run_folder(name), self.folder / "records" / Way(name).folder)

    def log(self, way: Way) -> str:
        return (self.folder / f"{way.folder}.log").read_text(encoding="utf-8", errors="replace")

    def problems(self, way: Way) -> list[str]:
        """The errors of a command that failed, from what it printed."""
        lines = [line for line in self.log(way).splitlines() if line.strip()]
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return list(dict.fromkeys(errors or lines[-1:]))

    def run(self, ways: Sequence[Way]) -> dict[str, int]:
        """Runs the ways and returns their exit codes."""
        # a fifth of the memory is for the test, workers and other programs
        at_once = min(2 if gpu_count() else 4, system.cores(), 0.8 * system.memory_bytes() // self.peak_bytes)
        codes, waiting, groups = dict[str, int](), list(ways), dict[str, list[Any]]()
        self.folder.mkdir(exist_ok=True)
        try:
            while waiting or groups:
                for name, group in [*groups.items()]:
                    if any(process.exitcode for process in group):  # the others print the reason, or wait for it
                        end(group, local.FAILING_S)
                    if all(process.exitcode is not None for process in group):
                        ended = [each.exitcode for each in groups.pop(name) if name != KILLED or each.exitcode > 0]
                        # a signal is negative
                        codes[name] = (max(ended, default=0) or min(ended, default=0)) if group else 1
                while waiting and waiting[0].after not in groups:
                    if groups and sum(map(len, groups.values())) + waiting[0].processes > at_once:
                        break
                    way = waiting.pop(0)
                    groups[way.name] = self.processes(way)
                if alive := [each for group in groups.values() for each in group if each.exitcode is None]:
                    wait([process.sentinel for process in alive])
        finally:
            for group in groups.values():
                end(group)
        return codes

    def processes(self, way: Way) -> list[Any]:
        """None if the way that it continues has failed."""
        if way.after:
            if not self.run_folder(way.after).exists():
                return []
            shutil.copytree(self.run_folder(way.after), self.run_folder(way.name))
        context: Any = multiprocessing.get_context("spawn" if system.WINDOWS or system.MACOS else "fork")
        script = local.script("eval" if way.name == EVALUATION else "train")
        workers = 2 if way.name == WORKERS and not Settings.of(self.cfg).loader else None
        log, group = self.folder / f"{way.folder}.log", list[Any]()
        with local.reserve_port() as port:
            for rank in range(way.processes):
                given = (script, self.command(way), self.environment(way, rank, port), log, workers)
                group.append(context.Process(target=run_script, args=given))
                group[-1].start()
        return group


def end(group: Sequence[Any], patience_s: float = 0.0) -> None:
    for process in group:
        process.join(patience_s)
        process.kill()
        process.join()


def run_script(script: Path, overrides: list[str], env: dict[str, str], log: Path, workers: int | None) -> None:
    """What Python does with a script. `workers`: of each loader that this process makes."""
    import torch

    from lockstep.extras import page

    os.environ.update(env)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    end_with_parent(has_pipe=False)
    torch.set_num_threads(1)
    page.write_page = lambda *_, **__: None  # the report takes 1 s of the 6 s of a way
    if workers is not None:
        make: Any = torch.utils.data.DataLoader.__init__
        changed: Any = lambda self, *args, **kwargs: make(self, *args, **{**kwargs, "num_workers": workers})  # noqa: E731
        torch.utils.data.DataLoader.__init__ = changed  # type: ignore[method-assign]
    sys.argv[:] = [str(script), *overrides]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
