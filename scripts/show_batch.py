"""Draws what the network sees: samples of a run's training batches before and after augmentation, with their targets.

python scripts/show_batch.py [--count 16] [--step 0] [--epoch 0] [--out batch.png] [key=value ...]

The arguments are those of train.py: python scripts/show_batch.py data=cifar10 augment=strong. It shows the samples that training
takes at that step, prepared by the same code, so exactly what a run with these arguments sees.
"""

import argparse
import sys
from pathlib import Path

from lockstep.errors import UserError
from lockstep.launch.exits import exit_code


def show(overrides: list[str], *, count: int, step: int, epoch: int, out: Path) -> None:
    """Raises UserError if the arguments are wrong, or the data has no images."""
    from lockstep.config.auto import decided
    from lockstep.config.identity import identify
    from lockstep.launch.start import checked, prepare_data

    cfg, world = checked(overrides)
    prepared, samples = prepare_data(cfg)
    if prepared is None:
        raise UserError(f"{cfg.data._target_} makes its own batches, so Lockstep does not know them.")
    from lockstep import build
    from lockstep.augment.operation import repeated
    from lockstep.data.datamodule import DataModule
    from lockstep.reporting.pictures import picture

    cfg = build.with_numbers(identify(decided(cfg, world, prepared, samples), None))
    data = build.data(cfg)
    assert isinstance(data, DataModule)
    raw = data.global_batch(epoch, step)
    before = data.finished(repeated(raw, data.repeats), training=False)
    after = data.finished(raw, training=True, epoch=epoch, repeats=data.repeats)
    picture(before, after, data.about, min(count, len(after["index"]))).save(out)
    print(f"{out}: {min(count, len(after['index']))} samples of epoch {epoch}, step {step}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=16, help="how many samples")
    parser.add_argument("--step", type=int, default=0, help="of the epoch, from 0")
    parser.add_argument("--epoch", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("batch.png"))
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for train.py")
    args = parser.parse_args()
    if min(args.count, args.step + 1, args.epoch + 1) < 1:
        raise UserError("--count must be at least 1, --step and --epoch at least 0.")
    show(args.overrides, count=args.count, step=args.step, epoch=args.epoch, out=args.out)


if __name__ == "__main__":
    sys.exit(exit_code(main))
