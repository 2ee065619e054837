"""Lightning still logs a step under the number of the one before, and miscounts after resuming; the patch corrects it."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import Logger
from torch.utils.data import DataLoader

from lockstep.compat.logged_step import log_steps_from_one, save_logged_step, set_logged_step


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch, _):
        loss = self.net(batch).sum()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, _):
        self.log("val", self.net(batch).sum())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


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
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    callbacks = [steps, LearningRateMonitor("step")]
    trainer = pl.Trainer(callbacks=callbacks, logger=rows, max_steps=4, log_every_n_steps=2, accelerator="cpu", **quiet)
    if corrected:
        log_steps_from_one(trainer)
    data = DataLoader(torch.ones(4, 2), batch_size=1)
    trainer.fit(Model(), data, data, ckpt_path=path if resume else None, weights_only=True)
    return steps, rows


@pytest.mark.filterwarnings("ignore:.*LeafSpec", "ignore:.*does not have many workers", "ignore:You're resuming")
def test_lightning_logs_a_step_under_another_number(tmp_path):
    """When the uncorrected run logs steps 2 and 4, and counts them right after resuming, remove compat/logged_step.py."""
    path = tmp_path / "a.ckpt"
    rates, losses, validation = (True, False, True)
    assert fitted(path, False, resume=False)[1].steps == [
        (1, rates),
        (1, losses),
        (3, rates),
        (3, losses),
        (3, validation),
    ]
    assert fitted(path, False, resume=True)[0].counts == [(2, 3), (3, 4)]
    assert fitted(path, True, resume=False)[1].steps == [
        (2, rates),
        (2, losses),
        (4, rates),
        (4, losses),
        (4, validation),
    ]
    assert fitted(path, True, resume=True)[0].counts == [(2, 3), (3, 4)]  # those in progress
    assert fitted(path, True, resume=True)[1].steps == [(4, rates), (4, losses), (4, validation)]
    saved = torch.load(path, weights_only=True)["loops"]["fit_loop"]
    save_logged_step(saved, 7)
    assert saved["epoch_loop.state_dict"] == {"_batches_that_stepped": 7}
