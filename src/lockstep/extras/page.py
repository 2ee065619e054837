"""report.html: the page of a run, rewritten while it trains."""

import logging
import math
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor

from lockstep.checkpoints.finding import checkpoint_paths
from lockstep.compat.metric_states import of_all_processes, prepare, update
from lockstep.config.compose import to_hydra
from lockstep.config.draft import as_yaml
from lockstep.config.formatting import is_fraction, metric
from lockstep.config.project import command
from lockstep.config.run_config import RunConfig
from lockstep.config.settings import Settings
from lockstep.extras.panels import classes_of, is_right, picture, shown, write_panels
from lockstep.extras.render import chart, render, with_colours
from lockstep.kit.panels import Content, Gallery, Kept, Sample
from lockstep.machine.files import write_text
from lockstep.machine.world import all_gather_objects
from lockstep.reporting.console import in_runs_dir, print_line, time_left, warnings_in
from lockstep.reporting.report import STAGE, headline, metric_series
from lockstep.run import OF_RANK_0, RunFolder, metrics_of_test, overrides_of
from lockstep.training.arithmetic import completes_step, steps_done, total_steps
from lockstep.training.losses import float32, sample_at, samples_at
from lockstep.training.module import hook

# Parts of the time: name and colour. Training, validation and test have the colours of their curves.
PARTS = {
    "start": ("start", "start"), "steps": ("training steps", "train"), "wait": ("waiting for data", "wait"),
    "validation": ("validation", "val"), "saving": ("saving", "saving"), "test": ("test and end", "test"),
}  # fmt: skip
log = logging.getLogger("lockstep")
ROWS, LINES = 5, 40  # shown for a failed run: rows of metrics.csv, lines of train.log
Columns = Mapping[str, Sequence[tuple[int, float]]]  # of metrics.csv, as pairs of step and value


# --- The headline ---


def headline_parts(module: Any, report: dict[str, Any]) -> dict[str, Any]:
    """The primary metric as the page shows it: its name, number and unit, the rest of its text, and its interval."""
    name, text, interval = headline(module, report)
    match = re.fullmatch(r"(-?[\d.,e+-]+|nan|inf)(%?)(?: (?:of |on )?(.*))?", text, re.DOTALL)
    number, unit, rest = match.groups("") if match else ("", "", "")
    ends = [f"{100 * end:.2f}" if unit else f"{end:.4f}" for end in interval or ()]
    return {
        "name": name[:1].upper() + name[1:],
        "number": number,
        "text": text,
        "unit": unit,
        "rest": rest,
        "interval": " to ".join(ends) + unit if ends else "",
    }


# --- Curves of training ---


CHARTS, CURVES = 24, 8  # maximum number of charts in addition to the task's own; of curves per chart


def charts_of(module: Any, of_rank_0: set[str], logged: Sequence[str]) -> list[tuple[str, str, tuple[str, ...]]]:
    """Title, unit and columns of metrics.csv of each chart: the module's `curves`, then training and validation by metric, then all other values, with the module's `titles`."""
    sets = hook(module, "evaluation_sets", lambda stage: [stage])("val")
    own = [
        (title, unit, tuple(n.replace("val", s, 1) for n in names for s in (sets if n.startswith("val/") else ["val"])))
        for title, unit, names in hook(module, "curves", tuple)()
    ]
    drawn, groups = {name for _, _, names in own for name in names}, dict[tuple[bool, str], list[str]]()
    for name in logged:
        if name not in drawn and not name.endswith("/count"):
            of_set = next((each for each in sets[1:] if name.startswith(f"{each}/")), "val")
            match = STAGE.fullmatch(name.replace(of_set, "val", 1))
            groups.setdefault((not match, match[2] if match else name), []).append(name)
    for key in sorted(groups, key=itemgetter(0))[:CHARTS]:
        names = groups[key][:CURVES]
        title, unit = hook(module, "titles", {}).get(key[1], (key[1], ""))
        own.append((title + OF_RANK_0 * (not of_rank_0.isdisjoint(names)), unit, tuple(names)))
    return own


def highest(module: Any, name: str) -> float:
    """The largest value of a metric, if torchmetrics declares it: 1 for fractions."""
    metrics = hook(module, "evaluated", {}).get("val", [{}])[-1]
    found = metrics.get(name.partition("/")[2].partition("/")[0])
    return float(getattr(found, "plot_upper_bound", None) or math.inf)


