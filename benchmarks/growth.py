"""Measures what more processes, parameters and samples cost: tables in Markdown and, with --out, a page with plots beside it.

python benchmarks/growth.py [--only world,memory,sampler,data,long,predict] [--rounds 3] [--data-root <folder>] [--out docs/measurements/growth.md]

world: images per second; memory: of each process under ddp and fsdp; sampler: of the order of a billion samples; data: of the
images that the processes of a machine share; long: memory, open files and threads over the steps of a long run; predict: memory of predictions of many files. All on the CPU.
Rounds alternate, because machines are shared. Needs Linux.
"""

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import growth_processes
import numpy as np
from growth_processes import Watch
from growth_sampler import sampler
from parity import silenced

import lockstep
from lockstep.machine.world import cores
from lockstep.run.report import versions

STRONG, WEAK = "global batch 256", "64 per process"
GIB, MIB = 2**30, 2**20
COMMON = [
    "trainer.accelerator=cpu", "trainer.limit_val_batches=0", "trainer.limit_test_batches=1", "trainer.enable_checkpointing=false",
    "trainer.enable_progress_bar=false",
]  # fmt: skip
# A vision transformer of 1,024 channels, half as deep as ViT-L/16: 4 x 152M x 16 bytes (ddp, AdamW) and the libraries fit into 16 GiB.
VIT = [
    "model=timm", "model.name=vit_large_patch16_224", "data=mnist", "data.image_size=32", "data.batch_size=8", "optim=adamw",
    "data.eval_batch_size=8", "trainer.max_steps=3", "trainer.precision=32-true",
]  # fmt: skip
BYTES = 16  # of a parameter under AdamW in fp32: weight, gradient, two moments
# Small images and a small network: all that counts is that the whole of the data is read.
READING = [
    "model=basic_net",
    "data.image_size=8",
    "data.batch_size=512",
    "trainer.max_epochs=3",
    "trainer.log_every_n_steps=20",
]


@dataclass(frozen=True)
class Section:
    title: str
    text: str
    plots: dict[str, Any] = field(default_factory=dict)  # axis label of y -> {series: [(x, y)]}
    x: str = "processes"
    log: bool = False


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def train(args: argparse.Namespace, options: list[str]) -> dict[str, Any]:
    """The report of a run in processes of its own, also where it is one."""
    print("train.py " + " ".join(options), file=sys.stderr)
    with silenced():
        return lockstep.train(
            [f"runs_dir={args.folder}/runs", f"data.cache_dir={args.folder}/cache", *COMMON, *options]
        )


def source(args: argparse.Namespace) -> str:
    return f"data.root={args.data_root}" if args.data_root else "data.source=embedded"


# --- world -----------------------------------------------------------------------------------------------------------


def speed(args: argparse.Namespace, world: int, batch: int, threads: int | None) -> float:
    """Images per second of BasicNet; `threads` of each process, or as many as there are cores for it."""
    steps = [f"trainer.max_steps={args.steps}", "trainer.log_every_n_steps=10"]
    options = [source(args), "strategy=ddp", f"trainer.devices={world}", f"data.batch_size={batch}", *steps]
    given = os.environ.pop("OMP_NUM_THREADS", None)
    os.environ |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
    try:
        return float(train(args, options)["train/images_per_s"])
    finally:
        os.environ.pop("OMP_NUM_THREADS", None)
        os.environ |= {"OMP_NUM_THREADS": given} if given is not None else {}


