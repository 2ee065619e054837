"""The values that each config key accepts. Free of torch, like all checks of a config."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError

from lockstep.config.words import plain, shown

# --- Kinds of values that config keys accept: a test, a description, an example to type. Free of torch ---

MOST = 2**63 - 1  # what the libraries' integers hold
LONGEST = 255  # bytes in a name of a file
TIME_UNITS = ("weeks", "days", "hours", "minutes", "seconds")  # timedelta's
RUN_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*(/[A-Za-z0-9][\w.+-]*)*")


@dataclass(frozen=True)
class Kind:
    """What a key takes: a test, its description, and an example to type."""

    accepts: Callable[[Any], bool]
    takes: str
    example: str

    def or_word(self, word: str | None) -> "Kind":
        return Kind(lambda v: v == word or self.accepts(v), f"{self.takes}, or {shown(word)}", self.example)

    def or_null(self) -> "Kind":
        return self.or_word(None)


def whole(low: int, example: int, what: str = "a whole number", high: int = MOST) -> Kind:
    text = f"{what} of at least {low}" + (f" and at most {high}" if high < MOST else "")
    return Kind(lambda v: type(v) is int and low <= v <= high, text, str(example))


def counted(example: int) -> Kind:
    """A number of epochs or steps; -1 is no limit. 0 would train nothing."""
    return Kind(
        lambda v: type(v) is int and (v == -1 or 1 <= v <= MOST),
        "a whole number of at least 1, or -1 for no limit",
        str(example),
    )


def is_number(v: Any) -> bool:
    """A number that a float holds: neither infinite nor too large."""
    return (type(v) is int and abs(v) <= MOST) or (type(v) is float and math.isfinite(v))


def number(
    low: float, example: float | str, *, above: bool = False, below: float = math.inf, high: float = math.inf
) -> Kind:
    """A finite number within bounds: `above` excludes `low`, `below` is excluded, `high` is not."""

    def accepts(v: Any) -> bool:
        return is_number(v) and (v > low if above else v >= low) and v < below and v <= high

    bounds = [f"{'above' if above else 'of at least'} {low:g}", *([f"below {below:g}"] if below < math.inf else ()),
              *([f"at most {high:g}"] if high < math.inf else ())]  # fmt: skip
    return Kind(accepts, f"a number {' and '.join(bounds)}", str(example))


def numbers(each: Kind, example: str, count: int | None = None, *, rising: bool = False) -> Kind:
    def accepts(v: Any) -> bool:
        good = isinstance(v, list) and count in (None, len(v)) and all(map(each.accepts, v))
        return good and (not rising or v == sorted(set(v)))

    takes = each.takes.removeprefix("a number ")
    return Kind(
        accepts, f"a list of {'rising ' if rising else ''}{count or ''} numbers {takes}".replace("  ", " "), example
    )


def one_of(*values: Any, example: Any = None) -> Kind:
    takes = f"one of {', '.join(map(shown, values))}"
    return Kind(lambda v: any(v == a and type(v) is type(a) for a in values), takes, str(example or values[0]))


def is_batches(v: Any) -> bool:
    return (type(v) is int and 0 <= v <= MOST) or (type(v) is float and 0 <= v <= 1)


def is_devices(v: Any) -> bool:
    if type(v) is int:
        return v == -1 or v > 0
    if isinstance(v, list):
        return len(v) > 0 and all(type(i) is int and i >= 0 for i in v) and len(set(v)) == len(v)
    return v == "auto" or bool(re.fullmatch(r"\d+(,\d+)*,?", str(v)))


def is_duration(v: Any) -> bool:
    """Lightning's `max_time`: above 0, and short enough for a timedelta."""
    if isinstance(v, dict):
        return set(v) <= set(TIME_UNITS) and all(is_number(n) and 0 <= n < 1e6 for n in v.values()) and any(v.values())
    return bool(re.fullmatch(r"\d{1,6}:\d\d:\d\d:\d\d", str(v))) and any(char in "123456789" for char in str(v))


def is_text(v: Any) -> bool:
    """Also a path: each name in it can be one of a file, and UTF-8, as the config is saved."""
    is_utf8 = isinstance(v, str) and v != "" and "\0" not in v and v.encode(errors="replace").decode() == v
    return is_utf8 and all(len(n.encode()) <= LONGEST for n in v.split("/"))


def is_texts(v: Any) -> bool:
    return isinstance(v, list) and all(map(is_text, v))


