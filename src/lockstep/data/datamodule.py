"""The datamodule: batches of a data set, in the sampler's order, preprocessed on the device."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor

from lockstep.data.dataset import READ, Arrays, Batch, DataSet, Indices, classes_of, listed, targets_of
from lockstep.data.loaders import FromWorkers, Indexed, InMemory, Places, Reader, ResumableLoader, is_numeric, timed
from lockstep.data.sampler import PARTS, EvalSampler, Sampler, Split, TrainBatches, balanced, evaluation_splits, splits
from lockstep.errors import UserError, raise_problems

VARIED, VARIED_BYTES = 16, 2**24  # candidates in memory for each sample of `varied`, and for all
ON_DEVICE_SHARE = 0.1  # the share of a GPU's free memory that on_device=auto may use
# Of targets, and how many names they may stand for: the place of the first wrong one, and what it is.
Judge = Callable[[Any, int], tuple[int, str] | None]

# --- Targets are numbers or columns that stand for names. Parts of the data, and checkpoints, may have the names in different orders ---

# B batch · K name

NAMES = ("classes", "labels", "targets", "inputs", "vocabulary")  # lists in `about` whose order gives numbers a meaning
MATCHED = NAMES[:3]  # those of targets, which can be renumbered
TRAIN, RENAME = "the train part", "For a torch Dataset, data.classes renames the classes of the train part."
NEW_HEAD = "For new classes, export a timm network, then set model.checkpoint_path=<export>/model.safetensors model.pretrained=true."
WIDE = (torch.uint16, torch.uint32, torch.uint64)  # which torch hardly computes with


def named(about: Mapping[str, Any], key: str) -> list[Any]:
    """A list of names in `about`; empty for anything else, such as a count or a dict."""
    value = about.get(key)
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return list(value) if is_list or getattr(value, "ndim", 0) == 1 else []  # type: ignore[arg-type]


def places_in(known: Sequence[Any], names: Sequence[Any], key: str, part: str, who: str) -> Tensor | None:
    """The places in `known` of `names`; None for equal lists. Raises UserError that shows both: they cannot be matched."""
    own, there = [*map(str, names)], {str(name): place for place, name in enumerate(known)}
    if own == [*map(str, known)]:
        return None
    strange, unique = [name for name in own if name not in there], len({*own}) == len(own) and len(there) == len(known)
    if strange or not unique or key not in MATCHED or (key == "targets" and len(own) < len(there)):
        why = f"{listed(strange)} cannot be matched" if strange else "they must be the same, in this order"
        raise UserError(
            f"the {part} part of this data has the {key} {listed(own)}, and {who} has {listed(known)}: {why}. Rename or remove them, or choose other data. {RENAME if who == TRAIN else NEW_HEAD}"
        )
    return torch.tensor([there[name] for name in own])


def renumbered(target: Tensor, places: Tensor, key: str, count: int) -> Tensor:
    """Numbers that stand for no name stay, such as those of pixels that do not count. Columns that are not there are 0."""
    if key != "classes":
        return target.new_zeros(len(target), count).index_copy(1, places.to(target.device), target)
    number, size = target.long(), len(places)
    return places.to(target.device)[number.clamp(0, size - 1)].where((number >= 0) & (number < size), number)


class DataModule(pl.LightningDataModule):
    """Training, validation and test batches of a data set, the same for every number of processes and workers."""

    trainer: pl.Trainer  # set before a hook or a dataloader is asked for

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
        self.with_workers: list[FromWorkers] = []
        self.waited_s = 0.0  # how long training in this process has waited for batches and their preparation
        self.predicted = "test"  # the part that predict_dataloader has
        self.fills = False  # whether the module wants as many samples in each process, some of which do not count
        self.index_B: Indices | None = None  # of the batch that is being transferred, on the host
        self.problems: list[str] | None = None  # why samples of the current batch could not be read
        self.train_split, self.val_split, self.test_split = splits(dataset, batch_size=batch_size, **parts)
        self.sets = evaluation_splits(dataset)
        self.folds, self.about = parts.get("folds"), dict(dataset.about)
        self.judge: Judge | None = None  # of targets that stand for the names in `about[judged]`
        self.judged, self.whole = "", False
        self.settled: set[str] = set()  # parts whose targets were all judged
        # of parts whose targets are not numbered as in `about`: places, key
        self.numbering: dict[str, tuple[Tensor, str]] = {}
        self.match_names(dataset.about, TRAIN)
        if balance:
            self.train_split = balanced(self.train_split, dataset.train, dataset.unit)
        self.val_part = "train" if dataset.val is None else "val"
        least = augment.crops_from if augment else None
        self.to_crop = None if least is None else dataset.whole("train", least)  # training samples with whole images
        self.transforms: str | None = None  # how they draw, and what they crop
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
    def facts(self) -> dict[str, Any]:
        """What the report says of the data."""
        return {
            "unit": self.unit,
            "data/source": self.dataset.source,
            "data/sha256": self.dataset.fingerprint,
            "data/train": self.train_split.count,
            "data/val": self.val_split.count,
            "data/test": self.test_split.count,
            "data/notice": self.dataset.notice,
            **{f"data/{part}": split.count for part, split in self.sets.items()},
            **{f"data/{name}": value for name, value in self.dataset.facts.items()},
        }

    def home(self, arrays: Arrays) -> torch.device | None:
        """The GPU, if loader.on_device asks for it or the arrays are small; None leaves them where they are."""
        device, wanted = self.device, self.on_device
        if wanted == "auto":
            free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
            wanted = arrays.nbytes <= ON_DEVICE_SHARE * free
        return device if wanted else None

    def memory(self, arrays: Arrays) -> InMemory:
        """The arrays of a part on their device, moved once: training and validation may share them."""
        if id(arrays) not in self.in_memory:
            self.in_memory[id(arrays)] = InMemory(arrays, self.home(arrays))
        return self.in_memory[id(arrays)]

    def match_names(self, known: Mapping[str, Any], who: str, keys: Collection[str] = NAMES) -> list[str]:
        """From now on, targets have the numbers that `known`, the `about` of `who`, gives to the names of `keys`. Returns warnings.

        Raises:
            UserError: a part of the data has a name that `known` lacks. The message shows both lists.
        """
        about, warnings, numbering = self.dataset.about, list[str](), dict[str, tuple[Tensor, str]]()
        known = {**about, **{key: names for key in keys if (names := named(known, key))}}
        matched = [key for key in NAMES if named(known, key) and named(about, key)]
        for key in matched:
            own = {part: self.dataset.part_names.get(part, {}).get(key, about[key]) for part in (*PARTS, *self.sets)}
            for part, names in own.items():
                if (places := places_in(known[key], names, key, part, who)) is not None:
                    numbering[part] = places, key
            there = {str(name) for names in own.values() for name in names}
            if absent := [name for name in map(str, known[key]) if name not in there]:
                warnings.append(f"{who} has {len(known[key]):,} {key}; this data lacks {listed(absent)}")
        self.numbering = numbering
        self.about |= {key: names for key in matched if (names := named(known, key)) != named(self.about, key)}
        self.about |= class_counts(self.dataset, self.train_split, self.about, self.numbering.get("train"))
        return warnings

    def judge_targets(self, key: str, judge: Judge, whole: bool = False) -> None:
        """Judges the targets that parts hold as an array now, and others when they are read; they stand for the names in `about[key]`.
        `whole`: those of other types become whole numbers.

        Raises:
            UserError: targets are wrong. It names the first one of each part.
        """
        self.judged, self.judge, self.whole, self.settled, problems = key, judge, whole, set(), list[str]()
        for part in (*PARTS, *self.sets):
            held = targets_of(samples := self.dataset.samples(part))
            try:
                if held is not None and (wrong := self.first_wrong(part, held)):
                    self.raw(part, [wrong[0]])  # as it is read: a Dataset may change what it holds
                elif held is not None and isinstance(samples, Arrays):
                    self.settled.add(part)
            except UserError as e:
                problems += e.problems
        raise_problems(problems)

    def first_wrong(self, part: str, target_B: Any) -> tuple[int, str] | None:
        places, _ = self.numbering.get(part, (self.about.get(self.judged, ()), ""))
        return self.judge(target_B, len(places)) if self.judge else None

    def labelled(self, part: str, batch: Batch) -> Batch:
        """The batch with the numbers of `about` as its targets. Raises UserError, with part and index: a target is wrong."""
        target, (places, of_key) = batch.get("target"), self.numbering.get(part, (None, ""))
        if self.judge and isinstance(target, Tensor) and target.layout == torch.strided:
            if part not in self.settled:
                # numpy lacks bfloat16
                numbers = target.detach().cpu().to(torch.float64 if target.is_floating_point() else target.dtype)
                if wrong := self.first_wrong(part, numbers.numpy()):
                    raise UserError(f"the target of sample {batch['index'][wrong[0]]} of the {part} part is {wrong[1]}")
            if self.whole and (target.is_floating_point() or target.dtype in WIDE):
                batch = {**batch, "target": (target := target.long())}
        if places is None or target is None:
            return batch
        names = self.about[of_key]
        if not isinstance(target, Tensor):
            raise UserError(f"the {part} part cannot be renumbered. Number its {of_key} so: {listed(names)}.")
        return {**batch, "target": renumbered(target, places, of_key, len(names))}

    def reader(self, part: str, data: Any = None, *, training: bool = False, repeats: int | None = None) -> Reader:
        """Of a part of `data`: the dataset, or its `evaluated`. `training`: with the transforms."""
        change, repeats = (self.augment, repeats or self.repeats) if training else (None, 1)
        at_reading = change.at_reading if change and change.reads else None
        apart = training and self.to_crop is not None
        samples = self.to_crop if apart else (data or self.dataset).samples(part)
        return Reader(samples, seed=self.seed, repeats=repeats, at_reading=at_reading, apart=apart)

    def loader(self, part: str, sampler: Sampler, *, training: bool = False) -> ResumableLoader:
        on_gpu, data = self.device.type == "cuda", self.dataset if training else self.evaluated
        samples, reader = data.samples(part), self.reader(part, data, training=training)
        is_numbers = isinstance(samples, Arrays) and all(map(is_numeric, samples.arrays.values()))
        if is_numbers and not self.num_workers and not reader.at_reading:
            memory = self.memory(samples)
            read: Any = partial(memory.batches, sampler, pin=on_gpu and memory.device is None)
        else:
            stay = self.num_workers > 0 and self.persistent_workers is not False
            options: dict[str, Any] = {"prefetch_factor": self.prefetch_factor, "persistent_workers": stay}
            options |= {"num_workers": self.num_workers, "pin_memory": on_gpu}
            loaded = FromWorkers(Indexed(reader), sampler=Places(sampler), **options)
            self.with_workers.append(loaded)
            read = loaded.batches
        return ResumableLoader(lambda: map(partial(self.labelled, part), read()), sampler)

    def train_dataloader(self) -> ResumableLoader:
        sampler = self.sampler(
            rank=self.trainer.global_rank,
            world=self.trainer.world_size,
            accumulate=self.trainer.accumulate_grad_batches,
            in_blocks=getattr(self.trainer.strategy, "contiguous_micro_batches", False),
        )
        loader = self.loader("train", sampler, training=True)
        return ResumableLoader(partial(self.resumed, loader.batches, sampler), sampler)

    def resumed(self, batches: Callable[[], Iterator[Batch]], sampler: TrainBatches) -> Iterator[Batch]:
        """The batches of an epoch from the Trainer's position on, which is known when the first one is requested."""
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
        further = [self.eval_loader(part, split) for part, split in self.sets.items() if part.startswith(f"{stage}/")]
        return [loader, *further] if further else loader

    def val_dataloader(self) -> ResumableLoader | list[ResumableLoader]:
        return self.with_sets("val", self.eval_loader(self.val_part, self.val_split))

    def test_dataloader(self) -> ResumableLoader | list[ResumableLoader]:
        return self.with_sets("test", self.eval_loader("test", self.test_split))

    @property
    def predicted_split(self) -> tuple[str, Split]:
        """The part of the data set and the split of it that are predicted."""
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
            of_step: dict[str, Any] = {"epoch": trainer.current_epoch, "repeats": self.repeats, "index_B": index_B}
            batch = self.augment.on_device(batch, seed=self.seed, **of_step)
        batch = (self.dataset if trainer.training else self.evaluated).preprocess(batch)
        # half and double precision: Lightning converts batches before this hook
        batch = trainer.precision_plugin.convert_input(batch)
        if trainer.training:
            self.waited_s += time.perf_counter() - began_s
        module = trainer.lightning_module
        named = getattr(module, "named_batches", False)
        taken = batch if named else tuple(v for name, v in batch.items() if name not in ("index", "count"))
        return module.on_after_batch_transfer(taken, dataloader_idx)

    def sampler(self, **place: Any) -> TrainBatches:
        """Of the training batches of one process; of whole global batches by default."""
        of_run: dict[str, Any] = {"batch": self.batch_size // self.repeats, "repeats": self.repeats, "seed": self.seed}
        return TrainBatches(self.train_split, **of_run, **place)

    def global_batch(self, epoch: int, step: int) -> Batch:
        """The samples that training takes at a step, as they are stored. Raises UserError if the epoch is shorter."""
        sampler = self.sampler()
        if step >= len(sampler):
            raise UserError(f"an epoch has {len(sampler)} steps; step {step} is beyond it. They count from 0.")
        sampler.epoch, sampler.start = epoch, step
        return self.raw("train", next(iter(sampler)), epoch=epoch)

    def finished(self, batch: Batch, *, training: bool, epoch: int = 0, repeats: int = 1, device: Any = None) -> Batch:
        """Augments a batch of `raw`, moves it to `device`, and preprocesses it for the network and the task."""
        change = self.augment if training else None
        of_step: dict[str, Any] = {"seed": self.seed, "epoch": epoch, "repeats": repeats}
        if change and self.to_crop is not None:
            reader = self.reader("train", training=True, repeats=repeats)
            batch = self.labelled("train", reader(batch["index"].numpy(), epoch))
        elif change:
            batch = change.at_reading(batch, **of_step)
        batch = move_data_to_device(batch, device) if device else batch
        data = self.dataset if training else self.evaluated
        return data.preprocess(change.on_device(batch, **of_step) if change else batch)

    def raw(self, part: str, index_N: Any, epoch: int = 0) -> Batch:
        """Samples of a part as the data set gives them, before `finished`."""
        data = self.dataset if part == "train" else self.evaluated
        return self.labelled(part, self.reader(part, data)(np.asarray(index_N), epoch))

    def example(self, samples: int | Indices, device: torch.device | str = "cpu", *, training: bool = True) -> Batch:
        """A batch of training samples, augmented for `training`: of these indices, or of the first, repeated if there are fewer."""
        index_N = np.arange(samples) % len(self.dataset.train) if isinstance(samples, int) else samples
        return self.finished(self.raw("train", index_N), training=training, device=torch.device(device))

    def varied(self, count: int) -> Indices:
        """Training samples whose halves differ most: the first has few values that are missing, negative or zero, such as padding."""
        stored, most = self.dataset.train, count
        if isinstance(stored, Arrays):  # the others are read one by one
            most = min(VARIED * count, VARIED_BYTES * len(stored) // max(1, stored.nbytes), self.train_split.count)
        place_N = np.linspace(0, self.train_split.count - 1, max(count, most)).astype(np.int64)
        index_N = self.train_split.indices(place_N)
        values = [value for name, value in self.raw("train", index_N).items() if name != "index"]
        absent_N = sum((absent(value, len(index_N)) for value in values), np.zeros(len(index_N)))
        order = np.argsort(absent_N, kind="stable")
        return index_N[np.append(order[: count // 2], order[-(count - count // 2) :])]

    def teardown(self, stage: str) -> None:
        """After training, validation and test. Raises DataChanged if the decoded data was changed meanwhile."""
        while self.with_workers:
            # ends the workers, which the DataLoader keeps from epoch to epoch: Lightning ends those of loaders that it knows
            del self.with_workers.pop().loader
        _ = self.dataset.fingerprint

    def state_dict(self) -> dict[str, Any]:
        """Records which data the weights of a checkpoint were trained on. Raises DataChanged."""
        sizes = {"train": len(self.dataset.train), "test": len(self.dataset.test)}
        known = {"source": self.dataset.source, "sha256": self.dataset.fingerprint, **sizes, "about": self.about}
        how = {"folds": self.folds and "stratified", "transforms": self.transforms}
        return {**known, **{name: value for name, value in how.items() if value}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises UserError: the run trained on other data, or on samples that are validated here."""
        here = self.dataset.fingerprint
        if self.folds and "folds" not in state:
            raise UserError(
                "the checkpoint is of an earlier version, which divided loader.folds differently: this run would validate samples that were "
                "trained on. Resume it with that version, or start a new run."
            )
        if self.transforms and state.get("transforms") != self.transforms:
            raise UserError(
                "the checkpoint is of an earlier version, whose crop, color_jitter, rotate, trivial and rand drew other random numbers, or which took "
                "crops from resized squares: this run would end otherwise. Resume it with that version, or start a new run with init_from=<checkpoint>."
            )
        if state["sha256"] != here:
            raise UserError(
                f"the checkpoint was trained on different data (sha256 {state['sha256'][:12]}) than this run's (sha256 {here[:12]}). "
                "Set data.root=<the folder it was trained on>, or init_from=<checkpoint> to start a new run from its weights."
            )


def absent(value: Any, count: int) -> Any:
    """How many numbers of each of `count` samples are missing, negative or zero; 0 where a value has no tensor for each sample."""
    with suppress(RuntimeError, TypeError):  # numbers that cannot be compared, such as complex ones
        if isinstance(value, torch.Tensor) and value.dim() and len(value) == count:
            return (~(value > 0)).flatten(1).sum(1).numpy() if value.dim() > 1 else (~(value > 0)).numpy()
        if isinstance(value, list) and len(value) == count and all(isinstance(each, torch.Tensor) for each in value):
            return np.array([(~(each > 0)).sum().item() for each in value])
    return 0


def class_counts(dataset: DataSet, split: Split, about: Mapping[str, Any], numbering: Any) -> dict[str, list[int]]:
    """How many training samples each class has, if the data has classes and holds those of its samples as one array."""
    own, classes = named(dataset.about, "classes"), named(about, "classes")
    if not own or not classes or (class_N := classes_of(dataset.train)) is None:
        return {}
    train_N = class_N[split.indices(np.arange(split.count))]
    count_K = np.zeros(len(classes), np.int64)
    own_K = np.bincount(train_N[(train_N >= 0) & (train_N < len(own))], minlength=len(own))
    count_K[numbering[0] if numbering else slice(None)] = own_K
    return {"class_counts": count_K.tolist()}
