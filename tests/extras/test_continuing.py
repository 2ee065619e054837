"""A sweep that was interrupted is completed, with the trials that it had. The jobs are reports that a launcher writes."""

import json
from pathlib import Path
from types import SimpleNamespace

import optuna
import pytest
from hydra.core.utils import JobReturn, JobStatus
from lightning.pytorch.trainer.states import RunningStage
from omegaconf import OmegaConf
from optuna.trial import TrialState

from lockstep.compat.optuna_sweeper import SweeperSteps
from lockstep.errors import Pruned
from lockstep.extras import study
from lockstep.extras.pruning import STORAGE, Pruning, trial_id
from lockstep.extras.study import StudySweeper

SPACE = ["optim.lr=tag(log,interval(1e-4,1e-1))", "seed=3"]
DONE = {"status": "done", "val/acc": 0.5}


class Launcher:
    """Writes a report for each job, and ends the sweep at the job `dies_at` as a kill does."""

    def __init__(self, folder: Path, reports: dict[int, dict], dies_at: int | None = None) -> None:
        self.folder, self.reports, self.dies_at = folder, reports, dies_at
        self.jobs: list[tuple[str, ...]] = []

    def launch(self, overrides, initial_job_idx):
        self.jobs += overrides
        for job in overrides:
            number = int(dict(o.split("=", 1) for o in job)["run"].rpartition("/")[2])
            if number == self.dies_at:
                raise KeyboardInterrupt
            (self.folder / str(number)).mkdir(exist_ok=True)
            report = self.reports.get(number, DONE)
            (self.folder / str(number) / "report.json").write_text(json.dumps(report))
        return [JobReturn(status=JobStatus.COMPLETED) for _ in overrides]


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Runs a sweep of five trials, two at a time; returns its launcher."""
    monkeypatch.setattr(SweeperSteps, "setup", lambda *_, **__: None)
    monkeypatch.setattr(study, "write_plots", lambda *_: None)
    monkeypatch.setenv(STORAGE, "")
    folder = tmp_path / "runs" / "search"

    def run(reports: dict[int, dict] | None = None, dies_at: int | None = None) -> Launcher:
        sampler = {"_target_": "optuna.samplers.RandomSampler", "seed": 1}
        options = {"storage": None, "study_name": None, "n_trials": 5, "n_jobs": 2, "params": None}
        sweeper = StudySweeper("val/acc", "val/acc", "max", None, sampler, custom_search_space=None, **options)
        config = OmegaConf.create({"hydra": {"sweep": {"dir": str(folder)}}, "runs_dir": str(tmp_path / "runs")})
        sweeper.setup(hydra_context=None, task_function=None, config=config)
        sweeper.launcher = Launcher(folder, reports or {}, dies_at)
        if dies_at is None:
            sweeper.sweep(SPACE)
        else:
            with pytest.raises(KeyboardInterrupt):
                sweeper.sweep(SPACE)
        return sweeper.launcher

    return run


def trials(tmp_path: Path) -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(study_name="search", storage=f"sqlite:///{tmp_path}/runs/search/study.db").trials


def test_a_killed_sweep_runs_its_own_trials_again_and_then_the_missing_ones(sweep, tmp_path):
    killed = sweep(dies_at=3)
    before = trials(tmp_path)
    assert [t.state.name for t in before] == ["COMPLETE", "COMPLETE", "RUNNING", "RUNNING"]
    again = sweep()
    after = trials(tmp_path)
    assert again.jobs[:2] == killed.jobs[2:]  # the same values in the same runs, with resume=auto
    assert all("resume=auto" in job for job in again.jobs)
    assert [(t.number, t.state.name, t.value) for t in after] == [(number, "COMPLETE", 0.5) for number in range(5)]
    assert [t.params for t in after[:4]] == [t.params for t in before]
    assert len({t.params["optim.lr"] for t in after}) == 5  # the sampler does not repeat itself
    assert sweep().jobs == []


def test_a_trial_ends_as_its_report_says(sweep, tmp_path):
    reports = {
        0: {"status": "pruned"},
        1: {"status": "preempted"},
        2: {"status": "done", "val/acc": None},
        3: {"status": "failed", "error": "no memory"},
    }
    sweep(reports)
    pruned, preempted, nan, failed, done = trials(tmp_path)
    states = [t.state for t in (pruned, preempted, nan, failed, done)]
    assert states == [TrialState.PRUNED, TrialState.RUNNING, TrialState.FAIL, TrialState.FAIL, TrialState.COMPLETE]
    assert [t.user_attrs["error"] for t in (nan, failed)] == ["done, without val/acc", "no memory"]
    assert [job[1] for job in sweep().jobs] == ["seed=3"]  # the preempted one alone
    assert trials(tmp_path)[1].value == 0.5


def test_validations_are_reported_once_and_a_pruned_trial_ends(tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path}/study.db"
    study = optuna.create_study(study_name="search", storage=url)
    study.tell(study.ask(), 0.1)
    monkeypatch.setenv(STORAGE, url)
    trainer = SimpleNamespace(
        is_global_zero=True,
        state=SimpleNamespace(stage=RunningStage.VALIDATING, fn="fit"),
        strategy=SimpleNamespace(broadcast=bool),
        lightning_module=SimpleNamespace(automatic_optimization=True),
    )
    finished = Pruning("search", 0, "val/loss", optuna.pruners.ThresholdPruner(upper=0.5))
    finished.on_fit_start(trainer, None)
    assert finished.trial is None
    study.ask()
    assert trial_id(optuna.storages.RDBStorage(url), "search", 1) == 2
    callback = Pruning("search", 1, "val/loss", optuna.pruners.ThresholdPruner(upper=0.5))
    callback.on_fit_start(trainer, None)
    for trainer.global_step, loss in ((10, 0.2), (10, 0.9), (20, 0.3)):  # a resumed run repeats a validation
        trainer.callback_metrics = {"val/loss": loss}
        callback.on_validation_end(trainer, None)
    trainer.global_step, trainer.callback_metrics = 30, {"val/loss": 0.9}
    with pytest.raises(Pruned, match="after 30 steps"):
        callback.on_validation_end(trainer, None)
    assert study.trials[1].intermediate_values == {10: 0.2, 20: 0.3, 30: 0.9}
