"""The metrics of an evaluation, and what the report shows of the test set."""

# B batch

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor
from torchmetrics import Metric

from lockstep.compat.metric_states import exact_on, of_all_processes, prepare, update
from lockstep.errors import UserError
from lockstep.kit.panels import Gallery, Kept, Sample
from lockstep.machine.world import all_gather_objects
from lockstep.training.losses import float32, sample_at, samples_at
from lockstep.training.module import Sums, add_to_sums, hook, log_reduced, sum_over_processes

log = logging.getLogger("lockstep")

# --- Evaluation metrics from sums over samples, not from means of means, so they do not depend on the world size ---


def named_values(name: str, value: Any, names: Sequence[Any]) -> dict[str, Tensor]:
    """The values of a metric, by name: from a number, a dict, or a tensor with several values, such as one per class.

    Values of a tensor are named by `names`, or numbered if the counts differ.
    """
    if isinstance(value, Mapping):
        entries = [named_values(f"{name}/{key}", entry, names) for key, entry in value.items()]
        return {metric: v for entry in entries for metric, v in entry.items()}
    if not isinstance(value, Tensor | int | float):
        raise UserError(
            f"the metric {name} returns a {type(value).__name__}, which cannot be logged; expected a number, a tensor, or a dict of these."
        )
    values = torch.as_tensor(value).float().flatten()
    if len(values) == 1:
        return {name: values[0]}
    labels = names if len(names) == len(values) else range(len(values))
    return {f"{name}/{label}": value for label, value in zip(labels, values, strict=True)}


NOTHING: Sums = {"loss": (0.0, 0.0), "count": (0.0, 0.0)}


class Measured(NamedTuple):
    """The mean loss and the metrics of an evaluation set, of the samples of all processes."""

    sums: Sums  # of the loss, and of the number of samples
    metrics: Mapping[str, Metric]

    @classmethod
    def of(cls, module: pl.LightningModule, metrics: Mapping[str, Metric]) -> Self:
        """They are no children of `module`, and need not be."""
        for metric in metrics.values():
            prepare(metric, module.device)  # sums exactly
        return cls({**NOTHING}, metrics)

    def update(
        self,
        module: Any,
        batch_idx: int,
        loss_B: Tensor,
        weight_B: Tensor | None,
        inputs: Mapping[str, tuple[Any, ...]],
    ) -> None:
        """Adds a batch. `inputs`: the arguments of each metric."""
        exact = exact_on(module.device)
        weight = len(loss_B) if weight_B is None else weight_B.float().sum(dtype=exact)
        weighted_B = loss_B if weight_B is None else loss_B * weight_B
        add_to_sums(self.sums, "loss", weighted_B.float().sum(dtype=exact), weight)
        add_to_sums(self.sums, "count", len(loss_B), 0)
        for name, metric in self.metrics.items():
            update(metric, batch_idx, *inputs[name])

    def log(self, module: pl.LightningModule, part: str, names: Sequence[Any]) -> None:
        """Logs the values of all processes as `part`/..., and begins anew. `names`: of the values of a metric with several."""
        totals = sum_over_processes(self.sums)
        loss, weight = totals["loss"]
        values = {"loss": torch.tensor(loss / weight if weight else torch.nan)}
        values["count"] = torch.tensor(totals["count"][0], dtype=torch.float64)
        self.sums.update(NOTHING)
        with of_all_processes([*self.metrics.values()]):
            for name, metric in self.metrics.items():
                values |= named_values(name, metric.compute(), names)
        log_reduced(module, {f"{part}/{name}": value for name, value in values.items()})
        for metric in self.metrics.values():
            metric.reset()


# --- The task's panels during the test, and the samples with the largest losses ---
#
# A panel that fails is omitted with a warning, on every process: an error in a panel must not lose the test's metrics.


class TestPanels(pl.Callback):
    """Panels of one test whose `test_step` returns `output` and `loss` (per sample). `contents`: what the report shows, on rank 0."""

    __test__ = False  # for pytest

    def __init__(self, contents: list[Any], *, compiled: bool) -> None:
        self.contents, self.compiled = contents, compiled
        self.kept = {"largest losses": Kept(24, by_loss=True), "random samples": Kept(16)}
        self.panels: dict[str, Any] = {}
        self.failed: set[str] = set()

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
                    columns = data.dataset.show(sample_at(raw, row, size))
                    image = columns.pop("image", None)
                    # a column of the data may have the same name
                    inputs = {f"input {name}" if name in values else name: value for name, value in columns.items()}
                    results[index] = Sample(index, values | inputs, image)
        return results
