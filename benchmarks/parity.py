"""How far results differ between strategies, numbers of processes and accumulation: a table in Markdown.

python benchmarks/parity.py [key=value ...]
python benchmarks/parity.py --drift 10 40 160     # how far two processes drift from one, by the number of steps

Recipes are trained for some steps in fp32 with clipping and augmentation: BasicNet with its dropout at a low learning rate, the
default recipe (AdamW at 1e-3, dropout), and a ResNet of timm whose batch norm is synchronised. Each is compared with one process
(`strategy=single`); dp is one device where there are no GPUs. Differences are relative: of a loss, the difference over the value; of
weights, the norm of the difference over the norm, of all of them together and of the tensor that differs most. 1e-7 is the rounding of
one number in fp32. Exit code 1 if one differs by more than its limit.
"""

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measuring
from measuring import ArgumentParser, made_by

from lockstep.extras import comparison
from lockstep.reporting.runs_page import Report

COMMON = [
    "trainer.precision=32-true", "data.source=embedded", "data.batch_size=64", "trainer.accelerator=cpu", "trainer.log_every_n_steps=1",
    "trainer.limit_val_batches=1", "trainer.limit_test_batches=1", "trainer.enable_progress_bar=false", "trainer.max_epochs=10",
]  # fmt: skip
LOW_RATE = [
    "augment=[shift,flip]", "augment.shift.pixels=2", "trainer.gradient_clip_val=0.5", "optim=sgd", "optim.lr=0.003", "schedule=cosine",
]  # fmt: skip
# Without momentum and with a smooth activation: kinks multiply any rounding, also that of a different number of threads.
RESNET = [
    *LOW_RATE, "model=timm", "model.name=test_resnet", "+model.act_layer=silu", "trainer.sync_batchnorm=true", "optim.momentum=0",
    "optim.nesterov=false",
]  # fmt: skip


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
    Recipe("ResNet with batch norm, SGD 0.003", RESNET, steps=50, limit=1e-6, batch_norm=True),
]


@dataclass(frozen=True)
class Setup:
    strategy: str
    world: int = 1
    accumulate: int = 1
    resumed: bool = False  # from half of the steps on one process

    @property
    def overrides(self) -> list[str]:
        devices = [f"trainer.devices={self.world}"] if self.world > 1 else []
        return [f"strategy={self.strategy}", *devices, f"trainer.accumulate_grad_batches={self.accumulate}"]


REFERENCE = Setup("single")
SETUPS = [
    Setup("single", accumulate=2), Setup("single", accumulate=4), Setup("dp"), Setup("ddp", 2), Setup("ddp", 4), Setup("ddp", 2, 2),
    Setup("fsdp", 2), Setup("fsdp", 4), Setup("fsdp", 2, 2), Setup("ddp", 2, resumed=True),
]  # fmt: skip


def setups(recipe: Recipe) -> list[Setup]:
    """Accumulated micro-batches have their own batch statistics, and so do the replicas of dp. The first part of a resumed run ends
    earlier, so a schedule over all steps would differ."""
    found = [s for s in SETUPS if not recipe.batch_norm or (s.accumulate == 1 and s.strategy != "dp")]
    return [s for s in found if not s.resumed or "schedule=cosine" not in recipe.overrides]


@dataclass(frozen=True)
class Difference:
    """Relative ones."""

    loss: float  # the greatest of any step
    weights: float  # of all weights and buffers as one vector
    tensor: float  # the greatest of any; small ones, such as biases that began at zero, differ most


def trained(runs_dir: Path, name: str, *overrides: str) -> Report:
    measuring.train([f"run={name}", f"runs_dir={runs_dir}", *COMMON, *overrides])
    return comparison.find(name, runs_dir)


