"""A project's test of Lockstep's promises also accepts a LightningModule with its own optimizers."""

import pytest
from test_your_own import IMAGES, MODULES, forget

from lockstep.extras import testing


@pytest.mark.slow
def test_the_promises_are_checked_on_a_lightning_module(tmp_path, monkeypatch, mnist, cache):
    monkeypatch.chdir(MODULES.write_in_generated(tmp_path / "project"))
    images = [each.format(mnist=mnist, cache=cache) for each in IMAGES if not each.startswith("checkpoint")]
    images += ["loader.eval_batch_size=25"]  # no rest that one process has, and two add to the batch before
    found = testing.assert_promises(["task=lit_classifier", *images, f"runs_dir={tmp_path}"], steps=2)
    verdicts = {way["way"]: way["verdict"] for way in found["ways"]}
    assert verdicts["killed and resumed"] == "same bits"
    forget()
