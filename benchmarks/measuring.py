"""Shared by the benchmarks: arguments, tables, turns, waiting, silent runs, and the parts of a run in this process."""

import argparse
import contextlib
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import lockstep
from lockstep.config.compose import compose_config
from lockstep.config.draft import Draft
from lockstep.config.settings import Settings
from lockstep.extras import comparison
from lockstep.machine import process
from lockstep.machine.system import cores
from lockstep.run import versions

T = TypeVar("T")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help shows the docstring of the script unchanged."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def some_of(names: Iterable[str]) -> Callable[[str], list[str]]:
    """An argument type: comma-separated members of `names`."""

    def split(text: str) -> list[str]:
        if unknown := set(text.split(",")) - set(names):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))} is unknown; use some of {','.join(names)}")
        return text.split(",")

    return split


def made_by(*extra: str) -> str:
    """A line that says how a table was made, for the page that shows it."""
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    return f"Made by `{command}` with {', '.join([versions(), *extra])}, on {cores()} CPU cores.\n"


def show(text: str, *extra: str) -> None:
    print(f"{made_by(*extra)}\n{text}", flush=True)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def spread(values: Sequence[float], form: str = ",.0f") -> str:
    """The median, minimum and maximum."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def ratio(ours: Sequence[float], others: Sequence[float]) -> float:
    """The median of the ratios within a round, because other work on a shared machine slows both."""
    return statistics.median(a / b for a, b in zip(ours, others, strict=True))


def in_turns(ways: Mapping[str, Callable[[], T]], rounds: int, warm_up: int = 0) -> dict[str, list[T]]:
    """What each way returned in each round. Warm-up rounds do not count."""
    results: dict[str, list[T]] = {name: [] for name in ways}
    for number in range(-warm_up, rounds):
        for name, way in ways.items():
            value = way()
            print(f"{name}: {value}", file=sys.stderr, flush=True)
            results[name] += [value] if number >= 0 else []
    return results


def wait_until(true: Callable[[], bool], limit_s: float, every_s: float = 0.05) -> bool:
    """Waits until the condition is true. Returns False if it is not true within the limit."""
    deadline = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True


CPU = ["trainer.accelerator=cpu", "trainer.enable_progress_bar=false"]
SMALL = [*CPU, "data.source=embedded"]


def last_step(metrics: Path) -> int:
    """The last step in metrics.csv; 0 before the first. A partial line cannot have a larger number."""
    lines = metrics.read_text().splitlines()[1:] if metrics.is_file() else []
    steps = [line.partition(",")[0] for line in lines]
    return max((int(step) for step in steps if step.isdigit()), default=0)


# --- runs ---


def start_command(command: Sequence[str], log: Path, popen: Any = subprocess.Popen, **options: Any) -> Any:
    """Starts a command in its own process group and appends its output to `log`. `options`: cwd and env of Popen."""
    nothing = subprocess.DEVNULL
    with log.open("ab") as file:
        return popen(command, stdin=nothing, stdout=file, stderr=file, start_new_session=True, **options)


def differences(reference: Path, run: Path, tolerance: float = 0.0) -> list[str]:
    """Differences between the folders of two runs, except their configs; bit by bit, unless there is a tolerance."""
    runs = (comparison.find(folder.name, folder.parent) for folder in (reference, run))
    sections = comparison.compare(*runs, exact=not tolerance, tolerance=tolerance)
    return [line for name in ("data", "log", "metrics", "weights") for line in sections[name]]


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Discards the standard output of this process and its child processes."""
    sys.stdout.flush()
    saved = os.dup(1)
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        os.dup2(nowhere.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(saved, 1)
            os.close(saved)


def train(overrides: list[str]) -> dict[str, Any]:
    """The report of a silent run."""
    with silenced():
        return lockstep.train(overrides)


def ready(settings: Settings, data: Any, net: Any = None) -> tuple[Any, Any]:
    """Task and trainer of a run, with its folder; `net` takes the place of the config's network."""
    from lockstep import build
    from lockstep.extras.page import LivePage
    from lockstep.training.batches import Loaders

    settings.folder.path.mkdir(parents=True, exist_ok=True)
    process.is_command = True
    batches = build.datamodule(settings, data)
    module = build.module(settings, batches, **({} if net is None else {"net": net}))
    trainer = build.trainer(settings, module, batches, LivePage(settings))
    return Loaders(batches, module), trainer


def start_job(run: Callable[[Settings, Any], None], overrides: list[str]) -> None:
    """Calls `run` where train.py would train: the config is checked, and the run has a name."""
    from lockstep import launch
    from lockstep.launch import local
    from lockstep.launch.start import start

    job = launch.Job("train", run, launch.data, script=local.script("train"))
    start(job, Draft(compose_config("train", overrides)), overrides)
