"""A project's tests of Lockstep's promises also accept a LightningModule with its own optimizers, several too."""

import pytest
from test_your_own import IMAGES, MODULES, forget

from lockstep.extras import testing


@pytest.mark.slow
@pytest.mark.parametrize("task", ["lit_classifier", "lit_gan"])
def test_the_promises_are_checked_on_a_lightning_module(task, tmp_path, monkeypatch, mnist, cache):
    monkeypatch.chdir(MODULES.write_in_generated(tmp_path / "project"))
    images = [
        each.format(mnist=mnist, cache=cache) for each in IMAGES if not each.startswith(("loader.b", "checkpoint"))
    ]
    more = ["strategy.find_unused_parameters=true"] if task == "lit_gan" else []
    project = testing.Project(tmp_path / "runs", [f"task={task}", *images])
    assert not any(override.startswith("optim") for override in project.quick)
    monkeypatch.setattr(testing, "TWO", [*testing.TWO, *more])
    if task == "lit_classifier":  # each process of the GAN draws its own noise
        testing.assert_same_result(project)
    testing.assert_survives_a_kill(project)
    testing.assert_evaluates_alike(project)
    forget()
