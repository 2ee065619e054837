"""What `lockstep check` says of many networks, losses and data sets, beside what their weights show.

python benchmarks/check_truth.py [--cases masked,queue] [--steps 5] [--output truth.csv]

The truth is measured without the check: the command trains on one process and on two (ddp), in float64, and the weights after the same steps are
compared as one vector. A difference below 1e-10 is rounding: "same". Prints a line for each case, then how often the check said "same" or
"differs" wrongly, and whether the name that it should give is in the place that it names.
"""

import argparse
import csv
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(HERE / "tests"))
import thin_project  # type: ignore[import-not-found]  # noqa: E402

SAME = 1e-10
FIXED = "data.samples=Fixed"
# By name: package, network, task and other keys; and what the place should name, empty if the ways agree.
CASES = {
    "plain": ("coupled Net Fit", ""),
    "dropout": ("coupled DroppedNet Fit", ""),
    "pooling over padding": ("coupled PooledNet Fit", "PooledNet|samples"),
    "masked mean": ("coupled Net OfKnown", "OfKnown"),
    "masked mean by weights": ("coupled Net Weighted", ""),
    "masked autoencoder": ("coupled MaskedNet Fit", "MaskedNet"),
    "contrastive": ("coupled Net Compared", "Compared"),
    "a loss between samples": (f"coupled Net Announced {FIXED}", ""),
    "batch norm": ("coupled NormedNet Fit", "norm"),
    "gradient penalty of each sample": (f"coupled Net Smooth {FIXED}", ""),
    "gradient penalty of the batch": ("coupled Net SmoothOverall", "SmoothOverall"),
    "a term of the batch": ("coupled Net Spread", "Spread"),
    "F.dropout": ("coupled FunctionalNet Fit", "FunctionalNet"),
    "attention dropout": ("coupled AttentiveNet Fit", "Attenti"),
    "a buffer that is written": ("coupled CenteredNet Fit", "center|CenteredNet"),
    "graphs": ("coupled GraphNet OfGraphs data.samples=Graphs", ""),
    "hardest samples": ("more_couplings Net Hardest", "Hardest"),
    "losses clipped at a quantile": ("more_couplings Net Clipped", "Clipped"),
    "weights of a batch's classes": ("more_couplings Net ByFrequency", "ByFrequency"),
    "scaled by the batch": ("more_couplings Net BySize", "BySize"),
    "balanced experts": ("more_couplings GatedNet Balanced", "Balanced"),
    "reversed gradients": ("more_couplings ReversedNet Fit", "ReversedNet"),
    "reversed below a head of zeros": ("more_couplings ZeroHeadNet Fit", "ZeroHeadNet|gradient"),
    "a branch of zeros": ("more_couplings ZeroBranchNet Fit", "ZeroBranchNet|gradient"),
    "a branch of zeros twice": ("more_couplings ZeroProductNet Fit", "ZeroProductNet|gradient"),
    "weakly": ("more_couplings WeakNet Fit", "WeakNet"),
    "a hook of a tensor": ("more_couplings TensorHookNet Fit", "TensorHookNet|gradient"),
    "hooks of parameters": ("more_couplings ParameterHookNet Fit", "ParameterHookNet|gradient"),
    "a queue": ("more_couplings QueueNet Fit", "QueueNet"),
    "from the second step on": ("more_couplings LateNet Fit", "LateNet"),
    "running instance norm": (f"more_couplings RunningInstanceNet Fit {FIXED}", "norm"),
    "experts with a capacity": (f"more_couplings CapacityNet Fit {FIXED}", "CapacityNet"),
    "attention between samples": (f"more_couplings TransposedNet Fit {FIXED}", "TransposedNet|ttention"),
    "dropout of sorted samples": ("more_couplings SortedDropNet Fit", "SortedDropNet"),
    "a subclass of dropout": ("more_couplings SubclassNet Fit", "MyDropout"),
    "norms of samples": (f"more_couplings NormsNet Fit {FIXED}", ""),
    "spectral norm": ("more_couplings SpectralNet Fit", ""),
    "packed sequences": ("more_couplings PackedNet Fit", ""),
    "each length once": (f"more_couplings DedupNet Fit {FIXED}", ""),
    "calls for each sample": (f"more_couplings LoopNet Fit {FIXED}", ""),
    "sorted samples": (f"more_couplings SortedNet Fit {FIXED}", ""),
    "time first": (f"more_couplings TimeFirstNet Fit {FIXED}", ""),
    "a count of calls": ("more_couplings AnnealedNet Fit", ""),
    "kept features": ("more_couplings KeptNet Fit", ""),
    "few weights": ("more_couplings Net Weighted data.samples=Rare", ""),
    "bfloat16 inside": ("more_couplings Bfloat16Net Fit", "Bfloat16Net"),
    "float32 inside": ("more_couplings Float32Net Fit", ""),
}  # fmt: skip
SHORT = ["optim=sgd", "optim.lr=0.05", "loader.batch_size=16", "trainer.accelerator=cpu"]
FILES = {
    "configs/model/net.yaml": "_target_: coupled.Net\nname: net\n",
    "configs/task/fit.yaml": "_target_: coupled.Fit\nname: fit\nmonitor: null\nmode: min\n",
    "configs/data/padded.yaml": "defaults: [own]\n_target_: coupled.Padded\nsamples: Series\n",
}


