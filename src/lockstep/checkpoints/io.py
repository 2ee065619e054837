"""Writing checkpoints: atomically, in the order of the calls, while training continues, and only if the disk has room."""

import contextlib
import copy
import errno
import logging
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from lockstep.checkpoints import sharded
from lockstep.checkpoints.finding import leaves
from lockstep.checkpoints.weights import refused
from lockstep.config.words import size
from lockstep.errors import FolderRemoved, NotSaved, chain
from lockstep.machine import files
from lockstep.machine.files import nearest

# --- Whether a disk has room for a run's checkpoints, before the first step ---

STATES = 8  # no optimizer keeps so many values per parameter


def tensor_bytes(tree: Any) -> int:
    """Of all tensors in `tree`, each counted once; the whole of a sharded tensor."""
    tensors = {id(leaf): leaf for _, leaf in leaves(tree) if isinstance(leaf, Tensor)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def on_meta(parameter: Tensor) -> nn.Parameter:
    twin = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
    twin.grad = torch.empty_like(twin)
    return twin


def state_bytes(optimizer: Optimizer) -> int:
    """The size of an optimizer's state after a step, tried on tensors without memory; 0 if it cannot step on them."""
    trial = copy.copy(optimizer)
    trial.state, trial.param_groups = defaultdict(dict), []
    for group in optimizer.param_groups:
        kernels = dict.fromkeys(group.keys() & {"fused", "foreach", "capturable"}, False)
        trial.param_groups.append(
            {**group, **kernels, "params": [on_meta(p) for p in group["params"] if p.requires_grad]}
        )
    try:
        type(optimizer).step(trial)  # not the instance's own, which a scheduler binds to the real one
    except Exception:
        return 0
    return tensor_bytes(list(trial.state.values()))


def problem(trainer: pl.Trainer, module: pl.LightningModule, folder: Path) -> str | None:
    """Why the checkpoints of a run do not fit into `folder`. Those of an earlier part of the run are replaced."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    weights = tensor_bytes(module.state_dict(keep_vars=True))  # tied weights are one tensor
    copies = 1 + sum(getattr(callback, "saved_weights", 0) for callback in callbacks)
    # the most at a time: the best, the last, and the one that is being written
    files = 2 + sum(max(0, callback.save_top_k) for callback in callbacks if isinstance(callback, ModelCheckpoint))
    there = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    room = there + shutil.disk_usage(nearest(folder)).free
    if room >= files * (copies + STATES) * weights:  # the trial takes 0.3 s for AdamW and resnet50d
        return None
    each = copies * weights + sum(map(state_bytes, trainer.optimizers))
    if room >= files * each:
        return None
    return (
        f"{folder} has {size(room)} for checkpoints, and {files} of {size(each)} need {size(files * each)}: the best, the last and the one "
        f"that is being written. {size(files * each - room)} are missing. Free some space, or pass runs_dir=<a folder with more room>, checkpoint.save_top_k=1 for fewer files, or "
        "trainer.enable_checkpointing=false."
    )


# --- Writing checkpoints: atomically, in the order of the calls, and while training continues ---

Write = Callable[[dict[str, Any], Path], None]
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
log = logging.getLogger("lockstep")


def origin(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for one piece of memory in which nothing was changed in place. Memory that was freed and taken again differs."""
    version = None if tensor.is_inference() else tensor._version
    return StorageWeakRef(tensor.untyped_storage()), tensor.storage_offset(), version


@dataclass(frozen=True)
class Copied:
    """A private copy of a tensor in host memory."""

    memory: Tensor
    origin: tuple[Any, ...]


Buffers = dict[tuple[Any, ...], Copied]  # a snapshot's tensors by their paths


def host_copy(tensor: Tensor, before: Copied | None, in_use: bool) -> Copied:
    """In the memory of the copy `before` if it fits; or that copy itself if it is in use and has the same values.

    A copy from a GPU is only begun: what computes next on the GPU comes after it.
    """
    memory = before.memory if before else tensor
    if (memory.dtype, memory.shape, memory.stride()) != (tensor.dtype, tensor.shape, tensor.stride()):
        before = None
    if before and in_use and (torch.equal(tensor, memory) if tensor.is_cpu else origin(tensor) == before.origin):
        return before  # values on a GPU are not fetched for the comparison
    if before is None or in_use:
        memory = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return Copied(memory.copy_(tensor, non_blocking=tensor.is_cuda), origin(tensor))


def snapshot(checkpoint: dict[str, Any], buffers: Buffers, in_use: bool) -> tuple[Any, Buffers]:
    """A copy of `checkpoint`, and its buffers. Tensors reuse the buffers of the previous snapshot.

    Fresh memory is slow on systems that hand it out in small pages: 2.5 s for a gigabyte on the two-core virtual machine of
    NOTEBOOK.md, against 0.2 s in memory that was used before.
    """
    found = {path: leaf for path, leaf in leaves(checkpoint) if isinstance(leaf, Tensor)}
    copies: Buffers = {}
    once: dict[Any, Copied] = {}  # tied weights stay one tensor
    taken: set[int] = set()
    with torch.inference_mode(False), torch.no_grad():  # Lightning validates, and saves the best, in inference mode
        for path, tensor in found.items():
            key = (tensor.data_ptr() or path, tensor.device, tensor.dtype, tensor.shape, tensor.stride())
            if key not in once:
                spare = buffers.get(path)  # tensors that are no longer tied have the same one
                free = spare is not None and id(spare.memory) not in taken
                once[key] = host_copy(tensor.detach(), spare if free else None, in_use)
                taken.add(id(once[key].memory))
            copies[path] = once[key]
    return copy.deepcopy(checkpoint, {id(tensor): copies[path].memory for path, tensor in found.items()}), copies


class AtomicCheckpointIO(CheckpointIO):
    """Gives a checkpoint its name when it is complete and on disk: a crash leaves the previous one.

    In the background, training waits only for a copy in host memory; on a GPU, for nothing but its memory. There is one copy: the best and the last checkpoint of a
    step share it, and the next step's checkpoint waits until they are written. An error in the background is raised by the next
    step's checkpoint or by `drain`. The calls queued behind it, such as the removal of an older checkpoint, are skipped.
    """

    def __init__(self, *, background: bool) -> None:
        self.thread = ThreadPoolExecutor(1, "checkpoints") if background else None  # Python waits for it at exit
        self.calls: list[Future[None]] = []
        self.buffers: Buffers = {}
        self.step: int | None = None  # of the snapshot in `buffers`
        self.stalled_s = 0.0  # for how long callers of `save` have waited

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        self.save(checkpoint, Path(path), write_file, checkpoint.get("global_step"))

    def save(self, checkpoint: dict[str, Any], path: Path, write: Write, step: int | None) -> None:
        """Calls `write(checkpoint, path)`, in the background with a copy. `step` is the step that the checkpoint belongs to."""
        began_s = time.perf_counter()
        if odd := next(refused(checkpoint), None):
            raise NotSaved(
                f"the checkpoint {path} would not load: it has {odd}, and only tensors and plain values are loaded. Save those instead."
            )
        if self.thread:
            in_use = step is not None and step == self.step
            if not in_use:
                self.drain()
            try:
                checkpoint, self.buffers = snapshot(checkpoint, self.buffers, in_use)
            except (RuntimeError, MemoryError) as e:  # torch's CPU allocator raises RuntimeError
                raise NotSaved(
                    f"no memory is left for the copy from which the checkpoint {path} is written in the background ({e}). "
                    "Pass checkpoint.background=false resume=auto: training then waits for the disk instead."
                ) from None
            self.step = step
            if any(copied.memory.is_pinned() for copied in self.buffers.values()):
                event = torch.cuda.Event(blocking=True)
                event.record()
                self.submit(event.synchronize)  # the writer waits for the copies, training does not
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
        self.buffers, self.step = {}, None
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
        if cause and cause.errno in NO_SPACE:
            needed, free = tensor_bytes(checkpoint), shutil.disk_usage(nearest(path.parent)).free
            missing = f": {size(needed - free)} are missing" if needed > free else ""
            reason += f" It needs {size(needed)}, and {size(free)} are free{missing}."
        raise NotSaved(
            f"the checkpoint {path} could not be saved: {reason} The earlier ones are complete and still there. "
            "Free some space or repair the disk, then run the command again with resume=auto."
        ) from e
