"""The keys that cannot change when a run is resumed."""

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lockstep.config.keys import dotted
from lockstep.errors import raise_problems

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


def changed_values(cfg: DictConfig, saved: DictConfig) -> Iterator[str]:
    for fixed in FIXED:
        now, then = values(cfg, fixed), values(saved, fixed)
        for key in {**now, **then}:
            if now.get(key) != then.get(key):
                yield (
                    f"{key}={now.get(key)} cannot be changed when resuming; the run has {then.get(key)}. "
                    "Type init_from=<run> for a new run."
                )


def changed_counts(cfg: DictConfig, saved: DictConfig) -> Iterator[str]:
    now, then = (c.trainer.accumulate_grad_batches for c in (cfg, saved))
    for key in COUNTS_MICRO_BATCHES if now != then else ():
        if isinstance(cfg.trainer[key], int):
            yield (
                f"trainer.accumulate_grad_batches={now} cannot be changed in a run with trainer.{key}={cfg.trainer[key]}, which "
                f"counts micro-batches; there it is {then}. Type trainer.accumulate_grad_batches={then}."
            )


def refuse_changes(cfg: DictConfig, saved: DictConfig) -> None:
    """Raises UserError when the resumed run `cfg` differs from `saved` in what must stay."""
    raise_problems([*changed_values(cfg, saved), *changed_counts(cfg, saved)])
