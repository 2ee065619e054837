"""Beginning dataloaders at a known moment.

Lightning 2.6 begins those of a process's first epoch in FitLoop.setup_data(), before it tells their samplers the epoch: a run
that resumes gets the order of epoch 0 where workers fetch ahead, and an order from whatever the generator held elsewhere. Drop
it when Lightning begins them after `on_train_epoch_start`, as it does in later epochs; tests/training/test_foreign.py shows
both.
"""

import lightning.pytorch as pl


def begin_loaders_anew(trainer: pl.Trainer) -> None:
    loop = trainer.fit_loop
    stateful = any(hasattr(loader, "load_state_dict") for loader in loop._combined_loader.flattened)  # type: ignore[union-attr]
    if not stateful:  # such a loader has been restored by now
        iter(loop._data_fetcher)  # type: ignore[arg-type]
