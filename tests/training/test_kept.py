"""What a user's module, callback or data keeps or draws outside of a step is neither lost nor left to chance."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import thin_project
import torch
from in_process import Crash, report, same, state
from lightning.pytorch.callbacks import LambdaCallback

import lockstep
from lockstep.callbacks.step_seed import StepSeed
from lockstep.checkpoints.finding import read_pickle
from lockstep.checkpoints.saving import LastCheckpoint
from lockstep.checkpoints.weights import load, make_plain, write
from lockstep.config.instantiate import create_module
from lockstep.config.run_config import Component
from lockstep.errors import TrainingFailed, UserError
from lockstep.training.arithmetic import LogicalRanks, steps_done

pytestmark = pytest.mark.filterwarnings(
    "ignore:Be aware that when using `ckpt_path`",
    "ignore:You passed in a `.*_dataloader` but have no",
    "ignore:Trying to infer the `batch_size`",
    "ignore:`training_step` returned `None`",
)


@pytest.fixture(scope="module", autouse=True)
def project(tmp_path_factory) -> Iterator[Path]:
    files = {**thin_project.package("kept"), **thin_project.package("unseen")}
    with thin_project.entered(tmp_path_factory.mktemp("project"), "kept", **files) as root:
        yield root


def train(name: str, run: str, *more: str, monitor: str = "val_loss", epochs: int = 3) -> dict:
    module = ["task=lightning_module", f"task._target_=kept.{name}", f"task.monitor={monitor}", "data=none"]
    options = [f"run={run}", f"trainer.max_epochs={epochs}", "trainer.precision=32-true", "trainer.accelerator=cpu"]
    return lockstep.train([*module, *options, *more])


def last(run: str) -> dict:
    return state(f"{run}/checkpoints/last.ckpt")


def test_a_callback_keeps_hooks_of_its_own_instance(monkeypatch):
    calls, callback = [], LambdaCallback(on_train_batch_end=lambda *_: calls.append(1))
    own, seeds = vars(callback)["on_train_batch_end"], StepSeed(0, masks_by_row=False)
    reseed = SimpleNamespace(reseed=lambda *_: None)
    strategy = SimpleNamespace(seeds=reseed, micro_batch=0, arithmetic=LogicalRanks(4))
    trainer = SimpleNamespace(callbacks=[callback], accumulate_grad_batches=4, strategy=strategy, global_step=0)
    trainer.lightning_module = SimpleNamespace(automatic_optimization=True)
    for _ in range(2):
        seeds.on_train_start(trainer, pl.LightningModule())
        for strategy.micro_batch in range(8):
            callback.on_train_batch_end(trainer, None, None, None, strategy.micro_batch)
        seeds.on_train_end(trainer, None)
        assert vars(callback)["on_train_batch_end"] is own
    assert len(calls) == 4  # two steps, twice


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_logical_ranks_call_hooks_of_a_batch_once_per_step(count, forked):
    exact = ["exact.logical_ranks=4"]
    train("Taught", f"alone{count}", *exact, epochs=1)
    train("Taught", f"taught{count}", *exact, "strategy=ddp", f"trainer.devices={count}", epochs=1)
    assert same(last(f"alone{count}")["state_dict"], last(f"taught{count}")["state_dict"])


MIX = "+callbacks.mix._target_=kept.Mix"


@pytest.mark.parametrize(("name", "more", "step"), [
    ("Noisy", [], 8),
    ("Stateful", [], 8),
    ("Thawed", [], 8),
    ("Grown", [], 8),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("Noisy", [], 6), ("Plain", [MIX], 8), ("Partial", ["callbacks=[default,ema]"], 8),
        ("Accumulating", ["checkpoint.every_n_steps=3"], 13), ("Noisy", ["trainer.accumulate_grad_batches=2"], 4),
    )),
])  # fmt: skip
def test_a_crash_changes_nothing(name, more, step, crash_at):
    run = f"{name}-{step}"
    typed = ["checkpoint.every_n_steps=1", *more]
    whole = train(name, f"{run}-whole", *typed)
    crash_at(step if name != "Accumulating" else 3)  # the third update, of the twelfth batch
    with pytest.raises(Crash):
        train(name, f"{run}-parts", *typed)
    crash_at(-1)
    parts = train(name, f"{run}-parts", "resume=auto", *typed)
    assert "already done" in Path(f"runs/{run}-parts/train.log").read_text()
    ours, theirs = last(f"{run}-whole"), last(f"{run}-parts")
    extra = [each["state_dict"].pop("_extra_state", None) for each in (ours, theirs)]
    assert same(ours["state_dict"], theirs["state_dict"]) and extra[0] == extra[1]
    assert {k: v for k, v in whole.items() if k.startswith(("val", "test"))} == {
        k: v for k, v in parts.items() if k.startswith(("val", "test"))
    }
    mixed = [each["callbacks"].get("Mix", {"count": 18})["count"] for each in (ours, theirs)]
    assert mixed == [18, 18]


def test_manual_optimization_is_saved_after_its_update(monkeypatch):
    """Every fourth batch, also where torch's optimizer is called."""
    saved = []
    monkeypatch.setattr(LastCheckpoint, "save", lambda _, trainer: saved.append(steps_done(trainer)))
    train("AccumulatingAlone", "alone", "checkpoint.every_n_steps=3", "checkpoint.monitor=null", epochs=2)
    assert saved == [0, 4, 6, 8, 12]  # 6 and 12: the ends of the epochs


