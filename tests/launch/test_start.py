"""What a command does to the folder of its run besides training in it."""

import json
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lockstep.config.compose import compose_config
from lockstep.config.settings import Settings
from lockstep.errors import UserError
from lockstep.launch import local, start
from lockstep.machine.world import World
from lockstep.run import RunFolder


@pytest.mark.parametrize(
    ("job", "report", "after"),
    [
        ("train", '{"status": "running"}', "failed"),
        ("train", "{", None),  # damaged: the error that ended the run is what counts
        ("eval", '{"status": "running"}', "running"),  # an evaluation says nothing of the run
    ],
)
def test_the_error_of_a_job_is_recorded_by_its_run_alone(job, report, after, tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("the real error")

    monkeypatch.setattr(local, "in_run", fail)
    cfg = compose_config("train", ["run=a", f"runs_dir={tmp_path}", "trainer.accelerator=cpu"])
    folder = RunFolder(tmp_path / "a")
    folder.path.mkdir()
    folder.report_file.write_text(report)
    world = World("cpu", devices=1, nodes=1, strategy="single", one_process=True)
    with pytest.raises(RuntimeError, match="the real error"):
        start.execute(local.Job(job, Path(), None), Settings(cfg, world))
    assert (json.loads(folder.report_file.read_text())["status"] if after else None) == after


def test_what_was_trained_while_a_command_waited_is_not_removed(train, monkeypatch):
    locked = RunFolder.locked

    @contextmanager
    def after_another(self, patience_s):
        with locked(self, patience_s):
            self.checkpoints.mkdir()
            self.config_file.write_text("of the run that was in the folder")
            torch.save({"global_step": 5}, self.checkpoints / "last.ckpt")
            yield

    monkeypatch.setattr(RunFolder, "locked", after_another)
    with pytest.raises(UserError, match=r"has been trained meanwhile\. Run the command again"):
        train("run=a", "resume=auto")
    assert RunFolder("runs/a").config_file.read_text() == "of the run that was in the folder"
