"""What parts of a run cost on this machine: tables in Markdown.

python benchmarks/costs.py overhead [--rounds 5] [--steps 400]             # of the framework, per optimizer step
python benchmarks/costs.py saving [--parameters 70] [--setups single,shards]
python benchmarks/costs.py startup [--rounds 5] [--data-root <folder>]       # from a command to its first step
python benchmarks/costs.py advice [--rounds 3]                              # workers, prefetching, batch size, SyncBatchNorm
python benchmarks/costs.py exact [--rounds 3] [--only ResNet]               # exact.logical_ranks, on 1, 2 and 4 processes

Machines are shared: read the ratios, which are taken within a round.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from measuring import (
    ArgumentParser,
    in_turns,
    last_step,
    made_by,
    ratio,
    ready,
    silenced,
    some_of,
    spread,
    start_job,
    table,
    wait_until,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lockstep import ROOT, build
from lockstep.checkpoints import saving as checkpoint_saving
from lockstep.config.compose import compose_config
from lockstep.config.settings import Settings
from lockstep.launch.local import received, run_processes
from lockstep.machine import process

TRAIN = [sys.executable, str(ROOT / "train.py")]


class Marks(pl.Callback):
    """When each step of one epoch began, and when the last one ended."""

    def __init__(self) -> None:
        self.began_s: list[float] = []
        self.ended_s = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self.began_s.append(time.perf_counter())

    def on_train_epoch_end(self, *_: Any) -> None:
        self.ended_s = time.perf_counter()


# --- overhead: a network of one layer, on a CPU with one thread; checkpoints come every 57 steps, at the end of each epoch ---

WARM = 50  # steps before the clock starts
BATCH = torch.zeros(64, 1, 28, 28), torch.zeros(64, dtype=torch.long)


def one_layer() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), 1e-3, fused=True)


def per_step_s(began_s: list[float], steps: int) -> float:
    return (began_s[WARM + steps] - began_s[WARM]) / steps


def bare_loop(steps: int) -> float:
    net, began_s = one_layer(), []
    optimizer, (image_BCHW, label_B) = adamw(net), BATCH
    for _ in range(WARM + steps + 1):
        began_s.append(time.perf_counter())
        F.cross_entropy(net(image_BCHW), label_B).backward()
        optimizer.step()
        optimizer.zero_grad()
    return per_step_s(began_s, steps)


class Plain(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = one_layer()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.net)


def lightning_alone(steps: int) -> float:
    """A Trainer with nothing in it, on one batch again and again."""
    marks = Marks()
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, callbacks=[marks], **dict.fromkeys(off, False))  # type: ignore[arg-type]
    trainer.fit(Plain(), DataLoader([BATCH] * (WARM + steps + 1), batch_size=None))  # type: ignore[arg-type]
    return per_step_s(marks.began_s, steps)


def all_of_lockstep(steps: int, *more: str) -> float:
    """All of a default run: batches from memory, normalised; seeds, log, throughput, checkpoints, schedule."""
    marks = Marks()

    def job(settings: Settings) -> None:
        work, trainer = ready(settings, one_layer())
        torch.set_num_threads(1)
        trainer.callbacks.append(marks)  # type: ignore[attr-defined]
        build.fit(settings, trainer, work)

    with tempfile.TemporaryDirectory() as folder, silenced():
        overrides = [
            "data.source=embedded", f"runs_dir={folder}", "trainer.precision=32-true", f"trainer.max_steps={WARM + steps + 1}",
            "trainer.accelerator=cpu", "trainer.limit_val_batches=0", *more,
        ]  # fmt: skip
        start_job(job, overrides)
    return per_step_s(marks.began_s, steps)


def overhead(args: argparse.Namespace) -> str:
    process.owned = True
    build.process(Settings.of(compose_config("train", ["trainer.accelerator=cpu"])))
    torch.set_num_threads(1)
    ways: dict[str, Callable[[], float]] = {
        "bare loop": partial(bare_loop, args.steps),
        "Lightning alone": partial(lightning_alone, args.steps),
        "Lockstep, without checkpoints": partial(all_of_lockstep, args.steps, "trainer.enable_checkpointing=false"),
        "Lockstep, a checkpoint every 57 steps": partial(all_of_lockstep, args.steps),
    }
    return overhead_table(in_turns(ways, args.rounds))


def overhead_table(taken_s: dict[str, list[float]]) -> str:
    in_ms = {name: [1e3 * second for second in seconds] for name, seconds in taken_s.items()}
    median = {name: statistics.median(values) for name, values in in_ms.items()}
    rows = [[name, spread(in_ms[name], ".2f"), f"{median[name] - median['bare loop']:.2f}"] for name in in_ms]
    return table(["what", "ms a step, median (least to most)", "above the bare loop"], rows)


# --- saving: an MLP with AdamW, whose checkpoint has three numbers for each parameter ---

PARAMETERS = "MEASURE_PARAMETERS"  # of the environment of the processes
SAVING = [
    "data.source=embedded", "trainer.accelerator=cpu", "trainer.enable_progress_bar=false", "trainer.limit_val_batches=0", "trainer.max_epochs=1",
    "trainer.log_every_n_steps=1000", "callbacks=[]", "data.batch_size=32", "trainer.precision=32-true", "data.num_workers=0",
]  # fmt: skip
SETUPS = {
    "single": ["strategy=single"],
    "shards": ["strategy=fsdp", "trainer.devices=2", "checkpoint.sharded=true"],
}
LAYERS, PIXELS, CLASSES = 8, 28 * 28, 10
WARM_UP = 2  # steps
Span = tuple[float, float]


def mlp(parameters: int) -> nn.Module:
    width = round((parameters / LAYERS) ** 0.5)
    hidden = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, width), *hidden, nn.Linear(width, CLASSES))


def timed(function: Callable[..., Any], spans: list[Span]) -> Callable[..., Any]:
    def around(*args: Any, **kwargs: Any) -> Any:
        began_s = time.perf_counter()
        function(*args, **kwargs)
        spans.append((began_s, time.perf_counter()))

    return around


def timed_run(settings: Settings) -> None:
    """One process's part of a run. Rank 0 leaves its times in the run's folder."""
    marks = Marks()
    saves: list[Span] = []  # within trainer.save_checkpoint
    writes: list[Span] = []
    work, trainer = ready(settings, mlp(int(os.environ[PARAMETERS])))
    trainer.callbacks.insert(0, marks)  # type: ignore[attr-defined]
    trainer.save_checkpoint = timed(trainer.save_checkpoint, saves)  # type: ignore[method-assign]
    checkpoint_saving.write_or_explain = timed(checkpoint_saving.write_or_explain, writes)
    build.fit(settings, trainer, work)
    if settings.world.rank == 0:
        times = {"steps": [*marks.began_s, marks.ended_s], "saves": saves, "writes": writes}
        (settings.folder.path / "times.json").write_text(json.dumps(times))


def save_costs(times: dict[str, Any], size_gb: float) -> dict[str, float]:
    """In seconds. A step is timed from its beginning to that of the next; the save is in the first of them. The last checkpoint is
    saved when no step follows; the first stall does not count, because its memory is new."""
    saves, writes = times["saves"], times["writes"]
    steps = list(pairwise(times["steps"]))[WARM_UP:]

    def lengths(beside: Callable[[Span], bool]) -> list[float]:
        return [end - begin for begin, end in steps if beside((begin, end))]

    def overlaps(step: Span, spans: list[Span]) -> bool:
        return any(begin < step[1] and end > step[0] for begin, end in spans)

    normal_s = statistics.median(lengths(lambda step: not overlaps(step, saves + writes)))
    stalls = [s - normal_s for s in lengths(lambda step: overlaps(step, saves))]
    extra = [s - normal_s for s in lengths(lambda step: overlaps(step, saves + writes))]
    return {
        "GB": size_gb,
        "step": normal_s,
        "stall": statistics.median(stalls[1:] or stalls),
        "write": statistics.median(end - begin for begin, end in writes),
        "cost of a save": sum(extra) / len(stalls),
    }


def saved_run(args: argparse.Namespace, setup: str, background: bool, runs_dir: str) -> dict[str, float]:
    options = [f"checkpoint.background={str(background).lower()}", f"checkpoint.every_n_steps={args.every}"]
    run = f"{setup}-{'background' if background else 'at-once'}"
    place = [f"runs_dir={runs_dir}", f"run={run}", f"trainer.limit_train_batches={args.steps}"]
    settings = Settings.of(compose_config("train", [*SAVING, *SETUPS[setup], *options, *place]))
    run_processes(Path(__file__).resolve(), settings)
    checkpoint = settings.folder.checkpoints / "last.ckpt"
    files = [checkpoint] if checkpoint.is_file() else list(checkpoint.iterdir())
    size_gb = sum(path.stat().st_size for path in files) / 1e9
    for path in files:
        path.unlink()
    return save_costs(json.loads((settings.folder.path / "times.json").read_text()), size_gb)


def saving(args: argparse.Namespace) -> str:
    """Seconds, medians. `stall`: what a step with a save takes longer than one without. `write`: to the disk, fsync included.
    `cost of a save`: the stall, and what steps during a write take longer."""
    os.environ[PARAMETERS] = str(round(args.parameters * 1e6))
    if args.threads:
        os.environ["OMP_NUM_THREADS"] = str(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        ways = {
            f"{setup}, {'in the background' if background else 'at once'}": partial(saved_run, args, setup, background, folder)
            for setup in args.setups
            for background in (False, True)
        }  # fmt: skip
        found = {name: costs for name, (costs,) in in_turns(ways, rounds=1).items()}
    rows = [[name, *(f"{value:.2f}" for value in costs.values())] for name, costs in found.items()]
    return table(["", *next(iter(found.values()))], rows)


# --- startup: the time from a command to its answer or to its first optimizer step ---

POLL_S = 0.005  # between two looks for the first row of metrics.csv
TIME_LIMIT_S = 300
BARE = "import torch, lightning, torchvision"
STEP = "train.py, its first optimizer step"
UNCACHED = f"{STEP}, without cached bytecode"
PROBES: dict[str, tuple[list[str], int]] = {  # command and exit code
    "train.py --help": ([*TRAIN, "--help"], 0),
    "train.py with a wrong key, exit code 2": ([*TRAIN, "optim.lrr=3e-4"], 2),
    f'python -c "{BARE}"': ([sys.executable, "-c", BARE], 0),
}
# Python caches the bytecode of modules in __pycache__, unless PYTHONDONTWRITEBYTECODE is set, as in many containers.
CACHED = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
NOT_CACHED = CACHED | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": os.devnull}


def probe(command: list[str], expected: int, folder: Path) -> float:
    """Seconds of a command."""
    began_s = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIME_LIMIT_S, env=CACHED)
    elapsed_s = time.perf_counter() - began_s
    if done.returncode != expected:
        raise RuntimeError(f"{command} ended with {done.returncode} instead of {expected}: {done.stderr}")
    return elapsed_s


def first_step(options: list[str], folder: Path, env: Mapping[str, str]) -> float:
    """Seconds from the command to its first row of metrics.csv."""
    name = f"run-{time.monotonic_ns()}"
    command = [*TRAIN, f"run={name}", "runs_dir=runs", "trainer.log_every_n_steps=1", *options]
    metrics, errors = folder / "runs" / name / "metrics.csv", folder / f"{name}.err"
    with errors.open("wb") as file:
        began_s = time.perf_counter()
        child = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=file, env=env)
        wait_until(lambda: last_step(metrics) > 0 or child.poll() is not None, TIME_LIMIT_S, POLL_S)
        elapsed_s = time.perf_counter() - began_s
        child.kill()
        child.wait()
    if not last_step(metrics):
        raise RuntimeError(f"{command} ended before its first step: {errors.read_text()}")
    return elapsed_s


def startup(args: argparse.Namespace) -> str:
    """A first round fills the caches of files and of decoded data, and does not count."""
    source = f"data.root={args.data_root.resolve()}" if args.data_root else "data.source=embedded"
    options = [source, "data.cache_dir=cache"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ways = {name: partial(probe, *each, folder) for name, each in PROBES.items()}
        ways[STEP] = partial(first_step, options, folder, CACHED)
        ways[UNCACHED] = partial(first_step, options, folder, NOT_CACHED)
        taken_s = in_turns(ways, args.rounds, warm_up=1)
    rows = [[f"`{name}`", spread(seconds, ".2f")] for name, seconds in taken_s.items()]
    return table(["from the command to the end of", "s, median (least to most)"], rows)


# --- advice, exact: images per second of runs with options, against a run without ---

SPEED = [
    "data.source=embedded", "trainer.accelerator=cpu", "trainer.enable_progress_bar=false", "trainer.limit_val_batches=0",
    "trainer.enable_checkpointing=false", "trainer.log_every_n_steps=10",
]  # fmt: skip
DEFAULT, NORM_NAME = "default: no workers, batch 64", "a network with batch norm, ddp x2"
NORM = ["model=timm", "model.name=test_resnet", "data.image_size=56", "strategy=ddp", "trainer.devices=2"]
ADVISED = ("data.num_workers=2", "data.batch_size=256", "data.batch_size=1024")
RECIPES = {
    "BasicNet": ["trainer.max_steps=150", "trainer.max_epochs=1000"],
    "ResNet-18 at 32 pixels": ["model=timm", "model.name=resnet18", "data.image_size=32", "trainer.max_steps=50"],
}
WORLDS, SHARDS = (1, 2, 4), (None, 1, 2, 4, 8)
Rows = dict[str, tuple[str, list[str]]]  # name: the run that it is compared with, options


def advised() -> Rows:
    epochs = ["trainer.max_epochs=3"]
    rows: Rows = {DEFAULT: (DEFAULT, epochs)}
    rows |= {options: (DEFAULT, [*epochs, *options.split()]) for options in ADVISED}
    synchronised = [*NORM, "trainer.sync_batchnorm=true"]
    return rows | {NORM_NAME: (NORM_NAME, NORM), "the same with trainer.sync_batchnorm=true": (NORM_NAME, synchronised)}


def logical_ranks(recipe: str) -> Rows:
    """Worlds and numbers of logical ranks of a recipe, each compared with the ordinary mode on as many processes."""
    rows: Rows = {}
    for world in WORLDS:
        base = f"{recipe}, {world} process{'es' * (world > 1)}"
        options = [*RECIPES[recipe], "trainer.limit_test_batches=1"]
        options += ["strategy=ddp", f"trainer.devices={world}"] if world > 1 else []
        for shards in SHARDS:
            if shards is None:
                rows[base] = base, options
            elif shards >= world:
                rows[f"{base}, exact.logical_ranks={shards}"] = base, [*options, f"exact.logical_ranks={shards}"]
    return rows


def trained(options: list[str]) -> tuple[float, float, float]:
    """Images per second of the whole training (with its first steps and the pauses between epochs), accuracy, and the peak of memory in
    GiB, of a run in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*TRAIN, *SPEED, f"runs_dir={folder}", "run=a", *options], check=True, stdout=subprocess.DEVNULL)
        report = json.loads(Path(folder, "a/report.json").read_text())
    seconds = report["time/wait_s"] + report["time/steps_s"]
    rate = report["train/steps"] * report["batch_size"] / seconds
    return rate, report["test/acc"], report["peak_memory_bytes"] / 2**30


