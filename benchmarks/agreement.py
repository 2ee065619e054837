"""Measures how much results differ between strategies and numbers of processes. Prints Markdown tables.

python benchmarks/agreement.py strategies [key=value ...]           # each strategy against one process, in fp32
python benchmarks/agreement.py drift [--steps 10 40 160]            # two processes against one, by the number of steps
python benchmarks/agreement.py bits [--steps 40]                    # exact.logical_ranks=8, on any number of processes

strategies: trains three recipes for some steps: BasicNet with dropout at a low learning rate, the default recipe (AdamW at 1e-3,
dropout), and a timm ResNet with synchronised batch norm. All but the default have clipping and augmentation. Without GPUs, dp uses one
device. Differences are relative: for a loss, the difference over the value; for weights, the norm of the difference over the norm, of
all weights together and of the tensor that differs most. Rounding one number in fp32 changes it by 1e-7.
bits: compares a digest of weights, averages, optimizer and schedule after training on one process, on several, and on processes that
are killed and resumed by a different number of processes.

Exit code 1 if a strategy differs by more than its limit, or if a recipe has more than one digest.
"""

import argparse
import hashlib
import math
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import measuring
import torch
from measuring import SMALL, last_step, start_command, table, wait_until
from torch import Tensor

from lockstep import ROOT
from lockstep.checkpoints.finding import leaves
from lockstep.checkpoints.weights import read
from lockstep.extras import comparison
from lockstep.reporting.report import Report

SHORT = [*SMALL, "trainer.limit_val_batches=1", "trainer.limit_test_batches=1", "trainer.max_epochs=100"]


def on(strategy: str, processes: int = 1) -> list[str]:
    return [f"strategy={strategy}", *([f"trainer.devices={processes}"] if processes > 1 else [])]


# --- relative differences of two runs ---


def trained(runs_dir: Path, name: str, *overrides: str) -> Report:
    measuring.train([f"run={name}", f"runs_dir={runs_dir}", *SHORT, "trainer.precision=32-true", *overrides])
    return comparison.find(name, runs_dir)


def difference(reference: Report, other: Report) -> tuple[float, float, float]:
    """Three relative differences: the largest over the losses of all steps; that of all weights and buffers as one vector; and the largest
    over single tensors. Small tensors, such as biases that started at zero, differ most."""
    losses = [run.curves["train/loss"].values for run in (reference, other)]
    weights: list[dict[str, Any]] = [
        read(r.folder / "checkpoints" / "last.ckpt").values["state_dict"] for r in (reference, other)
    ]
    if len(losses[0]) != len(losses[1]) or weights[0].keys() != weights[1].keys():
        raise RuntimeError(f"{other.folder} did not run the same steps as {reference.folder}")
    floating = [key for key, value in weights[0].items() if value.is_floating_point()]
    vectors = [torch.cat([state[key].double().flatten() for key in floating]) for state in weights]
    loss = max(comparison.relative(a, b) for a, b in zip(*losses, strict=True))
    tensor = max(comparison.tensor_difference(weights[0][key], weights[1][key]) for key in floating)
    return loss, comparison.tensor_difference(*vectors), tensor


# --- strategies ---

LOW_RATE = [
    "augment=[shift,flip]", "augment.shift.pixels=2", "trainer.gradient_clip_val=0.5", "optim=sgd", "optim.lr=0.003", "schedule=cosine",
]  # fmt: skip
# No momentum and a smooth activation, because kinks amplify any rounding, including that of a different number of threads.
NORM = [
    *LOW_RATE, "model=timm", "model.name=test_resnet", "+model.act_layer=silu", "trainer.sync_batchnorm=true", "optim.momentum=0",
    "optim.nesterov=false",
]  # fmt: skip
DEFAULT, BATCH_NORM = "the default: BasicNet, AdamW 1e-3", "ResNet with batch norm, SGD 0.003"
RECIPES: dict[str, tuple[list[str], int, float]] = {  # overrides, steps, limit for the weights
    "BasicNet, SGD 0.003": (LOW_RATE, 50, 2e-6),
    DEFAULT: ([], 40, 5e-4),
    BATCH_NORM: (NORM, 50, 1e-6),
}
SEVERAL = [(strategy, *size) for strategy in ("ddp", "fsdp") for size in ((2, 1), (4, 1), (2, 2))]
SETUPS = [("single", 1, 2), ("single", 1, 4), ("dp", 1, 1), *SEVERAL]  # strategy, processes, accumulation
RESUMED = ("ddp, resumed from one process", 2, 1)
HEAD = ["recipe", "steps", "strategy", "processes", "accumulation", "loss", "weights", "worst tensor"]


