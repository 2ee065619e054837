"""How checkpoints get to the disk: whole or not at all, in the order of the calls, and while training goes on."""

import contextlib
import copy
import logging
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from torch import Tensor

from lockstep.checkpoints import shards
from lockstep.checkpoints.plain import refused
from lockstep.errors import NotSaved

Write = Callable[[dict[str, Any], Path], None]


def tensors(tree: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of dicts, lists and tuples, with their places."""
    if isinstance(tree, Tensor):
        yield place, tree
    elif isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from tensors(value, f"{place}/{key}")


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether one fits into the memory of the other."""
    return (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())


def host_copy(tensor: Tensor, memory: Tensor | None, in_use: bool) -> Tensor:
    """A copy that nobody else writes to: in `memory`, or `memory` itself where that is in use and holds the same."""
    if memory is not None and alike(tensor, memory):
        if not in_use:
            return memory.copy_(tensor)
        if torch.equal(tensor.cpu(), memory):
            return memory
    return torch.empty_like(tensor, device="cpu").copy_(tensor)


def snapshot(content: dict[str, Any], memory: dict[str, Tensor], in_use: bool) -> tuple[Any, dict[str, Tensor]]:
    """`content` as it is now, and the memory that its tensors have: by their places that of the snapshot before, if it has any.

    Memory is kept because new memory is slow where the system hands it out in small pages: 2.5 s for a gigabyte on the two-core
    virtual machine of NOTEBOOK.md, 0.2 s in memory that was used before.
    """
    found, copies = dict(tensors(content)), {}
    once: dict[Any, Tensor] = {}  # tied weights stay one tensor
    taken: set[int] = set()
    with torch.inference_mode(False), torch.no_grad():  # Lightning validates, and saves the best, in inference mode
        for place, tensor in found.items():
            key = (tensor.data_ptr() or place, tensor.device, tensor.dtype, tensor.shape, tensor.stride())
            if key not in once:
                spare = memory.get(place)  # tensors that were tied and are not any more have the same
                once[key] = host_copy(tensor.detach(), None if id(spare) in taken else spare, in_use)
                taken.add(id(once[key]))
            copies[place] = once[key]
    return copy.deepcopy(content, {id(tensor): copies[place] for place, tensor in found.items()}), copies


def copied(content: dict[str, Any], memory: dict[str, Tensor], shared: bool, path: Path) -> Any:
    """`snapshot`. Raises NotSaved where the host has no memory for it."""
    try:
        return snapshot(content, memory, in_use=shared)
    except (RuntimeError, MemoryError) as e:  # the words of torch's allocator for the CPU
        raise NotSaved(
            f"there is no memory for a copy of the checkpoint {path}, which is written beside the training ({e}). "
            "Type checkpoint.background=false resume=auto: then training waits for the disk instead."
        ) from None


class InOrder:
    """Does things one after another in a thread of its own. When one has failed, nothing is done until that was told."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, "checkpoints")  # Python itself waits for it when a process ends
        self.begun: list[Future[None]] = []
        self.error: Exception | None = None

    def add(self, what: Callable[[], None]) -> None:
        self.begun.append(self.thread.submit(self.unless_failed, what))

    def unless_failed(self, what: Callable[[], None]) -> None:
        try:
            if self.error is None:
                what()
        except Exception as e:
            self.error = e

    def finish(self) -> Exception | None:
        """Waits until all is done; returns what has failed, once."""
        wait(self.begun)
        self.begun.clear()
        error, self.error = self.error, None
        return error


class AtomicCheckpointIO(CheckpointIO):
    """A checkpoint takes its name when it is whole and on the disk: a crash leaves the one before.

    In the background, training waits for a copy in memory only. The next step's checkpoint waits until this one is written, so
    there is one copy; those of the same step, as the best and the last often are, share it. What fails is raised at the next
    step's checkpoint or by `drain`, and what was to follow, as the removal of an older one, is left out.
    """

    def __init__(self, *, background: bool) -> None:
        self.queue = InOrder() if background else None
        self.memory: dict[str, Tensor] = {}
        self.step: int | None = None  # of the snapshot in `memory`

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        self.save(checkpoint, Path(path), write_file, checkpoint.get("global_step"))

    def save(self, content: dict[str, Any], path: Path, write: Write, step: int | None) -> None:
        """Lets `write` bring the content to the path. Both belong to a checkpoint of `step`."""
        if odd := next(refused(content), None):
            raise NotSaved(
                f"the checkpoint {path} would not load: it has {odd}, and loading takes tensors and plain values only. Put those into it."
            )
        if self.queue:
            shared = step is not None and step == self.step
            if not shared:
                self.drain()
            content, self.memory = copied(content, self.memory, shared, path)
            self.step = step
        self.do(partial(written, path, write, content))

    def do(self, what: Callable[[], None]) -> None:
        if self.queue:
            self.queue.add(what)
        else:
            what()

    def drain(self) -> None:
        """Waits until everything is on the disk. Raises NotSaved."""
        error = self.queue.finish() if self.queue else None
        if error:
            raise error

    def load_checkpoint(
        self, path: str | Path, map_location: Callable[..., Any] | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Only tensors and plain values are read, whatever the caller says: a checkpoint cannot run code."""
        self.drain()
        loaded: dict[str, Any] = shards.load(Path(path)) if Path(path).is_dir() else shards.open_file(Path(path))
        return loaded

    def remove_checkpoint(self, path: str | Path) -> None:
        self.do(partial(removed, Path(path)))

    def teardown(self) -> None:
        """However training ends: what was begun is finished. An error that ends it is not hidden by another."""
        error = self.queue.finish() if self.queue else None
        self.memory, self.step = {}, None
        if error and sys.exc_info()[0] is None:
            raise error
        if error:
            logging.getLogger("lockstep").warning("%s", error)


def write_file(checkpoint: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    shards.remove(part)
    shards.write(checkpoint, part)
    shards.take_place(part, path)


def removed(path: Path) -> None:
    """A file too many is not worth a failed run."""
    try:
        shards.remove(path)
    except OSError as e:
        logging.getLogger("lockstep").warning("the older checkpoint %s could not be removed: %s", path, e.strerror)


def written(path: Path, write: Write, content: dict[str, Any]) -> None:
    """Raises NotSaved."""
    try:
        write(content, path)
    except Exception as e:
        with contextlib.suppress(OSError):
            shards.remove(path.with_name(path.name + ".part"))  # what there is of it takes room
        raise NotSaved(
            f"the checkpoint {path} could not be saved: {reason(e)}. Those before it are whole and still there. "
            "Make room or mend the disk, and type the command again with resume=auto."
        ) from e


def reason(error: BaseException) -> str:
    """The system's words, which torch puts words of its own upon."""
    cause: BaseException | None = error
    while cause and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause.strerror or str(cause) if isinstance(cause, OSError) else f"{type(error).__name__}: {error}"
