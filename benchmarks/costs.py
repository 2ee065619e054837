"""Measures the cost of parts of a run on this machine. Prints Markdown tables.

python benchmarks/costs.py overhead [--rounds 5] [--steps 400]             # framework overhead per optimizer step
python benchmarks/costs.py module [--rounds 5] [--steps 1000]              # the same for a LightningModule with a DataLoader
python benchmarks/costs.py saving [--parameters 70] [--setups single,shards]
python benchmarks/costs.py startup [--rounds 5] [--data-root <folder>]       # from a command to its first step
python benchmarks/costs.py advice [--rounds 3]                              # workers, batch size, SyncBatchNorm
python benchmarks/costs.py exact [--rounds 3]                               # exact.logical_ranks, on 1, 2 and 4 processes

Because machines are shared, read the ratios: they compare runs of the same round.
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
import measuring
import torch
from measuring import SMALL, in_turns, last_step, ready, spread, start_job, table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lockstep import ROOT, build, launch
from lockstep.checkpoints import saving as checkpoint_saving
from lockstep.config.checks import resolve
from lockstep.config.settings import Settings
from lockstep.extras.page import LivePage
from lockstep.launch.local import received_handover, run_processes
from lockstep.machine import process

TRAIN = [sys.executable, str(ROOT / "train.py")]


class Marks(pl.Callback):
    """Records when each step of one epoch began, and when the last one ended."""

    def __init__(self) -> None:
        self.began_s: list[float] = []
        self.ended_s = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self.began_s.append(time.perf_counter())

    def on_train_epoch_end(self, *_: Any) -> None:
        self.ended_s = time.perf_counter()


# --- overhead: a one-layer network on one CPU thread; a checkpoint every 57 steps, at the end of each epoch ---

WARM = 50  # steps before the clock starts
BATCH = torch.zeros(64, 1, 28, 28), torch.zeros(64, dtype=torch.long)


def one_layer() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), 1e-3, fused=True)


def per_step_ms(began_s: list[float], steps: int) -> float:
    return 1e3 * (began_s[WARM + steps] - began_s[WARM]) / steps


def bare_loop(steps: int) -> float:
    net, began_s = one_layer(), []
    optimizer, (image_BCHW, label_B) = adamw(net), BATCH
    for _ in range(WARM + steps + 1):
        began_s.append(time.perf_counter())
        F.cross_entropy(net(image_BCHW), label_B).backward()
        optimizer.step()
        optimizer.zero_grad()
    return per_step_ms(began_s, steps)


class Plain(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = one_layer()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.net)


def lightning_alone(steps: int) -> float:
    """A bare Trainer that repeats one batch."""
    marks = Marks()
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, callbacks=[marks], **dict.fromkeys(off, False))  # type: ignore[arg-type]
    trainer.fit(Plain(), DataLoader([BATCH] * (WARM + steps + 1), batch_size=None))  # type: ignore[arg-type]
    return per_step_ms(marks.began_s, steps)


def all_of_lockstep(steps: int, *more: str) -> float:
    """A complete default run: normalised batches from memory, seeds, log, throughput, checkpoints, schedule."""
    marks = Marks()

    def job(settings: Settings, data: Any) -> None:
        work, trainer = ready(settings, data, one_layer())
        torch.set_num_threads(1)
        trainer.callbacks.append(marks)
        trainer.fit(work.module, datamodule=work.data)

    with tempfile.TemporaryDirectory() as folder, measuring.silenced():
        length = ["trainer.limit_val_batches=0", f"trainer.max_steps={WARM + steps + 1}"]
        start_job(job, [*SMALL, f"runs_dir={folder}", "trainer.precision=32-true", *length, *more])
    return per_step_ms(marks.began_s, steps)


def overhead(args: argparse.Namespace) -> str:
    process.is_command = True
    build.process(Settings.of(resolve(["trainer.accelerator=cpu"])))
    torch.set_num_threads(1)
    ways = {"bare loop": bare_loop, "Lightning alone": lightning_alone, "Lockstep": all_of_lockstep}
    return overhead_table(in_turns({name: partial(way, args.steps) for name, way in ways.items()}, args.rounds))


# --- module: anybody's LightningModule and DataLoader; CPU of the thread that trains ---
#
# On two idle cores: 1,115 us in a bare Trainer, 1,142 us in Lockstep; 1,676 and 2,072 us with two workers. Before batches of a
# TensorDataset were indexed at once, 907 and 1,279 us, and 1,289 and 1,565 us.


class Linear(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(32, 10)
        self.began_s: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.began_s.append(time.thread_time())
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), 0.1)

    def cpu_us(self) -> float:
        """Of a step; the median leaves out the few that log a row or write the page."""
        return 1e6 * statistics.median(after - before for before, after in pairwise(self.began_s[WARM:]))


class Numbers(pl.LightningDataModule):
    def __init__(self, num_workers: int = 0) -> None:
        super().__init__()
        self.num_workers, self.rows = (
            num_workers,
            TensorDataset(torch.rand(64 * 2000, 32), torch.zeros(64 * 2000).long()),
        )

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.rows, 64, shuffle=True, num_workers=self.num_workers)


def bare_trainer(steps: int, workers: int) -> float:
    module = Linear()
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    pl.Trainer(accelerator="cpu", max_steps=WARM + steps, **dict.fromkeys(off, False)).fit(module, Numbers(workers))  # type: ignore[arg-type]
    return module.cpu_us()


def lockstep_trainer(steps: int, workers: int) -> float:
    module, data = Linear(), Numbers(workers)  # in place of the config's

    def job(settings: Settings, _: Any) -> None:
        trainer = build.trainer(settings, module, data, LivePage(settings))
        torch.set_num_threads(1)
        trainer.fit(module, datamodule=data)

    with tempfile.TemporaryDirectory() as folder, measuring.silenced():
        length = ["trainer.limit_val_batches=0", f"trainer.max_steps={WARM + steps}"]
        start_job(job, [*SMALL, *length, "task.monitor=null", "trainer.precision=32-true", f"runs_dir={folder}"])
    return module.cpu_us()


def of_module(args: argparse.Namespace) -> str:
    process.is_command = True
    torch.set_num_threads(1)
    pairs = {"bare Trainer": bare_trainer, "Lockstep": lockstep_trainer}
    ways = {f"{name}, {n} workers": partial(way, args.steps, n) for n in (0, 2) for name, way in pairs.items()}
    rows = [[name, spread(us)] for name, us in in_turns(ways, args.rounds).items()]
    return table(["what", "us of CPU per step, median (min to max)"], rows)


def overhead_table(taken_ms: dict[str, list[float]]) -> str:
    bare_ms = statistics.median(taken_ms["bare loop"])
    rows = [[name, spread(ms, ".2f"), f"{statistics.median(ms) - bare_ms:.2f}"] for name, ms in taken_ms.items()]
    return table(["what", "ms per step, median (min to max)", "above the bare loop"], rows)


# --- saving: an MLP with AdamW; its checkpoint has three numbers per parameter ---

PARAMETERS = "MEASURE_PARAMETERS"  # environment variable of the processes
SAVING = [
    *SMALL, "trainer.limit_val_batches=0", "trainer.max_epochs=1", "trainer.log_every_n_steps=1000", "trainer.precision=32-true",
    "callbacks=[]", "loader.batch_size=32", "loader.num_workers=0",
]  # fmt: skip
SETUPS = {"single": ["strategy=single"], "shards": ["strategy=fsdp", "trainer.devices=2", "checkpoint.sharded=true"]}
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


def timed_run(settings: Settings, data: Any) -> None:
    """One process's part of a run. Rank 0 leaves its times in the run's folder."""
    marks = Marks()
    saves: list[Span] = []  # time in trainer.save_checkpoint
    writes: list[Span] = []
    work, trainer = ready(settings, data, mlp(int(os.environ[PARAMETERS])))
    trainer.callbacks.insert(0, marks)
    trainer.save_checkpoint = timed(trainer.save_checkpoint, saves)
    io: Any = checkpoint_saving.AtomicCheckpointIO
    io.write_or_explain = timed(io.write_or_explain, writes)
    trainer.fit(work.module, datamodule=work.data)
    if settings.world.rank == 0:
        times = {"steps": [*marks.began_s, marks.ended_s], "saves": saves, "writes": writes}
        (settings.folder.path / "times.json").write_text(json.dumps(times))


def save_costs(times: dict[str, Any], size_gb: float) -> dict[str, float]:
    """Costs in seconds. A step lasts from its start to the start of the next step, and includes a save after it. The last checkpoint
    stalls no step. The first stall does not count, because it allocates new memory."""
    saves, writes = times["saves"], times["writes"]
    steps = list(pairwise(times["steps"]))[WARM_UP:]

    def during(spans: list[Span]) -> list[Span]:
        return [step for step in steps if any(begin < step[1] and end > step[0] for begin, end in spans)]

    slowed = during(saves + writes)
    normal_s = statistics.median(end - begin for begin, end in steps if (begin, end) not in slowed)
    stalls = [end - begin - normal_s for begin, end in during(saves)]
    return {
        "GB": size_gb,
        "step": normal_s,
        "stall": statistics.median(stalls[1:] or stalls),
        "write": statistics.median(end - begin for begin, end in writes),
        "cost of a save": sum(end - begin - normal_s for begin, end in slowed) / len(stalls),
    }


def saved_run(args: argparse.Namespace, setup: str, background: bool, runs_dir: str) -> dict[str, float]:
    location = [f"runs_dir={runs_dir}", f"run={setup}-{background}", f"trainer.limit_train_batches={args.steps}"]
    saves = [f"checkpoint.background={str(background).lower()}", f"checkpoint.every_n_steps={args.every}"]
    settings = Settings.of(resolve([*SAVING, *SETUPS[setup], *saves, *location]))
    run_processes(Path(__file__).resolve(), settings)
    checkpoint = settings.folder.checkpoints / "last.ckpt"
    files = [checkpoint] if checkpoint.is_file() else list(checkpoint.iterdir())
    size_gb = sum(path.stat().st_size for path in files) / 1e9
    for path in files:
        path.unlink()
    return save_costs(json.loads((settings.folder.path / "times.json").read_text()), size_gb)


def saving(args: argparse.Namespace) -> str:
    """Medians in seconds. `stall`: extra time of a step with a save. `write`: time to write to the disk, including fsync.
    `cost of a save`: the stall, plus the extra time of steps during the write."""
    os.environ[PARAMETERS] = str(round(args.parameters * 1e6))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for setup in args.setups:
            for background, when in ((False, "at once"), (True, "in the background")):
                costs = saved_run(args, setup, background, folder)
                rows.append([f"{setup}, {when}", *(f"{value:.2f}" for value in costs.values())])
    return table(["", *costs], rows)


# --- startup: time from a command to its answer or its first optimizer step ---

POLL_S = 0.005  # between two checks for the first row of metrics.csv
TIME_LIMIT_S = 300
STEP = "train.py, its first optimizer step"
PROBES = {"train.py --help": (["--help"], 0), "train.py with a wrong key, exit code 2": (["optim.lrr=3e-4"], 2)}
# Python caches the bytecode of modules in __pycache__, unless PYTHONDONTWRITEBYTECODE is set, as in many containers.
CACHED = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
NOT_CACHED = CACHED | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": os.devnull}


def probe(options: list[str], expected: int, folder: Path) -> float:
    """Seconds that a command takes. Raises RuntimeError unless it ends with the exit code `expected`."""
    began_s = time.perf_counter()
    done = subprocess.run([*TRAIN, *options], cwd=folder, capture_output=True, text=True, env=CACHED)
    elapsed_s = time.perf_counter() - began_s
    if done.returncode != expected:
        raise RuntimeError(f"train.py {options} ended with {done.returncode} instead of {expected}: {done.stderr}")
    return elapsed_s


def first_step(options: list[str], folder: Path, env: Mapping[str, str]) -> float:
    """Seconds from the command to the first row of its metrics.csv."""
    run = folder / f"run-{time.monotonic_ns()}"
    command = [*TRAIN, f"run={run.name}", f"runs_dir={folder}", "trainer.log_every_n_steps=1", *options]
    metrics, log = run / "metrics.csv", folder / f"{run.name}.log"
    began_s = time.perf_counter()
    child = measuring.start_command(command, log, cwd=folder, env=env)
    measuring.wait_until(lambda: last_step(metrics) > 0 or child.poll() is not None, TIME_LIMIT_S, POLL_S)
    elapsed_s = time.perf_counter() - began_s
    child.kill()
    child.wait()
    if not last_step(metrics):
        raise RuntimeError(f"{command} ended before its first step: {log.read_text()}")
    return elapsed_s


def startup(args: argparse.Namespace) -> str:
    """The first round fills the caches of files and decoded data, and does not count."""
    source = f"data.root={args.data_root.resolve()}" if args.data_root else "data.source=embedded"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ways = {name: partial(probe, *options, folder) for name, options in PROBES.items()}
        for what, env in ((STEP, CACHED), (f"{STEP}, without cached bytecode", NOT_CACHED)):
            ways[what] = partial(first_step, [source, "data.cache_dir=cache"], folder, env)
        taken_s = in_turns(ways, args.rounds, warm_up=1)
    rows = [[f"`{name}`", spread(seconds, ".2f")] for name, seconds in taken_s.items()]
    return table(["from the command to the end of", "s, median (min to max)"], rows)


# --- advice, exact: images per second of runs with options, compared with a run without ---

SPEED = [*SMALL, "trainer.limit_val_batches=0", "trainer.enable_checkpointing=false", "trainer.log_every_n_steps=10"]
DEFAULT, NORM_NAME = "default: no workers, batch 64", "a network with batch norm, ddp x2"
NORM = ["model=timm", "model.name=test_resnet", "data.image_size=56", "strategy=ddp", "trainer.devices=2"]
EPOCHS = ["trainer.max_epochs=3"]
Rows = dict[str, tuple[str, list[str]]]  # name: (the run to compare with, options)
ADVISED: Rows = {
    DEFAULT: (DEFAULT, EPOCHS),
    **{
        key: (DEFAULT, [*EPOCHS, key])
        for key in ("loader.num_workers=2", "loader.batch_size=256", "loader.batch_size=1024")
    },
    NORM_NAME: (NORM_NAME, NORM),
    "the same with trainer.sync_batchnorm=true": (NORM_NAME, [*NORM, "trainer.sync_batchnorm=true"]),
}
RECIPES = {
    "BasicNet": ["trainer.max_steps=150", "trainer.max_epochs=1000"],
    "ResNet-18 at 32 pixels": ["model=timm", "model.name=resnet18", "data.image_size=32", "trainer.max_steps=50"],
}
WORLDS, LOGICAL_RANKS = (1, 2, 4), (1, 2, 4, 8)


def exact() -> Rows:
    """World sizes and numbers of logical ranks for each recipe, compared with the ordinary mode on as many processes."""
    rows: Rows = {}
    for recipe, steps in RECIPES.items():
        for world in WORLDS:
            base = f"{recipe}, {world} process{'es' * (world > 1)}"
            options = [*steps, "trainer.limit_test_batches=1"]
            options += ["strategy=ddp", f"trainer.devices={world}"] if world > 1 else []
            rows[base] = base, options
            for key in (f"exact.logical_ranks={ranks}" for ranks in LOGICAL_RANKS if ranks >= world):
                rows[f"{base}, {key}"] = base, [*options, key]
    return rows


def trained(options: list[str]) -> tuple[float, float, float]:
    """A run in a separate process: images per second of the whole training (including the first steps and the pauses between epochs),
    accuracy, and peak memory in GiB."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*TRAIN, *SPEED, f"runs_dir={folder}", "run=a", *options], check=True, stdout=subprocess.DEVNULL)
        report = json.loads(Path(folder, "a/report.json").read_text())
    seconds = report["time/wait_s"] + report["time/steps_s"]
    rate = report["train/steps"] * report["batch_size"] / seconds
    return rate, report["test/acc"], report["peak_memory_bytes"] / 2**30


