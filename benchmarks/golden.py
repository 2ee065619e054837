"""Compares what training computes with another commit, or with the stored record: six recipes, each in every way of running.

python benchmarks/golden.py --against <commit>       # runs both on this machine: everything is equal, bit by bit
python benchmarks/golden.py --stored                 # this tree and tests/golden/: the order of samples, rows up to 1e-6
python benchmarks/golden.py --write                  # stores the record of this tree: after a change that is meant, with its reason
    [--recipes mnist,module] [--ways single,ddp] [--accelerator gpu] [--jobs 2]

Recorded are, for each recipe and way: the targets of each step on each rank, in order; the rows of metrics.csv; the metrics and counts of
the test; and the weights and buffers of the last checkpoint. Bits of weights depend on the processor, so they are compared with another
commit only, and the stored rows are of runs in 64-true. `resumed` was killed with SIGKILL and started again: within a tree it is equal to `single`, and
so is the order of all ways on one process. Exit code 1 if anything differs.

golden_parts.py has the data and modules; the other tree uses its own, so it is d4dc72c3 or a later commit. Needs Linux.
"""

import argparse
import csv
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
STORED = HERE / "tests/golden"
TOLERANCE, ABSOLUTE = 1e-6, 1e-6  # of stored rows: relative, and what part of it is allowed at zero
Record = dict[str, Any]  # of one recipe run in one way
Records = dict[str, dict[str, Record]]  # by recipe and way

EMBEDDED = ["data.source=embedded", "data.image_size=12", "loader.batch_size=48", "loader.limit_train=480"]
EXACT = "trainer.precision=64-true"
OWN = ["model=own", "data=own"]
# Overrides, and the steps that the run has.
RECIPES: dict[str, tuple[list[str], int]] = {
    "mnist": ([*EMBEDDED, EXACT], 18),
    "airbench": (
        ["experiment=mnist_airbench", *EMBEDDED, "model.widths=[8,16,16]", "data.image_size=28", "schedule.warmup_steps=20", "trainer.precision=bf16-mixed"], 60,
    ),
    "folder": (
        ["model=basic_net", "data=folder", "data.root=photos", "data.image_size=12", "augment=[crop,flip]", "loader.batch_size=16", EXACT], 14,
    ),
    "module": (["task=lightning_module", "task._target_=golden_parts.Pair", "data=none", EXACT], 30),
    "text": (
        [*OWN, "model._target_=golden_parts.Transformer", "data._target_=golden_parts.Text", "task=language_model", "loader.batch_size=16", EXACT], 15,
    ),
    "weights": (
        [*OWN, "model._target_=golden_parts.Mlp", "data._target_=golden_parts.Table", "task=regression", "task._target_=golden_parts.Weighted", "optim=sgd", "optim.lr=0.05", "loader.batch_size=16",
         EXACT], 15,
    ),
}  # fmt: skip
DDP, FSDP = (["trainer.devices=2", f"strategy={name}"] for name in ("ddp", "fsdp"))
LOGICAL = ["exact.logical_ranks=8"]
WAYS: dict[str, list[str]] = {
    "single": [],
    "ddp": DDP,
    "fsdp": FSDP,
    "accumulated": ["trainer.accumulate_grad_batches=2"],
    "logical_1": LOGICAL,
    "logical_2": [*LOGICAL, *DDP],
    "resumed": ["checkpoint.every_n_steps=5"],
}
ONE_DEVICE = [way for way, options in WAYS.items() if "trainer.devices=2" not in options]
BY_HAND = {"module": ("accumulated", "logical_1", "logical_2")}  # refused with manual optimization
EACH = [
    "trainer.log_every_n_steps=1", "trainer.enable_progress_bar=false", "trainer.max_epochs=100", "resume=auto", "seed=1",
    "+callbacks.record._target_=golden_parts.Record", "loader.num_workers=0",
]  # fmt: skip
TIMES = re.compile(r"_per_s$|_gib$|_s$|^time")  # columns and metrics that are measured


# --- a record: made in a process that imports the tree it is of ---


def overrides_of(recipe: str, way: str, accelerator: str) -> list[str]:
    overrides, steps = RECIPES[recipe]
    loader = [] if recipe == "module" else EACH[-1:]
    if way == "fsdp":  # which does not support 64-true
        overrides = [override.replace(EXACT, "trainer.precision=32-true") for override in overrides]
    kill = [f"+callbacks.record.kill_at={steps - 4}"] if way == "resumed" else []
    limits = [f"trainer.max_steps={steps}", f"trainer.accelerator={accelerator}", f"run={recipe}-{way}"]
    exact = ["trainer.deterministic=true"] if accelerator == "gpu" else []
    return [*overrides, *EACH[:-1], *loader, *WAYS[way], *kill, *limits, *exact]


