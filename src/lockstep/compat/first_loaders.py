"""Beginning dataloaders at a known moment.

Lightning 2.6.6 begins those of a process's first epoch in FitLoop.setup_data(), before it tells their samplers the epoch and
before a hook could seed the generator that shuffles them. Workers have fetched batches of epoch 0 by then, whichever epoch a
resumed run is in. In later epochs it begins them after `on_train_epoch_start`. Remove this file when
tests/compat/test_first_loaders.py finds that it does so in the first one.
"""

import lightning.pytorch as pl


def begin_loaders_anew(trainer: pl.Trainer) -> None:
    loop = trainer.fit_loop
    stateful = any(hasattr(loader, "load_state_dict") for loader in loop._combined_loader.flattened)  # type: ignore[union-attr]
    if not stateful:  # such a loader has been restored by now
        iter(loop._data_fetcher)  # type: ignore[arg-type]
