"""The datamodule: images in memory that all processes of a node share, dealt out by the sampler."""

# B batch · C channel · H W pixel

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lockstep.data.augment import Augment
from lockstep.data.prepare import Prepared, val_count
from lockstep.data.sampler import FILLER, EvalBatches, Indices, Split, TrainBatches
from lockstep.data.transforms import Preprocess
from lockstep.errors import UserError

Batch = tuple[Tensor, Tensor, Tensor]  # image_BCHW, label_B, index_B in the data set
IGNORED = -100  # the label of a place without a sample: cross_entropy's ignore_index


class Images(Dataset[Batch]):
    """uint8 images and their labels, indexed by whole batches of indices."""

    def __init__(self, images_NCHW: NDArray[np.uint8], labels_N: NDArray[np.uint8]) -> None:
        self.images_NCHW, self.labels_N = images_NCHW, labels_N

    def __getitem__(self, indices_B: Indices) -> Batch:
        present = indices_B != FILLER
        places = np.where(present, indices_B, 0)
        labels_B = np.where(present, self.labels_N[places].astype(np.int64), IGNORED)  # in uint8, -100 would be 156
        return torch.from_numpy(self.images_NCHW[places]), torch.from_numpy(labels_B), torch.from_numpy(indices_B)


class Loader(DataLoader[Batch]):
    """torch's DataLoader that begins when its first batch is wanted, where `position` says.

    Lightning makes the iterator before it restores a checkpoint and sets the epoch; workers would fetch batches of
    epoch 0 by then. The position is the Trainer's own, which checkpoints keep: the loader has no state.
    """

    def __init__(self, *args: Any, position: Callable[[], int] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.position = position

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]  # torch names its own class
        if self.position is not None:
            assert isinstance(self.sampler, TrainBatches)
            self.sampler.start = self.position()
        yield from super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load. Having both methods tells Lightning that resuming in mid-epoch is right."""


class DataModule(pl.LightningDataModule):
    """Training, validation and test batches of a prepared data set.

    Batches hold uint8 images until they are on the device, where `augment` and `preprocess` make them what the network sees.
    """

    def __init__(
        self,
        prepared: Prepared,
        *,
        batch_size: int,
        eval_batch_size: int,
        val_fraction: float,
        limit_train: int | None,
        num_workers: int,
        prefetch_factor: int | None = None,
        persistent_workers: bool | None = None,
        seed: int,
        image_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        classes: Sequence[str],
        channels_last: bool = False,
        random_shift: int = 0,
        random_flip: bool = False,
    ) -> None:
        super().__init__()
        self.prepared = prepared
        self.batch_size, self.eval_batch_size, self.num_workers, self.seed = (
            batch_size,
            eval_batch_size,
            num_workers,
            seed,
        )
        self.prefetch_factor, self.persistent_workers = prefetch_factor, persistent_workers
        val = val_count(prepared.train, val_fraction)
        train = prepared.train - val
        self.val_split = Split(prepared.train, 0, val)
        self.train_split = Split(prepared.train, val, min(train, limit_train or train))
        self.test_split = Split(prepared.test, 0, prepared.test, shuffled=False)
        self.preprocess = Preprocess(image_size=image_size, mean=mean, std=std, channels_last=channels_last)
        self.augment = Augment(seed=seed, shift=random_shift, flip=random_flip) if random_shift or random_flip else None
        self.channels: int = prepared.array("train_images").shape[1]
        self.image_size, self.classes = image_size, tuple(classes)
        self.about = {  # all that is needed to use a network that was trained on it
            "channels": self.channels,
            "image_size": image_size,
            "classes": list(classes),
            "mean": list(mean),
            "std": list(std),
        }

    def images(self, part: str) -> Images:
        return Images(self.prepared.array(f"{part}_images"), self.prepared.array(f"{part}_labels"))

    def loader(
        self, images: Images, sampler: TrainBatches | EvalBatches, position: Callable[[], int] | None = None
    ) -> Loader:
        return Loader(
            images,
            sampler=sampler,  # yields whole batches of indices; batch_size=None hands each to Images at once
            batch_size=None,
            position=position,
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch_factor,
            persistent_workers=self.num_workers > 0 if self.persistent_workers is None else self.persistent_workers,
            pin_memory=self.trainer is not None and self.trainer.strategy.root_device.type == "cuda",
        )

    def train_dataloader(self) -> Loader:
        trainer = self.trainer
        assert trainer is not None
        sampler = TrainBatches(
            self.train_split,
            batch=self.batch_size,
            seed=self.seed,
            rank=trainer.global_rank,
            world=trainer.world_size,
            accumulate=trainer.accumulate_grad_batches,
        )
        progress = trainer.fit_loop.epoch_loop.batch_progress
        return self.loader(self.images("train"), sampler, position=lambda: progress.current.ready)

    def eval_loader(self, part: str, split: Split) -> Loader:
        assert self.trainer is not None
        world, rank = self.trainer.world_size, self.trainer.global_rank
        return self.loader(self.images(part), EvalBatches(split, batch=self.eval_batch_size, rank=rank, world=world))

    def val_dataloader(self) -> Loader:
        return self.eval_loader("train", self.val_split)

    def test_dataloader(self) -> Loader:
        return self.eval_loader("test", self.test_split)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> tuple[Tensor, Tensor]:
        image_BCHW, label_B, index_B = batch
        if self.augment is not None and self.trainer is not None and self.trainer.training:
            image_BCHW = self.augment(image_BCHW, index_B, self.trainer.current_epoch)
        image_BCHW = self.preprocess(image_BCHW)
        if self.trainer is not None:  # half and double precision: Lightning converts batches before this hook
            image_BCHW = self.trainer.precision_plugin.convert_input(image_BCHW)
        return image_BCHW, label_B

    def state_dict(self) -> dict[str, Any]:
        """What the weights of a checkpoint were trained on."""
        found = self.prepared
        return {"source": found.source, "sha256": found.sha256, "train": found.train, "test": found.test, **self.about}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["sha256"] != self.prepared.sha256:
            raise UserError(
                f"the checkpoint was trained on other data ({state['source']}, sha256 {state['sha256'][:12]}) than is here "
                f"({self.prepared.source}, sha256 {self.prepared.sha256[:12]}). Type data.root=<the folder of then>, "
                "or init_from=<checkpoint> to start a new run from its weights."
            )
