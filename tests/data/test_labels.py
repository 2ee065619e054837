"""Targets stand for names: parts and checkpoints are matched by name, and targets that stand for none are rejected before training."""

import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from in_process import SMALL, state
from pictures import write_pictures
from shipped_data import divided, stand_in_trainer
from torch.utils.data import ConcatDataset, Dataset, TensorDataset
from torchvision.datasets import ImageFolder

import lockstep
from lockstep import Arrays, DataSet, build
from lockstep.errors import UserError
from lockstep.extras.adapters import HuggingFace, TorchDataset
from lockstep.extras.tables import columns_of_module
from lockstep.kit.datamodule import DataModule
from lockstep.kit.tasks import Classification, LanguageModel, Multilabel, Regression, Segmentation

NUMBERS = np.arange(24) % 3
CLASSES = {"classes": ["cat", "dog", "wolf"]}
COLOUR = {"cat": "red", "dog": "blue", "wolf": "green"}


def arrays(metadata: dict[str, Any] = CLASSES, *, test: Any = None, **train: Any) -> DataSet:
    """Data whose training targets are NUMBERS, or `target`; `at` changes some of them."""
    data, target = DataSet(), np.array(train.get("target", NUMBERS))
    for place, value in train.get("at", {}).items():
        target[place] = value
    data.train = Arrays(input=np.zeros((len(target), 2), np.float32), target=target)
    test = target if test is None else np.array(test)
    data.test, data.metadata = Arrays(input=np.zeros((len(test), 2), np.float32), target=test), dict(metadata)
    return data


class Items(Dataset):
    """Its targets are known when they are read; `held` are what it seems to have."""

    def __init__(self, read: Any, held: Any = None, classes: Any = None) -> None:
        self.read, self.targets, self.classes = read, held, classes

    def __len__(self) -> int:
        return len(self.read)

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(2), self.read[index]


def items(train: Any, test: Any = None, **changes: Any) -> TorchDataset:
    return TorchDataset(train=train, test=train if test is None else test, **changes)


def folders(place: Path, *parts: tuple[str, ...], **changes: Any) -> TorchDataset:
    """An ImageFolder for each part, with its classes; the first is `train`, the second `test`."""
    for number, names in enumerate(parts):
        for name in names:
            write_pictures(place / str(number) / name, COLOUR[name], 2)
    train, test = (ImageFolder(str(place / str(number))) for number in range(2))
    return TorchDataset(train=train, test=test, image_size=8, **changes)


def table(place: Path, train: Any, feature: Any = None, holes: Any = (), **test: Any) -> HuggingFace:
    """Saved tables of the column `label`; `labels` and `of` make a test split, if there is one. Rows of `holes` have no image."""

    def made(values: Any, feature: Any) -> datasets.Dataset:
        columns = {"image": [None if row in holes else [0.0, 0.0] for row in range(len(values))], "label": values}
        kept = datasets.Features(image=datasets.List(datasets.Value("float32")), label=feature) if feature else None
        return datasets.Dataset.from_dict(columns, features=kept)

    parts = {"train": made(train, feature)}
    if test:
        parts["test"] = made(test["labels"], test.get("of"))
    datasets.DatasetDict(parts).save_to_disk(place)
    return HuggingFace(root=str(place), cache_dir=str(place / "cache"))


def named(*names: str) -> datasets.ClassLabel:
    return datasets.ClassLabel(names=list(names))


def ready(data: DataSet, task: Any, known: Any = None) -> DataModule:
    """What the commands do with the data before the network is made."""
    data.prepare()
    module = DataModule(data, batch_size=2, eval_batch_size=4)
    module.warnings = module.targets.match(known, "runs/a") if known else []
    task.check_metadata({"sequence_length": 4, **module.metadata})
    module.trainer = SimpleNamespace(lightning_module=task)
    module.setup("fit")
    return module


class Own:
    def loss(self, output: Any, batch: Any) -> Any:
        raise NotImplementedError


class Masked(Own, Regression): ...


class Sketch(Own, Segmentation): ...


