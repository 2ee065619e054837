"""What a run knows of its batches: of dataloaders that a user brings, or of a data set whose batches Lockstep makes."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial, wraps
from itertools import count
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import DataLoader

from lockstep.data.datamodule import DataModule
from lockstep.data.global_batches import require_one_each
from lockstep.data.keyed import Apart
from lockstep.data.sampler import FILLER, key_of
from lockstep.data.standard import Brought, standard
from lockstep.errors import UserError
from lockstep.training.arithmetic import micro_batch_index

HOOKS = ("train_dataloader", "val_dataloader", "test_dataloader")
SEVERAL = "a step of several loaders has the mean of their weights: it is one process's step where their batches divide evenly"
# of Lightning, in which a module makes the data of a part
STAGE_OF = {
    "train": TrainerFn.FITTING,
    "val": TrainerFn.FITTING,
    "test": TrainerFn.TESTING,
    "predict": TrainerFn.PREDICTING,
}


class Loaders:
    """Those of a LightningDataModule, or of the module itself."""

    position: tuple[str, ...] = ("divided",)  # what a checkpoint holds of them to continue from
    size: int | None = None  # of a global batch, if it is known before training
    paths: Any = None  # of the samples that are predicted, if they are files
    sets: Sequence[str] = ()  # names of further evaluation sets

    def __init__(self, data: Any, module: pl.LightningModule) -> None:
        self.data, self.module = data, module
        self.holder: Any = data or module  # without data, Lightning takes the module's dataloaders
        # a split that `setup` draws is the same in training and in each evaluation
        draw_apart(self.holder, "setup", lambda: ("setup", module.trainer.strategy.seed, 0))  # type: ignore[attr-defined]

    @property
    def facts(self) -> dict[str, Any]:
        """What the report says of the data."""
        unknown = dict.fromkeys(("data/sha256", "data/train", "data/val", "data/test"))
        return {"unit": "samples", "data/source": "own dataloaders", **unknown}

    @property
    def training(self) -> list[Brought]:
        """The training loaders that a user brings, once the Trainer has them."""
        return standard(self.module.trainer.train_dataloader)

    @property
    def divided(self) -> bool:
        """Whether each process gets its share of all batches."""
        return {loader.gets for loader in self.training} == {"a share"}

    def title(self, trainer: pl.Trainer) -> str:
        """For the first lines of a run."""
        titles = dict.fromkeys(loader.title for loader in self.training)
        return " and ".join(titles) or "each process has its own batches"

    @property
    def notes(self) -> list[str]:
        """What limits the promises, or is ignored."""
        notes, name = [note for loader in self.training for note in loader.notes], type(self.module).__name__
        idle = [hook for hook in HOOKS if self.data and is_overridden(hook, self.module)]  # as under Lightning
        if idle:
            notes.append(f"{name}'s {idle[0]} is not used: {type(self.data).__name__} provides the batches")
        if len(self.training) > 1 and self.training[0].division.parts > 1:
            notes.append(SEVERAL)
        return notes

    def match_names(self, known: Mapping[str, Any], who: str, keys: Collection[str]) -> list[str]:
        """The names of targets are the module's own affair."""
        return []

    def provides(self, hook: str) -> bool:
        return is_overridden(hook, self.holder)

    def begin(self, trainer: pl.Trainer) -> None:
        """Before the Trainer asks for a loader."""
        for hook in (f"{part}_dataloader" for part in STAGE_OF):
            draw_apart(self.holder, hook, partial(key_of_loader, trainer, hook))

    def rows(self, trainer: pl.Trainer, batch_idx: int) -> range | None:
        """The places in the global batch of the micro-batch, if they are known."""
        strategy: Any = trainer.strategy
        every = {loader.told[strategy.micro_batch].places for loader in strategy.loaders_of(strategy.micro_batch)}
        return every.pop() if len(every) == 1 else None

    # --- Of a prediction ---

    def predict_on(self, part: str | None, *, gallery: bool = False) -> None:
        """Predictions get the dataloader of a part of the data, which `setup` makes as it does for that part."""
        if gallery:
            raise UserError(
                f"gallery=true needs a data set that describes itself, and {type(self.holder).__name__} has its own dataloaders. Remove it."
            )
        hook, stage = f"{part}_dataloader", STAGE_OF[str(part)]
        if not self.provides(hook):
            there = [name for name in STAGE_OF if self.provides(f"{name}_dataloader")]
            raise UserError(
                f"input={part}: {type(self.holder).__name__} has no {hook}. Add it, or set input to one of {', '.join(there)}."
            )
        set_up = self.holder.setup
        self.holder.setup = lambda *_, **__: set_up(stage)
        make = getattr(self.holder, hook)

        def divided() -> Any:
            """Divided here, because Lightning 2.6.6 first makes a DataLoader anew, from the arguments that its caller named."""
            return apply_to_collection(make(), DataLoader, self.module.trainer.strategy.process_dataloader)

        self.holder.predict_dataloader = divided

    def predicted(self, trainer: pl.Trainer) -> Iterator[list[int]]:
        """The samples of each batch of a prediction: indices in the data, or their numbers."""
        loaders = standard(trainer.predict_dataloaders)
        if len(loaders) != 1 or loaders[0].gets != "a share":
            name, why = loaders[0].name, "several dataloaders" if len(loaders) > 1 else "batches that cannot be divided"
            raise UserError(
                f"input: {name} gives {why}. Let the hook return one DataLoader, or call lockstep.load_model and predict in your own loop."
            )
        for number in count():
            told = loaders[0].told[number]
            numbered = all(isinstance(key, int | np.integer) for key in told.keys or [None])  # a stream's are samples
            yield [*map(int, (told.keys if numbered else told.places) or [])]


