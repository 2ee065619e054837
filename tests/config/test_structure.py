"""Groups, classes and keys that are missing or of another kind: one message with the key, whatever the case."""

import pytest
from omegaconf import OmegaConf
from test_checks import problems

from lockstep.config.checks import check, step_problems
from lockstep.config.compose import compose_config, fixed_keys
from lockstep.config.schema import CLOSED, GROUPS, KEYS, RECIPES
from lockstep.config.settings import Settings
from lockstep.launch.cli import refused_options
from lockstep.launch.resuming import set_aside

BROKEN = {
    "optim=null": "optim=null: Config group",
    "model=-1": "model=-1: Config group",
    "checkpoint=5": "checkpoint=5 is invalid",
    "+callbacks.x=5": "callbacks.x=5 is invalid",
    "+logger.x.a=5": "logger.x._target_ is missing",
    "task.metrics=null": "task.metrics=null is invalid",
    "optim._target_=5": "optim._target_=5 is invalid",
    "strategy.traits=5": "strategy.traits is not a key",
    "trainer.max_step=5": "did you mean trainer.max_steps?",
    "optimm.lr=5": "did you mean optim.lr?",
    "model@foo=basic_net": "model@foo cannot be set: a group stands under its own name. Set model=<option>",
    "trainer.min_epochs=5 trainer.max_epochs=2": "trainer.min_epochs=5 is more than the run's 2",
    "trainer.min_steps=5 trainer.max_steps=2": "trainer.min_steps=5 is more than trainer.max_steps=2",
    "trainer.check_val_every_n_epoch=null": "Set trainer.val_check_interval=<number of batches>",
    "trainer.devices=[5] trainer.accelerator=cpu": "a CPU has none",
    "augment=[shift] augment.shift.pixels=28": "augment.shift.pixels=28 would move whole images",
    "augment.shift=5": "augment.shift",
    "augment=[crop] augment.crop.scale=[1,0.5]": "the lower number comes first",
    "augment=[mixup] data.batch_size=33": "cannot be divided among 1 processes x 1 accumulated micro-batches of a multiple of 2 samples",
    "data.repeats=5": "multiple of 5 samples (data.repeats=5 copies each sample within a micro-batch)",
}
UNREAL = {  # values that no run can use
    "trainer.gradient_clip_val": "inf", "trainer.max_epochs": "0", "trainer.max_steps": "0", "trainer.max_time": "{days:-1}",
    "trainer.val_check_interval": "0", "data.std": "[inf]", "data.mean": "[nan]", "seed": "4294967296", "optim.betas": "5",
    "optim.eps": "abc", "task.label_smoothing": "inf", "run": 300 * "x", "runs_dir": 300 * "x", "checkpoint.save_top_k": 20 * "9",
    "task.class_weights": "[-1]", "strategy.timeout_s": "1e18", "strategy.bucket_cap_mb": "inf", "schedule.gamma": "inf", "schedule.milestones": "[2,-1]",
}  # fmt: skip


def test_every_group_class_and_key_that_the_engine_reads_is_missed():
    whole = compose_config("train", [])
    keys = [key for key in KEYS if key.rpartition(".")[0] in CLOSED or "." not in key]
    groups = [group for group in GROUPS if group not in RECIPES]
    targets = [f"{group}._target_" for group in ("task", "model", "data", "strategy", "optim", "schedule")]
    assert check(whole) == []
    for key in [*keys, *groups, *targets]:
        cfg = OmegaConf.create(OmegaConf.to_container(whole))
        group, _, name = key.rpartition(".")
        del (cfg[group] if group else cfg)[name]
        assert any(text.startswith((f"{key} is not in the config", f"{key} is missing")) for text in check(cfg)), key
        if "." not in key and key in groups:
            for value in (None, "abc"):
                cfg[key] = value
                assert any(text.startswith(f"{key}=") for text in check(cfg)), (key, value)


@pytest.mark.parametrize("line", BROKEN)
def test_a_broken_config_is_told_by_the_key(line):
    told = problems(*line.split())
    assert len([text for text in told if BROKEN[line] in text]) == 1, told


def test_values_that_no_run_can_use_are_told_together():
    told = problems("strategy=ddp", "schedule=step", *(f"{key}={value}" for key, value in UNREAL.items()))
    assert {key for key in UNREAL if any(text.startswith(f"{key}=") for text in told)} == set(UNREAL)


def test_what_a_run_does_not_reach_is_told_before_it_begins():
    cfg = compose_config("train", ["trainer.min_steps=50", "schedule.warmup_steps=10"])
    told = list(step_problems(Settings.of(cfg), 640))
    assert ["warmup_steps=10 must be below the run's 10 steps" in told[0], "min_steps=50" in told[1]] == [True, True]
    assert list(step_problems(Settings.of(cfg), 64 * 51)) == []
    cfg.trainer.limit_train_batches = 0.01
    (problem,) = step_problems(Settings.of(cfg), 64 * 51)
    assert problem.startswith("trainer.limit_train_batches=0.01 leaves nothing of an epoch")


def test_the_facts_about_a_strategy_are_not_set():
    told = list(fixed_keys(["strategy.name=abc", "task.replaces=[]", "strategy=ddp"]))
    assert ["strategy.name cannot be set" in told[0], len(told)] == [True, 2]


@pytest.mark.parametrize("argv", [["--config-name=eval"], ["--config-name", "eval"], ["hydra.mode=MULTIRUN"],
                                  ["hydra.run.dir=x"], ["hydra/launcher=slots"]])  # fmt: skip
def test_options_that_would_do_something_else_are_refused(argv):
    assert len(list(refused_options(argv))) == 1
    assert list(refused_options(["-m", "hydra/launcher=slots", "--config-dir=x", "optim.lr=1"])) == []


def test_broken_yaml_is_a_mistake_of_the_config(tmp_path):
    (tmp_path / "experiment").mkdir()
    for content in ("a: [", "a:\n\t- b", "- 1"):
        (tmp_path / "experiment/mine.yaml").write_text(f"# @package _global_\n{content}")
        told = problems(f"hydra.searchpath=[file://{tmp_path}]", "experiment=mine")
        assert any("mine" in text for text in told), told


def test_what_a_resumed_run_recalls_without_effect_is_set_aside(capsys):
    cpu = ["trainer.accelerator=cpu", "strategy=single"]
    cfg = compose_config("train", [*cpu, "checkpoint.sharded=true", "tf32=true"])
    set_aside(cfg, [*cpu, "tf32=true"])
    assert (OmegaConf.select(cfg, "checkpoint.sharded"), cfg.tf32) == (False, True)  # typed ones stay an error
    assert "checkpoint.sharded=true of the resumed run has no effect here" in capsys.readouterr().err
