"""Configs that an earlier version saved: a renamed key keeps its value, whoever it belongs to."""

from pathlib import Path

import pytest

from lockstep.config.compose import compose_config, recorded_overrides
from lockstep.config.draft import Draft, values_of
from lockstep.config.formatting import plain
from lockstep.config.renames import LOADER_KEYS, overrides_of, with_new_keys
from lockstep.errors import UserError
from lockstep.launch.resuming import with_new_defaults

CLASSES = """
from lightning.pytorch import LightningDataModule
from project.data import Mnist

class Own(LightningDataModule):
    def __init__(self, batch_size=1, val_fraction=0.5, num_workers=9):
        super().__init__()

class Digits(Mnist):
    pass
"""
LOADER = {"batch_size": 7, "val_fraction": 0.2, "num_workers": 0}


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """The config of a run of 0.1 with this class of data and these keys of it."""
    (tmp_path / "pyproject.toml").write_text("[tool.lockstep]\n")
    (tmp_path / "src").mkdir()
    (tmp_path / "src/of_0_1.py").write_text(CLASSES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "src")

    def config(target: str, **data: object) -> dict:
        tree = plain(compose_config("train", ["run=a"]))
        del tree["loader"]
        return tree | {"data": {"_target_": target, **data}}

    return config


@pytest.mark.parametrize("target", ["lockstep.data.Mnist", "of_0_1.Digits"])
def test_the_keys_of_a_data_set_become_those_of_the_loader(saved, target):
    for given in (LOADER, {"batch_size": 7, "repeats": 2}):  # whatever an older version had of them
        draft = with_new_defaults(Draft.of_values(saved(target, root="here", **given)))
        assert {key: draft.get(f"loader.{key}") for key in given} == given
        moved = target.replace("lockstep.data", "project.data")  # a class that is the template's now
        assert draft.get("data") == {"_target_": moved, "root": "here"}
        assert draft.has("loader.on_device")  # new: its default
        assert values_of(draft)[1] == []


def test_those_of_a_data_module_are_its_arguments(saved):
    draft = with_new_defaults(Draft.of_values(saved("of_0_1.Own", **LOADER)))
    assert draft.get("data") == {"_target_": "of_0_1.Own", **LOADER}
    assert draft.get("loader") == plain(compose_config("train", []).loader)


def test_a_config_of_today_is_left_as_it_is():
    tree = plain(compose_config("train", ["+data.batch_size=3"]))
    assert with_new_keys(tree) == tree
    assert {*tree["loader"]} == {*LOADER_KEYS}


def test_overrides_that_a_report_keeps_are_told_under_the_keys_of_today():
    assert overrides_of({"overrides": "data.batch_size=3 'data.mean=[0.1, 0.2]'"}) == (
        "loader.batch_size=3",
        "data.mean=[0.1, 0.2]",
    )
    assert (overrides_of({"overrides": ""}), overrides_of({})) == ((), None)
    assert recorded_overrides(["optim.lr=2", "run=a", "resume=auto"], ["optim.lr=1", "seed=3"]) == (
        "seed=3",
        "optim.lr=2",
    )


def test_a_value_that_is_not_accepted_any_more_is_told(saved, tmp_path):
    from lockstep.checkpoints.finding import Checkpoint
    from lockstep.launch.resuming import config_of

    config = saved("lockstep.data.Mnist", **LOADER) | {"seed": -1}
    with pytest.raises(UserError, match=r"seed=-1 is invalid"):
        config_of(Checkpoint.parse(Path("a.ckpt"), {"config": config, "state_dict": {}}))