def speeds(rows: Rows, args: argparse.Namespace) -> str:
    results = in_turns({name: partial(trained, options) for name, (_, options) in rows.items()}, args.rounds)
    lines = []
    for name, (base, _) in rows.items():
        rates, accuracies, memories = zip(*results[name], strict=True)
        times = measuring.ratio(rates, [rate for rate, _, _ in results[base]])
        medians = f"{statistics.median(accuracies):.1%}", f"{statistics.median(memories):.2f}"
        lines.append([name, spread(rates), f"{times:.2f}", *medians])
    return table(["what", "images/s, median (min to max)", "ratio", "test accuracy", "peak memory, GiB"], lines)


PARTS: dict[str, tuple[Callable[[argparse.Namespace], str], int | None]] = {  # and the default number of rounds
    "overhead": (overhead, 5), "module": (of_module, 5), "saving": (saving, None), "startup": (startup, 5), "advice": (partial(speeds, ADVISED), 3),
    "exact": (partial(speeds, exact()), 3),
}  # fmt: skip


def main() -> None:
    parser = measuring.parser(__doc__)
    commands = parser.add_subparsers(dest="what", required=True, metavar="|".join(PARTS))
    parts = {name: commands.add_parser(name) for name in PARTS}
    for name, (_, rounds) in PARTS.items():
        if rounds:
            parts[name].add_argument("--rounds", type=int, default=rounds)
    parts["overhead"].add_argument("--steps", type=int, default=400)
    parts["module"].add_argument("--steps", type=int, default=1000)
    parts["startup"].add_argument("--data-root", type=Path, help="a folder with MNIST; without it, the embedded images")
    of_saving = parts["saving"].add_argument
    of_saving("--parameters", type=float, default=70, help="millions of parameters")
    of_saving("--steps", type=int, default=40, help="steps of one epoch; the embedded data has 112")
    of_saving("--every", type=int, default=10, help="steps between two saves")
    of_saving("--setups", type=measuring.some_of(SETUPS), default=",".join(SETUPS), help="single, shards (fsdp x2)")
    args = parser.parse_args()
    measuring.show(PARTS[args.what][0](args))


if __name__ == "__main__":
    if (job := received_handover()) and isinstance(job.work, Settings):
        launch.Job("train", timed_run, launch.data)(job.work)
    else:
        main()
