"""What the engine gives to a LightningModule of the user's, what it refuses, and what it leaves alone. In this process."""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import thin_project
import torch

import lockstep
from lockstep.callbacks.step_seed import step_seed
from lockstep.checkpoints.finding import step_of
from lockstep.config.checks import check, check_classes
from lockstep.config.compose import compose_config
from lockstep.config.settings import Settings
from lockstep.errors import NotSaved, OutOfMemory, TrainingFailed, UserError
from lockstep.extras.export import export
from lockstep.training import dropout

MODULES = """import random

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Small(pl.LightningModule):
    def __init__(self, width: int = 4):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.Dropout(0.1), nn.Linear(width, 10))

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.layers(x), y)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Late(Small):
    '''Builds its layers in configure_model, and runs out of memory.'''

    def __init__(self):
        pl.LightningModule.__init__(self)

    def configure_model(self):
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(784, 10), nn.Dropout(0.1))

    def on_before_optimizer_step(self, optimizer):
        assert self.layers[2].layer == "layers.2"  # masks by row
        raise torch.OutOfMemoryError("CUDA out of memory.")


class Validated(Small):
    def validation_step(self, batch, batch_idx):
        self.log("valid_loss", self.loss(batch))


class Template(pl.LightningModule):
    '''As in the Lightning-Hydra template.'''

    def __init__(self, net, optimizer, scheduler):
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.layers = net

    loss, training_step, validation_step = Validated.loss, Validated.training_step, Validated.validation_step

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))

    def configure_optimizers(self):
        optimizer = self.hparams.optimizer(params=self.trainer.model.parameters())
        scheduler = self.hparams.scheduler(optimizer=optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Predicting(Template):
    def predict_step(self, batch, batch_idx):
        logits = self.layers(batch[0])
        return {"digit": logits.argmax(1), "logits": logits}


class Named(Small):
    named_batches = True
    sizes = []

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {**batch, "twice": 2 * batch["input"]}

    def loss(self, batch):
        self.sizes.append((len(batch["input"]), batch["count"], int(batch["index"].min()) >= 0))
        return F.cross_entropy(self.layers(batch["twice"]), batch["target"])

    def validation_step(self, batch, batch_idx):
        self.loss(batch)


class TwoOptimizers(Validated):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(layer.parameters(), 0.1) for layer in (self.layers[1], self.layers[3])]


class WithLoader(Validated):
    def val_dataloader(self):
        return []


class Unplain(Small):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = {"path": [self.hparams]}


class Data(pl.LightningDataModule):
    '''Batches of 12 of 48 random images, in an order of torch's generator.'''

    def __init__(self, num_workers: int = 0, batch_size: int = 12):
        super().__init__()
        self.num_workers, self.batch_size = num_workers, batch_size

    def loader(self, count, **given):
        generator = torch.Generator().manual_seed(0)
        data = TensorDataset(torch.rand(count, 1, 28, 28, generator=generator), torch.arange(count) % 10)
        return DataLoader(data, batch_size=self.batch_size, **given)

    def train_dataloader(self):
        workers = {"num_workers": self.num_workers, "persistent_workers": self.num_workers > 0}
        return self.loader(48, shuffle=True, **workers)


class Stream(Data):
    '''Nobody knows how long it is.'''

    def train_dataloader(self):
        class Endless(torch.utils.data.IterableDataset):
            def __iter__(self):
                return iter([(torch.ones(1, 28, 28), torch.tensor(3))] * 48)

        return DataLoader(Endless(), batch_size=12)


class Lazy(Data):
    '''Draws each batch from Python's generator when it is due.'''

    drawn = []

    def train_dataloader(self):
        def batches():
            for _ in range(4):
                self.drawn.append(random.sample(range(48), 12))
                yield self.drawn[-1]

        class Batches:
            __iter__ = staticmethod(batches)
            __len__ = lambda self: 4

        return DataLoader(self.loader(48).dataset, batch_sampler=Batches())


class TwoTests(Data):
    def test_dataloader(self):
        return [self.loader(12), self.loader(24)]


class Reads(Small):
    '''Asks for the number of steps, so Lightning makes the dataloaders early.'''

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        total = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("test_loss", self.loss(batch))


class Stop(pl.Callback):
    def __init__(self, at: int):
        self.at = at

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.at:
            raise RuntimeError("the test stops this run")


class Other:
    pass
"""
TEMPLATE = """defaults: [lightning_module]
_target_: odd.Template
net: {_target_: lockstep.models.BasicNet}
optimizer: {_target_: torch.optim.SGD, _partial_: true, lr: 0.01, momentum: 0.9}
scheduler: {_target_: torch.optim.lr_scheduler.CosineAnnealingLR, _partial_: true, T_max: 4}
monitor: valid_loss
"""
FILES = {
    "src/odd/__init__.py": MODULES,
    "configs/data/odd.yaml": "_target_: odd.Data\nnum_workers: 0\n",
    "configs/task/template.yaml": TEMPLATE,
}
OWN = ["task=lightning_module", "trainer.accelerator=cpu", "trainer.precision=32-true"]


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


