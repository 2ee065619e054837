"""Estimate parameters, memory, communication, time and cost of a run before you start it, by strategy and number of devices.

python scripts/plan.py [key=value ...] [--on h100] [--devices 1,2,4,8] [--nodes 1] [--utilisation 0.35] [--price 3.0] [--measure]

Takes the keys of train.py; --on, --devices and --nodes replace the keys of the strategy and the devices. The step runs on torch's meta
device, so nothing is computed and a network may be larger than this machine's memory. --measure trains some steps in this process, and
shows the error of the predicted memory and the operations per second. docs/plan.md has measured errors.
"""

import argparse
import math
import sys
from typing import Any

from rich.table import Table

from lockstep import train
from lockstep.config.instantiate import create
from lockstep.config.settings import Settings
from lockstep.config.targets import locate
from lockstep.config.words import seconds, size
from lockstep.errors import UserError
from lockstep.launch.exits import exit_code
from lockstep.launch.start import checked, prepare_data
from lockstep.reporting.console import print_wide

COLUMNS = (
    "strategy", "devices", "micro-batch", "memory each", "largest micro-batch", "sent per step", "step", "of it communication", "epoch", "run",
)  # fmt: skip
STEPS = 12  # steps that --measure trains; the report's speed excludes the first ones


def costs_of(settings: Settings) -> tuple[Any, int]:
    """The costs of a step, and the samples of an epoch."""
    prepare_data(settings)
    import torch

    from lockstep import build
    from lockstep.callbacks import Freeze
    from lockstep.extras.planning import costs

    settings = settings.with_numbers()
    fetched = {"pretrained": False, "checkpoint_path": None}
    cfg = settings.cfg
    settings = settings.but({f"model.{key}": nothing for key, nothing in fetched.items() if cfg.model.get(key)})
    data: Any = build.data(settings)
    with torch.device("meta"):
        work = build.workload(settings, data)
    module: Any = work.module
    if work.task is None:
        raise UserError("only tasks can be planned; a LightningModule defines its own steps.")
    for name, each in cfg.callbacks.items():
        kind = locate(each.target)
        if isinstance(kind, type) and issubclass(kind, Freeze):
            create(each, f"callbacks.{name}").freeze(module.net)
    return costs(module, data, module.net.train()), data.train_split.count


def in_half(settings: Settings) -> bool:
    """Whether the step computes in half precision, as `auto` does on all known devices."""
    return not str(settings.cfg.trainer.precision).startswith(("32", "64"))


def plans(settings: Settings, costs: Any, args: argparse.Namespace) -> list[tuple[str, Any, Any]]:
    """Strategy, setting and plan for each number of devices that divides the batch."""
    from lockstep.extras.planning import DEVICES, Setting, plan

    cfg = settings.cfg
    batch = settings.steps.batch_size
    copies = sum(getattr(locate(each.target), "saved_weights", 0) for each in cfg.callbacks.values())
    device, found, logical_ranks = DEVICES[args.on], [], cfg.exact.logical_ranks or 0
    for count in args.devices:
        world = count * args.nodes
        for name, shards in (("single", False),) if world == 1 else (("ddp", False), ("fsdp", True)):
            accumulate = settings.steps.micro_batches(world) // world
            if logical_ranks % world or batch % (world * accumulate):
                continue
            micro_batch = batch // (world * accumulate)
            of = Setting(world, args.nodes, shards, in_half(settings), micro_batch, accumulate, copies)
            speed = {"utilisation": args.utilisation, "between_nodes": args.between_nodes}
            found.append((name, of, plan(costs, of, device, **speed)))
    if not found:
        raise UserError(
            f"loader.batch_size={batch} cannot be divided by any of these numbers of devices. Set --devices."
        )
    return found


