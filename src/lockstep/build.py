"""Creates the objects of train.py from config nodes, one function per object. Only this file, build_trainer.py and extras/prediction.py
import from all packages."""

from lockstep.compat import others  # noqa: F401  # before Lightning

# isort: split
import inspect
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from hydra.errors import InstantiationException
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer

from lockstep import PACKAGE, strategies
from lockstep.build_trainer import arithmetic, evaluator, trainer
from lockstep.checkpoints.finding import Checkpoint, read_outline
from lockstep.checkpoints.weights import load_into, load_module_weights, plain, read
from lockstep.config.formatting import to_text
from lockstep.config.instantiate import (
    ENGINE,
    create_module,
    create_object,
    create_offered,
    network,
    network_arguments,
    required_arguments,
)
from lockstep.config.project import is_user_code_error
from lockstep.config.rules import optimizer_node
from lockstep.config.run_config import Component
from lockstep.config.settings import Settings
from lockstep.config.targets import locate, target_of
from lockstep.data.dataset import DataSet
from lockstep.data.parts import MATCHED, NAMES, Targets
from lockstep.errors import TrainingFailed, UserError, raise_problems
from lockstep.machine import process as this_process
from lockstep.machine.world import gpu_count, keep_freed_memory, threads
from lockstep.reporting import console
from lockstep.reporting.recorder import Page, Recorder
from lockstep.training import optim
from lockstep.training.arithmetic import total_steps
from lockstep.training.batches import Loaders
from lockstep.training.module import call_own_train, changed_frozen
from lockstep.training.oom import oom_advice

__all__ = ["datamodule", "evaluate", "module", "process", "recorder", "trainer"]
REFUSALS = (
    ValueError, TypeError, RuntimeError, LookupError, AssertionError, InstantiationException, MisconfigurationException,
)  # fmt: skip


def process(settings: Settings) -> None:
    """Sets the whole process up: what it prints, memory, threads, arithmetic, random numbers. The launcher calls it."""
    cfg, world = settings.cfg, settings.world
    console.quiet(world.rank)
    keep_freed_memory(world.accelerator, is_sharded=settings.spec.is_sharded)
    number = cfg.exact.threads if cfg.exact.logical_ranks else threads(world)
    if world.accelerator == "cpu" and number:
        torch.set_num_threads(number)
        os.environ["OMP_NUM_THREADS"] = str(number)  # otherwise Lightning's launcher later sets a different number
    if not gpu_count():
        # Optimizers check for GPUs at each step. Lightning makes torch query the driver, which is slow to fail if there is none:
        # the default recipe ran at 4,352 images/s without this line and at 4,601 with it (medians of 4 runs, two threads).
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = bool(cfg.tf32)
    seed(settings.seed)


def seed(number: int) -> None:
    """The same seed on every rank, so networks start equal. training/seeds.py seeds what differs by rank."""
    pl.seed_everything(number, workers=True, verbose=False)


@contextmanager
def recorder(settings: Settings, page: Page | None = None) -> Iterator[Recorder]:
    """Keeps report.json up to date from `begin` to the end of its block. Then `page` renders it."""
    with Recorder(settings, page) as run, fit_errors_explained(settings, run):
        yield run


def datamodule(settings: Settings, data: DataSet | None) -> pl.LightningDataModule | None:
    """A LightningDataModule that divides each global batch among the processes, from `loader` and `augment`. Without a data set, the
    LightningDataModule that `data` names; None if the module has the dataloaders (data=none)."""
    cfg = settings.cfg
    if data is None:
        settings.built_groups.update(("data", "loader", "augment"))
        seed(settings.seed)  # an evaluation gets the data that training had
        made: pl.LightningDataModule = create_object(cfg.data, "data")
        return None if type(made) is pl.LightningDataModule else made
    settings.built_groups.update(("loader", "augment"))
    # a module that requires the metadata of the data knows the names in its batches
    named: bool = cfg.task.get("named_batches", "metadata" in required_arguments(cfg.task))
    make: type[pl.LightningDataModule] = locate(data.datamodule)
    module: Any = make(data, operations=settings.operations, named=named, **vars(cfg.loader))
    module.targets.metadata = plain(module.metadata, "metadata")
    return module


