"""Lightning still does what compat/lightning.py corrects; when a test fails, see whether its section can go."""

import inspect
import math
import signal
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.distributed import _sync_ddp
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import ModelParallelStrategy, model_parallel
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import nn
from torch.utils.data import DataLoader

from lockstep import build
from lockstep.compat.lightning import LogsNothing, ValuesOfAllProcesses, is_open, log_by
from lockstep.config.checks import resolve
from lockstep.config.settings import Settings
from lockstep.machine.process import handlers_restored
from lockstep.strategies import SingleDevice
from lockstep.training.batches import Loaders


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch, _):
        loss = self.layer(batch).sum()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def quiet_trainer(**options) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu", enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options
    )


@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # of Lightning with torch 2.13
def test_a_loader_without_a_length_begins_before_the_position_is_restored(tmp_path):
    class Asking(Net):
        def configure_optimizers(self):
            assert self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    class Batches:
        """The position that it began at."""

        def __init__(self, trainer: pl.Trainer) -> None:
            self.trainer, self.began = trainer, []

        def __iter__(self):
            self.began.append(self.trainer.fit_loop.epoch_loop.batch_progress.current.ready)
            yield from torch.ones(4, 2, 1)

    path = tmp_path / "x.ckpt"
    for resumed, steps in ((None, 2), (path, 3)):
        trainer = quiet_trainer(max_steps=steps, max_epochs=5, logger=False)
        batches = Batches(trainer)
        trainer.fit(Asking(), batches, ckpt_path=resumed)
        trainer.save_checkpoint(path)
    assert batches.began[0] == 0  # otherwise compat/lightning.py can go


class Rows(Logger):
    """The step of each row."""

    name = version = "rows"

    def __init__(self):
        super().__init__()
        self.steps = []

    def log_hyperparams(self, *_, **__):
        pass

    def log_metrics(self, metrics, step=None):
        self.steps.append(step)


@pytest.mark.filterwarnings("ignore:.*LeafSpec", "ignore:.*does not have many workers")
def test_lightning_logs_a_step_under_another_number():
    """When it logs steps 2 and 4, remove compat/lightning.py. tests/test_resume.py has the steps that ours logs."""
    rows = Rows()
    trainer = quiet_trainer(logger=rows, max_steps=4, log_every_n_steps=2)
    trainer.fit(Net(), DataLoader(torch.ones(4, 1), batch_size=1))
    assert rows.steps == [1, 3]


def test_lightning_still_handles_sigterm(mnist, cache, monkeypatch):
    """When one of the first lines fails, see whether compat/lightning.py can go. No process of a run asks another at each step."""
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(_TrainingEpochLoop.advance)
    assert "self._signal_connector.register_signal_handlers()" in inspect.getsource(pl.Trainer._run)
    monkeypatch.setattr(_TrainingEpochLoop, "_broadcast_sigterm_tensor", pytest.fail)
    given = [f"data.root={mnist}", f"data.cache_dir={cache}", "run=a", "trainer.accelerator=cpu"]
    cfg = resolve([*given, "trainer.precision=32-true"])
    trainer = build.evaluator(Settings.of(cfg), Loaders(None, pl.LightningModule()))
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor()
    with handlers_restored():
        signal.signal(signal.SIGTERM, before := Mock())
        trainer._signal_connector.register_signal_handlers()
        assert signal.getsignal(signal.SIGTERM) is before
        signal.signal(signal.SIGTERM, Mock())  # as a callback does
        trainer._signal_connector.teardown()
        assert signal.getsignal(signal.SIGTERM) is before


def test_lightnings_mesh_of_two_nodes_with_three_processes(monkeypatch):
    """When it is (6, 1), or made of the default group, remove compat/lightning.py."""

    mesh = Mock(side_effect=RuntimeError)
    monkeypatch.setattr(model_parallel, "_setup_device_mesh", mesh)
    monkeypatch.setattr(ModelParallelStrategy, "_setup_distributed", Mock())
    strategy = ModelParallelStrategy(tensor_parallel_size=1)
    strategy.accelerator = Mock()
    strategy.cluster_environment = Mock(**{"local_rank.return_value": 0, "world_size.return_value": 6})
    strategy.num_nodes, strategy.parallel_devices = 2, [torch.device("cpu")] * 3
    with pytest.raises(RuntimeError):
        strategy.setup_environment()
    assert mesh.call_args.args[:2] == (2, 1)


def test_lightning_logs_the_mean_of_one_process(monkeypatch):
    """When the first lines fail, see whether compat/lightning.py:ValuesOfAllProcesses and `DividedBatches.reduce` can go."""
    assert "result.copy_(result / world_size)" in inspect.getsource(_sync_ddp)
    results, reduce = _ResultCollection(training=False), Mock()
    for value, samples in ((1.0, 2), (4.0, 1)):
        for name, options in {
            "mean": {},
            "largest": {"reduce_fx": "max"},
            "own": {},
            "nan": {},
            "sum": {"reduce_fx": "sum"},
        }.items():
            results.log(
                "validation_step", name, torch.tensor(value), batch_size=samples, sync_dist_fn=reduce, **options
            )
    results.log("validation_step", "main", torch.tensor(5.0), batch_size=1, rank_zero_only=True)
    assert results["validation_step.mean"].compute() == 2
    assert not reduce.called

    def of_all(own):
        means = dict.fromkeys(("validation_step.mean", "validation_step.own", "validation_step.nan"), (6, 3))
        assert own == means | {"validation_step.largest": (4, 1), "validation_step.sum": (5, 1)}
        others = {"mean": (30.0, 5.0), "nan": (math.nan, 1.0), "largest": (9.0, 1.0), "sum": (30.0, 1.0)}
        return [own, {f"validation_step.{name}": value for name, value in others.items()}]

    monkeypatch.setattr("lockstep.compat.lightning.all_gather_objects", of_all)
    for item in results.values():
        item._computed = None
    ValuesOfAllProcesses(Mock(_results=results, world_size=2)).epoch_end_reached()
    values = {item.meta.name: float(item.compute()) for item in results.values()}
    assert math.isnan(values.pop("nan"))
    assert values == {"mean": 4.5, "largest": 9, "own": 2, "sum": 35, "main": 5}
    assert not [key for key, item in results.items() if is_open(item)]  # so the next call leaves them as they are


class Evaluated(Net):
    def test_step(self, batch, _):
        self.log("test_loss", self.layer(batch).sum())

    def test_dataloader(self):
        return DataLoader(torch.ones(2, 1))


@pytest.mark.filterwarnings("ignore:.*LeafSpec", "ignore:.*does not have many workers")
@pytest.mark.parametrize("nothing", [False, True])
def test_a_test_is_logged_at_step_0(tmp_path, nothing):
    logged = Rows()
    trainer = quiet_trainer(
        logger=logged, default_root_dir=tmp_path, **({"strategy": SingleDevice()} if nothing else {})
    )
    if nothing:
        log_by(trainer, LogsNothing)
    trainer.test(Evaluated(), verbose=False)
    assert logged.steps == ([] if nothing else [0])  # when this fails, remove LogsNothing
