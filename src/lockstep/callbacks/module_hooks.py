"""Hooks for every LightningModule: its schedulers, the hooks that create its dataloaders, and what it logs."""

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from lightning.pytorch.loggers import Logger

from lockstep.callbacks.stopping import EarlyStopping
from lockstep.checkpoints import saving
from lockstep.compat.lightning import restart_loaders
from lockstep.data.standard import wrapped_loaders
from lockstep.errors import UserError, did_you_mean, raise_problems
from lockstep.machine.world import all_gather_objects
from lockstep.reporting.console import print_line
from lockstep.training.arithmetic import logs_row, total_steps
from lockstep.training.batches import Loaders
from lockstep.training.module import arithmetic_of
from lockstep.training.optim import begin_momentum

LIBRARIES = ("lockstep.", "lightning.")
OF_VALIDATION = re.compile(r"(?:^|[\W_])val(?:id|idation)?(?=$|[\W_])")


# Lightning's callbacks that do not work here, each with the reason and what to do instead.
REJECTED: dict[type[Callback], str] = {
    callbacks.GradientAccumulationScheduler: "changes the number of micro-batches per global batch. Set trainer.accumulate_grad_batches=<number>.",
    callbacks.LearningRateFinder: "sets a learning rate that the schedule overwrites at the next step. Compare rates in a sweep, such as -m optim.lr=1e-4,1e-3,1e-2.",
    callbacks.StochasticWeightAveraging: "averages after the last checkpoint, so its weights would be neither saved nor tested. Set callbacks=[default,ema].",
    callbacks.BatchSizeFinder: "changes the global batch, and so the result. Keep the batch size: if it does not fit in memory, the error suggests a trainer.accumulate_grad_batches that does.",
}


def callback_errors(chosen: Iterable[Callback]) -> Iterator[str]:
    """What does not work, and what would lose something silently."""
    keys = Counter(each.state_key for each in chosen if type(each).state_dict is not Callback.state_dict)
    for callback in chosen:
        name, folder = type(callback).__name__, getattr(callback, "dirpath", None)
        yield from (f"callbacks: {name} {why}" for kind, why in REJECTED.items() if isinstance(callback, kind))
        if "://" in str(folder):
            yield f"callbacks: {name} has dirpath={folder}, but URLs are not supported. Set a path, local or in a mounted folder."
        if keys[callback.state_key] > 1:
            yield f"callbacks: {keys[callback.state_key]} callbacks save their state as {callback.state_key}. Keep one, or override state_key."


def adopt(trainer: Trainer, *, reports: bool) -> None:
    """Lets Lightning's callbacks work next to Lockstep's, whether the config has them or the module's `configure_callbacks`."""
    raise_problems(callback_errors(trainer.callbacks))  # type: ignore[attr-defined]
    for callback in list(trainer.callbacks):  # type: ignore[attr-defined]
        if isinstance(callback, callbacks.ProgressBar):
            trainer.callbacks.remove(callback)  # type: ignore[attr-defined]
            note = "is left out: Lockstep shows progress itself"
        elif isinstance(callback, callbacks.ModelCheckpoint) and not isinstance(callback, saving.ModelCheckpoint):
            # not over the run's checkpoints
            callback.dirpath = callback.dirpath or str(Path(trainer.default_root_dir) / "own-checkpoints")
            note = f"saves to {callback.dirpath}, in addition to the checkpoints of the run"
        elif type(callback) is callbacks.EarlyStopping:
            callback.__class__ = EarlyStopping
            note = "remains stopped when the run is resumed"
        else:
            continue
        if reports:
            print_line(f"{type(callback).__name__} {note}")


