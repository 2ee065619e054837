"""The data sets of the shipped configs, for tests: on made-up files, in a cache of the test's own.

Processes of a test import this file: it must stay quick to import.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import yaml

from lockstep.config.project import config_folders
from lockstep.kit.cache import Cached, Parts
from lockstep.kit.published import Published
from project.data import Mnist


def shipped(group: str, name: str) -> dict[str, Any]:
    """The keys of configs/<group>/<name>.yaml, with those of the files that it begins with."""
    node = (
        yaml.safe_load(
            next(file for folder in config_folders() if (file := folder / group / f"{name}.yaml").is_file()).read_text()
        )
        or {}
    )
    bases = [
        base for base in node.pop("defaults", []) if isinstance(base, str) and base != "_self_"
    ]  # others override a group
    for base in bases:
        node = shipped(group, base) | node
    return node


def prepared(root: Path, cache: Path | None, name: str = "mnist", **changes: object) -> Published:
    """The data set of configs/data/<name>.yaml with the files below `root`."""
    from lockstep.config.instantiate import create_data
    from lockstep.config.run_config import Component, Loader

    own = {"root": str(root), "cache_dir": cache and str(cache), "channels_last": True}
    component = Component.of({**shipped("data", name), **own, **changes})
    dataset: Published = create_data(component, Loader(**shipped("loader", "default")))
    dataset.prepare()
    return dataset


def raw(root: Path, name: str) -> Path:
    """One of MNIST's files."""
    return root / "MNIST" / "raw" / name


def arrays(cached: Cached) -> Parts:
    return {f"{part}/{name}": a for part in ("train", "test") for name, a in cached.arrays(part).items()}


def stand_in_trainer(*, precision: Any = None, training: bool = True, device: str = "cpu") -> Any:
    """What a DataModule asks of the Trainer."""
    import torch

    return SimpleNamespace(
        training=training, testing=False, predicting=False, current_epoch=0,
        precision_plugin=precision or SimpleNamespace(convert_input=lambda batch: batch),
        strategy=SimpleNamespace(root_device=torch.device(device), seed=0, places=range(0), waited_s=0.0),
        lightning_module=SimpleNamespace(
            on_before_batch_transfer=lambda batch, _: batch, on_after_batch_transfer=lambda batch, _: batch
        ),
    )  # fmt: skip


def divided(loader: Any, *, seed: int = 0, epoch: int = 0, done: int = 0, **division: Any) -> Iterator[tuple[Any, Any]]:
    """What the strategy makes of a DataLoader: micro-batches and their MicroBatchInfo."""
    from lockstep.data.standard import Division
    from lockstep.data.streams import wrap_loader

    return wrap_loader(loader, Division(seed=seed, **division)).items(seed, epoch, done)


def training_batches(data: Any, *, seed: int = 0, epoch: int = 0, **division: Any) -> Iterator[dict[str, Any]]:
    """The training batches of a DataModule on a rank, as its network gets them."""
    for batch, info in divided(data.train_dataloader(), seed=seed, epoch=epoch, **division):
        yield data.augmented(data.targets.renumber("train", batch), info.places, seed, epoch)


# --- what processes of a test do ---


def die_while_writing(root: Path, cache: Path) -> None:
    save = np.save
    np.save = lambda path, array: os._exit(9) if path.parent.name == "test" else save(path, array)
    Mnist(root=str(root), cache_dir=str(cache), image_size=28).prepare()


def prepare_at_once(root: Path, cache: Path, barrier: Any, results: Any) -> None:
    barrier.wait(60)
    try:
        cached = Mnist(root=str(root), cache_dir=str(cache), image_size=28).cached
        results.put((cached, {name: np.array(array) for name, array in arrays(cached).items()}))
    except Exception as e:
        results.put(e)
