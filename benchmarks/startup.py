"""Measures the time from a command to its answer or to its first optimizer step, and what is imported until then.

python benchmarks/startup.py [--rounds 5] [--only times,imports] [--data-root <folder>] [--out docs/measurements/speed.md]

The commands alternate in rounds, because machines are shared: read the ratios. A first round fills the caches of files and
of decoded data, and does not count. Python caches the
bytecode of modules in __pycache__, unless PYTHONDONTWRITEBYTECODE is set, as in many containers. The moment of the first step is when metrics.csv, looked at every 5 ms, has its first row.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sections import write_section

from lockstep import ROOT
from lockstep.machine.world import cores
from lockstep.run.report import versions

POLL_S = 0.005
TIME_LIMIT_S = 300
BARE = "import torch, lightning, torchvision"
HELP, MISTAKE, STEP = "train.py --help", "train.py with a wrong key, exit code 2", "train.py, its first optimizer step"
UNCACHED = f"{STEP}, without cached bytecode"
BASE = f'python -c "{BARE}"'
TRAIN = [sys.executable, str(ROOT / "train.py")]
PROBES: dict[str, tuple[list[str], int]] = {
    'python -c "pass"': ([sys.executable, "-c", "pass"], 0),
    'python -c "import hydra, numpy"': ([sys.executable, "-c", "import hydra, numpy"], 0),
    HELP: ([*TRAIN, "--help"], 0),
    MISTAKE: ([*TRAIN, "optim.lrr=3e-4"], 2),
    BASE: ([sys.executable, "-c", BARE], 0),
}
CACHED = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
NOT_CACHED = CACHED | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": os.devnull}
# Packages that a run with BasicNet, metrics.csv and no sweep has no use for before its report.
HEAVY = (
    "timm", "wandb", "tensorboard", "matplotlib", "transformers", "pandas", "plotly", "optuna", "sklearn", "scipy", "PIL", "submitit",
    "mlxtend", "sqlalchemy", "huggingface_hub",
)  # fmt: skip


@dataclass(frozen=True)
class Import:
    """A line of `python -X importtime`. A module comes after those that it imports, which are one deeper."""

    name: str
    own_s: float
    whole_s: float
    depth: int

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]


def parse(text: str) -> list[Import]:
    found = []
    for line in text.splitlines():
        parts = line.removeprefix("import time:").split("|")
        if line.startswith("import time:") and len(parts) == 3 and parts[0].strip().isdigit():
            depth = (len(parts[2]) - len(parts[2].lstrip()) - 1) // 2
            found.append(Import(parts[2].strip(), int(parts[0]) / 1e6, int(parts[1]) / 1e6, depth))
    return found


def importer(imports: list[Import], package: str) -> str | None:
    """The module of another package that imported `package` first; None where the main script did, or nothing."""
    place = next((i for i, each in enumerate(imports) if each.package == package), None)
    if place is None:
        return None
    depth = imports[place].depth
    for each in imports[place + 1 :]:
        if each.depth < depth:  # the one that imports it is the next that is less deep
            if each.package != package:
                return each.name
            depth = each.depth
    return None


@dataclass(frozen=True)
class Taken:
    """Time of a command, on the clock and of the processor. The latter minds other work on the machine less."""

    elapsed_s: float
    cpu_s: float


def clocks() -> tuple[float, float]:
    """Seconds on the clock, and of the processor in children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter(), used.ru_utime + used.ru_stime


def took(command: list[str], expected: int, folder: Path) -> Taken:
    began = clocks()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIME_LIMIT_S, env=CACHED)
    ended = clocks()
    if done.returncode != expected:
        raise RuntimeError(f"{command} ended with {done.returncode} instead of {expected}: {done.stderr}")
    return Taken(ended[0] - began[0], ended[1] - began[1])


def has_row(path: Path) -> bool:
    return path.is_file() and path.read_bytes().count(b"\n") >= 2


def run(
    options: list[str], folder: Path, *, to_the_end: bool, tracing: bool = False, cached: bool = True
) -> tuple[Taken, str, str]:
    """Time from the command to its first row of metrics.csv, and what it wrote on standard error by then and after."""
    name = f"run-{time.monotonic_ns()}"
    command = [*TRAIN, f"run={name}", "runs_dir=runs", "trainer.log_every_n_steps=1", *options]
    command[1:1] = ["-X", "importtime"] if tracing else []
    metrics, errors = folder / "runs" / name / "metrics.csv", folder / f"{name}.err"
    with errors.open("wb") as file:
        began = clocks()
        env = CACHED if cached else NOT_CACHED
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=file, env=env)
        try:
            while not has_row(metrics) and process.poll() is None:
                time.sleep(POLL_S)
            elapsed_s, before = clocks()[0] - began[0], errors.read_text()
            if to_the_end:
                process.wait(TIME_LIMIT_S)
        finally:
            process.kill()
            process.wait()
    if not has_row(metrics):
        raise RuntimeError(f"{command} ended before its first step: {before}")
    return Taken(elapsed_s, clocks()[1] - began[1]), before, errors.read_text()[len(before) :]


