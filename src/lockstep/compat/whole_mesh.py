"""One data-parallel mesh over all processes, whatever the number of nodes.

Lightning 2.6.6: `ModelParallelStrategy(data_parallel_size="auto")` means the number of nodes, and a number has to be known before
the Trainer has told the strategy how many processes there are. Remove this file when "auto" fills what `tensor_parallel_size`
leaves, or when the size can be set later: tests/compat/test_whole_mesh.py fails then.
"""

from lightning.pytorch.strategies import ModelParallelStrategy


class WholeMeshStrategy(ModelParallelStrategy):
    """`device_mesh["data_parallel"]` holds every process of the run."""

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()
