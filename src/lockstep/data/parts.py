"""Parts of a data set as torch Datasets, and what a datamodule needs of them."""

# B batch · K name

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.data.dataset import Arrays, Batch, DataSet, classes_of, collate, join_names, read, targets_of
from lockstep.data.loaders import as_tensor, concatenate
from lockstep.data.sampler import BLOCK, Indices, Split
from lockstep.data.splits import order as order
from lockstep.data.splits import splits as splits
from lockstep.errors import UserError


class Part(Dataset[Any]):
    """The samples of a split. `__getitems__` returns a batch: a dict of tensors, with their indices as `index`.

    `transform` changes each sample, a batch of one, where it is read; it makes their shapes equal.
    """

    def __init__(self, samples: Any, split: Split, transform: Callable[[Batch], Batch] | None = None) -> None:
        if transform and isinstance(samples, Arrays):  # which an evaluation may have moved to a GPU
            samples = Arrays(**samples.arrays)
        self.samples, self.split, self.transform = samples, split, transform
        self.draws_random_numbers = transform is not None or getattr(samples, "draws_random_numbers", True)

    def __len__(self) -> int:
        return self.split.count

    def __getitem__(self, position: int) -> Batch:
        return self.__getitems__([position])

    def __getitems__(self, positions: Sequence[int]) -> Batch:
        index_N = self.split.indices(np.asarray(positions))
        if self.transform is None:
            return batch_of(self.samples, index_N)
        return concatenate([self.transform(batch_of(self.samples, index_1)) for index_1 in index_N[:, None]])  # type: ignore[no-any-return]


def batch_of(samples: Any, index_N: Any) -> Batch:
    """The samples at these indices of a part, as tensors. Copies in a row are read once, if nothing is drawn."""
    index_N = np.asarray(index_N)
    is_first = np.append(True, index_N[1:] != index_N[:-1])
    copied = not is_first.all() and not getattr(samples, "draws_random_numbers", True)
    found = collate(read(samples, index_N[is_first] if copied else index_N))
    values = {name: as_tensor(value) for name, value in found.items()}
    if copied:
        values = repeat_samples(values, np.cumsum(is_first) - 1)
    return {**values, "index": torch.from_numpy(index_N)}


def repeat_samples(value: Any, row_N: Indices) -> Any:
    """The values of the samples in these rows."""
    if isinstance(value, dict):
        return {name: repeat_samples(item, row_N) for name, item in value.items()}
    return value[torch.from_numpy(row_N)] if isinstance(value, torch.Tensor) else [value[row] for row in row_N]


# --- Targets are numbers or columns that refer to names, whose order may differ between parts and checkpoints ---

# Maps targets and the number of names they may refer to, to the index and a description of the first invalid target.
TargetCheck = Callable[[Any, int], tuple[int, str] | None]
NAMES = ("classes", "labels", "targets", "inputs", "vocabulary")  # lists in `metadata` that numbers refer to by index
MATCHED = NAMES[:3]  # the lists that targets refer to; targets can be renumbered
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
        raise UserError(
            f"the {part} part of this data has the {key} {join_names(texts)}, but {owner} has {join_names(reference)}: {join_names(unknown or texts)} "
            "cannot be matched. Rename or remove them, or use different data."
        )
    return torch.tensor([index[name] for name in texts])


def renumbered(target: Tensor, indices: Tensor, key: str, count: int) -> Tensor:
    """Renumbers targets. Numbers without a name, such as those of ignored pixels, stay. Missing columns become 0."""
    if key != "classes":
        return target.new_zeros(len(target), count).index_copy(1, indices.to(target.device), target)
    number, size = target.long(), len(indices)
    return indices.to(target.device)[number.clamp(0, size - 1)].where((number >= 0) & (number < size), number)


