"""What breaks around a run loses nothing: results before files, exit handlers, configs of any size, refusals as one message."""

import json
import os
import re
import stat
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from lockstep import ROOT
from lockstep.callbacks.weights import Freeze
from lockstep.checkpoints import saving
from lockstep.compat.metric_states import exact_on, prepare
from lockstep.config import checks, compose, rules
from lockstep.config.checks import check, resolve
from lockstep.config.compose import compose_config
from lockstep.config.draft import Draft
from lockstep.config.run_config import RunConfig
from lockstep.config.settings import Settings
from lockstep.errors import UserError
from lockstep.extras import prediction
from lockstep.kit.panels import Calibration
from lockstep.launch import cli, local, resuming
from lockstep.machine import files
from lockstep.reporting import console
from project.data import Mnist


def draft(*overrides: str) -> Draft:
    return Draft(compose_config("train", overrides))


@pytest.mark.parametrize("call", ["raise UserError('wrong')", "1 / 0", "pass"])
def test_exit_handlers_run_whenever_they_were_registered(call, tmp_path):
    (tmp_path / "train.py").write_text(f"""
import atexit, sys
atexit.register(print, "first")
class Late:
    def __del__(self): print("torn down")
late = Late()
from lockstep import launch
from lockstep.errors import UserError
from lockstep.launch import cli
def command(job, argv):
    atexit.register(print, "last")
    {call}
cli.command = command
launch.main(launch.Job("train", None, None))
""")
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True)
    code = {"raise UserError('wrong')": 2, "1 / 0": 1}.get(call, 0)
    assert done.returncode == code
    lines = done.stdout.splitlines()
    assert lines[:2] == ["last", "first"]
    assert "torn down" not in lines  # threads of gloo would abort the process then


@pytest.mark.parametrize("size", [1, 30_000])
def test_a_config_of_any_size_is_handed_over_in_a_private_file(size, tmp_path, monkeypatch):
    popen = Mock()
    monkeypatch.setattr(local.subprocess, "Popen", popen)
    monkeypatch.setattr(local.tempfile, "tempdir", str(tmp_path))
    local.spawn(Path("train.py"), {}, local.Handover(Draft.of_values({"loader": {}, "weights": [0.5] * size})))
    env = popen.call_args.kwargs["env"]
    file = Path(env[local.VARIABLE])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert sum(len(value) for value in env.values()) < 10_000
    monkeypatch.setenv(local.VARIABLE, env[local.VARIABLE])
    monkeypatch.setattr(local.process, "end_with_parent", lambda **_: None)
    found = local.received_handover()
    assert found is not None and len(found.work.get("weights")) == size
    assert not file.exists() and local.VARIABLE not in os.environ


@pytest.mark.parametrize("number", [28, 30, 13, 122])  # full, read-only, not permitted, over quota
def test_results_are_printed_before_they_are_written(number, tmp_path, monkeypatch, capsys):
    def fail(path, content):
        raise OSError(number, os.strerror(number), str(path))

    for module in (console, prediction):
        monkeypatch.setattr(module, "write_json", fail)
    metadata, metrics = {"checkpoint": "last.ckpt"}, {"test/acc": 0.987654321}
    with pytest.raises(OSError):
        console.show_evaluation(tmp_path / "eval.json", metadata, metrics)
    assert "0.98765432" in capsys.readouterr().out
    monkeypatch.setattr(prediction.build, "evaluation_info", lambda _: metadata)
    asked = SimpleNamespace(input="a", output="out.csv", gallery=False)
    settings = SimpleNamespace(request=asked, evaluation_file=lambda _: tmp_path / "predict.json")
    prediction.show_predictions(
        settings, SimpleNamespace(count=3, broken=0, output=Path("out.csv"))
    )  # its table is complete
    shown = capsys.readouterr()
    assert "out.csv" in shown.out and "The table is complete" in shown.err and "resume" not in shown.err


