"""Lightning 2.6 notes the name of each hook it calls as an attribute of the LightningModule, 46 times a step.

nn.Module checks on every assignment whether it is a parameter, a module or a buffer: 2 us each, 0.09 ms of BasicNet's step
of 12 ms. Drop this when Lightning keeps the name elsewhere; tests/compat/test_hook_name.py fails then.
"""

from typing import Any

import lightning.pytorch as pl

NAME = "_current_fx_name"


class PlainHookName(pl.LightningModule):
    """Stores the name without nn.Module's checks."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == NAME:
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)