@dataclass(frozen=True)
class Factory:
    """A function for the constructor of a module. Lightning drops hyperparameters that it cannot copy and pickle."""

    create: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.create(*args, **kwargs)

    def __deepcopy__(self, _: Any) -> "Factory":
        return self

    def __reduce__(self) -> Any:  # without the network, which it refers to
        return Factory, ()


def optimizer(settings: Settings, networks: Callable[[], Sequence[nn.Module]]) -> Callable[[Iterable[Any]], Optimizer]:
    """A function that creates the optimizer of parameters, in groups by the layers of the first of `networks` if a key requests it. The others
    name the rest of the parameters."""
    node = optimizer_node(settings)
    make, ways = create_object(Component.of(node), "optim"), arithmetic(settings)
    takes = inspect.signature(make).parameters
    sharding = settings.cfg.strategy.name if settings.spec.is_sharded else None
    make = ways.optimizer_factory(make, node["_target_"], sharding)
    own = set(ENGINE["optim"]) - takes.keys()
    asked = {key: value for key, value in node.items() if key in own and value is not None and value is not False}
    raise_problems(
        f"optim.{key}={to_text(value)} has no effect: {node['_target_']} groups the parameters itself. Remove it."
        for key, value in asked.items()
        if "named_parameters" in takes
    )
    rates = {key: node[key] for key in ("lr", "weight_decay") if key in node}

    def create(params: Iterable[Any]) -> Optimizer:
        given = list(params)
        if "named_parameters" in takes:
            named = {id(p): (name, p) for net in reversed(networks()) for name, p in net.named_parameters()}
            made = make(named_parameters=[named[id(p)] for p in given])
        else:
            made = make(params=optim.groups(networks()[0], given, **rates, **asked) if asked else given)
        made.of_config = True  # type: ignore[attr-defined]
        return optim.padded_fused(made) if ways.same_bits else made

    return create


def arguments_of(
    settings: Settings, data: Any, by_hand: Mapping[str, Any], module: Callable[[], Any]
) -> dict[str, Any]:
    """What the constructor of the LightningModule requires and `task` does not set: `net`, `optimizer`, `scheduler` and `metadata`; `metrics`
    if it takes them. `module` returns the module once it exists."""
    cfg, given = settings.cfg, {**by_hand}
    wanted = required_arguments(cfg.task) - by_hand.keys()
    if metrics := cfg.task.parts("metrics"):
        given["metrics"] = {k: partial(create_offered, each, f"task.metrics.{k}") for k, each in metrics.items()}
    match_names(settings, data, getattr(target_of(cfg.task.target, "task"), "needs", None))
    metadata = getattr(data, "metadata", None)
    if "metadata" in wanted:
        if not isinstance(metadata, Mapping):
            raise UserError(
                f"task={cfg.task.title} needs the `metadata` of the data, but data={cfg.data.title} has none."
            )
        given["metadata"] = metadata
        settings.made_for["metadata"] = plain({**metadata}, "metadata")
    if "net" in wanted and cfg.model:
        settings.built_groups.add("model")
        of_data: dict[str, Any] = getattr(getattr(data, "dataset", None), "model_kwargs", dict)()
        of_module = network_arguments(cfg.task, metadata or {})
        settings.made_for["network"] = plain({**of_data, **of_module}, "network_arguments()")
        given["net"] = network(cfg.model, settings.made_for["network"], with_weights=settings.weights is None)
    if "net" in given:
        settings.made_for.setdefault("network", {})
        call_own_train([(each, each.training) for each in given["net"].modules()])
        # the other format rounds differently; strategy=fsdp does not support it
        if cfg.channels_last and not cfg.exact.logical_ranks and not settings.spec.is_sharded:
            given["net"].to(memory_format=torch.channels_last)
    if "optimizer" in wanted and cfg.optim:
        settings.built_groups.add("optim")
        given["optimizer"] = Factory(optimizer(settings, lambda: [given.get("net", module()), module()]))
    if "scheduler" in wanted and cfg.schedule:
        settings.built_groups.add("schedule")
        make_schedule = create_object(cfg.schedule, "schedule")
        given["scheduler"] = Factory(
            lambda optimizer: optim.scheduler(make_schedule, optimizer, total_steps(module().trainer))
        )
    return given


