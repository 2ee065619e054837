"""The arithmetic of shards: any number of processes reads what any other number has written."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.checkpoints.sharded import row_range, rows_between

WORLDS = st.integers(1, 9)


@settings(max_examples=200, deadline=None)
@given(rows=st.integers(1, 40), world=WORLDS)
def test_rows_are_divided_as_torch_chunks_them(rows, world):
    chunks = [chunk.tolist() for chunk in torch.arange(rows).chunk(world)]
    shares = [list(range(*row_range(rows, rank, world))) for rank in range(world)]
    assert shares == chunks + [[]] * (world - len(chunks))


@settings(max_examples=200, deadline=None)
@given(rows=st.integers(1, 40), wrote=WORLDS, reads=WORLDS)
def test_each_process_gets_its_rows_whoever_wrote_them(rows, wrote, reads):
    tensor = torch.arange(rows * 6.0).view(rows, 2, 3)
    shards = []
    for rank in range(wrote):
        begin, end = row_range(rows, rank, wrote)
        shards.append({"first": begin, "shape": list(tensor.shape), "rows": tensor[begin:end]})
    for rank in range(reads):
        begin, end = row_range(rows, rank, reads)
        assert torch.equal(rows_between(shards, begin, end), tensor[begin:end])
