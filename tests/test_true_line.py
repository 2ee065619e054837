"""`lockstep check` beside what is known of its cases."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import thin_project
import torch

import lockstep
from lockstep.errors import RunFailed
from lockstep.extras import comparison
from lockstep.extras.check import compare

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


def test_a_loss_between_samples_needs_one_padding(project):
    chosen = "model=net model._target_=coupled.Net task=fit task._target_=coupled.Announced data=padded"
    with pytest.raises(RunFailed, match="exit code 2"):  # each process refuses it
        lockstep.train([*chosen.split(), *SHORT, "run=padded", "strategy=ddp", "trainer.devices=2"])
    assert not Path("runs/padded").exists()


@pytest.mark.parametrize("dim", [0, 1])
def test_the_records_of_parts_are_compared_with_that_of_the_whole(dim, monkeypatch):
    monkeypatch.setattr(comparison, "AT_ONCE", 24)
    whole = torch.randn(6, 1, 1, 12, dtype=torch.float64).movedim(3, 1)
    parts = [[comparison.sketch(part)] for part in whole.split(2, dim)]
    assert not compare.differ([comparison.sketch(whole)], parts, 1e-12)
    whole[3, 2] += 1e-3
    assert compare.differ([comparison.sketch(whole)], parts, 1e-12)


def test_the_distance_of_records_is_near_that_of_the_weights():
    one, noise = torch.randn(400, 300, dtype=torch.float64), torch.randn(400, 300, dtype=torch.float64)
    pair = [{"w": comparison.sketch(weight, 1)} for weight in (one, one + 1e-6 * noise)]
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