@pytest.fixture
def prepared(request, monkeypatch) -> list[weakref.ref]:
    """The data sets that are prepared, in a cycle if the parameter says so."""
    prepare, made = Mnist.prepare, list[weakref.ref]()

    def noted(self) -> None:
        made.append(weakref.ref(self))
        self.cycle = self if getattr(request, "param", False) else None
        prepare(self)

    monkeypatch.setattr(Mnist, "prepare", noted)
    return made


def test_a_process_reads_its_data_once(prepared, train):
    train("run=a", "trainer.max_steps=1")
    assert len(prepared) == 1


@pytest.mark.parametrize("prepared", [False, True], indirect=True)
def test_the_parent_of_several_processes_keeps_no_data(prepared, train, monkeypatch):
    kept = []
    monkeypatch.setattr(local, "run_processes", lambda *_, **__: kept.append(prepared[0]()))
    train("run=a", "strategy=ddp", "trainer.devices=2")
    assert (len(prepared), kept) == (1, [None])


@pytest.mark.parametrize(("argv", "words"), [
    (["--config-dir", "/nosuch"], "--config-dir /nosuch: no such folder"),
    (["--config-dir=/nosuch", "seed=1"], "no such folder"),
    (["-cd", "/nosuch", "-m", "seed=1,2"], "no such folder"),
    (["@=1"], "@=1: Config group override must be"),
    (["=1"], "=1: Config group override must be"),
    (["seed=1", "lr", "0.1"], "missing EQUAL"),
    (["-m", "hydra.launcher._target_=subprocess.Popen", "seed=1"], "Unknown plugin class"),
    (["-m", "hydra.launcher._target_=hydra.nosuch.X", "seed=1"], "Unknown plugin class"),
    (["-m", "hydra.sweeper._target_=logging.shutdown", "seed=1"], "Unknown plugin class"),
    (["-m", "+hydra.launcher.x=1", "seed=1"], "unexpected keyword"),
    (["hydra/job_logging=default", "++hydra.job_logging.handlers.console.class=subprocess.Popen"], "cannot be authorized"),
    (["+hydra.callbacks.x._target_=os.system"], "cannot be authorized"),
])  # fmt: skip
def test_hydra_s_own_refusals_are_one_message(argv, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", *argv])
    with (
        local.process.restore_process_state(),
        local.process.logging_restored(),
        compose.hydra_state_restored(),
        pytest.raises(UserError) as error,
    ):
        cli.command(local.Job("train", Mock(), Mock(), script=ROOT / "train.py"), argv)
    assert len(error.value.problems) == 1 and words in error.value.problems[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("overrides", "words"), [
    (["schedule=cosine", "trainer.max_epochs=-1"], "the schedule needs the run's number of steps"),
    (["schedule=step", "trainer.max_epochs=-1"], "the schedule needs the run's number of steps"),
])  # fmt: skip
def test_what_is_known_without_torch_is_refused_by_the_check(overrides, words):
    with pytest.raises(UserError, match=re.escape(words)):
        check(draft(*overrides))


@pytest.mark.parametrize("overrides", [
    ["data.image_size=6"], ["schedule=constant", "trainer.max_epochs=-1"], ["+optim.amsgrad=true"],
    ["schedule=cosine", "trainer.max_epochs=-1", "trainer.max_steps=5"],
], ids=" ".join)  # fmt: skip
def test_what_is_right_is_accepted(overrides):
    assert isinstance(check(draft(*overrides)).cfg, RunConfig)


@pytest.mark.slow  # Python starts
def test_a_typo_imports_no_data_and_no_torch(tmp_path):
    code = (
        "import atexit, runpy, sys\nsys.argv = [sys.argv[1], 'optim.lrr=1']\n"
        "atexit.register(lambda: print(sum(m.startswith('lockstep') for m in sys.modules), 'torch' in sys.modules))\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "train.py")], capture_output=True, text=True, cwd=tmp_path
    )
    count, has_torch = done.stdout.split()
    assert done.returncode == 2 and "did you mean optim.lr?" in done.stderr
    assert int(count) <= 30 and has_torch == "False"


@pytest.mark.parametrize(("wrong", "breaks", "hidden"), [
    ([], True, False),
    (["trainer.max_epochs=x"], False, True),
])  # fmt: skip
def test_a_bug_in_a_rule_does_not_hide_behind_other_problems(wrong, breaks, hidden, monkeypatch):
    """`breaks`: whether the rule fails. Rules run on valid values only."""

    def rule(given):
        yield str(1 + "a" if breaks else 1 + given.cfg.trainer.max_epochs)

    monkeypatch.setattr(checks, "TRAINING", {rules.devices: (), rule: ()})
    with pytest.raises(UserError if hidden else TypeError) as error:
        check(draft(*wrong))
    if hidden:
        (problem,) = error.value.problems
        assert problem.startswith("trainer.max_epochs=x is invalid")


def test_the_best_checkpoint_is_not_that_of_a_users_callback(tmp_path):
    theirs, own, last = tmp_path / "theirs.ckpt", tmp_path / "own.ckpt", tmp_path / "last.ckpt"
    for path in (theirs, own, last):
        torch.save({}, path)
    users, ours = Mock(spec=saving.callbacks.ModelCheckpoint), Mock(spec=saving.ModelCheckpoint)
    users.best_model_path, ours.best_model_path = str(theirs), str(own)
    trainer = SimpleNamespace(
        checkpoint_callbacks=[users, ours], is_global_zero=False, strategy=SimpleNamespace(broadcast=lambda x: x)
    )
    assert saving.best_checkpoint(trainer) == str(own)


def test_freeze_leaves_norms_as_the_networks_own_train_left_them():
    net = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    net[0].eval()  # as a network's own `train` does
    module = nn.Module()
    module.net = net
    frozen = Freeze(["0.*", "1.*"], unfreeze=[("*", 1)])
    frozen.setup(Mock(), module, "fit")
    for epoch, training in ((0, [False, False]), (1, [False, True]), (2, [False, True])):
        frozen.on_train_epoch_start(SimpleNamespace(current_epoch=epoch), module)
        assert [norm.training for norm in net[:2]] == training


def test_sums_have_the_dtype_of_the_device_that_is_used(monkeypatch):
    assert (exact_on(torch.device("cpu")), exact_on(torch.device("mps"))) == (torch.float64, torch.float32)
    panel = Calibration(Mock())
    prepare(panel, torch.device("cpu"), of_panel=True)
    assert panel.bins_3B.dtype == torch.float64
    monkeypatch.setattr("lockstep.compat.metric_states.exact_on", lambda _: torch.float32)
    prepare(panel, torch.device("cpu"), of_panel=True)
    panel.reset()
    assert panel.bins_3B.dtype == torch.float32


@pytest.mark.parametrize(("target", "is_sgd"), [
    ("torch.optim.SGD", True), ("torch.optim.sgd.SGD", True), ("torch.optim.AdamW", False),
])  # fmt: skip
def test_sgd_is_known_by_its_class(target, is_sgd):
    cfg = resolve(["strategy=fsdp", "optim=sgd", "trainer.accelerator=cpu", f"optim._target_={target}"])
    assert rules.fuses(Settings.of(cfg, {})) == (not is_sgd)


@pytest.mark.parametrize("name", ["ema", "average"])
def test_an_average_cannot_be_changed_under_any_name(name):
    saved = draft().replace({f"callbacks.{name}": {"_target_": "lockstep.callbacks.EMA", "decay": 0.9}})
    assert list(resuming.resume_errors(saved, saved)) == []
    (problem,) = resuming.resume_errors(saved.replace({f"callbacks.{name}.decay": 0.5}), saved)
    assert problem.startswith(f"callbacks.{name}.decay=0.5 cannot be changed")


def test_a_report_is_json_however_odd_its_names(tmp_path):
    files.write_json(tmp_path / "eval.json", {"\x1b[2J": "\n"})
    assert json.loads((tmp_path / "eval.json").read_text()) == {"\x1b[2J": "\n"}