class DataSetLoaders(Loaders):
    """Lockstep's, of a data set."""

    position = ("DataModule",)
    data: DataModule
    divided = True  # type: ignore[assignment]

    def __init__(self, data: DataModule, module: pl.LightningModule) -> None:
        self.data, self.module, self.holder = data, module, data
        self.size, self.sets = data.batch_size, [*data.sets]
        data.fills = False  # a task sets it

    @property
    def facts(self) -> dict[str, Any]:
        return self.data.facts

    def title(self, trainer: pl.Trainer) -> str:
        world, accumulate, copies = trainer.world_size, trainer.accumulate_grad_batches, self.data.repeats
        accumulated = f" x {accumulate} accumulated" if accumulate > 1 else ""
        repeated = f", {copies} copies of each sample" if copies > 1 else ""
        return f"batch {self.size} = {world} x {self.data.batch_size // (world * accumulate)}{accumulated}{repeated}"

    def match_names(self, known: Mapping[str, Any], who: str, keys: Collection[str]) -> list[str]:
        return self.data.match_names(known, who, keys)

    def begin(self, trainer: pl.Trainer) -> None:
        if not self.data.fills:
            for split in (self.data.val_split, self.data.test_split, *self.data.sets.values()):
                require_one_each(split.count, trainer.world_size)

    def rows(self, trainer: pl.Trainer, batch_idx: int) -> range:
        size = self.data.batch_size // (trainer.world_size * trainer.accumulate_grad_batches)
        first = micro_batch_index(trainer, batch_idx) * size
        return range(first, first + size)

    def predict_on(self, part: str | None, *, gallery: bool = False) -> None:
        if part == "predict":
            raise UserError(
                "input=predict: this data has the parts train, val and test. For a folder of that name, pass input=./predict."
            )
        self.data.predicted = part or self.data.predicted
        self.paths = self.data.dataset.paths(self.data.predicted)

    def predicted(self, trainer: pl.Trainer) -> Iterator[list[int]]:
        for index_B in trainer.predict_dataloaders.sampler:  # type: ignore[union-attr]  # the loader's own order again
            yield index_B[index_B != FILLER].tolist()


def draw_apart(holder: Any, hook: str, key: Callable[[], tuple[str, int, int]]) -> None:
    """Lets a hook draw the same random numbers in each process and after each resume: one that makes a dataloader may draw a subset, and
    `setup` a split."""
    made = getattr(holder, hook)

    if hasattr(made, "draws_apart"):  # by an earlier Trainer
        return

    @wraps(made)
    def seeded(*args: Any, **kwargs: Any) -> Any:
        with Apart(int(key_of(*key())[0])):
            return made(*args, **kwargs)

    seeded.draws_apart = True  # type: ignore[attr-defined]
    setattr(holder, hook, seeded)


def key_of_loader(trainer: pl.Trainer, hook: str) -> tuple[str, int, int]:
    """With the epoch in which it is made, if it is made several times."""
    every, epoch = trainer.reload_dataloaders_every_n_epochs, trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]
    return hook, trainer.strategy.seed, epoch // every * every if every else 0  # type: ignore[attr-defined]
