"""Modules and data modules that Lightning ships as demos, unchanged: two processes find the weights of one, and a crash is not seen."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import thin_project
import torch
from in_process import Crash, state
from theirs import ACCUMULATED, CASES, SHARDED, TWO, Case, words

import lockstep

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings(
        "ignore:You passed in a `.*_dataloader` but have no",
        "ignore:You defined a `validation_step` but have no",
        "ignore:Be aware that when using `ckpt_path`",
        "ignore:Trying to infer the `batch_size`",
        "ignore:.*LeafSpec",
        "ignore:enable_nested_tensor is True",
    ),
]
CRASH = 15  # of 20 steps, in the second epoch; the last checkpoint has 12
WITHOUT_ACCUMULATION = "Manual"  # optimization, in the name of a case
DEMOS = [pytest.param(case, id=case.name) for case in CASES if not case.needs]
PROJECT = "[project]\nname = 'bouquet'\n\n[tool.lockstep]\npackages = ['lightning']\n"


@pytest.fixture(scope="module", autouse=True)
def project(tmp_path_factory) -> Iterator[Path]:
    files = {"pyproject.toml": PROJECT, "data/wikitext-2.txt": words()}
    with thin_project.entered(tmp_path_factory.mktemp("project"), "bouquet", **files) as root:
        yield root


def train(case: Case, run: str, *more: str) -> dict[str, torch.Tensor]:
    """The weights of its last checkpoint."""
    lockstep.train([*case.options(*more), f"run={run}"])
    return state(f"{run}/checkpoints/last.ckpt")["state_dict"]


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    a, b = (torch.cat([each.double().flatten() for each in weights.values()]) for weights in (found, expected))
    return float((a - b).norm() / b.norm())


@pytest.fixture
def run(request) -> str:
    return "".join(letter for letter in request.node.name if letter.isalnum())


@pytest.mark.parametrize("case", [each for each in DEMOS if not each.values[0].differs])
def test_two_processes_and_accumulated_steps_find_the_weights_of_one(case, run, forked):
    single = train(case, run, "strategy=single")
    ways = {"ddp": TWO, "fsdp": SHARDED, "accumulated": ("strategy=single", *ACCUMULATED)}
    for name, more in ways.items():
        if name != "accumulated" or WITHOUT_ACCUMULATION not in case.name:
            assert difference(train(case, f"{run}-{name}", *more), single) < 1e-5, name


@pytest.mark.parametrize("case", [each for each in DEMOS if "state_dict" not in each.values[0].differs])
def test_a_crash_is_not_seen(case, run, crash_at):
    whole = train(case, run, "strategy=single")
    crash_at(CRASH)
    with pytest.raises(Crash):
        train(case, f"{run}-crash", "strategy=single")
    crash_at(-1)
    found = train(case, f"{run}-crash", "strategy=single", "resume=auto")
    assert list(found) == list(whole)
    assert all(torch.equal(found[name], whole[name]) for name in whole)
