"""The data sets of the shipped configs, for tests: on made-up files, in a cache of the test's own.

Processes of a test import this file: it must stay quick to import.
"""

import os
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


def stand_in_trainer(
    *, rank: int = 0, world: int = 1, accumulate: int = 1, done: int = 0, epoch: int = 0, precision: Any = None
) -> Any:
    """What a DataModule asks of the Trainer: `done` micro-batches of `epoch` are trained on."""
    from torch import device

    current = SimpleNamespace(ready=done)
    return SimpleNamespace(
        global_rank=rank, world_size=world, accumulate_grad_batches=accumulate, training=True, current_epoch=epoch,
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=SimpleNamespace(current=current))),
        precision_plugin=precision or SimpleNamespace(convert_input=lambda batch: batch),
        strategy=SimpleNamespace(root_device=device("cpu")),
        lightning_module=SimpleNamespace(
            named_batches=True, on_before_batch_transfer=lambda batch, _: batch, on_after_batch_transfer=lambda batch, _: batch
        ),
    )  # fmt: skip


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
