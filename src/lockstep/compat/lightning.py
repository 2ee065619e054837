"""Private names of Lightning, each with the reason and when to remove it."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torch.distributed.device_mesh import DeviceMesh

from lockstep.machine.world import all_gather_objects

# --- Loaders begin at a known position ---
#
# Lightning 2.6.6 starts loaders in FitLoop.setup_data(). It reads the first batch of a loader without a length, to see
# whether it is the last one; for loaders that processes compare, Lockstep reads it. A module that uses
# `estimated_stepping_batches` in `configure_optimizers` triggers this before a checkpoint's position is restored.
# Remove this when the position is restored first:
# tests/compat/test_lightning.py::test_a_loader_without_a_length_begins_before_the_position_is_restored fails then.


def restart_loaders(trainer: pl.Trainer) -> None:
    iter(trainer.fit_loop._data_fetcher)  # type: ignore[arg-type]


# --- Values of an epoch over the samples of all processes ---
#
# With `self.log("val_loss", loss)` Lightning 2.6.6 keeps a mean per process; so it does with sums and extremes
# (`reduce_fx`). With sync_dist=True it rounds the number of samples that it divides by: a mean over 103 samples on two
# processes was 1% too large. Remove this when Lightning takes the mean over all samples:
# tests/compat/test_lightning.py::test_lightning_logs_the_mean_of_one_process fails then.


class ValuesOfAllProcesses(_LoggerConnector):
    # this epoch's values and weights from before the run was resumed
    before: ClassVar[dict[str, tuple[float, float]]] = {}

    def on_batch_start(self, batch: Any, dataloader_idx: int | None = None) -> None:
        """Sets the number of samples, if a loader reports it.

        Lightning guesses it from the first tensor, which may have a row for each node of several graphs.
        """
        super().on_batch_start(batch, dataloader_idx)
        if (count := self.trainer.strategy.samples(dataloader_idx or 0)) is not None:  # type: ignore[attr-defined]
            self.trainer._results.batch_size = count  # type: ignore[union-attr]

    def epoch_end_reached(self) -> None:
        """Runs in each process after the last batch of a loader, before Lightning computes the values."""
        super().epoch_end_reached()
        items, by_rank = open_values(self.trainer, self.trainer._results)
        for key, item in items.items():
            logged = [values[key] for values in (*by_rank, self.before) if key in values]
            # equal means keep their bits; NaN equals nothing
            if item.meta.is_mean_reduction and len({value / weight if weight else 0 for value, weight in logged}) == 1:
                item._computed = item.value / item.cumulated_batch_size
            else:
                value, weight = combine(item, logged)
                item._computed = item.value.new_tensor(value / weight)
        if self.trainer.training:
            self.before = {}  # type: ignore[misc]


def open_values(
    trainer: pl.Trainer, results: Any
) -> tuple[dict[str, _ResultMetric], list[dict[str, tuple[float, float]]]]:
    """What was logged per batch and is not computed yet, with the value and weight that each process has so far."""
    items = {key: item for key, item in (results or {}).items() if is_open(item)}
    values = {key: (float(item.value), float(getattr(item, "cumulated_batch_size", 1))) for key, item in items.items()}
    return items, all_gather_objects(values) if trainer.world_size > 1 else [values]


def combine(item: _ResultMetric, values: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The value and weight of several parts of an epoch. A mean is their quotient; other values have the weight 1."""
    if item.meta.is_mean_reduction:
        return sum(value for value, _ in values), sum(weight for _, weight in values)
    reduced = item.meta.reduce_fx(torch.tensor([value for value, _ in values], dtype=torch.float64))
    return float(reduced), 1.0


def save_epoch_means(trainer: pl.Trainer) -> dict[str, tuple[float, float]]:
    """The values so far, for a checkpoint within an epoch: Lightning 2.6.6 does not save them.

    Every process must call it.
    """
    results = trainer.fit_loop.epoch_loop._results  # those of training, even during a validation
    items, by_rank = open_values(trainer, results)
    before: dict[str, tuple[float, float]] = trainer._logger_connector.before  # type: ignore[attr-defined]
    parts = (*by_rank, before)
    return before | {key: combine(item, [v[key] for v in parts if key in v]) for key, item in items.items()}


