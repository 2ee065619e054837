"""What the benchmarks share."""

import argparse
import sys

import measuring
import pytest


def test_names_that_an_argument_does_not_take_are_refused():
    assert measuring.some_of("abc")("a,c") == ["a", "c"]
    with pytest.raises(argparse.ArgumentTypeError, match="d, e is unknown; use some of a,b,c"):
        measuring.some_of("abc")("e,a,d")


def test_ways_take_turns_and_the_first_rounds_may_not_count():
    calls = []
    found = measuring.in_turns(
        {name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}, 2, warm_up=1
    )
    assert calls == ["a", "b"] * 3
    assert found == {"a": [3, 5], "b": [4, 6]}


def test_a_table_says_how_it_was_made(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/mine/benchmarks/costs.py", "exact", "--only", "ResNet-18 at 32 pixels"])
    assert measuring.made_by("jax 1.0").startswith(
        "Made by `python benchmarks/costs.py exact --only 'ResNet-18 at 32 pixels'` with python"
    )
    assert "jax 1.0, on " in measuring.made_by("jax 1.0")
