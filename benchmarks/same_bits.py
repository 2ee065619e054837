"""Whether `exact.logical_ranks=8` gives the same bits, whichever processes compute the logical ranks: a table of digests in Markdown.

python benchmarks/same_bits.py [--steps 40] [--only ResNet]

Each recipe is trained on one process, on several, and with its processes killed and a different number of them resuming. The digest
is of weights, averages, optimizer and schedule of the last checkpoint. Exit code 1 if a recipe has more than one.
"""

import hashlib
import math
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from measuring import ArgumentParser, last_step, made_by, start_command, table, wait_until
from torch import Tensor

from lockstep import ROOT
from lockstep.checkpoints.finding import leaves

PARTS = ("state_dict", "current_model_state", "optimizer_states", "lr_schedulers")
TRAIN = str(ROOT / "train.py")
COMMON = [
    "exact.logical_ranks=8", "data.source=embedded", "trainer.accelerator=cpu", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1",
    "trainer.enable_progress_bar=false", "trainer.log_every_n_steps=10", "trainer.max_epochs=100", "checkpoint.every_n_steps=10",
]  # fmt: skip
BASIC = ["data.batch_size=64"]
RESNET = [
    "model=timm", "model.name=resnet18", "data.image_size=32", "data.batch_size=64", "augment=[standard,mixup]", "callbacks=[default,ema]",
    "trainer.gradient_clip_val=0.5",
]  # fmt: skip
CONVNEXT = [
    "model=timm", "model.name=test_convnext", "data.image_size=32", "data.batch_size=64", "optim.no_decay=true", "task.label_smoothing=0.1",
]  # fmt: skip
RECIPES = {
    "BasicNet, the defaults": [*BASIC, "trainer.precision=bf16-mixed"],
    "BasicNet, float32": [*BASIC, "trainer.precision=32-true"],
    "ResNet-18": [*RESNET, "trainer.precision=bf16-mixed"],
    "ConvNeXt": [*CONVNEXT, "trainer.precision=bf16-mixed"],
}


def on(strategy: str, processes: int = 1) -> list[str]:
    return [f"strategy={strategy}", *([f"trainer.devices={processes}"] if processes > 1 else [])]


# Each a list of stages; all but the last are killed at a fraction of the steps, and the next one resumes.
WAYS: dict[str, list[list[str]]] = {
    "one process": [on("single")],
    **{f"{strategy}, {n} processes": [on(strategy, n)] for strategy, n in (("ddp", 2), ("ddp", 4), ("ddp", 8), ("fsdp", 2), ("fsdp", 4))},
    "one process, killed, ddp on 4, killed, fsdp on 2": [on("single"), on("ddp", 4), on("fsdp", 2)],
    "torchrun on 4, killed, on 2, killed, on 8": [["torchrun", "4"], ["torchrun", "2"], ["torchrun", "8"]],
}  # fmt: skip


def command(stage: list[str], overrides: list[str]) -> list[str]:
    if stage[0] == "torchrun":
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={stage[1]}", TRAIN, "strategy=ddp"]
    else:
        launch = [TRAIN, *stage]
    return [sys.executable, *launch, *overrides]


def kill_at(process: "subprocess.Popen[bytes]", metrics: Path, step: int) -> None:
    """Kills the processes of a command once their log shows a step; a checkpoint of that step may be still to come."""
    wait_until(lambda: last_step(metrics) >= step or process.poll() is not None, math.inf, 0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def train(stages: list[list[str]], overrides: list[str], run: Path, steps: int) -> None:
    """Raises RuntimeError if the last stage fails."""
    given = [*overrides, f"runs_dir={run.parent}", f"run={run.name}", f"trainer.max_steps={steps}", "resume=auto"]
    log = run.parent / f"{run.name}.log"
    for number, stage in enumerate(stages, start=1):
        process = start_command(command(stage, given), log)
        if number < len(stages):
            kill_at(process, run / "metrics.csv", steps * number // len(stages))
    if process.wait():
        raise RuntimeError(log.read_text()[-2000:])


def digest(run: Path) -> str:
    """What two versions of Lockstep are compared by."""
    content = torch.load(run / "checkpoints/last.ckpt", weights_only=True, map_location="cpu")
    found = hashlib.blake2b(digest_size=6)
    for keys, leaf in leaves({part: content.get(part) for part in PARTS}):
        tensor = isinstance(leaf, Tensor)
        bits = leaf.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor else repr(leaf).encode()
        found.update(repr(keys).encode() + bits)
    return found.hexdigest()


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", default="", help="recipes whose name has this in it")
    args = parser.parse_args()
    recipes = {name: overrides for name, overrides in RECIPES.items() if args.only in name}
    cells: dict[str, list[str]] = {way: [] for way in WAYS}  # by recipe
    with tempfile.TemporaryDirectory() as folder:
        for i, (recipe, overrides) in enumerate(recipes.items()):
            for j, (way, stages) in enumerate(WAYS.items()):
                run = Path(folder) / f"{i}-{j}"
                train(stages, [*COMMON, *overrides], run, args.steps)
                cells[way].append(digest(run))
                print(f"{recipe}, {way}: {cells[way][-1]}", flush=True)
    print(made_by())
    print(table(["", *recipes], [[way, *row] for way, row in cells.items()]))
    return int(any(len(set(column)) > 1 for column in zip(*cells.values(), strict=True)))


if __name__ == "__main__":
    sys.exit(main())
