"""Frozen parameters keep their values, and nothing else differs from training without them."""

import pytest
import torch
from in_process import Crash, same, state

from lockstep.errors import UserError

SMALL = ["trainer.precision=32-true", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1"]
FROZEN = ["callbacks=[default,freeze]"]
RESNET = [
    *SMALL, "optim.weight_decay=0.1", "model=timm", "model.name=test_resnet", "data.image_size=32", "loader.batch_size=16",
    "trainer.limit_train_batches=2",
]  # fmt: skip


def weights(run: str) -> dict[str, torch.Tensor]:
    return state(f"{run}/checkpoints/last.ckpt")["state_dict"]


def changed(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> set[str]:
    return {name.removeprefix("net.") for name in a if not torch.equal(a[name], b[name])}


@pytest.mark.slow
def test_frozen_parts_keep_their_values_and_statistics_until_their_epoch_also_after_a_resume(train, crash_at):
    train("run=start", *RESNET, "trainer.max_steps=1")
    more = [*RESNET, *FROZEN, "init_from=start"]
    train("run=head", *more, "trainer.max_epochs=2")
    before, head = weights("start"), weights("head")
    assert changed(before, head) == {"fc.weight", "fc.bias"}
    unfreeze = 'callbacks.freeze.unfreeze=[["layer4.*",1],["*",2]]'
    more += ["trainer.max_epochs=3", unfreeze, "checkpoint.save_top_k=9", "checkpoint.every_n_steps=1"]
    train("run=later", *more)
    best = {step: state(f"later/checkpoints/best-step-{step}.ckpt")["state_dict"] for step in (2, 4, 6)}
    assert changed(before, best[2]) == {"fc.weight", "fc.bias"}
    grown = changed(best[2], best[4])
    assert all(name.startswith(("fc.", "layer4.")) for name in grown) and any("running_mean" in name for name in grown)
    assert {"conv1.0.weight", "layer1.0.conv1.weight"} & changed(best[4], best[6])
    crash_at(3)
    with pytest.raises(Crash):
        train("run=parts", *more)
    crash_at(-1)
    train("run=parts", "resume=auto", *more)
    assert same(weights("later"), weights("parts"))


@pytest.mark.parametrize(("patterns", "told"), [
    ("[nosuch.*]", r"no parameter matches nosuch\.\*; available: classifier"),
    ("5", r"callbacks\.freeze\.parameters=5 is invalid"),
])  # fmt: skip
def test_a_pattern_without_parameters_is_refused(train, patterns, told):
    with pytest.raises(UserError, match=told):
        train("run=a", *SMALL, *FROZEN, f"callbacks.freeze.parameters={patterns}")


@pytest.mark.slow
def test_two_processes_freeze_alike(train, forked):
    given = [*SMALL, *FROZEN, 'callbacks.freeze.unfreeze=[["features.*",1]]', "optim=sgd", "trainer.max_epochs=2", "trainer.limit_train_batches=3",
             "model.dropout_conv=0", "model.dropout_fc=0"]  # fmt: skip
    train("run=one", *given)
    train("run=two", *given, "strategy=ddp", "trainer.devices=2")
    torch.testing.assert_close(weights("one"), weights("two"), rtol=1e-5, atol=1e-6)
