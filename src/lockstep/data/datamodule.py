"""The datamodule: images in memory that all processes of a node share, dealt out by the sampler."""

# B batch · C channel · H W pixel

import time
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.data.augment import Augment
from lockstep.data.loaders import Batch, Images, InMemory, MemoryLoader, Place, WorkerLoader
from lockstep.data.prepare import Prepared, val_count
from lockstep.data.sampler import EvalBatches, Split, TrainBatches
from lockstep.data.transforms import Preprocess
from lockstep.errors import UserError

ON_DEVICE_SHARE = 0.1  # of a GPU's free memory, which a data set may take without being asked


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
        on_device: bool | str = "auto",
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
        self.batch_size, self.eval_batch_size, self.seed = batch_size, eval_batch_size, seed
        self.num_workers = num_workers
        self.prefetch_factor, self.persistent_workers, self.on_device = prefetch_factor, persistent_workers, on_device
        self.in_memory: dict[str, InMemory] = {}
        self.place = Place(lambda: 0)
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

    @property
    def device(self) -> torch.device:
        assert self.trainer is not None
        return self.trainer.strategy.root_device

    def home(self) -> torch.device | None:
        """The GPU, if its user wants the images there or they take little of it; otherwise they stay in their file."""
        device, wanted = self.device, self.on_device
        if wanted == "auto":
            free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
            wanted = self.prepared.images_bytes <= ON_DEVICE_SHARE * free
        return device if wanted else None

    def arrays(self, part: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        return self.prepared.array(f"{part}_images"), self.prepared.array(f"{part}_labels")

    def images(self, part: str) -> InMemory:
        """Put there once, for training and validation together."""
        if part not in self.in_memory:
            self.in_memory[part] = InMemory(*self.arrays(part), self.home())
        return self.in_memory[part]

    def loader(
        self, part: str, sampler: TrainBatches | EvalBatches, place: Place | None = None
    ) -> MemoryLoader | WorkerLoader:
        if not self.num_workers:
            images = self.images(part)
            return MemoryLoader(images, sampler, place=place, pin=self.copies_to_gpu(images.device))
        return WorkerLoader(
            Images(*self.arrays(part)),
            sampler=sampler,  # yields whole batches of indices; batch_size=None hands each to Images at once
            batch_size=None,
            place=place,
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch_factor,
            persistent_workers=self.persistent_workers is not False,
            pin_memory=self.copies_to_gpu(None),
        )

    def copies_to_gpu(self, home: torch.device | None) -> bool:
        return self.device.type == "cuda" and home is None

    def train_dataloader(self) -> MemoryLoader | WorkerLoader:
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
        self.place.position = lambda: progress.current.ready
        return self.loader("train", sampler, place=self.place)

    def eval_loader(self, part: str, split: Split) -> MemoryLoader | WorkerLoader:
        assert self.trainer is not None
        world, rank = self.trainer.world_size, self.trainer.global_rank
        return self.loader(part, EvalBatches(split, batch=self.eval_batch_size, rank=rank, world=world))

    def val_dataloader(self) -> MemoryLoader | WorkerLoader:
        return self.eval_loader("train", self.val_split)

    def test_dataloader(self) -> MemoryLoader | WorkerLoader:
        return self.eval_loader("test", self.test_split)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> tuple[Tensor, Tensor]:
        image_BCHW, label_B, index_B = batch
        trainer, began_s = self.trainer, time.perf_counter()
        assert trainer is not None
        if self.augment is not None and trainer.training:
            image_BCHW = self.augment(image_BCHW, index_B, trainer.current_epoch)
        image_BCHW = self.preprocess(image_BCHW)
        # half and double precision: Lightning converts batches before this hook
        image_BCHW = trainer.precision_plugin.convert_input(image_BCHW)
        if trainer.training:
            self.place.waited_s += time.perf_counter() - began_s
        return image_BCHW, label_B

    @property
    def waited_s(self) -> float:
        """How long this process's training has waited for batches and their preparation."""
        return self.place.waited_s

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