def module(settings: Settings, data: Any, **by_hand: Any) -> pl.LightningModule:
    """The LightningModule of `task`, with its network, optimizer and schedule (`model`, `optim`, `schedule`) if its constructor takes them, and
    with the weights of the checkpoint that the settings start from. `by_hand`: arguments in place of those of the config, such as `net`.

    Raises:
        UserError: module, network and data do not fit together.
    """
    cfg = settings.cfg
    settings.built_groups.add("task")
    seed(settings.seed)  # what the module draws is in no checkpoint: it draws the same again in the test
    made: pl.LightningModule = create_module(cfg.task, **arguments_of(settings, data, by_hand, lambda: made))
    if settings.weights:
        made.configure_model()  # may create its layers
        load_module_weights(made, read(Path(settings.weights)))
    change = partial(strategies.prepare, sync_batchnorm=cfg.trainer.sync_batchnorm, compile=cfg.compile)
    strategies.change_in_place(made, change, configured=settings.weights is not None)
    return made


def match_names(settings: Settings, data: Any, needs: Collection[str] | None) -> None:
    """Targets get the numbers of the checkpoint that the weights are from. Raises UserError if the names that a module `needs` differ; it only
    warns for a module that does not say which: it may use none, or may have a new head for them."""
    source, targets = settings.weights or settings.cfg.resume, getattr(data, "targets", None)
    if not source or not isinstance(targets, Targets):
        return
    try:
        keys = [key for key in NAMES if needs is None or key in needs or key not in MATCHED]
        warnings = targets.match(read_outline(Path(source)).metadata, str(source), keys)
    except UserError as e:
        if needs is not None:
            raise
        warnings = [*e.problems]
    for warning in warnings:
        console.print_line(f"WARNING: {warning}")


def load_module(checkpoint: Checkpoint) -> pl.LightningModule:
    """The LightningModule of a checkpoint with its weights, in evaluation mode, without its data. Raises UserError if they do not fit."""
    task, model = checkpoint.component("task"), checkpoint.component("model")
    wanted = required_arguments(task)
    with this_process.seeded_and_restored(checkpoint.config["seed"]):
        given: dict[str, Any] = {**dict.fromkeys(wanted), "metadata": checkpoint.metadata}
        if "net" in wanted:
            if not model:
                raise UserError(
                    f"{checkpoint.path}: the network of this run is created in its train.py. Create it there, and load the weights with torch.load."
                )
            given["net"] = network(model, checkpoint.network or {}, with_weights=False)
        made = create_module(task, **{name: given[name] for name in wanted})
        made.configure_model()  # may create its layers
    load_module_weights(made, checkpoint)
    for each in made.modules():
        if isinstance(each, optim.Float32):  # a class of its own, which pickle does not find
            each.__class__ = type(each).__mro__[2]
    return made.eval()


@contextmanager
def fit_errors_explained(settings: Settings, run: Recorder) -> Iterator[None]:
    """Explains an error of `trainer.fit`: out of memory; or torch, Lightning or another library rejected what it got until the first step."""
    try:
        yield
    except Exception:
        trainer = run.trainer
        if trainer is None or trainer.state.fn != TrainerFn.FITTING or trainer.state.finished:
            raise
        try:
            with oom_advice(trainer, Loaders(trainer.datamodule, trainer.lightning_module), settings):  # type: ignore[attr-defined]
                raise
        except REFUSALS as error:
            has_trained = trainer.fit_loop.epoch_loop.batch_progress.total.completed
            if has_trained or isinstance(error, UserError | TrainingFailed) or is_bug(error):
                raise
            raise UserError(" ".join(str(error).split()) or type(error).__name__) from None