def world(args: argparse.Namespace) -> Section:
    cases = [(kind, n, 256 if kind == STRONG else 64 * n) for kind in (STRONG, WEAK) for n in args.worlds]
    found: dict[tuple[str, int], list[float]] = {(kind, n): [] for kind, n, _ in cases}
    alone: list[float] = []
    for _ in range(args.rounds):
        for kind, n, batch in cases:
            found[kind, n].append(speed(args, n, batch, threads=1))
        alone.append(speed(args, 1, 256, threads=None))
    rows, most = [], max(args.worlds)
    for kind, n, batch in cases:
        pairs = zip(found[kind, n], found[kind, args.worlds[0]], strict=True)
        faster = statistics.median(own / one for own, one in pairs)
        rows.append(
            [kind, str(n), str(batch), spread(found[kind, n]), f"{faster:.2f}", f"{faster / min(n, cores()):.0%}"]
        )
    rows.append(["one process with all cores", "1", "256", spread(alone), "", ""])
    head = [
        "what",
        "processes",
        "batch",
        "images/s, median (least to most)",
        "times one process",
        "of what the cores allow",
    ]
    text = (
        f"BasicNet under ddp, one thread per process, {args.steps} steps, {args.rounds} rounds. There are {cores()} cores: more processes "
        f"than that share them, so {most} can be at most {min(most, cores())} times as fast as one."
    )
    lines = {kind: [(n, statistics.median(found[kind, n])) for n in args.worlds] for kind in (STRONG, WEAK)}
    return Section(
        "Images per second over the number of processes", f"{text}\n\n{table(head, rows)}", {"images/s": lines}
    )


# --- memory ----------------------------------------------------------------------------------------------------------


def memory(args: argparse.Namespace) -> Section:
    lines: dict[str, list[tuple[float, float]]] = {}
    rows, count = [], 0
    base = watched(args, ["model=basic_net", "strategy=ddp", "trainer.devices=1", *VIT[3:]])[0].each.own
    for strategy in ("ddp", "fsdp"):
        for n in args.worlds:
            options = [*VIT, f"+model.depth={args.depth}", f"strategy={strategy}", f"trainer.devices={n}"]
            seen, report = watched(args, options)
            count = report["parameters"]
            theory = BYTES * count / (n if strategy == "fsdp" else 1)
            figures = [theory, seen.each.own - base, seen.each.own, report["peak_memory_bytes"], seen.all.pss]
            rows.append([strategy, str(n), *(f"{size / GIB:.2f}" for size in figures)])
            lines.setdefault(strategy, []).append((n, figures[1] / GIB))
            lines.setdefault(f"{strategy}, in theory", []).append((n, theory / GIB))
    head = [
        "strategy", "processes", "weights, gradients, AdamW in theory", "own, above the base", "own", "peak_memory_bytes (with shared files)",
        "all processes together (PSS)",
    ]  # fmt: skip
    text = (
        f"A vision transformer (timm's vit_large_patch16_224 with {args.depth} of its 24 blocks) of {count / 1e6:.0f} million parameters, "
        f"AdamW in fp32, batch 8 of 32 pixels, 3 steps. GiB, the most that one process had, looked at some times a second; `own` are "
        f"pages that belong to no file. The base is what a run with BasicNet has of its own, {base / GIB:.2f} GiB. Under fsdp "
        f"each process makes the whole network ({4 * count / GIB:.2f} GiB) before it keeps its part of it, and gathers one block at a time. "
        "Single and ddp keep freed memory on a CPU, fsdp gives it back (hardware.py)."
    )
    return Section("Memory of a process over the number of processes", f"{text}\n\n{table(head, rows)}", {"GiB": lines})


def watched(args: argparse.Namespace, options: list[str], folder: Path | None = None) -> tuple[Watch, dict[str, Any]]:
    with Watch(folder) as seen:
        report = train(args, [source(args), *options])
    return seen, report


# --- data ------------------------------------------------------------------------------------------------------------


