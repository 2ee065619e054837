"""Lightning's "auto" is still the number of nodes, and the private attribute still sets the size of the mesh."""

from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy, model_parallel

from lockstep.compat.whole_mesh import WholeMeshStrategy


class Mesh(Exception):
    """Carries the sizes that Lightning wants to make a mesh of."""


@pytest.mark.parametrize(("kind", "data_parallel"), [(ModelParallelStrategy, 2), (WholeMeshStrategy, 6)])
def test_the_mesh_of_two_nodes_with_three_processes(kind, data_parallel, monkeypatch):
    """When Lightning's own gives 6 as well, remove compat/whole_mesh.py."""

    def mesh(*sizes):
        raise Mesh(*sizes[:2])

    monkeypatch.setattr(model_parallel, "_setup_device_mesh", mesh)
    monkeypatch.setattr(ModelParallelStrategy, "_setup_distributed", Mock())
    strategy = kind(tensor_parallel_size=1)
    strategy.accelerator = Mock()
    strategy.cluster_environment = Mock(**{"local_rank.return_value": 0, "world_size.return_value": 6})
    strategy.num_nodes, strategy.parallel_devices = 2, [torch.device("cpu")] * 3
    with pytest.raises(Mesh) as sizes:
        strategy.setup_environment()
    assert sizes.value.args == (data_parallel, 1)
