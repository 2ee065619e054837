"""Optimizers, schedules, loggers, tasks and data that a config names by their paths: those of libraries and a project's own."""

import sys
from pathlib import Path

import pytest
import thin_project
from in_process import rows, same, state

from lockstep.errors import UserError

pytestmark = pytest.mark.xdist_group("by_path")
OWN = '''from lightning.pytorch.loggers.logger import DummyLogger
from torch.optim import SGD
import numpy as np
import torch
from project.data import Mnist
from lockstep.kit.tasks import Classification


def without_decay(named_parameters, *, lr, weight_decay):
    """Biases do not decay."""
    groups = {0.0: [], weight_decay: []}
    for name, p in named_parameters:
        groups[0.0 if name.endswith("bias") else weight_decay].append(p)
    return SGD([{"params": own, "weight_decay": decay} for decay, own in groups.items()], lr=lr)


class Plain(DummyLogger):
    def __init__(self, *, prefix):
        super().__init__()

    def log_metrics(self, *args, **kwargs):
        print("logged")


class Temperature(Classification):
    def __init__(self, **options):
        super().__init__(**options)
        self.temperature = torch.nn.Parameter(torch.ones(()))

    def outputs(self, net, batch):
        return super().outputs(net, batch) / self.temperature


class NumPy(Mnist):
    @property
    def metadata(self):
        return {**super().metadata, "classes": np.arange(10).astype(str), "priors": {"all": np.float64(0.1)}}


class Odd(Mnist):
    @property
    def metadata(self):
        return {**super().metadata, "source": slice(3)}
'''
CONFIGS = {
    "schedule/drops.yaml": "_target_: torch.optim.lr_scheduler.StepLR\n_partial_: true\nstep_size: 5\n",
    "schedule/plateau.yaml": "_target_: torch.optim.lr_scheduler.ReduceLROnPlateau\n_partial_: true\n",
    "optim/named.yaml": "_target_: bouquet.own.without_decay\n_partial_: true\nlr: 0.1\nweight_decay: 0.2\n",
    "optim/muon.yaml": "_target_: torch.optim.Muon\n_partial_: true\nlr: 0.01\n",
    "optim/muon_and_adamw.yaml": "_target_: timm.optim.Muon\n_partial_: true\nlr: 0.01\n",
    "logger/plain.yaml": "plain:\n  _target_: bouquet.own.Plain\n  prefix: a\n",
    "task/temperature.yaml": "defaults: [classification]\n_target_: bouquet.own.Temperature\n",
    "data/numpy.yaml": "defaults: [mnist]\n_target_: bouquet.own.NumPy\n",
    "data/odd.yaml": "defaults: [mnist]\n_target_: bouquet.own.Odd\n",
}


@pytest.fixture
def own(train, tmp_path):
    """`train` in a project with the classes and configs above."""
    files = {f"configs/{name}": text for name, text in CONFIGS.items()}
    thin_project.write(tmp_path, **{"src/bouquet/own.py": OWN, **files})
    yield lambda *options: train("model=basic_net", "run=a", "trainer.log_every_n_steps=1", *options)
    for name in [name for name in sys.modules if name.partition(".")[0] == "bouquet"]:
        del sys.modules[name]


def test_what_a_config_names_is_used_by_the_run_and_by_its_checkpoint(own, capsys):
    """A schedule of torch follows optimizer steps; an optimizer that asks for names gets them; a logger that asks for no folder gets none;
    values of NumPy are saved as Python's."""
    own("schedule=drops", "optim=named", "optim.lr=0.1", "logger=plain", "data=numpy", "trainer.max_steps=12")
    saved = state("a/checkpoints/last.ckpt")
    groups = saved["optimizer_states"][0]["param_groups"]
    assert [all(name.endswith("bias") for name in group["params"]) for group in groups] == [True, False]
    assert [group["weight_decay"] for group in groups] == [0.0, 0.2]
    assert groups[0]["lr"] == pytest.approx(0.001)  # of 0.1, after two drops
    assert "logged" in capsys.readouterr().out
    metadata = saved["DataModule"]["about"]
    assert metadata["classes"] == [str(digit) for digit in range(10)]
    assert type(metadata["classes"][0]) is str
    assert metadata["priors"] == {"all": 0.1}


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("schedule=plateau", "must include a monitor when a `ReduceLROnPlateau` scheduler is used"),
        ("optim=muon", r"Muon only supports 2D parameters"),  # torch's, which refuses biases
        ("data=odd", "metadata/source cannot be saved"),
    ],
)
def test_what_cannot_be_trained_saved_or_stepped_is_refused_before_training(own, option, told):
    with pytest.raises(UserError, match=told):
        own(option)
    assert not Path("runs/a").exists()


@pytest.mark.slow
def test_muon_beside_adamw_resumes_exactly(own):
    own("optim=muon_and_adamw", "run=whole", "trainer.max_steps=6")
    own("optim=muon_and_adamw", "run=parts", "trainer.max_steps=3")
    own("optim=muon_and_adamw", "run=parts", "trainer.max_steps=6", "resume=auto")
    whole, parts = (state(f"{run}/checkpoints/last.ckpt")["state_dict"] for run in ("whole", "parts"))
    assert same(whole, parts)


@pytest.mark.parametrize("more", [[], ["trainer.limit_val_batches=0"]])
def test_a_run_without_test_figures_ends_well(more, own):
    assert own("trainer.max_steps=2", "trainer.limit_test_batches=0", *more)["status"] == "done"
    assert len(rows("a")) >= 2