class Targets:
    """The numbers of the targets of a data set: those of its train part, or of a checkpoint."""

    def __init__(self, dataset: DataSet, train_split: Split) -> None:
        self.dataset, self.train_split, self.metadata = dataset, train_split, dict(dataset.metadata)
        self.judge: TargetCheck | None = None  # checks targets that refer to the names in `metadata[judged]`
        self.judged, self.whole = "", False
        self.settled: set[str] = set()  # parts whose targets have all been checked
        self.numbering: dict[str, tuple[Tensor, str]] = {}  # for parts with different numbers: new indices, key
        self.match(dataset.metadata, "the train part")

    def match(self, reference: Mapping[str, Any], owner: str, keys: Collection[str] = NAMES) -> list[str]:
        """From now on, renumbers targets as in `reference`, the `metadata` of `owner`, for these `keys`. Returns warnings.

        Raises:
            UserError: a part of the data has a name that is missing in `reference`. The message shows both lists.
        """
        metadata, warnings, numbering = self.dataset.metadata, list[str](), dict[str, tuple[Tensor, str]]()
        reference = {**metadata, **{key: names for key in keys if (names := names_at(reference, key))}}
        shared_keys = [key for key in NAMES if names_at(reference, key) and names_at(metadata, key)]
        for key in shared_keys:
            named = self.dataset.part_names
            parts = {part: named.get(part, {}).get(key, metadata[key]) for part in self.dataset.every_part}
            for part, names in parts.items():
                if (indices := match_indices(reference[key], names, key, part, owner)) is not None:
                    numbering[part] = indices, key
            present = {str(name) for names in parts.values() for name in names}
            if missing := [name for name in map(str, reference[key]) if name not in present]:
                warnings.append(f"{owner} has {len(reference[key]):,} {key}; this data lacks {join_names(missing)}")
        self.numbering = numbering
        known = self.metadata
        known |= {key: names for key in shared_keys if (names := names_at(reference, key)) != names_at(known, key)}
        known |= class_counts(self.dataset, self.train_split, known, numbering.get("train"))
        return warnings

    def check(self, key: str, judge: TargetCheck, read: Callable[[str, list[int]], Any], whole: bool = False) -> None:
        """Checks targets, which refer to the names in `metadata[key]`: stored arrays now, others when they are read.

        `read`: reads samples of a part. `whole`: converts targets of other types to integers.

        Raises:
            UserError: a target is invalid. The message names the first one.
        """
        self.judged, self.judge, self.whole, self.settled = key, judge, whole, set()
        for part in self.dataset.every_part:
            targets = targets_of(samples := self.dataset.samples(part))
            if targets is not None and (error := self.first_wrong(part, targets)):
                read(part, [error[0]])  # recheck as read: a Dataset may change targets
            elif targets is not None and isinstance(samples, Arrays):
                self.settled.add(part)

    def first_wrong(self, part: str, target_B: Any) -> tuple[int, str] | None:
        names, _ = self.numbering.get(part, (self.metadata.get(self.judged, ()), ""))
        return self.judge(target_B, len(names)) if self.judge else None

    def renumber(self, part: str, batch: Batch) -> Batch:
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
        return {**batch, "target": renumbered(target, indices, key, len(self.metadata[key]))}


def class_counts(dataset: DataSet, split: Split, metadata: Mapping[str, Any], numbering: Any) -> dict[str, list[int]]:
    """The number of training samples per class; empty if the classes are unknown or not stored as one array."""
    names, classes = names_at(dataset.metadata, "classes"), names_at(metadata, "classes")
    if not names or not classes or (class_N := classes_of(dataset.train)) is None:
        return {}
    counts = np.zeros(len(names), np.int64)
    for begin in range(0, split.count, BLOCK):
        block = class_N[split.indices(np.arange(begin, min(begin + BLOCK, split.count)))]
        counts += np.bincount(block[(block >= 0) & (block < len(names))], minlength=len(names))
    count_K = np.zeros(len(classes), np.int64)
    count_K[numbering[0] if numbering else slice(None)] = counts
    return {"class_counts": count_K.tolist()}
