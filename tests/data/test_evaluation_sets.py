"""Several evaluation sets: each sample of each counts once, on any number of processes; monitored, reported, rejected."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import thin_project
import torch
from in_process import rows, state

import lockstep
from lockstep import DataSet
from lockstep.build_trainer import small_parts
from lockstep.data.splits import splits
from lockstep.errors import TrainingFailed, UserError

OWN = """
from collections import Counter

import lightning.pytorch as pl
import numpy as np
import torch
from lockstep import Arrays, DataSet
from lockstep.kit.tasks import Classification
from torch.utils.data import TensorDataset

SEEN = Counter()

def drawn(count, seed):
    draw = np.random.default_rng(seed)
    target = draw.integers(0, 2, count)
    return {"input": draw.normal(target[:, None] - 0.5, size=(count, 4)).astype(np.float32), "target": target}

class Points(DataSet):
    def __init__(self):
        sets = [Arrays(**drawn(count, seed)) for seed, count in enumerate((32, 13, 11, 7, 17, 2))]
        self.train, self.val, self.test, night, fog, rain = sets
        self.evaluation_sets = {"val/night": night, "test/fog": fog, "test/rain": rain}
        self.metadata = {"classes": ["a", "b"]}

    def model_kwargs(self):
        return {"in_features": 4}

class Held(TensorDataset):
    def __init__(self, count, seed, swap=False):
        values = drawn(count, seed)
        super().__init__(torch.from_numpy(values["input"]), torch.from_numpy(values["target"] ^ swap))
        self.classes = ["b", "a"] if swap else ["a", "b"]

class LogsTwice(Classification):
    def loss(self, output, batch):
        loss_B = super().loss(output, batch)
        self.mean(loss_B, log=f"{self.stage}/mean")
        return loss_B

class Plain(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        SEEN["test" if self.trainer.testing else "val", dataloader_idx] += len(batch[0])

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""
COMMON = ["loader.batch_size=8", "loader.eval_batch_size=4", "trainer.accelerator=cpu", "trainer.max_epochs=2"]
POINTS = ["data=own", "data._target_=sets.Points", "trainer.precision=32-true", *COMMON]
NET = ["model=own", "model._target_=torch.nn.Linear", "+model.out_features=2"]
CLASSIFICATION = ["task=classification", *NET, *POINTS]
PLAIN = ["task=lightning_module", "task._target_=sets.Plain", "task.monitor=null", *POINTS]
SLOW = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def project(tmp_path_factory):
    with thin_project.entered(tmp_path_factory.mktemp("project"), "sets", **{"src/sets/__init__.py": OWN}) as root:
        yield root


@pytest.mark.parametrize("strategy", ["single", pytest.param("ddp", marks=SLOW), pytest.param("fsdp", marks=SLOW)])
def test_each_sample_of_each_set_counts_once(strategy):
    import sets

    devices = 1 if strategy == "single" else 2
    options = [f"strategy={strategy}", f"trainer.devices={devices}", f"run={strategy}", "task.monitor=null"]
    report = lockstep.train([*CLASSIFICATION, "task._target_=sets.LogsTwice", *options])
    assert (report["data/val/night"], report["data/test/fog"]) == (7, 17)
    assert [report[f"{part}/count"] for part in ("test", "test/fog", "test/rain")] == [11, 17, 2]
    assert not {"val/count", "val/night/count"} & {*report}
    weights = state(f"{strategy}/checkpoints/last.ckpt")["state_dict"]
    for part in ("val/night", "test", "test/fog", "test/rain"):
        input_BF, target_B = map(torch.as_tensor, sets.Points().samples(part).arrays.values())
        logits_BK = input_BF @ weights["net.weight"].T + weights["net.bias"]
        loss = torch.nn.functional.cross_entropy(logits_BK, target_B).item()
        accuracy = (logits_BK.argmax(1) == target_B).double().mean().item()
        logged = [report[f"{part}/{name}"] for name in ("loss", "mean", "acc")]
        assert logged == pytest.approx([loss, loss, accuracy], abs=1e-5)
    assert len([row for row in rows(strategy) if row["val/night/loss"]]) == 2
    assert "night" in Path(f"runs/{strategy}/report.html").read_text()


def test_one_of_them_is_monitored():
    report = lockstep.train([*CLASSIFICATION, "run=monitored", "task.monitor=val/night/acc", "task.mode=max"])
    assert report["monitor"] == "val/night/acc" and "last" not in report["checkpoint"]
    assert lockstep.evaluate(["run=monitored"])["test/fog/loss"] == pytest.approx(report["test/fog/loss"])
    with pytest.raises(TrainingFailed, match=r"val/nigt/acc is not logged by .*, which logs .*val/night/acc"):
        lockstep.train([*CLASSIFICATION, "run=typo", "task.monitor=val/nigt/acc"])


def test_sets_without_a_validation_are_validated_after_training():
    report = lockstep.train([*CLASSIFICATION, "run=after", "trainer.check_val_every_n_epoch=3"])
    assert "val/night/acc" in report and "test/fog/count" in report


@pytest.mark.parametrize("options", [CLASSIFICATION, PLAIN])
def test_a_set_that_processes_cannot_share_is_rejected(options):
    with pytest.raises(UserError, match="the test/rain part has 2 samples, but there are 4 processes or logical ranks"):
        lockstep.train([*options, "run=unshared", "task.monitor=null", "exact.logical_ranks=4"])
    assert not Path("runs/unshared").exists()


def test_other_data_modules_may_have_splits_of_their_own():
    settings = Mock(**{"world.size": 4, "cfg.exact.logical_ranks": None})
    assert not [*small_parts(settings, Mock(splits=(0.8, 0.2)))]


def test_a_lightning_module_gets_them_as_several_dataloaders():
    import sets

    lockstep.train([*PLAIN, "run=plain", "trainer.max_epochs=1", "trainer.num_sanity_val_steps=0"])
    assert sets.SEEN == {("val", 0): 13, ("val", 1): 7, ("test", 0): 11, ("test", 1): 17, ("test", 2): 2}


def test_torch_datasets_by_name_with_classes_in_another_order():
    held = "{_target_: sets.Held, seed: 2, count: 9"
    sets = f"{{test/same: {held}}}, test/swapped: {held}, swap: true}}}}"
    data = ["data=torch", f"data.train={held}}}", f"data.test={held}}}", f"data.evaluation_sets={sets}"]
    report = lockstep.train(["task=classification", *NET, *data, *COMMON, "run=torch"])
    assert (report["test/same/count"], report["test/same/loss"]) == (9, report["test/swapped/loss"])


@pytest.mark.parametrize("name", ["night", "val/", "train/night", "val/a/b", "val/raw", "val/empty"])
def test_invalid_names_and_empty_sets_are_rejected(name):
    data = DataSet()
    data.train = data.test = range(8)
    data.evaluation_sets = {name: range(name != "val/empty")}
    with pytest.raises(UserError, match=rf"evaluation_sets: '{name}' is not a valid name, or the set is empty"):
        splits(data, batch_size=2)
