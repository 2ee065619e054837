"""Writes checkpoints atomically, in the order of the calls, while training continues.

Also decides when they are saved, which are kept, and where a resumed run continues.
"""

import copy
import logging
import math
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from lightning.pytorch.callbacks import Checkpoint
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lockstep.checkpoints import weights
from lockstep.checkpoints.finding import BEST, is_checkpoint, leaves
from lockstep.compat.lightning import load_epoch_means, save_epoch_means, save_logged_step, set_logged_step
from lockstep.config.compose import dotted
from lockstep.config.run_config import RunConfig
from lockstep.errors import (
    FolderRemoved,
    SaveFailed,
    TrainingFailed,
    UserError,
    chain,
    raise_problems,
)
from lockstep.machine import files
from lockstep.training.arithmetic import steps_done
from lockstep.training.module import changed_frozen

Write = Callable[[dict[str, Any], Path], None]
log = logging.getLogger("lockstep")

# --- Writing ---


def new_stager() -> DefaultStager:
    """Copies checkpoints to host memory, each into the memory of the previous copy: 0.2 s for a gigabyte.

    New memory took 2.5 s on the two-core virtual machine of NOTEBOOK.md, which allocates it in small pages.
    """
    pinned = torch.cuda.is_available()
    return DefaultStager(
        StagingOptions(pinned, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False)
    )


