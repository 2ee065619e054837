"""Checks Lockstep on a GPU within a time budget, most important checks first.

python benchmarks/check_gpu.py [--budget 520] [--only waits,bits] [--data <folder>] [--out gpu-checks]
python benchmarks/check_gpu.py --device cpu      # the same commands with small networks, to test this script

--data is a folder with MNIST; without it, the runs train on the embedded images. --out receives summary.txt (the printed lines),
reports.json, and the output of each command. After a failed command, the next ones still run. docs/measurements/gpu.md has the results.
"""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import measuring
import numpy as np
import torch
from benchmark import machine
from golden import ONE_DEVICE
from measuring import last_step, wait_until
from PIL import Image

from lockstep import ROOT
from lockstep.checkpoints.weights import read
from lockstep.errors import UserError
from lockstep.extras.comparison import tensor_difference
from lockstep.machine.world import gpu_count

COMMAND_S = 120.0  # limit of a command
LEAST_S = 25.0  # no stage starts with less time left
SIZES = {  # for the runs that measure speed and memory: network, pixels, batch, steps
    "cuda": (["model=resnet50d"], 336, 128, 60),
    "cpu": (["model=timm", "model.name=test_resnet"], 32, 16, 8),
}


class Checks:
    """Runs commands within the budget, and keeps their output."""

    def __init__(self, device: str, budget_s: float, data: Path | None, folder: Path, out: Path) -> None:
        self.device, self.folder, self.out = device, folder, out
        self.net, self.pixels, self.batch, self.steps = SIZES[device]
        self.began_s, self.budget_s = time.monotonic(), budget_s
        self.mnist = [f"data.root={data.resolve()}"] if data else ["data.source=embedded"]
        self.photos = ["data=folder", f"data.root={folder / 'photos'}"]
        self.reports: dict[str, dict[str, Any]] = {}
        self.cwd = ROOT

    def limit_s(self) -> float:
        """The time limit of the next command."""
        return min(COMMAND_S, self.began_s + self.budget_s - time.monotonic())

    def say(self, line: str) -> None:
        line = f"[{time.monotonic() - self.began_s:4.0f} s] {line}"
        print(line, flush=True)
        with (self.out / "summary.txt").open("a") as file:
            print(line, file=file)

    def output(self, name: str) -> str:
        return (self.out / f"{name}.txt").read_text(errors="replace").strip()

    def run(self, name: str, command: Sequence[str], kill_at_step: int = 0) -> int:
        """Returns the exit code. Kills the command and its child processes when the run reaches `kill_at_step`, or at the time limit."""
        child = measuring.start_command([sys.executable, *command], self.out / f"{name}.txt", cwd=self.cwd)
        metrics, limit_s = self.folder / name / "metrics.csv", self.limit_s()
        try:
            wait_until(lambda: child.poll() is not None or 0 < kill_at_step <= last_step(metrics), limit_s)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
        return int(child.wait())

    def options(self, name: str, *extra: str) -> list[str]:
        cache = [] if "data=none" in extra else [f"data.cache_dir={self.folder / 'cache'}"]
        return [f"trainer.accelerator={self.device}", f"runs_dir={self.folder}", f"run={name}", *cache, *extra]

    def train(self, name: str, *options: str, script: Sequence[str] = ("train.py",), kill_at_step: int = 0) -> Any:
        """Returns the report, with the exit code."""
        code = self.run(name, [*script, *self.options(name, *options)], kill_at_step)
        file = self.folder / name / "report.json"
        self.reports[name] = (json.loads(file.read_text()) if file.is_file() else {}) | {"exit": code}
        if code and not kill_at_step:
            self.say(f"  {name}: exit code {code}: {self.output(name).splitlines()[-1:]}")
        return self.reports[name]

    def apart(self, one: str, other: str) -> str:
        """Whether the results of two runs are equal; if not, the distance of their weights, relative to their norm."""
        try:
            if not (lines := measuring.differences(self.folder / one, self.folder / other)):
                return "same bits"
            files = [self.folder / name / "checkpoints/last.ckpt" for name in (one, other)]
            tensors = [read(file).values["state_dict"] for file in files]
        except (UserError, OSError) as e:
            return f"not compared: {e}"
        weights = [torch.cat([state[key].double().flatten() for key in sorted(state)]) for state in tensors]
        return f"weights differ by {tensor_difference(*weights):.1e}; {lines[0]}"

    def rate_of(self, name: str) -> str:
        rates = re.findall(r"^RATE (\S+)", self.output(name), re.MULTILINE)
        return f"{rates[-1]} images/s" if rates else " ".join(self.output(name).split())[-200:]

    def compared(
        self, base: str, options: list[str], ways: dict[str, list[str]], script: Sequence[str] = ("train.py",)
    ) -> Iterator[str]:
        self.train(base, *options, script=script)
        for name, extra in ways.items():
            self.train(name, *options, *extra, script=script)
            yield f"{name} against {base}: {self.apart(base, name)}"

    def speeds(self, options: list[str], ways: dict[str, list[str]]) -> Iterator[str]:
        for name, extra in ways.items():
            yield f"{name}: {rate(self.train(name, *options, *extra))}"

    def of_photos(self, pixels: int, batch: int) -> list[str]:
        length = [f"trainer.max_steps={self.steps}", f"trainer.log_every_n_steps={self.steps // 4}", *TEST_ONE]
        return [*self.photos, f"data.image_size={pixels}", f"loader.batch_size={batch}", *length, NO_CHECKPOINTS]