def write_project(folder: Path, parts: Path) -> None:
    """A project with the recipes' own classes and a folder of photos, whose class is their colour."""
    import numpy as np
    from PIL import Image

    (folder / "src").mkdir(parents=True)
    shutil.copy(parts, folder / "src/golden_parts.py")
    (folder / "pyproject.toml").write_text('[project]\nname = "golden"\nversion = "0"\n\n[tool.lockstep]\n')
    random = np.random.default_rng(5)
    for place, name in enumerate(("blue", "green", "red")):
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(60):
            pixels = random.integers(0, 120, (16 + number % 3, 18, 3), dtype=np.uint8)
            pixels[..., place] += 100
            Image.fromarray(pixels).save(folder / "photos" / name / f"{number}.png")


def digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def order(run: Path) -> list[list[str]]:
    """The digest of each step's targets, by rank. Of a step that ran twice, the last: the run was killed after it."""
    ranks = []
    for path in sorted(run.glob("order-*.jsonl")):
        steps = dict(map(json.loads, path.read_text(encoding="utf-8").splitlines()))
        ranks.append([steps[step] for step in sorted(steps)])
    return ranks


def rows(run: Path) -> list[dict[str, float]]:
    with (run / "metrics.csv").open(newline="", encoding="utf-8") as file:
        return [
            {name: float(text) for name, text in row.items() if text and not TIMES.search(name)}
            for row in csv.DictReader(file)
        ]


def weights(run: Path) -> dict[str, str]:
    """A digest of the bits of each weight and buffer."""
    import torch

    state = torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    return {name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16] if tensor.ndim else str(tensor.item())
            for name, tensor in state.items()}  # fmt: skip


def record_of(run: Path) -> Record:
    report = json.loads((run / "report.json").read_text(encoding="utf-8"))
    tested = {name: value for name, value in report.items() if re.match(r"test[/_]", name) and not TIMES.search(name)}
    return {"order": order(run), "rows": rows(run), "test": tested, "weights": weights(run)}


def run_one(folder: Path, recipe: str, way: str, accelerator: str) -> tuple[str, str, Record]:
    import forked

    from lockstep import ROOT

    command = [sys.executable, str(ROOT / "train.py"), *overrides_of(recipe, way, accelerator)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "LOCKSTEP_PROJECT": str(folder)}
    log = folder / f"{recipe}-{way}.log"
    codes: list[int] = []
    while len(codes) < (2 if way == "resumed" else 1):
        with log.open("ab") as file:
            codes.append(
                forked.Popen(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file).wait()
            )
    if codes[-1] or (way == "resumed" and not codes[0]):
        raise RuntimeError(f"{recipe}, {way}: exit codes {codes}\n{log.read_text(encoding='utf-8')[-4000:]}")
    return recipe, way, record_of(folder / "runs" / f"{recipe}-{way}")


def records(
    folder: Path, recipes: Sequence[str], ways: Sequence[str], accelerator: str = "cpu", jobs: int = 2
) -> Records:
    """Of the tree whose `lockstep` this process imports. A fork server of its tests runs (tests/forked.py)."""
    from lockstep import ROOT

    write_project(folder, ROOT / "benchmarks/golden_parts.py")
    found: Records = {recipe: {} for recipe in recipes}
    cases = [(recipe, way) for recipe in recipes for way in ways if way not in BY_HAND.get(recipe, ())]
    with ThreadPoolExecutor(jobs) as pool:
        for recipe, way, record in pool.map(lambda case: run_one(folder, case[0], case[1], accelerator), cases):
            found[recipe][way] = record
    return found


def record_here(args: argparse.Namespace, output: Path) -> None:
    sys.path.remove(str(HERE / "benchmarks"))  # the parts are those of the tree
    import forked

    with tempfile.TemporaryDirectory(prefix="golden-") as name:
        folder = Path(name)
        os.environ["HOME"] = name
        forked.start_server(folder)
        found = records(folder / "project", args.recipes, args.ways, args.accelerator, args.jobs)
    output.write_text(json.dumps(found), encoding="utf-8")


def record(tree: Path) -> Records:
    """Of any tree, in a process that imports it."""
    with tempfile.TemporaryDirectory() as name:
        output = Path(name) / "records.json"
        command = [sys.executable, __file__, *sys.argv[1:], "--record", str(output)]
        path = os.pathsep.join(str(tree / part) for part in ("src", "tests", "scripts"))
        subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, cwd=tree, check=True)
        found: Records = json.loads(output.read_text(encoding="utf-8"))
        return found


# --- differences ---


