"""The values that each config key accepts: a test, a description, an example. Free of torch, like all checks of a config."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PRECISIONS = ("auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true", "32", "64", "16", "bf16")
RUN_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*(/[A-Za-z0-9][\w.+-]*)*")


@dataclass(frozen=True)
class Kind:
    """What a key takes: a test, its description, and an example to type."""

    accepts: Callable[[Any], bool]
    takes: str
    example: str

    def or_auto(self) -> "Kind":
        return Kind(lambda v: v == "auto" or self.accepts(v), f"{self.takes}, or auto", self.example)

    def or_null(self) -> "Kind":
        return Kind(lambda v: v is None or self.accepts(v), f"{self.takes}, or null", self.example)


def whole(low: int, example: int, what: str = "a whole number") -> Kind:
    return Kind(lambda v: type(v) is int and v >= low, f"{what} of at least {low}", str(example))


def number(low: float, example: float | str, *, above: bool = False, below: float | None = None) -> Kind:
    def accepts(v: Any) -> bool:
        good = type(v) in (int, float) and (v > low if above else v >= low)
        return bool(good and (below is None or v < below))

    text = f"a number {'above' if above else 'of at least'} {low:g}" + (f" and below {below:g}" if below else "")
    return Kind(accepts, text, str(example))


def one_of(*values: Any, example: Any = None) -> Kind:
    shown = ", ".join("null" if v is None else str(v).lower() if isinstance(v, bool) else str(v) for v in values)
    return Kind(
        lambda v: any(v == a and type(v) is type(a) for a in values), f"one of {shown}", str(example or values[0])
    )


def is_batches(v: Any) -> bool:
    return (type(v) is int and v >= 0) or (type(v) is float and 0 <= v <= 1)


def is_devices(v: Any) -> bool:
    if type(v) is int:
        return v == -1 or v > 0
    if isinstance(v, list):
        return len(v) > 0 and all(type(i) is int and i >= 0 for i in v) and len(set(v)) == len(v)
    return v == "auto" or bool(re.fullmatch(r"\d+(,\d+)*,?", str(v)))


def is_channels(v: Any) -> bool:
    return v == "model" or (isinstance(v, list) and len(v) in (1, 3) and all(type(x) in (int, float) for x in v))


FLAG = one_of(True, False, example="true")
TEXT = Kind(lambda v: isinstance(v, str) and v != "", "a text", "name")
BATCHES = Kind(is_batches, "a number of batches (an integer) or a share of them (0.0 to 1.0)", "10").or_null()
MONITOR = Kind(TEXT.accepts, "the name of a validation figure", "val/loss").or_null()

# Keys that Lockstep reads itself. A node with a `_target_` passes other keys on to its class.
KEYS: dict[str, Kind] = {
    "seed": whole(0, 0).or_null(),
    "run": Kind(
        lambda v: type(v) in (str, int) and bool(RUN_NAME.fullmatch(str(v))),
        "a name of letters, digits and . _ - +",
        "first",
    ).or_null(),
    "runs_dir": TEXT,
    "resume": TEXT.or_null(),
    "init_from": TEXT.or_null(),
    "compile": FLAG,
    "channels_last": FLAG,
    "tf32": FLAG,
    "task.monitor": MONITOR,
    "task.mode": one_of("max", "min"),
    "checkpoint.monitor": MONITOR,
    "checkpoint.mode": one_of("max", "min"),
    "checkpoint.save_top_k": whole(1, 1),
    "checkpoint.every_n_steps": whole(1, 100).or_null(),
    "checkpoint.sharded": FLAG,
    "checkpoint.background": FLAG,
    "data.root": TEXT,
    "data.source": one_of("auto", "disk", "download", "embedded"),
    "data.cache_dir": TEXT.or_null(),
    "data.batch_size": whole(1, 64),
    "data.eval_batch_size": whole(1, 1000),
    "data.image_size": whole(1, 224, "a whole number of pixels"),
    "data.mean": Kind(is_channels, "`model`, or one number for each channel", "[0.1307]"),
    "data.std": Kind(is_channels, "`model`, or one number for each channel", "[0.3081]"),
    "data.val_fraction": number(0, 0.1, above=True, below=1),
    "data.test_fraction": number(0, 0.1, above=True, below=1),
    "data.csv": TEXT.or_null(),
    "data.channels": one_of(1, 3, example=3),
    "data.decode": one_of("auto", "cache", "workers"),
    "data.skip_broken": FLAG,
    "data.limit_train": whole(1, 1000).or_null(),
    "data.channels_last": FLAG,
    "data.random_shift": whole(0, 4, "a whole number of pixels"),
    "data.random_flip": FLAG,
    "data.num_workers": Kind(
        lambda v: v == "auto" or (type(v) is int and v >= 0), "a whole number of at least 0, or auto", "4"
    ),
    "data.on_device": one_of(True, False, "auto", example="false"),
    "data.prefetch_factor": whole(1, 4).or_null(),
    "data.persistent_workers": one_of(True, False, None, example="true"),
    "trainer.accelerator": one_of("auto", "cpu", "gpu", "cuda", "mps"),
    "trainer.devices": Kind(is_devices, "a number of devices, auto, -1 for all, or a list of device ids", "2"),
    "trainer.num_nodes": whole(1, 2),
    "trainer.precision": Kind(lambda v: str(v) in PRECISIONS, f"one of {', '.join(PRECISIONS[:7])}", "bf16-mixed"),
    "trainer.max_epochs": whole(-1, 5).or_null(),
    "trainer.min_epochs": whole(0, 1).or_null(),
    "trainer.max_steps": whole(-1, 200),
    "trainer.min_steps": whole(0, 100).or_null(),
    "trainer.max_time": Kind(
        lambda v: isinstance(v, dict) or bool(re.fullmatch(r"\d+:\d\d:\d\d:\d\d", str(v))),
        "days:hours:minutes:seconds",
        "00:01:30:00",
    ).or_null(),
    "trainer.limit_train_batches": BATCHES,
    "trainer.limit_val_batches": BATCHES,
    "trainer.limit_test_batches": BATCHES,
    "trainer.val_check_interval": Kind(
        is_batches, "a number of batches (an integer) or a share of an epoch (0.0 to 1.0)", "0.5"
    ).or_null(),
    "trainer.check_val_every_n_epoch": whole(1, 1).or_null(),
    "trainer.num_sanity_val_steps": whole(-1, 2).or_null(),
    "trainer.log_every_n_steps": whole(1, 50),
    "trainer.enable_checkpointing": FLAG,
    "trainer.enable_progress_bar": FLAG,
    "trainer.enable_model_summary": FLAG,
    "trainer.accumulate_grad_batches": whole(1, 2).or_auto(),
    "trainer.gradient_clip_val": number(0, 1.0, above=True).or_null(),
    "trainer.gradient_clip_algorithm": one_of("norm", "value", None),
    "trainer.deterministic": one_of(True, False, "warn", None, example="true"),
    "trainer.benchmark": one_of(True, False, None, example="true"),
    "trainer.inference_mode": FLAG,
    "trainer.profiler": one_of("simple", "advanced", "pytorch", None),
    "trainer.detect_anomaly": FLAG,
    "trainer.sync_batchnorm": FLAG,
    "trainer.reload_dataloaders_every_n_epochs": whole(0, 0),
    # keys of groups with a `_target_`: other keys go to the class
    "optim.lr": number(0, "1e-3"),
    "optim.fused": one_of(True, False, "auto", example="true"),
    "optim.weight_decay": number(0, 0.01),
    "optim.momentum": number(0, 0.9, below=1),
    "schedule.warmup_steps": whole(0, 100),
    "callbacks.early_stopping.patience": whole(1, 3),
    "callbacks.early_stopping.min_delta": number(0, 0.001),
    "callbacks.ema.decay": number(0, 0.999, below=1),
    "callbacks.ema.update_every_n_steps": whole(1, 1),
    "callbacks.ema.warmup": FLAG,
    "schedule.final_fraction": number(0, 0.01),
    "schedule.gamma": number(0, 0.1, above=True),
    "model.name": TEXT,
    "model.dropout_conv": number(0, 0.25, below=1),
    "model.dropout_fc": number(0, 0.5, below=1),
    "model.pretrained": FLAG,
    "model.checkpoint_path": TEXT.or_null(),
    "strategy.name": TEXT,
    "strategy.bucket_cap_mb": number(0, 25, above=True),
    "strategy.gradient_as_bucket_view": FLAG,
    "strategy.static_graph": FLAG,
    "strategy.find_unused_parameters": FLAG,
    "strategy.comm_hook": one_of("fp16", "bf16", "powersgd", None),
    "strategy.reshard_after_forward": FLAG,
    "strategy.reduce_each_micro_batch": FLAG,
    "strategy.timeout_s": number(0, 1800, above=True),
    "strategy.blocks": Kind(
        lambda v: v == "auto" or (isinstance(v, list) and all(isinstance(b, str) for b in v)),
        "auto, or a list of class names",
        "[Bottleneck]",
    ),
}
GROUPS = (
    "task",
    "model",
    "data",
    "strategy",
    "trainer",
    "optim",
    "schedule",
    "callbacks",
    "logger",
    "checkpoint",
    "experiment",
    "debug",
)
CLOSED = ("trainer", "checkpoint")  # groups without a `_target_`, which take no other keys