def test_a_test_has_the_constants_and_the_state_of_the_training():
    """A module that draws in its constructor is made again for the test, for eval.py and by load_model."""
    found = train("Permuted", "permuted", epochs=1)
    assert found["test_loss"] == pytest.approx(found["val_loss"])
    again = lockstep.evaluate(["run=permuted", "trainer.accelerator=cpu"])
    assert again["test_loss"] == found["test_loss"]
    assert torch.equal(lockstep.load_model("permuted").order, lockstep.load_model("permuted").order)
    found = train("Stateful", "stateful", "checkpoint.monitor=null", epochs=1)
    assert (found["test_steps"], found["test_sum"], found["test_seen"]) == (6, 6, 48)
    kept = lockstep.load_model("stateful")
    assert (kept.extra["steps"], float(kept.seen.sum_value)) == (6, 48)


def test_evaluations_repeat_what_hooks_draw():
    found = train("Noisy", "noisy", epochs=1)
    assert (
        found["test_loss"]
        == found["val_loss"]
        == lockstep.evaluate(["run=noisy", "trainer.accelerator=cpu"])["test_loss"]
    )


FROZEN = ["callbacks=[default,freeze]", "callbacks.freeze.unfreeze=[['*',2]]", "checkpoint.every_n_steps=1"]


def test_no_buffer_of_a_frozen_body_moves_until_its_epoch(crash_at):
    """Also where it has no parameters, and after a resume."""
    train("Statistics", "frozen", *FROZEN, "checkpoint.save_top_k=9")
    first, second, third = (state(f"frozen/checkpoints/best-step-{step}.ckpt")["state_dict"] for step in (6, 12, 18))
    body = [name for name in first if name.startswith("body.")]
    assert [name for name in body if not torch.equal(first[name], second[name])] == []
    assert [name for name in body if "num_batches" in name and first[name]] == []
    buffers = [name for name in body if name not in dict(lockstep.load_model("frozen").named_parameters())]
    still = [name for name in buffers if torch.equal(second[name], third[name])]
    assert still == ["body.5.num_batches_tracked"]  # torch's InstanceNorm never counts
    crash_at(8)
    with pytest.raises(Crash):
        train("Statistics", "frozen-parts", *FROZEN)
    crash_at(-1)
    train("Statistics", "frozen-parts", "resume=auto", *FROZEN)
    assert same(last("frozen-parts")["state_dict"], last("frozen")["state_dict"])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_no_buffer_of_a_frozen_body_moves_on_two_processes(strategy, forked):
    train("Statistics", strategy, *FROZEN, "checkpoint.save_top_k=9", f"strategy={strategy}", "trainer.devices=2")
    first, second = (state(f"{strategy}/checkpoints/best-step-{step}.ckpt")["state_dict"] for step in (6, 12))
    assert [name for name in first if name.startswith("body.") and not torch.equal(first[name], second[name])] == []