def setups(recipe: str) -> list[tuple[str, int, int]]:
    if recipe == BATCH_NORM:  # accumulated micro-batches and the replicas of dp have their own batch statistics
        return [(name, world, accumulate) for name, world, accumulate in SETUPS if accumulate == 1 and name != "dp"]
    # resuming from a shorter first run needs a constant schedule: others depend on the total number of steps
    return [*SETUPS, RESUMED] if recipe == DEFAULT else SETUPS


def strategies(args: argparse.Namespace, runs_dir: Path) -> tuple[str, bool]:
    """The table, and whether all differences are within their limits."""
    rows, within_limits = [], True
    for number, (recipe, (overrides, steps, limit)) in enumerate(RECIPES.items()):
        common = ["trainer.log_every_n_steps=1", *overrides, *args.overrides]
        whole = [*common, f"trainer.max_steps={steps}", "resume=auto"]
        reference = trained(runs_dir, f"{number}", *whole, *on("single"))
        for index, (name, world, accumulate) in enumerate(setups(recipe)):
            run, strategy = f"{number}-{index}", name.partition(",")[0]
            if name == RESUMED[0]:
                trained(runs_dir, run, *common, f"trainer.max_steps={steps // 2}", *on("single"))
            options = [*on(strategy, world), f"trainer.accumulate_grad_batches={accumulate}"]
            gaps = difference(reference, trained(runs_dir, run, *whole, *options))
            within_limits &= gaps[1] <= limit
            rows.append([recipe, f"{steps}", name, f"{world}", f"{accumulate}", *(f"{value:.1e}" for value in gaps)])
            print(" | ".join(rows[-1]), file=sys.stderr)
    return table(HEAD, rows), within_limits


# --- drift ---

DRY = ["model.dropout_conv=0", "model.dropout_fc=0"]
ADAMW = ["optim=adamw", "optim.lr=1e-3"]
PAIRS: dict[str, tuple[list[str], list[str]]] = {  # BasicNet: the recipe, and what its second run adds
    "SGD 0.01, no dropout": (["optim=sgd", "optim.lr=0.01", *DRY], on("ddp", 2)),
    "AdamW 1e-5, no dropout": (["optim=adamw", "optim.lr=1e-5", *DRY], on("ddp", 2)),
    "AdamW 1e-3, no dropout": ([*ADAMW, *DRY], on("ddp", 2)),
    "AdamW 1e-3, dropout, `exact.logical_ranks=2`": ([*ADAMW, "exact.logical_ranks=2"], on("ddp", 2)),
    "AdamW 1e-3, dropout, one process, two seeds": (ADAMW, ["seed=1"]),
}


def drift(args: argparse.Namespace, runs_dir: Path) -> tuple[str, bool]:
    """Relative differences of all weights. The last row compares two seeds, for reference."""
    rows = []
    for number, (name, (recipe, extra)) in enumerate(PAIRS.items()):
        rows.append([name])
        for steps in args.steps:
            common = [f"trainer.max_steps={steps}", "trainer.log_every_n_steps=1", *recipe]
            one, two = (trained(runs_dir, f"{number}-{steps}-{len(x)}", *common, *x) for x in ([], extra))
            rows[-1].append(f"{difference(one, two)[1]:.1g}")
        print(" | ".join(rows[-1]), file=sys.stderr)
    return table(["", *(f"{steps} steps" for steps in args.steps)], rows), True


# --- bits ---