def write_photos(folder: Path) -> None:
    """4,000 JPEGs of smooth noise, in ten classes."""
    noise = np.random.default_rng(0).integers(0, 256, (4000, 4, 4, 3), dtype=np.uint8)
    for number, coarse in enumerate(noise):
        path = folder / f"class-{number % 10}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(coarse).resize((32, 32), Image.Resampling.BICUBIC).save(path)


def accuracy(report: Any) -> str:
    return f"exit code {report['exit']}" if report["exit"] else f"test accuracy {report['test/acc']:.2%}"


def rate(report: Any) -> str:
    if report["exit"]:
        return f"exit code {report['exit']}"
    speed, waiting = report["train/images_per_s"] or 0, report["train/data_wait_share"] or 0
    return f"{speed:,.0f} images/s, {waiting:.1%} waiting for data, {report['peak_memory_bytes'] / 2**30:.1f} GiB"


# --- stages: each yields lines of the summary ---

TEST_ONE = ["trainer.limit_val_batches=0", "trainer.limit_test_batches=1"]
FP32 = ["trainer.precision=32-true", "trainer.max_steps=40", *TEST_ONE]
NO_CHECKPOINTS = "trainer.enable_checkpointing=false"
RANKS = "exact.logical_ranks=8"
DDP, FSDP = (["trainer.devices=1", f"strategy={name}"] for name in ("ddp", "fsdp"))


def default(checks: Checks) -> Iterator[str]:
    report = checks.train("default", *checks.mnist)
    yield f"{accuracy(report)}, {rate(report)}"


# A call that waits for the GPU warns. Frameworks catch warnings and print them again, so the stage counts printed warnings.
WARNING = """import runpy, sys, torch
if torch.cuda.is_available(): torch.cuda.set_sync_debug_mode("warn")
sys.argv[0] = "train.py"
runpy.run_path("train.py", run_name="__main__")"""
PLACE = re.compile(r"([\w./-]+/)?(\w+/\w+\.py:\d+).*synchronizing CUDA operation")


def waits(checks: Checks) -> Iterator[str]:
    """Runs of 100 and 200 steps within one epoch log two rows each. They wait equally often, unless a step without a row waits."""
    places: list[list[str]] = []
    for steps in (100, 200):
        name, length = f"waits-{steps}", [f"trainer.max_steps={steps}", f"trainer.log_every_n_steps={steps // 2}"]
        options = [*checks.mnist, *length, *TEST_ONE, "loader.batch_size=16"]
        checks.train(name, *options, script=["-W", "always", "-c", WARNING])
        places.append([match[2] for match in PLACE.finditer(checks.output(name))])
    few, many = map(Counter, places)
    yield f"{few.total()} in 100 steps, {many.total()} in 200; in steps without a log row: {dict(many - few) or 'none'}"
    yield f"by place: {dict(many.most_common())}"
    yield "in order: " + ", ".join(f"{place} x{len(list(same))}" for place, same in itertools.groupby(places[1]))


def transforms(checks: Checks) -> Iterator[str]:
    options = [*checks.photos, "data.image_size=32", "augment=[strong,rotate,rand]", RANKS, *FP32]
    yield from checks.compared("read", options, {"read-by-workers": ["loader.num_workers=4"], "read-ddp": DDP})
    names = {"crop-flip": "[crop,flip]", "strong": "strong", "mixed": "[crop,flip,mixup,cutmix]"}
    ways = {name: [*checks.net, f"augment={augment}"] for name, augment in names.items()}
    yield from checks.speeds(checks.of_photos(min(checks.pixels, 224), 64), ways)