# As kept.of_lightning.
OF_LIGHTNING = """
best._target_=ModelCheckpoint best.monitor=val_loss best.save_last=true best.filename='{epoch}-{step}'
steps._target_=kept.StepCheckpoint steps.every_n_train_steps=4 steps.save_top_k=-1 steps.filename='at-{step}'
stop._target_=EarlyStopping stop.monitor=val_loss stop.patience=0 stop.min_delta=1000
rich._target_=RichProgressBar tqdm._target_=TQDMProgressBar summary._target_=ModelSummary rates._target_=LearningRateMonitor
"""


def overrides_of(text: str) -> list[str]:
    named = re.sub("=(?=[A-Z])", "=lightning.pytorch.callbacks.", text)
    return [f"+callbacks.{each}" for each in named.split()]


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("of", ["config", "module"])
def test_callbacks_of_lightning_work_and_resume(of, crash_at):
    name, more = ("Plain", overrides_of(OF_LIGHTNING)) if of == "config" else ("Adopted", [])
    own = {key: Path(f"runs/{of}-{key}/own-checkpoints") for key in ("whole", "parts", "again")}
    whole = train(name, f"{of}-whole", *more)
    crash_at(8)
    with pytest.raises(Crash):
        train(name, f"{of}-parts", "checkpoint.every_n_steps=1", *more)
    crash_at(-1)
    parts = train(name, f"{of}-parts", "checkpoint.every_n_steps=1", "resume=auto", *more)
    assert (parts["train/steps"], parts["test_loss"]) == (whole["train/steps"], whole["test_loss"]) and whole[
        "train/epochs"
    ] == 2
    assert same(last(f"{of}-parts")["state_dict"], last(f"{of}-whole")["state_dict"])
    assert sorted(path.name for path in own["parts"].iterdir()) == sorted(path.name for path in own["whole"].iterdir())
    log = Path(f"runs/{of}-whole/train.log").read_text().splitlines()
    for line in (
        "RichProgressBar is left out: Lockstep shows progress itself",
        "TQDMProgressBar is left out: Lockstep shows progress itself",
        f"ModelCheckpoint saves to {own['whole']}, in addition to the checkpoints of the run",
        f"StepCheckpoint saves to {own['whole']}, in addition to the checkpoints of the run",
        "EarlyStopping remains stopped when the run is resumed",
    ):
        assert sum(each.endswith(line) for each in log) == 1, line
    (best,) = own["whole"].glob("epoch=*.ckpt")  # the same as the run's
    assert lockstep.evaluate([f"checkpoint='{best}'"])["test_loss"] == whole["test_loss"]
    (at_step,) = own["whole"].glob("at-step=8.ckpt")  # within an epoch
    assert train(name, f"{of}-parts", "resume=auto", *more, epochs=5)["train/epochs"] == 2  # stays stopped
    Path(f"runs/{of}-whole").rename(f"runs/{of}-again")
    train(name, f"{of}-again", f"resume='{own['again'] / at_step.name}'", *more)
    assert same(last(f"{of}-again")["state_dict"], last(f"{of}-parts")["state_dict"])


def interrupted(name: str, run: str, crash_at, *more: str) -> None:
    crash_at(8)
    with pytest.raises(Crash):
        train(name, run, "checkpoint.every_n_steps=1", *more)
    crash_at(-1)


