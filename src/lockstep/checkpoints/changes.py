"""The keys that cannot change when a run is resumed."""

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lockstep.config.keys import dotted

# Another network does not fit the checkpoint. Another split would validate on images that were trained on. Other batches would
# repeat some samples and skip others. The optimizer's state has its own learning rates. The bits depend on the `exact` keys.
FIXED = (
    "task._target_",
    "model._target_",
    "model.name",
    "data._target_",
    "data.val_fraction",
    "data.folds",
    "data.fold",
    "data.limit_train",
    "data.balance",
    "data.batch_size",
    "data.repeats",
    "exact.shards",
    "exact.threads",
    "seed",
    "optim",
    "callbacks.ema",
)
COUNTS_MICRO_BATCHES = ("limit_train_batches", "val_check_interval")  # of the trainer, where they are integers


def values(cfg: DictConfig, key: str) -> dict[str, Any]:
    """The values at and below `key`, by their dotted keys."""
    value: Any = OmegaConf.select(cfg, key)
    return dotted(OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value, key)


def changes(cfg: DictConfig, saved: DictConfig) -> Iterator[str]:
    """Where the resumed run `cfg` differs from `saved` in what must stay."""
    for fixed in FIXED:
        now, then = values(cfg, fixed), values(saved, fixed)
        for key in {**now, **then}:
            if now.get(key) != then.get(key):
                yield (
                    f"{key}={now.get(key)} cannot be changed when resuming; the run has {then.get(key)}. "
                    "Type init_from=<run> for a new run."
                )
    parts, before = (c.trainer.accumulate_grad_batches for c in (cfg, saved))
    for key in COUNTS_MICRO_BATCHES if parts != before else ():
        if isinstance(cfg.trainer[key], int):
            yield (
                f"trainer.accumulate_grad_batches={parts} cannot be changed in a run with trainer.{key}={cfg.trainer[key]}, which "
                f"counts micro-batches; there it is {before}. Type trainer.accumulate_grad_batches={before}."
            )