def load_epoch_means(trainer: pl.Trainer, saved: Mapping[str, tuple[float, float]]) -> None:
    trainer._logger_connector.before = dict(saved)  # type: ignore[attr-defined]


def is_open(item: _ResultMetric) -> bool:
    """Whether it was logged per batch and is not computed yet."""
    logged = item.is_tensor and item.meta.on_epoch and item._computed is None and not item.has_reset
    return logged and not (item.meta.sync.rank_zero_only or item.meta.sync.group)


# --- The step that logs are written under ---
#
# Lightning 2.6.6 counts it in `_batches_that_stepped`, separately from `trainer.global_step`: it logs step 56 as 55,
# and adds one on resuming. The report and names of checkpoints use the number of the optimizer step, so logs use it
# too. Remove this when Lightning does the same:
# tests/compat/test_lightning.py::test_lightning_logs_a_step_under_another_number fails then.


class StepsFromOne(ValuesOfAllProcesses):
    @property
    def should_update_logs(self) -> bool:
        """Lightning's rule uses the number of the previous step."""
        loop = self.trainer.fit_loop.epoch_loop
        loop._batches_that_stepped -= 1
        try:
            return super().should_update_logs
        finally:
            loop._batches_that_stepped += 1


def set_logged_step(trainer: pl.Trainer, step: int) -> None:
    trainer.fit_loop.epoch_loop._batches_that_stepped = step


def save_logged_step(fit_loop: dict[str, Any], step: int) -> None:
    """Sets the steps done in the `fit_loop` state of a checkpoint."""
    fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] = step


# --- A Trainer that logs nothing itself ---
#
# A run logs its test results at the step of the checkpoint; the test's Trainer would log them at step 0 (Lightning
# 2.6.6). It still needs loggers: without them `self.logger` is None in a module's `test_step`. Remove this when a
# Trainer has a switch for it: tests/compat/test_lightning.py::test_a_test_is_logged_at_step_0 fails then.


class LogsNothing(ValuesOfAllProcesses):
    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        pass


def log_by(trainer: pl.Trainer, connector: type[StepsFromOne | LogsNothing]) -> None:
    trainer._logger_connector.__class__ = connector


# --- SIGTERM ---
#
# Lightning 2.6.6 broadcasts in its SIGTERM handler, which the other processes do not expect. It then ends the run by
# SystemExit, without saving and without a message. At each step it also asks rank 0 by a broadcast whether it received
# SIGTERM, and waits for the answer with `.item()`, so GPUs idle. callbacks/stopping.py replaces both. Lightning still
# restores the handlers at the end of a trainer's run. Remove this when Lightning has a switch:
# tests/compat/test_lightning.py::test_lightning_still_handles_sigterm fails then.


def without_sigterm_handler(trainer: pl.Trainer) -> None:
    conn: Any = trainer._signal_connector
    conn.register_signal_handlers = lambda: setattr(conn, "_original_handlers", conn._get_current_signal_handlers())
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


# --- One data-parallel mesh over all processes ---
#
# In Lightning 2.6.6, `ModelParallelStrategy(data_parallel_size="auto")` means the number of nodes, and a number must be
# set before the Trainer passes the number of processes to the strategy. Lightning's mesh creates its own process
# groups, each with a communicator and torch's timeout of 30 minutes; this one keeps the strategy's timeout. Remove it
# when Lightning creates a mesh from the default group:
# tests/compat/test_lightning.py::test_lightnings_mesh_of_two_nodes_with_three_processes fails then.


class WholeMeshStrategy(ModelParallelStrategy):
    """`device_mesh` has one dimension, `data_parallel`, over the default process group."""

    def setup_environment(self) -> None:
        self._setup_distributed()
        world = torch.distributed.group.WORLD
        assert world is not None
        assert self.lightning_module is not None
        self._device_mesh = DeviceMesh.from_group(world, self.root_device.type, mesh_dim_names=("data_parallel",))
        self.lightning_module._device_mesh = self._device_mesh
