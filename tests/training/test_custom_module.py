"""What the engine gives to a LightningModule of the user's, what it refuses, and what it leaves alone. In this process."""

import csv
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import thin_project
import torch
import without_lockstep
from in_process import Crash, same, state
from lightning.pytorch import Trainer
from PIL import Image

import lockstep
from lockstep.checkpoints.finding import step_of
from lockstep.config.checks import resolve
from lockstep.config.settings import Settings
from lockstep.errors import OutOfMemory, RunFailed, TrainingFailed, UserError
from lockstep.extras.export import export
from lockstep.reporting.report import primary_metric
from lockstep.training import dropout

TEMPLATE = """defaults: [lightning_module]
_target_: odd.Template
net: {_target_: project.model.BasicNet}
optimizer: {_target_: torch.optim.SGD, _partial_: true, lr: 0.01, momentum: 0.9}
scheduler: {_target_: torch.optim.lr_scheduler.CosineAnnealingLR, _partial_: true, T_max: 4}
monitor: valid_loss
"""
FILES = {
    **thin_project.package("odd"),
    "configs/data/odd.yaml": "_target_: odd.Data\nnum_workers: 0\n",
    "configs/task/template.yaml": TEMPLATE,
    "configs/task/grouped.yaml": "defaults: [own]\n_target_: odd.Template\nmonitor: valid_loss\n",
}
CPU = "trainer.accelerator=cpu"

pytestmark = pytest.mark.filterwarnings(
    "ignore:You passed in a `.*_dataloader` but have no",
    "ignore:Be aware that when using `ckpt_path`",
    "ignore:Attribute 'net' is an instance of `nn.Module`",  # Lightning's advice to modules of the template
)


@pytest.fixture(scope="module", autouse=True)
def project(tmp_path_factory) -> Iterator[Path]:
    """A project with the modules; the tests work in its folder."""
    with thin_project.entered(tmp_path_factory.mktemp("project"), "odd", **FILES) as root:
        yield root


@pytest.fixture(scope="module")
def train(project, mnist, cache):
    """Trains a class of the project's, 4 steps an epoch, on 64 images or on data of its own; returns the report."""
    images = [f"data.root={mnist}", f"data.cache_dir={cache}", "loader.batch_size=16", "loader.limit_train=64"]

    def run(name: str, *more: str) -> dict:
        module = ["task=lightning_module", CPU, "trainer.precision=32-true", f"task._target_=odd.{name}"]
        return lockstep.train([*module, *([] if any(each.startswith("data=") for each in more) else images), *more])

    return run


# --- what is refused ---


@pytest.mark.parametrize(("typed", "told"), [
    ("Small model=basic_net optim=sgd", ["model, optim would have no effect: odd.Small has its own. Set model=none optim=none"]),
    ("Small +task.metrics.a._target_=torchmetrics.MeanMetric",
     ["task.metrics has no effect"]),
    ("Small data=odd loader.num_workers=2 +data.val_fraction=0.2",
     ["loader.num_workers=2 has no effect: odd.Data creates its own batches. Remove it; if the class has this argument, pass data.num_workers=2.",
      "data.val_fraction is not an argument of odd.Data"]),
    ("Small data=odd data.num_workers=auto", ["data.num_workers=auto is invalid"]),
    ("TakesIterator", ["TakesIterator.training_step takes dataloader_iter, so Lockstep cannot track its batches"]),
    ("Small +callbacks.steps._target_=lightning.pytorch.callbacks.GradientAccumulationScheduler +callbacks.steps.scheduling={0:1}",
     ["GradientAccumulationScheduler changes the number of micro-batches per global batch. Set trainer.accumulate_grad_batches="]),
    ("Small +callbacks.rate._target_=lightning.pytorch.callbacks.LearningRateFinder",
     ["LearningRateFinder sets a learning rate that the schedule overwrites at the next step. Compare rates in a sweep, such as -m optim.lr="]),
    ("Small +callbacks.size._target_=lightning.pytorch.callbacks.BatchSizeFinder",
     ["BatchSizeFinder changes the global batch, and so the result. Keep the batch size: if it does not fit in memory, the error suggests a trainer.accumulate_grad_batches that does."]),
    ("Small data=none", ["`train_dataloader` must be implemented"]),
    ("Small data=mnist data._target_=odd.Data", ["data.image_size is not an argument of odd.Data; it accepts num_workers", "data.source is not an argument"]),
    ("Small +task.widht=3", ["task.widht is not an argument of odd.Small (did you mean width?)"]),
    ("Small task.monitor=valid_loss", ["checkpoint.monitor=valid_loss has no effect: Small or the data has no validation. Set task.monitor=null."]),
    ("Small trainer.sync_batchnorm=true", ["trainer.sync_batchnorm=true has no effect: this network has no batch normalisation"]),
    ("Manual trainer.accumulate_grad_batches=2", ["Automatic gradient accumulation is not supported for manual optimization"]),
    ("Data", ["task._target_=odd.Data is not allowed here: task accepts a subclass of lightning.pytorch.core.module.LightningModule"]),
    ("Small task._target_=???", ["task._target_ is missing. Set it to a class"]),
])  # fmt: skip
def test_what_would_be_ignored_is_refused_and_nothing_is_left(train, typed, told):
    name, *more = typed.split()
    with pytest.raises(UserError) as refused:
        train(name, "run=refused", *more)
    for words in told:
        assert words in str(refused.value)
    assert not Path("runs/refused").exists()