class Soft(Classification):
    loss = Own.loss


class Free(Classification):
    needs, expects = (), None


def joined(*names: str) -> ConcatDataset:
    return ConcatDataset([Items([0, 1], classes=[*each]) for each in names])


one, multi, number, pixels, text = Classification, Multilabel, Regression, Segmentation, LanguageModel
free = Free
MASKS = np.zeros((24, 4, 4), np.uint8)
HOT = np.eye(3, dtype=np.int64)[NUMBERS]
LABELS, TOKENS, PRICE = {"labels": ["red", "round"]}, {"vocabulary": list("abc")}, {"targets": ["price"]}
INTS = datasets.Value("int64")


@pytest.mark.parametrize(("make", "task", "told"), [
    # numbers that stand for no name
    (lambda _: arrays(at={5: -1}), one, "sample 5 of the train part is -1; expected one class number from 0 to 2. Correct"),
    (lambda _: arrays(at={7: 9}, test=[9]), one, "sample 7 of the train part is 9"),
    (lambda _: arrays(target=NUMBERS / 2), one, r"sample 1 of the train part is 0.5; expected one class number from 0 to 2"),
    (lambda _: arrays(target=HOT), one, r"is int64 of shape \(3,\); expected .* for one-hot rows, use argmax"),
    (lambda _: arrays(target=MASKS, at={4: 9}), pixels, "sample 4 of the train part is 9; expected a class number for each pixel from 0 to 2, or 255"),
    (lambda _: arrays(LABELS, target=HOT[:, :2], at={3: -1}), multi, "sample 3 of the train part is -1; expected 0 or 1 for each label"),
    (lambda _: arrays(TOKENS, target=np.ones((24, 4), int), at={6: 3}), text, "sample 6 .* is 3; expected a token number for each position from 0 to 2, or -100"),
    (lambda _: arrays(PRICE, target=NUMBERS / 2, at={9: np.nan}), number, "sample 9 of the train part is nan; expected finite numbers"),
    (lambda _: items(TensorDataset(torch.zeros(9, 2), torch.arange(9) - 1)), one, "sample 0 of the train part is -1; expected"),
    (lambda _: items(Items([0, 1, 2] * 4), Items([0, 1, 5], [0, 1, 5]), classes=["a", "b", "c"]), one, "sample 2 of the test part is 5"),
    # what cannot be matched
    (lambda at: folders(at, ("cat", "dog"), ("cat", "wolf")), one, r"the test part of this data has the classes cat, wolf, but the train part has cat, dog: wolf cannot be"),
    (lambda at: table(at, [0, 1] * 9, named("cat", "dog"), labels=[0, 1], of=named("dog", "cow")), one, "has the classes dog, cow, but the train part has cat, dog: cow"),
    # tables with nulls and with keys instead of classes
    (lambda at: table(at, [0, 1, None] * 9, INTS), one, "label=None in row 2 of the train part is not one of the 2 classes"),
    (lambda at: table(at, ["b", None, "a"] * 9), one, "label=None in row 1 of the train part is not one of the 2 classes"),
    (lambda at: table(at, [0, 1, None] * 9, named("cat", "dog")), one, "label=None in row 2 of the train part"),
    (lambda at: table(at, ["b", "", "a"] * 9), one, "label= in row 1 of the train part is not one of the 2 classes"),
    (lambda at: table(at, [0, 1] * 9, named("cat", "dog"), holes=(3, 5)), one, "data: image has no value in row 3 of the train part. Remove such rows"),
    (lambda at: table(at, [100, 2000, 3000000] * 9, INTS), one, "needs classes in .*, targets. .* those of a table are texts, or numbers from 0"),
    (lambda at: table(at, [0.5, None, float("nan")] * 20, datasets.Value("float64")), number, r"of the train part is nan; expected finite numbers"),
    (lambda _: items(Items([5, 70] * 5, [5, 70] * 5)), one, "needs classes in .* The classes of a torch Dataset are data.classes"),
    (lambda _: items(Items([0, 1] * 5, classes={"a": 1, "b": 2})), one, "The classes of a torch Dataset are data.classes"),
    (lambda _: items(joined("ab", "ba")), one, "ConcatDataset joins Datasets with the classes a, b and b, a: class numbers would"),
    (lambda _: items(Items([0, 1] * 2, classes=["a", "b"]), Items([0, 1], classes=["c", "b"])), one, "c cannot be matched"),
])  # fmt: skip
def test_targets_that_stand_for_nothing_are_rejected_before_training(tmp_path, make, task, told):
    with pytest.raises(UserError, match=told):
        ready(make(tmp_path / "data"), task)


