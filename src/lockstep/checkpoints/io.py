"""Writing checkpoints: atomically, in the order of the calls, and while training continues."""

import contextlib
import copy
import errno
import logging
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from torch import Tensor

from lockstep.checkpoints import content, room, shards
from lockstep.checkpoints.plain import refused
from lockstep.checkpoints.trees import leaves
from lockstep.errors import NotSaved, chain

Write = Callable[[dict[str, Any], Path], None]
Buffers = dict[tuple[Any, ...], Tensor]  # the host memory of a snapshot's tensors, by their paths
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
log = logging.getLogger("lockstep")


def same_layout(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())


def host_copy(tensor: Tensor, buffer: Tensor | None, in_use: bool) -> Tensor:
    """A private copy in host memory: in `buffer` if it fits, or `buffer` itself if it is in use and holds the same values."""
    if buffer is not None and same_layout(tensor, buffer):
        if not in_use:
            return buffer.copy_(tensor)
        if torch.equal(tensor.cpu(), buffer):
            return buffer
    return torch.empty_like(tensor, device="cpu").copy_(tensor)


def snapshot(checkpoint: dict[str, Any], buffers: Buffers, in_use: bool) -> tuple[Any, Buffers]:
    """A copy of `checkpoint`, and its buffers. Tensors reuse the buffers of the previous snapshot.

    Fresh memory is slow on systems that hand it out in small pages: 2.5 s for a gigabyte on the two-core virtual machine of
    NOTEBOOK.md, against 0.2 s in memory that was used before.
    """
    found = {path: leaf for path, leaf in leaves(checkpoint) if isinstance(leaf, Tensor)}
    copies: Buffers = {}
    once: dict[Any, Tensor] = {}  # tied weights stay one tensor
    taken: set[int] = set()
    with torch.inference_mode(False), torch.no_grad():  # Lightning validates, and saves the best, in inference mode
        for path, tensor in found.items():
            key = (tensor.data_ptr() or path, tensor.device, tensor.dtype, tensor.shape, tensor.stride())
            if key not in once:
                spare = buffers.get(path)  # tensors that are no longer tied have the same one
                once[key] = host_copy(tensor.detach(), None if id(spare) in taken else spare, in_use)
                taken.add(id(once[key]))
            copies[path] = once[key]
    return copy.deepcopy(checkpoint, {id(tensor): copies[path] for path, tensor in found.items()}), copies


def snapshot_or_explain(checkpoint: dict[str, Any], buffers: Buffers, in_use: bool, path: Path) -> Any:
    """`snapshot`. Raises NotSaved when host memory is too small for it."""
    try:
        return snapshot(checkpoint, buffers, in_use=in_use)
    except (RuntimeError, MemoryError) as e:  # torch's CPU allocator raises RuntimeError
        raise NotSaved(
            f"no memory is left for the copy from which the checkpoint {path} is written in the background ({e}). "
            "Type checkpoint.background=false resume=auto: training then waits for the disk instead."
        ) from None


class SerialQueue:
    """Runs calls one after another in one thread. After an error it skips all calls until `finish` has returned that error."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, "checkpoints")  # Python waits for it at exit
        self.begun: list[Future[None]] = []
        self.error: Exception | None = None

    def add(self, call: Callable[[], None]) -> None:
        self.begun.append(self.thread.submit(self.run, call))

    def run(self, call: Callable[[], None]) -> None:
        try:
            if self.error is None:
                call()
        except Exception as e:
            self.error = e

    def finish(self) -> Exception | None:
        """Waits for all calls; returns the first error, once."""
        wait(self.begun)
        self.begun.clear()
        error, self.error = self.error, None
        return error


class AtomicCheckpointIO(CheckpointIO):
    """Gives a checkpoint its name when it is complete and on disk: a crash leaves the previous one.

    In the background, training waits only for a copy in host memory. There is one copy: the best and the last checkpoint of a
    step share it, and the next step's checkpoint waits until they are written. An error in the background is raised by the next
    step's checkpoint or by `drain`. The calls queued behind it, such as the removal of an older checkpoint, are skipped.
    """

    def __init__(self, *, background: bool) -> None:
        self.queue = SerialQueue() if background else None
        self.buffers: Buffers = {}
        self.step: int | None = None  # of the snapshot in `buffers`

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        self.save(checkpoint, Path(path), write_file, checkpoint.get("global_step"))

    def save(self, checkpoint: dict[str, Any], path: Path, write: Write, step: int | None) -> None:
        """Calls `write(checkpoint, path)`, in the background with a copy. `step` is the step that the checkpoint belongs to."""
        if odd := next(refused(checkpoint), None):
            raise NotSaved(
                f"the checkpoint {path} would not load: it has {odd}, and only tensors and plain values are loaded. Save those instead."
            )
        if self.queue:
            in_use = step is not None and step == self.step
            if not in_use:
                self.drain()
            checkpoint, self.buffers = snapshot_or_explain(checkpoint, self.buffers, in_use, path)
            self.step = step
        self.submit(partial(write_or_explain, path, write, checkpoint))

    def submit(self, call: Callable[[], None]) -> None:
        if self.queue:
            self.queue.add(call)
        else:
            call()

    def drain(self) -> None:
        """Waits until everything is on disk. Raises NotSaved."""
        error = self.queue.finish() if self.queue else None
        if error:
            raise error

    def load_checkpoint(
        self, path: str | Path, map_location: Callable[..., Any] | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Always with weights_only=True: a checkpoint cannot run code."""
        self.drain()
        return content.read(Path(path))

    def remove_checkpoint(self, path: str | Path) -> None:
        self.submit(partial(remove_or_warn, Path(path)))

    def teardown(self) -> None:
        """Finishes pending writes. An error here does not hide the error that ended the training."""
        error = self.queue.finish() if self.queue else None
        self.buffers, self.step = {}, None
        if error and sys.exc_info()[0] is None:
            raise error
        if error:
            log.warning("%s", error)


def write_file(checkpoint: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with shards.replacing(path) as part:
        shards.write(checkpoint, part)


def remove_or_warn(path: Path) -> None:
    """Removes an old checkpoint. A failure is only logged: it is not worth a failed run."""
    try:
        shards.remove(path)
    except OSError as e:
        log.warning("the older checkpoint %s could not be removed: %s", path, e.strerror)


def write_or_explain(path: Path, write: Write, checkpoint: dict[str, Any]) -> None:
    """Raises NotSaved."""
    try:
        write(checkpoint, path)
    except Exception as e:
        with contextlib.suppress(OSError):
            shards.remove(shards.part_of(path))  # it takes disk space
        full = getattr(os_error(e), "errno", None) in NO_SPACE
        raise NotSaved(
            f"the checkpoint {path} could not be saved: {reason(e)}.{room.missing(checkpoint, path.parent) if full else ''} The earlier ones are complete and still there. "
            "Free some space or repair the disk, then type the command again with resume=auto."
        ) from e


def os_error(error: BaseException) -> OSError | None:
    """The operating system's error, which torch wraps in its own."""
    return next((each for each in chain(error) if isinstance(each, OSError)), None)


def reason(error: BaseException) -> str:
    cause = os_error(error)
    return cause.strerror or str(cause) if cause else f"{type(error).__name__}: {error}"