def measure(rounds: int, options: list[str], folder: Path) -> dict[str, list[Taken]]:
    figures: dict[str, list[Taken]] = {name: [] for name in (*PROBES, STEP, UNCACHED)}
    for number in range(rounds + 1):
        taken = {name: took(*probe, folder) for name, probe in PROBES.items()}
        taken[STEP] = run(options, folder, to_the_end=False)[0]
        taken[UNCACHED] = run(options, folder, to_the_end=False, cached=False)[0]
        for name in figures if number else ():
            figures[name].append(taken[name])
        print(f"round {number}: " + ", ".join(f"{n} {t.elapsed_s:.2f} s" for n, t in taken.items()), file=sys.stderr)
    return figures


def times_table(figures: dict[str, list[Taken]]) -> str:
    lines = [
        "| from the command to the end of | s, median (least to most) | over the bare import | CPU s, median | over the bare import |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, own in figures.items():
        pairs = list(zip(own, figures[BASE], strict=True))
        elapsed, cpu = [t.elapsed_s for t in own], [t.cpu_s for t in own]
        ratio = statistics.median(t.elapsed_s / base.elapsed_s for t, base in pairs)
        cpu_ratio = statistics.median(t.cpu_s / base.cpu_s for t, base in pairs)
        lines.append(
            f"| `{name}` | {statistics.median(elapsed):.2f} ({min(elapsed):.2f} to {max(elapsed):.2f}) | {ratio:.2f} | "
            f"{statistics.median(cpu):.2f} | {cpu_ratio:.2f} |"
        )
    return "\n".join(lines)


def imports_table(imports: list[Import], top: int = 25) -> str:
    """The greatest by the time that they and all below them took; each line holds those that it imported."""
    lines = ["| module | s, with what it imports | s, itself |", "| --- | --- | --- |"]
    for each in sorted(imports, key=lambda i: -i.whole_s)[:top]:
        lines.append(f"| `{each.name}` | {each.whole_s:.2f} | {each.own_s:.2f} |")
    return "\n".join(lines)


def packages_table(imports: list[Import], top: int = 15) -> str:
    """The greatest by the time of their own modules."""
    modules = Counter(each.package for each in imports)
    own_s = {package: sum(each.own_s for each in imports if each.package == package) for package in modules}
    lines = ["| package | s, its modules alone | modules | imported first by |", "| --- | --- | --- | --- |"]
    for package, seconds in sorted(own_s.items(), key=lambda item: -item[1])[:top]:
        lines.append(
            f"| {package} | {seconds:.2f} | {modules[package]} | {importer(imports, package) or 'the command'} |"
        )
    return "\n".join(lines)


def heavy_table(before: list[Import], after: list[Import]) -> str:
    """Which of HEAVY a default run has imported by its first step, and by its end."""
    lines = ["| package | by the first step | by the end | imported first by |", "| --- | --- | --- | --- |"]
    for package in HEAVY:
        early = any(each.package == package for each in before)
        late = early or any(each.package == package for each in after)
        who = importer(before if early else after, package)
        lines.append(f"| {package} | {'yes' if early else 'no'} | {'yes' if late else 'no'} | {who or ''} |")
    return "\n".join(lines)


def times(rounds: int, options: list[str], folder: Path) -> str:
    return f"## Times\n\n{rounds} rounds.\n\n{times_table(measure(rounds, options, folder))}\n"


def imports(rounds: int, options: list[str], folder: Path) -> str:
    del rounds
    short = ["trainer.max_steps=1", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1"]
    taken, *texts = run([*options, *short], folder, to_the_end=True, tracing=True)
    before, after = map(parse, texts)
    total_s = sum(each.own_s for each in before)
    return (
        f"## Imports\n\nOne default run under `python -X importtime`: {len(before):,} modules took {total_s:.1f} of the {taken.elapsed_s:.1f} s "
        f"to its first step.\n\n{packages_table(before)}\n\n{imports_table(before)}\n\n"
        f"Packages that such a run has no use for before its report:\n\n{heavy_table(before, after)}\n"
    )


SECTIONS = {"times": times, "imports": imports}
HEADER = """# How long it takes to start

Made by `{command}` with {versions}, on {cores} CPU cores. The first step is seen within {poll_ms:.0f} ms; until then the default run
(BasicNet on MNIST, {data}) reads and checks its config, imports, maps its data, builds, takes a step and writes its row.

"""


def page(texts: Iterable[str], command: str, data: str) -> str:
    header = HEADER.format(command=command, versions=versions(), cores=cores(), poll_ms=1000 * POLL_S, data=data)
    return header + "\n".join(texts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas between them")
    parser.add_argument("--data-root", help="a folder with MNIST; without it, the embedded images")
    parser.add_argument("--out", type=Path, help="write the page there as well")
    args = parser.parse_args()
    unknown = set(args.only.split(",")) - SECTIONS.keys()
    if unknown:
        parser.error(f"--only={args.only}: use some of {', '.join(SECTIONS)}")
    with tempfile.TemporaryDirectory() as folder:
        given = str(Path(args.data_root).resolve()) if args.data_root else ""
        options = [f"data.root={given}" if given else "data.source=embedded", "data.cache_dir=cache"]
        texts = [SECTIONS[name](args.rounds, options, Path(folder)) for name in args.only.split(",")]
    print("\n".join(texts))
    if args.out:
        command = f"python benchmarks/startup.py --rounds {args.rounds}" + (" --data-root <folder>" if given else "")
        write_section(args.out, page(texts, command, "the whole set" if given else "the embedded images"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
