"""No broadcast at each training step.

Lightning 2.6.6 asks rank 0 by a broadcast at each step whether it received SIGTERM, and waits for the answer with `.item()`, so
GPUs run dry at each step. callbacks/stopping.py asks once a second instead. There is no switch for it. Remove this file when
there is one; tests/compat/test_sigterm_broadcast.py fails when the method is gone.
"""

import lightning.pytorch as pl


def without_sigterm_broadcast(trainer: pl.Trainer) -> None:
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
