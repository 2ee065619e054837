"""Lightning's own mesh is still of the wrong size, with groups of its own; ours is the default group."""

from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy, model_parallel

from lockstep.compat.whole_mesh import WholeMeshStrategy


class Mesh(Exception):
    """Carries the sizes that Lightning wants to make a mesh of."""


def test_lightnings_mesh_of_two_nodes_with_three_processes(monkeypatch):
    """When it is (6, 1), or made of the default group, remove compat/whole_mesh.py."""

    def mesh(*sizes):
        raise Mesh(*sizes[:2])

    monkeypatch.setattr(model_parallel, "_setup_device_mesh", mesh)
    monkeypatch.setattr(ModelParallelStrategy, "_setup_distributed", Mock())
    strategy = ModelParallelStrategy(tensor_parallel_size=1)
    strategy.accelerator = Mock()
    strategy.cluster_environment = Mock(**{"local_rank.return_value": 0, "world_size.return_value": 6})
    strategy.num_nodes, strategy.parallel_devices = 2, [torch.device("cpu")] * 3
    with pytest.raises(Mesh) as sizes:
        strategy.setup_environment()
    assert sizes.value.args == (2, 1)


def test_our_mesh_has_the_timeout_of_the_strategy(monkeypatch):
    def initialise(_: object) -> None:
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=77))

    monkeypatch.setattr(ModelParallelStrategy, "_setup_distributed", initialise)
    strategy = WholeMeshStrategy(tensor_parallel_size=1)
    strategy._lightning_module = Mock()
    strategy.cluster_environment = Mock(**{"local_rank.return_value": 0, "world_size.return_value": 1})
    strategy.parallel_devices = [torch.device("cpu")]
    try:
        strategy.setup_environment()
        group = strategy.device_mesh["data_parallel"].get_group()
        assert group is torch.distributed.group.WORLD
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)
    finally:
        torch.distributed.destroy_process_group()
