"""LightningModules under every strategy: the weights of one process, whichever way their steps use the parameters."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import thin_project
import torch

import lockstep
from lockstep.checkpoints.weights import read
from lockstep.errors import RunFailed, UserError

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:You passed in a `.*_dataloader` but have no",
        "ignore:Be aware that when using `ckpt_path`",
        "ignore:The .grad attribute of a Tensor that is not a leaf Tensor",  # as in test_compile.py
        "ignore:`torch.jit.script_method` is deprecated",  # torch's own use, when it compiles
    ),
]
TRAINER = "trainer.accelerator=cpu trainer.precision=32-true trainer.max_epochs=2"
OPTIONS = f"task=lightning_module task.monitor=null data=none {TRAINER}".split()
DDP = ["strategy=ddp"]
FSDP = ["strategy=fsdp", "trainer.devices=2"]
QUICK = ["GAN"]
MORE = "Beside InPlaceData Momentum Plain Small Late UsesMethods NoGradEncoder Tied WithBuffers InPlace Frozen Looks OfSome SmallGAN RawOptimizers TwoBackwards SmallPenalty Closures Metered Generates"


@pytest.fixture(scope="module", autouse=True)
def project(tmp_path_factory) -> Iterator[Path]:
    with thin_project.entered(tmp_path_factory.mktemp("project"), "uses", **thin_project.package("uses")) as root:
        yield root


def train(name: str, run: str, *more: str) -> dict:
    return lockstep.train([*OPTIONS, f"task._target_=uses.{name}", f"run={run}", *more])


def weights(run: str) -> dict[str, torch.Tensor]:
    return read(Path(f"runs/{run}/checkpoints/last.ckpt")).values["state_dict"]


def far(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    a, b = (torch.cat([value.double().flatten() for value in each.values()]) for each in (found, expected))
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE.split())])
def test_shards_find_the_weights_of_one_process(name, forked):
    report = train(name, f"{name}-1", "strategy=single")
    sharded = train(name, f"{name}-2", *FSDP)
    assert far(weights(f"{name}-2"), weights(f"{name}-1")) < 1e-5
    for key in ("valid_loss", "fid", "mean", "weight"):
        assert sharded.get(key) == pytest.approx(report.get(key), rel=1e-4, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_optimizer_that_reads_its_loss_reads_that_of_all_ranks(strategy, forked):
    """With its own, each rank would search a different number of times, and wait for the other for ever."""
    train("Searches", f"search-{strategy}-1", "strategy=single", "trainer.max_steps=3")
    train("Searches", f"search-{strategy}", f"strategy={strategy}", "trainer.devices=2", "trainer.max_steps=3")
    assert far(weights(f"search-{strategy}"), weights(f"search-{strategy}-1")) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("name", "more"), [
    ("Plain", ["trainer.accumulate_grad_batches=2", "trainer.gradient_clip_val=0.05"]),
    ("Beside", ["trainer.accumulate_grad_batches=2", "trainer.gradient_clip_val=0.05"]),
    ("Beside", ["trainer.gradient_clip_val=0.01", "trainer.gradient_clip_algorithm=value"]),
    ("WithBuffers", ["callbacks=[default,ema]", "strategy.reshard_after_forward=false"]),
    ("Momentum", ["callbacks=[default,freeze]", "callbacks.freeze.parameters=1.*", "callbacks.freeze.unfreeze=[[1.norm.*,1]]"]),
    ("UsesMethods", ["checkpoint.sharded=true"]),
    ("Plain", ["strategy.blocks=[]"]),
    ("Penalty", ["strategy.blocks=[]"]),
    ("Plain", ["strategy.blocks=[LayerNorm]", "compile=true"]),
])  # fmt: skip
def test_with_options(name, more, forked, request):
    run = request.node.callspec.id
    of_strategy = [each for each in more if each.startswith(("strategy", "checkpoint", "compile"))]
    others = [each for each in more if each not in of_strategy]
    train(name, f"{run}-1", *others)
    train(name, f"{run}-2", *FSDP, *more)
    assert far(weights(f"{run}-2"), weights(f"{run}-1")) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("name", "told"), [
    ("OutOfBlock", "got mixed torch.Tensor and DTensor"),
    ("Penalty", "gradients of gradients through the block Block"),
    ("MadeBefore", "an optimizer of MadeBefore has parameters from before sharding"),
    ("OfEarlier", "or from within a step"),
    ("Replaces", "replaces the parameter bias of Linear"),
    ("RawGAN", "Call self.manual_backward(loss) instead."),
    ("Fails", "ValueError: in forward"),
])  # fmt: skip
def test_what_shards_cannot_do_is_told(name, told, forked, capfd):
    where = name in ("OutOfBlock", "Fails")  # only a traceback shows it
    with pytest.raises(RunFailed, match=f"exit code {1 if where else 2}"):
        train(name, name, *FSDP)
    seen = capfd.readouterr().err
    assert told in seen and ("Traceback" in seen) == where


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Beside", "GAN"])
@pytest.mark.parametrize(("before", "after"), [(FSDP, ["strategy=single"]), (["strategy=single"], FSDP)])
def test_a_run_goes_on_under_another_strategy(name, before, after, forked):
    """From within its second epoch."""
    run = f"{name}-then-{len(after)}"
    train(name, f"{run}-whole", "strategy=single")
    train(name, run, *before, f"trainer.max_steps={30 if name == 'GAN' else 15}")
    train(name, run, *after, "trainer.max_steps=-1", "resume=auto")
    assert far(weights(run), weights(f"{run}-whole")) < 1e-5


@pytest.mark.parametrize("more", [["strategy=single"], pytest.param(FSDP, marks=pytest.mark.slow)])
def test_a_network_is_made_once(more, forked):
    """By configure_model, and then its weights are loaded."""
    report = train("Unguarded", f"once-{len(more)}", *more)
    module = lockstep.load_model(f"once-{len(more)}")
    x, y = module.val_dataloader().dataset.tensors
    assert report["test_loss"] == pytest.approx(float((module(x) - y).square().mean().detach()), rel=1e-5)


@pytest.mark.slow
def test_logical_ranks_give_the_same_bits(forked):
    exact = "exact.logical_ranks=4", "trainer.gradient_clip_val=0.5"
    for number, more in enumerate((["strategy=single"], [*DDP, "trainer.devices=2"], [*DDP, "trainer.devices=4"])):
        train("Normed", f"exact-{number}", *exact, *more)
    found = [weights(f"exact-{number}") for number in range(3)]
    assert all(torch.equal(found[0][name], other[name]) for other in found[1:] for name in found[0])
    train("Normed", "ordinary", "strategy=single")
    assert far(weights("ordinary"), found[0]) > 1e-3  # statistics of 2 samples, not of 8


@pytest.mark.parametrize(("typed", "told"), [
    ("UsesMethods compile=true", "compile=true has no effect: a step of UsesMethods calls methods of its networks"),
    ("Normed exact.logical_ranks=4 +task.manual=true", "exact.logical_ranks computes each step several times, but Normed uses manual optimization"),
    ("Normed exact.logical_ranks=2 strategy=fsdp", "exact.logical_ranks=2 needs an optimizer from the group optim with strategy=fsdp"),
])  # fmt: skip
def test_what_has_no_effect_is_refused(typed, told):
    name, *more = typed.split()
    with pytest.raises(UserError, match=told):
        train(name, "refused", *more)
    assert not Path("runs/refused").exists()


@pytest.mark.slow
@pytest.mark.parametrize("more", [["strategy=single"], ["strategy=ddp", "trainer.devices=2"]])
def test_networks_are_compiled_in_place(more, forked):
    train("Plain", f"eager-{len(more)}", *more)
    train("Plain", f"compiled-{len(more)}", *more, "compile=true")
    assert far(weights(f"compiled-{len(more)}"), weights(f"eager-{len(more)}")) < 1e-5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Your `predict_dataloader`'s sampler has shuffling enabled")
def test_own_dataloaders_are_predicted_once_a_sample(tmp_path, forked):
    train("Plain", "predicted", "strategy=single")
    module = lockstep.load_model("predicted")
    x = module.val_dataloader().dataset.tensors[0]
    for number, more in enumerate((["strategy=single"], [*FSDP, "trainer.devices=3"])):
        given = ["run=predicted", "input=val", f"output={tmp_path}/{number}.jsonl", "trainer.accelerator=cpu"]
        assert lockstep.predict([*given, *more])["count"] == 80
        rows = [json.loads(line) for line in (tmp_path / f"{number}.jsonl").read_text().splitlines()]
        assert [row["index"] for row in rows] == list(range(80))
        found = torch.tensor([row["output"] for row in rows])
        torch.testing.assert_close(found, module(x)[:, 0].detach(), rtol=1e-5, atol=1e-6)
    assert lockstep.predict([*given[:1], "input=train", f"output={tmp_path}/train.csv", given[3]])["count"] == 80
    assert lockstep.predict([*given[:1], "input=predict", f"output={tmp_path}/stream.csv", given[3]])["count"] == 11
    for typed, told in (
        ("input=test", "Plain has no test_dataloader"),
        ("input=val gallery=true", "gallery=true needs a lockstep.DataSet"),
    ):
        with pytest.raises(UserError, match=told):
            lockstep.predict(["run=predicted", f"output={tmp_path}/no.csv", given[3], *typed.split()])