def test_files_for_a_lightning_datamodule_are_refused_by_its_name(train, tmp_path):
    train("Small", "run=own", "data=odd", "trainer.max_steps=1")
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    with pytest.raises(UserError) as refused:
        lockstep.predict(["run=own", f"input={tmp_path}", CPU])
    (told,) = refused.value.problems
    assert told.startswith(f"input={tmp_path}: odd.Data is a LightningDataModule, which reads no files. Set input=test")


@pytest.mark.parametrize(("override", "told"), [
    ("data=odd", "task=classification needs the `metadata` of the data, but data=data has none"),
    ("model=none", "model=none, but classification requires `net`. Choose one with model=<name>"),
])  # fmt: skip
def test_a_task_of_locksteps_refuses_what_is_for_a_module(override, told):
    with pytest.raises(UserError, match=told):
        lockstep.train(["task=classification", CPU, override])


# --- what it gets ---


@pytest.fixture(scope="module")
def template(train) -> dict:
    """The report of runs/template."""
    return train("Template", "run=template", "task=template", "loader.eval_batch_size=10")


def test_a_module_of_the_template_keeps_its_config(template):
    """Its network is a node of its config; optimizer and schedule are partials that it calls."""
    saved = state("template/checkpoints/best-step-4.ckpt")
    assert template["checkpoint"] == "checkpoints/best-step-4.ckpt"
    assert saved["optimizer_states"][0]["param_groups"][0]["momentum"] == 0.9
    assert saved["lr_schedulers"][0]["_last_lr"][0] == pytest.approx(0.0, abs=1e-9)  # cosine to the end of 4 steps
    assert saved["hyper_parameters"] == {}
    assert (
        "checkpoints omit hyper_parameters.net, hyper_parameters.optimizer, hyper_parameters.scheduler: only"
        in Path("runs/template/train.log").read_text()
    )
    assert same(dict(lockstep.load_model("template").state_dict()), dict(saved["state_dict"]))
    assert lockstep.evaluate(["run=template", CPU])["test_loss"] == template["test_loss"]
    with pytest.raises(UserError, match=r"odd\.Template is a LightningModule.* cannot be exported"):
        export(Path("runs/template/checkpoints/last.ckpt"), Path("exported"))


def test_a_module_of_the_template_gets_what_it_requires_from_the_groups(train):
    groups = ["model=basic_net", "optim=sgd", "optim.momentum=0.8", "schedule=linear"]
    found = train("Epochwise", "run=grouped", "task=grouped", *groups)
    saved = state("grouped/checkpoints/last.ckpt")
    assert (found["model"], saved["network"]["num_classes"]) == ("basic_net", 10)
    assert saved["optimizer_states"][0]["param_groups"][0]["momentum"] == 0.8
    assert saved["lr_schedulers"][0]["_last_lr"][0] == pytest.approx(0.0, abs=1e-9)  # counted in steps
    assert same(dict(lockstep.load_model("grouped").state_dict()), dict(saved["state_dict"]))
    assert lockstep.evaluate(["run=grouped", CPU])["test_loss"] == found["test_loss"]
    with pytest.raises(
        UserError, match=r"optim=none, but epochwise requires `optimizer`\. Choose one with optim=<name>"
    ):
        train("Epochwise", "run=none", "task=grouped", "model=basic_net", "optim=none")
    with pytest.raises(UserError, match=r"optim=sgd has no effect: configure_optimizers of Fixed does not call"):
        train("Fixed", "run=fixed", "task=grouped", *groups)
    assert not Path("runs/fixed").exists()


LOAD = """
import torch
from load import load

images = (torch.arange(4 * 784) % 251).reshape(4, 1, 28, 28).byte()
torch.save((load().outputs(images), load().reader.normalise(images)), "made.pt")
"""