def is_unfrozen(v: Any) -> bool:
    pairs = isinstance(v, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in v)
    return pairs and all(is_text(pattern) and whole(0, 1).accepts(epoch) for pattern, epoch in v)


# --- The keys ---

PRECISIONS = ("auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true", "32", "64", "16", "bf16")

FLAG = one_of(True, False, example="true")
TEXT = Kind(is_text, f"a text in UTF-8, with at most {LONGEST} bytes between slashes", "name")
TRAINED = Kind(
    lambda v: type(v) in (str, int) and is_text(str(v)), "the name of a run or the path of a checkpoint", "first"
).or_null()
BATCHES = Kind(is_batches, "a number of batches (an integer) or a fraction of them (0.0 to 1.0)", "10").or_null()
SHARE = number(0, 0.5, high=1)
TIMEOUT = number(1, 1800, high=1e8)  # seconds; NCCL counts milliseconds, timedelta at most 1e9 days
CHANNELS = Kind(
    lambda v: v == "model" or (isinstance(v, list) and len(v) in (1, 3) and all(map(is_number, v))),
    "`model`, or one number for each channel",
    "[0.5]",
)
MONITOR = Kind(TEXT.accepts, "the name of a validation metric", "val/loss").or_null()

# Keys that are true or false.
FLAGS = (
    "compile", "channels_last", "tf32", "checkpoint.sharded", "checkpoint.background", "exact.digests",
    "data.skip_broken", "data.balance", "data.channels_last", "trainer.enable_checkpointing",
    "trainer.enable_progress_bar", "trainer.enable_model_summary", "trainer.inference_mode", "trainer.detect_anomaly",
    "trainer.sync_batchnorm", "optim.nesterov", "optim.no_decay", "callbacks.ema.warmup", "logger.wandb.log_model",
    "logger.mlflow.log_model", "model.pretrained", "strategy.gradient_as_bucket_view", "strategy.static_graph",
    "strategy.find_unused_parameters", "strategy.reshard_after_forward", "strategy.reduce_each_micro_batch",
)  # fmt: skip
# Keys that Lockstep reads itself. A node with a `_target_` passes other keys on to its class.
KEYS: dict[str, Kind] = {
    **dict.fromkeys(FLAGS, FLAG),
    "seed": whole(0, 0, high=2**32 - 1).or_null(),  # NumPy's generators take no larger one
    "run": Kind(
        lambda v: type(v) in (str, int) and bool(RUN_NAME.fullmatch(str(v))) and is_text(str(v)),
        f"a name of letters, digits and . _ - + with at most {LONGEST} of them between slashes",
        "first",
    ).or_null(),
    "runs_dir": TEXT,
    "resume": TRAINED,
    "init_from": TRAINED,
    "debug_rank": whole(0, 1, "the number of a rank").or_null(),
    "task.monitor": MONITOR,
    "task.mode": one_of("max", "min"),
    "checkpoint.monitor": MONITOR,
    "checkpoint.mode": one_of("max", "min"),
    "checkpoint.save_top_k": whole(1, 1),
    "checkpoint.every_n_steps": whole(1, 100).or_null(),
    "exact.logical_ranks": Kind(
        lambda v: type(v) is int and 1 <= v <= 1024 and v.bit_count() == 1, "a power of two, up to 1024", "8"
    ).or_null(),
    "exact.threads": whole(1, 1, high=1024),
    "data.root": TEXT,
    "data.source": one_of("auto", "disk", "download", "embedded"),
    "data.cache_dir": TEXT.or_null(),
    "data.batch_size": whole(1, 64),
    "data.eval_batch_size": whole(1, 1000),
    "data.image_size": whole(1, 224, "a whole number of pixels", 2**15),
    "data.eval_size": whole(1, 224, "a whole number of pixels", 2**15).or_null(),
    "data.resize": one_of("model", "crop", "pad", "squash"),
    "data.crop_pct": number(0.05, 0.875, high=2).or_word("model"),
    "data.interpolation": one_of("model", "bilinear", "bicubic"),
    "data.presize": number(1, 2, high=2**10).or_null(),
    "data.mean": CHANNELS,
    "data.std": CHANNELS,
    "data.val_fraction": number(0, 0.1, above=True, below=1),
    "data.val_gap": whole(0, 24).or_null(),
    "data.test_fraction": number(0, 0.1, above=True, below=1),
    "data.csv": TEXT.or_null(),
    "data.channels": one_of(1, 3, example=3),
    "data.decode": one_of("auto", "cache", "workers"),
    "data.folds": whole(2, 5).or_null(),
    "data.fold": whole(0, 0),
    "data.limit_train": whole(1, 1000).or_null(),
    "data.repeats": whole(1, 2),
    "data.num_workers": whole(0, 4, high=1024).or_word("auto"),
    "data.on_device": one_of(True, False, "auto", example="false"),
    "data.prefetch_factor": whole(1, 4).or_null(),
    "data.persistent_workers": one_of(True, False, None, example="true"),
    "trainer.accelerator": one_of("auto", "cpu", "gpu", "cuda", "mps"),
    "trainer.devices": Kind(is_devices, "a number of devices, auto, -1 for all, or a list of device ids", "2"),
    "trainer.num_nodes": whole(1, 2),
    "trainer.precision": Kind(lambda v: str(v) in PRECISIONS, f"one of {', '.join(PRECISIONS[:7])}", "bf16-mixed"),
    "trainer.max_epochs": counted(5).or_null(),
    "trainer.min_epochs": whole(0, 1).or_null(),
    "trainer.max_steps": counted(200),
    "trainer.min_steps": whole(0, 100).or_null(),
    "trainer.max_time": Kind(
        is_duration, f"days:hours:minutes:seconds above 0, or numbers of {', '.join(TIME_UNITS)}", "00:01:30:00"
    ).or_null(),
    "trainer.limit_train_batches": BATCHES,
    "trainer.limit_val_batches": BATCHES,
    "trainer.limit_test_batches": BATCHES,
    "trainer.val_check_interval": Kind(
        lambda v: is_batches(v) and v > 0,
        "a number of batches (an integer) or a fraction of an epoch (up to 1.0), above 0",
        "0.5",
    ).or_null(),
    "trainer.check_val_every_n_epoch": whole(1, 1).or_null(),
    "trainer.num_sanity_val_steps": whole(-1, 2).or_word("auto").or_null(),
    "trainer.log_every_n_steps": whole(1, 50).or_word("auto"),
    "trainer.accumulate_grad_batches": whole(1, 2).or_word("auto"),
    "trainer.gradient_clip_val": number(0, 1.0, above=True).or_null(),
    "trainer.gradient_clip_algorithm": one_of("norm", "value", None),
    "trainer.deterministic": one_of(True, False, "warn", None, example="true"),
    "trainer.benchmark": one_of(True, False, None, example="true"),
    "trainer.profiler": one_of("simple", "advanced", "pytorch", None),
    "trainer.reload_dataloaders_every_n_epochs": whole(0, 0),
    # keys of groups with a `_target_`: other keys go to the class
    "optim.lr": number(0, "1e-3"),
    "optim.fused": one_of(True, False, "auto", example="true"),
    "optim.weight_decay": number(0, 0.01),
    "optim.momentum": number(0, 0.9, below=1),
    "optim.betas": numbers(number(0, 0.9, below=1), "[0.9,0.999]", 2),
    "optim.eps": number(0, "1e-8"),
    "optim.layer_decay": number(0, 0.75, above=True, high=1).or_null(),
    "optim.head_lr": number(0, "1e-3").or_null(),
    "task.label_smoothing": number(0, 0.1, below=1),
    "task.class_weights": numbers(number(0, 1), "[1,2]").or_word("balanced").or_null(),
    "task.pos_weight": numbers(number(0, 1), "[1,2]").or_null(),
    "task.threshold": number(0, 0.5, above=True, below=1),
    "task.loss": TEXT,
    "task.huber_delta": number(0, 1, above=True),
    "task.dice": number(0, 1),
    "task.ignore_index": whole(-MOST, 255),
    "schedule.warmup_steps": whole(0, 100),
    "callbacks.early_stopping.patience": whole(1, 3),
    "callbacks.early_stopping.min_delta": number(0, 0.001),
    "callbacks.ema.decay": number(0, 0.999, below=1),
    "callbacks.ema.update_every_n_steps": whole(1, 1),
    "callbacks.early_stopping.monitor": MONITOR,
    "callbacks.early_stopping.mode": one_of("max", "min"),
    "callbacks.early_stopping.check_on_train_epoch_end": one_of(True, False, None, example="false"),
    "callbacks.freeze.parameters": Kind(
        lambda v: is_text(v) or (is_texts(v) and v != []), "body, or patterns of parameter names", "[layer1.*]"
    ),
    "callbacks.freeze.unfreeze": Kind(
        is_unfrozen, "pairs of a pattern of parameter names and an epoch", "[[layer4.*,1]]"
    ),
    "logger.wandb.mode": one_of("auto", "online", "offline"),
    "schedule.initial_fraction": SHARE,
    "schedule.final_fraction": SHARE,
    "schedule.milestones": numbers(SHARE, "[0.5,0.75]", rising=True),
    "schedule.gamma": number(0, 0.1, above=True),
    "model.name": TEXT,
    "model.dropout_conv": number(0, 0.25, below=1),
    "model.dropout_fc": number(0, 0.5, below=1),
    "model.checkpoint_path": TEXT.or_null(),
    "strategy.name": TEXT,
    "strategy.bucket_cap_mb": number(0, 25, above=True, high=1e6),
    "strategy.comm_hook": one_of("fp16", "bf16", "powersgd", None),
    "strategy.timeout_s": TIMEOUT,
    "strategy.blocks": Kind(is_texts, "a list of class names", "[Bottleneck]").or_word("auto"),
}
# Keys of predict.py alone, at the top level.
PREDICT: dict[str, Kind] = {
    "input": Kind(
        lambda v: isinstance(v, str) and v != "" and "\0" not in v,
        "a folder, a glob, a CSV, a file, or one of test, val, train",
        "photos",
    ),
    "output": TEXT.or_null(),
    "overwrite": FLAG,
    "top_k": whole(1, 5),
    "probabilities": FLAG,
    "gallery": FLAG,
}
GROUPS = (
    "task", "model", "data", "augment", "strategy", "trainer", "optim", "schedule", "callbacks", "logger", "checkpoint", "exact",
    "experiment", "debug",
)  # fmt: skip
CLOSED = ("trainer", "checkpoint", "exact")  # groups without a `_target_`, which take no other keys
RECIPES = ("experiment", "debug")  # groups that only set keys of other groups
SEVERAL = ("augment", "callbacks", "logger")  # groups of named nodes
OPTIONAL = ("model", "optim", "schedule")  # groups that may be `none`
# Keys of other groups that the engine reads itself.
NEEDED = {"task": ("monitor", "mode"), "data": ("batch_size",), "strategy": ("name",)}


