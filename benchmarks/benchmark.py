"""Lockstep beside the same training by other means, by turns on one machine: a plain loop, Accelerate, transformers.

python benchmarks/benchmark.py [--data-root <folder>] [--rounds 12] [--out <page>]
python benchmarks/benchmark.py --world 2                    # two processes (ddp) each
python benchmarks/benchmark.py --recipe resnet50d           # CIFAR-10 at 336 pixels
python benchmarks/benchmark.py --networks                   # BasicNet: each with the other's network as well
python benchmarks/benchmark.py --quick --check              # exit code 1 if Lockstep got slow, compared with the others

Each contender is a process that is started once; then they train in turns of --segment optimizer steps, in the opposite order in
every other round. Machines are shared: read the ratios, which are taken within a round. The contenders, and what they leave out,
are in benchmark_peers.py and benchmark_lockstep.py. Packages of --group peers that are missing leave their contender out.
"""

import argparse
import contextlib
import importlib.util
import math
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from benchmark_table import FP32, Contenders, Figures, accuracy_problems, table, too_slow, waits_long
from benchmark_turns import REST, Contender

from lockstep.config.compose import compose_config
from lockstep.config.instantiate import create_data
from lockstep.data.sampler import val_count
from lockstep.errors import TrainingFailed, UserError
from lockstep.launch.exits import exit_code
from lockstep.machine.world import cores, gpu_count
from lockstep.run.report import versions

# Ratios, with room for the noise of a shared machine: 2.9, 1.7, 0.88 and 0.93 were seen with --quick on two cores. The first holds where the default precision is a lower one.
FASTER_BY_DEFAULT = {("lockstep", "plain"): 1.5}
LIMITS = {
    ("lockstep equal precision", "plain"): 1.15,
    ("lockstep", "upper bound"): 0.75,
    ("lockstep equal precision", "upper bound equal precision"): 0.75,
}
MOST_WAITING = 0.05  # 0.01 to 0.02 were seen
PEERS = ("plain", "accelerate", "transformers")
EQUAL = ["trainer.precision=32-true"]
EQUAL_ON_GPUS = ["tf32=true"]  # products and convolutions; in a plain loop torch has it for convolutions alone
OURS = {  # name: what it is, its options
    "lockstep": ("lockstep", []),
    "lockstep equal precision": ("lockstep", EQUAL),
    "upper bound": ("upper_bound", []),
    "upper bound equal precision": ("upper_bound", EQUAL),
}
NETWORKS = {  # of basic_net: each with the other's network, to tell what the engine gives from what the network gives
    "plain, Lockstep's network": ("plain_our_net", []),
    "lockstep, the plain loop's network": ("lockstep_plain_net", []),
    "lockstep equal precision, the plain loop's network": ("lockstep_plain_net", EQUAL),
}
RECIPES = {"basic_net": ["model=basic_net", "data=mnist"], "resnet50d": ["model=resnet50d", "data=cifar10"]}
AMOUNTS = {  # batch, optimizer steps of a turn, rounds
    ("basic_net", "cpu"): (64, 60, 12),
    ("basic_net", "cuda"): (64, 200, 12),
    ("resnet50d", "cpu"): (8, 2, 3),  # 2 to 5 images/s on two cores
    ("resnet50d", "cuda"): (64, 20, 12),
}


@dataclass(frozen=True)
class Plan:
    device: str
    batch: int
    segment: int  # optimizer steps
    rounds: int
    overrides: list[str]
    images: int  # of the training split
    epochs: int  # as many as the turns need
    accuracy: bool


def chosen(peers: str, world: int, also: Sequence[str] = ()) -> dict[str, tuple[str, list[str]]]:
    """Contenders by name. Peers whose package is not installed are left out, with a line that says so."""
    names = peers.split(",")
    if unknown := set(names) - set(PEERS):
        raise UserError(f"--peers {peers}: {', '.join(sorted(unknown))} is unknown; use some of {','.join(PEERS)}.")
    found: dict[str, tuple[str, list[str]]] = {}
    for name in names:
        if name == "plain" or importlib.util.find_spec(name):
            found[name] = (name, [])
        else:
            say(f"{name} is left out: it is not installed. Type uv run --group peers benchmarks/benchmark.py")
    ours = {name: what for name, what in OURS.items() if world == 1 or what[0] == "lockstep"}
    return found | ours | {f"lockstep {options}": ("lockstep", options.split()) for options in also}


