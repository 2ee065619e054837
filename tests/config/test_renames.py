"""Configs that an earlier version saved: a class that moved is found."""

from lockstep.config.compose import recorded_overrides
from lockstep.config.renames import MOVED, moved, with_moved
from lockstep.config.targets import locate
from lockstep.run import overrides_of


def test_a_class_that_moved_is_found_wherever_a_config_names_it():
    tree = {
        "task": {"_target_": "lockstep.tasks.Classification", "metrics": {}},
        "augment": {"flip": {"_target_": "lockstep.augment.Flip", "p": 0.5}},
        "data": {"_target_": "project.data.Mnist", "transforms": [{"_target_": "lockstep.augment.Shift"}, 3]},
    }
    found = with_moved(tree)
    assert found["task"]["_target_"] == "lockstep.kit.tasks.Classification"
    assert found["augment"]["flip"] == {"_target_": "lockstep.kit.augment.Flip", "p": 0.5}
    assert found["data"]["transforms"] == [{"_target_": "lockstep.kit.augment.Shift"}, 3]
    for old in MOVED:
        assert locate(moved(old).rstrip("."))
    for old in (
        "augment.Cutmix",
        "tasks.Regression",
        "data.Arrays",
        "training.schedules.step",
    ):
        assert callable(locate(moved(f"lockstep.{old}"))), old
    assert moved("lockstep.data.FolderOfMine") == "lockstep.data.FolderOfMine"


def test_overrides_that_a_report_keeps():
    assert overrides_of({"overrides": "seed=3 'data.mean=[0.1, 0.2]'"}) == ("seed=3", "data.mean=[0.1, 0.2]")
    assert (overrides_of({"overrides": ""}), overrides_of({})) == ((), None)
    assert recorded_overrides(["optim.lr=2", "run=a", "resume=auto"], ["optim.lr=1", "seed=3"]) == (
        "seed=3",
        "optim.lr=2",
    )
