"""What a sweep of Optuna leaves: its best config can be typed, whatever was searched in."""

import csv
import logging
from random import Random

import optuna
import pytest
from omegaconf import OmegaConf
from optuna.distributions import CategoricalDistribution, FloatDistribution

from lockstep.config import compose
from lockstep.config.settings import sweep_name
from lockstep.errors import UserError
from lockstep.extras import study


def composed_best(tmp_path, fixed: dict, params: dict, distributions: dict):
    """The config of `--config-dir <folder> experiment=best` for a study whose best trial had these values."""
    found = optuna.create_study(direction="maximize", study_name="s")
    for value, attrs in ((0.9, fixed), (0.1, {})):
        trial = optuna.trial.create_trial(
            params=params, distributions=distributions, value=value, user_attrs={**attrs, "sweep": "s"}
        )
        found.add_trial(trial)
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


@pytest.mark.parametrize("given", ["test/acc", ["val/acc", "test_loss"], "speed", [], None, "val/mae"], ids=str)
def test_only_figures_that_may_be_chosen_by_are_objectives(given):
    with pytest.raises(UserError, match=r"it takes val/acc \(checkpoint.monitor\), val/loss, .*worthless"):
        study.directions(given, "val/acc", "max")


def test_without_a_monitor_a_sweep_says_how_to_name_one():
    with pytest.raises(UserError, match=r"objective=null: it takes null.*set checkpoint.monitor=<metric>"):
        study.directions(None, None, "min")


def test_the_monitored_figure_and_what_is_a_cost_or_a_speed_say_which_way_is_better():
    given = ["val/f1/cat", "val/loss", "train/images_per_s", "train/tokens_per_s", "wall_s"]
    found = study.directions(given, "val/f1/cat", "max")
    assert list(found) == given
    assert list(found.values()) == ["maximize", "minimize", "maximize", "maximize", "minimize"]
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


def test_sweeps_of_one_second_have_different_names():
    assert sweep_name(None, {}) != sweep_name(None, {})


def test_a_storage_of_any_bytes_is_opened_or_named(tmp_path, monkeypatch):
    monkeypatch.setattr(study.time, "sleep", lambda _: None)  # between attempts
    path, damaged = tmp_path / "good.db", tmp_path / "study.db"
    _, good = study.open_study(f"sqlite:///{path}", "s", directions=["maximize"])
    for value in (0.1, 0.9):
        good.add_trial(optuna.trial.create_trial(params={"x": value}, distributions={"x": FloatDistribution(0, 1)}, value=value))  # fmt: skip
    content, random = path.read_bytes(), Random(0)
    half = len(content) // 2
    cases = [b"", b"no database" * 100, content[:half], *(bytes(half) for _ in range(1))]
    for _ in range(40):
        place = random.randrange(len(content))
        cases.append(content[:place] + random.randbytes(random.randrange(1, 5000)) + content[place + 1 :])
    refused = 0
    for case in cases:
        damaged.write_bytes(case)
        try:
            study.open_study(f"sqlite:///{damaged}", "s", directions=["maximize"])
        except UserError as e:
            refused += 1
            assert "study.db: this storage of sweeps cannot be used (" in str(e)
    assert refused > 10


def test_a_storage_that_cannot_be_reached_is_named_without_its_password(monkeypatch):
    monkeypatch.setattr(study.time, "sleep", lambda _: None)
    for url in ("nosuch://me:secret@host/x", "postgresql+psycopg://me:secret@127.0.0.1:1/x?password=secret"):
        with pytest.raises(UserError, match=r"\*\*\*@.* cannot be used") as caught:
            study.open_study(url, "s", directions=["maximize"])
        assert "secret" not in str(caught.value)