@pytest.mark.parametrize(("make", "task", "known", "expected"), [
    # other types, and data that holds something else than it reads
    (lambda _: arrays(target=NUMBERS.astype(np.uint8)), one, None, [0, 1, 2, 0]),
    (lambda _: arrays({"classes": ["no", "yes"]}, target=NUMBERS > 0), one, None, [0, 1, 1, 0]),
    (lambda _: arrays(target=MASKS, at={0: 255, 1: 2}), pixels, None, [255, 2, 0, 0]),
    (lambda _: items(Items([0, 1, 2] * 4, [1, 2, 3] * 4, ["a", "b", "c"])), one, None, [0, 1, 2, 0]),
    (lambda _: arrays(target=NUMBERS.astype(np.uint64)), one, {"classes": ["wolf", "cat", "dog"]}, [1, 2, 0, 1]),
    (lambda _: arrays(target=NUMBERS.astype(np.float32)), one, None, [0, 1, 2, 0]),
    (lambda _: arrays(target=MASKS / 1, at={0: 255, 1: 2}), pixels, None, [255, 2, 0, 0]),
    # numbers, where nobody asked for classes
    (lambda _: items(TensorDataset(torch.zeros(9, 2), torch.arange(9) * 1000)), free, None, [0, 1000, 2000]),
    (lambda at: table(at, [100, 2000, 3000000] * 9, INTS, labels=[7, 8], of=INTS), number, None, [[7], [8]]),
    (lambda _: arrays({"classes": {0: "cat"}, "inputs": 4, "vocabulary": "gpt2"}), free, None, [0, 1, 2, 0]),
    # names as a dict, and numbers instead of names
    (lambda _: items(Items([0, 1] * 2, classes=["cat", "dog"]), Items([0, 1], classes={"dog": 1, "cat": 0})), one, None, [0, 1]),
    (lambda _: items(Items([0, 1] * 2, classes=["cat", "dog"]), Items([0, 1], classes={0: "dog", 1: "cat"})), one, None, [1, 0]),
    (lambda _: items(Items([0, 1, 2], [0, 1, 2], classes=[0, 1, 2]), Items([2, 0], classes=[0, 2])), one, None, [2, 0]),
    # a task with a loss of its own
    (lambda _: arrays(PRICE, target=NUMBERS / 2, at={1: np.inf}), Masked, None, [0, np.inf, 1]),
    (lambda _: arrays(target=HOT / 2), Soft, None, [[0.5, 0, 0], [0, 0.5, 0]]),
    (lambda _: arrays(target=MASKS + 7), Sketch, None, [7, 7]),
    # parts in other orders, or with fewer classes
    (lambda at: folders(at, ("cat", "dog"), ("dog",)), one, None, [1, 1]),
    (lambda at: folders(at, ("cat", "dog"), ("dog",), classes=["Katze", "Hund"]), one, None, [1, 1]),
    (lambda at: table(at, [0, 1] * 9, named("cat", "dog"), labels=[0, 1, 1, 0], of=named("dog", "cat")), one, None, [1, 0, 0, 1]),
    (lambda at: table(at, [0, 1] * 9, named("cat", "dog"), labels=["dog", "cat"]), one, None, [1, 0]),
    # a checkpoint with another order, or with more
    (lambda _: arrays(), one, {"classes": ["wolf", "cat", "dog"]}, [1, 2, 0, 1]),
    (lambda _: arrays(), one, {"classes": ["ant", "wolf", "cat", "cow", "dog"]}, [2, 4, 1, 2]),
    (lambda at: folders(at, ("cat", "dog"), ("dog",)), one, {"classes": ["dog", "wolf", "cat"]}, [0, 0]),
    (lambda _: arrays(target=MASKS, at={0: 255, 1: 2}), pixels, {"classes": ["dog", "cat", "wolf"]}, [255, 2, 1, 1]),
    (lambda _: arrays(LABELS, target=HOT[:, :2]), multi, {"labels": ["round", "big", "red"]}, [[0, 0, 1], [1, 0, 0], [0, 0, 0], [0, 0, 1]]),
    (lambda _: arrays({"targets": ["x", "y"]}, target=HOT[:, :2] / 2), number, {"targets": ["y", "x"]}, [[0, 0.5], [0.5, 0], [0, 0], [0, 0.5]]),
    # and refusals with both lists
    (lambda _: arrays(), one, {"classes": ["cat", "dog", "cow"]}, "has the classes cat, dog, wolf, but runs/a has cat, dog, cow: wolf cannot be matched"),
    (lambda _: arrays({"classes": ["a", "a", "b"]}), one, {"classes": ["b", "a", "a"]}, "a, a, b, but runs/a has b, a, a: a, a, b cannot be matched"),
    (lambda _: arrays({**PRICE, "inputs": ["w", "h"]}, target=NUMBERS / 2), number, {**PRICE, "inputs": ["h", "w"]}, "inputs w, h, but runs/a has h, w"),
    (lambda _: arrays(PRICE, target=NUMBERS / 2), number, {"targets": ["price", "size"]}, "targets price, but runs/a has price, size: price cannot"),
    (lambda _: arrays(at={5: 4}), one, {"classes": ["ant", "wolf", "cat", "cow", "dog"]}, "sample 5 of the train part is 4; expected .* from 0 to 2"),
])  # fmt: skip
def test_targets_are_matched_by_name_with_parts_and_checkpoints(tmp_path, make, task, known, expected):
    data = make(tmp_path / "data")
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            ready(data, task, known)
        return
    module = ready(data, task, known)
    target = module.raw("test", np.arange(len(expected)))["target"]
    assert (target[:, 0, 0] if target.dim() == 3 else target).tolist() == expected
    module.trainer = stand_in_trainer(training=False)
    module.trainer.testing = True
    (loader,) = module.test_dataloader()
    batches = [module.on_before_batch_transfer(batch, 0)["target"] for batch, _ in divided(loader, trains=False)]
    loaded = torch.cat(batches)  # the same
    assert torch.equal(loaded[: len(expected)], target)
    assert (
        not task.target_spec
        or target.is_floating_point() == (task.names not in ("classes", "vocabulary"))
        or task is multi
    )
    assert bool(module.warnings) == any(len(names) > len(data.metadata[key]) for key, names in (known or {}).items())
    if known and "class_counts" in module.metadata:
        names, before = (
            dict(zip(known["classes"], module.metadata["class_counts"], strict=True)),
            DataModule(make(tmp_path / "2"), batch_size=2, eval_batch_size=4),
        )
        assert [names[name] for name in data.metadata["classes"]] == before.metadata["class_counts"]


