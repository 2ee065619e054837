"""The datamodule: batches of a data set, in the sampler's order, preprocessed on the device."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor

from lockstep.config.targets import qualified_name
from lockstep.data.dataset import READ, Arrays, Batch, DataSet, classes_of, join_names, targets_of
from lockstep.data.loaders import FromWorkers, Indexed, InMemory, Reader, ResumableLoader, WithEpoch, is_numeric, timed
from lockstep.data.sampler import PARTS, EvalSampler, Indices, Sampler, Split, TrainBatches
from lockstep.data.splits import balanced, evaluation_splits, splits
from lockstep.errors import UserError, raise_problems

ON_DEVICE_SHARE = 0.1  # the fraction of a GPU's free memory that on_device=auto may use
# Maps targets and the number of names they may refer to, to the index and a description of the first invalid target.
TargetCheck = Callable[[Any, int], tuple[int, str] | None]

# --- Targets are numbers or columns that refer to names, whose order may differ between parts and checkpoints ---

# B batch · K name

NAMES = ("classes", "labels", "targets", "inputs", "vocabulary")  # lists in `metadata` that numbers refer to by index
MATCHED = NAMES[:3]  # the lists that targets refer to; targets can be renumbered
TRAIN, RENAME = "the train part", "For a torch Dataset, data.classes renames the classes of the train part."
NEW_HEAD = "For new classes, export a timm network, then set model.checkpoint_path=<export>/model.safetensors model.pretrained=true."
WIDE = (torch.uint16, torch.uint32, torch.uint64)  # torch supports few operations for these types


def names_at(metadata: Mapping[str, Any], key: str) -> list[Any]:
    """The list of names at `key` of `metadata`; empty if the value is not a list, such as a count or a dict."""
    value = metadata.get(key)
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return list(value) if is_list or getattr(value, "ndim", 0) == 1 else []  # type: ignore[arg-type]


def match_indices(reference: Sequence[Any], names: Sequence[Any], key: str, part: str, owner: str) -> Tensor | None:
    """The index in `reference` of each of `names`; None for equal lists. Raises UserError if they cannot be matched."""
    texts, index = [*map(str, names)], {str(name): i for i, name in enumerate(reference)}
    if texts == [*map(str, reference)]:
        return None
    unknown, unique = [n for n in texts if n not in index], len({*texts}) == len(texts) and len(index) == len(reference)
    if unknown or not unique or key not in MATCHED or (key == "targets" and len(texts) < len(index)):
        reason = f"{join_names(unknown)} cannot be matched" if unknown else "they must be the same, in the same order"
        raise UserError(
            f"the {part} part of this data has the {key} {join_names(texts)}, but {owner} has {join_names(reference)}: {reason}. Rename or remove them, or use different data. {RENAME if owner == TRAIN else NEW_HEAD}"
        )
    return torch.tensor([index[name] for name in texts])


def renumbered(target: Tensor, indices: Tensor, key: str, count: int) -> Tensor:
    """Renumbers targets. Numbers without a name, such as those of ignored pixels, stay. Missing columns become 0."""
    if key != "classes":
        return target.new_zeros(len(target), count).index_copy(1, indices.to(target.device), target)
    number, size = target.long(), len(indices)
    return indices.to(target.device)[number.clamp(0, size - 1)].where((number >= 0) & (number < size), number)


class DataModule(pl.LightningDataModule):
    """Training, validation and test batches of a data set, identical for any number of processes and workers."""

    trainer: pl.Trainer  # set before Lightning calls a hook or requests a dataloader

    def __init__(
        self, dataset: DataSet, *, batch_size: int, eval_batch_size: int, balance: bool = False, repeats: int = 1, num_workers: int = 0,
        prefetch_factor: int | None = None, persistent_workers: bool | None = None, on_device: bool | str = "auto", seed: int = 0,
        augment: Any = None, shards: int | None = None, **parts: Any,  # arguments of `splits`
    ) -> None:  # fmt: skip
        super().__init__()
        self.dataset, self.evaluated, self.unit = dataset, dataset.evaluated, dataset.unit
        self.batch_size, self.eval_batch_size, self.seed = batch_size, eval_batch_size, seed
        self.num_workers, self.on_device = num_workers, on_device
        self.augment, self.repeats, self.shards = augment, repeats, shards
        self.prefetch_factor, self.persistent_workers = prefetch_factor, persistent_workers
        self.in_memory: dict[int, InMemory] = {}
        self.with_workers: dict[tuple[str, bool], FromWorkers] = {}  # by part, and whether it is for training
        self.waited_s = 0.0  # how long training in this process has waited for batches and their preprocessing
        self.predicted = "test"  # the part that predict_dataloader loads
        self.is_by_hand = self.fills = False  # train.py created the data set; equal shares, with fillers
        self.index_B: Indices | None = None  # indices of the batch that is being transferred, on the host
        self.problems: list[str] | None = None  # why samples of the current batch could not be read
        self.train_split, self.val_split, self.test_split = splits(dataset, batch_size=batch_size, **parts)
        self.sets = evaluation_splits(dataset)
        self.folds, self.metadata = parts.get("folds"), dict(dataset.metadata)
        self.judge: TargetCheck | None = None  # checks targets that refer to the names in `metadata[judged]`
        self.judged, self.whole = "", False
        self.settled: set[str] = set()  # parts whose targets have all been checked
        self.numbering: dict[str, tuple[Tensor, str]] = {}  # for parts with different numbers: new indices, key
        self.match_names(dataset.metadata, TRAIN)
        if balance:
            self.train_split = balanced(self.train_split, dataset.train, dataset.unit)
        self.val_part = "train" if dataset.val is None else "val"
        side = augment.crops_from if augment else None
        self.to_crop = None if side is None else dataset.uncropped("train", side)  # training samples, uncropped
        self.transforms: str | None = None  # which random numbers the transforms draw, and what they crop
        if augment and augment.reads:
            self.transforms = ", ".join([*augment.drawn, *["of whole images"] * (self.to_crop is not None)])
            augment.check(self.raw("train", self.train_split.indices(np.arange(min(READ, self.train_split.count)))))
        if on_device is True and dataset.bytes_in_memory is None:
            raise UserError(
                "loader.on_device=true has no effect: these samples are read one by one, not held in memory. Set loader.on_device=auto."
            )

    @property
    def device(self) -> torch.device:
        return self.trainer.strategy.root_device

    @property
    def data_info(self) -> dict[str, Any]:
        """Data info for the report."""
        return {
            "unit": self.unit,
            "data/source": self.dataset.source,
            "data/sha256": self.dataset.fingerprint,
            "data/train": self.train_split.count,
            "data/val": self.val_split.count,
            "data/test": self.test_split.count,
            "data/notice": self.dataset.notice,
            **{f"data/{part}": split.count for part, split in self.sets.items()},
            **{f"data/{name}": value for name, value in self.dataset.data_info.items()},
        }

    def memory_device(self, arrays: Arrays) -> torch.device | None:
        """The GPU, if loader.on_device is true, or auto and the arrays are small; None leaves them where they are."""
        device, on_device = self.device, self.on_device
        if on_device == "auto":
            free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
            on_device = arrays.nbytes <= ON_DEVICE_SHARE * free
        return device if on_device else None

    def memory(self, arrays: Arrays) -> InMemory:
        """The arrays of a part on their device. They are moved once, because training and validation may share them."""
        if id(arrays) not in self.in_memory:
            self.in_memory[id(arrays)] = InMemory(arrays, self.memory_device(arrays))
        return self.in_memory[id(arrays)]

    def match_names(self, reference: Mapping[str, Any], owner: str, keys: Collection[str] = NAMES) -> list[str]:
        """From now on, renumbers targets as in `reference`, the `metadata` of `owner`, for these `keys`. Returns warnings.

        Raises:
            UserError: a part of the data has a name that is missing in `reference`. The message shows both lists.
        """
        metadata, warnings, numbering = self.dataset.metadata, list[str](), dict[str, tuple[Tensor, str]]()
        reference = {**metadata, **{key: names for key in keys if (names := names_at(reference, key))}}
        shared_keys = [key for key in NAMES if names_at(reference, key) and names_at(metadata, key)]
        for key in shared_keys:
            named = self.dataset.part_names
            parts = {part: named.get(part, {}).get(key, metadata[key]) for part in (*PARTS, *self.sets)}
            for part, names in parts.items():
                if (indices := match_indices(reference[key], names, key, part, owner)) is not None:
                    numbering[part] = indices, key
            present = {str(name) for names in parts.values() for name in names}
            if missing := [name for name in map(str, reference[key]) if name not in present]:
                warnings.append(f"{owner} has {len(reference[key]):,} {key}; this data lacks {join_names(missing)}")
        self.numbering = numbering
        known = self.metadata
        known |= {key: names for key in shared_keys if (names := names_at(reference, key)) != names_at(known, key)}
        self.metadata |= class_counts(self.dataset, self.train_split, self.metadata, self.numbering.get("train"))
        return warnings

    def check_targets(self, key: str, judge: TargetCheck, whole: bool = False) -> None:
        """Checks targets, which refer to the names in `metadata[key]`: stored arrays now, others when they are read.
        `whole`: converts targets of other types to integers.

        Raises:
            UserError: targets are invalid. The message names the first one of each part.
        """
        self.judged, self.judge, self.whole, self.settled, problems = key, judge, whole, set(), list[str]()
        for part in (*PARTS, *self.sets):
            targets = targets_of(samples := self.dataset.samples(part))
            try:
                if targets is not None and (error := self.first_wrong(part, targets)):
                    self.raw(part, [error[0]])  # recheck as read: a Dataset may change targets
                elif targets is not None and isinstance(samples, Arrays):
                    self.settled.add(part)
            except UserError as e:
                problems += e.problems
        raise_problems(problems)

    def first_wrong(self, part: str, target_B: Any) -> tuple[int, str] | None:
        names, _ = self.numbering.get(part, (self.metadata.get(self.judged, ()), ""))
        return self.judge(target_B, len(names)) if self.judge else None

    def renumber_targets(self, part: str, batch: Batch) -> Batch:
        """The batch with targets numbered as in `metadata`. Raises UserError, with part and index, if one is wrong."""
        target, (indices, key) = batch.get("target"), self.numbering.get(part, (None, ""))
        if self.judge and isinstance(target, Tensor) and target.layout == torch.strided:
            if part not in self.settled:
                # numpy lacks bfloat16
                numbers = target.detach().cpu().to(torch.float64 if target.is_floating_point() else target.dtype)
                if error := self.first_wrong(part, numbers.numpy()):
                    raise UserError(f"the target of sample {batch['index'][error[0]]} of the {part} part is {error[1]}")
            if self.whole and (target.is_floating_point() or target.dtype in WIDE):
                batch = {**batch, "target": (target := target.long())}
        if indices is None or target is None:
            return batch
        names = self.metadata[key]
        if not isinstance(target, Tensor):
            raise UserError(f"the {part} part cannot be renumbered. Number its {key} as in {join_names(names)}.")
        return {**batch, "target": renumbered(target, indices, key, len(names))}

    def reader(self, part: str, data: Any = None, *, training: bool = False, repeats: int | None = None) -> Reader:
        """A reader for a part of `data`, which is the dataset or its `evaluated`. `training`: with the transforms."""
        augment, repeats = (self.augment, repeats or self.repeats) if training else (None, 1)
        at_reading = augment.at_reading if augment and augment.reads else None
        one_by_one = training and self.to_crop is not None
        samples = self.to_crop if one_by_one else (data or self.dataset).samples(part)
        return Reader(samples, seed=self.seed, repeats=repeats, at_reading=at_reading, apart=one_by_one)

    def loader(self, part: str, sampler: Sampler, *, training: bool = False) -> ResumableLoader:
        on_gpu, data = self.device.type == "cuda", self.dataset if training else self.evaluated
        samples, reader = data.samples(part), self.reader(part, data, training=training)
        is_numeric_only = isinstance(samples, Arrays) and all(map(is_numeric, samples.arrays.values()))
        if is_numeric_only and not self.num_workers and not reader.at_reading:
            memory = self.memory(samples)
            read: Any = partial(memory.batches, sampler, pin=on_gpu and memory.device is None)
        else:
            persistent = self.num_workers > 0 and self.persistent_workers is not False
            options: dict[str, Any] = {"prefetch_factor": self.prefetch_factor, "persistent_workers": persistent}
            options |= {"num_workers": self.num_workers, "pin_memory": on_gpu}
            workers = FromWorkers(Indexed(reader), sampler=WithEpoch(sampler), **options)
            self.with_workers[part, training] = workers  # an earlier loader's workers end
            read = workers.batches
        return ResumableLoader(lambda: map(partial(self.renumber_targets, part), read()), sampler)

    def train_dataloader(self) -> ResumableLoader:
        sampler = self.sampler(
            rank=self.trainer.global_rank,
            world=self.trainer.world_size,
            accumulate=self.trainer.accumulate_grad_batches,
            contiguous=getattr(self.trainer.strategy, "contiguous_micro_batches", False),
        )
        loader = self.loader("train", sampler, training=True)
        return ResumableLoader(partial(self.resumed, loader.batches, sampler), sampler)

    def resumed(self, batches: Callable[[], Iterator[Batch]], sampler: TrainBatches) -> Iterator[Batch]:
        """The batches of an epoch from the Trainer's position on, which is read when the first batch is requested."""
        sampler.start = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
        yield from timed(batches(), self.wait)

    def wait(self, seconds: float) -> None:
        self.waited_s += seconds

    def eval_loader(self, part: str, split: Split) -> ResumableLoader:
        rank, world = self.trainer.global_rank, self.trainer.world_size
        sampler = EvalSampler(
            split, batch=self.eval_batch_size, rank=rank, world=world, shards=self.shards, padded=self.fills
        )
        return self.loader(part, sampler)

    def with_sets(self, stage: str, loader: ResumableLoader) -> ResumableLoader | list[ResumableLoader]:
        extra = [self.eval_loader(part, split) for part, split in self.sets.items() if part.startswith(f"{stage}/")]
        return [loader, *extra] if extra else loader

    def val_dataloader(self) -> ResumableLoader | list[ResumableLoader]:
        return self.with_sets("val", self.eval_loader(self.val_part, self.val_split))

    def test_dataloader(self) -> ResumableLoader | list[ResumableLoader]:
        return self.with_sets("test", self.eval_loader("test", self.test_split))

    @property
    def predicted_split(self) -> tuple[str, Split]:
        """The part of the data set to predict, and its split."""
        part = self.val_part if self.predicted == "val" else self.predicted
        return part, getattr(self, f"{self.predicted}_split")

    def predict_dataloader(self) -> ResumableLoader:
        return self.eval_loader(*self.predicted_split)

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Any:
        self.index_B = batch["index"].numpy()
        return self.trainer.lightning_module.on_before_batch_transfer(batch, dataloader_idx)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Any:
        trainer, began_s = self.trainer, time.perf_counter()
        index_B, self.index_B = self.index_B, None
        self.problems = batch.pop("problem", None)
        if trainer.training and self.augment is not None:
            rng_kwargs: dict[str, Any] = {"epoch": trainer.current_epoch, "repeats": self.repeats, "index_B": index_B}
            batch = self.augment.on_device(batch, seed=self.seed, **rng_kwargs)
        batch = (self.dataset if trainer.training else self.evaluated).preprocess(batch)
        # for half and double precision; Lightning converts batches before this hook only
        batch = trainer.precision_plugin.convert_input(batch)
        if trainer.training:
            self.waited_s += time.perf_counter() - began_s
        module = trainer.lightning_module
        as_dict = getattr(module, "named_batches", False)
        values = batch if as_dict else tuple(v for name, v in batch.items() if name not in ("index", "count"))
        return module.on_after_batch_transfer(values, dataloader_idx)

    def sampler(self, **process: Any) -> TrainBatches:
        """The sampler of one process's training batches; by default of whole global batches."""
        options: dict[str, Any] = {"batch": self.batch_size // self.repeats, "repeats": self.repeats, "seed": self.seed}
        return TrainBatches(self.train_split, **options, **process)

    def global_batch(self, epoch: int, step: int) -> Batch:
        """The samples that training uses at a step, as stored. Raises UserError if the epoch has fewer steps."""
        sampler = self.sampler()
        if step >= len(sampler):
            raise UserError(f"an epoch has {len(sampler)} steps, so step {step} does not exist. Steps count from 0.")
        sampler.epoch, sampler.start = epoch, step
        return self.raw("train", next(iter(sampler)), epoch=epoch)

    def preprocessed(
        self, batch: Batch, *, training: bool, epoch: int = 0, repeats: int = 1, device: Any = None
    ) -> Batch:
        """Augments a batch from `raw`, moves it to `device`, and preprocesses it for the network and the task."""
        augment = self.augment if training else None
        rng_kwargs: dict[str, Any] = {"seed": self.seed, "epoch": epoch, "repeats": repeats}
        if augment and self.to_crop is not None:
            reader = self.reader("train", training=True, repeats=repeats)
            batch = self.renumber_targets("train", reader(batch["index"].numpy(), epoch))
        elif augment:
            batch = augment.at_reading(batch, **rng_kwargs)
        batch = move_data_to_device(batch, device) if device else batch
        data = self.dataset if training else self.evaluated
        return data.preprocess(augment.on_device(batch, **rng_kwargs) if augment else batch)

    def raw(self, part: str, index_N: Any, epoch: int = 0) -> Batch:
        """Samples of a part as the data set returns them, before `preprocessed`."""
        data = self.dataset if part == "train" else self.evaluated
        return self.renumber_targets(part, self.reader(part, data)(np.asarray(index_N), epoch))

    def teardown(self, stage: str) -> None:
        """Ends workers after training, validation and test. Raises DataChanged if the decoded data has changed."""
        while self.with_workers:
            del self.with_workers.popitem()[1].loader  # ends its workers; Lightning ends only those of its own loaders
        _ = self.dataset.fingerprint

    def state_dict(self) -> dict[str, Any]:
        """Records which data a checkpoint was trained on. Raises DataChanged."""
        data, optional = self.dataset, {"folds": self.folds and "stratified", "transforms": self.transforms}
        optional["class"] = self.is_by_hand and qualified_name(data)
        state = {"source": data.source, "sha256": data.fingerprint, "train": len(data.train), "test": len(data.test)}
        return {**state, "about": self.metadata, **{name: value for name, value in optional.items() if value}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises UserError if the run trained on different data, or on samples that this run would validate."""
        fingerprint = self.dataset.fingerprint
        if (self.transforms and state.get("transforms") != self.transforms) or (self.folds and "folds" not in state):
            raise UserError(
                "the checkpoint was saved by an earlier version, in which crop, color_jitter, rotate, trivial and rand drew different random "
                "numbers, crops were taken from resized squares, or folds held out other samples: the result would differ. Resume it with that version, or start a new run with init_from=<checkpoint>."
            )
        if state["sha256"] != fingerprint:
            raise UserError(
                f"the checkpoint was trained on different data (sha256 {state['sha256'][:12]}) than this run's (sha256 {fingerprint[:12]}). "
                "Set data.root=<the folder it was trained on>, or init_from=<checkpoint> to start a new run from its weights."
            )


def class_counts(dataset: DataSet, split: Split, metadata: Mapping[str, Any], numbering: Any) -> dict[str, list[int]]:
    """The number of training samples per class; empty if the classes are unknown or not stored as one array."""
    names, classes = names_at(dataset.metadata, "classes"), names_at(metadata, "classes")
    if not names or not classes or (class_N := classes_of(dataset.train)) is None:
        return {}
    train_N = class_N[split.indices(np.arange(split.count))]
    count_K = np.zeros(len(classes), np.int64)
    counts = np.bincount(train_N[(train_N >= 0) & (train_N < len(names))], minlength=len(names))
    count_K[numbering[0] if numbering else slice(None)] = counts
    return {"class_counts": count_K.tolist()}
