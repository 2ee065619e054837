"""The config of a run as frozen values, annotated with bounds and an example. Free of torch and Hydra."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, get_type_hints

from lockstep.config import validators
from lockstep.config.validators import FLAG, Validator, integer, number, one_of

# Classes that shipped configs name, besides those of Lockstep; a test compares the two. `config/schema.py` validates the keys of these
# classes alone: a key of the same name may mean something else to any other class, such as one that a clone adds to src/project.
SHIPPED = (
    "torch.optim.Adam", "torch.optim.AdamW", "torch.optim.SGD", "lightning.pytorch.callbacks.LearningRateMonitor",
    "project.model.BasicNet", "project.module.Classifier", "project.data.Mnist", "project.data.Cifar10",
)  # fmt: skip
Auto = Literal["auto"]
Flag = Annotated[bool, FLAG]
OptionalFlag = Annotated[bool | None, one_of(True, False, None, example="true")]


@dataclass(frozen=True)
class Component:
    """A class or function that the config names with `_target_`, and its arguments. Without a target, it is empty."""

    target: str = ""
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, node: Mapping[str, Any]) -> "Component":
        kwargs = {name: value for name, value in node.items() if name != "_target_"}
        # Always a string, even for an invalid target: `title` is read before the target is validated.
        return cls(str(node.get("_target_") or ""), kwargs)

    @property
    def is_shipped(self) -> bool:
        """Whether it comes with Lockstep, so its keys are known without importing it."""
        return self.target in SHIPPED or self.target.startswith("lockstep.")

    @property
    def node(self) -> dict[str, Any]:
        """The component as a Hydra node."""
        return {"_target_": self.target, **self.kwargs} if self else {}

    @property
    def name(self) -> str | None:
        return self.kwargs.get("name")

    @property
    def title(self) -> str:
        """Its display name: its `name`, or its class name in the same form."""
        name = (self.target or "none").rpartition(".")[2]
        return str(self.name or re.sub(r"(?<=[a-z0-9])(?=[A-Z][A-Za-z])|(?<=[a-z0-9]{2})(?=[A-Z])", "_", name).lower())

    def __bool__(self) -> bool:
        return bool(self.target)

    def __contains__(self, name: str) -> bool:
        return name in self.kwargs

    def get(self, name: str, default: Any = None) -> Any:
        return self.kwargs.get(name, default)

    def parts(self, name: str) -> "dict[str, Component]":
        """The components of an argument that holds several by name, such as `metrics` of a task."""
        return {str(key): Component.of(node) for key, node in (self.get(name) or {}).items()}

    def replace(self, **kwargs: Any) -> "Component":
        return Component(self.target, {**self.kwargs, **kwargs})

    def without(self, *names: str) -> "Component":
        return Component(self.target, {name: value for name, value in self.kwargs.items() if name not in names})


Components = Mapping[str, Component]


@dataclass(frozen=True)
class Trainer:
    """Arguments of lightning.pytorch.Trainer."""

    accelerator: Annotated[str, one_of("auto", "cpu", "gpu", "cuda", "mps")]
    devices: Annotated[int | str | list[int], validators.DEVICES]
    num_nodes: Annotated[int, integer(1, 2)]
    precision: Annotated[str, validators.PRECISION]
    max_epochs: Annotated[int | None, integer(1, 5).or_word(-1).or_null()]
    min_epochs: Annotated[int | None, integer(0, 1).or_null()]
    max_steps: Annotated[int, integer(1, 200).or_word(-1)]
    min_steps: Annotated[int | None, integer(0, 100).or_null()]
    max_time: Annotated[str | dict[str, int] | None, validators.DURATION]
    limit_train_batches: Annotated[int | float | None, validators.BATCHES]
    limit_val_batches: Annotated[int | float | None, validators.BATCHES]
    limit_test_batches: Annotated[int | float | None, validators.BATCHES]
    val_check_interval: Annotated[int | float | None, validators.INTERVAL]
    check_val_every_n_epoch: Annotated[int | None, integer(1, 1).or_null()]
    num_sanity_val_steps: Annotated[int | None, integer(-1, 2).or_null()]
    log_every_n_steps: Annotated[int | Auto, integer(1, 50).or_word("auto")]
    enable_checkpointing: Flag
    enable_progress_bar: Flag
    enable_model_summary: Flag
    accumulate_grad_batches: Annotated[int, integer(1, 2)]
    gradient_clip_val: Annotated[float | None, number(0, 1.0, above=True).or_null()]
    gradient_clip_algorithm: Annotated[str | None, one_of("norm", "value", None)]
    deterministic: Annotated[bool | str | None, one_of(True, False, "warn", None, example="true")]
    benchmark: OptionalFlag
    inference_mode: Flag
    profiler: Annotated[str | None, one_of("simple", "advanced", "pytorch", None)]
    detect_anomaly: Flag
    sync_batchnorm: Flag
    reload_dataloaders_every_n_epochs: Annotated[int, integer(0, 0)]


@dataclass(frozen=True)
class Loader:
    """How the samples of a data set become batches. Data with its own dataloaders has none."""

    batch_size: Annotated[int, integer(1, 64)]
    eval_batch_size: Annotated[int | None, integer(1, 1000).or_null()]
    val_fraction: Annotated[float, number(0, 0.1, above=True, below=1)]
    val_gap: Annotated[int | None, integer(0, 24).or_null()]
    folds: Annotated[int | None, integer(2, 5).or_null()]
    fold: Annotated[int, integer(0, 0)]
    limit_train: Annotated[int | None, integer(1, 1000).or_null()]
    balance: Flag
    repeats: Annotated[int, integer(1, 2)]
    num_workers: Annotated[int | Auto, integer(0, 4, high=1024).or_word("auto")]
    on_device: Annotated[bool | Auto, one_of(True, False, "auto", example="false")]
    prefetch_factor: Annotated[int | None, integer(1, 4).or_null()]
    persistent_workers: OptionalFlag


@dataclass(frozen=True)
class Checkpoint:
    """Which checkpoints are kept, and how they are saved."""

    monitor: Annotated[str | None, validators.MONITOR]
    mode: Annotated[str, one_of("max", "min")]
    save_top_k: Annotated[int, integer(1, 1)]
    every_n_steps: Annotated[int | None, integer(1, 100).or_null()]
    sharded: Flag
    background: Flag


@dataclass(frozen=True)
class Exact:
    """Bit-identical results on any number of processes."""

    logical_ranks: Annotated[int | None, validators.POWER_OF_TWO]
    threads: Annotated[int, integer(1, 1, high=1024)]
    digests: Flag


@dataclass(frozen=True)
class Request:
    """The options of predict.py."""

    input: Annotated[str, validators.INPUT]
    output: Annotated[str | None, validators.PATH.or_null()]
    overwrite: Flag
    top_k: Annotated[int, integer(1, 5)]
    probabilities: Flag
    gallery: Flag
    part: str | None = None  # the split of the run's own data that `input` names


@dataclass(frozen=True)
class RunConfig:
    """The full definition of a run: what it trains, on what, how and where. Immutable: `replace` returns a changed copy."""

    task: Component
    model: Component
    data: Component
    loader: Loader | None  # None for data with its own dataloaders
    augment: Components
    strategy: Component
    trainer: Trainer
    optim: Component
    schedule: Component
    callbacks: Components
    logger: Components
    checkpoint: Checkpoint
    exact: Exact
    seed: Annotated[int | None, integer(0, 0, high=2**32 - 1).or_null()]  # the largest seed of NumPy's generators
    run: Annotated[str | None, validators.NAME]
    runs_dir: Annotated[str, validators.PATH]
    resume: Annotated[str | None, validators.TRAINED]
    init_from: Annotated[str | None, validators.TRAINED]
    debug_rank: Annotated[int | None, integer(0, 1, "a rank").or_null()]
    compile: Flag
    channels_last: Flag
    tf32: Flag
    values: dict[str, Any] = field(repr=False)  # all of it as a tree of plain values, as in YAML and checkpoints

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "RunConfig":
        """The config of a tree of plain values."""
        values = {item.name: values[item.name] for item in fields(cls) if item.name != "values"}

        def part(name: str, value: Any) -> Any:
            if name in COMPONENTS:
                return Component.of(value)
            if name in SEVERAL:
                return {key: Component.of(node) for key, node in value.items()}
            return (CLOSED[name](**value) if value else None) if name in CLOSED else value

        return cls(**{name: part(name, value) for name, value in values.items()}, values=values)

    def get(self, key: str) -> Any:
        """The value of `<key>` or `<group>.<key>`."""
        group, _, name = key.partition(".")
        return self.values[group].get(name) if name else self.values[group]

    def replace(self, values: Mapping[str, Any]) -> "RunConfig":
        """A copy with new values of dotted keys."""
        tree = {**self.values}
        for key, value in values.items():
            *path, name = key.split(".")
            node = tree
            for part in path:
                node[part] = node = {**node[part]}
            node[name] = value
        return RunConfig.of(tree)


COMPONENTS = ("task", "model", "data", "strategy", "optim", "schedule")
SEVERAL = ("augment", "callbacks", "logger")  # groups of named components
# Groups with a fixed set of keys.
CLOSED: dict[str, type[Any]] = {"loader": Loader, "trainer": Trainer, "checkpoint": Checkpoint, "exact": Exact}


def annotated(group: type[Any], prefix: str = "") -> Iterator[tuple[str, Validator]]:
    """The keys of a group with their validators."""
    for name, hint in get_type_hints(group, include_extras=True).items():
        for kind in getattr(hint, "__metadata__", ()):
            yield prefix + name, kind