@pytest.fixture(scope="module")
def kept(train) -> Path:
    train("Kept", "run=kept", "task=template")
    return Path("runs/kept/checkpoints/last.ckpt")


def with_class(path: Path, name: str, place: Path) -> Path:
    """The checkpoint with another class of the same weights."""
    content = torch.load(path, weights_only=True)
    content["config"]["task"]["_target_"] = f"odd.{name}"
    torch.save(content, place / "changed.ckpt")
    return place / "changed.ckpt"


@pytest.mark.slow
@pytest.mark.parametrize("network", ["net", "net.features"])
def test_a_network_that_a_modules_config_makes_is_exported(kept, tmp_path, network):
    """Without a `forward` of the module, it gets the samples. Another process loads it without Lockstep."""
    made = export(kept, tmp_path / "exported", ["pt2"], network=network)
    (made / "made.py").write_text(LOAD)
    command = [sys.executable, without_lockstep.__file__, "made.py"]
    done = subprocess.run(command, cwd=made, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    outputs, images = torch.load(made / "made.pt")
    with torch.inference_mode():
        torch.testing.assert_close(
            outputs, lockstep.load_model("kept").get_submodule(network)(images), atol=1e-6, rtol=0
        )
    assert f"# kept: {network}, trained on mnist" in (made / "README.md").read_text()


def test_a_network_of_a_module_with_forward_takes_what_that_gives_to_it(kept, tmp_path):
    made = export(with_class(kept, "Flipped", tmp_path), tmp_path / "exported", network="net")
    assert "It takes float32 of shape (batch, 1, 28, 28) and" in (made / "README.md").read_text()


@pytest.mark.parametrize(("change", "network", "said"), [
    ("Kept", "", "Kept is a LightningModule, which cannot be exported as a whole: remove callbacks.exportable. scripts/export.py <run> --network=<name> exports a network that its config creates"),
    ("Kept", "nets", r"as in self.net = net \(did you mean net\?\): net. lockstep.load_model"),
    ("Kept", "net.nothing", "--network=net.nothing is not called when Kept runs on a batch.* Pass the name of a network that is called: net, net."),
    ("Backwards", "net", r"--network=net: Backwards.forward does not run on the input of this data \(.*\), so the network's input is unknown"),
])  # fmt: skip
def test_a_network_of_a_module_that_cannot_be_exported_is_named(kept, tmp_path, change, network, said):
    with pytest.raises(UserError, match=said):
        export(with_class(kept, change, tmp_path), tmp_path / "exported", network=network)
    assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize("more", [[], pytest.param(["strategy=ddp", "trainer.devices=2"], marks=pytest.mark.slow)])
def test_a_module_predicts_with_its_own_step(template, forked, tmp_path, more):
    """In two processes, the shares of a batch differ by a sample: 103 samples in batches of 10."""
    found = lockstep.predict(["run=template", "input=test", f"output={tmp_path}/a.jsonl", CPU, *more])
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert (found["count"], [row["index"] for row in rows]) == (103, list(range(103)))
    assert all(row["digit"] == max(range(10), key=row["logits"].__getitem__) for row in rows)


def test_a_module_that_wants_names_gets_them_and_its_own_hook_last(train):
    train(
        "Named", "run=named", "task.named_batches=true", "loader.eval_batch_size=10", "trainer.num_sanity_val_steps=0"
    )
    sizes = sys.modules["odd"].SIZES
    assert sizes[:4] == [16] * 4
    assert sum(sizes[4:12]) >= 64  # all that is held out


def test_layers_of_configure_model_are_masked_by_row_until_an_error(train):
    with pytest.raises(OutOfMemory):
        train("Late", "run=late")
    assert dropout.current is None


# --- figures ---


def test_without_evaluation_steps_the_last_checkpoint_is_kept_and_nothing_is_tested(train, capsys):
    report = train("Small", "run=bare")
    assert (report["status"], report["checkpoint"], report["train/steps"]) == ("done", "checkpoints/last.ckpt", 4)
    assert not [name for name in report if name.startswith(("test", "val"))]
    assert "no test: Small has no test_step" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"Small has no predict_step and no forward"):
        lockstep.predict(["run=bare", "input=test", CPU])


