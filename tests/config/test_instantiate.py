"""Keys of a component of one's own are checked against its signature; nothing is written before they are right."""

import sys
from collections.abc import Iterator

import pytest
import thin_project

from lockstep.config.instantiate import create
from lockstep.config.targets import accepted, parameters
from lockstep.errors import UserError

OWN = """from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn


class Net(nn.Module):
    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        *,
        width: int,
        rate: float = 0.5,
        kind: Literal["wide", "deep"] = "wide",
        layers: Sequence[int] | None = None,
        folder: str | Path = "here",
        odd: "nothing.that.exists" = None,
        anything=None,
    ) -> None:
        super().__init__()
        self.given = (in_channels, num_classes, width, rate, kind, layers, folder, anything)


def net(**keys):
    return Net(1, 10, **keys)


def half(width):
    return 1 / width  # its bug


class Base(nn.Module):
    def __init__(self, *, width: int, depth: int = 1) -> None:
        super().__init__()
        self.width, self.depth = width, depth

class Middle(Base):
    pass

class Own(Middle):
    def __init__(self, *, gamma: float = 2.0, **given: object) -> None:
        super().__init__(**given)
        self.gamma = gamma

class Narrow(Base):
    def __init__(self, **given: object) -> None:
        super().__init__(width=1, **given)

class Open(nn.Module):
    def __init__(self, *, width: int, **rest: object) -> None:
        super().__init__()
        self.rest = rest
"""
OFFERED = {"in_channels": 1, "num_classes": 10}


@pytest.fixture(autouse=True)
def package(tmp_path, monkeypatch) -> Iterator[None]:
    """A project with a package `mine`, which configs may name."""
    root = thin_project.write(tmp_path / "mine_alone", **{"src/mine/__init__.py": OWN})
    monkeypatch.syspath_prepend(root / "src")
    monkeypatch.chdir(root)
    yield
    sys.modules.pop("mine", None)


def made(**keys):
    return create({"_target_": "mine.Net", "width": 3, **keys}, "model", **OFFERED)


def told(target: str, **keys) -> tuple[str, ...]:
    with pytest.raises(UserError) as error:
        create({"_target_": target, **keys}, "model", **OFFERED)
    return error.value.problems


def test_keys_that_fit_make_the_object():
    given = {"rate": 1, "kind": "deep", "layers": [1, 2], "folder": "there", "odd": 3, "anything": {"a": None}}
    assert made(**given).given == (1, 10, 3, 1, "deep", [1, 2], "there", {"a": None})
    assert made(layers=None).given[5] is None


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"witdh": 4}, ["model.witdh is not an argument of mine.Net (did you mean width?)", "rate, kind, layers"]),
        ({"width": 2.5}, ["model.width=2.5 is invalid; expected int."]),
        ({"width": "3"}, ["model.width=3 is invalid; expected int."]),  # a text of digits is a text
        ({"width": True}, ["model.width=true is invalid"]),
        ({"rate": "fast"}, ["model.rate=fast", "float"]),
        ({"kind": "high"}, ["model.kind=high", "Literal['wide', 'deep']"]),
        ({"layers": [1, "two"]}, ["model.layers=[1, 'two']", "Sequence[int] | None"]),
        ({"folder": 3}, ["model.folder=3", "str | pathlib"]),
    ],
    ids=str,
)
def test_a_key_that_does_not_fit_is_named_with_what_does(keys, parts):
    (problem,) = told("mine.Net", **{"width": 3, **keys})
    for part in parts:
        assert part in problem


def test_all_problems_of_a_node_are_told_at_once():
    assert [problem.split()[0] for problem in told("mine.Net", rate="fast", witdh=4)] == [
        "model.rate=fast",
        "model.witdh",
        "model.width",
    ]
    assert "model.width is missing: mine.Net needs it. Set +model.width=<value>." in told("mine.Net")[0]


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ("mine.Nte", ["model._target_=mine.Nte does not exist", "did you mean Net?"]),
        ("mine.nets.Net", ["model._target_=mine.nets.Net does not exist", "mine has no nets"]),
        ("os.system", ["model._target_=os.system may not be named", "lockstep, torch.nn", "mine"]),
        ("???", ["model._target_ is missing; it names the class"]),
    ],
)
def test_a_class_that_is_not_there_or_not_trusted_is_named(target, parts):
    (problem,) = told(target)
    for part in parts:
        assert part in problem


def test_an_argument_that_a_function_hands_on_is_checked_by_the_one_that_gets_it():
    assert create({"_target_": "mine.net", "width": 3}, "model").given[2] == 3
    with pytest.raises(UserError, match=r"model\.witdh is not an argument of mine\.net"):
        create({"_target_": "mine.net", "width": 3, "witdh": 4}, "model")


def test_an_error_inside_a_component_is_its_own():
    with pytest.raises(ZeroDivisionError):
        create({"_target_": "mine.half", "width": 0}, "model")
    with pytest.raises(TypeError, match="unsupported operand"):
        create({"_target_": "mine.half", "width": "wide"}, "model")


# --- A class that hands `**kwargs` on takes the arguments of its base classes too ---


def test_arguments_of_base_classes_are_known_and_offered():
    assert list(parameters("mine.Own")) == ["width", "depth", "gamma"]
    assert accepted("mine.Own", {"width": 3, "classes": 10}) == {"width": 3}
    made = create({"_target_": "mine.Own", "gamma": 1.0, "depth": 2}, "model", width=3)
    assert (made.width, made.depth, made.gamma) == (3, 2, 1.0)


def test_a_class_may_give_an_argument_of_its_base_class_itself():
    assert create({"_target_": "mine.Narrow", "depth": 2}, "model").width == 1


def test_mistakes_in_keys_of_base_classes_are_named():
    misspelt, wrong = told("mine.Own", width=1, depht=2, depth="two")
    assert misspelt.startswith("model.depht is not an argument of mine.Own (did you mean depth?)")
    assert wrong.startswith("model.depth=two is invalid; expected int")


def test_a_class_that_takes_anything_gets_it():
    assert create({"_target_": "mine.Open", "width": 1, "other": 2}, "model").rest == {"other": 2}