def test_only_the_names_that_a_task_reads_are_matched():
    """A checkpoint of self-supervised training has other classes, and its data other parts in another order."""
    data = items(Items([0, 1] * 4, classes=["cat", "dog"]), Items([0, 1], classes=["dog", "cat"]))
    data.prepare()
    module = DataModule(data, batch_size=2, eval_batch_size=4)
    assert not module.targets.match({"classes": ["car", "ship"]}, "runs/a", ["inputs", "vocabulary"])
    assert module.raw("test", np.arange(2))["target"].tolist() == [1, 0] and module.metadata["classes"] == [
        "cat",
        "dog",
    ]
    with pytest.raises(UserError, match="cat, dog cannot be matched"):
        module.targets.match({"classes": ["car", "ship"]}, "runs/a")
    assert module.raw("test", np.arange(2))["target"].tolist() == [1, 0]  # as before


@pytest.mark.parametrize(
    ("needs", "told"), [((), None), (("classes",), UserError), (None, "cat, dog, wolf cannot be matched")]
)
def test_what_reads_no_names_starts_from_weights_with_others(needs, told, monkeypatch, capsys):
    """None: a LightningModule, of which nobody knows what it reads."""
    module = DataModule(arrays(), batch_size=2, eval_batch_size=4)
    settings: Any = SimpleNamespace(weights="weights.ckpt")
    monkeypatch.setattr(build, "read_outline", lambda _: SimpleNamespace(metadata={"classes": ["car", "ship"]}))
    with pytest.raises(UserError) if told is UserError else nullcontext():
        build.match_names(settings, module, needs)
    assert (told if isinstance(told, str) else "") in " ".join(capsys.readouterr().out.split())
    assert module.metadata["classes"] == CLASSES["classes"]


