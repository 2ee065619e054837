"""How far the same command differs under other strategies, numbers of processes and accumulation: a table in Markdown.

python benchmarks/parity.py [--out docs/measurements/agreement.md]
python benchmarks/parity.py --drift 10 40 160     # how far two processes drift from one, by the number of steps

Recipes are trained for some steps in fp32 with clipping and augmentation: BasicNet with its dropout at a low learning rate, the
default recipe (AdamW at 1e-3, dropout), and a ResNet of timm whose batch norm is synchronised. Each is compared with one process.
Exit code 1 if one differs by more than its limit.
"""

import argparse
import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sections import write_section

from lockstep.extras import comparison

COMMON = [
    "trainer.precision=32-true", "data.source=embedded", "data.batch_size=64", "trainer.accelerator=cpu", "trainer.log_every_n_steps=1",
    "trainer.limit_val_batches=1", "trainer.limit_test_batches=1", "trainer.enable_progress_bar=false", "trainer.max_epochs=10",
]  # fmt: skip
LOW_RATE = [
    "augment=[shift,flip]", "augment.shift.pixels=2", "trainer.gradient_clip_val=0.5", "optim=sgd", "optim.lr=0.003", "schedule=cosine",
]  # fmt: skip
ACCUMULATED = "trainer.accumulate_grad_batches"


@dataclass(frozen=True)
class Recipe:
    name: str
    overrides: list[str]
    steps: int
    limit: float  # of the weights
    batch_norm: bool = False


RECIPES = [
    Recipe("BasicNet, SGD 0.003", LOW_RATE, steps=50, limit=2e-6),
    Recipe("the default: BasicNet, AdamW 1e-3", [], steps=40, limit=5e-4),
    # Without momentum and with a smooth activation: its kinks multiply any rounding, that of another number of threads too.
    Recipe(
        "ResNet with batch norm, SGD 0.003",
        [*LOW_RATE, "model=timm", "model.name=test_resnet", "+model.act_layer=silu", "trainer.sync_batchnorm=true", "optim.momentum=0", "optim.nesterov=false"],
        steps=50,
        limit=1e-6,
        batch_norm=True,
    ),
]  # fmt: skip


@dataclass(frozen=True)
class Setup:
    strategy: str
    world: int = 1
    accumulate: int = 1
    resumed: bool = False  # from half of the steps on one process

    @property
    def overrides(self) -> list[str]:
        devices = [f"trainer.devices={self.world}"] if self.world > 1 else []
        return [f"strategy={self.strategy}", *devices, f"{ACCUMULATED}={self.accumulate}"]


REFERENCE = Setup("single")
SETUPS = [
    Setup("single", accumulate=2), Setup("single", accumulate=4), Setup("dp"), Setup("ddp", 2), Setup("ddp", 4), Setup("ddp", 2, 2),
    Setup("fsdp", 2), Setup("fsdp", 4), Setup("fsdp", 2, 2), Setup("ddp", 2, resumed=True),
]  # fmt: skip


@dataclass(frozen=True)
class Row:
    recipe: Recipe
    setup: Setup
    loss: float  # greatest relative difference of any step's loss
    weights: float  # relative difference of all weights and buffers as one vector
    tensor: (
        float  # greatest relative difference of any tensor; small ones, such as biases that began at zero, differ most
    )


def setups(recipe: Recipe) -> list[Setup]:
    """Micro-batches that are accumulated have batch statistics of their own, and the replicas of dp too. The first part of a run that
    is resumed ends earlier, so a schedule over all steps would be another."""
    found = [s for s in SETUPS if not recipe.batch_norm or (s.accumulate == 1 and s.strategy != "dp")]
    return [s for s in found if not s.resumed or "schedule=cosine" not in recipe.overrides]


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Standard output of this process and of those that it starts goes nowhere."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def train(name: str, overrides: list[str]) -> None:
    import lockstep

    with silenced():
        lockstep.train([f"run={name}", *overrides])


def difference(reference: comparison.Run, other: comparison.Run) -> tuple[float, float, float]:
    import torch

    from lockstep.checkpoints.weights import read

    losses = [[row["train/loss"] for row in run.rows if "train/loss" in row] for run in (reference, other)]
    weights: list[dict[str, Any]] = [read(r.folder / "checkpoints" / "last.ckpt").weights for r in (reference, other)]
    if len(losses[0]) != len(losses[1]) or weights[0].keys() != weights[1].keys():
        raise RuntimeError(f"{other.folder} did not do the steps of {reference.folder}")
    floating = [key for key, value in weights[0].items() if value.is_floating_point()]
    vectors = [torch.cat([each[key].double().flatten() for key in floating]) for each in weights]
    apart = max(comparison.tensor_difference(weights[0][key], weights[1][key]) for key in floating)
    loss = max(comparison.relative(a, b) for a, b in zip(*losses, strict=True))
    return loss, comparison.tensor_difference(vectors[0], vectors[1]), apart


