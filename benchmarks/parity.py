"""How far the same command differs under other strategies, numbers of processes and accumulation: a table in Markdown.

python benchmarks/parity.py [--steps 50] [--out docs/parity.md]

Two networks are trained for some steps in fp32 with dropout off, with clipping and augmentation on: BasicNet, and a ResNet of
timm whose batch norm is synchronised. Each is compared with one process. Exit code 1 if anything differs by more than 1e-6.
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

from lockstep.reporting import comparison

LIMIT = 1e-6
COMMON = [
    "trainer.precision=32-true", "data.source=embedded", "data.batch_size=64", "augment=[shift,flip]", "augment.shift.pixels=2", "trainer.accelerator=cpu",
    "trainer.log_every_n_steps=1", "trainer.gradient_clip_val=0.5", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1",
    "trainer.enable_progress_bar=false", "optim=sgd", "optim.lr=0.003", "schedule=cosine", "trainer.max_epochs=10",
]  # fmt: skip
NETWORKS = {
    "BasicNet": ["model.dropout_conv=0", "model.dropout_fc=0"],
    # Without momentum and with a smooth activation: its kinks multiply any rounding, that of another number of threads too.
    "ResNet with batch norm": [
        "model=timm",
        "model.name=test_resnet",
        "+model.act_layer=silu",
        "trainer.sync_batchnorm=true",
        "optim.momentum=0",
        "optim.nesterov=false",
    ],
}
ACCUMULATED = "trainer.accumulate_grad_batches"


@dataclass(frozen=True)
class Setup:
    strategy: str
    world: int = 1
    accumulate: int = 1

    @property
    def overrides(self) -> list[str]:
        devices = [f"trainer.devices={self.world}"] if self.world > 1 else []
        return [f"strategy={self.strategy}", *devices, f"{ACCUMULATED}={self.accumulate}"]


REFERENCE = Setup("single")
SETUPS = [
    Setup("single", accumulate=2), Setup("single", accumulate=4), Setup("dp"), Setup("ddp", 2), Setup("ddp", 4), Setup("ddp", 2, 2),
    Setup("fsdp", 2), Setup("fsdp", 4), Setup("fsdp", 2, 2),
]  # fmt: skip


@dataclass(frozen=True)
class Row:
    network: str
    setup: Setup
    loss: float  # greatest relative difference of any step's loss
    weights: float  # relative difference of all weights and buffers as one vector
    tensor: (
        float  # greatest relative difference of any tensor; small ones, such as biases that began at zero, differ most
    )


def setups(network: str) -> list[Setup]:
    """Micro-batches that are accumulated have batch statistics of their own, and the replicas of dp too."""
    return [s for s in SETUPS if network == "BasicNet" or (s.accumulate == 1 and s.strategy != "dp")]


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

    from lockstep.checkpoints.content import network_of, read

    losses = [[float(row["train/loss"]) for row in run.rows if row["train/loss"]] for run in (reference, other)]
    weights: list[dict[str, Any]] = [
        network_of(read(r.folder / "checkpoints" / "last.ckpt")) for r in (reference, other)
    ]
    if len(losses[0]) != len(losses[1]) or weights[0].keys() != weights[1].keys():
        raise RuntimeError(f"{other.folder} did not do the steps of {reference.folder}")
    floating = [key for key, value in weights[0].items() if value.is_floating_point()]
    vectors = [torch.cat([each[key].double().flatten() for key in floating]) for each in weights]
    apart = max(comparison.tensor_difference(weights[0][key], weights[1][key]) for key in floating)
    loss = max(comparison.relative(a, b) for a, b in zip(*losses, strict=True))
    return loss, comparison.tensor_difference(vectors[0], vectors[1]), apart


def measure(runs_dir: Path, steps: int, more: list[str] | None = None) -> Iterator[Row]:
    for network, options in NETWORKS.items():
        common = [f"runs_dir={runs_dir}", f"trainer.max_steps={steps}", *COMMON, *options, *(more or [])]
        place = network.split()[0].lower()
        train(place, [*common, *REFERENCE.overrides])
        reference = comparison.find(place, runs_dir)
        for setup in setups(network):
            name = f"{place}-{setup.strategy}-{setup.world}-{setup.accumulate}"
            train(name, [*common, *setup.overrides])
            yield Row(network, setup, *difference(reference, comparison.find(name, runs_dir)))


def table(rows: list[Row], steps: int) -> str:
    lines = [
        f"| network | strategy | processes | accumulation | loss, greatest of {steps} steps | weights | weights, greatest of all tensors |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in rows:
        lines.append(
            f"| {r.network} | {r.setup.strategy} | {r.setup.world} | {r.setup.accumulate} | {r.loss:.1e} | {r.weights:.1e} | {r.tensor:.1e} |"
        )
    return "\n".join(lines)


def good(rows: list[Row]) -> bool:
    return all(max(row.loss, row.weights) <= LIMIT for row in rows)


HEADER = """# The same result

Relative differences from one process (`strategy=single`) after {steps} steps in fp32: of a loss, the difference over the value;
of weights, the norm of the difference over the norm, of all of them together and of the tensor that differs most. Dropout is off;
clipping, a schedule and augmentation are on. 1e-7 is the rounding of one number in fp32. The learning rates are low, for at higher
ones ReLU multiplies any rounding: the same network with one thread instead of two then differs as much (NOTEBOOK.md).

dp is one device here: there are no GPUs to split batches over. Made by `python benchmarks/parity.py --out docs/parity.md` with {versions}, on a CPU with gloo.

"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=Path, help="write the page there as well")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in measure(Path(folder), args.steps):
            rows.append(row)
            print(
                f"{row.network}, {row.setup}: loss {row.loss:.1e}, weights {row.weights:.1e}, tensor {row.tensor:.1e}",
                file=sys.stderr,
            )
    print(table(rows, args.steps))
    if args.out:
        from lockstep.reporting.provenance import versions

        args.out.write_text(HEADER.format(steps=args.steps, versions=versions()) + table(rows, args.steps) + "\n")
    return 0 if good(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