def is_bug(error: BaseException) -> bool:
    """Whether an error of `trainer.fit` was raised by code of the user's or of Lockstep, or because another process failed."""
    trace, file, is_ours = error.__traceback__, Path(), False
    while trace and not trace.tb_frame.f_globals.get("__name__", "").startswith("lightning."):
        trace = trace.tb_next  # train.py itself, which calls fit, is the user's code
    below = trace
    while trace:
        file, trace = Path(trace.tb_frame.f_code.co_filename), trace.tb_next
        is_ours = file.is_relative_to(PACKAGE) and file.parent.name not in ("compat", "tasks")
        below = trace if is_ours else below
    is_lost = "torch/distributed/" in file.as_posix()  # another process failed
    return is_ours or is_lost or is_user_code_error(Exception(*error.args).with_traceback(below))


Make = Callable[[Settings, Any], pl.LightningModule]  # `module` of train.py


def evaluate(
    settings: Settings,
    make: Make,
    data: Any,
    tested: str | pl.LightningModule,
    stage: str = "test",
    run: Recorder | None = None,
) -> dict[str, float]:
    """The test (or `val`) metrics of a module, or of a checkpoint, for which `make` creates the module. Callbacks of `run` that report panels see a test.

    For a checkpoint with averaged weights, `test/acc` is the metric of the average and `test/raw/acc` that of the raw weights.
    For a LightningModule's `test_acc`, the latter is `raw/test_acc`.
    """
    step, verb = {"test": ("test", "test"), "val": ("validation", "validate")}[stage]
    if settings.cfg.get(f"trainer.limit_{stage}_batches") == 0:
        return {}
    saved = tested if isinstance(tested, str) else None
    start = settings.replace({"init_from": saved, "resume": None})
    module = tested if not isinstance(tested, str) else make(start, data)
    loaders = Loaders(data, module)
    if saved:
        for warning in changed_frozen(module, read_outline(Path(saved)).values.get("frozen", {})):
            console.print_line(f"WARNING: {warning}")
    if not loaders.evaluates(step, stage):
        console.print_line(
            f"no {verb}: {type(module).__name__} has no {step}_step, or the data has no {stage}_dataloader"
        )
        return {}
    callbacks: list[Any] = run.trainer.callbacks if run and run.trainer and stage == "test" else []  # type: ignore[attr-defined]
    panels = [each for each in callbacks if hasattr(each, "report_panels")]

    def metrics_of(loaders: Loaders, *more: pl.Callback) -> dict[str, float]:
        trainer = evaluator(settings, loaders, *more, loggers=run.trainer.loggers if run and run.trainer else ())
        with oom_advice(trainer, loaders, settings):
            by_loader = getattr(trainer, verb)(loaders.module, datamodule=data, verbose=False)
        found = {name: value for each in by_loader for name, value in each.items()}
        for name in [name for name in found if name.endswith("/count")]:
            found[name] = int(found[name])
            if name.startswith("val/"):
                del found[name]
        return dict(trainer.strategy.means.marked(found))  # type: ignore[attr-defined]

    metrics = metrics_of(loaders, *panels)
    raw = read(Path(saved)).values.get("current_model_state") if saved else None
    if saved and raw is not None:  # the run averaged its weights: training continues from these
        loaders = Loaders(data, make(start, data))
        load_into(loaders.module, raw, saved, strict=loaders.module.strict_loading)
        for name, value in metrics_of(loaders).items():
            if not name.endswith("/count"):
                metrics[name.replace("/", "/raw/", 1) if "/" in name else f"raw/{name}"] = value
    return metrics


def evaluation_info(settings: Settings) -> dict[str, Any]:
    """The entries of eval.json and predict.json about the evaluation itself."""
    cfg, size = settings.cfg, settings.world.size
    return {"run": cfg.run, "checkpoint": cfg.init_from, "strategy": cfg.strategy.name, "world_size": size}
