"""What `lockstep check` says of many networks, losses and data sets, beside what their weights show.

python benchmarks/check_truth.py [--cases masked,queue] [--steps 5] [--output truth.csv] [--check-only]

The truth is measured without the check: the command trains on one process and on two (ddp), in float64, and the weights after the same steps are
compared as one vector. A difference below 1e-10 is rounding: "same". Prints a line for each case, then how often the check said "same" or
"differs" wrongly, and whether the name that it should give is in the place that it names. `--check-only` leaves the truth out, to compare the
verdicts of several times. Cases of a library that is not installed are left out.

Each command runs in a process that is forked from one that has imported everything.
"""

import argparse
import csv
import importlib.util
import json
import multiprocessing
import os
import re
import runpy
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
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
# LightningModules of check_cases.py: the library that each needs, other keys, and the place.
MODULES = {
    "Langevin": ("", "", ""),
    "GradientNoise": ("", "", ""),
    "InputNoise": ("", "", "InputNoise"),
    "MixedUp": ("", "", "MixedUp"),
    "OfRank": ("", "", "OfRank"),
    "LaterOfRank": ("", "", "LaterOfRank"),
    "OfWorldSize": ("", "", "OfWorldSize"),
    "Carried": ("", "", "Carried|GRU"),
    "Counted": ("", "", ""),
    "CentredByParameter": ("", "", "CentredByParameter|center"),
    "TimeFirst": ("", "", "TimeFirst|Dropout"),
    "OwnGenerator": ("", "", "NoisySamples|samples"),
    "Teacher": ("", "", ""),
    "ByHand": ("", "", ""),
    "Scheduled": ("", "", ""),
    "Bert": ("transformers", "", ""),
    "BertAttention": ("transformers", "", "[Aa]ttention"),
    "TimmVit": ("timm", "", ""),
    "TorchvisionResNet": ("torchvision", "", "[Nn]orm"),
    "TorchvisionVit": ("torchvision", "", "[Aa]ttention|Encoder"),
    "XTransformer": ("x_transformers", "", ""),
    "SimpleVit": ("vit_pytorch", "", ""),
    "SegmentationUnet": ("segmentation_models_pytorch", "trainer.sync_batchnorm=true", ""),
    "MonaiUnet": ("monai", "", ""),
    "Triplets": ("pytorch_metric_learning", "", "Triplets"),
    "KorniaAugmented": ("kornia", "", "KorniaAugmented"),
    "Diffusion": ("diffusers", "", "Diffusion"),
    "Contrasted": ("lightly", "", "Contrasted"),
    "DenseGraph": ("torch_geometric", "", ""),
}
SHORT = ["optim=sgd", "optim.lr=0.05", "loader.batch_size=16", "trainer.accelerator=cpu"]
OWN = ["task=lightning_module", "data=none", "trainer.accelerator=cpu", "trainer.max_epochs=1"]
FILES = {
    "configs/model/net.yaml": "_target_: coupled.Net\nname: net\n",
    "configs/task/fit.yaml": "_target_: coupled.Fit\nname: fit\nmonitor: null\nmode: min\n",
    "configs/data/padded.yaml": "defaults: [own]\n_target_: coupled.Padded\nsamples: Series\n",
}


def cases() -> dict[str, tuple[list[str], str]]:
    """The overrides and the place of each case."""
    found = {}
    for name, (keys, place) in CASES.items():
        package, net, task, *others = keys.split()
        chosen = {"model=net model": net, "task=fit task": task, "data=padded data": "Padded"}
        parts = [f"{part}._target_={package}.{each}" for part, each in chosen.items()]
        found[name] = [*" ".join(parts).split(), *others, *SHORT], place
    for name, (library, keys, place) in MODULES.items():
        if not library or importlib.util.find_spec(library):
            found[name] = [f"task._target_=truth_cases.{name}", *OWN, *keys.split()], place
    return found


def forked(function: Callable[..., None], *args: Any) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=function, args=args)
    process.start()
    return process  # type: ignore[return-value]


def train(folder: Path, overrides: list[str], env: dict[str, str]) -> None:
    import torch

    os.chdir(folder)
    os.environ.update(env)
    with (folder / f"log-{os.getpid()}").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    sys.argv[:] = ["train.py", *overrides]
    sys.path.insert(0, str(folder))
    runpy.run_path("train.py", run_name="__main__")


