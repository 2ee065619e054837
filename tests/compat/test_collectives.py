import pytest
import torch
from torch import distributed

from lockstep.compat.collectives import CollectiveCounter


@pytest.fixture
def one_process(tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_collectives_are_counted_and_nothing_else(one_process):
    counter, ones = CollectiveCounter(), torch.ones(2, requires_grad=True)
    with counter:
        (ones * 2).sum().backward()
    assert counter.count == 0
    with counter:
        distributed.all_reduce(torch.ones(2))
        distributed.all_gather([torch.empty(2)], torch.ones(2))
        distributed.all_gather_object([None], "text")
    assert counter.count >= 3


def test_the_class_has_no_public_name_yet():
    assert not hasattr(torch.utils, "TorchDispatchMode")
