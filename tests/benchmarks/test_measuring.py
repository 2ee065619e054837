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
    ways = {name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}
    assert measuring.in_turns(ways, 2, warm_up=1) == {"a": [3, 5], "b": [4, 6]}
    assert calls == ["a", "b"] * 3


def test_a_table_says_how_it_was_made(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/mine/benchmarks/costs.py", "exact", "--rounds", "2"])
    measuring.show("a table", "jax 1.0")
    made, _, table = capsys.readouterr().out.splitlines()
    assert made.startswith("Made by `python benchmarks/costs.py exact --rounds 2` with python")
    assert ", jax 1.0, on " in made and table == "a table"
