"""When checkpoints are saved, and from where in the training a checkpoint goes on."""

import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from omegaconf import DictConfig

from lockstep.checkpoints import shards
from lockstep.checkpoints.finding import BEST
from lockstep.checkpoints.io import AtomicCheckpointIO
from lockstep.errors import UserError
from lockstep.training.steps import steps_done


def wait_until_saved(trainer: pl.Trainer) -> None:
    """What was begun is on the disk, as every process sees it. Raises NotSaved."""
    io = trainer.strategy.checkpoint_io
    if isinstance(io, AtomicCheckpointIO):
        io.drain()
    trainer.strategy.barrier()


class Position(pl.Callback):
    """Makes every checkpoint say: so many steps are done, with all that belongs to them, and nothing of the next.

    Lightning's loops save how far each of their counters is, which depends on the hook that saves, and going on from some
    of these states loses a validation or an epoch (NOTEBOOK.md). Both ends are put right here, in the public hooks.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config  # plain values, kept in every checkpoint

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["config"] = self.config
        loop = checkpoint["loops"]["fit_loop"]
        epochs, batches = loop["epoch_progress"], loop["epoch_loop.batch_progress"]
        done, begun = batches["current"]["processed"], epochs["current"]["ready"]
        done -= done % trainer.accumulate_grad_batches  # max_time may end a run within a step
        waiting = done == 0 and epochs["current"]["processed"] == begun  # between two epochs, as it was loaded
        fetched = batches["current"]["ready"]  # is_last_batch is set with the fetching
        last = batches["is_last_batch"] and fetched == batches["current"]["processed"]
        ended = waiting or last or done >= trainer.num_training_batches
        for scope in ("total", "current"):
            epochs[scope] = dict.fromkeys(epochs[scope], begun) | dict.fromkeys(
                ("processed", "completed"), begun if ended else begun - 1
            )
        batches["total"] = dict.fromkeys(batches["total"], batches["total"]["processed"])
        batches["current"] = dict.fromkeys(batches["current"], 0 if ended else done)
        batches["is_last_batch"] = False
        loop["epoch_loop.state_dict"]["_batches_that_stepped"] = steps_done(trainer)  # for the loggers

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Counters of micro-batches, in those of this run: it may accumulate more or fewer to the same global batch."""
        now, then = (
            trainer.accumulate_grad_batches,
            checkpoint["config"]["trainer"]["accumulate_grad_batches"],
        )
        batches = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for scope in ("total", "current"):
            batches[scope] = {key: count * now // then for key, count in batches[scope].items()}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        every, accumulate = trainer.val_check_batch, trainer.accumulate_grad_batches
        if every is not None and every != float("inf") and every % accumulate:
            raise UserError(
                f"trainer.val_check_interval={trainer.val_check_interval} would validate after {every} micro-batches, within a "
                f"step of {accumulate}. Type a multiple: trainer.val_check_interval={accumulate * max(1, int(every) // accumulate)}."
            )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # Lightning 2.6 counts one step too many for the loggers after resuming where a validation had been.
        trainer.fit_loop.epoch_loop._batches_that_stepped = steps_done(trainer)


class LastCheckpoint(Checkpoint):
    """last.ckpt: after each epoch, every so many optimizer steps, and where a run ends.

    Within an epoch it is saved when the next batch begins: the row of the log and the validation that belong to a step
    are done by then, and a run that goes on from it repeats neither.
    """

    def __init__(self, path: Path, every_n_steps: int | None, resumed: str | None) -> None:
        self.path, self.every_n_steps = path, every_n_steps
        self.resumed = Path(resumed) if resumed else None
        self.saved_at = 0
        self.tidied = False

    @property
    def goes_on_here(self) -> bool:
        """Whether the run goes on in the folder of the checkpoint that it is resumed from."""
        return self.resumed is not None and self.resumed.resolve().parent == self.path.parent.resolve()

    def save(self, trainer: pl.Trainer) -> None:
        if self.saved_at != steps_done(trainer):
            trainer.save_checkpoint(self.path, weights_only=False)
            self.saved_at = steps_done(trainer)

    def save_and_wait(self, trainer: pl.Trainer) -> None:
        self.save(trainer)
        wait_until_saved(trainer)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """The checkpoint that a run goes on from is its last one: newer ones, of a past that is given up, would be taken
        the next time, and a run with nothing left to train would not get one."""
        names = (self.path.name, f"{self.path.name}.old")  # the latter takes its place when the next one is saved
        if self.resumed and self.goes_on_here and trainer.is_global_zero and self.resumed.name not in names:
            part = self.path.with_name(self.path.name + ".part")
            shards.remove(part)
            (shutil.copytree if self.resumed.is_dir() else shutil.copyfile)(self.resumed, part)
            shards.take_place(part, self.path)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """ModelCheckpoint remembers the best ones with their whole paths; the run's folder may have been moved since."""
        here = self.path.parent.resolve()
        for state in checkpoint["callbacks"].values():
            if "dirpath" in state and self.goes_on_here:
                state["best_k_models"] = {moved(path, here): score for path, score in state["best_k_models"].items()}
                for key in ("best_model_path", "kth_best_model_path", "last_model_path"):
                    state[key] = moved(state[key], here)
                state["dirpath"] = str(here)
            elif "dirpath" in state:
                state["best_model_path"] = ""  # another run's

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.saved_at = steps_done(trainer)
        self.tidy(trainer)
        trainer.ckpt_path = None  # ModelCheckpoint would never remove it, though it may no longer be among the best

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        begins_step = batch_idx % trainer.accumulate_grad_batches == 0
        if begins_step and self.every_n_steps and steps_done(trainer) % self.every_n_steps == 0:
            self.save(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.save(trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        wait_until_saved(trainer)
        self.tidy(trainer)  # where nothing was left to train

    def tidy(self, trainer: pl.Trainer) -> None:
        """Once: removes best checkpoints of a past that was given up, and those that a kill kept from being removed."""
        if self.tidied or not self.goes_on_here or not trainer.is_global_zero:
            return
        self.tidied = True
        old = self.path.with_name(self.path.name + ".old")
        if old.exists() and not self.path.exists():
            old.rename(self.path)
        kept = {Path(path) for best in trainer.checkpoint_callbacks for path in getattr(best, "best_k_models", ())}
        for path in self.path.parent.iterdir():
            name = BEST.fullmatch(path.name)
            if name and path.resolve() not in kept and (kept or int(name[1]) > trainer.global_step):
                shards.remove(path)


def moved(path: str, folder: Path) -> str:
    return str(folder / Path(path).name) if path else path


def best_checkpoints(cfg: DictConfig, folder: Path) -> ModelCheckpoint:
    """The best by validation."""
    return ModelCheckpoint(
        dirpath=folder,
        filename="best-step-{step}",
        auto_insert_metric_name=False,
        monitor=cfg.checkpoint.monitor,
        mode=cfg.checkpoint.mode,
        save_top_k=cfg.checkpoint.save_top_k,
        save_on_train_epoch_end=False,  # after each validation: max_steps may end an epoch before its own
        enable_version_counter=False,  # a run that goes on from before a checkpoint writes the same one again
    )


def last_checkpoint(cfg: DictConfig, folder: Path) -> LastCheckpoint:
    return LastCheckpoint(folder / "last.ckpt", cfg.checkpoint.every_n_steps, cfg.resume)


def best_checkpoint(trainer: pl.Trainer) -> str | None:
    """The checkpoint to test: the best by `checkpoint.monitor`, or the last where nothing was validated."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and Path(callback.best_model_path or "absent").exists():
            return callback.best_model_path
        if isinstance(callback, LastCheckpoint) and callback.path.exists():
            return str(callback.path)
    return None
