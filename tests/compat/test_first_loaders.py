"""Lightning still begins the first epoch's dataloaders before a hook can seed what shuffles them."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from lockstep.compat.first_loaders import begin_loaders_anew


class Net(pl.LightningModule):
    """Notes the samples of its batches; seeds the order when an epoch starts."""

    def __init__(self, anew: bool) -> None:
        super().__init__()
        self.layer, self.anew, self.seen = nn.Linear(1, 1), anew, []

    def on_train_epoch_start(self) -> None:
        torch.manual_seed(5)
        if self.anew and not self.current_epoch:
            begin_loaders_anew(self.trainer)

    def training_step(self, batch, batch_idx):
        self.seen.append(batch.flatten().tolist())
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def orders(anew: bool) -> tuple[list, list]:
    """The samples of the first epoch and of the second one."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    net = Net(anew)
    trainer = pl.Trainer(max_epochs=2, accelerator="cpu", **quiet)
    trainer.fit(net, DataLoader(torch.arange(64.0)[:, None], batch_size=16, shuffle=True))
    return net.seen[:4], net.seen[4:]


def test_the_first_epoch_is_begun_when_the_others_are(recwarn):
    first, second = orders(anew=True)
    assert first == second
    first, second = orders(anew=False)
    assert first != second  # otherwise compat/first_loaders.py can go
