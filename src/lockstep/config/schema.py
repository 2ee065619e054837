"""The keys of a config, and what each accepts. Free of torch, like all checks of a config."""

from lockstep.config import validators
from lockstep.config.run_config import CLOSED, Request, RunConfig, annotated
from lockstep.config.validators import FLAG, MONITOR, PATH, SHARE, TEXT, Validator, integer, number, numbers, one_of

CLASS_NAMES = Validator(
    lambda v: isinstance(v, list) and all(map(validators.is_text, v)), "a list of class names", "[Bottleneck]"
)
# Keys that are true or false.
FLAGS = (
    "data.skip_broken", "data.channels_last", "optim.nesterov", "optim.no_decay", "callbacks.ema.warmup",
    "logger.wandb.log_model", "logger.mlflow.log_model", "model.pretrained", "strategy.gradient_as_bucket_view", "strategy.static_graph",
    "strategy.find_unused_parameters", "strategy.reshard_after_forward", "strategy.reduce_each_micro_batch",
)  # fmt: skip
# Keys of shipped components. Any other key of a component is passed on to its class.
OF_COMPONENTS: dict[str, Validator] = {
    **dict.fromkeys(FLAGS, FLAG),
    "task.monitor": MONITOR,
    "task.mode": one_of("max", "min"),
    "data.root": PATH,
    "data.source": one_of("auto", "disk", "download", "embedded"),
    "data.cache_dir": PATH.or_null(),
    "data.image_size": integer(1, 224, "a whole number of pixels", 2**15),
    "data.eval_size": integer(1, 224, "a whole number of pixels", 2**15).or_null(),
    "data.resize": one_of("model", "crop", "pad", "squash"),
    "data.crop_pct": number(0.05, 0.875, high=2).or_word("model"),
    "data.interpolation": one_of("model", "bilinear", "bicubic"),
    "data.presize": number(1, 2, high=2**10).or_null(),
    "data.mean": validators.CHANNELS,
    "data.std": validators.CHANNELS,
    "data.test_fraction": number(0, 0.1, above=True, below=1),
    "data.csv": PATH.or_null(),
    "data.channels": one_of(1, 3, example=3),
    "data.decode": one_of("auto", "cache", "workers"),
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
    "task.huber_delta": number(0, 1, above=True),
    "task.dice": number(0, 1),
    "task.ignore_index": integer(-validators.MAX_INTEGER, 255),
    "schedule.warmup_steps": validators.STEPS,
    "callbacks.early_stopping.patience": integer(1, 3),
    "callbacks.early_stopping.min_delta": number(0, 0.001),
    "callbacks.ema.decay": number(0, 0.999, below=1),
    "callbacks.ema.update_every_n_steps": integer(1, 1),
    "callbacks.early_stopping.monitor": MONITOR,
    "callbacks.early_stopping.mode": one_of("max", "min"),
    "callbacks.early_stopping.check_on_train_epoch_end": one_of(True, False, None, example="false"),
    "logger.wandb.mode": one_of("auto", "online", "offline"),
    "schedule.initial_fraction": SHARE,
    "schedule.final_fraction": SHARE,
    "schedule.milestones": numbers(SHARE, "[0.5,0.75]", rising=True),
    "schedule.gamma": number(0, 0.1, above=True),
    "model.name": TEXT,
    "model.dropout_conv": number(0, 0.25, below=1),
    "model.dropout_fc": number(0, 0.5, below=1),
    "model.checkpoint_path": PATH.or_null(),
    "strategy.name": TEXT,
    "strategy.bucket_cap_mb": number(0, 25, above=True, high=1e6),
    "strategy.comm_hook": one_of("fp16", "bf16", None),
    "strategy.timeout_s": validators.TIMEOUT,
    "strategy.blocks": CLASS_NAMES.or_word("auto"),
}
# All keys that Lockstep reads itself.
KEYS: dict[str, Validator] = {
    **dict(annotated(RunConfig)),
    **{key: kind for name, group in CLOSED.items() for key, kind in annotated(group, f"{name}.")},
    **OF_COMPONENTS,
}
EVALUATE = {"checkpoint": PATH.or_null()}  # keys of eval.py and predict.py, at the top level
PREDICT = dict(annotated(Request))  # keys of predict.py alone, at the top level
GROUPS = (
    "task", "model", "data", "loader", "augment", "strategy", "trainer", "optim", "schedule", "callbacks", "logger", "checkpoint", "exact",
    "experiment", "debug",
)  # fmt: skip
RECIPES = ("experiment", "debug")  # groups that only set keys of other groups
OPTIONAL = ("model", "optim", "schedule")  # groups that may be `none`
NEEDED = {"task": ("monitor", "mode"), "strategy": ("name",)}  # keys of components that the engine reads itself