def data(args: argparse.Namespace) -> Section:
    """Of the ranks of a real run, with a look at what they have of the decoded files."""
    lines: dict[str, list[tuple[float, float]]] = {}
    rows, cache = [], (args.folder / "cache").resolve()
    name = "cifar10" if args.data_root else "mnist"
    options = [f"data={name}", *READING, "strategy=ddp"]
    watched(args, [*options, "trainer.devices=1", "data.limit_train=512"])  # decodes
    size = sum(path.stat().st_size for path in cache.glob(f"{name}-*/*.npy"))
    for n in args.worlds:
        part = watched(args, [*options, f"trainer.devices={n}", "data.limit_train=512"])[0]
        seen = watched(args, [*options, f"trainer.devices={n}"], cache)[0]
        figures = [seen.all.mapped, seen.all.mapped_pss, seen.each.own - part.each.own]
        rows.append([str(n), *(f"{figure / MIB:.1f}" for figure in figures), f"{seen.all.mapped_pss / size:.3f}"])
        lines.setdefault("in memory (PSS)", []).append((n, seen.all.mapped_pss / MIB))
        lines.setdefault("if each process had a copy", []).append((n, seen.all.mapped / MIB))
    head = [
        "processes",
        "mapped, summed over the processes",
        "of that in memory (PSS)",
        "a process's own, above the short run",
        "PSS / size",
    ]
    text = (
        f"ddp over three epochs of {name}, whose images and labels are {size / MIB:.1f} MiB. MiB, the most that was seen at a time: the "
        "mappings of the decoded files in /proc/<pid>/smaps, where PSS counts a page that n processes share as 1/n for each; and the pages that "
        "a process has made itself, above those of a run over 512 images, where a copy of the data would show."
    )
    return Section(
        "One copy of the data for all processes of a machine", f"{text}\n\n{table(head, rows)}", {"MiB": lines}
    )


# --- predict ------------------------------------------------------------------------------------------------------------

PREDICTING = ["trainer.accelerator=cpu", "data.num_workers=0", "trainer.enable_progress_bar=false"]
PATH = "2026/november/{:012}.jpg"


def black(self: Any, indices: Any) -> dict[str, object]:
    shape = (len(indices), self.channels, self.size, self.size)
    return {"input": np.zeros(shape, np.uint8), "problem": [""] * len(indices)}


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def predicted(counts: list[int], folder: Path) -> Iterator[tuple[int, int, int, float]]:
    """Files, peak memory after them, bytes of the table, seconds; in a folder of its own. Trains a small network first."""
    from PIL import Image

    from lockstep.data.images import InputFiles

    for name in ("a", "b"):
        (folder / "data" / name).mkdir(parents=True)
        for number in range(10):
            Image.new("L", (8, 8), number).save(folder / "data" / name / f"{number}.png")
    run = [
        "data=folder",
        f"data.root={folder}/data",
        f"data.cache_dir={folder}/cache",
        "data.channels=1",
        "data.image_size=8",
    ]
    lockstep.train(
        ["run=small", f"runs_dir={folder}/runs", *run, "data.batch_size=8", "trainer.max_steps=1", *PREDICTING]
    )
    InputFiles.__getitem__ = black  # type: ignore[method-assign]
    for count in counts:
        with (folder / "list.csv").open("w") as file:
            file.writelines(["path\n", *(f"{PATH.format(number)}\n" for number in range(count))])
        output, began_s = folder / f"{count}.csv", time.perf_counter()
        lockstep.predict(
            [
                "run=small",
                f"runs_dir={folder}/runs",
                f"input={folder}/list.csv",
                f"output={output}",
                "data.eval_batch_size=1000",
                *PREDICTING,
            ]
        )
        yield count, peak_bytes(), output.stat().st_size, time.perf_counter() - began_s


def predict(args: argparse.Namespace) -> Section:
    """Simulated files: a CSV lists their paths, and a black image stands for each, so the disk and Pillow are left out."""
    counts = [int(count) for count in args.files.split(",")]
    lines = [[f"{count:,}", f"{peak / MIB:,.0f}", f"{size / MIB:,.1f}", f"{count / seconds:,.0f}"]
             for count, peak, size, seconds in predicted(counts, args.folder)]  # fmt: skip
    text = "predict.py over simulated files, in one process that predicts them in turn: what a number adds to the peak of the one before is what it cost."
    return Section(
        "What predictions of many files hold",
        f"{text}\n\n{table(['files', 'peak memory, MiB', 'table, MiB', 'files/s'], lines)}",
    )


# --- page ------------------------------------------------------------------------------------------------------------