def test_dataloaders_without_a_length(train, capsys):
    options = ["trainer.max_epochs=2", "trainer.accumulate_grad_batches=3", "trainer.log_every_n_steps=1"]
    report = train("Small", "run=stream", "data=odd", "data._target_=odd.Stream", *options)
    assert (report["train/steps"], report["train/epochs"]) == (8, 2)  # of 3 micro-batches each
    assert "no fixed number of steps" in capsys.readouterr().out
    assert len(Path("runs/stream/metrics.csv").read_text().splitlines()) == 1 + 8 + 1  # and the end of training


def test_own_dataloaders_get_20_rows_too(train):
    train("Small", "run=lazy", "data=odd", "data._target_=odd.Lazy", "trainer.max_epochs=12")  # 48 steps
    assert len({repr(batch) for batch in sys.modules["odd"].DRAWN}) == 48
    assert len(Path("runs/lazy/metrics.csv").read_text().splitlines()) == 1 + 24 + 1  # and the end of training


def test_checkpoints_of_two_optimizers_are_named_by_the_steps_of_the_run(train):
    options = ["run=two", "task.monitor=valid_loss", "trainer.log_every_n_steps=1"]
    report = train("TwoOptimizers", *options)
    assert (report["train/steps"], report["checkpoint"]) == (4, "checkpoints/best-step-4.ckpt")
    last = "two/checkpoints/last.ckpt"
    assert state(last)["global_step"] == step_of(Path("runs", last)) == 4
    assert "\n4," in Path("runs/two/metrics.csv").read_text()
    assert train("TwoOptimizers", *options, "resume=auto", "trainer.max_epochs=2")["train/steps"] == 8


def test_a_figure_that_is_never_logged_is_told_at_the_first_validation_and_the_run_goes_on_with_another(train, capsys):
    told = r"checkpoint.monitor=val_loss is not logged by Validated, .*valid_loss"
    with pytest.raises(TrainingFailed, match=told):
        train("Validated", "run=told", "task.monitor=val_loss", "trainer.max_epochs=2")
    early = (
        "WARNING: val_loss is monitored, but the first validation batches logged valid_loss (did you mean valid_loss?)"
    )
    assert early in capsys.readouterr().out
    assert json.loads(Path("runs/told/report.json").read_text())["status"] == "failed"
    assert state("told/checkpoints/last.ckpt")["global_step"] == 4
    report = train("Validated", "run=told", "resume=auto", "checkpoint.monitor=valid_loss", "trainer.max_epochs=2")
    assert (report["train/steps"], report["checkpoint"]) == (8, "checkpoints/best-step-8.ckpt")
    assert report["valid_loss"] > 0


@pytest.fixture
def predict(train, tmp_path, monkeypatch):
    """The rows of a table of 25 images in batches of 12, by the `kind` of Predicts."""
    if not Path("runs/predicts").exists():
        train("Predicts", "run=predicts", "data=odd", "data._target_=odd.Uneven", "trainer.max_steps=1")

    def predicted(kind: str, ending: str, *more: str) -> list[dict]:
        monkeypatch.setenv("KIND", kind)
        output = tmp_path / f"table.{ending}"
        lockstep.predict(["run=predicts", "input=val", f"output={output}", CPU, *more])
        if ending == "csv":
            return list(csv.DictReader(output.read_text().splitlines()))
        if ending == "parquet":
            return pytest.importorskip("pyarrow.parquet").read_table(output).to_pylist()
        return [json.loads(line) for line in output.read_text().splitlines()]

    return predicted


@pytest.mark.parametrize("more", [(), pytest.param(("strategy=ddp", "trainer.devices=2"), marks=pytest.mark.slow)])
def test_a_table_has_the_columns_of_all_batches(predict, capfd, more):
    rows = predict("later", "jsonl", *more)
    filled = [row["odd"] is not None for row in rows]
    assert 0 < sum(filled) < 25
    numbers = [None if odd else index % 10 for index, odd in enumerate(filled)]
    expected = [{"index": i, "digit": i % 10, "rest": numbers[i], "odd": "a" if filled[i] else None} for i in range(25)]
    assert rows == expected
    told = f"in the other rows: rest ({25 - sum(filled)} of 25 rows), odd ({sum(filled)} of 25 rows)"
    assert told in capfd.readouterr().err


def test_cells_are_ragged_tensors_arrays_or_odd_text(predict):
    row = {"index": 2, "digit": 2, "tensor": [0, 1], "array": {"boxes": [[0.0, 0.0]]}, "text": "a\N{REPLACEMENT CHARACTER}b"}  # fmt: skip
    assert predict("ragged", "jsonl")[2] == predict("ragged", "parquet")[2] == row
    assert predict("ragged", "csv")[2] == {**{name: str(v) for name, v in row.items()}, "tensor": "0|1"}


