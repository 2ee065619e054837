"""Where metrics go: metrics.csv loses no row; TensorBoard and offline W&B leave files that hold the figures."""

import csv
import os
import shlex
from pathlib import Path

import pytest
import torch
import wandb
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import OmegaConf

from lockstep.config.checks import check
from lockstep.config.compose import compose_config
from lockstep.config.settings import Settings
from lockstep.launch import resuming
from lockstep.reporting import loggers
from lockstep.reporting.loggers import MetricsCsv, has_wandb_key, wandb_sync_line
from lockstep.run.folder import RunFolder

NAMES = st.sampled_from(["train/loss", "val/acc", "val/loss", "lr", "a,b", 'c"d'])
ROWS = st.lists(st.dictionaries(NAMES, st.floats(allow_nan=False), min_size=1), min_size=1, max_size=8)


def read(folder: Path) -> list[dict[str, float]]:
    """The rows of metrics.csv, without their empty places."""
    with (folder / "metrics.csv").open(newline="") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


# --- metrics.csv -----------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, restarts=st.sets(st.integers(0, 8)))
def test_all_that_was_logged_is_read_back_however_often_the_run_was_restarted(tmp_path_factory, rows, restarts):
    folder = tmp_path_factory.mktemp("run")
    logger = MetricsCsv(folder)
    for step, row in enumerate(rows):
        if step in restarts:
            logger = MetricsCsv(folder)
        logger.log_metrics(row, step=step)
    assert read(folder) == [{"step": step, **row} for step, row in enumerate(rows)]
    with (folder / "metrics.csv").open(newline="") as file:  # a new metric is a new column, after those before
        assert next(csv.reader(file)) == list(dict.fromkeys(["step", *(name for row in rows for name in row)]))


@pytest.mark.parametrize("steps", [0, 3, 9])
@pytest.mark.parametrize("anew", [False, True])
def test_rows_that_a_resumed_run_writes_again_are_dropped(tmp_path, steps, anew):
    logger = MetricsCsv(tmp_path)
    RunFolder(tmp_path).cut(steps)
    assert not list(tmp_path.iterdir())  # before anything was logged
    for step in range(1, 6):
        logger.log_metrics({"train/loss": 10.0 - step}, step=step)
    logger = MetricsCsv(tmp_path) if anew else logger
    RunFolder(tmp_path).cut(steps)
    kept = [{"step": step, "train/loss": 10.0 - step} for step in range(1, min(steps, 5) + 1)]
    assert read(tmp_path) == kept
    logger.log_metrics({"train/loss": 0.5, "lr": 0.25}, step=steps + 1)
    logger.finalize("success")
    assert read(tmp_path) == [*kept, {"step": steps + 1, "train/loss": 0.5, "lr": 0.25}]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_the_test_of_a_run_that_is_continued_is_dropped(tmp_path):
    logger = MetricsCsv(tmp_path)
    rows = [{"epoch": 0, "train/loss": 1.0}, {"lr-SGD": 0.1}, {"epoch": 0, "val/acc": 0.5}]
    for row in [*rows, {"acc_of_test": 0.25, "val/acc": 0.5}]:
        logger.log_metrics(row, step=4)
    RunFolder(tmp_path).drop_tests(["acc_of_test", "val/acc"])
    assert read(tmp_path) == [{"step": 4, **row} for row in rows]


def test_tensors_and_figures_that_are_no_numbers_are_written(tmp_path):
    logger = MetricsCsv(tmp_path)
    logger.log_metrics({"train/loss": torch.tensor(0.5), "val/loss": float("nan")}, step=0)
    (row,) = read(tmp_path)
    assert row["train/loss"] == 0.5
    assert row["val/loss"] != row["val/loss"]


def test_only_rank_0_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    logger = MetricsCsv(tmp_path)
    logger.log_hyperparams({"seed": 0})
    logger.log_metrics({"train/loss": 1.0}, step=0)
    assert not list(tmp_path.iterdir())


# --- W&B -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_key(tmp_path, monkeypatch):
    """No key, and folders of the client's own below `tmp_path`."""
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    for name in ("CONFIG", "CACHE", "DATA", "ARTIFACT"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "wandb-client"))
    wandb.teardown()  # it keeps a process and the settings of its first use, maybe another test's
    yield
    wandb.teardown()


def logger_of_wandb(run_dir: Path, mode: str = "auto", id: str = "abc123"):
    run_dir.mkdir(exist_ok=True)
    place = {"run_dir": run_dir, "run": "a-run", "project": "lockstep", "entity": None, "group": None}
    return loggers.wandb(**place, tags=["one"], id=id, mode=mode)


