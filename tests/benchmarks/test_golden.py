"""The golden record: what recipes compute in every way, beside what is stored in tests/golden."""

import copy
from pathlib import Path

import golden
import pytest

from lockstep.machine.world import gpu_count

FIRST = {"mnist": ["single", "logical_2", "resumed"], "module": ["single"]}
RECORD = {"order": [["a", "b"]], "rows": [{"val/loss": 0.5}], "test": {"test/count": 9}, "weights": {"w": "f0"}}


def problems(found: golden.Records) -> list[str]:
    expected = {recipe: golden.stored([recipe], [*ways])[recipe] for recipe, ways in found.items()}
    stored = golden.differences(expected, golden.storable(found), tolerance=golden.TOLERANCE)
    return [*golden.within(found), *stored]


def test_some_ways_of_two_recipes(tmp_path, forked):
    for recipe, ways in FIRST.items():
        assert problems(golden.records(tmp_path / recipe, [recipe], ways)) == []


@pytest.mark.full
@pytest.mark.parametrize("recipe", golden.RECIPES)
def test_every_way_of(recipe, tmp_path, forked):
    found = golden.records(tmp_path / "cpu", [recipe], [*golden.WAYS])
    assert problems(found) == []
    if gpu_count():
        on_gpu = golden.records(tmp_path / "gpu", [recipe], golden.ONE_DEVICE, "gpu")
        assert list(golden.within(on_gpu)) == []
        assert all(record["order"] == found[recipe][way]["order"] for way, record in on_gpu[recipe].items())


@pytest.mark.parametrize(("path", "value"), [
    (("order", 0, 1), "c"), (("rows", 0, "val/loss"), 0.5 + 1e-6), (("test", "test/count"), 10), (("weights", "w"), "f1"), (("rows",), []),
])  # fmt: skip
def test_any_difference_is_told(path, value):
    other = node = copy.deepcopy(RECORD)
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    assert next(golden.differences(RECORD, other)).startswith(path[0])
    assert list(golden.within({"mnist": {"single": RECORD, "resumed": other}}))


def test_rows_are_compared_relatively_and_nan_is_nan():
    nan = float("nan")
    assert list(golden.differences({"a": nan, "b": 0.0}, {"a": nan, "b": 1e-13}, tolerance=golden.TOLERANCE)) == []
    assert list(golden.differences([1e-3], [1e-3 + 5e-10], tolerance=golden.TOLERANCE)) == []
    for expected, found in ((1e-3, 1e-3 + 5e-9), (1e-6, 2e-6), (nan, 1.0), (1.0, nan)):
        assert len(list(golden.differences([expected], [found], tolerance=golden.TOLERANCE))) == 1


def test_of_a_step_that_ran_twice_the_last_counts(tmp_path):
    """And a digest of a step so far is replaced by that of all of it."""
    Path(tmp_path, "order-0.jsonl").write_text('[0, "a"]\n[1, "half"]\n[1, "b"]\n[2, "c"]\n[1, "b"]\n[2, "d"]\n')
    assert golden.order(tmp_path) == [["a", "b", "d"]]
