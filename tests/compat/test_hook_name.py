"""Lightning still notes the names of hooks on the module, and they are stored past nn.Module's checks."""

import lightning.pytorch as pl
import torch
from torch import nn

from lockstep.compat.hook_name import NAME, PlainHookName


def names_noted(base: type[pl.LightningModule], monkeypatch) -> int:
    """How often nn.Module's own check sees the name while one step is trained."""
    seen: list[str] = []
    original = nn.Module.__setattr__

    def noted(self, name, value):
        seen.append(name)
        original(self, name, value)

    class Net(base):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def training_step(self, batch, batch_idx):
            return self.layer(batch).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(max_steps=1, accelerator="cpu", **quiet)
    data = torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=4)
    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "__setattr__", noted)
        trainer.fit(Net(), data)
    return seen.count(NAME)


def test_names_of_hooks_are_stored_without_nn_modules_checks(monkeypatch, recwarn):
    assert names_noted(pl.LightningModule, monkeypatch) > 20  # otherwise compat/hook_name.py can go
    assert names_noted(PlainHookName, monkeypatch) == 0
