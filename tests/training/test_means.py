"""`lockstep.Module`: means over the global batch, as losses and in the log, however samples are divided; the same with a plain Trainer."""

import copy
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import thin_project
import torch
from in_process import Crash, options, rows, state
from packages import means
from torch import Tensor, nn

import lockstep
from lockstep.errors import UserError
from lockstep.training import dropout
from lockstep.training.module import Means

pytestmark = pytest.mark.filterwarnings(
    "ignore:You passed in a `.*_dataloader` but have no",
    "ignore:Be aware that when using `ckpt_path`",
    "ignore:.*LeafSpec",
)
STEPS, EVERY = 6, 2  # of 3 an epoch; from one row of the log to the next
TRAINER = f"trainer.accelerator=cpu trainer.precision=32-true trainer.max_epochs=2 trainer.log_every_n_steps={EVERY}"
OPTIONS = ["task=lightning_module", "task.monitor=null", "data=none", *TRAINER.split()]
WAYS = {
    "single": ["strategy=single"],
    "ddp": ["strategy=ddp", "trainer.devices=3"],
    "fsdp": ["strategy=fsdp", "trainer.devices=2"],
}
Rows = list[dict[str, float]]


@pytest.fixture(scope="module", autouse=True)
def project(tmp_path_factory) -> Iterator[Path]:
    with thin_project.entered(tmp_path_factory.mktemp("project"), "means", **thin_project.package("means")) as root:
        yield root


def train(
    run: str, *more: str, weighted: bool = True, module: str = "Weighted"
) -> tuple[dict[str, Tensor], Rows, dict]:
    """Weights, the rows of the log, and the report."""
    given = [f"+task.weighted={str(weighted).lower()}"] if module == "Weighted" else []
    options = [*OPTIONS, f"task._target_=means.{module}", *given, f"run={run}", *more]
    report = lockstep.train(options)
    logged = [{name: float(value) for name, value in row.items() if value} for row in rows(run)]
    return state(f"{run}/checkpoints/last.ckpt")["state_dict"], logged, report


def by_hand(weighted: bool) -> tuple[dict[str, Tensor], Rows]:
    """A loop over whole batches, without Lightning: weights and means after every two steps."""
    module, x, y, given = means.Weighted(), *means.samples().tensors
    weight = given if weighted else torch.ones_like(given)
    optimizer, rows, sums = module.configure_optimizers(), [], torch.zeros(4, dtype=torch.float64)
    for step in range(STEPS):
        part = slice(step % 3 * means.BATCH, (step % 3 + 1) * means.BATCH)
        error = module.body(x[part]) - y[part]
        square_B, absolute_B, w = error.square().mean(1), error.abs().mean(1), weight[part]
        penalty = 0.01 * sum(p.square().sum() for p in module.body.parameters())
        optimizer.zero_grad()
        ((square_B * w).sum() / w.sum() + 0.5 * absolute_B.mean() + penalty).backward()
        optimizer.step()
        sums += torch.stack([(square_B * w).sum(), w.sum(), absolute_B.sum(), torch.tensor(len(w))]).detach()
        if step % EVERY == EVERY - 1:
            rows.append({"train/square": (sums[0] / sums[1]).item(), "train/absolute": (sums[2] / sums[3]).item()})
            sums.zero_()
    return module.state_dict(), rows


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("way", ["single", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "fsdp"))])
def test_weights_and_means_are_those_of_a_loop_over_whole_batches(way, weighted, forked):
    found, rows, report = train(f"{way}-{weighted}", *WAYS[way], weighted=weighted)
    expected, of_rows = by_hand(weighted)
    assert_same(found, expected)
    logged = [{name: row[name] for name in of_rows[0]} for row in rows if "train/square" in row]
    assert logged == [pytest.approx(row, rel=1e-5) for row in of_rows]
    net = means.Weighted()
    net.load_state_dict(found)
    x, y, weight = means.samples().tensors
    error = (net.body(x) - y).detach()
    weight = weight if weighted else torch.ones_like(weight)
    assert report["test/square"] == pytest.approx(
        ((error.square().mean(1) * weight).sum() / weight.sum()).item(), rel=1e-5
    )
    assert report["test/absolute"] == pytest.approx(error.abs().mean().item(), rel=1e-5)
    assert [row["val/square"] for row in rows if "val/square" in row][-1] == pytest.approx(
        report["test/square"], rel=1e-6
    )


def test_several_micro_batches_have_the_mean_without_weights_and_are_refused_with_others():
    found, rows, _ = train("accumulated", "trainer.accumulate_grad_batches=4", weighted=False)
    expected, of_rows = by_hand(weighted=False)
    assert_same(found, expected)
    assert [row["train/absolute"] for row in rows if "train/absolute" in row] == pytest.approx(
        [row["train/absolute"] for row in of_rows]
    )
    for run, key in (("micro", "trainer.accumulate_grad_batches=4"), ("ranks", "exact.logical_ranks=1")):
        with pytest.raises(
            UserError, match=r"a term with other weights, such as a penalty\. .*trainer\.accumulate_grad_batches=1"
        ):
            train(run, key)