def difference(reference: Report, other: Report) -> Difference:
    import torch

    from lockstep.checkpoints.weights import read

    losses = [run.curves["train/loss"].values for run in (reference, other)]
    weights: list[dict[str, Any]] = [read(r.folder / "checkpoints" / "last.ckpt").weights for r in (reference, other)]
    if len(losses[0]) != len(losses[1]) or weights[0].keys() != weights[1].keys():
        raise RuntimeError(f"{other.folder} did not do the steps of {reference.folder}")
    floating = [key for key, value in weights[0].items() if value.is_floating_point()]
    vectors = [torch.cat([each[key].double().flatten() for key in floating]) for each in weights]
    return Difference(
        loss=max(comparison.relative(a, b) for a, b in zip(*losses, strict=True)),
        weights=comparison.tensor_difference(*vectors),
        tensor=max(comparison.tensor_difference(weights[0][key], weights[1][key]) for key in floating),
    )


def measure(runs_dir: Path, more: list[str]) -> Iterator[tuple[Recipe, Setup, Difference]]:
    for number, recipe in enumerate(RECIPES):
        common = [*recipe.overrides, *more]
        steps = f"trainer.max_steps={recipe.steps}"
        reference = trained(runs_dir, f"{number}", *common, steps, *REFERENCE.overrides)
        for place, setup in enumerate(setups(recipe)):
            name, resume = f"{number}-{place}", ["resume=auto"] if setup.resumed else []
            if setup.resumed:
                trained(runs_dir, name, *common, f"trainer.max_steps={recipe.steps // 2}", *REFERENCE.overrides)
            other = trained(runs_dir, name, *common, steps, *setup.overrides, *resume)
            yield recipe, setup, difference(reference, other)


HEAD = ["recipe", "steps", "strategy", "processes", "accumulation", "loss, greatest of all steps", "weights", "weights, greatest of all tensors"]  # fmt: skip


def row(recipe: Recipe, setup: Setup, apart: Difference) -> list[str]:
    strategy = f"{setup.strategy}{', resumed from one process' * setup.resumed}"
    sizes = (f"{value:.1e}" for value in vars(apart).values())
    return [recipe.name, f"{recipe.steps}", strategy, f"{setup.world}", f"{setup.accumulate}", *sizes]


DRY = ["model.dropout_conv=0", "model.dropout_fc=0"]
TWO = ["strategy=ddp", "trainer.devices=2"]
ADAMW = ["optim=adamw", "optim.lr=1e-3"]
PAIRS: dict[str, tuple[list[str], list[str]]] = {  # BasicNet: the recipe, and what its second run adds
    "SGD 0.01, no dropout": (["optim=sgd", "optim.lr=0.01", *DRY], TWO),
    "AdamW 1e-5, no dropout": (["optim=adamw", "optim.lr=1e-5", *DRY], TWO),
    "AdamW 1e-3, no dropout": ([*ADAMW, *DRY], TWO),
    "AdamW 1e-3, dropout, `exact.logical_ranks=2`": ([*ADAMW, "exact.logical_ranks=2"], TWO),
    "AdamW 1e-3, dropout, one process, two seeds": (ADAMW, ["seed=1"]),
}


def drift(all_steps: list[int], runs_dir: Path) -> list[list[str]]:
    """Relative differences of all weights. The last row has two seeds, for comparison."""
    rows = []
    for number, (name, (recipe, more)) in enumerate(PAIRS.items()):
        rows.append([name])
        for steps in all_steps:
            common = [f"trainer.max_steps={steps}", "trainer.max_epochs=100", *recipe]
            one = trained(runs_dir, f"drift-{number}-{steps}-one", *common)
            two = trained(runs_dir, f"drift-{number}-{steps}-two", *common, *more)
            rows[-1].append(f"{difference(one, two).weights:.1g}")
        print(" | ".join(rows[-1]), file=sys.stderr)
    return rows


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--drift", type=int, nargs="+", metavar="STEPS", help="measure the drift after so many steps")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of every run")
    args = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        if args.drift:
            head, rows = ["", *(f"{steps} steps" for steps in args.drift)], drift(args.drift, Path(folder))
        else:
            for each in measure(Path(folder), args.overrides):
                found.append(each)
                print(" | ".join(row(*each)), file=sys.stderr)
            head, rows = HEAD, [row(*each) for each in found]
    print(made_by())
    print(measuring.table(head, rows))
    return int(any(apart.weights > recipe.limit for recipe, _, apart in found))


if __name__ == "__main__":
    sys.exit(main())