def plot(section: Section, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(section.plots), 3), layout="constrained")
    for axes, (label, lines) in zip(
        figure.subplots(1, len(section.plots), squeeze=False)[0], section.plots.items(), strict=True
    ):
        for name, points in lines.items():
            axes.plot(
                *zip(*points, strict=True),
                label=name,
                marker="o" if len(points) < 30 else "",
                linestyle="--" if "theory" in name else "-",
            )
        axes.set(
            xlabel=section.x,
            ylabel=label,
            **({"xscale": "log", "yscale": "log"} if section.log else {"ylim": (0, None)}),
        )
        if not section.log and section.x == "processes":
            axes.set_xticks(sorted({x for points in lines.values() for x, _ in points}))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=110)


def sampled(_: argparse.Namespace) -> Section:
    text, plots = sampler()
    return Section("The order of samples over their number", text, plots, x="samples", log=True)


def long(args: argparse.Namespace) -> Section:
    given = [
        f"runs_dir={args.folder}/runs",
        f"data.cache_dir={args.folder}/cache",
        f"trainer.max_steps={args.long_steps}",
    ]

    def run() -> None:
        with silenced():
            lockstep.train([*growth_processes.OPTIONS, *given])

    processes = growth_processes.looked_at(run, args.folder / "runs/long/metrics.csv")
    lines = {
        kind: {name: [(one.step, one.values[i]) for one in looks] for name, looks in processes.items()}
        for i, kind in enumerate(growth_processes.KINDS)
    }
    head = ["process", "", *(f"after {share * args.long_steps:,.0f} steps" for share in (0.1, 0.5, 0.99))]
    text = (
        "ddp with two processes, all loggers (W&B offline), a checkpoint every 200 steps, a validation every epoch. The processes are the "
        "ranks and those that they start; memory is that of pages that belong to no file."
    )
    shown = table(head, growth_processes.rows(processes, args.long_steps))
    return Section("What a long run holds", f"{text}\n\n{shown}", lines, x="steps")


SECTIONS = {"world": world, "memory": memory, "sampler": sampled, "data": data, "long": long, "predict": predict}
HEADER = "# What size costs\n\nMade by `{command}` with {versions}, on {cores} CPU cores.\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas between them")
    parser.add_argument("--worlds", default="1,2,4", help="numbers of processes, from 1 on")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150, help="of each run of the section world")
    parser.add_argument(
        "--depth",
        type=int,
        default=12,
        help="blocks of the network of the section memory, 12.6 million parameters each",
    )
    parser.add_argument("--long-steps", type=int, default=20_000, help="of the run of the section long")
    parser.add_argument(
        "--files", default="10000,100000,200000,1000000", help="numbers of files of the section predict"
    )
    parser.add_argument("--data-root", help="a folder with MNIST and CIFAR-10; without it, the embedded images")
    parser.add_argument("--out", type=Path, help="write the page there as well, and its plots beside it")
    args = parser.parse_args()
    if unknown := set(args.only.split(",")) - SECTIONS.keys():
        parser.error(f"--only: there is no {', '.join(sorted(unknown))}; use some of {','.join(SECTIONS)}")
    words = [
        f"--{key}={getattr(args, key.replace('-', '_'))}"
        for key in ("only", "worlds", "rounds", "steps", "depth", "long-steps")
    ]
    args.worlds = [int(n) for n in args.worlds.split(",")]
    args.data_root = Path(args.data_root).resolve() if args.data_root else None
    command = " ".join(["python benchmarks/growth.py", *words, *(["--data-root=<folder>"] if args.data_root else [])])
    text = HEADER.format(command=command, versions=versions(), cores=cores())
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        for name in args.only.split(","):
            section = SECTIONS[name](args)
            print(f"## {section.title}\n\n{section.text}\n", flush=True)
            text += f"\n## {section.title}\n\n{section.text}\n"
            if args.out and section.plots:
                picture = args.out.with_name(f"{args.out.stem}-{name}.png")
                plot(section, picture)
                text += f"\n![{section.title}]({picture.name})\n"
    if args.out:
        args.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