@pytest.mark.parametrize("key", ["trainer.accumulate_grad_batches=4", "exact.logical_ranks=2"])
def test_a_weighted_mean_alone_is_that_of_the_whole_step(key):
    name = key.partition("=")[0]
    whole, rows, _ = train(f"whole-{name}", module="OneMean")
    found, of_parts, _ = train(f"parts-{name}", key, module="OneMean")
    assert_same(found, whole)
    for name in ("train/square", "train/absolute"):
        assert [row[name] for row in of_parts if name in row] == pytest.approx(
            [row[name] for row in rows if name in row]
        )


@pytest.mark.slow
def test_a_crash_between_two_rows_of_the_log_changes_neither_weights_nor_rows(crash_at):
    whole, rows, _ = train("whole")
    crash_at(5)
    with pytest.raises(Crash):
        train("crash", "checkpoint.every_n_steps=3")
    crash_at(-1)
    found, again, _ = train("crash", "checkpoint.every_n_steps=3", "resume=auto")
    assert all(torch.equal(found[name], value) for name, value in whole.items())
    columns = ("step", "train/square", "train/absolute", "val/square")
    assert [[row.get(name) for name in columns] for row in again] == [
        [row.get(name) for name in columns] for row in rows
    ]


def test_a_plain_trainer_finds_the_same_weights(tmp_path):
    """In one process, whose batches are whole."""
    module, logged = means.Weighted(), {}
    trainer = pl.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path)  # fmt: skip
    trainer.fit(module)
    logged |= trainer.callback_metrics
    assert_same(module.state_dict(), by_hand(weighted=True)[0])
    assert {"train/square", "train/absolute", "val/square", "val/absolute"} <= {*logged}


@pytest.mark.parametrize(
    ("values", "weight"), [(torch.ones(()), None), (torch.ones(2, 2), None), (torch.ones(2), torch.ones(2, 1))]
)
def test_a_mean_takes_a_number_per_sample(values, weight):
    with pytest.raises(UserError, match="expected one number per sample"):
        means.Weighted().mean(values, weight)


def test_a_task_is_told_of_inputs_that_no_metric_has(mnist, cache):
    with pytest.raises(UserError, match="inputs_by_metric` has mean, but the metrics are acc"):
        lockstep.train([*options(mnist, cache), "task=own", "task._target_=means.Odd", "run=odd"])


def test_a_task_is_no_lightning_module_of_its_own():
    with pytest.raises(UserError, match=r"model=none, but named requires `net`\. Choose one with model=<name>"):
        lockstep.train([*OPTIONS, "task._target_=means.Named", "run=wrong"])


def test_the_stage_is_known_between_two_stages_and_without_a_trainer():
    """After an error there is none, when a smaller micro-batch is tried."""
    module = means.Weighted()
    assert module.stage == "train"
    module.trainer = SimpleNamespace(state=SimpleNamespace(stage=None))
    assert module.stage == "train"


def test_samples_of_others_do_not_count():
    """Those that a process computes because it has none of the batch. It takes part in the exchange."""
    module, asked = means.Weighted(), []
    strategy = SimpleNamespace(
        share=lambda: 0.0,
        reduce=lambda weight, **_: asked.append(float(weight)) or weight + 3,
        arithmetic=SimpleNamespace(same_bits=False),
        means=(logged := Means()),
    )
    module.trainer = SimpleNamespace(training=True, strategy=strategy, accumulate_grad_batches=1, state=None)
    values = torch.ones(2, requires_grad=True)
    module.mean(values, torch.ones(2), log="train/loss").backward()
    assert (asked, values.grad.tolist(), logged.train) == ([0.0], [0.0, 0.0], {"train/loss": (0.0, 0.0)})


@pytest.mark.parametrize("more", [[], pytest.param(["strategy=ddp", "trainer.devices=2"], marks=pytest.mark.slow)])
def test_a_task_logs_parts_of_its_loss_and_knows_its_step(more, mnist, cache, forked):
    run = f"named-{len(more)}"
    task = ["task=own", "task._target_=means.Named", f"run={run}", "trainer.log_every_n_steps=4", *more]
    report = lockstep.train([*options(mnist, cache), *task])
    logged = rows(run)
    for stage in ("train", "val"):
        pairs = [
            (float(row[f"{stage}/loss"]), float(row[f"{stage}/again"])) for row in logged if row.get(f"{stage}/loss")
        ]
        assert pairs and all(again == pytest.approx(loss, rel=1e-6) for loss, again in pairs)
    assert report["test/again"] == pytest.approx(report["test/loss"], rel=1e-6)
    assert [float(row["train/epoch"]) for row in logged if row.get("train/epoch")] == [12.0]
    found = state(f"{run}/checkpoints/last.ckpt")["state_dict"]
    assert not [name for name in found if not name.startswith("net.")]


