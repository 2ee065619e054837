"""Invariant 4: each test image counts once, whatever the number of processes, and however few images there are."""

import pytest
from conftest import write_mnist

import lockstep

SIZES, WORLDS = (1, 7, 100, 10_000), (1, 2, 3, 4)
QUICK = [(1, 4), (7, 3), (100, 3)]


@pytest.fixture(scope="module")
def evaluate(tmp_path_factory, cache, forked):
    """Evaluates one run on test sets of any size, under any strategy."""
    folder = tmp_path_factory.mktemp("evaluation")
    for size in SIZES:
        write_mnist(folder / str(size), 64, size)
    common = [f"data.cache_dir={cache}", "trainer.accelerator=cpu"]
    lockstep.train(
        [
            f"runs_dir={folder}/runs",
            "run=a",
            f"data.root={folder}/7",
            "data.batch_size=8",
            "trainer.max_steps=2",
            *common,
        ]
    )
    figures = {}

    def evaluated(size: int, strategy: str, world: int) -> dict:
        if (size, strategy, world) not in figures:
            more = [f"data.root={folder}/{size}", f"strategy={strategy}"] + [f"trainer.devices={world}"] * (world > 1)
            figures[size, strategy, world] = lockstep.evaluate(["run=a", f"runs_dir={folder}/runs", *more, *common])
        return figures[size, strategy, world]

    return evaluated


def assert_counted_once(evaluate, size: int, strategy: str, world: int) -> None:
    alone, figures = evaluate(size, "single", 1), evaluate(size, strategy, world)
    assert (figures["strategy"], figures["world_size"]) == (strategy, world)
    assert figures["test/count"] == size
    assert figures["test/acc"] == pytest.approx(alone["test/acc"], abs=1e-9)
    assert figures["test/loss"] == pytest.approx(alone["test/loss"], rel=1e-6)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(("size", "world"), QUICK)
def test_each_image_counts_once(evaluate, size, strategy, world):
    assert_counted_once(evaluate, size, strategy, world)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(("size", "world"), [(s, w) for s in SIZES for w in WORLDS if (s, w) not in QUICK])
def test_each_image_counts_once_in_every_world(evaluate, size, strategy, world):
    assert_counted_once(evaluate, size, strategy, world)