@pytest.fixture
def train(mnist, cache):
    """Trains a class of the project's on 64 images, 4 steps an epoch; returns the report."""
    images = [f"data.root={mnist}", f"data.cache_dir={cache}", "data.batch_size=16", "data.limit_train=64"]

    def run(name: str, *more: str) -> dict:
        own_data = "data=odd" in more
        return lockstep.train([*OWN, f"task._target_=odd.{name}", *([] if own_data else images), *more])

    return run


def config(*overrides: str):
    return compose_config("train", [*OWN, *overrides])


def checkpoint(run: str, name: str = "last.ckpt") -> dict:
    return torch.load(f"runs/{run}/checkpoints/{name}", weights_only=True)


# --- what is refused ---


SMALL = "task._target_=odd.Small"


@pytest.mark.parametrize(("overrides", "words"), [
    ([SMALL, "model=basic_net", "optim=sgd"], "model, optim would have no effect: odd.Small has its own. Set model=none optim=none, or begin its config with"),
    ([SMALL, "compile=true"], "compile=true compiles the network of the model group, but small makes its own"),
    ([SMALL, "strategy=dp"], "strategy=dp changes how a task's network is called"),
    ([SMALL, "strategy=fsdp", "trainer.devices=2"], "Set strategy=ddp."),
    ([SMALL, "+task.metrics={a: {_target_: torchmetrics.MeanMetric}}"], "task.metrics has no effect"),
    ([SMALL, "data=odd", "trainer.accumulate_grad_batches=auto"], "trainer.accumulate_grad_batches=auto divides Lockstep's batches, but data=data makes its own"),
    ([SMALL, "data=odd", "data.num_workers=auto"], "data.num_workers=auto is for Lockstep's dataloaders"),
])  # fmt: skip
def test_what_the_module_would_not_notice_is_refused(overrides, words):
    assert words in "\n".join(check_classes(Settings.of(config(*overrides))))


@pytest.mark.parametrize(("overrides", "words"), [
    (["task=classification", "model=none"], "model=none is for a LightningModule with its own model; task=classification needs one. Choose it with model=<name>."),
    (["task=classification", "task.monitor=test/acc"], "monitor=test/acc"),
    ([], "task._target_ is missing; it names the class"),
    ([SMALL, "model=basic_net", "seed=true"], "model would have no effect: odd.Small has its own"),
])  # fmt: skip
def test_what_a_task_needs_is_said_before_torch_is_imported(overrides, words):
    assert words in "\n".join(check(config(*overrides)))


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("Small", ["+task.widht=3"], r"task.widht is not an argument of odd.Small \(did you mean width\?\)"),
        ("Small", ["task.monitor=valid_loss"], "checkpoint.monitor=valid_loss has no effect: Small or the data has no validation. Set task.monitor=null."),
        ("WithLoader", [], "WithLoader.val_dataloader would be ignored: data=mnist provides the batches"),
        ("Other", [], "task._target_=odd.Other may not be named here: task takes a subclass of lockstep's Task or lightning's LightningModule"),
        ("Small", ["trainer.sync_batchnorm=true"], "trainer.sync_batchnorm=true has no effect: this network has no batch normalisation"),
        ("Small", ["data=odd", "+data.val_fraction=0.2"], "data.val_fraction is not an argument of odd.Data"),
    ],
)  # fmt: skip
def test_what_would_be_ignored_is_refused_and_nothing_is_left(train, name, more, words):
    with pytest.raises(UserError, match=words):
        train(name, "run=refused", *more)
    assert not Path("runs/refused").exists()


def test_a_task_of_locksteps_refuses_dataloaders_of_ones_own():
    with pytest.raises(
        UserError,
        match="task=classification needs a data set that describes itself; data=data is a LightningDataModule",
    ):
        lockstep.train(["task=classification", "data=odd", "trainer.accelerator=cpu"])


# --- what it gets ---