def parity(checks: Checks) -> Iterator[str]:
    ways = {"accumulated": ["trainer.accumulate_grad_batches=4"], "cpu": ["trainer.accelerator=cpu"]}
    yield from checks.compared("single", [*checks.mnist, *FP32], {"ddp": DDP, "fsdp": FSDP, **ways})


def bits(checks: Checks) -> Iterator[str]:
    often = ["trainer.log_every_n_steps=10", "checkpoint.every_n_steps=50"]
    options = [*checks.mnist, "trainer.deterministic=true", "trainer.max_steps=300", *often, *TEST_ONE]
    yield from checks.compared("first", options, {"second": []})
    report = checks.train("killed", *options, kill_at_step=120)
    checks.train("killed", *options, "resume=auto")
    yield f"{'killed' if report['exit'] < 0 else 'NOT KILLED'} and resumed: {checks.apart('first', 'killed')}"


def speed(checks: Checks) -> Iterator[str]:
    options = [*checks.net, *checks.of_photos(checks.pixels, checks.batch)]
    yield from checks.speeds(options, {"net": [], "benchmark": ["trainer.benchmark=true"], "compile": ["compile=true"]})
    script, turns = ROOT / "benchmarks/contenders.py", f"5\n{checks.steps // 2}\n"  # steps; the first turn warms up
    command = [sys.executable, str(script), "bare_loop", *checks.options("bare", *options)]
    with (checks.out / "bare.txt").open("w") as log:
        done = subprocess.run(
            command, input=turns, stdout=subprocess.PIPE, stderr=log, text=True, timeout=checks.limit_s()
        )
    turn = json.loads(done.stdout.splitlines()[-1])
    yield f"a bare loop over one batch: {turn['images'] / turn['seconds']:,.0f} images/s"


def exact(checks: Checks) -> Iterator[str]:
    yield from checks.compared("ranks", [*checks.mnist, *FP32, RANKS], {"ranks-ddp": DDP})


def precisions(checks: Checks) -> Iterator[str]:
    options = [*checks.mnist, "trainer.max_steps=100", "trainer.gradient_clip_val=1.0", "trainer.limit_test_batches=8"]
    for precision in ("16-mixed", "bf16-true", "16-true"):
        yield f"{precision}: {accuracy(checks.train(precision, *options, f'trainer.precision={precision}'))}"


def basic_net(checks: Checks) -> Iterator[str]:
    data = checks.mnist[0].replace("data.root=", "--data-root=").replace("data.source=embedded", "--quick")
    turns = ["--segment", "200" if checks.device == "cuda" else "5", "--rounds", "2", "--no-accuracy"]
    checks.run("basic_net", ["benchmarks/benchmark.py", "--device", checks.device, "--peers", "plain", data, *turns])
    yield from checks.output("basic_net").splitlines()[-7:]


def memory(checks: Checks) -> Iterator[str]:
    options = [*checks.net, *checks.of_photos(checks.pixels, 2048), "trainer.max_steps=2"]
    report = checks.train("oom", *options)
    yield f"batch 2,048: exit code {report['exit']}: {' '.join(checks.output('oom').split())[-220:]}"
    report = checks.train("accumulated", *options, "trainer.accumulate_grad_batches=2")
    yield f"batch 2,048 in 2 micro-batches: {rate(report)}"


def vit(checks: Checks) -> Iterator[str]:
    name = "vit_large_patch16_224" if checks.device == "cuda" else "test_vit"
    options = ["model=timm", f"model.name={name}", *checks.of_photos(min(checks.pixels, 224), 64)]
    yield from checks.speeds(options, {"vit": [], "vit-fsdp": FSDP})


