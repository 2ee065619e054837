"""The rows of the global batch that a process has masks for are those of the samples that it gets."""

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.callbacks.step_seed import StepSeed
from lockstep.data.sampler import Split, TrainBatches
from lockstep.training.arithmetic import StepArithmetic

CPU = torch.device("cpu")


@settings(deadline=None)
@given(
    world=st.integers(1, 4),
    accumulate=st.integers(1, 4),
    share=st.integers(1, 3),
    steps=st.integers(1, 3),
    contiguous=st.booleans(),
)
def test_rows_are_the_places_of_a_processs_samples_in_the_batches_of_one_process(
    world, accumulate, share, steps, contiguous
):
    batch = world * accumulate * share
    split = Split(total=batch * steps, first=0, count=batch * steps)
    whole = list(TrainBatches(split, batch=batch, seed=5))
    callback = StepSeed(5, StepArithmetic(), masks_by_row=True, own_loaders=False)
    strategy = SimpleNamespace(contiguous_micro_batches=contiguous, device_rows=lambda rows: {CPU: rows})
    for rank in range(world):
        own = TrainBatches(
            split, batch=batch, seed=5, rank=rank, world=world, accumulate=accumulate, in_blocks=contiguous
        )
        for batch_idx, samples in enumerate(own):
            step = batch_idx // accumulate
            trainer: Any = SimpleNamespace(
                datamodule=SimpleNamespace(batch_size=batch),
                world_size=world,
                global_rank=rank,
                accumulate_grad_batches=accumulate,
                global_step=step,
                lightning_module=SimpleNamespace(automatic_optimization=True),
                strategy=strategy,
            )
            rows = callback.rows(trainer, batch_idx).rows[CPU]
            assert whole[step][rows.start : rows.stop].tolist() == samples.tolist()