def drawn_curves(
    module: Any, of_rank_0: set[str], columns: Columns, report: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """The module's curves, then learning rate, speed and memory: charts over steps, or numbers if there is only one point."""
    unit, batch = report.get("unit", "samples"), report.get("batch_size")
    rates = [
        ("Learning rate", "", ("train/lr", *(name for name in columns if name.startswith("lr-")))),
        ("Speed", f"{unit}/s", (f"train/{unit}_per_s",)),
        ("Peak memory so far", "GiB, first process", ("train/peak_memory_gib",)),
    ]
    excluded = {"epoch", *metrics_of_test(report), *(name for _, _, names in rates for name in names)}
    curves = [*charts_of(module, of_rank_0, [name for name in columns if name not in excluded]), *rates]
    best = re.search(r"best-step-(\d+)", str(report.get("checkpoint")))
    last_step = max((step for points in columns.values() for step, _ in points), default=1)
    for title, y_unit, names in curves:
        pairs = [(label, name) for label, name in zip(labels(names), names, strict=True) if name in columns]
        lines = {label: columns[name] for label, name in pairs}
        validated = any(name.startswith("val") for _, name in pairs)
        are_numbers = all(len(points) == 1 for points in lines.values())
        values = [(label * (len(pairs) > 1), metric(n, columns[n][0][1])) for label, n in pairs if are_numbers]
        svg = chart(
            title,
            "step",
            {} if are_numbers else lines,
            x_range=(0.0, max(1.0, last_step)),
            highest=max(highest(module, name) for name in names),
            percent=all(is_fraction(name, *(y for _, y in columns[name])) for _, name in pairs),
            mark=("best checkpoint", float(best[1])) if best and validated else None,
            second_x=(f"{unit} seen", batch) if batch else None,
        )
        if svg or values:
            keys = with_colours(lines) if svg and validated else []
            yield {"title": title, "unit": y_unit, "svg": svg, "keys": keys, "values": values}


def labels(names: Sequence[str]) -> list[str]:
    """Short labels for the curves of one chart: only the part that differs, for names like stage/metric."""
    stages, _, metrics = zip(*(name.partition("/") for name in names), strict=True)
    if "" in metrics:
        return list(names)
    if len({*metrics}) == 1:
        return list(stages)
    return list(metrics if len({*stages}) == 1 else names)


# --- The page ---


def write_page(
    folder: RunFolder,
    config: RunConfig,
    report: dict[str, Any],
    trainer: "pl.Trainer | None",
    panels: Sequence[Content],
    progress: Mapping[str, Any] | None = None,
) -> None:
    """Writes report.html, and panels.json if the run is done or has failed. `progress`: of a run that is still training."""
    if progress is None:
        write_panels(folder.panels_file, panels)
    metrics, log_lines = folder.metrics(), folder.log_lines()
    module = trainer.lightning_module if trainer else None
    of_rank_0 = trainer.strategy.means.of_rank_0 if trainer else set()  # type: ignore[attr-defined]
    failed, is_in_runs_dir = report["status"] not in ("done", "running"), in_runs_dir(config)
    galleries = [panel for panel in panels if isinstance(panel, Gallery)]
    if failed and metrics:
        report = {"train/steps": int(metrics[-1]["step"]), **report}
    limits = [name for name in ("epochs", "steps") if (config.get(f"trainer.max_{name}") or 0) > 0] or ["epochs"]
    values = {
        "run": to_hydra(str(config.run)),
        "folder": shlex.quote(str(folder.path)) if is_in_runs_dir else config.run,
        "there": is_in_runs_dir,
        "longer": " ".join(f"trainer.max_{name}={2 * (report.get(f'train/{name}') or 1)}" for name in limits),
        "overrides": overrides_of(report),
        "config": as_yaml(config),
        "report": report,
        "progress": progress,
        "headline": headline_parts(module, report),
        "warnings": [*filter(None, [report.get("data/notice")]), *warnings_in(log_lines)],
        "last_rows": metrics[-ROWS:] * failed,
        "log_lines": log_lines[-LINES:] * failed,
        "curves": list(drawn_curves(module, of_rank_0, metric_series(metrics), report)) if module else [],
        "test_panels": [panel for panel in panels if not isinstance(panel, Gallery)],
        "galleries": galleries,
        "classes": classes_of(galleries),
        "judged": any(is_right(sample) is not None for panel in galleries for sample in panel.samples),
        "durations": [(*PARTS[part], s) for part in PARTS if (s := report.get(f"time/{part}_s"))],
        "command": command,
    }
    write_text(folder.page_file, render("report.html.j2", str(report["run"]), values))
    if failed:
        print_line(f"report: {folder.page_file}")


# --- The first training batch as the network saw it ---

SHOWN = 16  # images


def denormalised(input_BCHW: Any, metadata: Mapping[str, Any]) -> Any:
    """Images as bytes on the CPU, without normalisation; None for other inputs, or if mean or std is unknown."""
    mean, std = metadata.get("mean"), metadata.get("std")
    if getattr(input_BCHW, "ndim", 0) != 4 or not mean or not std or len(mean) != input_BCHW.shape[1]:
        return None
    mean_C, std_C = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
    return ((input_BCHW.detach().float().cpu() * std_C + mean_C) * 255).round().clamp(0, 255).byte()


def samples_of(batch: Any, metadata: dict[str, Any]) -> list[Sample]:
    """The first images of a named batch or of a tuple `(images, targets)`; none if there are no images."""
    if not isinstance(batch, dict):
        batch = dict(zip(("input", "target"), batch, strict=False)) if isinstance(batch, list | tuple) else {}
    images, target, index = batch.get("input"), batch.get("target"), batch.get("index")
    if not isinstance(images, Tensor) or images.dim() != 4 or images.shape[1] not in (1, 3):
        return []
    images = images[:SHOWN].detach().float().cpu()  # SYNC: once a run
    image_BCHW, classes = denormalised(images, metadata), metadata.get("classes") or ()
    index_B = index.tolist() if isinstance(index, Tensor) else [None] * SHOWN
    facts = [dict[str, str]()] * SHOWN
    if isinstance(target, Tensor) and target.dim() == 1 and not target.is_floating_point():
        facts = [{"target": str(classes[t] if 0 <= t < len(classes) else t)} for t in target[:SHOWN].tolist()]
    pictures = map(picture, images if image_BCHW is None else image_BCHW)
    return [Sample(*row) for row in zip(index_B, facts, pictures, strict=False)]


# --- The panels of the test set: those of the task, the samples with the largest losses, and random samples ---
#
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


# --- The page of a run that trains ---


class LivePage(TestPanels):
    """Rewrites report.html while the run trains, on rank 0: every EVERY_S seconds, or less often if it took over 1% of the time.

    Also shows the test set, and the first batch: its images after augmentation, with the normalisation undone.
    """

    EVERY_S, PAUSE = 2.0, 100  # PAUSE: a multiple of the time that a page takes
    first_samples: list[Sample] | None = None  # of the first batch

    def __init__(self, settings: Settings) -> None:
        super().__init__(compiled=settings.cfg.compile)
        self.folder, self.settings = settings.folder, settings
        self.due_s, self.every_s = math.inf, self.EVERY_S

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.config = self.settings.as_built().cfg
        self.first_step, self.began_s = steps_done(trainer), time.monotonic()
        self.due_s = self.began_s + self.EVERY_S

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if completes_step(trainer):
            self.renew(trainer, pl_module)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, *_: Any) -> None:
        if self.first_samples is None:
            found = getattr(trainer.datamodule, "metadata", {})  # type: ignore[attr-defined]
            # A LightningDataModule may have an attribute of this name.
            metadata = found if isinstance(found, dict) else {}
            self.first_samples = samples_of(batch, metadata) if trainer.is_global_zero else []

    def report_panels(self) -> list[Content]:
        if not self.first_samples:
            return self.contents
        note = "The first training batch, after augmentation, of the first process."
        return [*self.contents, Gallery("What the network saw", self.first_samples, note)]

    def renew(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Writes the page if it is due."""
        if not trainer.is_global_zero or time.monotonic() < self.due_s:
            return
        began_s = time.monotonic()
        try:
            report = self.folder.report() | {"status": "running"}
            write_page(self.folder, self.config, report, trainer, (), self.progress(trainer))
        except Exception as e:  # the page must not end the run
            log.warning("report.html could not be updated at step %s: %s", steps_done(trainer), e)
        self.every_s = max(self.EVERY_S, self.PAUSE * (time.monotonic() - began_s))
        self.due_s = time.monotonic() + self.every_s

    on_train_end = renew

    def progress(self, trainer: pl.Trainer) -> dict[str, Any]:
        """The progress of the run, for the page."""
        step, total = steps_done(trainer), total_steps(trainer)
        saved = sorted((path.stat().st_mtime, path.name) for path in checkpoint_paths(self.folder.path))
        return {
            "step": step,
            "total": int(total) if math.isfinite(total) else None,
            "epoch": trainer.current_epoch + 1,
            "left": time_left(self.began_s, self.first_step, step, total),
            "checkpoint": "".join(f"{name}, {time.strftime('%H:%M:%S', time.localtime(s))}" for s, name in saved[-1:]),
            "every_s": self.every_s,
            "written_s": time.time(),
        }