@pytest.mark.parametrize(("kind", "ending", "told"), [
    ("types", "parquet", r"a Parquet column has values of one type, but .* Set output= to a .jsonl file"),
    ("scalar", "csv", r"a column `found` with the shape \(\) for a batch of 12"),
])  # fmt: skip
def test_what_no_table_can_hold_is_named(predict, tmp_path, kind, ending, told):
    with pytest.raises(UserError, match=told):
        predict(kind, ending)
    assert list(tmp_path.iterdir()) == []


def test_figures_of_several_test_dataloaders_are_all_reported(train):
    report = train("Reads", "run=several", "data=odd", "data._target_=odd.TwoTests")
    assert {"test_loss/dataloader_idx_0", "test_loss/dataloader_idx_1"} <= set(report)
    assert (report["data/source"], report["data/sha256"], report["batch_size"]) == ("custom dataloaders", None, 12)
    assert report["train/samples_per_s"] > 0
    assert 0 < report["train/data_wait_share"] < 1
    assert "custom dataloaders" in Path("runs/several/report.html").read_text()
    with pytest.raises(UserError, match=r"Reads has no predict_step"):
        lockstep.predict(["run=several", "input=test", CPU])


NOTED = {"train_dataloader", "worker", "test_dataloader", "test_step", "teardown"}


def test_each_rank_has_torchruns_variables_to_the_end(train, tmp_path, monkeypatch):
    monkeypatch.setenv("NOTES", str(tmp_path))
    train("Surroundings", "run=surroundings", *TWO, "data=none")
    for rank in range(2):
        found = {place: json.loads((tmp_path / f"{place}-{rank}").read_text()) for place in NOTED}
        (port,) = {noted["MASTER_PORT"] for noted in found.values()}
        numbers = {"RANK": rank, "ROLE_RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}  # fmt: skip
        texts = {name: str(number) for name, number in numbers.items()}
        assert found == dict.fromkeys(NOTED, texts | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})


def test_a_single_process_has_no_variables_of_a_launcher(train, tmp_path, monkeypatch):
    monkeypatch.setenv("NOTES", str(tmp_path))
    train("Surroundings", "run=alone", "data=none")
    assert {path.read_text() for path in tmp_path.iterdir()} == {"{}"}


