"""Several evaluation sets: each sample of each counts once, on any number of processes; monitored, reported, refused."""

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import thin_project
import torch
from in_process import state

import lockstep
from lockstep import Arrays, DataSet
from lockstep.build_trainer import small_parts
from lockstep.errors import TrainingFailed, UserError
from lockstep.kit.datamodule import DataModule

OWN = '''
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from lockstep import Arrays, DataSet
from lockstep.kit.tasks import Classification

SEEN: list[tuple[str, int, int]] = []


def drawn(count: int, seed: int, shift: float = 0.0) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    target = draw.integers(0, 2, count)
    value = draw.normal(size=(count, 4)).astype(np.float32) + (target - 0.5)[:, None].astype(np.float32) + np.float32(shift)
    return {"input": value, "target": target}


class Points(DataSet):
    def __init__(self) -> None:
        self.metadata = {"classes": ["a", "b"]}
        self.train, self.val, self.test = (Arrays(**drawn(count, seed)) for seed, count in enumerate((32, 13, 11)))
        self.evaluation_sets = {
            "val/night": Arrays(**drawn(7, 3, 0.5)), "test/fog": Arrays(**drawn(17, 4, -0.5)), "test/rain": Arrays(**drawn(2, 5)),
        }

    def model_kwargs(self) -> dict[str, Any]:
        return {"in_features": 4}


class Held(Dataset):
    classes = ["a", "b"]

    def __init__(self, count: int, seed: int, swap: bool = False) -> None:
        self.values = drawn(count, seed)
        if swap:
            self.classes = ["b", "a"]
            self.values["target"] = 1 - self.values["target"]

    def __len__(self) -> int:
        return len(self.values["target"])

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.from_numpy(self.values["input"][index]), int(self.values["target"][index])


class Net(nn.Module):
    def __init__(self, in_features: int, num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(in_features, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Parts(Classification):
    """Logs its loss a second time."""

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        loss_B = super().loss(output, batch)
        self.mean(loss_B, log=f"{self.stage}/part")
        return loss_B


class Plain(pl.LightningModule):
    """Gets the sets as Lightning gives several dataloaders."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.layer(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        SEEN.append(("val", dataloader_idx, len(batch[0])))
        self.log("loss", F.cross_entropy(self.layer(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        SEEN.append(("test", dataloader_idx, len(batch[0])))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)
'''
OPTIONS = [
    "task=classification", "model=own", "model._target_=sets.Net", "data=own", "data._target_=sets.Points", "loader.batch_size=8",
    "loader.eval_batch_size=4", "trainer.accelerator=cpu", "trainer.precision=32-true", "trainer.max_epochs=2",
    "trainer.enable_progress_bar=false",
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def project(tmp_path_factory) -> Any:
    with thin_project.entered(tmp_path_factory.mktemp("project"), "sets", **{"src/sets/__init__.py": OWN}) as root:
        yield root


def by_hand(run: str, part: str) -> tuple[float, float]:
    """Loss and accuracy of the last checkpoint, in one batch."""
    import sets

    points = sets.Points()
    values = points.samples(part)[np.arange(len(points.samples(part)))]
    weights = state(f"{run}/checkpoints/last.ckpt")["state_dict"]
    logits = torch.as_tensor(values["input"]) @ weights["net.layer.weight"].T + weights["net.layer.bias"]
    target = torch.as_tensor(values["target"])
    return torch.nn.functional.cross_entropy(logits, target).item(), (logits.argmax(1) == target).double().mean().item()


WAYS = {
    "single": ["strategy=single"],
    "ddp": ["strategy=ddp", "trainer.devices=2"],
    "fsdp": ["strategy=fsdp", "trainer.devices=2"],
}


@pytest.mark.parametrize("way", [*WAYS][:1] + [pytest.param(way, marks=pytest.mark.slow) for way in [*WAYS][1:]])
def test_each_sample_of_each_set_counts_once(way):
    report = lockstep.train([*OPTIONS, *WAYS[way], f"run=once-{way}", "task.monitor=null"])
    counts = {"test": 11, "test/fog": 17, "test/rain": 2}
    assert {part: report[f"{part}/count"] for part in counts} == counts
    assert (report["data/val/night"], report["data/test/fog"]) == (7, 17)
    for part in counts:
        found = report[f"{part}/loss"], report[f"{part}/acc"]
        assert found == pytest.approx(by_hand(f"once-{way}", part), abs=1e-5), part
    with Path(f"runs/once-{way}/metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("val/night/loss")]
    assert len(rows) == 2
    last = float(rows[-1]["val/night/loss"]), float(rows[-1]["val/night/acc"])
    assert last == pytest.approx(by_hand(f"once-{way}", "val/night"), abs=1e-5)
    assert "night" in Path(f"runs/once-{way}/report.html").read_text()


@pytest.mark.parametrize("every", [1, 3])
def test_the_tested_checkpoint_is_validated_on_each_set_by_training_or_after_it(every):
    report = lockstep.train([*OPTIONS, f"run=short-{every}", f"trainer.check_val_every_n_epoch={every}"])
    assert "val/night/acc" in report and "test/fog/count" in report
    assert not {"val/count", "val/night/count"} & {*report}


def test_one_of_them_is_monitored():
    report = lockstep.train([*OPTIONS, "run=monitored", "task.monitor=val/night/acc", "task.mode=max"])
    assert report["monitor"] == "val/night/acc" and "last" not in report["checkpoint"]
    evaluated = lockstep.evaluate(["run=monitored"])
    assert evaluated["test/fog/loss"] == pytest.approx(report["test/fog/loss"])
    for typo in ("val/nigt/acc", "val/night/ac"):
        with pytest.raises(TrainingFailed, match=rf"{typo} is not logged by .*, which logs .*val/night/acc"):
            lockstep.train([*OPTIONS, f"run={typo.replace('/', '-')}", f"task.monitor={typo}"])


def test_means_of_a_task_are_those_of_each_set():
    report = lockstep.train([*OPTIONS, "task._target_=sets.Parts", "run=parts", "task.monitor=null"])
    for part in ("val", "test", "test/fog", "test/rain"):
        assert report[f"{part}/part"] == pytest.approx(report[f"{part}/loss"], rel=1e-6), part


@pytest.mark.parametrize("task", ["task=classification", "task._target_=sets.Plain"])
def test_a_set_that_processes_cannot_share_is_refused_before_training(task):
    kind = ["task=lightning_module", task, *OPTIONS[3:]] if "Plain" in task else OPTIONS
    with pytest.raises(UserError, match="the test/rain part has 2 samples, but there are 4 processes or logical ranks"):
        lockstep.train([*kind, "run=unshared", "task.monitor=null", "exact.logical_ranks=4"])
    assert not Path("runs/unshared").exists()


def test_other_data_modules_may_have_splits_of_their_own():
    settings = SimpleNamespace(
        world=SimpleNamespace(size=4), cfg=SimpleNamespace(exact=SimpleNamespace(logical_ranks=None))
    )
    for splits in ((0.8, 0.2), {"train": 0.8, "val": 0.2}):
        assert [*small_parts(settings, SimpleNamespace(splits=splits, targets=[1, 2]))] == []


def test_a_lightning_module_gets_them_as_several_dataloaders():
    import sets

    sets.SEEN.clear()
    plain = ["task=lightning_module", "task._target_=sets.Plain", "task.monitor=null", *OPTIONS[3:]]
    lockstep.train([*plain, "run=plain", "trainer.max_epochs=1", "trainer.num_sanity_val_steps=0"])
    seen = {
        (stage, loader): sum(n for s, i, n in sets.SEEN if (s, i) == (stage, loader)) for stage, loader, _ in sets.SEEN
    }
    assert seen == {("val", 0): 13, ("val", 1): 7, ("test", 0): 11, ("test", 1): 17, ("test", 2): 2}


def test_torch_datasets_by_name_with_classes_in_another_order():
    held = "_target_: sets.Held"
    report = lockstep.train([
        *OPTIONS[:3], "data=torch", f"data.train={{{held}, count: 24, seed: 0}}", f"data.test={{{held}, count: 6, seed: 1}}",
        f"data.evaluation_sets={{test/same: {{{held}, count: 9, seed: 2}}, test/swapped: {{{held}, count: 9, seed: 2, swap: true}}}}",
        "loader.batch_size=8", *OPTIONS[7:], "run=torch",
    ])  # fmt: skip
    assert report["test/same/loss"] == report["test/swapped/loss"]
    assert report["test/same/count"] == 9


@pytest.mark.parametrize(
    ("name", "count"), [("night", 3), ("val/", 3), ("train/night", 3), ("val/a/b", 3), ("val/empty", 0), ("val/raw", 3)]
)
def test_what_is_no_name_of_a_set_with_samples_is_refused(name, count):
    arrays = Arrays(input=np.zeros((count, 1), np.float32))
    data = DataSet()
    data.train = data.test = Arrays(input=np.zeros((8, 1), np.float32))
    data.evaluation_sets = {name: arrays}
    with pytest.raises(UserError, match=rf"evaluation_sets: '{name}' is not a valid name, or the set is empty"):
        DataModule(data, batch_size=2, eval_batch_size=2)