def test_a_module_of_the_template_keeps_its_config(train, capsys):
    """Its network is a node of its config; optimizer and schedule are partials that it calls."""
    report = train("Template", "run=template", "task=template")
    saved = checkpoint("template", "best-step-4.ckpt")
    assert report["checkpoint"] == "checkpoints/best-step-4.ckpt"
    assert saved["optimizer_states"][0]["param_groups"][0]["momentum"] == 0.9
    assert saved["lr_schedulers"][0]["_last_lr"][0] == pytest.approx(0.0, abs=1e-9)  # cosine to the end of 4 steps
    assert saved["hyper_parameters"] == {}
    assert (
        "checkpoints omit net, optimizer, scheduler from hyper_parameters: only plain values" in capsys.readouterr().err
    )
    module = lockstep.load_model("template")
    assert torch.equal(module.layers.state_dict()["features.0.weight"], saved["state_dict"]["layers.features.0.weight"])
    assert lockstep.evaluate(["run=template", "trainer.accelerator=cpu"])["test_loss"] == report["test_loss"]
    with pytest.raises(UserError, match=r"odd\.Template is a LightningModule.* cannot be exported"):
        export(Path("runs/template/checkpoints/last.ckpt"), Path("exported"))


def test_a_module_predicts_with_its_own_step(train, tmp_path):
    train("Predicting", "run=predicting", "task=template", "task._target_=odd.Predicting", "trainer.precision=32-true")
    found = lockstep.predict(["run=predicting", "input=test", "output=a.jsonl", "trainer.accelerator=cpu"])
    rows = [json.loads(line) for line in Path("a.jsonl").read_text().splitlines()]
    assert (found["count"], [row["index"] for row in rows]) == (103, list(range(103)))
    assert all(row["digit"] == max(range(10), key=row["logits"].__getitem__) for row in rows)


@pytest.mark.slow
def test_two_processes_predict_with_a_modules_own_step_as_one_does(train, forked):
    """Their shares of a batch differ by a sample: 103 samples in batches of 10."""
    given = ["task=template", "task._target_=odd.Predicting", "trainer.precision=32-true", "data.eval_batch_size=10"]
    train("Predicting", "run=shared", *given)
    for name, more in {"one": [], "two": ["strategy=ddp", "trainer.devices=2"]}.items():
        lockstep.predict(["run=shared", "input=test", f"output={name}.csv", "trainer.accelerator=cpu", *more])
    one, two = (
        [line.split(",")[:2] for line in Path(f"{name}.csv").read_text().splitlines()] for name in ("one", "two")
    )
    assert (one, len(one)) == (two, 104)


def test_a_module_that_wants_names_gets_them_without_fillers_and_its_own_hook_last(train):
    import odd

    report = train("Named", "run=named", "data.eval_batch_size=10", "trainer.num_sanity_val_steps=0")
    assert report["status"] == "done"
    assert odd.Named.sizes[:4] == [(16, 16, True)] * 4
    assert sum(size for size, _, _ in odd.Named.sizes[4:12]) >= 64  # all that is held out
    assert all(size == count and real for size, count, real in odd.Named.sizes)


# --- figures ---


def test_without_evaluation_steps_the_last_checkpoint_is_kept_and_nothing_is_tested(train, capsys):
    report = train("Small", "run=bare")
    assert (report["status"], report["checkpoint"], report["train/steps"]) == ("done", "checkpoints/last.ckpt", 4)
    assert not [name for name in report if name.startswith(("test", "val"))]
    assert "no test: Small has no test_step" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"Small has no predict_step\. Add one"):
        lockstep.predict(["run=bare", "input=test", "trainer.accelerator=cpu"])


def test_dataloaders_without_a_length(train, capsys):
    options = ["trainer.max_epochs=2", "trainer.accumulate_grad_batches=3", "trainer.log_every_n_steps=1"]
    report = train("Small", "run=stream", "data=odd", "data._target_=odd.Stream", *options)
    assert (report["train/steps"], report["train/epochs"]) == (4, 2)  # steps of 3 batches and of 1
    assert "no fixed number of steps" in capsys.readouterr().out
    assert len(Path("runs/stream/metrics.csv").read_text().splitlines()) >= 1 + 4  # the last step of an epoch has a row


def test_own_dataloaders_get_20_rows_too(train):
    train("Small", "run=rows", "data=odd", "trainer.max_epochs=12")  # 48 steps
    assert len(Path("runs/rows/metrics.csv").read_text().splitlines()) == 1 + 24 + 1  # and the end of training


def test_layers_of_configure_model_are_masked_by_row_until_an_error(train):
    with pytest.raises(OutOfMemory):
        train("Late", "run=late")
    assert dropout.current is None