def test_values_come_back_with_their_types(tmp_path):
    kept = importlib.import_module("kept")
    content = {
        "a": {
            **kept.ODD,
            np.int64(7): "key",
            frozenset([1]): 1,
            "list": [object()],
            "sparse": torch.eye(2).to_sparse(),
        },
        "state_dict": {},
        "types": ["cat"],
    }
    assert make_plain(content) == ["a.frozenset({1})", "a.list", "a.sparse"]
    write(content, tmp_path / "odd")
    assert torch.load(tmp_path / "odd", weights_only=True)["a"]["scalar"] == 0.1  # a plain number for others
    whole = load(tmp_path / "odd")
    assert whole["types"] == ["cat"]  # as a hook named it
    loaded = whole["a"]
    assert loaded.pop(7) == "key"
    assert loaded.keys() == kept.ODD.keys()
    for name, value in kept.ODD.items():
        assert type(loaded[name]) is type(value), name
        assert repr(loaded[name]) == repr(value), name
    assert read_pickle(tmp_path / "odd")["state_dict"] == {}


@pytest.mark.slow
def test_what_hooks_save_survives_a_crash(crash_at):
    """What a checkpoint cannot hold is named once."""
    more = ["+callbacks.odd._target_=kept.Odd"]
    interrupted("Writing", "odd", crash_at, *more)
    train("Writing", "odd", "resume=auto", *more)
    kept = importlib.import_module("kept")
    assert repr(kept.Odd.loaded) == repr({**kept.ODD, 7: "key"})
    named = "checkpoints omit special.frozenset({1}), special.list, special.loss: only plain values are saved."
    lines = Path("runs/odd/train.log").read_text().splitlines()
    told = [number for number, line in enumerate(lines) if "checkpoints omit" in line]
    assert [named in lines[number] for number in told] == [True, True]  # of the interrupted and the resumed process
    assert lockstep.load_model("odd").body.weight.shape == (6, 6)


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("Dropping", "head.weight, head.bias"),
        pytest.param("Hiding", "head.weight", marks=pytest.mark.slow),
    ],
)
def test_a_trained_weight_that_is_not_saved_is_an_error(name, lost):
    with pytest.raises(UserError, match=f"checkpoints of {name} lack its trained weights {lost}, so"):
        train(name, f"lost-{name}")
    assert not Path(f"runs/lost-{name}/checkpoints").exists()


def test_a_step_that_raises_stop_iteration_fails():
    with pytest.raises(RuntimeError, match="a step raised StopIteration"):
        train("Ending", "ending")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Moving", "Prefixed"])
def test_weights_saved_under_other_names_are_saved(name, crash_at):
    interrupted(name, name, crash_at)
    found = train(name, name, "resume=auto")
    assert found["test_loss"] == pytest.approx(train("Plain", f"unmoved-{name}")["test_loss"])


@pytest.mark.slow
def test_a_frozen_weight_that_is_not_saved_must_stay(crash_at, capsys):
    message = "the weights of the frozen network frozen.weight differ from those of the checkpoint's run"
    interrupted("Teaching", "teaching", crash_at)
    with pytest.raises(UserError, match=f"resume: {message}"):
        train("Teaching", "teaching", "resume=auto")
    train("Teaching", "taught", epochs=1)
    assert f"WARNING: {message}" in capsys.readouterr().out
    train("Partial", "partial", epochs=1)
    assert "differ from" not in capsys.readouterr().out


def test_a_resume_without_the_optimizers_state_is_an_error(crash_at):
    interrupted("Emptying", "emptying", crash_at)
    with pytest.raises(UserError, match="the checkpoint lacks states of the optimizers"):
        train("Emptying", "emptying", "resume=auto")


@pytest.mark.parametrize(
    ("name", "monitor", "bad"), [("NotANumber", "val_loss", "val_loss"), ("WithoutLoss", "val/acc", "val/loss")]
)
def test_of_validations_that_are_never_a_number_none_is_the_best(name, monitor, bad, capsys):
    assert train(name, f"never-{name}", monitor=monitor)["checkpoint"] == "checkpoints/last.ckpt"
    assert f"{bad} is nan at step 6. This checkpoint is not a candidate" in capsys.readouterr().err
    assert [path.name for path in Path(f"runs/never-{name}/checkpoints").iterdir()] == ["last.ckpt"]