def planned(args: argparse.Namespace) -> Plan:
    device = args.device or ("cuda" if gpu_count() else "cpu")
    if device == "cuda" and gpu_count() < args.world:
        raise UserError(
            f"--device cuda --world {args.world}: this machine shows {gpu_count()} GPUs. Type --device cpu."
        )
    batch, segment, rounds = AMOUNTS[args.recipe, device]
    batch, segment = args.batch_size or batch, args.segment or (15 if args.quick else segment)
    rounds = args.rounds or (7 if args.quick else rounds)
    overrides = [
        *RECIPES[args.recipe], f"data.batch_size={batch}", f"trainer.accelerator={device}",
        "trainer.limit_val_batches=0", "trainer.enable_checkpointing=false",
        *(["strategy=ddp"] if args.world > 1 else []), *(["data.source=embedded"] if args.quick else []),
        *([f"data.root={args.data_root}"] if args.data_root else []),
    ]  # fmt: skip
    cfg = compose_config("train", overrides)
    prepared = create_data(cfg)
    prepared.prepare()  # once, and with its words here, not in each contender
    if prepared.source == "embedded":
        overrides.append("data.source=embedded")
    images = len(prepared.train) - val_count(len(prepared.train), cfg.data.val_fraction)
    epochs = math.ceil((1 + rounds) * segment / (images // batch))
    accuracy = args.recipe == "basic_net" and not args.quick if args.accuracy is None else args.accuracy
    return Plan(device, batch, segment, rounds, [*overrides, f"trainer.max_epochs={epochs}"], images, epochs, accuracy)


def arithmetic(kind: str, options: list[str], device: str) -> list[str]:
    """`options`, with TF32 for all that compute in fp32 on a GPU: the peers and Lockstep in equal precision."""
    equal = kind in (*PEERS, "plain_our_net") or options == EQUAL
    return [*options, *(EQUAL_ON_GPUS if equal and device == "cuda" else [])]


def measure(args: argparse.Namespace, plan: Plan, contenders: dict[str, tuple[str, list[str]]]) -> dict[str, Figures]:
    figures = {name: Figures() for name in contenders}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        processes: list[Contender] = []
        for name, (kind, options) in contenders.items():
            overrides = [
                *plan.overrides,
                *arithmetic(kind, options, plan.device),
                f"runs_dir={folder}/{len(processes)}",
            ]
            process = Contender(name, kind, overrides, Path(folder), device=plan.device, world=args.world)
            stack.callback(process.end)
            processes.append(process)
        for process in processes:
            process.answer()
        say(f"{len(processes)} contenders stand")
        for process in processes:
            process.train(plan.segment)  # warms up
        for i in range(plan.rounds):
            for process in processes if i % 2 == 0 else processes[::-1]:
                figures[process.name].add(process.train(plan.segment))
            say(" · ".join(f"{name} {found.turns[-1].images_per_s:,.1f}" for name, found in figures.items()))
        if plan.accuracy:
            for process in processes:
                if not process.name.startswith("upper bound"):
                    figures[process.name].accuracy = process.train(REST)["accuracy"]
    return figures


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr)


def machine(device: str) -> str:
    """What it is, but not whose."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{cpu}, {cores()} cores" + (f"; {gpu_name()}" if device == "cuda" else "")


def gpu_name() -> str:
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[0] if done.returncode == 0 and done.stdout else "a GPU"


def command(args: argparse.Namespace) -> str:
    """What to type for the same again, without folders of this machine."""
    options = []
    for key, value in vars(args).items():
        if key not in ("data_root", "out", "also") and value != arguments([]).__dict__[key]:
            no = "no-" if value is False else ""
            options.append(f"--{no}{key.replace('_', '-')}" + ("" if isinstance(value, bool) else f" {value}"))
    options += [f"--also {shlex.quote(also)}" for also in args.also]
    return " ".join(["python benchmarks/benchmark.py", *options])


def page(args: argparse.Namespace, plan: Plan, figures: Contenders) -> str:
    peers = "".join(f", {name} {version(name)}" for name in PEERS[1:] if name in figures)
    learned = f"; accuracy after {plan.epochs} epoch(s) of {plan.images:,} images" if plan.accuracy else ""
    return (
        f"# Benchmark: {args.recipe}, {args.world} process(es) on {plan.device}\n\n"
        f"Made by `{command(args)}` on {machine(plan.device)}, with {versions()}{peers}. Global batch {plan.batch}, turns of "
        f"{plan.segment} optimizer steps{learned}. Ratios are medians over the rounds of the ratio within a round. Memory is "
        "that of one process, and + that of its GPU. `equal precision` is 32-true, with TF32 on GPUs as all peers; an upper bound is Lockstep's network, "
        "optimizer and precision in a bare loop over one batch that is on the device already; the rate of products is the best of "
        "five of torch.mm in its first turn, which convolutions of another library may go beyond.\n\n"
        f"{table(figures)}\n"
    )


def main(args: argparse.Namespace) -> None:
    plan = planned(args)
    contenders = chosen(args.peers or ("plain" if args.quick else ",".join(PEERS)), args.world, args.also)
    figures = measure(args, plan, contenders | (NETWORKS if args.networks else {}))
    print(page(args, plan, figures))
    if args.out:
        args.out.write_text(page(args, plan, figures))
    limits = LIMITS | (FASTER_BY_DEFAULT if figures["lockstep"].precision != FP32 else {})
    problems = list(accuracy_problems(figures))
    if args.check:
        problems += [*too_slow(figures, limits), *waits_long(figures, MOST_WAITING)]
    if problems:
        raise TrainingFailed("; ".join(problems))


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=RECIPES, default="basic_net")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--world", type=int, default=1, help="processes of each contender")
    parser.add_argument("--peers", help=f"which of {','.join(PEERS)}; default: all, with --quick plain")
    parser.add_argument(
        "--also", action="append", default=[], help="Lockstep with these options as well: 'compile=true'"
    )
    parser.add_argument("--networks", action="store_true", help="basic_net: each with the other's network as well")
    parser.add_argument("--data-root", type=Path, help="data.root of all contenders")
    parser.add_argument("--batch-size", type=int, help="global batch of one optimizer step")
    parser.add_argument("--segment", type=int, help="optimizer steps of a turn")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--quick", action="store_true", help="embedded images, the plain loop alone, few short rounds")
    parser.add_argument("--check", action="store_true", help="exit code 1 when a ratio is below its limit")
    parser.add_argument(
        "--accuracy", action=argparse.BooleanOptionalAction, help="default: of basic_net, unless --quick"
    )
    parser.add_argument("--out", type=Path, help="write the page there as well")
    return parser.parse_args(given)


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(arguments())))
