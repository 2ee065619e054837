"""How far two processes drift from one without `exact.shards`: relative differences of the weights, as a table in Markdown.

python benchmarks/drift.py [--steps 10 40 160]

Each recipe is BasicNet in fp32 without another change. The last row has two seeds, for comparison.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import parity

from lockstep.extras import comparison

COMMON = [
    "trainer.precision=32-true", "data.source=embedded", "data.batch_size=64", "trainer.accelerator=cpu", "trainer.log_every_n_steps=1",
    "trainer.limit_val_batches=1", "trainer.limit_test_batches=1", "trainer.enable_progress_bar=false", "trainer.max_epochs=100",
]  # fmt: skip
DRY = ["model.dropout_conv=0", "model.dropout_fc=0"]
TWO = ["strategy=ddp", "trainer.devices=2"]
ADAMW, SLOW_ADAMW, SGD = (
    ["optim=adamw", "optim.lr=1e-3"],
    ["optim=adamw", "optim.lr=1e-5"],
    ["optim=sgd", "optim.lr=0.01"],
)
PAIRS: dict[str, tuple[list[str], list[str]]] = {  # the recipe, and what its second run adds
    "SGD 0.01, no dropout": ([*SGD, *DRY], TWO),
    "AdamW 1e-5, no dropout": ([*SLOW_ADAMW, *DRY], TWO),
    "AdamW 1e-3, no dropout": ([*ADAMW, *DRY], TWO),
    "AdamW 1e-3, dropout, `exact.shards=2`": ([*ADAMW, "exact.shards=2"], TWO),
    "AdamW 1e-3, dropout, one process, two seeds": (ADAMW, ["seed=1"]),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[10, 40, 160])
    args = parser.parse_args()
    lines = [f"| | {' | '.join(f'{steps} steps' for steps in args.steps)} |", "| --- |" + " --- |" * len(args.steps)]
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, (recipe, more)) in enumerate(PAIRS.items()):
            cells = []
            for steps in args.steps:
                common = [f"runs_dir={folder}", f"trainer.max_steps={steps}", *COMMON, *recipe]
                names = [f"{number}-{steps}-{which}" for which in ("one", "other")]
                parity.train(names[0], common)
                parity.train(names[1], [*common, *more])
                one, other = (comparison.find(each, Path(folder)) for each in names)
                cells.append(f"{parity.difference(one, other)[1]:.1g}")
                print(f"{name}, {steps} steps: {cells[-1]}", file=sys.stderr, flush=True)
            lines.append(f"| {name} | {' | '.join(cells)} |")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
