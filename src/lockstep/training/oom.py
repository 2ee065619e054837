"""Out-of-memory errors: one message that suggests a micro-batch that fits. The global batch stays the same."""

import copy
import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn

from lockstep.data import loaders
from lockstep.errors import LostProcess, OutOfMemory
from lockstep.training.workload import Workload

log = logging.getLogger(__name__)

# Messages of torch's allocators without an exception class (CPU on Linux and Windows, MPS), and of cuBLAS.
SIGNS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "unable to find an engine",
)
ONEDNN = "could not create a primitive"  # its whole message; for an unsupported layer it says "a primitive descriptor"
OTHERWISE = "Try trainer.precision=bf16-mixed, a smaller data.image_size or model, or strategy=fsdp on several GPUs."


def ran_out(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and (str(error) == ONEDNN or any(sign in str(error) for sign in SIGNS))


@contextmanager
def oom_advice(
    trainer: pl.Trainer, work: Workload, *, accumulations: Callable[[], list[int]], alone: bool
) -> Iterator[None]:
    """Raises OutOfMemory in place of torch's errors when memory runs out, and LostProcess when a data worker ended.

    Args:
        accumulations: the possible numbers of micro-batches per process and step, smallest first.
        alone: one process can try them by itself, because the network does not communicate in forward.
    """
    try:
        yield
    except Exception as e:
        if worker := loaders.lost(e):
            log.info("%s: %s", type(e).__name__, e)
            raise LostProcess(worker) from None
        if not ran_out(e):
            raise
        log.info("%s: %s", type(e).__name__, e)
        traceback.clear_frames(e.__traceback__)  # they hold the activations
        raise advice(trainer, work, accumulations, alone) from None


def advice(trainer: pl.Trainer, work: Workload, accumulations: Callable[[], list[int]], alone: bool) -> OutOfMemory:
    data, batch = work.loaders.data, work.loaders.size
    if batch is None:
        return OutOfMemory(
            f"a batch does not fit in memory; {type(work.loaders.holder).__name__} decides its size. {OTHERWISE}"
        )
    loop, world, arithmetic = trainer.fit_loop.epoch_loop, trainer.world_size, work.arithmetic
    validation = loop.val_loop.batch_progress.current
    if trainer.state.fn != TrainerFn.FITTING or validation.ready > validation.completed:
        parts = {TrainerFn.TESTING: data.test_split, TrainerFn.PREDICTING: data.predicted_split[1]}
        split = parts.get(trainer.state.fn or TrainerFn.FITTING, data.val_split)
        batch = min(data.eval_batch_size, split.count)
        smaller = f"Try loader.eval_batch_size={batch // 2}; the metrics stay the same." if batch > 1 else OTHERWISE
        share = -(-batch // max(arithmetic.evaluation_sums, world))
        return OutOfMemory(f"an evaluation's batch of {share} does not fit in memory. {smaller}")
    if not loop.batch_progress.total.ready:
        return OutOfMemory(f"the network and its optimizer do not fit in memory, before any batch. {OTHERWISE}")
    now = trainer.accumulate_grad_batches
    said = f"a micro-batch of {batch // (world * now)} does not fit in memory."
    if why := work.needs_whole:
        return OutOfMemory(f"{said} {why} {OTHERWISE}")
    keys = {k: key for k in accumulations() if k > now and (key := arithmetic.key_of(k, world))}
    tried = ((k, fits(trainer, work, batch // (world * k)) if alone else None) for k in keys)
    found, does = next((each for each in tried if each[1] is not False), (None, None))
    if found is None:
        return OutOfMemory(f"{said} {'No smaller one does' if keys else 'There is no smaller one'}. {OTHERWISE}")
    result = "does, tried without the rest of the run" if does else "was not tried"
    return OutOfMemory(
        f"{said} One of {batch // (world * found)} {result}: set {keys[found]}; the global batch stays {batch}.", found
    )


def fits(trainer: pl.Trainer, work: Workload, micro_batch: int) -> bool | None:
    """Whether this process alone can train in micro-batches of that size; None if that cannot be tried. It changes the weights."""
    module, copies, strategy = work.module, None, trainer.strategy
    try:
        strategy.optimizers, strategy.lr_scheduler_configs = [], []
        if (steps := work.steps_alone(trainer, micro_batch)) is None:
            return None
        for optimizer in steps:
            # the copy that checkpoints are written from
            if strategy.root_device.type == "cpu" and getattr(strategy.checkpoint_io, "thread", None):
                copies = copies or copy.deepcopy((module.state_dict(), optimizer.state_dict()))
    except (RuntimeError, MemoryError) as e:  # with little left, many things fail: starting a thread, for one
        log.info("a micro-batch of %s: %s: %s", micro_batch, type(e).__name__, e)
        traceback.clear_frames(e.__traceback__)
        return False
    return True
