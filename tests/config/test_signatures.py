"""The arguments of a class that hands `**kwargs` on are those of its base classes too."""

from pathlib import Path

import pytest

from lockstep.config.instantiate import create
from lockstep.config.targets import accepted, parameters
from lockstep.errors import UserError

CLASSES = """
from torch import nn

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


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "src/signed").mkdir(parents=True)
    (tmp_path / "src/signed/__init__.py").write_text(CLASSES)
    (tmp_path / "pyproject.toml").write_text("[tool.lockstep]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "src")


def test_arguments_of_base_classes_are_known_and_offered():
    assert list(parameters("signed.Own")) == ["width", "depth", "gamma"]
    assert accepted("signed.Own", {"width": 3, "classes": 10}) == {"width": 3}
    made = create({"_target_": "signed.Own", "gamma": 1.0, "depth": 2}, "model", width=3)
    assert (made.width, made.depth, made.gamma) == (3, 2, 1.0)


def test_a_class_may_give_an_argument_of_its_base_class_itself():
    assert create({"_target_": "signed.Narrow", "depth": 2}, "model").width == 1


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ({"depht": 2}, r"model.depht is not an argument of signed.Own \(did you mean depth\?\)"),
        ({"depth": "two"}, r"model.depth=two is not possible; it takes int"),
    ],
)
def test_mistakes_in_keys_of_base_classes_are_named(node, said):
    with pytest.raises(UserError, match=said):
        create({"_target_": "signed.Own", "width": 1, **node}, "model")


def test_a_class_that_takes_anything_gets_it():
    assert create({"_target_": "signed.Open", "width": 1, "other": 2}, "model").rest == {"other": 2}