# --- The values of a config ---

SHIPPED = ("lockstep.", "torch.optim.", "lightning.pytorch.callbacks.", "lightning.pytorch.loggers.")


def is_shipped(node: Mapping[Any, Any]) -> bool:
    """Whether a node names a class that comes with Lockstep. Its keys are known without importing it."""
    return str(node.get("_target_")).startswith(SHIPPED)


def wrong_values(cfg: DictConfig, keys: Iterable[str] | None = None) -> Iterator[str]:
    """Problems of `keys`. Without them: of all KEYS, except those of a class of the user's, whose signature decides."""
    asked = [key.rpartition(".") for key in (KEYS if keys is None else keys)]
    there = {group for group, *_ in asked if isinstance(cfg.get(group.partition(".")[0]), DictConfig)}
    nodes = {"": cfg, **{group: OmegaConf.select(cfg, group) for group in there}}
    for group, dot, name in asked:
        node, key = nodes.get(group), group + dot + name
        if not isinstance(node, DictConfig) or name not in list(node.keys()):  # `in` denies missing ones
            continue
        if keys is None and "_target_" in node and not is_shipped(node):
            continue
        yield from problem_of(node, name, key, KEYS[key])


def problem_of(node: DictConfig, name: str, key: str, kind: Kind) -> Iterator[str]:
    """The problem of the value `name` of a node, if there is one; `key` is its place in the config."""
    if OmegaConf.is_missing(node, name):
        yield f"{key} is missing; set {key}=<{name}>."
        return
    written = OmegaConf.to_container(node, resolve=False)[name]  # type: ignore[index, call-overload]
    try:
        value = plain(node[name])
    except InterpolationResolutionError:
        yield f"{key}={written} refers to a key that is not in the config. Set that key, or {key}."
        return
    refers = KEYS.get(written[2:-1]) if OmegaConf.is_interpolation(node, name) else None
    if not kind.accepts(value) and (refers is None or refers.accepts(value)):  # otherwise that key is reported
        given = f"{shown(value)}, from {written}," if value != written else shown(value)
        yield f"{key}={given} is invalid; expected {kind.takes}, for example {key}={kind.example}."