@dataclass(eq=False, kw_only=True)
class ModuleHooks(Callback):
    """Used in training and in evaluation."""

    loaders: Loaders
    loggers: list[Logger]  # of the run, also used by its evaluations
    monitor: str | None
    # maps the optimizer steps of a run to the steps between two log rows; None: the config sets them
    log_interval: Callable[[float], int] | None
    told: set[str] = field(default_factory=set)  # notes on evaluation loaders that were already printed
    before: dict[str, Any] = field(default_factory=dict)  # values that were logged before an evaluation
    due: dict[int, float] = field(default_factory=dict)  # metrics not yet passed to a scheduler, by its index

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Lockstep's datamodule calls the module's hooks
        warnings.filterwarnings("ignore", message="You have overridden `on_(before|after)_batch_transfer` in both")
        adopt(trainer, reports=stage == "fit")
        self.loaders.begin(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loaders = wrapped_loaders(trainer.train_dataloader)
        if arithmetic_of(pl_module).same_bits and not self.loaders.divided:
            raise UserError(
                f"exact.logical_ranks divides each batch, but the batches of {loaders[0].name} cannot be divided. Remove exact.logical_ranks."
            )
        if any(loader.began not in (None, loader.division.position()) for loader in loaders):
            restart_loaders(trainer)
        if trainer.fit_loop.epoch_loop.batch_progress.current.ready:
            hooks = {type(each): type(each).on_train_epoch_start for each in (pl_module, *trainer.callbacks)}  # type: ignore[attr-defined]
            if own := [cls.__name__ for cls, hook in hooks.items() if not hook.__module__.startswith(LIBRARIES)]:
                print_line(f"resumed within an epoch: on_train_epoch_start of {', '.join(own)} is not called for it")
        for config in trainer.lr_scheduler_configs:  # a module may step it by epochs, as the template's does
            if getattr(config.scheduler, "counts_steps", False):
                config.interval, config.frequency = "step", 1
        if self.log_interval:
            trainer.log_every_n_steps = self.log_interval(total_steps(trainer))  # type: ignore[attr-defined]
        for index, metric in self.due.items():
            pl_module.lr_scheduler_step(trainer.lr_scheduler_configs[index].scheduler, metric)
        self.due = {}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        begin_momentum(optimizer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if logs_row(trainer):
            self.log_means(trainer, pl_module)

    def log_means(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if hasattr(pl_module, "mean"):  # communicates between all processes
            trainer.strategy.means.log(pl_module)  # type: ignore[attr-defined]

    on_validation_epoch_end = on_test_epoch_end = log_means

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Not earlier: Lightning would log the module's hyperparameters again."""
        trainer.loggers = self.loggers

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_predict_start(trainer, pl_module)
        self.before = dict(trainer.callback_metrics)
        trainer.strategy.means.evaluation.clear()  # type: ignore[attr-defined]
        for loader in wrapped_loaders(trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders):
            if loader.batch_scope != "a share" and loader.notes[0] not in self.told:
                print_line(f"evaluation data: {loader.notes[0]}")
                self.told.add(loader.notes[0])

    on_test_start = on_validation_start

    def of_one_process(self, trainer: Trainer) -> list[str]:
        """Names of values that differ between processes: Lightning logs rank 0's. Every process must call it."""
        logged = trainer.callback_metrics.items()
        by_rank = all_gather_objects({name: repr(float(v)) for name, v in logged if v is not self.before.get(name)})
        return [name for name in by_rank[0] if any(values.get(name) != by_rank[0][name] for values in by_rank)]

    def monitored(self, trainer: Trainer) -> set[str]:
        observers = [*trainer.callbacks, *(c for c in trainer.lr_scheduler_configs if c.reduce_on_plateau)]  # type: ignore[attr-defined]
        return {str(name) for name in (self.monitor, *(getattr(o, "monitor", None) for o in observers)) if name}

    def warn_of_typos(self, trainer: Trainer) -> None:
        """A typo would cost an epoch. Not an error, because a module may log less in Lightning's sanity check."""
        logged = sorted(trainer.callback_metrics)
        for name in sorted(self.monitored(trainer) - {*logged}) if logged else ():
            if OF_VALIDATION.search(name):
                print_line(
                    f"WARNING: {name} is monitored, but the first validation batches logged {', '.join(logged)}{did_you_mean(name, logged)}"
                )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            self.warn_of_typos(trainer)
        names, known = self.of_one_process(trainer), trainer.strategy.means.of_rank_0  # type: ignore[attr-defined]
        monitored = [name for name in names if name in self.monitored(trainer)]
        if monitored and not trainer.testing:
            raise UserError(
                f"{monitored[0]} is monitored, but differs between the {trainer.world_size} processes, so it does not cover all samples. Log it with "
                f"self.log({monitored[0]!r}, ..., sync_dist=True), or log a torchmetrics metric."
            )
        if new := [name for name in names if name not in known]:
            print_line(f"from rank 0 only: {', '.join(new)}; values of other processes differ. Log with sync_dist=True")
        known |= {*new}

    on_test_end = on_validation_end

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        of_rank_0 = trainer.strategy.means.of_rank_0  # type: ignore[attr-defined]
        checkpoint |= {"divided": self.loaders.divided, "of_rank_0": sorted(of_rank_0)}
        checkpoint["plateau"] = self.due or due_at_epoch_end(trainer, checkpoint["loops"]["fit_loop"])

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.due = checkpoint["plateau"]
        trainer.strategy.means.of_rank_0.update(checkpoint["of_rank_0"])  # type: ignore[attr-defined]
        saved, current = checkpoint["accumulate_grad_batches"], trainer.accumulate_grad_batches
        if not checkpoint["divided"] and saved != current:
            raise UserError(
                f"trainer.accumulate_grad_batches was {saved} and is now {current}, but Lockstep does not divide the batches of this run, so it cannot "
                f"determine which of them are done. Set trainer.accumulate_grad_batches={saved}."
            )


def due_at_epoch_end(trainer: Trainer, loop: dict[str, Any]) -> dict[int, float]:
    """Metrics that each ReduceLROnPlateau still needs.

    Lightning steps it after the checkpoint at an epoch's end, so a resumed run would skip that step.
    """
    batches, epochs = loop["epoch_loop.batch_progress"], loop["epoch_progress"]["current"]["started"]
    current = batches["current"]
    ended = current["processed"] >= trainer.num_training_batches or batches["is_last_batch"]
    if not ended or current["ready"] != current["processed"] or not trainer.lightning_module.automatic_optimization:
        return {}
    return {
        index: float(trainer.callback_metrics[config.monitor])
        for index, config in enumerate(trainer.lr_scheduler_configs)
        if config.reduce_on_plateau and config.interval == "epoch" and (epochs + 1) % config.frequency == 0
        if config.monitor in trainer.callback_metrics
    }
