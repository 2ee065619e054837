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
        if lost_worker := loaders.dead_worker_advice(e):
            log.info("%s: %s", type(e).__name__, e)
            raise ProcessDied(lost_worker) from None
        if not is_oom(e):
            raise
        log.info("%s: %s", type(e).__name__, e)
        traceback.clear_frames(e.__traceback__)  # they hold the activations
        raise advice(trainer, batches, settings) from None


def advice(trainer: pl.Trainer, batches: Loaders, settings: Settings) -> OutOfMemory:
    data = batches.data
    batch = data.batch_size if isinstance(getattr(data, "targets", None), Targets) else None
    if batch is None:
        return OutOfMemory(
            f"a batch does not fit in memory; {type(batches.holder).__name__} sets its size. {OTHERWISE}"
        )
    loop, world, arithmetic = trainer.fit_loop.epoch_loop, trainer.world_size, arithmetic_of(batches.module)
    validation = loop.val_loop.batch_progress.current
    if trainer.state.fn != TrainerFn.FITTING or validation.ready > validation.completed:
        parts = {TrainerFn.TESTING: "test", TrainerFn.PREDICTING: data.predicted}
        part = parts.get(trainer.state.fn or TrainerFn.FITTING, "val")
        batch = min(data.eval_batch_size, data.splits[part].count)
        smaller = f"Try loader.eval_batch_size={batch // 2}; the metrics stay the same." if batch > 1 else OTHERWISE
        per_process = -(-batch // max(arithmetic.evaluation_sums, world))
        return OutOfMemory(f"an evaluation batch of {per_process} does not fit in memory. {smaller}")
    if not loop.batch_progress.total.ready:
        return OutOfMemory(f"the network and its optimizer do not fit in memory, even without a batch. {OTHERWISE}")
    accumulate = trainer.accumulate_grad_batches
    text = f"a micro-batch of {batch // (world * accumulate)} does not fit in memory."
    if why := batches.needs_whole:
        return OutOfMemory(f"{text} {why} {OTHERWISE}")
    keys = {
        n: key for n in settings.accumulations if n > accumulate and (key := arithmetic.accumulation_setting(n, world))
    }
    if not keys:
        return OutOfMemory(f"{text} There is no smaller one. {OTHERWISE}")
    count = next(iter(keys))
    smaller = f"A size of {batch // (world * count)} may fit: set {keys[count]}; the global batch stays {batch}."
    return OutOfMemory(f"{text} {smaller}")
