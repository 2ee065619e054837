"""No training step and no evaluation step waits for the GPU: whole runs on a fake one."""

from pathlib import Path

import building
import lightning.pytorch as pl
import pytest
import thin_project
import torch
from fake_gpu import DEVICE, fake_gpu
from in_process import config_of, options
from measuring import ready

from lockstep import build, launch
from lockstep.config.settings import Settings
from lockstep.kit.task import Task
from lockstep.kit.tasks import Classification, LanguageModel, Multilabel, Regression
from lockstep.machine.world import World

pytestmark = pytest.mark.filterwarnings("ignore")  # fake tensors warn of many things


class Seen(Exception):
    """Ends a run before its figures are computed: there are none."""


def has_row_after(trainer: pl.Trainer, batch_idx: int) -> bool:
    return (batch_idx + 1) % (trainer.log_every_n_steps * trainer.accumulate_grad_batches) == 0


class Watch(pl.Callback):
    """Looks at all steps, and at what lies between them; not at rows of the log and the end of an epoch, which may wait."""

    def __init__(self, waits) -> None:
        self.waits, self.seen = waits, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.waits.on = batch_idx > 0 and not has_row_after(trainer, batch_idx)  # the first one's time is measured

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.seen.append((batch["input"] if isinstance(batch, dict) else batch[0]).device.type)
        self.waits.on = not (trainer.is_last_batch or has_row_after(trainer, batch_idx))

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.seen.append("val")
        if not isinstance(pl_module, Task):  # Lightning computes what it logged before the hooks of the end
            self.waits.on = False

    def on_validation_epoch_start(self, trainer, pl_module) -> None:
        self.waits.on = True

    def on_validation_epoch_end(self, trainer, pl_module) -> None:
        self.waits.on = False
        raise Seen


class Reads(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if outputs["loss"] > 0:
            pass


MUCH = ["augment=[light,erase,mixup_cutmix]", "callbacks=[default,ema]", "loader.repeats=2"]
CASES = {
    "32-true": ["loader.on_device=true", *MUCH],
    "bf16-mixed": ["loader.on_device=false", "trainer.accumulate_grad_batches=2", "optim=sgd", "optim.fused=false"],
    "16-mixed": ["loader.on_device=true", "trainer.gradient_clip_val=1.0"],
}


def waited(folder: Path, given: list[str], monkeypatch, *more: pl.Callback) -> list[str]:
    """Of a run of six micro-batches and one of validation."""
    shape = (
        "trainer.limit_train_batches=6 trainer.limit_val_batches=1 trainer.enable_checkpointing=false loader.num_workers=0 "
        "trainer.num_sanity_val_steps=0 loader.eval_batch_size=64 trainer.max_epochs=1 run=a data.image_size=32"
    )
    cfg = config_of(*given, *shape.split(), f"runs_dir={folder}")
    with fake_gpu(monkeypatch) as waits:
        settings = Settings(cfg, World("cpu", 1, 1, "single"))
        build.process(settings)
        work, trainer = ready(settings, launch.job("train").read_data(settings))
        trainer.callbacks += [*more, watch := Watch(waits)]
        with pytest.raises(Seen):
            trainer.fit(work.module, work.data)
    assert watch.seen == ["cuda"] * 6 + ["val"]
    return waits.places


@pytest.mark.parametrize("precision", ["32-true", pytest.param("bf16-mixed", marks=pytest.mark.slow), "16-mixed"])
def test_no_step_of_a_run_waits(precision, tmp_path, mnist, cache, monkeypatch):
    given = [*options(mnist, cache), *CASES[precision], f"trainer.precision={precision}", "trainer.log_every_n_steps=2"]
    assert waited(tmp_path, given, monkeypatch) == []


def test_no_step_of_a_lightning_module_waits(tmp_path, mnist, cache, monkeypatch):
    """It logs as people do, and by `lockstep.Module.mean`, with weights too."""
    data = f"data.root={mnist} data.cache_dir={cache} loader.batch_size=48 loader.on_device=true"
    module = "task=lightning_module model=none optim=none schedule=none task._target_=means.Digits"
    trainer = (
        "trainer.accelerator=cpu trainer.precision=32-true trainer.log_every_n_steps=2 trainer.num_sanity_val_steps=0"
    )
    with thin_project.entered(tmp_path, "means", **thin_project.package("means")):
        assert waited(tmp_path, f"{data} {module} {trainer}".split(), monkeypatch) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "callbacks", "place"),
    [
        (["trainer.precision=32-true", "loader.on_device=true"], [Reads()], "test_waits.py"),
        ([*CASES["16-mixed"], "trainer.precision=16-mixed", "optim.fused=false"], [], "amp.py"),
    ],
)
def test_a_step_that_waits_is_found(given, callbacks, place, tmp_path, mnist, cache, monkeypatch):
    """Also torch's own: a step that is not fused asks whether a gradient was infinite."""
    given = [*options(mnist, cache), *given, "trainer.log_every_n_steps=50"]  # rows may wait
    places = waited(tmp_path, given, monkeypatch, *callbacks)
    assert len(places) == 5 and all(place in each for each in places)


ABOUT = {"classes": ["a", "b"], "labels": ["a", "b"], "targets": ["a"], "vocabulary": ["a", "b"], "sequence_length": 3}
EVALUATED: dict[str, tuple[Task, tuple[int, ...], torch.Tensor]] = {  # task, shape of the output, target
    "classification": (Classification, (4, 2), torch.zeros(4, dtype=torch.int64)),
    "multilabel": (Multilabel, (4, 2), torch.zeros(4, 2)),
    "regression": (Regression, (4, 1), torch.zeros(4)),
    "language_model": (LanguageModel, (4, 3, 2), torch.zeros(4, 3, dtype=torch.int64)),
}


@pytest.mark.parametrize("name", EVALUATED)
def test_figures_do_not_wait(name, monkeypatch):
    """Except those of segmentation: torchmetrics counts pairs of classes with torch.bincount, which asks for the largest."""
    task, shape, target = EVALUATED[name]
    made = building.task(task, **ABOUT)
    with fake_gpu(monkeypatch) as waits:
        made = made.to(DEVICE)
        made.on_validation_start()
        tensors = {"input": torch.ones(shape), "target": target, "index": torch.arange(4)}
        batch = {"count": 3, **{name: tensor.to(DEVICE) for name, tensor in tensors.items()}}
        waits.on = True
        made.validation_step(batch, 0)
    assert waits.places == []