def show(settings: Settings, costs: Any, samples: int, args: argparse.Namespace) -> None:
    plan = settings.steps
    steps, batch = plan.steps(samples), plan.batch_size
    print_wide(
        f"{costs.parameters:,} parameters, {costs.trained:,} of them trained · {costs.flops / 1e9:,.2f} GFLOP per sample, forward and backward\n"
        f"weights {size(costs.weight_bytes)} · gradients {size(costs.gradient_bytes)} · optimizer {size(costs.optimizer_bytes)} · "
        f"activations {size(costs.activation_bytes)} per sample in fp32\n"
        f"{args.on} at {args.utilisation:.0%} of its peak, {args.nodes} node{'s' * (args.nodes > 1)}, {'mixed precision' if in_half(settings) else 'fp32'}, batch {batch}"
    )
    table = Table(*COLUMNS, *(["cost"] if args.price else []))
    made = plans(settings, costs, args)
    for name, of, found in made:
        epoch_s, run_s = plan.epoch(samples) // plan.accumulate * found.step_s, steps * found.step_s
        fits = "" if of.micro_batch <= found.largest_micro_batch else " does not fit"
        row = [name, str(of.world), str(of.micro_batch) + (f" x {of.accumulate}" if of.accumulate > 1 else ""), size(found.memory_bytes) + fits,
               str(found.largest_micro_batch), size(found.communicated_bytes), f"{found.step_s * 1000:.1f} ms",
               f"{(found.step_s - found.compute_s) / found.step_s:.0%}", seconds(epoch_s), "no end" if math.isinf(run_s) else seconds(run_s)]  # fmt: skip
        table.add_row(*row, *([f"{run_s / 3600 * of.world * args.price:,.2f}"] if args.price else []))
    print_wide(table)
    if left_out := [n for n in args.devices if n * args.nodes not in {of.world for _, of, _ in made}]:
        print_wide(
            f"not on {', '.join(map(str, left_out))} devices: loader.batch_size={batch} cannot be divided by them"
        )


def measure(overrides: list[str], costs: Any) -> str:
    """Trains a few steps here; returns the measured growth of memory, the predicted one, and the speed."""
    import resource

    from lockstep.extras.planning import DEVICES, Setting, plan

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    report = train([*overrides, f"trainer.max_steps={STEPS}", "trainer.max_epochs=-1", "trainer.log_every_n_steps=2", "trainer.limit_val_batches=0",
                    "trainer.limit_test_batches=0", "trainer.enable_checkpointing=false", "logger=csv"])  # fmt: skip
    half = "mixed" in report["precision"]
    of = Setting(1, 1, False, half, report["micro_batch"], report["accumulate_grad_batches"])
    predicted = plan(costs, of, DEVICES["h100"], utilisation=1.0).memory_bytes
    rate = report[f"train/{report['unit']}_per_s"] or float("nan")
    return (
        f"here: {size(report['peak_memory_bytes'] - before)} measured, {size(predicted)} predicted · {rate:,.1f} samples/s, "
        f"{rate * costs.flops / 1e9:,.1f} GFLOP/s"
    )


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--on", default="h100", help="type of device")
    parser.add_argument("--devices", type=numbers, default="1,2,4,8", help="devices per node")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument(
        "--utilisation", type=float, default=0.35, help="fraction of the device's peak FLOP/s that training reaches"
    )
    parser.add_argument("--between-nodes", type=float, default=45e9, help="bytes/s from each device to other nodes")
    parser.add_argument("--price", type=float, default=0.0, help="price of a device per hour")
    parser.add_argument("--measure", action="store_true", help="also train some steps on this machine")
    args = parser.parse_intermixed_args()
    from lockstep.extras.planning import DEVICES

    if args.on not in DEVICES:
        raise UserError(f"--on {args.on}: the known kinds are {', '.join(DEVICES)}.")
    if not 0 < args.utilisation <= 1 or min(*args.devices, args.nodes) < 1:
        raise UserError(
            "--utilisation is a fraction of the peak, above 0 and at most 1. --devices and --nodes are at least 1."
        )
    settings = checked(args.overrides)
    if args.measure and settings.world.size > 1:
        raise UserError("--measure trains in this process. Remove strategy and trainer.devices.")
    costs, samples = costs_of(settings)
    show(settings, costs, samples, args)
    if args.measure:
        print(measure(args.overrides, costs))


if __name__ == "__main__":
    sys.exit(exit_code(main))
