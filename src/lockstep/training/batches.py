"""The batches of a run."""

from collections.abc import Callable, Iterator
from functools import wraps
from itertools import count
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import DataLoader

from lockstep.data.keyed import IsolatedRandomState
from lockstep.data.sampler import key_of
from lockstep.data.standard import WrappedLoader, wrapped_loaders
from lockstep.errors import UserError

# Lightning's stage in which a module creates the data of a part.
STAGE_OF = {
    "train": TrainerFn.FITTING,
    "val": TrainerFn.FITTING,
    "test": TrainerFn.TESTING,
    "predict": TrainerFn.PREDICTING,
}


class Loaders:
    """The dataloaders of a LightningDataModule or of the module itself."""

    paths: Any = None  # paths of the samples to predict, if they are files

    def __init__(self, data: Any, module: pl.LightningModule) -> None:
        self.data, self.module = data, module
        self.holder: Any = data or module  # without data, Lightning uses the module's dataloaders
        # A random split made in `setup` is the same in training and in each evaluation.
        self.seed_hook("setup", lambda: 0)

    @property
    def position(self) -> tuple[str, ...]:
        """Checkpoint keys that a resumed run needs: whether batches were divided, and the datamodule's state if it has one."""
        saves = self.data and is_overridden("state_dict", self.data)
        return ("divided", type(self.data).__qualname__) if saves else ("divided",)

    @property
    def data_info(self) -> dict[str, Any]:
        """What the report shows about the data."""
        if known := getattr(self.data, "data_info", None):
            return dict(known)
        unknown = dict.fromkeys(("data/sha256", "data/train", "data/val", "data/test"))
        return {"unit": "samples", "data/source": "custom dataloaders", **unknown}

    @property
    def training(self) -> list[WrappedLoader]:
        """The user's training loaders, once the Trainer has them."""
        return wrapped_loaders(self.module.trainer.train_dataloader)

    @property
    def divided(self) -> bool:
        """Whether all batches are divided among the processes."""
        return {loader.batch_scope for loader in self.training} == {"a share"}

    @property
    def notes(self) -> list[str]:
        """Notes on what limits Lockstep's promises or is ignored."""
        notes, name = [note for loader in self.training for note in loader.notes], type(self.module).__name__
        hooks = (f"{part}_dataloader" for part in STAGE_OF)
        unused = [hook for hook in hooks if self.data and is_overridden(hook, self.module)]  # as in Lightning
        if unused:
            notes.append(f"{name}'s {unused[0]} is not used: {type(self.data).__name__} provides the batches")
        return notes

    @property
    def needs_whole(self) -> str:
        """Why a micro-batch that does not fit in memory cannot be divided; empty if it can."""
        if not self.module.automatic_optimization:
            return f"{type(self.module).__name__} uses manual optimization."
        strategy: Any = self.module.trainer.strategy
        return f"{type(self.module).__name__} gathers the global batch." if strategy.gathers else ""

    def provides(self, hook: str) -> bool:
        return is_overridden(hook, self.holder)

    def evaluates(self, step: str, loader: str) -> bool:
        """Whether both a step and its dataloader exist."""
        return is_overridden(f"{step}_step", self.module) and self.provides(f"{loader}_dataloader")

    def begin(self, trainer: pl.Trainer) -> None:
        """Called before the Trainer requests a loader. One that is created several times draws other numbers in each epoch."""
        interval: int = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
        epochs: Any = trainer.fit_loop.epoch_progress.current
        for part in STAGE_OF:
            self.seed_hook(f"{part}_dataloader", lambda: epochs.processed // interval * interval if interval else 0)

    def seed_hook(self, name: str, epoch: Callable[[], int]) -> None:
        """Makes a hook draw the same random numbers in each process and after each resume.

        A dataloader hook may draw a subset, and `setup` may draw a split.
        """
        method = getattr(self.holder, name)
        if hasattr(method, "draws_apart"):  # wrapped by an earlier Trainer
            return

        @wraps(method)
        def seeded(*args: Any, **kwargs: Any) -> Any:
            seed: int = self.module.trainer.strategy.seed  # type: ignore[attr-defined]
            with IsolatedRandomState(key_of(name, seed, epoch())):
                return method(*args, **kwargs)

        seeded.draws_apart = True  # type: ignore[attr-defined]
        setattr(self.holder, name, seeded)

    # --- Prediction ---

    def predict_on(self, part: str | None, *, gallery: bool = False) -> None:
        """Predicts on one part of the data: uses that part's dataloader, and calls `setup` with that part's stage."""
        if hasattr(self.data, "predict_on"):
            self.paths = self.data.predict_on(part)
            return
        if gallery:
            raise UserError(
                f"gallery=true needs a lockstep.DataSet, but {type(self.holder).__name__} has its own dataloaders. Remove gallery=true."
            )
        hook, stage = f"{part}_dataloader", STAGE_OF[str(part)]
        if not self.provides(hook):
            raise UserError(f"input={part}: {type(self.holder).__name__} has no {hook}. Add it.")
        set_up = self.holder.setup
        self.holder.setup = lambda *_, **__: set_up(stage)
        make_loader = getattr(self.holder, hook)

        def divided() -> Any:
            """Divides the loader here: Lightning 2.6.6 would first recreate it from its named arguments."""
            return apply_to_collection(make_loader(), DataLoader, self.module.trainer.strategy.process_dataloader)

        self.holder.predict_dataloader = divided

    def predicted(self, trainer: pl.Trainer) -> Iterator[list[int]]:
        """The samples of each prediction batch: their indices in the data, or their positions."""
        loaders = wrapped_loaders(trainer.predict_dataloaders)
        if len(loaders) != 1 or loaders[0].batch_scope != "a share":
            raise UserError(
                "input: predictions need one DataLoader whose batches can be divided. Return one from the hook, or call lockstep.load_model and "
                "predict in your own loop."
            )
        for batch_idx in count():
            record = loaders[0].batch_info[batch_idx]
            # a stream's keys are samples
            are_indices = all(isinstance(key, int | np.integer) for key in record.keys or [None])
            indices = [*map(int, (record.keys if are_indices else record.places) or [])]
            yield self.data.indices(indices) if hasattr(self.data, "indices") else indices
