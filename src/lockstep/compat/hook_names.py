"""Setting the name of the current hook, which Lightning does 46 times a step.

Lightning 2.6.6 sets `_current_fx_name` on the LightningModule around each hook, where nn.Module's `__setattr__` takes 2 us to see
that the value is no parameter, buffer or module: 0.09 ms of BasicNet's 11 ms step on a CPU. Remove this file when Lightning keeps
the name elsewhere: tests/compat/test_hook_names.py fails then.
"""

from typing import Any

import lightning.pytorch as pl


class QuickHookNames(pl.LightningModule):
    """Sets this one attribute as a plain object does."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)