def differences(expected: Any, found: Any, where: str = "", tolerance: float = 0.0) -> Iterator[str]:
    """The values that differ, by their place. NaN equals NaN."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for name in sorted(expected.keys() | found.keys()):
            yield from differences(expected.get(name), found.get(name), f"{where} {name}".strip(), tolerance)
    elif isinstance(expected, list) and isinstance(found, list):
        for number, (a, b) in enumerate(zip_longest(expected, found)):
            yield from differences(a, b, f"{where} [{number}]", tolerance)
    elif isinstance(expected, float) and isinstance(found, float):
        is_nan = math.isnan(expected) and math.isnan(found)
        if not is_nan and not math.isclose(expected, found, rel_tol=tolerance, abs_tol=tolerance * ABSOLUTE):
            yield f"{where}: {expected!r} is {found!r}"
    elif expected != found:
        yield f"{where}: {expected!r} is {found!r}"


def within(found: Records) -> Iterator[str]:
    """What must be equal within a tree: a run that was killed and resumed, and the order of samples on one process."""
    for recipe, ways in found.items():
        single = ways.get("single")
        if single and "resumed" in ways:
            yield from differences(single, ways["resumed"], f"{recipe}: resumed, not single:")
        for way in ("accumulated", "logical_1"):
            if single and way in ways:
                yield from differences(single["order"], ways[way]["order"], f"{recipe}: order of {way}, not single:")
        if {"logical_1", "logical_2"} <= ways.keys():
            parts = ("weights", "rows", "test")
            one, two = ({part: ways[way][part] for part in parts} for way in ("logical_1", "logical_2"))
            yield from differences(one, two, f"{recipe}: logical_2, not logical_1:")


def storable(found: Records) -> Records:
    """What does not depend on the processor: a digest of the order, and rows and metrics of 64-true."""
    kept: Records = {}
    for recipe, ways in found.items():
        for way, of_way in ways.items():
            exact = EXACT in overrides_of(recipe, way, "cpu")
            test = {name: value for name, value in of_way["test"].items() if exact or name.endswith("count")}
            entry = {
                "order": digest(of_way["order"]),
                "steps": len(of_way["order"][0]),
                "test": test,
                **({"rows": of_way["rows"]} if exact else {}),
            }
            kept.setdefault(recipe, {})[way] = entry
    return kept


def orders(found: Records) -> Records:
    return {recipe: {way: {"order": record["order"]} for way, record in ways.items()} for recipe, ways in found.items()}


def stored(recipes: Sequence[str], ways: Sequence[str]) -> Records:
    found: Records = {}
    for recipe in recipes:
        of_recipe = json.loads((STORED / f"{recipe}.json").read_text(encoding="utf-8"))
        found[recipe] = {way: of_recipe[way] for way in ways if way in of_recipe}
    return found


def write(found: Records) -> None:
    """A line for each row and way, so that a difference can be read."""
    STORED.mkdir(exist_ok=True)
    for recipe, ways in storable(found).items():
        lines = [
            f" {json.dumps(way)}: {json.dumps(entry)}".replace("[{", "[\n  {").replace("}, {", "},\n  {")
            for way, entry in ways.items()
        ]
        (STORED / f"{recipe}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT")
    parser.add_argument("--stored", action="store_true")
    parser.add_argument("--write", action="store_true")
    for name, choices in (("recipes", RECIPES), ("ways", WAYS)):
        parser.add_argument(f"--{name}", type=lambda text: text.split(","), default=list(choices))
    parser.add_argument("--accelerator", default="cpu", choices=("cpu", "gpu"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    unknown = [*(set(args.recipes) - set(RECIPES)), *(set(args.ways) - set(WAYS))]
    if unknown or not (args.against or args.stored or args.write):
        parser.error(
            f"{', '.join(unknown)} is unknown" if unknown else "choose --against <commit>, --stored or --write"
        )
    if args.record:
        record_here(args, args.record)
        return 0
    found = record(HERE)
    problems = list(within(found))
    if args.against:
        with tempfile.TemporaryDirectory(prefix="golden-tree-") as name:
            archive = subprocess.run(["git", "archive", args.against], cwd=HERE, check=True, capture_output=True).stdout
            subprocess.run(["tar", "-x", "-C", name], input=archive, check=True)
            problems += differences(record(Path(name)), found)
    if args.stored:
        expected, recorded = stored(args.recipes, args.ways), storable(found)
        if args.accelerator == "gpu":  # whose kernels and dropout have other numbers
            expected, recorded = orders(expected), orders(recorded)
        problems += differences(expected, recorded, tolerance=TOLERANCE)
    if args.write:
        write(found)
    cases = sum(map(len, found.values()))
    print("\n".join([*problems[:200], f"{cases} runs of {len(found)} recipes: {len(problems) or 'no'} differences"]))
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