@pytest.mark.parametrize("way", ["single", pytest.param("ddp", marks=pytest.mark.slow)])
def test_a_task_may_step_its_optimizer_itself(way, mnist, cache, forked):
    common = [*options(mnist, cache), "trainer.max_epochs=1", "trainer.precision=32-true"]
    lockstep.train([*common, f"run=automatic-{way}"])
    lockstep.train([*common, *WAYS[way][:1], *(["trainer.devices=2"] * (way == "ddp")), "task=own", "task._target_=means.ByHand", f"run=by-hand-{way}"])  # fmt: skip
    by_itself, by_hand = (
        state(f"{kind}-{way}/checkpoints/last.ckpt")["state_dict"] for kind in ("automatic", "by-hand")
    )
    assert [row["lr-0"] for row in rows(f"by-hand-{way}")] == [row["train/lr"] for row in rows(f"automatic-{way}")]
    for name, value in by_itself.items():
        torch.testing.assert_close(by_hand[name], value, rtol=0, atol=1e-3 if way == "ddp" else 0)


def test_a_task_configures_its_model_in_training_and_with_weights(mnist, cache):
    given = [*options(mnist, cache), "task=own", "task._target_=means.Configured", "trainer.max_steps=2", "optim.lr=0"]
    trained = lockstep.train([*given, "run=configured"])
    again = lockstep.train([*given, "run=configured-again", "init_from=configured"])
    assert 0 < trained["test/loss"] == again["test/loss"] != pytest.approx(math.log(10))  # that of equal outputs


# --- Networks that are not trained, and random numbers of samples ---


@pytest.mark.slow
def test_masks_belong_to_samples_and_a_teacher_to_no_process(forked):
    single, rows, _ = train("distilled-single", module="Distilled")
    for way in ("ddp", "fsdp"):
        found, again, _ = train(f"distilled-{way}", *WAYS[way], module="Distilled")
        assert_same(found, single)
        expected = [row["train/square"] for row in rows if "train/square" in row]
        assert [row["train/square"] for row in again if "train/square" in row] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_teacher_is_in_no_checkpoint_and_another_one_is_told(capsys, monkeypatch, forked):
    found, _, report = train("teacher", "trainer.max_epochs=1", module="Distilled")
    assert not [name for name in found if "teacher" in name]
    evaluated = lockstep.evaluate(["run=teacher", "trainer.accelerator=cpu"])
    assert (evaluated["test/square"], "WARNING" in capsys.readouterr().out) == (report["test/square"], False)
    of_three = train("three", "trainer.max_epochs=1", *WAYS["ddp"], module="Distilled")[2]
    assert of_three["test/square"] == pytest.approx(report["test/square"], rel=1e-6)  # drawn in an evaluation
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["means"], "SEED", 3)
        with pytest.raises(UserError, match=r"resume: the weights of the frozen network teacher differ from those"):
            train("teacher", "resume=auto", module="Distilled")
        lockstep.evaluate(["run=teacher", "trainer.accelerator=cpu"])
        assert "WARNING: the weights of the frozen network teacher" in capsys.readouterr().out
    assert train("teacher", "resume=auto", module="Distilled")[2]["train/steps"] == STEPS


def test_a_frozen_network_keeps_its_mode_moves_and_passes_gradients_on():
    network = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.BatchNorm1d(2))
    whole = nn.ModuleDict({"teacher": lockstep.frozen(network), "student": nn.Linear(2, 2)}).train()
    assert {*whole.state_dict()} == {"student.weight", "student.bias"}
    assert [name for name, _ in whole.named_parameters()] == ["student.weight", "student.bias"]
    x = torch.ones(3, 2, requires_grad=True)
    whole["teacher"](x).sum().backward()
    assert x.grad is not None and network[0].weight.grad is None and not network[1].training
    copied = copy.deepcopy(whole).double()
    assert copied["teacher"](x.double()).dtype == torch.float64
    assert whole["teacher"].network is network and network[0].weight.dtype == torch.float32


@pytest.mark.parametrize("shape", [(), (3,), (3, 5)])
def test_random_numbers_of_a_share_are_those_of_the_whole(shape):
    x, cpu, drawn = torch.zeros(8, 2), torch.device("cpu"), []
    try:
        for first, count in ((0, 8), (0, 3), (3, 5)):
            dropout.begin(dropout.MicroBatch(0, 1, {cpu: range(first, first + count)}))
            drawn.append(torch.stack([lockstep.rand(x[first : first + count], *shape) for _ in range(2)], 1))
    finally:
        dropout.begin(None)
    assert torch.equal(drawn[0], torch.cat(drawn[1:])) and drawn[0].shape == (8, 2, *shape)
    assert drawn[0].unique().numel() == drawn[0].numel() and drawn[0].min() >= 0 and drawn[0].max() < 1
    assert lockstep.rand(x, 100_000).mean().item() == pytest.approx(0.5, abs=0.01)
