"""The datamodule: ordinary DataLoaders of a data set, whose batches are preprocessed on the device."""

import time
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DataLoader, default_convert

from lockstep import Arrays, Batch, DataSet, UserError, parts
from lockstep.kit.augment import Augmentation

ON_DEVICE_SHARE = 0.1  # the fraction of a GPU's free memory that on_device=auto may use


class DataModule(pl.LightningDataModule):
    """Training, validation and test batches of a data set. The strategy divides them among the processes."""

    trainer: pl.Trainer  # set before Lightning calls a hook or requests a dataloader

    def __init__(
        self, dataset: DataSet, *, batch_size: int, eval_batch_size: int, balance: bool = False, repeats: int = 1, num_workers: int = 0,
        prefetch_factor: int | None = None, persistent_workers: bool | None = None, on_device: bool | str = "auto",
        named: bool = True, operations: Mapping[str, Any] | None = None, **options: Any,  # arguments of `splits`
    ) -> None:  # fmt: skip
        super().__init__()
        self.dataset, self.evaluated, self.unit = dataset, dataset.evaluated, dataset.unit
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        self.on_device, self.named = on_device, named
        self.options: dict[str, Any] = {
            "num_workers": num_workers,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": num_workers > 0 and persistent_workers is not False,
            "collate_fn": default_convert,  # a part returns whole batches
        }
        self.predicted = "test"  # the part that predict_dataloader loads
        self.problems: list[str] | None = None  # why samples of the current batch could not be read
        self.splits = parts.splits(dataset, batch_size=batch_size, **options)  # by part of the run
        self.targets = parts.Targets(dataset, self.splits["train"])
        self.order = parts.order(self.splits["train"], dataset.train, dataset.unit, repeats=repeats, balance=balance)
        self.augment = Augmentation(operations or {})
        side = self.augment.crops_from
        self.to_crop = None if side is None else dataset.uncropped("train", side)  # training samples, uncropped
        if on_device is True and dataset.bytes_in_memory is None:
            raise UserError(
                "loader.on_device=true has no effect: these samples are read one by one, not held in memory. Set loader.on_device=auto."
            )

    @property
    def data_info(self) -> dict[str, Any]:
        """Data info for the report."""
        return {
            "unit": self.unit,
            "data/source": self.dataset.source,
            "data/sha256": self.dataset.fingerprint,
            **{f"data/{part}": split.count for part, split in self.splits.items()},
            "data/notice": self.dataset.notice,
            **{f"data/{name}": value for name, value in self.dataset.data_info.items()},
        }

    @property
    def metadata(self) -> dict[str, Any]:
        return self.targets.metadata

    def setup(self, stage: str) -> None:
        """Raises UserError: the module cannot use the targets."""
        module: Any = getattr(self.trainer, "lightning_module", None)
        spec = getattr(module, "target_spec", None)
        if spec and parts.names_at(self.metadata, module.names) and not self.targets.judge:
            self.targets.check(module.names, spec.wrong, self.raw, spec.integer)
        mixes = any(each.mixes for each in self.augment.operations.values())
        if mixes and module and not getattr(module, "mixes", False):
            raise UserError(
                f"augment mixes two targets, but {type(module).__name__} does not say `mixes = True`. Set augment=none."
            )

    # --- DataLoaders ---

    def source(self, part: str) -> str:
        """The part of the data set that a part of the run is from."""
        return "train" if part == "val" and self.dataset.val is None else part

    def loader(self, samples: Any, part: str, *, transform: Any = None, **options: Any) -> DataLoader[Any]:
        device = self.trainer.strategy.root_device if self.trainer else torch.device("cpu")
        if device.type != "cpu" and isinstance(samples, Arrays) and not (transform or self.options["num_workers"]):
            asks = self.on_device == "auto"
            free = torch.cuda.mem_get_info(device)[0] if asks and device.type == "cuda" else 0
            if samples.nbytes <= ON_DEVICE_SHARE * free if asks else self.on_device:
                samples.to(device)
        pins = device.type == "cuda" and not getattr(samples, "on_device", None)
        return DataLoader(parts.Part(samples, self.splits[part], transform), pin_memory=pins, **self.options, **options)

    def train_dataloader(self) -> DataLoader[Any]:
        samples = self.dataset.train if self.to_crop is None else self.to_crop
        transform = self.augment.at_reading if self.augment.transforms else None
        options = {"batch_size": self.batch_size, "drop_last": True}
        return self.loader(samples, "train", transform=transform, sampler=self.order, **options)

    def eval_dataloader(self, part: str) -> DataLoader[Any]:
        return self.loader(self.evaluated.samples(self.source(part)), part, batch_size=self.eval_batch_size)

    def evaluated_parts(self, stage: str) -> list[str]:
        return [stage, *(part for part in self.splits if part.startswith(f"{stage}/"))]

    def val_dataloader(self) -> list[DataLoader[Any]]:
        return [self.eval_dataloader(part) for part in self.evaluated_parts("val")]

    def test_dataloader(self) -> list[DataLoader[Any]]:
        return [self.eval_dataloader(part) for part in self.evaluated_parts("test")]

    def predict_dataloader(self) -> Any:
        """Divided here: Lightning 2.6.6 would first recreate a DataLoader from its named arguments."""
        return self.trainer.strategy.process_dataloader(self.eval_dataloader(self.predicted))

    def predict_on(self, part: str | None) -> Any:
        """Predicts on this part. Returns the paths of its samples, if they are files."""
        if part == "predict":
            raise UserError(
                "input=predict: this data has the parts train, val and test. For a folder of that name, pass input=./predict."
            )
        self.predicted = part or self.predicted
        return self.dataset.paths(self.predicted)

    def indices(self, positions: list[int]) -> list[int]:
        """The indices in the data set of the samples at these positions of what is predicted."""
        return self.splits[self.predicted].indices(np.array(positions)).tolist()  # type: ignore[no-any-return]

    # --- What happens to a batch ---

    def part_of(self, loader: int) -> str:
        """The part of the current batch."""
        trainer = self.trainer
        if trainer.training or trainer.predicting:
            return "train" if trainer.training else self.predicted
        return self.evaluated_parts("test" if trainer.testing else "val")[loader]

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Any:
        batch = self.targets.renumber(self.source(self.part_of(dataloader_idx)), batch)
        return self.trainer.lightning_module.on_before_batch_transfer(batch, dataloader_idx)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Any:
        trainer, began_s = self.trainer, time.perf_counter()
        strategy: Any = trainer.strategy
        self.problems = batch.pop("problem", None)
        if trainer.training:
            batch = self.augmented(batch, strategy.places, strategy.seed, trainer.current_epoch)
        else:
            batch = self.evaluated.preprocess(batch)
        # for half and double precision; Lightning converts batches before this hook only
        batch = trainer.precision_plugin.convert_input(batch)
        if trainer.training:
            strategy.waited_s += time.perf_counter() - began_s
        module = trainer.lightning_module
        values = batch if self.named else tuple(value for name, value in batch.items() if name != "index")
        return module.on_after_batch_transfer(values, dataloader_idx)

    def augmented(self, batch: Batch, places: range, seed: int, epoch: int) -> Batch:
        """A training batch with these places in an epoch, as the network and the loss get it."""
        options = {"seed": seed, "epoch": epoch, "repeats": self.order.repeats}
        return self.dataset.preprocess(self.augment.on_device(batch, np.arange(places.start, places.stop), **options))

    def raw(self, part: str, index_N: Any) -> Batch:
        """Samples of a part of the run as the data set returns them, before `preprocess`."""
        samples = (self.dataset if part == "train" else self.evaluated).samples(self.source(part))
        return self.targets.renumber(self.source(part), parts.batch_of(samples, index_N))

    # --- Checkpoints ---

    def teardown(self, stage: str) -> None:
        """Raises DataChanged if the decoded data has changed."""
        self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Records which data a checkpoint was trained on. Raises DataChanged."""
        data = self.dataset
        state = {"source": data.source, "sha256": data.fingerprint, "train": len(data.train), "test": len(data.test)}
        name = f"{type(data).__module__}.{type(data).__qualname__}"
        return {**state, "about": self.metadata, "class": name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises UserError if the run trained on different data."""
        fingerprint = self.dataset.fingerprint
        if state["sha256"] != fingerprint:
            raise UserError(
                f"the checkpoint was trained on different data (sha256 {state['sha256'][:12]}) than this run's (sha256 {fingerprint[:12]}). "
                "Set data.root=<the folder it was trained on>, or init_from=<checkpoint> to start a new run from its weights."
            )