def truth(folder: Path, overrides: list[str], steps: int) -> float:
    """How far the weights of one process and of two are apart after the steps; of float32 where float64 fails."""
    import torch

    from lockstep.launch import local
    from lockstep.machine.world import World

    for precision in ("64-true", "32-true"):
        states = []
        for world, way in {
            1: ["strategy=single", "trainer.devices=1"],
            2: ["strategy=ddp", "trainer.devices=2"],
        }.items():
            run = f"truth-{world}-{precision}-{time.time_ns()}"
            length = [
                f"run={run}",
                f"trainer.precision={precision}",
                f"trainer.max_steps={steps}",
                "trainer.enable_progress_bar=false",
            ]
            with local.reserve_port() as port:
                shared = {"TORCHELASTIC_RUN_ID": "truth"} if world > 1 else {}
                places = [local.environment(World("cpu", world, 1, "", rank), port) | shared for rank in range(world)]
                processes = [forked(train, folder, [*overrides, *way, *length], env) for env in places]
                for process in processes:
                    process.join()
            path = folder / "runs" / run / "checkpoints/last.ckpt"
            if not any(process.exitcode for process in processes):
                state = torch.load(path, weights_only=True)["state_dict"]
                states.append(torch.cat([value.double().flatten() for value in state.values()]))
        if len(states) == 2:
            return float((states[0] - states[1]).norm() / states[0].norm())
    return float("nan")


def check(folder: Path, overrides: list[str], steps: int, found: Path) -> None:
    from lockstep.config import project
    from lockstep.extras.check import measure

    os.chdir(folder)
    project.enter(folder)
    try:
        found.write_text(json.dumps(asdict(measure(overrides, steps=steps))), encoding="utf-8")
    except BaseException as e:
        found.write_text(json.dumps({"error": f"{type(e).__name__}: {e}"[-400:]}), encoding="utf-8")


def measured(name: str, folder: Path, steps: int, *, check_only: bool) -> dict[str, Any]:
    (overrides, place), began_s = cases()[name], time.perf_counter()
    file = folder / "found.json"
    forked(check, folder, overrides, steps, file).join()
    seconds, found = time.perf_counter() - began_s, json.loads(file.read_text(encoding="utf-8"))
    apart = float("nan") if check_only else truth(folder, overrides, steps)
    row = {
        "case": name,
        "apart": apart,
        "seconds": seconds,
        "wrong": "",
        "placed": True,
        "notes": "; ".join(found.get("notes", [])),
    }
    if "error" in found:
        return row | {"check": "failed", "wrong": "failed", "note": found["error"]}
    ways = {way["way"]: way for way in found["ways"]}
    of_two = ways["ddp on two processes"]
    is_same, says_same = apart < SAME, of_two["verdict"] not in ("differs", "failed")
    if not check_only and is_same != says_same:
        row["wrong"] = "false same" if says_same else "false differs"
    row["placed"] = not place or says_same or bool(re.search(place, of_two["note"]))
    others = "; ".join(
        f"{way}: {each['note']}"
        for way, each in ways.items()
        if each["verdict"] in ("differs", "failed") and each is not of_two
    )
    verdicts = " ".join(f"{way}={each['verdict']}" for way, each in ways.items())
    return row | {"check": of_two["verdict"], "note": of_two["note"], "others": others, "verdicts": verdicts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=lambda text: text.split(","))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--check-only", action="store_true")
    args = parser.parse_args()
    from lockstep import build  # noqa: F401  # before processes are forked
    from lockstep.extras import page  # noqa: F401

    rows, known = [], cases()
    with tempfile.TemporaryDirectory(prefix="truth-") as name:
        packages = thin_project.package("coupled") | thin_project.package("more_couplings")
        packages["src/truth_cases/__init__.py"] = Path(__file__).with_name("check_cases.py").read_text(encoding="utf-8")
        folder = thin_project.write(Path(name).resolve(), **packages, **FILES)
        (folder / "configs/project.yaml").unlink()
        for case in args.cases or known:
            row = measured(case, folder, args.steps, check_only=args.check_only)
            rows.append(row)
            print(
                "{case:32} {apart:8.1e}  {check:10} {wrong:13} {seconds:4.0f} s  {note} {notes}".format(**row),
                flush=True,
            )
    wrong = [row["wrong"] for row in rows]
    placed = [row["placed"] for row in rows if row["check"] in ("differs", "failed") and known[row["case"]][1]]
    print(f"{len(rows)} cases: {wrong.count('false same')} false same, {wrong.count('false differs')} false differs, {wrong.count('failed')} failed; "
          f"{sum(placed)} of {len(placed)} places right")  # fmt: skip
    if args.output:
        with args.output.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
