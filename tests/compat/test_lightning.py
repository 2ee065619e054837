"""Lightning still does what compat/lightning.py corrects; when a test fails, see whether its section can go."""

import inspect
from datetime import timedelta
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
import torch
import wandb
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import ModelParallelStrategy, model_parallel
from lightning.pytorch.trainer import call
from torch import nn
from torch.utils.data import DataLoader

from lockstep import build
from lockstep.compat.lightning import (
    QuickHookNames,
    WholeMeshStrategy,
    begin_loaders_anew,
    log_steps_from_one,
    save_logged_step,
    set_logged_step,
    without_anonymous,
)
from lockstep.config.compose import compose_config
from lockstep.config.settings import Settings
from lockstep.training.workload import Workload


def test_lightning_sets_the_name_on_the_module(monkeypatch):
    """When the first lines fail, see whether compat/lightning.py can go."""
    assert "pl_module._current_fx_name = hook_name" in inspect.getsource(call)
    assert "_current_fx_name" in vars(pl.LightningModule())
    assert pl.LightningModule.__setattr__ is nn.Module.__setattr__
    module = QuickHookNames()
    module.net = nn.Linear(2, 2)
    assert dict(module.named_children()) == {"net": module.net}
    monkeypatch.setattr(nn.Module, "__setattr__", None)
    module._current_fx_name = "on_fit_start"
    assert module._current_fx_name == "on_fit_start"


class Net(pl.LightningModule):
    """Notes the samples of its batches; seeds the order when an epoch starts."""

    def __init__(self, anew: bool = False) -> None:
        super().__init__()
        self.layer, self.anew, self.seen = nn.Linear(1, 1), anew, []

    def on_train_epoch_start(self):
        torch.manual_seed(5)
        if self.anew and not self.current_epoch:
            begin_loaders_anew(self.trainer)

    def training_step(self, batch, _):
        self.seen.append(batch.flatten().tolist())
        loss = self.layer(batch).sum()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, _):
        self.log("val", self.layer(batch).sum())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def quiet_trainer(**options) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu", enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options
    )


def test_the_first_epoch_is_begun_when_the_others_are(recwarn):
    for anew in (True, False):
        net = Net(anew)
        trainer = quiet_trainer(max_epochs=2, logger=False)
        trainer.fit(net, DataLoader(torch.arange(64.0)[:, None], batch_size=16, shuffle=True))
        assert (net.seen[:4] == net.seen[4:]) is anew  # otherwise compat/lightning.py can go


class Steps(pl.Callback):
    """Saves a checkpoint before step 2 and notes both counts of each step."""

    def __init__(self, path, corrected):
        self.path, self.corrected, self.counts = path, corrected, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.corrected:
            set_logged_step(trainer, trainer.global_step + 1)
        if trainer.global_step == 2 and not trainer.ckpt_path:
            trainer.save_checkpoint(self.path)
        self.counts.append((trainer.global_step, trainer.fit_loop.epoch_loop._batches_that_stepped))


class Rows(Logger):
    """The step of each row."""

    name = version = "rows"

    def __init__(self):
        super().__init__()
        self.steps = []

    def log_hyperparams(self, *_, **__):
        pass

    def log_metrics(self, metrics, step=None):
        self.steps.append((step, "val" in metrics or "lr-SGD" in metrics))


def fitted(path, corrected: bool, resume: bool) -> tuple[Steps, Rows]:
    steps, rows = Steps(path, corrected), Rows()
    callbacks = [steps, LearningRateMonitor("step")]
    trainer = quiet_trainer(callbacks=callbacks, logger=rows, max_steps=4, log_every_n_steps=2)
    if corrected:
        log_steps_from_one(trainer)
    data = DataLoader(torch.ones(4, 1), batch_size=1)
    trainer.fit(Net(), data, data, ckpt_path=path if resume else None, weights_only=True)
    return steps, rows


