"""Out-of-memory errors: explains them and suggests a micro-batch that fits. The global batch stays the same."""

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn

from lockstep.config.settings import Settings
from lockstep.data import loaders
from lockstep.data.parts import Targets
from lockstep.errors import OutOfMemory, ProcessDied
from lockstep.training.batches import Loaders
from lockstep.training.module import arithmetic_of

log = logging.getLogger(__name__)

# Messages of torch's allocators that have no exception class (CPU on Linux and Windows, MPS), and of cuBLAS.
SIGNS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "unable to find an engine",
)
# The whole message; for an unsupported layer, oneDNN's message continues with "descriptor".
ONEDNN = "could not create a primitive"
OTHERWISE = "Try trainer.precision=bf16-mixed, a smaller data.image_size or model, or strategy=fsdp on several GPUs."


def is_oom(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and (str(error) == ONEDNN or any(sign in str(error) for sign in SIGNS))


@contextmanager
def oom_advice(trainer: pl.Trainer, batches: Loaders, settings: Settings) -> Iterator[None]:
    """Replaces torch's out-of-memory errors by OutOfMemory, and errors from the death of a data worker by ProcessDied."""
    try:
        yield
    except Exception as e:
        lost_worker = loaders.dead_worker_advice(e)
        if not lost_worker and not is_oom(e):
            raise
        log.info("%s: %s", type(e).__name__, e)
        traceback.clear_frames(e.__traceback__)  # they hold the activations
        raise (ProcessDied(lost_worker) if lost_worker else advice(trainer, batches, settings)) from None


def advice(trainer: pl.Trainer, batches: Loaders, settings: Settings) -> OutOfMemory:
    data = batches.data
    if not isinstance(getattr(data, "targets", None), Targets):
        return OutOfMemory(
            f"a batch does not fit in memory; {type(batches.holder).__name__} sets its size. {OTHERWISE}"
        )
    progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress.current
    if trainer.state.fn != TrainerFn.FITTING or progress.ready > progress.completed:
        return OutOfMemory(
            "an evaluation batch does not fit in memory. Set a smaller loader.eval_batch_size; the metrics stay the same."
        )
    if not trainer.fit_loop.epoch_loop.batch_progress.total.ready:
        return OutOfMemory(f"the network and its optimizer do not fit in memory, even without a batch. {OTHERWISE}")
    batch, accumulate, world = data.batch_size, trainer.accumulate_grad_batches, trainer.world_size
    text = f"a micro-batch of {batch // (world * accumulate)} does not fit in memory."
    is_logical = arithmetic_of(batches.module).same_bits
    larger = (count for count in settings.accumulations if count > accumulate)
    count = next((count for count in larger if count.bit_count() == 1 or not is_logical), None)
    if count is None or batches.needs_whole:
        return OutOfMemory(f"{text} {batches.needs_whole or 'There is no smaller one.'} {OTHERWISE}")
    logical = f"exact.logical_ranks={world * count} in a new run"
    setting = logical if is_logical else f"trainer.accumulate_grad_batches={count}"
    return OutOfMemory(
        f"{text} A size of {batch // (world * count)} may fit: set {setting}; the global batch stays {batch}."
    )