def overrides_of(keys: str) -> list[str]:
    package, net, task, *others = keys.split()
    chosen = {"model=net model": net, "task=fit task": task, "data=padded data": "Padded"}
    parts = [f"{part}._target_={package}.{name}" for part, name in chosen.items()]
    return [*" ".join(parts).split(), *others, *SHORT]


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "lockstep", *words], cwd=folder, env=env, capture_output=True, text=True
    )


def truth(folder: Path, overrides: list[str], steps: int) -> float:
    """How far the weights of one process and of two are apart after the steps; of float32 where float64 fails."""
    import torch

    for precision in ("64-true", "32-true"):
        states = []
        for name, way in {"one": [], "two": ["strategy=ddp", "trainer.devices=2"]}.items():
            run = f"truth-{name}-{precision}-{time.time_ns()}"
            done = command(
                folder,
                "train",
                *overrides,
                *way,
                f"run={run}",
                f"trainer.precision={precision}",
                f"trainer.max_steps={steps}",
            )
            path = folder / "runs" / run / "checkpoints/last.ckpt"
            if done.returncode == 0:
                state = torch.load(path, weights_only=True)["state_dict"]
                states.append(torch.cat([value.double().flatten() for value in state.values()]))
        if len(states) == 2:
            return float((states[0] - states[1]).norm() / states[0].norm())
    return float("nan")


def measure(name: str, folder: Path, steps: int) -> dict[str, Any]:
    keys, place = CASES[name]
    overrides, began_s = overrides_of(keys), time.perf_counter()
    done = command(folder, "check", "--json", f"steps={steps}", *overrides)
    seconds = time.perf_counter() - began_s
    apart = truth(folder, overrides, steps)
    if done.returncode not in (0, 1) or not done.stdout:
        return {
            "case": name,
            "apart": apart,
            "check": "failed",
            "wrong": "failed",
            "note": done.stderr[-300:],
            "seconds": seconds,
        }
    ways = {way["way"]: way for way in json.loads(done.stdout)["ways"]}
    of_two = ways["ddp on two processes"]
    is_same, says_same = apart < SAME, of_two["verdict"] != "differs"
    wrong = "" if is_same == says_same else "false same" if says_same else "false differs"
    is_placed = not place or says_same or bool(re.search(place, of_two["note"]))
    return {"case": name, "apart": apart, "check": of_two["verdict"], "wrong": wrong, "placed": is_placed, "note": of_two["note"], "seconds": seconds,
            "others": "; ".join(f"{way}: {found['note']}" for way, found in ways.items() if found["verdict"] == "differs" and found is not of_two)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=lambda text: text.split(","), default=list(CASES))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="truth-") as name:
        packages = thin_project.package("coupled") | thin_project.package("more_couplings")
        folder = thin_project.write(Path(name), **packages, **FILES)
        (folder / "configs/project.yaml").unlink()
        for case in args.cases:
            row = measure(case, folder, args.steps)
            rows.append(row)
            print("{case:32} {apart:8.1e}  {check:10} {wrong:13} {seconds:4.0f} s  {note}".format(**row), flush=True)
    wrong = [row["wrong"] for row in rows]
    placed = [row["placed"] for row in rows if row["check"] == "differs" and CASES[row["case"]][1]]
    print(f"{len(rows)} cases: {wrong.count('false same')} false same, {wrong.count('false differs')} false differs, {wrong.count('failed')} failed; "
          f"{sum(placed)} of {len(placed)} places right")  # fmt: skip
    if args.output:
        with args.output.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
