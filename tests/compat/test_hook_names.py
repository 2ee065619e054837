"""Lightning still sets the name of each hook on the module, through nn.Module's slow __setattr__."""

import inspect

import lightning.pytorch as pl
from lightning.pytorch.trainer import call
from torch import nn

from lockstep.compat.hook_names import QuickHookNames


def test_lightning_sets_the_name_on_the_module():
    """When this fails, see whether compat/hook_names.py can go."""
    assert "pl_module._current_fx_name = hook_name" in inspect.getsource(call)
    assert "_current_fx_name" in vars(pl.LightningModule())
    assert pl.LightningModule.__setattr__ is nn.Module.__setattr__


def test_the_name_is_set_without_nn_module(monkeypatch):
    module = QuickHookNames()
    module.net = nn.Linear(2, 2)
    assert dict(module.named_children()) == {"net": module.net}
    monkeypatch.setattr(nn.Module, "__setattr__", None)
    module._current_fx_name = "on_fit_start"
    assert module._current_fx_name == "on_fit_start"