def test_without_a_key_and_a_network_wandb_leaves_a_run_on_disk(tmp_path, no_key):
    logger = logger_of_wandb(tmp_path / "run")
    logger.log_metrics({"val/acc": 0.5}, step=0)
    run = logger.experiment
    assert (run.id, run.name, run.offline) == ("abc123", "a-run", True)
    run.finish()
    wandb.teardown()  # its process writes the file to the end
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*-abc123")
    assert b"val/acc" in (folder / "run-abc123.wandb").read_bytes()
    assert shlex.split(wandb_sync_line(tmp_path / "run")) == ["wandb", "sync", str(folder)]


@pytest.mark.parametrize(
    ("given", "variable", "key", "expected"),
    [
        ("auto", None, False, "offline"),
        ("auto", None, True, "online"),
        ("auto", "disabled", True, "disabled"),
        ("auto", "online", False, "online"),
        ("offline", None, True, "offline"),
        ("online", None, False, "online"),
    ],
)
def test_the_mode_is_what_was_said_or_follows_from_the_key(
    tmp_path, no_key, monkeypatch, given, variable, key, expected
):
    if variable:
        monkeypatch.setenv("WANDB_MODE", variable)
    if key:
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(loggers, "unreachable", lambda _: "")
    assert logger_of_wandb(tmp_path / "run", given)._wandb_init["mode"] == expected


LOGIN = f"\n  login user\n  password {'0' * 40}\n"


@pytest.mark.parametrize(
    ("variables", "netrc", "expected"),
    [
        ({}, None, False),
        ({"WANDB_API_KEY": "0" * 40}, None, True),
        ({"WANDB_API_KEY": ""}, None, False),
        ({}, f"machine api.wandb.ai{LOGIN}", True),
        ({}, f"machine github.com{LOGIN}", False),
        ({}, "machine api.wandb.ai\n  login user\n", False),
        ({}, "this is no netrc file", False),
        ({"WANDB_BASE_URL": "https://wandb.example.org"}, f"machine wandb.example.org{LOGIN}", True),
        ({"WANDB_BASE_URL": "https://wandb.example.org"}, f"machine api.wandb.ai{LOGIN}", False),
    ],
)
def test_a_key_is_found_where_the_client_looks(tmp_path, no_key, monkeypatch, variables, netrc, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if netrc is not None:
        (tmp_path / "netrc").write_text(netrc)
        (tmp_path / "netrc").chmod(0o600)
    assert has_wandb_key() == expected


@pytest.mark.parametrize("folder", ["runs/a", "my runs/a"])
def test_every_part_of_an_offline_run_that_was_resumed_is_synced(tmp_path, folder):
    (tmp_path / folder / "wandb" / "run-20250101_000000-abc123").mkdir(parents=True)  # it was online
    assert wandb_sync_line(tmp_path / folder) is None
    parts = [tmp_path / folder / "wandb" / f"offline-run-2025010{day}_000000-abc123" for day in (1, 2, 3)]
    for part in reversed(parts):
        part.mkdir()
    assert shlex.split(wandb_sync_line(tmp_path / folder)) == ["wandb", "sync", *map(str, parts)]


def test_a_resumed_run_keeps_the_id_of_a_logger_of_any_name(tmp_path):
    logger = "+logger.mine={_target_: lightning.pytorch.loggers.WandbLogger, id: null}"
    cfg = compose_config("train", [logger, "run=a", "trainer.accelerator=cpu"])
    first = Settings.of(cfg).identified(None).cfg
    assert len(first.logger.mine.id) == 8
    OmegaConf.save(first, tmp_path / "config.yaml")
    assert resuming.same_identity(cfg, RunFolder(tmp_path)).logger.mine.id == first.logger.mine.id


def test_without_a_network_a_key_does_not_stop_the_run(tmp_path, no_key, monkeypatch, caplog):
    def refuse(*_: object) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(loggers.socket, "create_connection", refuse)
    made = loggers.wandb(
        run_dir=tmp_path, run="a", project="p", entity=None, group=None, tags=[], id="abc", mode="auto"
    )
    assert made._wandb_init["mode"] == "offline"
    assert "api.wandb.ai cannot be reached (Network is unreachable)" in caplog.text


def test_a_mode_that_wandb_does_not_have_is_told_without_its_client(monkeypatch):
    cfg = compose_config("train", ["logger=[csv,wandb]", "trainer.accelerator=cpu"])
    monkeypatch.setenv("WANDB_MODE", "onlin")
    assert [problem.partition(" in ")[0] for problem in check(cfg)] == ["WANDB_MODE=onlin"]
    cfg.logger.wandb.mode = "offline"
    assert check(cfg) == []
