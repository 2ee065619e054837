"""Creates the objects of train.py from config nodes, one function per object. Only this file, build_trainer.py and extras/prediction.py
import from all packages."""

from lockstep.compat import others  # noqa: F401  # before Lightning

# isort: split
import inspect
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from hydra.errors import InstantiationException
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torchmetrics import Metric, MetricCollection

from lockstep import PACKAGE, strategies
from lockstep.build_trainer import arithmetic, evaluator, trainer, workload, workload_of
from lockstep.checkpoints.finding import Checkpoint, read_outline
from lockstep.checkpoints.weights import load_into, load_module_weights, plain, read
from lockstep.config.formatting import to_text
from lockstep.config.instantiate import ENGINE, create_custom_module, create_object
from lockstep.config.instantiate import network as network_of
from lockstep.config.project import is_user_code_error
from lockstep.config.rules import optimizer_node
from lockstep.config.run_config import Component
from lockstep.config.settings import Settings
from lockstep.config.targets import matching_kwargs
from lockstep.data.dataset import DataSet
from lockstep.data.parts import MATCHED, NAMES, Targets, names_at
from lockstep.errors import TrainingFailed, UserError, raise_problems
from lockstep.kit.datamodule import DataModule
from lockstep.machine import process as this_process
from lockstep.machine.world import gpu_count, keep_freed_memory, threads
from lockstep.reporting import console
from lockstep.reporting.recorder import Page, Recorder
from lockstep.training import oom, optim
from lockstep.training.module import changed_frozen
from lockstep.training.task import Task
from lockstep.training.workload import Workload

__all__ = [
    "attach", "datamodule", "evaluate", "module", "network", "process", "recorder", "trainer", "workload", "workload_of",
]  # fmt: skip
# Threads and OMP_NUM_THREADS before a job with exact.logical_ranks, to restore them for the next job in this process.
threads_before_exact: list[tuple[int, str | None]] = []
REFUSALS = (
    ValueError,
    TypeError,
    RuntimeError,
    LookupError,
    AssertionError,
    InstantiationException,
    MisconfigurationException,
)


