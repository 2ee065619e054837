"""Whether `exact.shards=8` ends with the same bits, whoever computes the logical ranks: a table of digests in Markdown.

python benchmarks/same_bits.py [--steps 40] [--only ResNet] [--out docs/measurements/agreement.md]

Each recipe is trained on one process, on several, and with its processes killed and another number of them resuming. The digest is
of weights, averages, optimizer and schedule of the last checkpoint. Exit code 1 if a recipe has more than one.
"""

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from sections import write_section
from torch import Tensor

from lockstep.checkpoints.finding import leaves
from lockstep.run.report import versions

TRAIN = str(Path(__file__).parents[1] / "train.py")
COMMON = [
    "exact.shards=8", "data.source=embedded", "trainer.accelerator=cpu", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1",
    "trainer.enable_progress_bar=false", "trainer.log_every_n_steps=10", "trainer.max_epochs=100", "checkpoint.every_n_steps=10",
]  # fmt: skip
BASIC = ["data.batch_size=64"]
RESNET = [
    "model=timm", "model.name=resnet18", "data.image_size=32", "data.batch_size=64", "augment=[standard,mixup]", "callbacks=[default,ema]",
    "trainer.gradient_clip_val=0.5",
]  # fmt: skip
CONVNEXT = [
    "model=timm",
    "model.name=test_convnext",
    "data.image_size=32",
    "data.batch_size=64",
    "optim.no_decay=true",
    "task.label_smoothing=0.1",
]
RECIPES = {
    "BasicNet, the defaults": [*BASIC, "trainer.precision=bf16-mixed"],
    "BasicNet, float32": [*BASIC, "trainer.precision=32-true"],
    "ResNet-18": [*RESNET, "trainer.precision=bf16-mixed"],
    "ConvNeXt": [*CONVNEXT, "trainer.precision=bf16-mixed"],
}


def on(strategy: str, processes: int = 1) -> list[str]:
    return [f"strategy={strategy}", *([f"trainer.devices={processes}"] if processes > 1 else [])]


# Each a list of stages; all but the last are killed at a share of the steps, and the next one resumes.
WAYS: dict[str, list[list[str]]] = {
    "one process": [on("single")],
    **{f"{strategy}, {n} processes": [on(strategy, n)] for strategy, n in (("ddp", 2), ("ddp", 4), ("ddp", 8), ("fsdp", 2), ("fsdp", 4))},
    "one process, killed, ddp on 4, killed, fsdp on 2": [on("single"), on("ddp", 4), on("fsdp", 2)],
    "torchrun on 4, killed, on 2, killed, on 8": [["torchrun", "4"], ["torchrun", "2"], ["torchrun", "8"]],
}  # fmt: skip
REFUSED = ["torchrun", "3"]


def command(stage: list[str], overrides: list[str]) -> list[str]:
    if stage[0] == "torchrun":
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={stage[1]}", TRAIN, "strategy=ddp"]
    else:
        launch = [TRAIN, *stage]
    return [sys.executable, *launch, *overrides]


def started(stage: list[str], overrides: list[str], log: Path) -> Any:
    with log.open("a") as file:
        return subprocess.Popen(command(stage, overrides), stdout=file, stderr=file, start_new_session=True)


def train(stages: list[list[str]], overrides: list[str], run: Path, steps: int) -> None:
    """Raises RuntimeError if a stage fails."""
    typed = [*overrides, f"runs_dir={run.parent}", f"run={run.name}", f"trainer.max_steps={steps}", "resume=auto"]
    log = run.parent / f"{run.name}.log"
    for number, stage in enumerate(stages[:-1], start=1):
        process = started(stage, typed, log)
        reached = steps * number // len(stages)
        while step_of(run) < reached and process.poll() is None:
            try:
                process.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if started(stages[-1], typed, log).wait():
        raise RuntimeError(log.read_text()[-2000:])


def step_of(run: Path) -> int:
    """Of the last row of the log; a checkpoint of its step may be still to come."""
    path = run / "metrics.csv"
    lines = path.read_text().splitlines() if path.is_file() else []
    return int(lines[-1].partition(",")[0]) if len(lines) > 1 else 0


def digest(run: Path) -> str:
    content = torch.load(run / "checkpoints/last.ckpt", weights_only=True, map_location="cpu")
    parts = ("state_dict", "current_model_state", "optimizer_states", "lr_schedulers")
    found = hashlib.blake2b(digest_size=6)
    for keys, leaf in leaves({part: content.get(part) for part in parts}):
        bits = (
            leaf.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            if isinstance(leaf, Tensor)
            else repr(leaf).encode()
        )
        found.update(repr(keys).encode() + bits)
    return found.hexdigest()


def table(found: dict[str, dict[str, str]]) -> Iterator[str]:
    yield "| | " + " | ".join(found) + " |"
    yield "| --- |" + " --- |" * len(found)
    for way in WAYS:
        yield f"| {way} | " + " | ".join(f"`{column[way]}`" for column in found.values()) + " |"


def page(found: dict[str, dict[str, str]], steps: int) -> str:
    kept = "python benchmarks/same_bits.py --out docs/measurements/agreement.md"
    lines = [
        "# The same bits on any number of processes",
        "",
        f"`{kept}`: `exact.shards=8`, {steps} steps, AdamW at 1e-3. Digests of weights, averages, optimizer and schedule of the last",
        "checkpoint. BasicNet has dropout; ResNet-18 (timm) has batch norm, clipping, an average of the weights, mixup and augmentation;",
        "ConvNeXt (timm's test_convnext) has layer scales, label smoothing, and no decay of vectors. Precision is bf16-mixed where not said.",
        f"{os.cpu_count()} CPU threads, {versions()}.",
        "",
        *table(found),
        "",
        "Three processes are refused: " + refusal(),
    ]
    return "\n".join(lines) + "\n"


def refusal() -> str:
    """What torchrun with three processes is told."""
    with tempfile.TemporaryDirectory() as folder:
        typed = [*COMMON, *BASIC, f"runs_dir={folder}", "run=three"]
        result = subprocess.run(command(REFUSED, typed), capture_output=True, text=True)
    return next(line for line in result.stderr.splitlines() if line.startswith("error: exact.shards"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", default="", help="recipes whose name has this in it")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for i, (recipe, overrides) in enumerate((r, o) for r, o in RECIPES.items() if args.only in r):
            found[recipe] = {}
            for j, (way, stages) in enumerate(WAYS.items()):
                run = Path(folder) / f"{i}-{j}"
                train(stages, [*COMMON, *overrides], run, args.steps)
                found[recipe][way] = digest(run)
                print(f"{recipe}, {way}: {found[recipe][way]}", flush=True)
    text = page(found, args.steps)
    print(text)
    if args.out:
        write_section(args.out, text)
    return int(any(len(set(column.values())) > 1 for column in found.values()))


if __name__ == "__main__":
    sys.exit(main())