def test_a_module_may_predict_a_target_beside_its_prediction():
    assert list(columns_of_module({"prediction": [1], "target": [2]})) == ["prediction", "target"]
    for name in ("index", "path", "row", "error"):
        with pytest.raises(UserError, match=f"column {name}, a name that"):
            columns_of_module({name: [1]})


def test_labels_that_are_known_when_they_are_read_name_part_and_index(tmp_path):
    labels = [0, 1, 2] * 8
    module = ready(items(Items([*labels[:-1], 7]), classes=["a", "b", "c"]), one)
    with pytest.raises(UserError, match="sample 23 of the train part is 7; expected one class number from 0 to 2"):
        module.raw("train", np.arange(24))


# --- Commands ---

RUN = [
    *SMALL,
    "data=folder",
    "loader.batch_size=2",
    "trainer.max_steps=1",
    "trainer.precision=32-true",
    "data.image_size=12",
]


def written(place: Path, *names: str) -> str:
    for name in names:
        write_pictures(place / name, COLOUR[name], 6)
    return f"data.root={place}"


@pytest.mark.slow
def test_every_command_asks_a_checkpoint_for_the_names_of_its_numbers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cache = f"data.cache_dir={tmp_path / 'cache'}"
    three, two, other = (written(tmp_path / name, *names) for name, names in (
        ("three", ("cat", "dog", "wolf")), ("two", ("dog", "wolf")), ("other", ("bird", "cat", "dog")),
    )) if COLOUR.setdefault("bird", "green") else ()  # fmt: skip
    lockstep.train([*RUN, cache, three, "run=a"])
    both = "has the classes bird, cat, dog, but runs/a/checkpoints/.* has cat, dog, wolf: bird cannot be matched"
    for command in (
        lambda: lockstep.evaluate(["run=a", other, "trainer.accelerator=cpu"]),
        lambda: lockstep.predict(["run=a", other, "input=test", "trainer.accelerator=cpu"]),
        lambda: lockstep.train([*RUN, cache, other, "run=b", "init_from=a"]),
    ):
        with pytest.raises(UserError, match=both):
            command()
    assert not Path("runs/b").exists()
    lockstep.predict(["run=a", two, "input=test", "trainer.accelerator=cpu"])
    table = np.genfromtxt("runs/a/predictions.csv", delimiter=",", dtype=str, skip_header=1)
    assert sorted(row[list(row).index(next(cell for cell in row if cell in COLOUR))] for row in table) == [
        "dog",
        "wolf",
    ]
    assert "has 3 classes; this data lacks cat" in " ".join(capsys.readouterr().out.split())
    # a run that continues from weights keeps their numbers, and so does its own continuation
    lockstep.train([*RUN, cache, two, "run=c", "init_from=a"])
    lockstep.train(["run=c", "resume=auto", "trainer.max_steps=2"])
    assert state("c/checkpoints/last.ckpt")["DataModule"]["about"]["classes"] == ["cat", "dog", "wolf"]
    shutil.rmtree("runs")
