"""Hooks of a LightningModule, its data and its callbacks are called as Lightning calls them: in which order, and with what."""

from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as pl
import pytest
import thin_project
from lightning.pytorch.loggers import TensorBoardLogger

import lockstep

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers",
    "ignore:The number of training batches",
    "ignore:.*LeafSpec",
    "ignore:You have overridden",
    "ignore:Checkpoint directory",
)


@pytest.fixture(scope="module", autouse=True)
def project(tmp_path_factory) -> Iterator[Path]:
    files = thin_project.package("hooked")
    with thin_project.entered(tmp_path_factory.mktemp("project"), "hooked", **files) as root:
        yield root


def test_every_hook_is_called_as_lightning_calls_it(tmp_path):
    import hooked

    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=TensorBoardLogger(tmp_path),
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
    )
    trainer.fit(hooked.Hooked(), datamodule=hooked.Data())
    expected = [*hooked.CALLS]
    hooked.CALLS.clear()
    module = "task=lightning_module task._target_=hooked.Hooked task.monitor=null data=none data._target_=hooked.Data"
    trainer = "trainer.max_epochs=2 trainer.accelerator=cpu trainer.gradient_clip_val=1.0 trainer.log_every_n_steps=1"
    lockstep.train(f"run=hooked logger=[csv,tensorboard] {module} {trainer}".split())
    for place, (call, of_lightning) in enumerate(zip(hooked.CALLS, expected, strict=False)):
        assert call == of_lightning, (place, expected[place - 5 : place])
    assert len(hooked.CALLS) > len(expected)  # the test follows
    assert ("test", "10", "True") in hooked.CALLS