class AtomicCheckpointIO(CheckpointIO):
    """Gives a checkpoint its final name when it is complete and on disk: a crash leaves the previous one.

    In the background, training waits only for a copy to host memory. There is one copy: the next checkpoint waits until
    the previous one is written. It, or `drain`, raises an error from the background. Calls queued after the error, such
    as the removal of an older checkpoint, are skipped. `folder`: the run's, which is not recreated if someone removes it.
    """

    def __init__(self, folder: Path, *, background: bool) -> None:
        self.folder, self.own = folder, {folder.resolve()}  # `own`: the folders that this object saved into
        self.thread = ThreadPoolExecutor(1, "checkpoints") if background else None  # Python waits for it at exit
        self.calls: list[Future[None]] = []
        self.stager: Any = new_stager()  # only an asynchronous one returns futures
        self.stalled_s = 0.0  # the time that callers of `save` have waited

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        self.save(checkpoint, Path(path), self.write_file)

    def write_file(self, checkpoint: dict[str, Any], path: Path) -> None:
        self.make_parent(path)
        with files.atomic_replace(path, over_folder=True) as part:
            weights.write(checkpoint, part)

    def make_parent(self, path: Path) -> None:
        self.folder.stat()  # raises an error if it was removed, so it is not created again
        path.parent.mkdir(parents=True, exist_ok=True)
        self.own.add(path.parent.resolve())

    def save(self, checkpoint: dict[str, Any], path: Path, write: Write) -> None:
        """Calls `write(checkpoint, path)`; in the background, with a copy of the checkpoint."""
        began_s = time.perf_counter()
        if self.thread:
            self.drain()
            # torch 2.11 and 2.12 close the stager after a copy, so its next copy fails. Remove this with them.
            if torch.__version__ < "2.13":
                self.stager = new_stager()
            checkpoint = self.stager.stage(checkpoint)
        self.submit(partial(self.write_or_explain, path, write, checkpoint))
        self.stalled_s += time.perf_counter() - began_s

    def write_or_explain(self, path: Path, write: Write, checkpoint: dict[str, Any]) -> None:
        """Raises SaveFailed or FolderRemoved."""
        try:
            write(checkpoint, path)
        except Exception as e:
            if not self.folder.is_dir():
                raise FolderRemoved(self.folder) from None
            cause = next((error for error in chain(e) if isinstance(error, OSError)), None)  # torch wraps it
            reason = f"{cause.strerror or cause}." if cause else f"{type(e).__name__}: {e}."
            raise SaveFailed(
                f"the checkpoint {path} could not be saved: {reason} Earlier checkpoints are intact. "
                "Free some space or repair the disk, then rerun the command with resume=auto."
            ) from e

    def submit(self, call: Callable[[], None]) -> None:
        """Runs `call` after the earlier ones, unless one of them has failed since the last `finish`."""
        if self.thread is None:
            return call()
        earlier = tuple(self.calls)  # done when this call begins
        self.calls.append(self.thread.submit(lambda: None if any(future.exception() for future in earlier) else call()))

    def finish(self) -> BaseException | None:
        """Waits for all calls; returns the first error, once."""
        errors = [future.exception() for future in self.calls]
        self.calls.clear()
        return next(filter(None, errors), None)

    def drain(self) -> None:
        """Waits until everything is on disk. Raises SaveFailed."""
        if error := self.finish():
            raise error

    def load_checkpoint(
        self, path: str | Path, map_location: Callable[..., Any] | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Always with weights_only=True: a checkpoint cannot run code."""
        self.drain()
        return weights.load(Path(path))

    def remove_checkpoint(self, path: str | Path) -> None:
        self.submit(partial(self.remove_own, Path(path)))

    def remove_own(self, path: Path) -> None:
        """Removes only what this run saved: paths also come from checkpoints, which a stranger may have written."""
        if path.name != ".." and any(path.parent.resolve().is_relative_to(folder) for folder in self.own):
            try:
                files.remove(path)
            except OSError as e:  # not worth a failed run
                log.warning("the older checkpoint %s could not be removed: %s", path, e.strerror)
        else:
            log.warning("%s was not saved by this run and is not removed", path)

    def teardown(self) -> None:
        """Finishes pending writes. An error here does not hide the error that ended the training."""
        error = self.finish()
        self.stager = new_stager()  # frees the memory
        if error and sys.exc_info()[0] is None:
            raise error
        if error:
            log.warning("%s", error)


# --- The best checkpoints by the monitored metric ---


class ModelCheckpoint(callbacks.ModelCheckpoint):
    """Between equal scores, the lower val/loss decides, then the later step. Lightning keeps the first.

    File names contain the steps done, because `trainer.global_step` counts those of every optimizer. A run resumed from
    an earlier checkpoint writes the same file again. The state has names, not paths: a run's folder may be moved, and a
    name cannot point outside it.
    """

    def __init__(self, **options: Any) -> None:
        # saves after each validation: max_steps may end an epoch early
        super().__init__(**options, save_on_train_epoch_end=False)
        self.kept: dict[str, tuple[float, float]] = {}  # score and loss by file name, the best first
        self.saved_at = 0  # a step

    @property
    def state_key(self) -> str:
        """Not that of Lightning's ModelCheckpoint, which a user may add with the same arguments."""
        return f"lockstep.{super().state_key}"

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps those that are in this run's folder, not those of a different run."""
        saved = {name: tuple(scores) for name, scores in state_dict.get("kept", {}).items() if BEST.fullmatch(name)}
        self.keep({name: scores for name, scores in saved.items() if (Path(str(self.dirpath)) / name).exists()})

    def keep(self, kept: dict[str, tuple[float, float]]) -> None:
        """Sets the attributes that Lightning and loggers read."""
        self.kept = kept
        paths = [str(Path(str(self.dirpath)) / name) for name in kept]
        self.best_k_models = {path: torch.tensor(score) for path, (score, _) in zip(paths, kept.values(), strict=True)}
        if paths:
            self.best_model_path, self.best_model_score = paths[0], self.best_k_models[paths[0]]

    def ranking(self, trainer: Trainer) -> tuple[str, dict[str, tuple[float, float]], list[str]]:
        """The file name of the latest validation, the scores of all files, and their names, the best first."""
        new, sign = f"best-step-{steps_done(trainer)}.ckpt", 1 if self.mode == "max" else -1
        score, loss = (float(trainer.callback_metrics.get(name, math.inf)) for name in (self.monitor or "", "val/loss"))
        scores = self.kept | {new: (score, loss)}
        steps = {name: int(name.removeprefix("best-step-").removesuffix(".ckpt")) for name in scores}
        keys = {name: (sign * scores[name][0], -scores[name][1], steps[name]) for name in scores}
        return new, scores, sorted(keys, key=keys.__getitem__, reverse=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the checkpoint if it is among the best `save_top_k`, and removes those that no longer are."""
        step = steps_done(trainer)
        if trainer.state.fn != "fit" or trainer.sanity_checking or not self.save_top_k or step in (0, self.saved_at):
            return
        folder, logged = Path(str(self.dirpath)), trainer.callback_metrics
        if self.monitor not in logged:  # config/checks.py rejects what is known before the run starts
            trainer.save_checkpoint(folder / "last.ckpt", weights_only=False)
            LastCheckpoint.wait(trainer)
            raise TrainingFailed(
                f"checkpoint.monitor={self.monitor} is not logged by {type(pl_module).__name__}, which logs {', '.join(sorted(logged)) or 'nothing'}. Set "
                "checkpoint.monitor=<one of them>, or checkpoint.monitor=null to keep only the last checkpoint; add resume=auto to continue."
            )
        values = {name: float(logged.get(name, 0)) for name in (self.monitor, "val/loss")}
        bad = [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]
        if bad:
            log.warning("%s at step %d. This checkpoint is not a candidate for the best.", ", ".join(bad), step)
        new, all_scores, ranked = self.ranking(trainer)
        best = ranked if self.save_top_k == -1 else ranked[: self.save_top_k]
        # Processes may have different scores.
        if not trainer.strategy.reduce_boolean_decision(new in best and not bad):
            return
        self.keep({name: all_scores[name] for name in best})
        self.current_score = torch.tensor(all_scores[new][0])
        trainer.save_checkpoint(folder / new, weights_only=False)
        self.saved_at = step
        for logger in trainer.loggers if trainer.is_global_zero else ():
            logger.after_save_checkpoint(self)
        for name in ranked[len(best) :]:
            trainer.strategy.remove_checkpoint(folder / name)


# --- The schedules of a resumed run: the config says what they are constructed with, the checkpoint how far they are ---

# Keys that decide it. The state of a schedule does not show what a lambda uses, such as the length of the run.
CONSTRUCTED_FROM = ("task", "data", "schedule", "trainer.max_epochs", "trainer.max_steps", "trainer.limit_train_batches")  # fmt: skip
STALE = "%s cannot repeat its steps under the changed config: until its next step, the learning rate is the checkpoint's. Pass init_from=<run> to start over."


def options(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def constructed(trainer: Trainer) -> dict[str, Any]:
    """The options of the optimizers and the states of the schedules, before the first step."""
    schedules = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
    return copy.deepcopy({"groups": [options(each) for each in trainer.optimizers], "schedules": schedules})


def differing(then: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in now.items() if key not in then or then[key] != value}


def schedule_steps(state: dict[str, Any]) -> Any:
    """The steps that a schedule has done. A ChainedScheduler has those of its parts."""
    return next(value for path, value in leaves(state) if path[-1] == "last_epoch")


def repeat_steps(scheduler: Any, state: dict[str, Any]) -> None:
    """Makes as many steps as the saved `state` has, and replaces it by the result."""
    with warnings.catch_warnings(action="ignore"):  # the optimizer has not made a step
        for _ in range(schedule_steps(state) - schedule_steps(scheduler.state_dict())):
            scheduler.step()
    state.clear()
    state.update(scheduler.state_dict())


def adopt_changes(trainer: Trainer, checkpoint: dict[str, Any], *, config_changed: bool) -> None:
    """Makes a checkpoint what it would be if optimizers and schedules had been constructed as they are now.

    Changed schedules repeat their steps, which also sets the learning rates. Those that need metrics keep their history.
    """
    now, then = constructed(trainer), checkpoint["constructed"]
    changed = config_changed or now["schedules"] != then["schedules"]
    states = checkpoint["lr_schedulers"], then["schedules"], now["schedules"]
    schedules = list(zip(trainer.lr_scheduler_configs, *states, strict=False))
    optimizers = zip(trainer.optimizers, checkpoint["optimizer_states"], then["groups"], strict=False)
    for optimizer, optimizer_state, then_groups in optimizers:
        own = [(config.scheduler, *rest) for config, *rest in schedules if config.scheduler.optimizer is optimizer]
        # the number of steps alone decides the learning rate, and not a metric or a method of its own
        kinds = {isinstance(each, LRScheduler) and not isinstance(each, ReduceLROnPlateau) for each, *_ in own}
        repeats = changed and kinds == {True}
        for scheduler, state, before, after in own:
            if repeats:
                repeat_steps(scheduler, state)
                continue
            state.update(differing(before, after))
            if changed and not isinstance(scheduler, ReduceLROnPlateau):
                log.warning(STALE, type(scheduler).__name__)
        for group, before, after in zip(optimizer_state["param_groups"], then_groups, options(optimizer), strict=False):
            group.update(differing({} if repeats else before, after))


# --- When checkpoints are saved, and where in the training a resumed run continues ---


class Position(Callback):
    """Makes every checkpoint record a position between steps: all steps so far are complete, the next has not begun.

    The counters that Lightning's loops save depend on the hook that saves, and resuming from some of them loses a
    validation or an epoch (NOTEBOOK.md). The public hooks here correct them on saving and on loading.
    """

    def __init__(self, config: RunConfig, made_for: dict[str, Any], begin: Sequence[Any] = ()) -> None:
        self.config, self.made_for = config, made_for  # saved in every checkpoint
        self.begin = begin  # called before anything begins a step

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.constructed = constructed(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["config"], checkpoint["constructed"] = self.config.values, self.constructed
        checkpoint |= self.made_for
        checkpoint["global_step"] = steps_done(trainer)  # Lightning counts every optimizer's, and loads `loops`
        # exact.logical_ranks may change the config's value
        checkpoint["accumulate_grad_batches"] = trainer.accumulate_grad_batches
        loop = checkpoint["loops"]["fit_loop"]
        epochs, batches = loop["epoch_progress"], loop["epoch_loop.batch_progress"]
        done, begun = batches["current"]["processed"], epochs["current"]["ready"]
        done -= done % trainer.accumulate_grad_batches  # max_time may end a run within a step
        between = done == 0 and epochs["current"]["processed"] == begun  # between two epochs, as it was loaded
        fetched = batches["current"]["ready"]  # is_last_batch is set when a batch is fetched
        last = batches["is_last_batch"] and fetched == batches["current"]["processed"]
        ended = between or last or done >= trainer.num_training_batches
        for scope in ("total", "current"):
            finished = dict.fromkeys(("processed", "completed"), begun if ended else begun - 1)
            epochs[scope] = dict.fromkeys(epochs[scope], begun) | finished
        batches["total"] = dict.fromkeys(batches["total"], batches["total"]["processed"])
        batches["current"] = dict.fromkeys(batches["current"], 0 if ended else done)
        batches["is_last_batch"] = False
        save_logged_step(loop, steps_done(trainer))
        loop["state_dict"].pop("combined_loader", None)  # empty; with it a plain Trainer rejects the checkpoint
        checkpoint["epoch_means"] = save_epoch_means(trainer)
        checkpoint["gradient_order"] = trainer.strategy.gradient_order  # type: ignore[attr-defined]
        checkpoint["window"] = trainer.strategy.means.collect(keeps=trainer.is_global_zero)  # type: ignore[attr-defined]
        modules = pl_module.named_modules()
        checkpoint["frozen"] = {name: m.frozen_digest for name, m in modules if hasattr(m, "frozen_digest")}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Converts micro-batch counters: this run may accumulate more or fewer micro-batches per global batch."""
        current, saved = trainer.accumulate_grad_batches, checkpoint["accumulate_grad_batches"]
        batches = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for scope in ("total", "current"):
            batches[scope] = {key: count * current // saved for key, count in batches[scope].items()}
        old, new = dotted(checkpoint["config"]), dotted(self.config.values)
        keys = [key for key in {**old, **new} if key.startswith(CONSTRUCTED_FROM)]
        adopt_changes(trainer, checkpoint, config_changed=any(old.get(key) != new.get(key) for key in keys))
        raise_problems(f"resume: {error}" for error in changed_frozen(pl_module, checkpoint.get("frozen", {})))
        load_epoch_means(trainer, checkpoint.get("epoch_means", {}))
        trainer.strategy.gradient_order = checkpoint["gradient_order"]  # type: ignore[attr-defined]
        trainer.strategy.means.load(checkpoint, keeps=trainer.is_global_zero)  # type: ignore[attr-defined]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if steps_done(trainer) and not trainer.strategy.has_updated:  # type: ignore[attr-defined]
            raise TrainingFailed(
                f"none of the {steps_done(trainer)} steps updated a parameter: `training_step` returned None, or no optimizer made a step."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        interval, accumulate = trainer.val_check_batch, trainer.accumulate_grad_batches
        ends = None, math.inf, trainer.num_training_batches  # of an epoch, which complete a step
        if interval not in ends and interval % accumulate:
            raise UserError(
                f"trainer.val_check_interval={trainer.val_check_interval} would validate after {interval} micro-batches, within a "
                f"step of {accumulate}. Set a multiple: trainer.val_check_interval={accumulate * max(1, int(interval) // accumulate)}."
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        for call in self.begin if batch_idx % trainer.accumulate_grad_batches == 0 else ():
            call(trainer)
        set_logged_step(trainer, steps_done(trainer) + 1)


class LastCheckpoint(Checkpoint):
    """last.ckpt: saved after each epoch, every `every_n_steps` optimizer steps, and at the end of the run.

    Within an epoch it is saved when the next batch begins: the log row and the validation of the last step are done by
    then, and a resumed run repeats neither.
    """

    def __init__(self, path: Path, every_n_steps: int | None, resumed: str | None) -> None:
        self.path, self.every_n_steps, self.is_due = path, every_n_steps, False
        self.resumed = Path(resumed) if resumed else None
        self.saved_at = 0

    def save(self, trainer: Trainer) -> None:
        if self.saved_at != steps_done(trainer):
            trainer.save_checkpoint(self.path, weights_only=False)
            self.saved_at = steps_done(trainer)

    def save_and_wait(self, trainer: Trainer) -> None:
        self.save(trainer)
        self.wait(trainer)

    @staticmethod
    def wait(trainer: Trainer) -> None:
        """Returns when every process sees the saved checkpoints on disk. Raises SaveFailed."""
        writer: Any = trainer.strategy.checkpoint_io
        writer.drain()
        trainer.strategy.barrier()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.saved_at = steps_done(trainer)
        self.tidy(trainer)
        if not self.every_n_steps and trainer.num_training_batches == math.inf and trainer.is_global_zero:
            log.warning(
                "last.ckpt is saved at the end of each epoch, but the length of an epoch is unknown. Set checkpoint.every_n_steps=1000."
            )

    def begin_step(self, trainer: Trainer) -> None:
        """Waits for the update of a module that accumulates gradients itself."""
        self.is_due |= bool(self.every_n_steps and steps_done(trainer) % self.every_n_steps == 0)
        if self.is_due and not trainer.strategy.lacks_update:  # type: ignore[attr-defined]
            self.save(trainer)
            self.is_due = False

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.save(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.wait(trainer)
        self.tidy(trainer)  # for a run with nothing left to train
        trainer.strategy.barrier()  # now every process sees the last checkpoint

    def tidy(self, trainer: Trainer) -> None:
        """Copies the checkpoint that the run was resumed from to last.ckpt, and removes outdated best checkpoints.

        Outdated ones belong to an abandoned continuation, or a kill prevented their removal. Without this, the next
        resume would take a newer checkpoint, and a run with nothing left to train would have no last checkpoint.
        """
        folder, source = self.path.parent, self.resumed
        if not trainer.is_global_zero or source is None or source.resolve().parent != folder.resolve():
            return
        if source.name != self.path.name:
            with files.atomic_replace(self.path, over_folder=True) as part:
                copy = partial(shutil.copytree, symlinks=True) if source.is_dir() else shutil.copyfile
                copy(source, part)
            self.resumed = self.path
        savers = (saver for saver in trainer.checkpoint_callbacks if isinstance(saver, ModelCheckpoint))
        best_paths = {Path(path) for saver in savers for path in saver.best_k_models}
        for path in folder.iterdir():
            name = BEST.fullmatch(path.name)
            if name and path.resolve() not in best_paths and (best_paths or int(name[1]) > steps_done(trainer)):
                files.remove(path)


def best_checkpoint(trainer: Trainer) -> str | None:
    """The checkpoint to test: the best by `checkpoint.monitor`; the last if nothing was validated. Raises TrainingFailed: it is damaged."""
    # Lockstep's callbacks, not a user's
    best_paths = [c.best_model_path for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
    last_paths = [str(c.path) for c in trainer.checkpoint_callbacks if isinstance(c, LastCheckpoint)]
    path = next((path for path in (*best_paths, *last_paths) if path and Path(path).exists()), None)
    is_complete = path is None or not trainer.is_global_zero or is_checkpoint(Path(path))  # rank 0 reads it for all
    if not trainer.strategy.broadcast(is_complete):
        raise TrainingFailed(
            f"{path} was damaged after it was saved and cannot be tested. Restore it from a copy, or move it away to test the last "
            "checkpoint instead; then rerun the command with resume=auto.",
            alike=True,
        )
    return path
