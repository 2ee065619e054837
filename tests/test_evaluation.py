"""Invariant 4: each test image counts once, whatever the number of processes, down to one image per process."""

import functools

import pytest
from conftest import write_mnist

import lockstep

SIZES, WORLDS = (4, 7, 100, 10_000), (1, 2, 3, 4)
CASES = [(size, strategy, world) for size in SIZES for strategy in ("ddp", "fsdp") for world in WORLDS]
QUICK = [(4, "ddp", 4)]  # one image per process; tests/test_strategies_agree.py evaluates under fsdp
SLOW = [(7, "fsdp", 3), (100, "ddp", 3), (7, "ddp", 4), (100, "fsdp", 3), (10_000, "ddp", 2), (4, "fsdp", 4)]

pytestmark = pytest.mark.xdist_group("evaluation")


@pytest.fixture(scope="module")
def evaluate(tmp_path_factory, cache, forked):
    """Evaluates one run on test sets of any size, under any strategy."""
    folder = tmp_path_factory.mktemp("evaluation")
    for size in SIZES:
        write_mnist(folder / str(size), 64, size)
    common = [f"data.cache_dir={cache}", "trainer.accelerator=cpu"]
    short = ["loader.batch_size=8", "trainer.max_steps=2", "data.image_size=12"]
    lockstep.train([f"runs_dir={folder}/runs", "run=a", f"data.root={folder}/7", *short, *common])

    @functools.cache
    def evaluated(size: int, strategy: str, world: int) -> dict:
        more = [f"data.root={folder}/{size}", f"strategy={strategy}"] + [f"trainer.devices={world}"] * (world > 1)
        return lockstep.evaluate(["run=a", f"runs_dir={folder}/runs", *more, *common])

    return evaluated


@pytest.mark.parametrize(
    ("size", "strategy", "world"),
    [
        *QUICK,
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
        *(pytest.param(*case, marks=pytest.mark.full) for case in CASES if case not in (*QUICK, *SLOW)),
    ],
)
def test_each_image_counts_once(evaluate, size, strategy, world):
    alone, several = evaluate(size, "single", 1), evaluate(size, strategy, world)
    assert (several["strategy"], several["world_size"], several["test/count"]) == (strategy, world, size)
    assert several["test/acc"] == pytest.approx(alone["test/acc"], abs=1e-9)
    assert several["test/loss"] == pytest.approx(alone["test/loss"], rel=1e-6)