@pytest.mark.slow
def test_a_validation_that_is_not_a_number_is_never_the_best(capsys):
    found = train("OnceNotANumber", "once", epochs=3)
    assert found["checkpoint"] == "checkpoints/best-step-12.ckpt"
    assert capsys.readouterr().err.count("val_loss is nan") == 2


def test_a_run_without_an_update_is_an_error():
    with pytest.raises(TrainingFailed, match="none of the 18 steps updated a parameter"):
        train("Skipping", "skipping")
    assert report("skipping")["status"] == "failed"


@pytest.mark.slow
def test_two_processes_train_what_is_unfrozen_alike(forked):
    one, two = train("Unfreezing", "one"), train("Unfreezing", "two", "strategy=ddp", "trainer.devices=2")
    for name, weight in last("one")["state_dict"].items():
        torch.testing.assert_close(last("two")["state_dict"][name], weight)
    assert two["test_loss"] == pytest.approx(one["test_loss"], rel=1e-5)


@pytest.mark.parametrize(("typed", "told"), [
    ("Foreign", "SGD optimizes a tensor of shape (1,) that is no parameter of Foreign, so no checkpoint would contain it. Make it one"),
    ("LateHead callbacks=[default,freeze]", "callbacks.freeze needs the layers before `setup` and `configure_model`. Create them in __init__."),
    ("Plain +callbacks.swa._target_=lightning.pytorch.callbacks.StochasticWeightAveraging +callbacks.swa.swa_lrs=0.1",
     "StochasticWeightAveraging averages after the last checkpoint, so its weights would be neither saved nor tested. Set callbacks=[default,ema]."),
    ("Averaged", "StochasticWeightAveraging averages after the last checkpoint, so its weights would be neither saved nor tested."),
    ("Plain +callbacks.saves._target_=lightning.pytorch.callbacks.ModelCheckpoint +callbacks.saves.dirpath=memory://bucket",
     "ModelCheckpoint has dirpath=memory://bucket, but URLs are not supported. Set a path, local or in a mounted folder."),
    ("Adopted callbacks=[default,early_stopping]", "2 callbacks save their state as EarlyStopping{'monitor': 'val_loss', 'mode': 'min'}. Keep one"),
])  # fmt: skip
def test_what_cannot_be_kept_is_told(typed, told):
    name, *more = typed.split()
    with pytest.raises(UserError) as refused:
        train(name, f"refused-{name}", *more)
    assert told in str(refused.value)


def test_a_function_may_return_a_librarys_module():
    made = create_module(Component.of({"_target_": "kept.from_library"}))
    assert type(made).__module__ == "elsewhere"


def test_names_of_locksteps_own_batches_may_be_a_users():
    found = train("Named", "named", epochs=1)
    assert found["test_loss"] > 0
    assert found["train/steps"] == 2


def test_a_resume_says_what_is_not_called_again(crash_at, capsys):
    crash_at(8)
    with pytest.raises(Crash):
        train("Unfreezing", "hooks", "checkpoint.every_n_steps=1")
    crash_at(-1)
    train("Unfreezing", "hooks", "resume=auto")
    assert "resumed within an epoch: on_train_epoch_start of Unfreezing is not called for it" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["OfLate", "OfUnseen"])
def test_a_generator_that_a_dataset_creates_late_is_seeded_and_an_unseen_one_is_told(name, capsys):
    for run in ("one", "two"):
        train(name, f"{name}-{run}", epochs=1)
    told = "returns different samples for the same seed" in capsys.readouterr().out
    weights = [last(f"{name}-{run}")["state_dict"] for run in ("one", "two")]
    assert (same(*weights), told) == ((True, False) if name == "OfLate" else (False, True))