def measure(runs_dir: Path, more: list[str]) -> Iterator[Row]:
    for number, recipe in enumerate(RECIPES):
        common = [f"runs_dir={runs_dir}", *COMMON, *recipe.overrides, *more]
        steps = f"trainer.max_steps={recipe.steps}"
        train(f"{number}", [*common, steps, *REFERENCE.overrides])
        reference = comparison.find(f"{number}", runs_dir)
        for setup in setups(recipe):
            name = f"{number}-{setup.strategy}-{setup.world}-{setup.accumulate}-{setup.resumed}"
            if setup.resumed:
                train(name, [*common, f"trainer.max_steps={recipe.steps // 2}", *REFERENCE.overrides])
                train(name, [*common, steps, *setup.overrides, "resume=auto"])
            else:
                train(name, [*common, steps, *setup.overrides])
            yield Row(recipe, setup, *difference(reference, comparison.find(name, runs_dir)))


def table(rows: list[Row]) -> str:
    lines = [
        "| recipe | steps | strategy | processes | accumulation | loss, greatest of all steps | weights | weights, greatest of all tensors |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in rows:
        strategy = f"{r.setup.strategy}{', resumed from one process' * r.setup.resumed}"
        lines.append(
            f"| {r.recipe.name} | {r.recipe.steps} | {strategy} | {r.setup.world} | {r.setup.accumulate} | {r.loss:.1e} | {r.weights:.1e} | {r.tensor:.1e} |"
        )
    return "\n".join(lines)


def good(rows: list[Row]) -> bool:
    return all(row.weights <= row.recipe.limit for row in rows)


HEADER = """# The same result

Relative differences from one process (`strategy=single`) in fp32, after a number of optimizer steps: of a loss, the difference over the
value; of weights, the norm of the difference over the norm, of all of them together and of the tensor that differs most. Dropout is
on. 1e-7 is the rounding of one number in fp32. Training amplifies rounding: ReLU turns it into jumps, and Adam takes full-size steps even
for gradients that are only rounding. The same network with one thread instead of two differs as much (NOTEBOOK.md).

Without masks that belong to samples, the default recipe's weights were 0.65 apart after 40 steps.

dp is one device here: there are no GPUs to split batches over. Made by `python benchmarks/parity.py --out docs/measurements/agreement.md` with {versions}, on a CPU with gloo.

"""


DRY = ["model.dropout_conv=0", "model.dropout_fc=0"]
TWO = ["strategy=ddp", "trainer.devices=2"]
ADAMW = ["optim=adamw", "optim.lr=1e-3"]
PAIRS: dict[str, tuple[list[str], list[str]]] = {  # BasicNet: the recipe, and what its second run adds
    "SGD 0.01, no dropout": (["optim=sgd", "optim.lr=0.01", *DRY], TWO),
    "AdamW 1e-5, no dropout": (["optim=adamw", "optim.lr=1e-5", *DRY], TWO),
    "AdamW 1e-3, no dropout": ([*ADAMW, *DRY], TWO),
    "AdamW 1e-3, dropout, `exact.shards=2`": ([*ADAMW, "exact.shards=2"], TWO),
    "AdamW 1e-3, dropout, one process, two seeds": (ADAMW, ["seed=1"]),
}


def drift(all_steps: list[int], runs_dir: Path) -> str:
    """Relative differences of all weights. The last row has two seeds, for comparison."""
    lines = [f"| | {' | '.join(f'{n} steps' for n in all_steps)} |", "| --- |" + " --- |" * len(all_steps)]
    for number, (name, (recipe, more)) in enumerate(PAIRS.items()):
        cells = []
        for steps in all_steps:
            common = [f"runs_dir={runs_dir}", *COMMON, f"trainer.max_steps={steps}", "trainer.max_epochs=100", *recipe]
            names = [f"drift-{number}-{steps}-{which}" for which in ("one", "two")]
            train(names[0], common)
            train(names[1], [*common, *more])
            cells.append(f"{difference(*(comparison.find(each, runs_dir) for each in names))[1]:.1g}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], file=sys.stderr)
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the page there as well")
    parser.add_argument("--drift", type=int, nargs="+", metavar="STEPS", help="measure the drift after so many steps")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of every run")
    args = parser.parse_args()
    if args.drift:
        with tempfile.TemporaryDirectory() as folder:
            print(drift(args.drift, Path(folder)))
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in measure(Path(folder), args.overrides):
            rows.append(row)
            print(table([row]).splitlines()[-1], file=sys.stderr)
    print(table(rows))
    if args.out:
        from lockstep.run.report import versions

        write_section(args.out, HEADER.format(versions=versions()) + table(rows) + "\n")
    return 0 if good(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
