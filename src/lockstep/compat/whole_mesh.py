"""One data-parallel mesh over all processes, whatever the number of nodes, whose collectives keep the strategy's timeout.

Lightning 2.6.6: `ModelParallelStrategy(data_parallel_size="auto")` means the number of nodes, and a number has to be known before
the Trainer has told the strategy how many processes there are. Its mesh makes process groups of its own, with torch's timeout of 30
minutes and a communicator each. Remove this file when Lightning makes a mesh of the default group: tests/compat/test_whole_mesh.py
fails then.
"""

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import DeviceMesh


class WholeMeshStrategy(ModelParallelStrategy):
    """`device_mesh` is one dimension, `data_parallel`, of the default process group."""

    def setup_environment(self) -> None:
        self._setup_distributed()
        world = torch.distributed.group.WORLD
        assert world is not None
        assert self.lightning_module is not None
        self._device_mesh = DeviceMesh.from_group(world, self.root_device.type, mesh_dim_names=("data_parallel",))
        self.lightning_module._device_mesh = self._device_mesh
