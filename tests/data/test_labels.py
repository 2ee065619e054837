"""Targets stand for names: parts and checkpoints are matched by name, and targets without a name are rejected before training."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from in_process import SMALL, state
from pictures import write_pictures
from shipped_data import divided, stand_in_trainer
from torch.utils.data import ConcatDataset, StackDataset, TensorDataset

import lockstep
from lockstep import Arrays, DataSet, UserError, build
from lockstep.extras.adapters import TorchDataset
from lockstep.extras.tables import columns_of_module
from lockstep.kit.datamodule import DataModule
from lockstep.kit.tasks import Classification, LanguageModel, Multilabel, Regression, Segmentation

ANIMALS, PRICE = {"classes": ["cat", "dog", "wolf"]}, {"targets": ["price"]}
REORDERED, MORE = {"classes": ["wolf", "cat", "dog"]}, {"classes": ["ant", "wolf", "cat", "cow", "dog"]}
OwnLoss = type("OwnLoss", (), {"loss": None})
Soft, Free = type("Soft", (OwnLoss, Classification), {}), type("Free", (Classification,), {"needs": ()})


def arrays(target, metadata=ANIMALS, dtype=None):
    data, target = DataSet(), np.array(target, dtype)
    data.train = data.val = data.test = Arrays(input=np.zeros((len(target), 2), np.float32), target=target)
    data.metadata = metadata
    return data


def held(read, targets=None, classes=None):
    """A Dataset whose targets are known once they are read. `targets`: those it seems to have."""
    dataset = StackDataset(input=torch.zeros(len(read), 2), target=read)
    dataset.targets, dataset.classes = targets, classes
    return dataset


def wrapped(train, test=None, **options):
    return TorchDataset(train=train, test=test or train, **options)


def ready(data, task, checkpoint=None):
    """What the commands do with the data before the network is made."""
    data.prepare()
    module = DataModule(data, batch_size=1, eval_batch_size=1)
    module.targets.match(checkpoint or {}, "runs/a")
    task.check_metadata({"sequence_length": 4, **module.metadata})
    module.trainer = SimpleNamespace(lightning_module=task)
    module.setup("fit")
    return module


@pytest.mark.parametrize(("data", "task", "checkpoint", "told"), [
    (arrays([0, 1, 0.5]), Classification, None, "sample 2 of the train part is 0.5; expected one class number from 0 to 2. Correct"),
    (arrays(np.eye(3, dtype=int)), Classification, None, r"is int64 of shape \(3,\); expected .* for one-hot rows, use argmax"),
    (arrays([[[0, 255]], [[0, 9]]]), Segmentation, None, "sample 1 .* is 9; expected a class number for each pixel from 0 to 2, or 255"),
    (arrays([[0, 1, 1], [2, 0, 1]], {"labels": ["a", "b", "c"]}), Multilabel, None, "sample 1 .* is 2; expected 0 or 1 for each label"),
    (arrays([[0, -100], [3, 0]], {"vocabulary": [*"abc"]}), LanguageModel, None, "sample 1 .* is 3; expected a token number .* from 0 to 2, or -100"),
    (arrays([0.5, -1, np.nan], PRICE), Regression, None, "sample 2 of the train part is nan; expected finite numbers"),
    (wrapped(held([0, 1], classes=["a", "b"]), TensorDataset(torch.zeros(2, 2), torch.tensor([1, -1]))), Classification, None, "1 of the test part is -1"),
    (arrays([0, 1, 2, 4]), Classification, MORE, "sample 3 of the train part is 4; expected .* from 0 to 2"),
    (wrapped(held([5, 70] * 5, [5, 70] * 5, {"a": 5, "b": 70})), Classification, None, "needs classes .* of a torch Dataset are data.classes; those of a table"),
    # names that cannot be matched
    (wrapped(held([0, 1], classes=["a", "b"]), held([0, 1], classes=["c", "b"])), Classification, None, "the test part .* has the classes c, b, but .* has a, b: c"),
    (wrapped(ConcatDataset([held([0, 1], classes=[*names]) for names in ("ab", "ba")])), Classification, None, "joins Datasets with the classes a, b and b, a"),
    (arrays([0, 1], {"classes": ["a", "a", "b"]}), Classification, {"classes": ["b", "a", "a"]}, "but runs/a has b, a, a: a, a, b cannot be matched"),
    (arrays([0, 1], {**PRICE, "inputs": ["w", "h"]}), Regression, {"inputs": ["h", "w"]}, "inputs w, h, but runs/a has h, w"),
    (arrays([0, 1], PRICE), Regression, {"targets": ["price", "size"]}, "targets price, but runs/a has price, size: price cannot"),
])  # fmt: skip
def test_targets_without_a_name_are_rejected_before_training(data, task, checkpoint, told):
    with pytest.raises(UserError, match=told):
        ready(data, task, checkpoint)


def test_targets_known_when_they_are_read_name_part_and_index():
    module = ready(wrapped(held([0, 1, 2, 7], classes=["a", "b", "c"])), Classification)
    with pytest.raises(UserError, match="sample 3 of the train part is 7; expected one class number from 0 to 2"):
        module.raw("train", range(4))


@pytest.mark.parametrize(("data", "task", "checkpoint", "expected"), [
    # other types, data that seems to have different targets, tasks with a loss of their own, and tasks without names
    (arrays([False, True], {"classes": ["no", "yes"]}), Classification, None, [False, True]),
    (arrays([0.0, 2.0, 1.0]), Classification, None, [0, 2, 1]),
    (wrapped(held([0, 1, 2], [1, 2, 3], ["a", "b", "c"])), Classification, None, [0, 1, 2]),
    (arrays([[0.5, 0.5, 0], [0, 0, 1]], dtype=np.float32), Soft, None, [[0.5, 0.5, 0], [0, 0, 1]]),
    (wrapped(TensorDataset(torch.zeros(9, 2), torch.arange(9) * 1000)), Free, None, [0, 1000, 2000]),
    (arrays([0, 7], {"classes": {0: "cat"}, "inputs": 4, "vocabulary": "gpt2"}), Free, None, [0, 7]),
    # parts with other orders, numbers instead of names, and renamed classes
    (wrapped(held([0, 1], classes={"cat": 0, "dog": 1}), held([0, 1], classes={0: "dog", 1: "cat"})), Classification, None, [1, 0]),
    (wrapped(held([0, 1, 2], [0, 1, 2], classes=[0, 1, 2]), held([2, 0], classes=[0, 2])), Classification, None, [2, 0]),
    (wrapped(held([0, 1], classes=["cat", "dog"]), held([0, 0], classes=["dog"]), classes=["Katze", "Hund"]), Classification, None, [1, 1]),
    # checkpoints with other orders, or with more names
    (wrapped(held([0, 1], classes=["cat", "dog"]), held([0, 0], classes=["dog"])), Classification, REORDERED, [2, 2]),
    (arrays([0, 1, 2], dtype=np.uint64), Classification, MORE, [2, 4, 1]),
    (arrays([[[255, 2]], [[0, 1]]], dtype=np.uint8), Segmentation, REORDERED, [[[255, 0]], [[1, 2]]]),
    (arrays([[1, 0], [0, 1]], {"labels": ["red", "round"]}), Multilabel, {"labels": ["round", "big", "red"]}, [[0, 0, 1], [1, 0, 0]]),
    (arrays([[0.5, 0], [7, 8]], {"targets": ["x", "y"]}, np.float32), Regression, {"targets": ["y", "x"]}, [[0, 0.5], [8, 7]]),
])  # fmt: skip
def test_targets_are_matched_by_name_with_parts_and_checkpoints(data, task, checkpoint, expected):
    target = ready(data, task, checkpoint).raw("test", range(len(expected)))["target"]
    torch.testing.assert_close(target, torch.tensor(expected))  # and their dtype


def test_training_reads_and_counts_the_numbers_of_the_checkpoint():
    module = ready(arrays([0] * 12 + [1] * 8 + [2] * 4), Classification, MORE)
    module.trainer = stand_in_trainer()
    batches = [module.on_before_batch_transfer(batch, 0) for batch, _ in divided(module.train_dataloader())]
    count_K = torch.cat([batch["target"] for batch in batches]).bincount(minlength=5)
    assert count_K.tolist() == module.metadata["class_counts"] == [0, 4, 12, 0, 8]


def test_only_the_names_that_a_module_reads_are_matched(monkeypatch, capsys):
    module = ready(wrapped(held([0, 1], classes=["cat", "dog"]), held([0, 1], classes=["dog", "cat"])), Classification)
    monkeypatch.setattr(build, "read_outline", lambda _: SimpleNamespace(metadata={"classes": ["car", "ship"]}))
    settings = SimpleNamespace(weights="weights.ckpt")
    build.match_names(settings, module, ())
    assert capsys.readouterr().out == ""
    build.match_names(settings, module, None)  # a LightningModule, which does not declare what it reads
    assert "WARNING: the train part of this data has the classes cat, dog" in capsys.readouterr().out
    with pytest.raises(UserError, match="cat, dog cannot be matched"):
        build.match_names(settings, module, ("classes",))
    assert module.metadata["classes"] == ["cat", "dog"]
    assert module.raw("test", range(2))["target"].tolist() == [1, 0]  # the parts stay matched


def test_a_module_may_predict_a_target_and_a_prediction():
    assert [*columns_of_module({"prediction": [1], "target": [2]})] == ["prediction", "target"]


@pytest.mark.slow
def test_every_command_asks_a_checkpoint_for_its_names(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for path in ("three/cat", "three/dog", "three/wolf", "two/dog", "two/wolf", "other/bird", "other/cat", "other/dog"):
        write_pictures(Path(path), "red", 6)
    train = [*SMALL, "data=folder", "data.cache_dir=cache", "loader.batch_size=2", "trainer.max_steps=1"]
    lockstep.train([*train, "data.root=three", "run=a"])
    both = "has the classes bird, cat, dog, but runs/a/checkpoints/.* has cat, dog, wolf: bird cannot be matched"
    with pytest.raises(UserError, match=both):
        lockstep.evaluate(["run=a", "data.root=other", "trainer.accelerator=cpu"])
    with pytest.raises(UserError, match=both):
        lockstep.predict(["run=a", "data.root=other", "input=test", "trainer.accelerator=cpu"])
    with pytest.raises(UserError, match=both):
        lockstep.train([*train, "data.root=other", "run=b", "init_from=a"])
    assert not Path("runs/b").exists()
    lockstep.predict(["run=a", "data.root=two", "input=test", "trainer.accelerator=cpu"])
    table = np.genfromtxt("runs/a/predictions.csv", delimiter=",", dtype=None, names=True)
    assert sorted(table["target"]) == ["dog", "wolf"]
    assert "has 3 classes; this data lacks cat" in " ".join(capsys.readouterr().out.split())
    # a run that starts from weights keeps their numbers, and so does its own resume
    lockstep.train([*train, "data.root=two", "run=c", "init_from=a"])
    lockstep.train(["run=c", "resume=auto", "trainer.max_steps=2"])
    assert state("c/checkpoints/last.ckpt")["DataModule"]["about"]["classes"] == ["cat", "dog", "wolf"]
