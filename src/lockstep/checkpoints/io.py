"""Writing checkpoints: atomically, in the order of the calls, while training continues."""

import contextlib
import logging
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from lockstep.checkpoints import sharded
from lockstep.checkpoints.weights import refused
from lockstep.errors import FolderRemoved, NotSaved, chain
from lockstep.machine import files

Write = Callable[[dict[str, Any], Path], None]
log = logging.getLogger("lockstep")


def new_stager() -> DefaultStager:
    """Copies checkpoints to host memory, each into the memory of its last copy.

    Fresh memory is slow on systems that hand it out in small pages: 2.5 s for a gigabyte on the two-core virtual machine of
    NOTEBOOK.md, against 0.2 s in memory that was used before.
    """
    pinned = torch.cuda.is_available()
    return DefaultStager(
        StagingOptions(pinned, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False)
    )


class AtomicCheckpointIO(CheckpointIO):
    """Gives a checkpoint its name when it is complete and on disk: a crash leaves the previous one.

    In the background, training waits only for a copy in host memory. There is one copy: the next checkpoint waits until the one before
    it is written. An error in the background is raised by the next checkpoint or by `drain`. The calls queued behind it, such as
    the removal of an older checkpoint, are skipped.
    """

    def __init__(self, *, background: bool) -> None:
        self.thread = ThreadPoolExecutor(1, "checkpoints") if background else None  # Python waits for it at exit
        self.calls: list[Future[None]] = []
        self.stager: Any = new_stager()  # only an asynchronous one returns futures
        self.stalled_s = 0.0  # for how long callers of `save` have waited

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        self.save(checkpoint, Path(path), write_file)

    def save(self, checkpoint: dict[str, Any], path: Path, write: Write) -> None:
        """Calls `write(checkpoint, path)`, in the background with a copy."""
        began_s = time.perf_counter()
        if odd := next(refused(checkpoint), None):
            raise NotSaved(
                f"the checkpoint {path} would not load: it has {odd}, and only tensors and plain values are loaded. Save those instead."
            )
        if self.thread:
            self.drain()
            try:
                checkpoint = self.stager.stage(checkpoint)
            except (
                RuntimeError,
                AssertionError,
                MemoryError,
            ) as e:  # without memory torch's CPU allocator raises RuntimeError
                raise NotSaved(
                    f"the checkpoint {path} could not be copied, to be written in the background: {e}. "
                    "Pass checkpoint.background=false resume=auto: training then waits for the disk instead."
                ) from None
        self.submit(partial(write_or_explain, path, write, checkpoint))
        self.stalled_s += time.perf_counter() - began_s

    def submit(self, call: Callable[[], None]) -> None:
        """Runs `call` after the earlier ones, unless one of them has failed since the last `finish`."""
        if self.thread is None:
            return call()
        before = tuple(self.calls)  # done when this call begins
        self.calls.append(self.thread.submit(lambda: None if any(each.exception() for each in before) else call()))

    def finish(self) -> BaseException | None:
        """Waits for all calls; returns the first error, once."""
        errors = [each.exception() for each in self.calls]
        self.calls.clear()
        return next(filter(None, errors), None)

    def drain(self) -> None:
        """Waits until everything is on disk. Raises NotSaved."""
        if error := self.finish():
            raise error

    def load_checkpoint(
        self, path: str | Path, map_location: Callable[..., Any] | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Always with weights_only=True: a checkpoint cannot run code."""
        self.drain()
        values: dict[str, Any] = sharded.load(Path(path))
        return values

    def remove_checkpoint(self, path: str | Path) -> None:
        self.submit(partial(remove_or_warn, Path(path)))

    def teardown(self) -> None:
        """Finishes pending writes. An error here does not hide the error that ended the training."""
        error = self.finish()
        self.stager = new_stager()  # frees the memory
        if error and sys.exc_info()[0] is None:
            raise error
        if error:
            log.warning("%s", error)


def write_file(checkpoint: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(exist_ok=True)  # no parents: a run's folder that was removed does not come back
    with files.replacing(path) as part:
        sharded.write(checkpoint, part)


def remove_or_warn(path: Path) -> None:
    """Removes an old checkpoint. A failure is only logged: it is not worth a failed run."""
    try:
        files.remove(path)
    except OSError as e:
        log.warning("the older checkpoint %s could not be removed: %s", path, e.strerror)


def write_or_explain(path: Path, write: Write, checkpoint: dict[str, Any]) -> None:
    """Raises NotSaved."""
    try:
        write(checkpoint, path)
    except Exception as e:
        with contextlib.suppress(OSError):
            files.remove(files.part_of(path))  # it takes disk space
        if not path.parent.parent.is_dir():
            raise FolderRemoved(path.parent.parent) from None
        cause = next((each for each in chain(e) if isinstance(each, OSError)), None)  # torch wraps it in its own error
        reason = f"{cause.strerror or cause}." if cause else f"{type(e).__name__}: {e}."
        raise NotSaved(
            f"the checkpoint {path} could not be saved: {reason} The earlier ones are complete and still there. "
            "Free some space or repair the disk, then run the command again with resume=auto."
        ) from e
