"""The panels of the test set, computed while it is tested: those of the task, the samples with the largest losses, and random samples."""

# B batch

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device

from lockstep.compat.metric_states import of_all_processes, prepare, update
from lockstep.extras.panels import shown
from lockstep.kit.panels import Content, Gallery, Kept, Sample
from lockstep.machine.world import all_gather_objects
from lockstep.training.losses import float32, sample_at, samples_at
from lockstep.training.module import hook

log = logging.getLogger("lockstep")

# A panel that fails is omitted with a warning, on every process: an error in a panel must not lose the test's metrics.


class TestPanels(pl.Callback):
    """Panels of one test whose `test_step` returns `output` and `loss` (per sample). `compiled`: whether another batch size compiles the network again."""

    __test__ = False  # for pytest

    def __init__(self, *, compiled: bool) -> None:
        self.contents, self.compiled = list[Content](), compiled
        self.kept = {"largest losses": Kept(24, by_loss=True), "random samples": Kept(16)}
        self.panels, self.failed = dict[str, Any](), set[str]()

    def report_panels(self) -> list[Content]:
        return self.contents

    def on_test_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.task = pl_module
        for kept in self.kept.values():
            kept.to(pl_module.device)
        with self.attempt("test_panels"):
            self.panels = hook(pl_module, "test_panels", dict)()
            for panel in self.panels.values():
                prepare(panel, pl_module.device, of_panel=True)

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as e:
            self.failed.add(name)
            log.warning("the report omits the panel %s, which failed: %s: %s", name, type(e).__name__, e, exc_info=e)

    def on_test_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        has_loss = isinstance(outputs, Mapping) and {"output", "loss"} <= outputs.keys()
        if dataloader_idx or not has_loss or not (isinstance(batch, Mapping) and "index" in batch):
            return
        for name, panel in (self.kept | self.panels).items():
            if name not in self.failed:
                with self.attempt(name):
                    update(panel, batch_idx, outputs["output"], batch, outputs["loss"])

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        every = [*self.kept.values()]
        with of_all_processes(every):
            worst, random = ({index: loss.item() for index, loss in kept.found()} for kept in every)
        if not worst:
            if self.panels:
                log.warning("the report has no panels: `test_step` returns no `output` and `loss`")
            return
        failed = set[str]().union(*all_gather_objects(self.failed))
        for name, panel in self.panels.items():
            if not failed & {name, "test_panels"}:
                with of_all_processes([panel]), self.attempt(name):
                    self.contents += panel.contents()
        if random.keys() <= worst.keys():  # `worst` contains all of a small test set
            random = {}
        samples = self.samples(worst | random)
        for title, losses, note in (
            ("Largest losses", worst, "From the test set, largest first."),
            ("Random samples", random, "From the test set; the same samples in every run."),
        ):
            if gallery_samples := [samples[index] for index in losses if index in samples]:
                self.contents.append(Gallery(title, gallery_samples, note))

    def samples(self, losses: Mapping[int, float]) -> dict[int, Sample]:
        """The samples of the test set with these indices, computed again.

        Batches have the test's size if the network is compiled: a different size would trigger recompilation. Every
        rank computes all samples, because sharding strategies communicate in the forward pass.
        """
        results, indices = dict[int, Sample](), list(losses)
        trainer, data = self.task.trainer, self.task.trainer.datamodule
        files = data.dataset.paths("test")
        per_process = -(-min(data.eval_batch_size, data.splits["test"].count) // trainer.world_size)
        size = per_process if self.compiled else min(per_process, len(indices))
        for first in range(0, len(indices), size):
            index_N = np.take(indices, np.arange(first, first + size), mode="wrap")
            raw = data.raw("test", index_N)
            device_batch = move_data_to_device(samples_at(raw, [*range(size)], size), self.task.device)
            batch = trainer.precision_plugin.convert_input(data.evaluated.preprocess(device_batch))
            with self.attempt("largest losses"):
                with torch.no_grad(), trainer.precision_plugin.forward_context():
                    output = self.task(batch)
                descriptions = hook(self.task, "describe", lambda *_: [{}] * size)(float32(output), batch)
                for row, (index, description) in enumerate(
                    zip(index_N[: len(indices) - first].tolist(), descriptions, strict=False)
                ):
                    file = {"file": "/".join(Path(files[index]).parts[-2:])} if files is not None else {}
                    values = {"loss": losses[index], **file, **description}
                    columns = shown(data.dataset, sample_at(raw, row, size))
                    image = columns.pop("image", None)
                    # a column of the data may have the same name
                    inputs = {f"input {name}" if name in values else name: value for name, value in columns.items()}
                    results[index] = Sample(index, values | inputs, image)
        return results