@pytest.mark.filterwarnings("ignore:.*LeafSpec", "ignore:.*does not have many workers", "ignore:You're resuming")
def test_lightning_logs_a_step_under_another_number(tmp_path):
    """When the uncorrected run logs steps 2 and 4, and counts them right after resuming, remove compat/lightning.py."""
    path = tmp_path / "a.ckpt"
    kinds = (True, False, True)  # rates, losses, and after the last step the validation
    assert fitted(path, False, resume=False)[1].steps == list(zip((1, 1, 3, 3, 3), kinds[:2] + kinds, strict=True))
    assert fitted(path, False, resume=True)[0].counts == [(2, 3), (3, 4)]
    assert fitted(path, True, resume=False)[1].steps == list(zip((2, 2, 4, 4, 4), kinds[:2] + kinds, strict=True))
    steps, rows = fitted(path, True, resume=True)
    assert steps.counts == [(2, 3), (3, 4)]  # those in progress
    assert rows.steps == [(4, kind) for kind in kinds]
    saved = torch.load(path, weights_only=True)["loops"]["fit_loop"]
    save_logged_step(saved, 7)
    assert saved["epoch_loop.state_dict"] == {"_batches_that_stepped": 7}


def test_lightning_still_broadcasts(mnist, cache, monkeypatch):
    """When the first line fails, see whether compat/lightning.py can go. No process of a run asks another at each step."""
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(_TrainingEpochLoop.advance)
    monkeypatch.setattr(_TrainingEpochLoop, "_broadcast_sigterm_tensor", pytest.fail)
    given = [f"data.root={mnist}", f"data.cache_dir={cache}", "run=a", "trainer.accelerator=cpu"]
    cfg = compose_config("train", [*given, "trainer.precision=32-true"])
    work = Workload(pl.LightningModule(), pl.LightningDataModule())
    build.evaluator(Settings.of(cfg), work).fit_loop.epoch_loop._broadcast_sigterm_tensor()


def test_wandb_warns_about_what_lightning_passes(tmp_path, monkeypatch):
    """When this fails, remove compat/lightning.py."""
    warnings: list[str] = []
    monkeypatch.setattr(wandb, "termwarn", lambda text, **_: warnings.append(text))
    logger = WandbLogger(save_dir=str(tmp_path), mode="offline")
    wandb.Settings(anonymous=logger._wandb_init["anonymous"])
    assert "anonymous setting has no effect" in warnings[0]
    without_anonymous(logger)
    assert "anonymous" not in logger._wandb_init
    without_anonymous(logger)  # as with a Lightning that passes none


def test_lightnings_mesh_of_two_nodes_with_three_processes(monkeypatch):
    """When it is (6, 1), or made of the default group, remove compat/lightning.py."""

    mesh = Mock(side_effect=RuntimeError)
    monkeypatch.setattr(model_parallel, "_setup_device_mesh", mesh)
    monkeypatch.setattr(ModelParallelStrategy, "_setup_distributed", Mock())
    strategy = ModelParallelStrategy(tensor_parallel_size=1)
    strategy.accelerator = Mock()
    strategy.cluster_environment = Mock(**{"local_rank.return_value": 0, "world_size.return_value": 6})
    strategy.num_nodes, strategy.parallel_devices = 2, [torch.device("cpu")] * 3
    with pytest.raises(RuntimeError):
        strategy.setup_environment()
    assert mesh.call_args.args[:2] == (2, 1)


def test_our_mesh_has_the_timeout_of_the_strategy(monkeypatch):
    def initialise(_: object) -> None:
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=77))

    monkeypatch.setattr(ModelParallelStrategy, "_setup_distributed", initialise)
    strategy = WholeMeshStrategy(tensor_parallel_size=1)
    strategy._lightning_module = Mock()
    strategy.cluster_environment = Mock(**{"local_rank.return_value": 0, "world_size.return_value": 1})
    strategy.parallel_devices = [torch.device("cpu")]
    try:
        strategy.setup_environment()
        group = strategy.device_mesh["data_parallel"].get_group()
        assert group is torch.distributed.group.WORLD
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)
    finally:
        torch.distributed.destroy_process_group()
