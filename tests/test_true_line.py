"""The line about the result beside what it is about: the weights after ten steps in one process and in two."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import thin_project
import torch

import lockstep
from lockstep.errors import RunFailed
from lockstep.extras.check import compare, record
from lockstep.training.invariance import DIFFERS, ROUNDING, SAME_BITS

SAME = re.escape(ROUNDING) + r"; tested with \d+ training samples"
WHY = DIFFERS.format("")
FREEZE = "callbacks=[default,freeze] callbacks.freeze.parameters"
CASES = {
    "plain": ("Net Fit", SAME),
    "dropout on padded batches": ("DroppedNet Fit", SAME),
    "masked mean": ("Net OfKnown", rf"{WHY}the result of OfKnown .* depends on the other samples"),
    "a loss between samples": ("Net Announced data.samples=Fixed", SAME),
    "batch norm": ("NormedNet Fit", rf"{WHY}batch normalisation"),
    "batch norm from the second epoch on": (f"NormedNet Fit {FREEZE}=[norm.*] callbacks.freeze.unfreeze=[[*,1]]", rf"{WHY}batch normalisation"),
    "batch norm that stays frozen": (f"NormedNet Fit {FREEZE}=[norm.*]", SAME),
    "a gradient penalty of each sample": ("Net Smooth data.samples=Fixed", SAME),
}  # fmt: skip
QUICK = ("masked mean",)
SHORT = [
    "trainer.max_steps=10", "trainer.precision=32-true", "optim=sgd", "optim.lr=0.05", "loader.batch_size=16",
    "trainer.accelerator=cpu", "trainer.limit_test_batches=1",
]  # fmt: skip
MODEL = "_target_: coupled.Net\nname: net\n"
TASK = "_target_: coupled.Fit\nname: fit\nmonitor: null\nmode: min\n"
DATA = "defaults: [own]\n_target_: coupled.Padded\nsamples: Series\n"


@pytest.fixture(scope="module")
def project(tmp_path_factory, forked):
    files = {"configs/model/net.yaml": MODEL, "configs/task/fit.yaml": TASK, "configs/data/padded.yaml": DATA}
    packages = thin_project.package("coupled")
    with thin_project.entered(tmp_path_factory.mktemp("project"), "coupled", **packages, **files) as root:
        yield root


def trained(keys: str, name: str, *more: str) -> tuple[dict, torch.Tensor]:
    """The report, and all weights as one vector."""
    net, task, *others = keys.split()
    chosen = {"model=net model": net, "task=fit task": task, "data=padded data": "Padded"}
    parts = [f"{part}._target_=coupled.{name}" for part, name in chosen.items()]
    report = lockstep.train([*" ".join(parts).split(), *others, *SHORT, f"run={name}", *more])
    checkpoint = torch.load(Path("runs", name, "checkpoints/last.ckpt"), weights_only=True)
    return report, torch.cat([value.double().flatten() for value in checkpoint["state_dict"].values()])


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_the_line_says_what_two_processes_show(name, project):
    keys, line = CASES[name]
    try:
        report, one = trained(keys, "one")
        of_two, two = trained(keys, "two", "strategy=ddp", "trainer.devices=2")
    finally:
        shutil.rmtree("runs", ignore_errors=True)
    apart = float((one - two).norm() / one.norm())
    print(f"{name}: {apart:.1e} apart; {report['across_processes']}")  # shown by -rP
    assert re.fullmatch(f"{line}.*", report["across_processes"])
    assert re.fullmatch(f"{line}.*", of_two["across_processes"])
    assert apart < 1e-6 if report["across_processes"].startswith(ROUNDING) else apart > 1e-5


def test_a_loss_between_samples_needs_one_padding(project):
    with pytest.raises(RunFailed, match="exit code 2"):  # each process refuses it
        trained("Net Announced", "padded", "strategy=ddp", "trainer.devices=2")


@pytest.mark.slow
def test_an_evaluation_repeats_its_random_numbers(project):
    """At the end of a run and alone; with logical ranks on any number of processes."""
    try:
        report, _ = trained("SampledNet Fit", "drawn")
        assert re.search(
            "Evaluation metrics depend on the number of processes, because SampledNet .* draws",
            report["across_processes"],
        )
        assert lockstep.evaluate(["run=drawn", "trainer.accelerator=cpu"])["test/loss"] == report["test/loss"]
        exact = "MaskedNet Fit exact.logical_ranks=2"
        losses = {
            name: trained(exact, name, *more)[0]
            for name, more in {"one": [], "two": ["strategy=ddp", "trainer.devices=2"]}.items()
        }
        assert losses["one"]["across_processes"].startswith(f"{SAME_BITS}; tested with ")
        assert losses["one"]["test/loss"] == losses["two"]["test/loss"]
        assert losses["one"]["val/loss"] == losses["two"]["val/loss"]
    finally:
        shutil.rmtree("runs", ignore_errors=True)


# --- `lockstep check` ---


@pytest.mark.parametrize("dim", [0, 1])
def test_the_records_of_parts_are_compared_with_that_of_the_whole(dim):
    whole = torch.randn(6, 4, 3, dtype=torch.float64)
    parts = [[record.sketch(part)] for part in whole.split(2, dim)]
    assert not compare.differ([record.sketch(whole)], parts, 1e-12)
    whole[3, 2, 1] += 1e-3
    assert compare.differ([record.sketch(whole)], parts, 1e-12)


def test_the_distance_of_records_is_near_that_of_the_weights():
    one, noise = torch.randn(400, 300, dtype=torch.float64), torch.randn(400, 300, dtype=torch.float64)
    pair = [{"w": record.sketch(weight, 1)} for weight in (one, one + 1e-6 * noise)]
    assert compare.distance(*pair, ["w"]) == pytest.approx(1e-6, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "place"),
    [
        ("DroppedNet Fit", ""),
        ("FunctionalNet Fit", r"FunctionalNet \(src/"),
        ("Net Compared", r"the loss: Compared \(src/"),
    ],
)
def test_a_check_names_the_place_where_two_ways_part(project, keys, place):
    net, task = keys.split()
    chosen = [f"model=net model._target_=coupled.{net}", f"task=fit task._target_=coupled.{task} data=padded"]
    command = [sys.executable, "-m", "lockstep", "check", "--json", *" ".join(chosen).split(), *SHORT]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == bool(place), done.stderr
    ways = {way.pop("way"): way for way in json.loads(done.stdout)["ways"]}
    for name in ("one process again", "two workers", "killed and resumed", "logical ranks on two processes"):
        assert ways[name]["verdict"] == "same bits"
    for name in ("accumulation", "ddp on two processes", "fsdp on two processes"):
        assert ways[name]["verdict"] == ("differs" if place else "rounding"), ways[name]
    assert re.search(place, ways["ddp on two processes"]["note"])