def modules(checks: Checks) -> Iterator[str]:
    """A user's LightningModule, with its own DataLoaders."""
    project = checks.folder / "project"
    (project / "src").mkdir(parents=True)
    (project / "pyproject.toml").write_text("[project]\nname = 'brought'\n\n[tool.lockstep]\n")
    shutil.copy(Path(__file__).with_name("gpu_module.py"), project / "src/brought.py")
    target = ["task=lightning_module", "task._target_=brought.Brought", "data=none"]

    def arguments(**values: object) -> list[str]:
        return [f"+task.{key}={value}" for key, value in values.items()]

    script = ["-m", "lockstep", "train"]
    checks.cwd = project
    try:
        small = arguments(name="test_resnet", pixels=32, batch=64, count=1280, first=1, last=15)
        often = ["trainer.log_every_n_steps=5", "checkpoint.every_n_steps=10", "trainer.deterministic=true"]
        options = [*target, *small, "trainer.precision=32-true", "trainer.max_steps=30", *often]
        ways = {"module-ddp": DDP, "module-fsdp": FSDP, "module-again": []}
        yield from checks.compared("module", options, ways, script)
        report = checks.train("module-killed", *options, script=script, kill_at_step=20)
        checks.train("module-killed", *options, "resume=auto", script=script)
        yield f"{'killed' if report['exit'] < 0 else 'NOT KILLED'} and resumed: {checks.apart('module', 'module-killed')}"
        name, numbers = (
            ("resnet50d", (160, 128, 2560, 20, 100, 8))
            if checks.device == "cuda"
            else ("test_resnet", (32, 64, 640, 2, 8, 1))
        )
        pixels, batch, count, first, last, workers = numbers
        large = arguments(
            name=name, pixels=pixels, batch=batch, count=count, first=first, last=last, workers=workers, drop=0.1
        )
        options = [
            *target,
            *large,
            "trainer.precision=bf16-mixed",
            f"trainer.max_steps={last + 1}",
            *TEST_ONE,
            NO_CHECKPOINTS,
        ]
        for way, more in {"module-speed": [], "module-speed-ddp": DDP, "module-speed-fsdp": FSDP}.items():
            checks.train(way, *options, *more, script=script)
            yield f"{way}: {checks.rate_of(way)}"
        checks.run("module-plain", ["src/brought.py", name, *map(str, numbers)])
        yield f"a plain Trainer: {checks.rate_of('module-plain')}"
    finally:
        checks.cwd = ROOT  # fmt: skip


def golden(checks: Checks) -> Iterator[str]:
    """Of the ways on one device: the stored order of samples, and a resumed run with the bits of an uninterrupted one."""
    accelerator = "gpu" if checks.device == "cuda" else "cpu"
    options = ["--recipes", "mnist,module", "--ways", ",".join(ONE_DEVICE), "--accelerator", accelerator]
    checks.run("golden", ["benchmarks/golden.py", "--stored", *options])
    yield from checks.output("golden").splitlines()[-3:]


TESTS = (
    "training/test_oom.py", "strategies/test_batch_norm.py", "data/test_loaders.py", "kit/augment/test_references.py", "compat/test_torch.py",
)  # fmt: skip


def tests(checks: Checks) -> Iterator[str]:
    checks.run("tests", ["-m", "pytest", "-n0", "-q", *(f"tests/{path}" for path in TESTS)])
    lines = checks.output("tests").splitlines()
    yield from (line for line in lines if re.match(r"FAILED|ERROR|\d+ (passed|failed)", line))


STAGES: dict[str, Callable[[Checks], Iterator[str]]] = {
    "default": default, "modules": modules, "waits": waits, "transforms": transforms, "parity": parity, "bits": bits, "golden": golden, "speed": speed, "exact": exact,
    "precisions": precisions, "basic_net": basic_net, "memory": memory, "vit": vit, "tests": tests,
}  # fmt: skip


def main() -> None:
    parser = measuring.parser(__doc__)
    parser.add_argument("--device", choices=SIZES, default="cuda")
    parser.add_argument("--budget", type=float, default=520, help="time budget in seconds")
    parser.add_argument("--only", type=measuring.some_of(STAGES), default=list(STAGES), help=",".join(STAGES))
    parser.add_argument("--data", type=Path, help="a folder with MNIST")
    parser.add_argument("--out", type=Path, default=Path("gpu-checks"), help="an empty or new folder")
    args = parser.parse_args()
    if args.device == "cuda" and not gpu_count():
        parser.error("this machine has no GPU; pass --device cpu")
    args.out.mkdir(parents=True, exist_ok=True)
    if any(args.out.iterdir()):
        parser.error(f"{args.out} is not empty; remove it, or pass a different --out")
    with tempfile.TemporaryDirectory() as folder:
        checks = Checks(args.device, args.budget, args.data, Path(folder), args.out.resolve())
        checks.say(measuring.made_by(machine(args.device)).strip())
        write_photos(Path(folder) / "photos")
        for name in args.only:
            try:
                for line in STAGES[name](checks) if checks.limit_s() > LEAST_S else ["skipped: out of time"]:
                    checks.say(f"{name}: {line}")
            except Exception as e:
                checks.say(f"{name}: {type(e).__name__}: {e}")
            (checks.out / "reports.json").write_text(json.dumps(checks.reports, indent=1))


if __name__ == "__main__":
    main()
