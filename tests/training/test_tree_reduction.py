"""Sums have the same bits however many processes share the work. The reference is the tree, written out."""

import socket
from pathlib import Path

import forked
import pytest
import torch
from torch import Tensor

from lockstep.training import tree_reduction
from lockstep.training.tree_reduction import TreeReduceScatter, TreeReduction, add_over_processes, tree_sum

LEAVES = 8


def leaves() -> list[list[Tensor]]:
    """Of each logical rank: tensors of several shapes and formats, whose sum depends on its order."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, 3), (7,), (), (2, 3, 4, 4))
    made = [[torch.randn(s, generator=generator) * 10 ** (i % 5) for s in shapes] for i in range(LEAVES)]
    for tensors in made:
        tensors[3] = tensors[3].to(memory_format=torch.channels_last)
    return made


def written_out() -> list[Tensor]:
    parts = zip(*leaves(), strict=True)
    return [((a + b) + (c + d)) + ((e + f) + (g + h)) for a, b, c, d, e, f, g, h in parts]


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_the_order_of_these_numbers_matters():
    """Or the other tests could not fail."""
    one_by_one = [torch.stack(parts).cumsum(0)[-1] for parts in zip(*leaves(), strict=True)]
    assert not equal(one_by_one[:1], written_out()[:1])


def test_lists_that_come_one_after_the_other_are_added_in_the_tree():
    total = TreeReduction()
    for tensors in leaves():
        total.add(tensors)
    assert equal(total.total(), written_out())
    total.add([torch.ones(1)])  # a new sum
    assert total.total() == [torch.ones(1)]


def test_a_sum_of_three_is_refused():
    total = TreeReduction()
    for tensors in leaves()[:3]:
        total.add(tensors)
    with pytest.raises(AssertionError, match="no power of two"):
        total.total()


def test_a_stack_is_added_in_the_tree():
    assert equal([tree_sum(torch.stack(parts)) for parts in zip(*leaves(), strict=True)], written_out())


def process(rank: str, world: str, port: str, folder: str) -> None:
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=int(world))
    share = LEAVES // int(world)
    total = TreeReduction()
    for tensors in leaves()[int(rank) * share :][:share]:
        total.add(tensors)
    summed = total.total()
    divided = [tensor.clone() for tensor in summed]
    add_over_processes(summed)
    tree_reduction.AT_ONCE, at_once = 6, tree_reduction.AT_ONCE  # elements: less than a tensor has
    add_over_processes(divided)
    tree_reduction.AT_ONCE = at_once
    mixed = [torch.full((3,), float(rank)), torch.full((2,), 1, dtype=torch.float64)]
    add_over_processes(mixed)
    # every world-th logical rank, as FSDP2 reduces them
    comm, parts = TreeReduceScatter(), []
    for part in range(share):
        own = leaves()[part * int(world) + int(rank)]
        flat = torch.cat([own[3].reshape(-1), torch.zeros(-own[3].numel() % int(world))])
        out = comm.allocate((len(flat) // int(world),), dtype=flat.dtype, device=flat.device)
        comm(out, flat, None, torch.distributed.ReduceOp.SUM)
        parts.append(out)
    torch.save(
        {"sum": summed, "divided": divided, "mixed": mixed, "shard": tree_sum(torch.stack(parts))},
        Path(folder) / f"{rank}.pt",
    )
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_processes_add_up_to_the_same_bits(world, tmp_path, fork_server):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    started = [forked.call(__file__, "process", str(r), str(world), port, str(tmp_path)) for r in range(world)]
    assert [each.wait(300) for each in started] == [0] * world
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(world)]
    for each in found:
        assert equal(each["sum"], written_out())
        assert equal(each["divided"], written_out())
        assert each["mixed"][0].tolist() == [world * (world - 1) / 2] * 3
        assert each["mixed"][1].tolist() == [world] * 2
        assert each["mixed"][1].dtype == torch.float64
    assert torch.equal(torch.cat([each["shard"] for each in found]), written_out()[3].reshape(-1))