PARTS = ("state_dict", "current_model_state", "optimizer_states", "lr_schedulers")
TRAIN = str(ROOT / "train.py")
EXACT = {
    "BasicNet, the defaults": ["trainer.precision=bf16-mixed"],
    "BasicNet, float32": ["trainer.precision=32-true"],
    "ResNet-18": [
        "model=timm", "model.name=resnet18", "data.image_size=32", "augment=[standard,mixup]", "callbacks=[default,ema]",
        "trainer.gradient_clip_val=0.5", "trainer.precision=bf16-mixed",
    ],
}  # fmt: skip


def alone(strategy: str, processes: int = 1) -> list[str]:
    """Arguments of Python for a run that starts its own processes."""
    return [TRAIN, *on(strategy, processes)]


def torchrun(processes: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", TRAIN, "strategy=ddp"]


# Each is a list of stages. All but the last are killed at a fraction of the steps, and the next stage resumes.
WAYS: dict[str, list[list[str]]] = {
    "one process": [alone("single")],
    **{f"ddp, {n} processes": [alone("ddp", n)] for n in (2, 4, 8)},
    **{f"fsdp, {n} processes": [alone("fsdp", n)] for n in (2, 4)},
    "one process, killed, ddp on 4, killed, fsdp on 2": [alone("single"), alone("ddp", 4), alone("fsdp", 2)],
    "torchrun on 4, killed, on 2, killed, on 8": [torchrun(4), torchrun(2), torchrun(8)],
}


def train(stages: list[list[str]], overrides: list[str], run: Path, steps: int) -> None:
    """Raises RuntimeError if the last stage fails."""
    options = [*overrides, f"runs_dir={run.parent}", f"run={run.name}", f"trainer.max_steps={steps}", "resume=auto"]
    log = run.parent / f"{run.name}.log"
    for number, stage in enumerate(stages, start=1):
        process = start_command([sys.executable, *stage, *options], log)
        if number < len(stages):  # kill it once its log shows the step; the step's checkpoint may not exist yet
            step = steps * number // len(stages)
            wait_until(lambda: last_step(run / "metrics.csv") >= step or process.poll() is not None, math.inf, 0.2)  # noqa: B023
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.wait():
        raise RuntimeError(log.read_text()[-2000:])


def digest(run: Path) -> str:
    """A hash of the trained state, which two versions of Lockstep can compare."""
    content = torch.load(run / "checkpoints/last.ckpt", weights_only=True, map_location="cpu")
    content_hash = hashlib.blake2b(digest_size=6)
    for keys, leaf in leaves({part: content.get(part) for part in PARTS}):
        tensor = isinstance(leaf, Tensor)
        data = leaf.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor else repr(leaf).encode()
        content_hash.update(repr(keys).encode() + data)
    return content_hash.hexdigest()


def bits(args: argparse.Namespace, runs_dir: Path) -> tuple[str, bool]:
    common = [*SHORT, "exact.logical_ranks=8", "trainer.log_every_n_steps=10", "checkpoint.every_n_steps=10"]
    rows: list[list[str]] = []
    for way, stages in WAYS.items():
        rows.append([way])
        for recipe, overrides in EXACT.items():
            run = runs_dir / f"{len(rows)}-{len(rows[-1])}"
            train(stages, [*common, *overrides], run, args.steps)
            rows[-1].append(digest(run))
            print(f"{recipe}, {way}: {rows[-1][-1]}", flush=True)
    _, *columns = zip(*rows, strict=True)
    return table(["", *EXACT], rows), all(len(set(digests)) == 1 for digests in columns)


def main() -> int:
    parser = measuring.parser(__doc__)
    parts = parser.add_subparsers(dest="what", required=True, metavar="strategies|drift|bits")
    parts.add_parser("strategies").add_argument(
        "overrides", nargs="*", metavar="key=value", help="overrides for every run"
    )
    parts.add_parser("drift").add_argument("--steps", type=int, nargs="+", default=[10, 40, 160])
    parts.add_parser("bits").add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shown, good = {"strategies": strategies, "drift": drift, "bits": bits}[args.what](args, Path(folder))
    measuring.show(shown)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