def process(settings: Settings) -> None:
    """Sets the whole process up: what it prints, memory, threads, arithmetic, random numbers. The launcher calls it."""
    cfg, world = settings.cfg, settings.world
    console.quiet(world.rank)
    keep_freed_memory(world.accelerator, is_sharded=settings.spec.is_sharded)
    if world.accelerator == "cpu":
        if threads_before_exact:
            set_threads(*threads_before_exact.pop())
        if number := threads(world):
            set_threads(number, str(number))
        if cfg.exact.logical_ranks:
            threads_before_exact.append((torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")))
            set_threads(cfg.exact.threads, str(cfg.exact.threads))
    if not gpu_count():
        # Optimizers check for GPUs at each step. Lightning makes torch query the driver, which is slow to fail if there is none:
        # the default recipe ran at 4,352 images/s without this line and at 4,601 with it (medians of 4 runs, two threads).
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = bool(cfg.tf32)
    seed(settings.seed)


def set_threads(number: int, variable: str | None) -> None:
    """`variable`: OMP_NUM_THREADS. If it is unset, Lightning's launcher later sets a different number of threads."""
    torch.set_num_threads(number)
    os.environ.pop("OMP_NUM_THREADS", None)
    os.environ.update({"OMP_NUM_THREADS": variable} if variable else {})


def seed(number: int) -> None:
    """The same seed on every rank, so networks start equal. training/seeds.py seeds what differs by rank."""
    pl.seed_everything(number, workers=True, verbose=False)


def recorder(settings: Settings, page: Page | None = None) -> Recorder:
    """Keeps report.json up to date from `begin` to the end of its block. Then `page` renders it."""
    return Recorder(settings, page, partial(with_advice, settings))


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
    module = DataModule(data, operations=settings.operations if cfg.augment else {}, **vars(cfg.loader))
    module.targets.metadata = plain(module.metadata, "metadata")
    return module


def optimizer(settings: Settings) -> dict[str, Any]:
    """Two functions: one creates the optimizer of given parameters; one returns a network's parameters, in groups if a key requests it."""
    node = optimizer_node(settings)
    made: dict[str, Any] = {"optimizer": create_object(Component.of(node), "optim")}
    takes = inspect.signature(made["optimizer"]).parameters
    sharding = settings.cfg.strategy.name if settings.spec.is_sharded else None
    made["optimizer"] = arithmetic(settings).optimizer_factory(made["optimizer"], node["_target_"], sharding)
    own = set(ENGINE["optim"]) - takes.keys()
    if asked := {key: value for key, value in node.items() if key in own and value is not None and value is not False}:
        raise_problems(
            f"optim.{key}={to_text(value)} has no effect: {node['_target_']} groups the parameters itself. Remove it."
            for key, value in asked.items()
            if "named_parameters" in takes
        )
        rates = {key: node[key] for key in ("lr", "weight_decay") if key in node}
        made["parameters"] = partial(optim.groups, **rates, **asked)
    return made


def module(settings: Settings, data: Any) -> pl.LightningModule:
    """The LightningModule of `task`: the loss, the metrics and the steps. It has the data's classes, but no network yet, unless it creates
    its own.

    Raises:
        UserError: it does not fit the data.
    """
    cfg, weights = settings.cfg, settings.weights
    settings.built_groups.add("task")
    seed(settings.seed)  # what the module draws is in no checkpoint: it draws the same again in the test
    made = create_custom_module(cfg.task)
    if not isinstance(made, Task):
        settings.built_groups.update(("model", "optim", "schedule"))  # it has its own
        try:
            match_names(settings, data, weights, NAMES)
        except UserError as e:  # it may not use names, or may have a new head for them
            console.print_line(f"WARNING: {e}")
        return made
    goal, title = made, f"task={cfg.task.title}"
    if not hasattr(data, "dataset"):
        raise UserError(f"{title} needs a lockstep.DataSet. Write one, or use a LightningModule as the task.")
    match_names(settings, data, weights, [key for key in NAMES if key in goal.needs or key not in MATCHED])
    if goal.target_spec and names_at(data.metadata, goal.names):
        data.check_targets(goal.names, goal.target_spec.wrong, goal.target_spec.integer)
    goal.bind(data.metadata)
    if own := ", ".join(goal.state_dict()):
        raise UserError(
            f"{title} has its own weights ({own}), but checkpoints contain only the network. Move them into the network; register a constant buffer with persistent=False."
        )
    return goal


def network(settings: Settings, data: Any, module: pl.LightningModule) -> nn.Module | None:
    """The network of `model`, for the shapes of the data and the module. It gets the values of `shapes` that its signature names.
    None for a LightningModule that creates its own."""
    settings.built_groups.add("model")
    model = settings.cfg.model
    return network_of(model, shapes(data, module), with_weights=settings.weights is None) if model else None


def shapes(data: Any, module: Any) -> dict[str, Any]:
    """The arguments that data and module provide for a network: in_channels, image_size, num_classes, ..."""
    return plain({**data.dataset.model_kwargs(), **module.model_kwargs()}, "model_kwargs()")


def attach(settings: Settings, data: Any, module: pl.LightningModule, net: nn.Module | None) -> pl.LightningModule:
    """The module with its network, `optim` and `schedule`, and the weights of the checkpoint that the settings start from.

    Raises:
        UserError: network, module and data do not fit together.
    """
    cfg, weights = settings.cfg, settings.weights
    if net is not None:
        give_parts(settings, data, cast(Task, module), net)
    elif weights:
        module.configure_model()  # may create its layers
        load_module_weights(module, read(Path(weights)))
    change = partial(strategies.prepare, sync_batchnorm=cfg.trainer.sync_batchnorm, compile=cfg.compile)
    strategies.change_in_place(module, change, configured=net is None and weights is not None)
    return module


def give_parts(settings: Settings, data: Any, task: Task, net: nn.Module) -> None:
    """Gives a task its network, `optim`, `schedule` and metrics."""
    cfg, weights = settings.cfg, settings.weights
    settings.built_groups.update(("optim", "schedule"))
    # the other format rounds differently; strategy=fsdp does not support it
    if cfg.channels_last and not cfg.exact.logical_ranks and not settings.spec.is_sharded:
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if task.float32_head:
        strategies.compute_in_float32(optim.head_of(net), settings.world.accelerator)
    if weights:
        load_into(net, read(Path(weights)).weights, weights)
    measured = metrics(task, cfg.task.parts("metrics"))
    raise_problems(
        f"evaluation_sets: {part!r} is also the name of a metric. Use a different name."
        for part in data.sets
        if part.partition("/")[2] in measured
    )
    task.attach(
        net,
        **optimizer(settings),
        schedule=create_object(cfg.schedule, "schedule"),
        metrics=measured,
        sets=[*data.sets],
        model_kwargs=shapes(data, task),
        arithmetic=arithmetic(settings),
    )


def match_names(settings: Settings, data: Any, weights: str | None, keys: Collection[str]) -> None:
    """Targets get the numbers of the checkpoint that the weights are from. Raises UserError."""
    if (source := weights or settings.cfg.resume) and isinstance(found := getattr(data, "targets", None), Targets):
        for warning in found.match(read_outline(Path(source)).metadata, str(source), keys):
            console.print_line(f"WARNING: {warning}")


def load_module(checkpoint: Checkpoint) -> pl.LightningModule:
    """A user's LightningModule with its weights, in evaluation mode. Raises UserError if they do not fit."""
    with this_process.seeded_and_restored(checkpoint.config["seed"]):
        made = create_custom_module(checkpoint.component("task"))
        made.configure_model()  # may create its layers
    load_module_weights(made, checkpoint)
    return made.eval()


def metrics(goal: Task, more: Mapping[str, Component]) -> dict[str, Metric]:
    """The metrics of the task and those of task.metrics. Raises UserError if the task returns anything else."""
    found: Any = goal.metrics()
    where = f"task={type(goal).__name__}: `metrics` returns"
    named: Any = (Mapping, MetricCollection)
    if not isinstance(found, named) or not all(isinstance(each, Metric | MetricCollection) for each in found.values()):
        raise UserError(f"{where} {found}; expected a dict of torchmetrics metrics, such as {{'mean': MeanMetric()}}.")
    if taken := ", ".join(sorted({"loss", "count"} & {*found.keys()})):
        raise UserError(f"{where} {taken}, which every task already logs. Use a different name.")
    found = dict(found.items())
    for name, each in more.items():
        given = {k: v for k, v in matching_kwargs(each.target, goal.metric_arguments()).items() if k not in each}
        found[name] = create_object(each, f"task.metrics.{name}", **given)
    return found


def oom_advice(settings: Settings, trainer: pl.Trainer, work: Workload) -> AbstractContextManager[None]:
    """Explains out-of-memory errors."""
    return oom.oom_advice(trainer, work, lambda: settings.accumulations)


def with_advice(settings: Settings, trainer: pl.Trainer, error: BaseException) -> BaseException:
    """Explains an error of `trainer.fit`: out of memory; or torch, Lightning or another library rejected what it got until the first step."""
    if trainer.state.fn != TrainerFn.FITTING or trainer.state.finished:
        return error
    trace, loop = error.__traceback__, trainer.fit_loop.epoch_loop
    trained, validated = loop.batch_progress.total, loop.val_loop.batch_progress.current
    may_explain = (
        isinstance(error, REFUSALS) and not isinstance(error, UserError | TrainingFailed) and not is_bug(error)
    )
    try:
        with oom_advice(settings, trainer, workload_of(trainer)):
            raise error
    except BaseException as e:
        if e is not error:
            return e
        if trained.completed or not may_explain:
            return error.with_traceback(trace)
    cfg, reason = settings.as_built().cfg, " ".join(str(error).split()) or type(error).__name__
    parts = [f"{key}={part.title}" for key in ("model", "data", "task", "optim") if (part := getattr(cfg, key))]
    if trained.ready or validated.ready:
        reason = f"{', '.join(parts)} do not fit together: {reason}"
    return UserError(reason)


def is_bug(error: BaseException) -> bool:
    """Whether an error before the end of the first step was raised by code of the user's or of Lockstep, or because another process failed."""
    trace, file, is_ours = error.__traceback__, Path(), False
    below = trace.tb_next if trace else None  # train.py itself, which calls fit, is the user's code
    while trace:
        file = Path(trace.tb_frame.f_code.co_filename)
        is_ours = file.is_relative_to(PACKAGE) and file.parent.name not in ("compat", "tasks")
        below, trace = trace.tb_next if is_ours else below, trace.tb_next
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
    """The test (or `val`) metrics of a module, or of a checkpoint, for which `make` creates the module. `run` gets the panels of a test.

    For a checkpoint with averaged weights, `test/acc` is the metric of the average and `test/raw/acc` that of the raw weights.
    For a LightningModule's `test_acc`, the latter is `raw/test_acc`.
    """
    step, verb = {"test": ("test", "test"), "val": ("validation", "validate")}[stage]
    if settings.cfg.get(f"trainer.limit_{stage}_batches") == 0:
        return {}
    saved = tested if isinstance(tested, str) else None
    start = settings.replace({"init_from": saved, "resume": None})
    module = tested if not isinstance(tested, str) else make(start, data)
    work = workload(settings, module, data)
    if saved:
        for warning in changed_frozen(module, read_outline(Path(saved)).values.get("frozen", {})):
            console.print_line(f"WARNING: {warning}")
    if not work.evaluates(step, stage):
        console.print_line(f"no {verb}: {work.title} has no {step}_step, or the data has no {stage}_dataloader")
        return {}
    if run is not None and stage == "test":
        work.collect_panels(run.panels, compiled=bool(settings.cfg.compile))

    def metrics_of(work: Workload) -> dict[str, float]:
        trainer = evaluator(settings, work, loggers=run.loggers if run else ())
        with oom_advice(settings, trainer, work):
            by_loader = getattr(trainer, verb)(work.module, datamodule=data, verbose=False)
        counts = {f"{part}/count" for part in ("val", *getattr(data, "sets", ())) if part.startswith("val")}
        found = {name: value for each in by_loader for name, value in each.items() if name not in counts}
        return {n: int(v) if n.endswith("/count") else v for n, v in work.marked(found).items()}

    metrics = metrics_of(work)
    raw = read(Path(saved)).raw_state_dict if saved else None
    if saved and raw is not None:  # the run averaged its weights: training continues from these
        work = workload(settings, make(start, data), data)
        load_into(work.module, raw, saved, strict=work.module.strict_loading)
        of_raw = metrics_of(work)
        names = {name: name.replace("/", "/raw/", 1) if "/" in name else f"raw/{name}" for name in of_raw}
        metrics |= {names[name]: value for name, value in of_raw.items() if not name.endswith("/count")}
    return metrics


def evaluation_info(settings: Settings) -> dict[str, Any]:
    """The entries of eval.json and predict.json about the evaluation itself."""
    cfg, size = settings.cfg, settings.world.size
    return {"run": cfg.run, "checkpoint": cfg.init_from, "strategy": cfg.strategy.name, "world_size": size}