def test_figures_of_the_average_and_of_the_weights_have_names_of_their_own(train):
    more = ["trainer.max_steps=4"]
    plain = train("Tested", "run=plain", *more)
    averaged = train("Tested", "run=averaged", "callbacks=[default,ema]", *more)
    assert averaged["raw/test_loss"] == plain["test_loss"] != averaged["test_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("data", [[], ["data=odd"]])
def test_a_modules_own_hyperparameters_join_the_config_in_a_logger(train, data):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    name = f"logged-{len(data)}"
    train("Small", "logger=tensorboard", f"run={name}", "+task.width=5", "trainer.log_every_n_steps=1", *data)
    events = EventAccumulator(f"runs/{name}/tensorboard").Reload()
    text = events.Tensors("config/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert {"| width | 5 |", f"| run | {name} |"} <= set(text.splitlines())
    seen = [tag for tag in events.Tags()["scalars"] if tag.endswith("_seen")]
    assert seen == ([] if data else ["train/images_seen"])  # nobody knows the batch of one's own dataloaders


def test_operations_of_all_optimizers_of_a_step_are_counted(train):
    reports = [train(name, f"run=count-{name}", "trainer.max_steps=2") for name in ("Validated", "TwoOptimizers")]
    one, two = (each["train/flops_per_s"] / each[f"train/{each['unit']}_per_s"] for each in reports)
    assert two == pytest.approx(2 * one)


# --- batches of dataloaders of one's own ---


def vector(path: str) -> torch.Tensor:
    return torch.cat([value.flatten() for value in state(path)["state_dict"].values()])


ONE, TWO = ["strategy=single"], ["strategy=ddp", "trainer.devices=2"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
@pytest.mark.parametrize(("name", "data", "divisions"), [
    ("Smooth", "Uneven", [[*TWO, "trainer.accumulate_grad_batches=4"], ["trainer.accumulate_grad_batches=5"]]),
    ("Smooth", "UnevenStream", [[*TWO, "trainer.accumulate_grad_batches=2"]]),
    ("Manual", "Uneven", []),
    ("Whole", None, []),
    ("Both", "Pair", []),
])  # fmt: skip
def test_any_number_of_processes_finds_the_weights_of_one(train, forked, name, data, divisions):
    """In single precision, with a last batch that some of them have no part of. The mean of two loaders' weights is one's own if both are."""
    options = [
        *(["data=odd", f"data._target_=odd.{data}"] if data else ["data=none"]),
        "trainer.max_epochs=2",
        "task.monitor=valid_loss",
        "trainer.num_sanity_val_steps=0",
    ]
    single = train(name, f"run={data}-{name}", *ONE, *options)
    weights = vector(f"{data}-{name}/checkpoints/last.ckpt")
    for number, more in enumerate([TWO, *divisions]):
        report = train(name, f"run={data}-{name}-{number}", *more, *options)
        assert report["train/steps"] == single["train/steps"] == 10
        assert report["valid_loss"] == pytest.approx(single["valid_loss"], rel=1e-6)
        assert report["valid_count"] == single["valid_count"] == 25
        found = vector(f"{data}-{name}-{number}/checkpoints/last.ckpt")
        assert float((found - weights).norm() / weights.norm()) < 3e-6  # rounding of 10 steps


@pytest.mark.slow
def test_an_evaluation_counts_each_sample_once(train, forked):
    report = train("Counts", "run=counts", "data=none", "trainer.max_epochs=1", "task.monitor=valid_loss", *TWO)
    assert report["valid_count"] == 7


@pytest.mark.slow
def test_all_processes_end_with_an_epoch_that_is_too_short(train, forked, capfd):
    with pytest.raises(RunFailed, match="exit code 1"):
        train("Small", "run=declared", "data=odd", "data._target_=odd.Declared", "trainer.max_epochs=2", *TWO)
    assert "with Half yields 4 micro-batches in epoch 1, but declares 8" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("data", ["ByRank", "LateByRank"])
def test_a_sampler_that_divides_the_samples_itself_is_refused(train, forked, capfd, data):
    with pytest.raises(RunFailed, match="exit code 2"):
        train("Small", f"run={data}", "data=odd", f"data._target_=odd.{data}", *TWO)
    told = capfd.readouterr().err
    assert "returns different samples in each process. Lockstep divides each batch" in told and "Traceback" not in told


@pytest.mark.slow
@pytest.mark.parametrize(("data", "title", "note", "steps"), [
    ("StreamByRank", "each process has its own batches", "Sharded is a stream with different samples in each process", 2),
    ("Alike", "each process computes the same batches", "Finished is not a DataLoader: its batches are not divided", 4),
    ("RandomStream", "batch 12 = 2 x 6", "Random is a stream: each process reads all of it", 4),
])  # fmt: skip
def test_the_first_lines_say_what_processes_get(train, forked, data, title, note, steps):
    report = train("Small", f"run=told-{data}", "data=odd", f"data._target_=odd.{data}", "trainer.max_epochs=1", *TWO)
    log = Path(f"runs/told-{data}/train.log").read_text()
    assert report["train/steps"] == steps
    assert f" · {title} · " in log and f"data: {note}" in log


@pytest.mark.slow
def test_values_of_steps_are_of_all_processes_and_others_are_marked(train, forked, capfd):
    options = ["data=none", "trainer.max_epochs=1", "trainer.log_every_n_steps=1"]
    report = train("OfRank0", "run=rank-0", *options, "task.monitor=valid_all", *TWO)
    assert {
        "test_loss (rank 0 only)",
        "valid_loss (rank 0 only)",
        "valid_all",
        "valid_main (rank 0 only)",
    } <= report.keys()
    assert not {"test_loss", "valid_loss"} & report.keys()
    assert {"loss (rank 0 only)", "all"} <= {
        *re.findall(r"<h3>(.*?)</h3>", Path("runs/rank-0/report.html").read_text())
    }
    assert primary_metric({**report, "monitor": "valid_loss"})[0] == "test_all"
    told = "".join(capfd.readouterr())
    assert told.count("from rank 0 only: valid_main, valid_loss;") == told.count("from rank 0 only: test_loss;") == 1
    assert not re.search("It is recommended to use `self.log.'(valid_all|test_all)'", told)
    stops = ["callbacks=[early_stopping]", "callbacks.early_stopping.monitor=valid_loss"]
    for name, monitor, more in (
        ("OfRank0", "valid_loss", []),
        ("OfRank0", "valid_all", stops),
        ("Plateau", "valid_all", []),
    ):
        with pytest.raises(RunFailed, match="exit code 2"):
            train(name, f"run=of-{name}-{len(more)}-{monitor}", *options, f"task.monitor={monitor}", *more, *TWO)
        assert "valid_loss is monitored, but differs between the 2 processes" in capfd.readouterr().err
    single = train("OfRank0", "run=alone", *options, "task.monitor=valid_loss", *ONE)
    assert report["test_synced"] == pytest.approx(report["test_all"], rel=1e-6)
    for name in ("valid_all", "test_all"):
        assert report[name] == pytest.approx(single[name], rel=1e-5), name
    means = {run: lockstep.load_report(run).curves["epoch_loss"].values for run in ("rank-0", "alone")}
    assert means["rank-0"] == pytest.approx(means["alone"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["strategy=ddp", "trainer.devices=3"],
        ["strategy=fsdp", "trainer.devices=2"],
        ["trainer.accumulate_grad_batches=2"],
    ],
)
def test_means_are_over_all_samples_wherever_they_are_logged(train, forked, more):
    """Of values 0 to 15 in batches of 5: the last batch has one sample, so processes and micro-batches have none of it."""
    report = train(
        "Values",
        f"run=values-{more[0].partition('=')[2]}",
        "data=none",
        "trainer.max_epochs=1",
        "task.monitor=valid_hook",
        *more,
    )
    curves = lockstep.load_report(report["run"]).curves
    for name in (
        "epoch_mean",
        "epoch_synced",
        "valid_hook",
        "valid_mean/dataloader_idx_0",
        "valid_mean/dataloader_idx_1",
    ):
        expected = 3.5 if name.endswith("1") else 7.5
        assert (name, curves[name].values[-1]) == (name, pytest.approx(expected, rel=1e-6))


def test_the_smallest_module_of_lightning_trains_on_its_own_loaders(train):
    report = train("Boring", "run=boring", "data=none", "trainer.max_epochs=1")
    assert (report["status"], report["train/steps"]) == ("done", 64)


@pytest.mark.filterwarnings(
    "ignore:.*LeafSpec", "ignore:.*does not have many workers", "ignore:You.re resuming from a checkpoint that ended"
)
def test_lightnings_trainer_goes_on_from_a_checkpoint(train):
    train("Small", "run=left", "data=odd", "trainer.max_steps=6", "checkpoint.every_n_steps=6")
    odd = importlib.import_module("odd")
    trainer = Trainer(
        max_steps=8, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(odd.Small(), odd.Data(), ckpt_path="runs/left/checkpoints/last.ckpt")
    assert trainer.global_step == 8


@pytest.mark.filterwarnings(
    "ignore:`LightningModule.configure_optimizers` returned `None`", "ignore:`training_step` returned `None`"
)
def test_data_that_draws_itself_is_the_same_in_every_evaluation(train):
    """Without an optimizer, too. The training and the test set are a split that `setup` draws, in training and in the test."""
    report = train("WithoutOptimizer", "run=drawn", "data=none", "data._target_=odd.Halves")
    logged = Path("runs/drawn/metrics.csv").read_text().splitlines()
    train_sum = next(
        float(row) for row in [line.split(",")[logged[0].split(",").index("train_sum")] for line in logged[1:]] if row
    )
    torch.manual_seed(0)
    assert report["test_sum"] + train_sum == pytest.approx(float(torch.rand(20, 784).sum()), rel=1e-5)
    assert lockstep.evaluate(["run=drawn", CPU])["test_sum"] == report["test_sum"]


def test_dataloaders_that_the_data_replaces_are_told_once(train, capsys):
    train("WithLoader", "run=replaced")
    told = "data: WithLoader's val_dataloader is not used: DataModule provides the batches"
    assert capsys.readouterr().out.count(told) == 1


@pytest.mark.slow
def test_batches_that_are_not_divided_are_not_resumed_with_another_accumulation(train, crash_at, capsys):
    data = ["data=own", "data._target_=odd.Alike", "+data.num_workers=0"]
    options = ["run=alike", *data, "checkpoint.every_n_steps=1", "trainer.max_epochs=2"]
    crash_at(3)
    with pytest.raises(Crash):
        train("Small", *options)
    crash_at(-1)
    with pytest.raises(
        UserError, match=r"trainer.accumulate_grad_batches was 1 and is now 2, but Lockstep does not divide"
    ):
        train("Small", *options, "resume=auto", "trainer.accumulate_grad_batches=2")
    train("Small", *options, "resume=auto")
    train("Small", *options, "resume=auto")
    assert "alike is already finished" in capsys.readouterr().out


def test_a_run_of_a_version_that_did_not_divide_batches_is_not_resumed(train):
    train("Small", "run=old", "data=odd", "trainer.max_epochs=1")
    path = Path("runs/old/checkpoints/last.ckpt")
    saved = torch.load(path)
    del saved["divided"]
    torch.save(saved, path)
    with pytest.raises(UserError, match=r"does not record where training stopped: it has no divided\. Pass init_from="):
        train("Small", "run=old", f"resume={path}", "data=odd", "trainer.max_epochs=2")


# --- checkpoints ---


def test_what_would_not_load_again_is_not_saved(train):
    train("Unplain", "run=unplain", "trainer.max_steps=1")
    assert "checkpoints omit mine.path: only plain values" in Path("runs/unplain/train.log").read_text()
    assert state("unplain/checkpoints/last.ckpt")["mine"] == {}


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
@pytest.mark.parametrize(("name", "data", "more"), [
    ("Reads", "Data", ["data.num_workers=2"]),
    ("Reads", "RandomStream", []),
    ("Small", "Redrawn", ["trainer.reload_dataloaders_every_n_epochs=1"]),
    pytest.param("Both", "Pair", ["trainer.reload_dataloaders_every_n_epochs=1", "task.monitor=valid_loss"], marks=pytest.mark.slow),
])  # fmt: skip
def test_a_run_on_dataloaders_of_ones_own_goes_on_exactly(train, crash_at, name, data, more):
    """Within an epoch, with workers that stay, dataloaders that are made early, and two that take turns."""
    limits = ["trainer.max_epochs=3", "trainer.max_steps=12"]
    options = ["data=odd", f"data._target_=odd.{data}", "checkpoint.every_n_steps=1", *limits, *more]
    train(name, f"run=whole-{data}", *options)
    crash_at(8)
    with pytest.raises(Crash):
        train(name, f"run=parts-{data}", *options)
    crash_at(-1)
    train(name, f"run=parts-{data}", "resume=auto", *options)
    assert "7 already done" in Path(f"runs/parts-{data}/train.log").read_text()
    whole, parts = (state(f"{run}-{data}/checkpoints/last.ckpt") for run in ("whole", "parts"))
    assert parts["global_step"] == 12
    assert same(parts["state_dict"], whole["state_dict"])


def test_a_build_without_a_network_takes_the_datas_own_normalisation():
    cfg = resolve(["task=lightning_module", "task._target_=odd.Small", CPU, "data=cifar10"])
    mean = Settings.of(cfg).with_pretraining_values().cfg.data.get("mean")
    assert mean == pytest.approx([0.4914, 0.4822, 0.4465], abs=1e-3)


# --- lazy layers, means of an epoch ---


@pytest.mark.parametrize("saved", [
    pytest.param(["task.monitor=null", "checkpoint.every_n_steps=1"], marks=pytest.mark.slow), ["task.monitor=val_loss", "trainer.val_check_interval=3"],
])  # fmt: skip
def test_lazy_layers_are_tested_resumed_and_predicted(train, crash_at, tmp_path, saved):
    """Saved in steps, or in a validation within an epoch."""
    options, run = ["data=none", "trainer.max_epochs=2", *saved], f"shapeless-{len(saved[0])}"
    whole = train("Shapeless", f"run={run}", *options)
    assert whole["test_loss"] > 0
    rows = logged_by_epoch(run)
    assert {step for step, name in rows if name == "train_loss"} == {"5", "10"}
    crash_at(9)
    with pytest.raises(Crash):
        train("Shapeless", f"run={run}-again", *options)
    crash_at(-1)
    assert train("Shapeless", f"run={run}-again", *options, "resume=auto")["test_loss"] == whole["test_loss"]
    assert logged_by_epoch(f"{run}-again") == pytest.approx(rows)  # the mean of the whole second epoch
    found = lockstep.predict([f"run={run}", "input=test", f"output={tmp_path}/a.csv", CPU])
    assert found["count"] == 40


def logged_by_epoch(run: str) -> dict[tuple[str, str], float]:
    """By step and name."""
    with Path(f"runs/{run}/metrics.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    names = ("val_loss", "train_loss")
    return {(row["step"], name): float(row[name]) for row in rows for name in names if row[name]}


@pytest.mark.parametrize("more", [[], pytest.param(["strategy=ddp", "trainer.devices=2"], marks=pytest.mark.slow)])
def test_a_mean_counts_samples_not_the_rows_of_a_ragged_batch(train, more, forked):
    run = f"graphs-{len(more)}"
    report = train("Graphs", f"run={run}", "data=none", "task.monitor=null", "trainer.max_epochs=1", *more)
    import odd

    module = odd.Graphs()
    module.load_state_dict(state(f"{run}/checkpoints/last.ckpt")["state_dict"])
    assert report["test_error"] == pytest.approx(module.errors(odd.joined(odd.graphs())).mean().item(), rel=1e-5)