def options(args: argparse.Namespace) -> str:
    recipes = [recipe for recipe in RECIPES if args.only in recipe]
    exact = {name: row for recipe in recipes for name, row in logical_ranks(recipe).items()}
    rows = advised() if args.what == "advice" else exact
    found = in_turns({name: partial(trained, given) for name, (_, given) in rows.items()}, args.rounds)
    lines = []
    for name, (base, _) in rows.items():
        speeds, *rest = zip(*found[name], strict=True)
        accuracy, memory = map(statistics.median, rest)
        others = [speed for speed, _, _ in found[base]]
        lines.append([name, spread(speeds), f"{ratio(speeds, others):.2f}", f"{accuracy:.1%}", f"{memory:.2f}"])
    return table(["what", "images/s, median (least to most)", "ratio", "test accuracy", "peak memory, GiB"], lines)


def arguments() -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    parts = parser.add_subparsers(dest="what", required=True, metavar="overhead|saving|startup|advice|exact")
    found = {name: parts.add_parser(name) for name in ("overhead", "saving", "startup", "advice", "exact")}
    for name, rounds in (("overhead", 5), ("startup", 5), ("advice", 3), ("exact", 3)):
        found[name].add_argument("--rounds", type=int, default=rounds)
    found["overhead"].add_argument("--steps", type=int, default=400)
    of_saving = found["saving"].add_argument
    of_saving("--parameters", type=float, default=70, help="millions of them")
    of_saving("--steps", type=int, default=40, help="of one epoch; the embedded data has 112")
    of_saving("--every", type=int, default=10, help="steps between two saves")
    of_saving("--threads", type=int, help="of a process that trains; fewer than cores leave one for the writer")
    of_saving("--setups", type=some_of(SETUPS), default=",".join(SETUPS), help="single, and shards: fsdp x2")
    found["startup"].add_argument("--data-root", type=Path, help="a folder with MNIST; without it, the embedded images")
    found["advice"].set_defaults(only="")
    found["exact"].add_argument("--only", default="", help="recipes whose name contains this")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    measure = {"overhead": overhead, "saving": saving, "startup": startup}.get(args.what, options)
    print(made_by())
    print(measure(args))


if __name__ == "__main__":
    if (job := received()) and job.world:
        timed_run(Settings(job.config, job.world))
    else:
        main()
