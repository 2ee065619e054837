"""Lightning still miscounts the step of its logs after resuming, and the patch corrects it."""

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lockstep.compat.logged_step import save_logged_step, set_logged_step


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch, _):
        return self.net(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Steps(pl.Callback):
    """Saves a checkpoint before step 2 and notes both counts of each step."""

    def __init__(self, path, corrected):
        self.path, self.corrected, self.counts = path, corrected, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.corrected:
            set_logged_step(trainer, trainer.global_step)
        if trainer.global_step == 2 and not trainer.ckpt_path:
            trainer.save_checkpoint(self.path)
        self.counts.append((trainer.global_step, trainer.fit_loop.epoch_loop._batches_that_stepped))


def counts(path, corrected: bool, resume: bool) -> list[tuple[int, int]]:
    steps = Steps(path, corrected)
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = pl.Trainer(callbacks=[steps], max_steps=4, accelerator="cpu", **quiet)
    data = DataLoader(torch.ones(4, 2), batch_size=1)
    trainer.fit(Model(), data, ckpt_path=path if resume else None, weights_only=True)
    return steps.counts


@pytest.mark.filterwarnings("ignore:.*LeafSpec", "ignore:.*does not have many workers", "ignore:You're resuming")
def test_lightning_counts_a_step_too_many_after_resuming(tmp_path):
    """When the counts of the uncorrected run agree, remove compat/logged_step.py."""
    path = tmp_path / "a.ckpt"
    counts(path, corrected=False, resume=False)
    assert counts(path, corrected=False, resume=True) == [(2, 3), (3, 4)]
    assert counts(path, corrected=True, resume=True) == [(2, 2), (3, 3)]
    saved = torch.load(path, weights_only=True)["loops"]["fit_loop"]
    assert saved["epoch_loop.state_dict"]["_batches_that_stepped"] == 2
    save_logged_step(saved, 7)
    assert saved["epoch_loop.state_dict"] == {"_batches_that_stepped": 7}
