"""What a run can do, on one process: average, stop, profile, log, start from weights."""

from pathlib import Path

import pytest
import torch
from in_process import rows, same, state

import lockstep
from lockstep.errors import UserError

pytestmark = pytest.mark.xdist_group("train")


def test_the_printed_path_of_a_checkpoint_can_be_typed_and_its_weights_alone_start_a_new_run(train, run_a):
    path = f"runs/a/{run_a['checkpoint']}"
    again = lockstep.evaluate([f"checkpoint={path}", "trainer.accelerator=cpu"])
    assert again["test/loss"] == pytest.approx(run_a["test/loss"], rel=1e-6)
    started = train("run=b", f"init_from={path}", "debug=one_batch", "optim=sgd", "optim.lr=0")
    assert (started["status"], started["resumed_from"]) == ("done", None)
    assert same(*(state(each)["state_dict"] for each in (path.removeprefix("runs/"), f"b/{started['checkpoint']}")))
    assert train(f"resume={path}", "trainer.max_epochs=2")["train/steps"] == 24


def test_an_average_is_what_is_validated_tested_and_saved(train):
    options = ["trainer.max_epochs=2", "optim=sgd", "optim.lr=0.01", "checkpoint.monitor=null"]
    plain = train("run=plain", *options)
    averaged = train("run=ema", *options, "callbacks=[default,ema]", "callbacks.ema.decay=0.8")
    checkpoint = state("ema/checkpoints/last.ckpt")
    assert same(checkpoint["current_model_state"], state("plain/checkpoints/last.ckpt")["state_dict"])
    assert not same(checkpoint["state_dict"], checkpoint["current_model_state"])
    assert averaged["test/loss"] != plain["test/loss"]
    again = lockstep.evaluate(["run=ema", "trainer.accelerator=cpu"])
    expected = {name: averaged[name] for name in ("test/loss", "test/raw/acc")} | {"test/raw/loss": plain["test/loss"]}
    assert {name: again[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert "test/raw/loss" not in plain


@pytest.mark.parametrize(
    "precision", ["bf16-true", *(pytest.param(p, marks=pytest.mark.slow) for p in ("bf16-mixed", "64-true"))]
)
def test_precisions_train(train, precision):
    found = train(f"trainer.precision={precision}", "trainer.max_epochs=3", "optim.lr=3e-3")
    assert (found["precision"], found["test/count"]) == (precision, 103)
    assert found["test/acc"] > 0.5


@pytest.mark.slow
def test_weights_to_start_from_are_not_needed_again(train, forked, tmp_path):
    import timm

    weights = tmp_path / "weights.pth"
    torch.save(timm.create_model("test_resnet", num_classes=10, in_chans=1).state_dict(), weights)
    model = ["model=timm", "model.name=test_resnet", f"model.checkpoint_path={weights}"]
    found = train("run=a", *model, "loader.batch_size=63", "debug=one_batch", "data.image_size=28")
    weights.unlink()
    again = lockstep.evaluate(["run=a", "strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu"])
    assert again["test/loss"] == pytest.approx(found["test/loss"], rel=1e-5)
    with pytest.raises(UserError, match=r"optim.lr=7 has no effect in an evaluation"):
        lockstep.evaluate(["run=a", "optim.lr=7"])


def test_seed_0_is_a_seed_and_null_draws_one(train):
    zero, drawn = (train(f"run=seed-{seed}", f"seed={seed}", "debug=one_batch") for seed in (0, "null"))
    assert zero["seed"] == 0
    assert isinstance(drawn["seed"], int)
    assert zero["test/loss"] != drawn["test/loss"]


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "steps"), [("one_batch", 1), ("limit", 24), ("profiler", 12)])
def test_debug_presets(train, preset, steps):
    found = train("run=a", f"debug={preset}")
    assert (found["train/steps"], found["test/count"]) == (steps, 103)
    assert Path("runs/a/fit-profile.txt").exists() == (preset == "profiler")


@pytest.mark.slow
def test_the_same_batch_can_be_overfitted(train):
    plain = ["model.dropout_conv=0", "model.dropout_fc=0", "optim.lr=5e-3"]
    train("run=a", "debug=overfit", "trainer.max_epochs=60", *plain)
    losses = [float(row["train/loss"]) for row in rows("a") if row["train/loss"]]
    assert len(losses) == 60
    assert losses[-1] < 0.05 < 2 < losses[0]


def test_a_run_without_callbacks_and_loggers_has_its_metrics_all_the_same(train):
    found = train("run=a", "callbacks=[]", "logger=[]", "trainer.limit_train_batches=4", "trainer.log_every_n_steps=2")
    assert (found["status"], found["train/steps"], found["train/images_per_s"]) == ("done", 4, None)
    assert [row["step"] for row in rows("a") if row["train/loss"]] == ["2", "4"]
    assert float(rows("a")[-1]["test/loss"]) == found["test/loss"]
    assert train("run=a", "resume=auto", "callbacks=[]", "trainer.max_epochs=2")["train/steps"] == 8


def test_without_checkpoints_the_weights_at_the_end_are_tested(train):
    found = train("run=a", "trainer.enable_checkpointing=false")
    assert (found["checkpoint"], found["test/count"], found["status"]) == (None, 103, "done")
    assert list(Path("runs/a/checkpoints").iterdir()) == []
