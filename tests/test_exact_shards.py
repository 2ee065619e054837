"""exact.logical_ranks: the same command ends with the same bits, whoever computes the logical ranks."""

import csv
from pathlib import Path

import pytest
import torch
from in_process import Crash, same, state

import lockstep
from lockstep.callbacks import step_seed
from lockstep.extras.comparison import agree, compare, find
from lockstep.training.arithmetic import TreeReduction

pytestmark = pytest.mark.xdist_group("exact")
# Dropout, clipping, the average and AdamW's default learning rate are on.
COMMON = [
    "exact.logical_ranks=4", "exact.digests=true", "data.batch_size=48", "data.eval_batch_size=20", "trainer.max_steps=8",
    "trainer.log_every_n_steps=3", "trainer.gradient_clip_val=0.3", "trainer.accelerator=cpu", "callbacks=[default,ema]",
]  # fmt: skip
RECIPES = {
    "plain": ["data.image_size=12", "model.dropout_conv=0.1", "model.dropout_fc=0.3"],
    "layer-scales": ["model=timm", "model.name=test_convnext", "data.image_size=32", "trainer.precision=bf16-mixed"],
    "norms": ["model=timm", "model.name=test_resnet", "data.image_size=20", "augment=[standard,mixup]", "task.class_weights=balanced"],
}  # fmt: skip
WAYS = {
    "single": [],
    "ddp2": ["strategy=ddp", "trainer.devices=2"],
    "fsdp2": ["strategy=fsdp", "trainer.devices=2"],
    "ddp4": ["strategy=ddp", "trainer.devices=4"],
    "fsdp4": ["strategy=fsdp", "trainer.devices=4"],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory, mnist, cache) -> list[str]:
    return [f"runs_dir={tmp_path_factory.mktemp('exact')}", f"data.root={mnist}", f"data.cache_dir={cache}", *COMMON]


@pytest.fixture(scope="module")
def runs(base) -> Path:
    return Path(base[0].partition("=")[2])


@pytest.fixture(scope="module")
def single(base, forked) -> None:
    for recipe, overrides in RECIPES.items():
        lockstep.train([*base, *overrides, f"run={recipe}-single"])


def differences(runs: Path, one: str, other: str) -> list[str]:
    found = compare(find(one, runs), find(other, runs), exact=True, tolerance=0.0)
    return [line for section in ("log", "metrics", "weights") for line in found[section]]


QUICK = {("plain", "ddp2")}  # fsdp2 resumes below
PAIRS = [
    pytest.param(recipe, way, marks=() if (recipe, way) in QUICK else pytest.mark.slow)
    for recipe in RECIPES
    for way in list(WAYS)[1:]
]


@pytest.mark.parametrize(("recipe", "way"), PAIRS)
def test_any_number_of_processes_ends_with_the_same_bits(recipe, way, base, runs, single, capfd):
    lockstep.train([*base, *RECIPES[recipe], *WAYS[way], f"run={recipe}-{way}"])
    assert differences(runs, f"{recipe}-single", f"{recipe}-{way}") == []
    assert "Warning" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["sgd", "adam optim.fused=false"])
def test_other_optimizers_too(optim, base, runs, forked):
    given, name = f"optim={optim}".split(), optim.split()[0]
    for way in ("single", "ddp2", "fsdp4"):
        lockstep.train([*base, *RECIPES["plain"], *WAYS[way], *given, f"run={name}-{way}"])
        assert differences(runs, f"{name}-single", f"{name}-{way}") == []


def test_a_run_that_goes_on_in_another_world_ends_with_the_same_bits(base, runs, single, crash_at):
    crash_at(5)
    typed = [*base, *RECIPES["norms"], "run=parts", "resume=auto", "checkpoint.every_n_steps=2"]
    with pytest.raises(Crash):
        lockstep.train(typed)
    crash_at(-1)
    lockstep.train([*typed, *WAYS["fsdp2"]])
    assert differences(runs, "parts", "norms-single") == []
    ours, theirs = (state(runs / name / "checkpoints/last.ckpt") for name in ("parts", "norms-single"))
    assert ours["global_step"] == 8
    assert same(ours["state_dict"], theirs["state_dict"])
    counters = [value for name, value in ours["state_dict"].items() if name.endswith("num_batches_tracked")]
    assert {int(value) for value in counters} == {8}  # by one for each step


def one_by_one(self: TreeReduction, tensors: list) -> None:
    """A sum with the same addends as the tree's, in another order."""
    self.count += 1
    self.sums = [tensors] if self.count == 1 else self.sums
    if self.count > 1:
        torch._foreach_add_(self.sums[0], tensors)


def other_numbers(seed: int, step: int, rank: int, original=step_seed.step_seed) -> int:
    return original(seed + ((step, rank) == (4, 2)), step, rank)


@pytest.mark.parametrize(("place", "fault", "told", "rounding"), [
    ((TreeReduction, "add"), one_by_one, "the runs part at step 1, in the gradient net.", True),
    ((step_seed, "step_seed"), other_numbers, "the runs part at step 5, in the loss of logical rank 2", False),
])  # fmt: skip
def test_the_first_step_and_what_differs_in_it_are_named(place, fault, told, rounding, base, runs, single, monkeypatch):
    monkeypatch.setattr(*place, fault)
    lockstep.train([*base, *RECIPES["plain"], f"run={fault.__name__}"])
    ours, theirs = find("plain-single", runs), find(fault.__name__, runs)
    assert compare(ours, theirs, exact=True, tolerance=0.0)["weights"][0].startswith(told)
    assert agree(compare(ours, theirs, exact=False, tolerance=1e-2)) or not rounding


def test_digests_have_a_row_for_each_part_of_each_step(runs, single):
    with (runs / "norms-single/digests.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows if row["what"].startswith("loss")] == ["0", "1", "2", "3"] * 8
    assert {int(row["step"]) for row in rows} == set(range(1, 9))


def test_the_processes_of_an_evaluation_change_no_figure(base, runs, single):
    place = [base[0], "run=plain-single", "trainer.accelerator=cpu"]
    reports = [lockstep.evaluate([*place, *WAYS[way]]) for way in ("single", "ddp2")]
    one, two = ({key: value for key, value in found.items() if key.startswith("test/")} for found in reports)
    assert one == two
    assert one["test/count"] == 103


@pytest.mark.slow
def test_limits_count_steps_on_any_number_of_processes(base, runs, single):
    """A row for each step, and a validation after each fourth, of one batch."""
    typed = [*base, *RECIPES["plain"], "trainer.max_steps=-1", "trainer.max_epochs=1", "trainer.limit_train_batches=8",
             "trainer.limit_val_batches=1", "trainer.val_check_interval=4", "trainer.log_every_n_steps=1"]  # fmt: skip
    for name in ("single", "ddp2"):
        report = lockstep.train([*typed, *WAYS[name], f"run=limits-{name}"])
        assert report["train/steps"] == 8
        with (runs / f"limits-{name}/metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [row["step"] for row in rows if row["val/loss"]] == ["4", "8"]
        assert {row["val/count"] for row in rows if row["val/count"]} <= {"20.0"}
    assert differences(runs, "limits-single", "limits-ddp2") == []


@pytest.mark.parametrize("change", ["exact.logical_ranks=8", "exact.logical_ranks=null", "exact.threads=2"])
def test_what_the_bits_depend_on_cannot_be_changed_when_resuming(base, single, change):
    with pytest.raises(lockstep.errors.UserError, match="cannot be changed when resuming"):
        lockstep.train([base[0], "resume=plain-single", "trainer.max_steps=9", "exact.digests=false", change])
