"""Rules between the keys that say how long a run lasts, and how often it validates. Free of torch."""

import math
from collections.abc import Iterator

from omegaconf import DictConfig

from lockstep.config.batches import accumulated, repeats
from lockstep.config.identity import title
from lockstep.machine.world import World


def epochs_of(cfg: DictConfig) -> float:
    """The most epochs of a run; infinite without a limit."""
    given, steps = cfg.trainer.max_epochs, cfg.trainer.max_steps
    if given is None:
        return 1 if steps == -1 else math.inf
    return math.inf if given == -1 else int(given)


def length_problems(cfg: DictConfig, _: World) -> Iterator[str]:
    trainer, epochs = cfg.trainer, epochs_of(cfg)
    if trainer.min_epochs and trainer.min_epochs > epochs:
        yield f"trainer.min_epochs={trainer.min_epochs} is more than the run's {epochs} epochs. Type trainer.max_epochs={trainer.min_epochs}."
    if trainer.min_steps and -1 < trainer.max_steps < trainer.min_steps:
        yield f"trainer.min_steps={trainer.min_steps} is more than trainer.max_steps={trainer.max_steps}. Leave one of them out."
    if cfg.schedule.get("needs_end") is True and epochs == math.inf and trainer.max_steps == -1:
        yield (
            f"schedule={title(cfg.schedule)} needs the run's number of steps, and trainer.max_epochs={trainer.max_epochs} has no end. "
            "Type trainer.max_epochs=<n> or trainer.max_steps=<n>, or schedule=constant."
        )
    if trainer.check_val_every_n_epoch is None and not isinstance(trainer.val_check_interval, int):
        yield "trainer.check_val_every_n_epoch=null counts batches over epochs. Type trainer.val_check_interval=<number of batches> as well."


def batches_of(cfg: DictConfig, samples: int) -> int:
    """The micro-batches of an epoch of so many training samples."""
    steps, limit = samples // (cfg.data.batch_size // repeats(cfg)), cfg.trainer.limit_train_batches
    batches = steps * accumulated(cfg)
    if limit is not None:
        batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    return int(batches)


def total_steps(cfg: DictConfig, samples: int) -> float:
    """The optimizer steps of a run; infinite without a limit."""
    total = epochs_of(cfg) * (batches_of(cfg, samples) // accumulated(cfg))
    return min(total, cfg.trainer.max_steps) if cfg.trainer.max_steps != -1 else total


def step_problems(cfg: DictConfig, samples: int) -> Iterator[str]:
    """Limits that a run of so many training samples per epoch does not reach."""
    trainer, every = cfg.trainer, cfg.trainer.val_check_interval
    batches = batches_of(cfg, samples)
    if not batches:
        return  # Lightning says that nothing is trained
    total = total_steps(cfg, samples)
    warmup = cfg.schedule.get("warmup_steps")
    if isinstance(warmup, int) and warmup >= total:
        yield f"schedule.warmup_steps={warmup} must be below the run's {total:g} steps. Type a smaller number."
    if trainer.min_epochs and trainer.min_epochs * (batches // accumulated(cfg)) > total:
        yield f"trainer.min_epochs={trainer.min_epochs} is more than the run's {total:g} steps allow. Type a smaller number."
    if trainer.min_steps and trainer.min_steps > total:
        yield f"trainer.min_steps={trainer.min_steps} is more than the run's {total:g} steps. Type a smaller number, or trainer.max_epochs=<more>."
    if isinstance(every, int) and every > batches and trainer.check_val_every_n_epoch is not None:
        yield (
            f"trainer.val_check_interval={every} is more than the {batches} batches of an epoch. Type a smaller number, "
            "or trainer.check_val_every_n_epoch=null to count over epochs."
        )
