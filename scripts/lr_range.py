"""Find a learning rate: train with a rising rate, and plot the loss over the rate.

python scripts/lr_range.py [key=value ...] [--low 1e-6] [--high 1.0] [--steps 100]

Takes the keys of train.py, so every strategy works; the script sets the schedule and the number of steps. It writes a run with the
curve, lr_range.html. It prints two rates: the one at which the smoothed loss falls fastest, a good optim.lr (Smith, "Cyclical learning
rates", 2017), and the one at which the loss is smallest, which is too high. With several parameter groups, all rates rise by the same
factor.
"""

import argparse
import math
import sys

from lockstep import train
from lockstep.errors import UserError
from lockstep.extras.render import chart, render
from lockstep.launch.exits import exit_code
from lockstep.machine.files import write_text
from lockstep.machine.world import rank_of
from lockstep.run import RunFolder

SMOOTHING = 0.9  # decay of the moving average of the loss
EDGE = 0.1  # fraction of the steps at each end that is never suggested: the first averages have few losses
DIVERGED = 4.0  # the curve ends where the loss is this many times the smallest
ITS_OWN = ("schedule", "optim.lr", "trainer.max_epochs", "trainer.max_steps")  # keys that the test sets
OVERRIDES = [
    "trainer.max_epochs=-1", "trainer.log_every_n_steps=1", "trainer.limit_val_batches=0", "trainer.limit_test_batches=0",
    "trainer.enable_checkpointing=false", "callbacks=[]", "logger=csv", "schedule=exponential", "schedule.final_fraction=1.0",
]  # fmt: skip


def rates(low: float, high: float, steps: int) -> list[float]:
    """The learning rate of each step, as the exponential schedule computes it."""
    return [high * (low / high) ** (1 - step / steps) for step in range(steps)]


def smoothed(losses: list[float]) -> list[float]:
    """A moving average, corrected for its start at zero; cut off where the loss diverges."""
    average, found = 0.0, list[float]()
    for number, loss in enumerate(losses, 1):
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        found.append(average / (1 - SMOOTHING**number))
        if not math.isfinite(found[-1]) or found[-1] > DIVERGED * min(found):
            return found[:-1]
    return found


def suggestion(rate: list[float], loss: list[float]) -> tuple[float, float]:
    """The rates of the steepest fall and of the smallest value of a smoothed loss."""
    skipped = max(1, round(EDGE * len(loss)))
    inside = range(skipped, len(loss) - 1)
    if not inside:
        raise UserError("the loss diverged at once. Pass a smaller --low, or more --steps.")
    steepest = min(inside, key=lambda i: (loss[i + 1] - loss[i - 1]) / math.log(rate[i + 1] / rate[i - 1]))
    return rate[steepest], rate[min(inside, key=lambda i: loss[i])]


def sets_itself(override: str) -> bool:
    key = override.lstrip("+~").partition("=")[0]
    return key in ITS_OWN or key.startswith("schedule.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--low", type=float, default=1e-6, help="learning rate of the first step")
    parser.add_argument("--high", type=float, default=1.0, help="learning rate of the last step")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_intermixed_args()
    if not (0 < args.low < args.high and args.steps >= 10):
        raise UserError("--low must be above 0 and below --high, and --steps at least 10.")
    length = [f"trainer.max_steps={args.steps}", f"optim.lr={args.high}"]
    dropped = [override for override in args.overrides if sets_itself(override)]
    if dropped:
        print(f"without {' '.join(dropped)}, which the test sets itself")
    given = [override for override in args.overrides if override not in dropped]
    report = train([*OVERRIDES, *length, f"schedule.initial_fraction={args.low / args.high}", *given])
    if rank_of() != 0:
        return
    folder = report.folder
    loss = smoothed([row["train/loss"] for row in RunFolder(folder).metrics() if "train/loss" in row])
    rate = rates(args.low, args.high, args.steps)[: len(loss)]
    steepest, smallest = suggestion(rate, loss)
    points = [(math.log10(x), y) for x, y in zip(rate, loss, strict=True)]
    mark = "suggested", math.log10(steepest)
    svg = chart("Loss by learning rate", "log10 of optim.lr", {"loss": points}, mark=mark)
    note = f"the loss falls fastest there; it is smallest at {smallest:.2g}, which is too high"
    values = {
        "name": "optim.lr",
        "value": f"{steepest:.2g}",
        "note": note,
        "heading": "Smoothed loss over learning rate",
    }
    write_text(folder / "lr_range.html", render("chart.html.j2", folder.name, {**values, "svg": svg}))
    print(f"optim.lr={steepest:.2g} ({note})\ncurve: {folder / 'lr_range.html'}")


if __name__ == "__main__":
    sys.exit(exit_code(main))
