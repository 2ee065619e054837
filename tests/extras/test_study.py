"""Sweeps of Optuna: one that was interrupted is completed, with the trials that it had, and the best config can be typed."""

import csv
import json
import logging
from contextlib import nullcontext
from pathlib import Path
from random import Random
from types import SimpleNamespace

import optuna
import pytest
from hydra.core.utils import JobReturn, JobStatus
from lightning.pytorch.trainer.states import RunningStage
from omegaconf import OmegaConf
from optuna.distributions import CategoricalDistribution, FloatDistribution

from lockstep.compat.optuna_sweeper import SweeperSteps
from lockstep.config import compose
from lockstep.config.draft import sweep_name
from lockstep.errors import UserError
from lockstep.extras import study
from lockstep.extras.pruning import STORAGE, Pruned, Pruning
from lockstep.extras.study import StudySweeper

# --- an interrupted sweep; its jobs are reports that a launcher writes ---

SPACE = ["optim.lr=tag(log,interval(1e-4,1e-1))", "seed=3"]
DONE = {"status": "done", "val/acc": 0.5}


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Runs a sweep of five trials, two at a time, which a kill may end at one; returns the overrides of its jobs."""
    monkeypatch.setattr(SweeperSteps, "setup", lambda *_, **__: None)
    monkeypatch.setattr(study, "write_plots", lambda *_: None)
    monkeypatch.setenv(STORAGE, "")
    folder = tmp_path / "runs" / "search"

    def run(
        reports: dict[int, dict] | None = None, dies_at: int | None = None, space: list[str] = SPACE
    ) -> list[tuple[str, ...]]:
        jobs: list[tuple[str, ...]] = []

        def launch(overrides, initial_job_idx):
            jobs.extend(overrides)
            for job in overrides:
                number = int(dict(o.split("=", 1) for o in job)["run"].rpartition("/")[2])
                if number == dies_at:
                    raise KeyboardInterrupt
                (folder / str(number)).mkdir(exist_ok=True)
                (folder / str(number) / "report.json").write_text(json.dumps((reports or {}).get(number, DONE)))
            return [JobReturn(status=JobStatus.COMPLETED) for _ in overrides]

        sampler = {"_target_": "optuna.samplers.RandomSampler", "seed": 1}
        options = {"storage": None, "study_name": None, "n_trials": 5, "n_jobs": 2, "params": None}
        sweeper = StudySweeper("val/acc", "val/acc", "max", None, sampler, custom_search_space=None, **options)
        config = OmegaConf.create({"hydra": {"sweep": {"dir": str(folder)}}, "runs_dir": str(tmp_path / "runs")})
        sweeper.setup(hydra_context=None, task_function=None, config=config)
        sweeper.launcher = SimpleNamespace(launch=launch)
        with nullcontext() if dies_at is None else pytest.raises(KeyboardInterrupt):
            sweeper.sweep(space)
        return jobs

    return run


def trials(tmp_path: Path) -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(study_name="search", storage=f"sqlite:///{tmp_path}/runs/search/study.db").trials


def test_a_killed_sweep_runs_its_own_trials_again_and_then_the_missing_ones(sweep, tmp_path):
    killed = sweep(dies_at=3)
    before = trials(tmp_path)
    assert [t.state.name for t in before] == ["COMPLETE", "COMPLETE", "RUNNING", "RUNNING"]
    again = sweep()
    after = trials(tmp_path)
    assert again[:2] == killed[2:]  # the same values in the same runs, with resume=auto
    assert all("resume=auto" in job for job in again)
    assert [(t.number, t.state.name, t.value) for t in after] == [(number, "COMPLETE", 0.5) for number in range(5)]
    assert [t.params for t in after[:4]] == [t.params for t in before]
    assert len({t.params["optim.lr"] for t in after}) == 5  # the sampler does not repeat itself
    assert sweep() == []


def test_a_changed_search_space_is_optunas_error(sweep, tmp_path):
    sweep(dies_at=3, space=["optim=adam,sgd"])
    before = [t.params for t in trials(tmp_path)]
    with pytest.raises(ValueError, match="does not support dynamic value space"):
        sweep(space=["optim=adam,sgd,adamw"])
    assert [t.params for t in trials(tmp_path)][: len(before)] == before


def test_a_trial_ends_as_its_report_says(sweep, tmp_path):
    failed = {"status": "failed", "error": "no memory"}
    sweep({0: {"status": "pruned"}, 1: {"status": "preempted"}, 2: {"status": "done", "val/acc": None}, 3: failed})
    found = trials(tmp_path)
    assert [t.state.name for t in found] == ["PRUNED", "RUNNING", "FAIL", "FAIL", "COMPLETE"]
    assert [t.user_attrs["error"] for t in found[2:4]] == ["done, without val/acc", "no memory"]
    assert [job[1] for job in sweep()] == ["seed=3"]  # the preempted one alone
    assert trials(tmp_path)[1].value == 0.5


def test_validations_are_reported_once_and_a_pruned_trial_ends(tmp_path, monkeypatch):
    url, pruner = f"sqlite:///{tmp_path}/study.db", optuna.pruners.ThresholdPruner(upper=0.5)
    search = optuna.create_study(study_name="search", storage=url)
    search.tell(search.ask(), 0.1)
    monkeypatch.setenv(STORAGE, url)
    trainer = SimpleNamespace(
        is_global_zero=True,
        state=SimpleNamespace(stage=RunningStage.VALIDATING, fn="fit"),
        strategy=SimpleNamespace(broadcast=bool),
        lightning_module=SimpleNamespace(automatic_optimization=True),
    )
    finished, callback = (Pruning("search", trial, "val/loss", pruner) for trial in (0, 1))
    finished.on_fit_start(trainer, None)
    assert finished.trial is None
    search.ask()
    callback.on_fit_start(trainer, None)
    for trainer.global_step, loss in ((10, 0.2), (10, 0.9), (20, 0.3), (30, 0.9)):  # a resumed run repeats a validation
        trainer.callback_metrics = {"val/loss": loss}
        with pytest.raises(Pruned, match="after 30 steps") if trainer.global_step == 30 else nullcontext():
            callback.on_validation_end(trainer, None)
    assert search.trials[1].intermediate_values == {10: 0.2, 20: 0.3, 30: 0.9}


# --- what a sweep leaves, and what it may optimise ---


def composed_best(tmp_path, fixed: dict, params: dict, distributions: dict):
    """The config of `--config-dir <folder> experiment=best` for a study whose best trial had these values."""
    found, values = (
        optuna.create_study(direction="maximize", study_name="s"),
        {"params": params, "distributions": distributions},
    )
    for value, attrs in ((0.9, fixed), (0.1, {})):
        found.add_trial(optuna.trial.create_trial(**values, value=value, user_attrs={**attrs, "sweep": "s"}))
    study.write_files(found, ["val/acc"], tmp_path)
    where = compose.search_path(["train.py", "--config-dir", str(tmp_path), "experiment=best"])
    return compose.compose_config("train", [*where, "experiment=best"])


def test_the_best_config_has_groups_and_values_of_the_trial(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("optuna"), "propagate", True)
    cfg = composed_best(
        tmp_path, {"callbacks": "[default,ema]", "trainer.max_epochs": "3", "steps": 12}, {"optim": "sgd", "optim.lr": 0.02},
        {"optim": CategoricalDistribution(["adamw", "sgd"]), "optim.lr": FloatDistribution(0.01, 0.1)},
    )  # fmt: skip
    assert cfg.optim == compose.compose_config("train", ["optim=sgd", "optim.lr=0.02"]).optim
    assert (cfg.trainer.max_epochs, "ema" in cfg.callbacks) == (3, True)
    with (tmp_path / "trials.csv").open() as file:
        assert [row["steps"] for row in csv.DictReader(file)] == ["12", ""]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]  # of plots without a pruner


@pytest.mark.slow
def test_the_best_config_of_a_search_within_a_recipe_is_that_recipe_s(tmp_path):
    cfg = composed_best(
        tmp_path, {"experiment": "cifar10_resnet50d", "seed": "5"}, {"optim.lr": 0.02}, {"optim.lr": FloatDistribution(0.01, 0.1)}
    )  # fmt: skip
    expected = compose.compose_config("train", ["experiment=cifar10_resnet50d", "optim.lr=0.02", "seed=5"])
    assert OmegaConf.to_container(cfg) == OmegaConf.to_container(expected)
    assert cfg.model.name == "resnet50d"


@pytest.mark.parametrize("given", ["test/acc", ["val/acc", "test_loss"], "speed", [], None], ids=str)
def test_only_metrics_that_may_be_chosen_by_are_objectives(given):
    with pytest.raises(UserError, match=r"is invalid; expected val/acc \(checkpoint.monitor\), val/loss, .*invalidate"):
        study.directions(given, "val/acc", "max")


def test_the_monitored_metric_and_what_is_a_cost_or_a_speed_say_which_way_is_better():
    given = ["val/f1/cat", "val/loss", "train/images_per_s", "train/tokens_per_s", "wall_s"]
    better = ["maximize", "minimize", "maximize", "maximize", "minimize"]
    assert study.directions(given, "val/f1/cat", "max") == dict(zip(given, better, strict=True))
    assert study.directions("val_loss", "val_loss", "min") == {"val_loss": "minimize"}  # of a LightningModule


@pytest.mark.parametrize(
    ("run", "env", "name"),
    [
        (7, {}, "7"),
        (None, {"TORCHELASTIC_RUN_ID": "job7"}, "sweep-job7"),
        (None, {"SLURM_JOB_ID": "99", "SLURM_STEP_ID": "0"}, "sweep-99"),
        ("mine", {"SLURM_JOB_ID": "99", "SLURM_STEP_ID": "0"}, "mine"),
    ],
)
def test_all_processes_of_a_sweep_find_its_name(run, env, name):
    assert [sweep_name(run, dict(env)) for _ in range(2)] == [name, name]
    assert sweep_name(None, {}) != sweep_name(None, {})  # of two sweeps in one second


@pytest.mark.slow
def test_a_storage_of_any_bytes_is_opened_or_named(tmp_path, monkeypatch):
    monkeypatch.setattr(study.time, "sleep", lambda _: None)  # between attempts
    path = tmp_path / "study.db"
    _, good = study.open_study(f"sqlite:///{path}", "s", directions=["maximize"])
    good.add_trial(optuna.trial.create_trial(params={"x": 0.1}, distributions={"x": FloatDistribution(0, 1)}, value=1))
    content, random, refused = path.read_bytes(), Random(0), 0
    cases = [b"", b"no database" * 100, content[: len(content) // 2], bytes(len(content) // 2)]
    for _ in range(40):
        place = random.randrange(len(content))
        cases.append(content[:place] + random.randbytes(random.randrange(1, 5000)) + content[place + 1 :])
    for case in cases:
        path.write_bytes(case)
        try:
            study.open_study(f"sqlite:///{path}", "s", directions=["maximize"])
        except UserError as e:
            refused += 1
            assert "study.db: this sweep storage cannot be used (" in str(e)
    assert refused > 10
    for url in ("nosuch://me:secret@host/x", "postgresql+psycopg://me:secret@127.0.0.1:1/x?password=secret"):
        with pytest.raises(UserError, match=r"\*\*\*@.* cannot be used") as caught:
            study.open_study(url, "s", directions=["maximize"])
        assert "secret" not in str(caught.value)