def test_checkpoints_of_two_optimizers_are_named_by_the_steps_of_the_run(train):
    report = train("TwoOptimizers", "run=two", "task.monitor=valid_loss", "trainer.log_every_n_steps=1")
    assert (report["train/steps"], report["checkpoint"]) == (4, "checkpoints/best-step-4.ckpt")
    assert checkpoint("two")["global_step"] == step_of(Path("runs/two/checkpoints/last.ckpt")) == 4
    assert "\n4," in Path("runs/two/metrics.csv").read_text()
    again = train("TwoOptimizers", "run=two", "resume=auto", "task.monitor=valid_loss", "trainer.max_epochs=2")
    assert again["train/steps"] == 8


def test_a_figure_that_is_never_logged_is_told_at_the_first_validation_and_the_run_goes_on_with_another(train):
    words = (
        r"checkpoint.monitor=val_loss is not logged by Validated, which logs .*valid_loss \(did you mean valid_loss\?\)"
    )
    with pytest.raises(TrainingFailed, match=words):
        train("Validated", "run=told", "task.monitor=val_loss", "trainer.max_epochs=2")
    assert json.loads(Path("runs/told/report.json").read_text())["status"] == "failed"
    assert checkpoint("told")["global_step"] == 4
    report = train("Validated", "run=told", "resume=auto", "checkpoint.monitor=valid_loss", "trainer.max_epochs=2")
    assert (report["train/steps"], report["checkpoint"]) == (8, "checkpoints/best-step-8.ckpt")
    assert report["valid_loss"] > 0


def test_figures_of_several_test_dataloaders_are_all_reported(train):
    report = train("Reads", "run=several", "data=odd", "data._target_=odd.TwoTests")
    assert {"test_loss/dataloader_idx_0", "test_loss/dataloader_idx_1"} <= set(report)
    assert (report["data/source"], report["data/sha256"], report["batch_size"]) == ("own dataloaders", None, None)
    assert report["train/samples_per_s"] > 0
    assert report["train/data_wait_share"] is None
    assert "own dataloaders" in Path("runs/several/report.html").read_text()
    with pytest.raises(UserError, match=r"is a LightningDataModule with its own dataloaders"):
        lockstep.predict(["run=several", "input=test", "trainer.accelerator=cpu"])


# --- checkpoints ---


def test_what_would_not_load_again_is_not_saved(train):
    with pytest.raises(NotSaved, match=r"would not load: it has /mine/path/0 \(.*AttributeDict\)"):
        train("Unplain", "run=unplain")


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("name", [pytest.param("Small", marks=pytest.mark.slow), "Reads"])
def test_a_run_on_dataloaders_of_ones_own_goes_on_exactly_from_an_epochs_end(train, name, workers):
    options = ["data=odd", f"data.num_workers={workers}", "trainer.max_epochs=3"]
    run = f"{name}{workers}"
    train(name, f"run={run}-whole", *options)
    with pytest.raises(RuntimeError, match="the test stops this run"):
        train(name, f"run={run}-parts", *options, "+callbacks.stop={_target_: odd.Stop, at: 5}")
    train(name, f"run={run}-parts", "resume=auto", *options, "+callbacks.stop.at=-1")
    whole, parts = checkpoint(f"{run}-whole"), checkpoint(f"{run}-parts")
    assert parts["global_step"] == 12
    assert all(torch.equal(parts["state_dict"][key], value) for key, value in whole["state_dict"].items())


def test_an_order_that_processes_share_depends_on_no_process(train):
    """The steps of a rank draw from torch's generators alone: own dataloaders may draw from Python's on every rank alike."""
    report = train("Small", "run=lazy", "data=odd", "data._target_=odd.Lazy")
    random.seed(step_seed(report["seed"], 0, -1))
    assert sys.modules["odd"].Lazy.drawn == [random.sample(range(48), 12) for _ in range(4)]


def test_a_build_without_a_network_takes_the_datas_own_normalisation():
    cfg = config("task._target_=odd.Small", "data=cifar10")
    assert list(Settings.of(cfg).with_numbers().cfg.data.mean) == pytest.approx([0.4914, 0.4822, 0.4465], abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("data", [[], ["data=odd"]])
def test_a_modules_own_hyperparameters_join_the_config_in_a_logger(train, data):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    name = f"logged-{len(data)}"
    report = train("Small", "logger=tensorboard", f"run={name}", "+task.width=5", "trainer.log_every_n_steps=1", *data)
    events = EventAccumulator(f"runs/{name}/tensorboard").Reload()
    text = events.Tensors("config/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert {"| width | 5 |", f"| run | {name} |"} <= set(text.splitlines())
    seen = [tag for tag in events.Tags()["scalars"] if tag.endswith("_seen")]
    assert seen == ([] if data else ["train/images_seen"])  # nobody knows the batch of one's own dataloaders
    assert report["status"] == "done"
