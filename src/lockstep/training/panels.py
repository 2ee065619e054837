"""The task's panels during the test, and the samples with the largest losses.

A panel that fails is left out with a warning, on every process: an error in a decoration must not cost the test's metrics.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor

from lockstep.compat.metric_states import of_all_processes, update
from lockstep.data.dataset import Batch
from lockstep.tasks import Task
from lockstep.tasks.panel import Content, Gallery, Kept, Panel, Sample
from lockstep.training.metrics import samples_at, without_fillers

if TYPE_CHECKING:
    from lockstep.training.module import TaskModule

log = logging.getLogger("lockstep")


class TestPanels:
    """Panels of one test: `begin`, `update` with each batch, `finish`. `contents` has what the report shows, on rank 0."""

    __test__ = False  # for pytest

    def __init__(self, task: Task, contents: list[Content], *, compiled: bool) -> None:
        self.task, self.worst, self.random, self.compiled = task, Kept(24, by_loss=True), Kept(16), compiled
        self.panels: dict[str, Panel] = {}
        self.failed: set[str] = set()
        self.contents = contents

    def begin(self, device: torch.device) -> None:
        with self.attempt("test_panels"):
            self.panels = {name: panel.to(device) for name, panel in self.task.test_panels().items()}
        self.worst.to(device)
        self.random.to(device)

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as e:
            self.failed.add(name)
            log.warning("the report lacks the panel %s, which failed: %s: %s", name, type(e).__name__, e, exc_info=e)

    def update(self, output: Any, batch: Batch, loss_B: Tensor, batch_idx: int) -> None:
        self.worst.update(output, batch, loss_B)
        self.random.update(output, batch, loss_B)
        for name, panel in self.panels.items():
            if name not in self.failed:
                with self.attempt(name):
                    update(panel, batch_idx, output, batch, loss_B)

    def finish(self, module: "TaskModule") -> None:
        """Called on every rank."""
        for name, panel in self.whole(module).items():
            with of_all_processes([panel]), self.attempt(name):
                self.contents += panel.contents()
        with of_all_processes([self.worst, self.random]):
            worst, sample = (
                [(index, loss.item()) for index, loss in kept.found()] for kept in (self.worst, self.random)
            )
        sample = (
            sample if {index for index, _ in sample} - {index for index, _ in worst} else []
        )  # a small test set is there whole
        found = [*worst, *sample]
        described: dict[int, Sample] = {}
        show = module.trainer.datamodule.dataset.show  # type: ignore[attr-defined]
        for rows, output, batch, raw in self.again(module, [index for index, _ in found]):
            with self.attempt("worst"):
                facts = self.task.describe(output, batch)
                for row, more in zip(rows, facts, strict=True):
                    index, loss = found[row]
                    shown = show({name: value[row] for name, value in raw.items() if name != "count"})
                    image = shown.pop("image", None)
                    own = {"loss": loss, **more}  # a column of the data may have the same name
                    shown = {f"input {name}" if name in own else name: value for name, value in shown.items()}
                    described[index] = Sample(index, own | shown, image)
        for title, kept, note in (
            ("Largest losses", worst, "Of the test set, the largest first."),
            ("Random samples", sample, "The same samples of the test set in every run."),
        ):
            if samples := [described[index] for index, _ in kept if index in described]:
                self.contents.append(Gallery(title, samples, note))

    def whole(self, module: "TaskModule") -> Mapping[str, Panel]:
        """The panels that failed on no rank."""
        failed = torch.tensor([float(name in self.failed) for name in self.panels], device=module.device)
        somewhere: Tensor = module.trainer.strategy.reduce(failed, reduce_op="sum")
        times = zip(self.panels.items(), somewhere.tolist(), strict=True)
        return {name: panel for (name, panel), failures in times if not failures}

    def again(self, module: "TaskModule", indices: list[int]) -> Iterator[tuple[list[int], Any, Batch, Batch]]:
        """The places, output, batch and raw samples of `indices` of the test set, computed once more.

        A compiled network would be compiled anew for another number of samples than the test's. Every rank computes all of them,
        because strategies that shard communicate in forward.
        """
        trainer, data = module.trainer, module.trainer.datamodule  # type: ignore[attr-defined]
        raw = data.raw("test", np.asarray(indices))
        share = -(-min(data.eval_batch_size, data.test_split.count) // trainer.world_size)
        size = share if self.compiled else min(share, len(indices))
        for first in range(0, len(indices), size):
            places = (np.arange(first, first + size) % len(indices)).tolist()
            moved = move_data_to_device(samples_at(raw, places, len(indices)), module.device)
            batch = trainer.precision_plugin.convert_input(data.finished(moved, training=False))
            batch["count"] = min(size, len(indices) - first)
            with torch.no_grad(), trainer.precision_plugin.forward_context():
                output = module(batch)
            yield places[: batch["count"]], *without_fillers(output, batch), raw
