"""Command lines that cannot work, by family, for refused.py: damaged data files, named ones, and ones made from the schema's keys.

The last entries of each family's list come from general rules (`every key, removed`), so a new key is tried without a new line here.
"""

import gzip
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

from lockstep.config.schema import FLAG, KEYS, TEXT


@dataclass(frozen=True)
class Case:
    """A command line of train.py. `key` must be in the message; `works` says that it has to be accepted instead, `may_work` that it may be."""

    family: str
    args: tuple[str, ...]
    key: str
    files: dict[str, bytes] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    what: str = ""  # is in the files
    works: bool = False
    may_work: bool = False

    @property
    def shown(self) -> str:
        return self.name[:150]

    @property
    def name(self) -> str:
        env = [f"{name}={value}" for name, value in self.env.items()]
        return " ".join([*env, *self.args]) + (f" ({self.what})" if self.what else "")


def idx(count: int, *shape: int, kind: int = 8) -> bytes:
    """An idx file of `count` things of `shape`."""
    sizes = b"".join(n.to_bytes(4, "big") for n in (count, *shape))
    return bytes([0, 0, kind, 1 + len(shape)]) + sizes + bytes(i % 10 for i in range(count * math.prod(shape)))


NAMES = {"train": "train-images-idx3", "test": "t10k-images-idx3", "train_labels": "train-labels-idx1", "test_labels": "t10k-labels-idx1"}  # fmt: skip


def digits(**other: bytes) -> dict[str, bytes]:
    """MNIST's files, in a folder `own`."""
    good = {"train": idx(64, 12, 12), "test": idx(32, 12, 12), "train_labels": idx(64), "test_labels": idx(32)}
    return {f"own/{NAMES[part]}-ubyte": content for part, content in (good | other).items()}


def picture(side: int = 8) -> bytes:
    return b"P6 %d %d 255\n" % (side, side) + bytes(side * side * 3)


def pictures(**other: bytes) -> dict[str, bytes]:
    """A folder of two classes; `other` by file name, of class `a`."""
    found = {f"own/{part}/{kind}/{i}.ppm": picture() for part in ("train", "test") for kind in "ab" for i in range(32)}
    return found | {f"own/train/a/{name}.ppm": content for name, content in other.items()}


def data() -> Iterator[Case]:
    own, family = ("data.root=own",), "data files"
    for what, files, named in (
        ("test images of another size", digits(test=idx(32, 14, 14)), "t10k-images"),
        ("no test images", digits(test=idx(0, 12, 12), test_labels=idx(0)), "t10k-images"),
        ("no training images", digits(train=idx(0, 12, 12), train_labels=idx(0)), "train-images"),
        ("images of 0 pixels", digits(train=idx(64, 0, 12), test=idx(32, 0, 12)), "train-images"),
        ("a dimension that is gigantic", digits(train=bytes([0, 0, 8, 3]) + b"\xff" * 12), "train-images"),
        ("labels above 9", digits(train_labels=idx(64)[:8] + bytes([200]) * 64), "train-labels"),
        ("fewer labels", digits(train_labels=idx(63)), "train-labels"),
        ("numbers of another kind", digits(train=idx(64, 12, 12, kind=9)), "train-images"),
        ("a cut-off file", digits(train=idx(64, 12, 12)[:500]), "train-images"),
        ("an empty file", digits(train=b""), "train-images"),
        ("a file of text", digits(train=b"hello"), "train-images"),
        ("bytes that follow", digits(train=idx(64, 12, 12) + b"x"), "train-images"),
    ):
        yield Case(family, own, named, files, what=what)
    packed = {f"{name}.gz": gzip.compress(content) for name, content in digits().items()}
    name = "own/train-images-idx3-ubyte.gz"
    bomb = gzip.compress(idx(64, 12, 12)) + gzip.compress(bytes(2**24)) * 256  # 4 GB
    for what, content in {
        "a bomb": bomb, "cut off": packed[name][:-9], "cut off early": packed[name][:20], "a wrong checksum": packed[name][:-6] + bytes(6),
        "two bytes": b"\x1f\x8b", "nothing": b"", "text": b"text" * 99,
    }.items():  # fmt: skip
        yield Case(family, own, "train-images", {**packed, name: content}, what=f"archive: {what}")
    yield Case(family, own, "", packed, what="archives", works=True)
    yield Case(family, own, "own", {"own": b"a file"}, what="data.root is a file")
    folder = ("data=folder", "data.root=own")
    yield Case(family, folder, "", pictures(), what="good", works=True)
    for content in (b"", b"text", picture()[:50], b"P6 0 0 255\n", b"P6 99999 99999 255\n" + bytes(50)):
        yield Case(family, folder, "broken.ppm", pictures(broken=content), what=f"a file of {content[:15]!r}")
    for table in (b"", b"path,target", b"a,b\n1,2", b"path,target\nnothing.ppm,a\n", b"path,target\n,\n", b"\xff\xfe\0\0",
                  b"path,target,split\ntrain/a/0.ppm,a,abc\n", b"path,target\ntrain/a/0.ppm\n", b"path,target\n\0\n",
                  b"path,target,split\ntrain/a/0.ppm,a,test\n", b"path,target\ntrain/a/0.ppm,a\n", b'path,target\n"' + b"x" * 200_000):  # fmt: skip
        found = {**pictures(), "own/list.csv": table}
        yield Case(family, (*folder, "data.csv=list.csv"), "list.csv", found, what=repr(table[:50]))
    yield Case(family, folder, "own", {"own/a/0.txt": b"x"}, what="no images")
    yield Case(family, folder, "own", {"own/a/0.ppm": picture()}, what="one class")


# What a key needs to be there.
NEEDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("strategy.bucket_cap_mb", "strategy.gradient_as_bucket_view", "strategy.static_graph",
                     "strategy.find_unused_parameters", "strategy.comm_hook", "strategy.timeout_s"), ("strategy=ddp",)),
    **dict.fromkeys(("strategy.reshard_after_forward", "strategy.blocks"), ("strategy=fsdp",)),
    **dict.fromkeys(("data.csv", "data.channels", "data.decode", "data.skip_broken", "data.test_fraction"),
                    ("data=folder", "data.root=own")),
    **dict.fromkeys(("model.name", "model.pretrained", "model.checkpoint_path"), ("model=timm", "model.name=test_resnet")),
    "schedule.gamma": ("schedule=step",), "schedule.milestones": ("schedule=step",),
    "schedule.final_fraction": ("schedule=cosine",), "optim.momentum": ("optim=sgd",),
    "callbacks.ema.decay": ("callbacks=[ema]",), "callbacks.ema.update_every_n_steps": ("callbacks=[ema]",),
    "callbacks.early_stopping.patience": ("callbacks=[early_stopping]",),
    "callbacks.early_stopping.min_delta": ("callbacks=[early_stopping]",),
}  # fmt: skip
# Keys that may be null, of options that these cases do not choose.
NOT_CHOSEN = (
    "task.pos_weight",
    "callbacks.early_stopping.monitor",
    "callbacks.early_stopping.check_on_train_epoch_end",
)
# Values that are wrong for every key of a kind.
WRONG = {
    "flag": ("abc", "5", "[true]", "null"),
    "text": ("[1]", "{a: 1}", "''", "5.5"),
    "whole number": ("abc", "[1,2]", "-1000", "inf", "0.5", "true", "1e30", "1" + 20 * "0"),
    "number": ("abc", "{a: 1}", "-1", "inf", "nan", "true"),
    "key of another kind": ("{a: {b: 1}}", "''", "[[1]]", "nan"),
}
GROUPS = ("task", "model", "data", "strategy", "trainer", "optim", "schedule", "checkpoint", "exact")
WITHOUT_TARGET = ("trainer", "checkpoint", "exact")
EMPTY = ("callbacks", "logger")  # groups that may be empty


def kind_of(key: str) -> str:
    kind = KEYS[key]
    if kind is FLAG:
        return "flag"
    if kind.takes.startswith(TEXT.takes) or key == "run":
        return "text"
    if kind.takes.startswith("a whole number"):
        return "whole number"
    return "number" if kind.takes.startswith(("a number ab", "a number of at")) else "key of another kind"


def keys() -> Iterator[Case]:
    for key in KEYS:
        needs = NEEDS.get(key, ())
        files = pictures() if "data=folder" in needs else {}
        default = "." in key and not key.startswith(("trainer.", "checkpoint."))  # of the class
        named = "optim:" if key == "optim.momentum" else key  # torch's error
        yield Case("a key is removed", (*needs, f"~{key}"), named, files, may_work=default)
        nullable = KEYS[key].accepts(None) and key not in NOT_CHOSEN
        yield Case("a key is null", (*needs, f"{key}=null"), key, files, works=nullable)
        for value in WRONG[kind_of(key)]:
            if value != "null":
                yield Case(f"a wrong value for a {kind_of(key)}", (*needs, f"{key}={value}"), key, files)


def groups() -> Iterator[Case]:
    for group in (*GROUPS, *EMPTY):
        for override in (f"~{group}", f"{group}=null", f"{group}=5", f"{group}=abc", f"{group}.x=5"):
            yield Case("a group is removed, null or no group", (override,), group)
    for group in (group for group in GROUPS if group not in WITHOUT_TARGET):
        yield Case("a target is removed, null or no class", (f"~{group}._target_",), f"{group}._target_")
        for given in ("null", "5", "[1]", "lockstep.nothing.Here", "nothing.Here", "lockstep", "''"):
            yield Case("a target is removed, null or no class", (f"{group}._target_={given}",), f"{group}._target_")
    for group in EMPTY:
        for value in ("5", "null", "abc", "[1]", "{}", "{a: 1}", "{_target_: 5}", "{_target_: lockstep.nothing.Here}"):
            yield Case("a target is removed, null or no class", (f"+{group}.x={value}",), f"{group}.x")


def names() -> Iterator[Case]:
    for key in list(KEYS)[::2]:
        group, _, name = key.rpartition(".")
        if len(name) > 4:
            needs, wrong = NEEDS.get(key, ()), f"{group}.{name[:-2]}{name[-1]}".lstrip(".")
            yield Case("a name is misspelt", (*needs, f"{wrong}=5"), key, pictures() if "data=folder" in needs else {})
    for group, option in (("model", "resnet50"), ("data", "mnits"), ("optim", "adamww"), ("schedule", "cosin"), ("strategy", "dpp"),
                          ("task", "classificaton"), ("logger", "[csvv]"), ("callbacks", "[emma]"), ("debug", "limits")):  # fmt: skip
        yield Case("a name is misspelt", (f"{group}={option}",), "did you mean")
    for args in (("modle=resnet50d",), ("optimm.lr=1",), ("trainer.max_step=5",), ("+trainer.max_step=5",), ("data.rot=x",),
                 ("experiment=mnist_basic_nett",), ("callbacks=[default,ema]", "callbacks.emma.decay=0.9"), ("+sed=5",)):  # fmt: skip
        yield Case("a name is misspelt", args, "did you mean")


LINES = {
    "an argument of optimizer or schedule": """
        optim.betas=5 | optim.betas=[1,2] | optim.betas=[0.9] | optim.betas=[] | optim.betas=abc | optim.betas=[0.9,0.9,0.9] | optim.betas=[nan,0.9]
        optim.betas=[-1,0.9] | optim.eps=abc | optim.eps=-1 | optim.eps=inf | optim.eps=nan | optim.lr=inf | optim.lr=nan | optim.lr=-1
        optim.lr=[1] | optim.weight_decay=inf | optim.weight_decay=-1 | ~optim.lr | optim=sgd optim.momentum=5 | optim=sgd optim.nesterov=abc
        optim=sgd optim.momentum=0 | optim.fused=abc | optim=sgd +optim.dampening=abc | +optim.foo=1 | +optim.amsgrad=abc
        schedule=step schedule.gamma=inf | schedule=step schedule.gamma=-1 | schedule=step schedule.milestones=[2,-1]
        schedule=step schedule.milestones=5 | schedule=step schedule.milestones=[abc] | schedule=step schedule.milestones=[nan]
        schedule=step schedule.milestones=[0.9,0.1] | schedule=cosine schedule.final_fraction=inf | schedule=cosine schedule.final_fraction=5
        schedule.warmup_steps=1000000 | +schedule.foo=1 | optim._target_=torch.optim.LBFGS | optim._target_=torch.optim.Nothing""",
    "no effect or no sense": """
        trainer.gradient_clip_val=inf | trainer.max_epochs=0 | trainer.max_steps=0 | trainer.min_epochs=5 trainer.max_epochs=2
        trainer.min_steps=1000000 | trainer.max_time={days:-1} | trainer.max_time={dayz:1} | trainer.max_time={days:abc} | trainer.max_time={}
        trainer.max_time=00:00:00:00 | strategy.name=abc | strategy.name=ddp | strategy=ddp strategy.name=single | augment=[shift] augment.shift.pixels=1000
        augment=[shift] augment.shift.pixels=12 | data.std=[inf] | data.std=[nan] | data.mean=[inf] | data.mean=[nan] | data.mean=[true]
        callbacks=[early_stopping] callbacks.early_stopping.monitor=val/nothing | callbacks=[early_stopping] callbacks.early_stopping.monitor=5
        callbacks=[early_stopping] callbacks.early_stopping.mode=abc | checkpoint.monitor=val/nothing | task.monitor=val/nothing | task.monitor=acc
        trainer.val_check_interval=0 | trainer.val_check_interval=0.0 | trainer.check_val_every_n_epoch=null | data.image_size=1
        trainer.limit_train_batches=0.0 | trainer.limit_train_batches=1.5 | trainer.devices=[5] | trainer.devices=[] | trainer.devices=[-1]
        trainer.devices=-2 | trainer.devices=1000000 | trainer.num_nodes=0 | data.batch_size=-1 | data.batch_size=0 | data.eval_batch_size=0
        data.batch_size=100000 | data.val_fraction=0.99999 | data.limit_train=1 | data.limit_train=1000000
        task.label_smoothing=5 | task.label_smoothing=-1 | task.label_smoothing=inf | task.label_smoothing=abc | task.class_weights=[1,2]
        task.class_weights=5 | task.class_weights=abc | task.class_weights=[inf] | task.class_weights=[-1,1,1,1,1,1,1,1,1,1] | task.metrics=5
        task.metrics.x=5 | +task.metrics.f1={a:1} | +task.metrics.f1={_target_:torchmetrics.Nothing} | task.metrics=null
        +task.metrics.loss={_target_:torchmetrics.classification.MulticlassAccuracy} | model.dropout_fc=1 | model.dropout_fc=5 | +model.foo=5
        +callbacks.x={_target_:lockstep.callbacks.EMA,decay:abc} | +callbacks.x={_target_:lockstep.callbacks.EMA,foo:1}
        +callbacks.x={_target_:lockstep.models.BasicNet} | +logger.x={_target_:lockstep.callbacks.Throughput}
        callbacks=[ema] callbacks.ema.decay=1 | callbacks=[ema] callbacks.ema.decay=5 | callbacks=[ema] callbacks.ema.update_every_n_steps=0
        logger=[wandb] logger.wandb.mode=abc | logger=[wandb] logger.wandb.tags=5 | model=timm model.name=nothing | model=timm model.name=''
        model=timm model.name=test_resnet model.checkpoint_path=nothing.pth | init_from=nothing | resume=nothing | data.root=nothing
        data.source=abc | data.num_workers=-1 | data.num_workers=100000 | data.prefetch_factor=0""",
    "infinite, enormous or tiny": """
        strategy=ddp strategy.timeout_s=inf | strategy=ddp strategy.timeout_s=1e18 | strategy=ddp strategy.timeout_s=nan
        strategy=ddp strategy.bucket_cap_mb=inf | strategy=ddp strategy.bucket_cap_mb=1e18 | strategy=fsdp strategy.timeout_s=inf
        strategy=fsdp strategy.timeout_s=1e18 | strategy=ddp strategy.timeout_s=1e-9 | seed=4294967296 | seed=1e30 | seed=99999999999999999999
        data.image_size=100000 | data.image_size=1000000000000 | data.batch_size=99999999999999999999 | trainer.max_epochs=99999999999999999999
        trainer.max_steps=99999999999999999999 | trainer.log_every_n_steps=99999999999999999999 | trainer.accumulate_grad_batches=10000
        checkpoint.save_top_k=0 | checkpoint.save_top_k=99999999999999999999 | checkpoint.every_n_steps=99999999999999999999
        trainer.limit_train_batches=99999999999999999999 | schedule.warmup_steps=99999999999999999999 | run={LONG} | run={LONG}/a | runs_dir={LONG}
        run=a/../../b | run=. | run=/tmp/x | run=a//b | model.dropout_conv=nan | trainer.max_time=99999999999:00:00:00""",
    "between keys": """
        trainer.min_steps=10 trainer.max_steps=5 | trainer.min_epochs=3 trainer.max_epochs=1 | trainer.min_epochs=3
        trainer.max_epochs=-1 trainer.max_steps=-1 schedule=cosine | trainer.min_steps=50 | trainer.val_check_interval=0.5 trainer.check_val_every_n_epoch=null
        trainer.enable_checkpointing=false checkpoint.every_n_steps=5 | trainer.enable_checkpointing=false resume=auto run=a
        trainer.gradient_clip_algorithm=norm | trainer.accumulate_grad_batches=3 | strategy=single trainer.devices=2 | strategy=dp trainer.devices=2
        strategy=dp compile=true | strategy=dp trainer.sync_batchnorm=true | strategy=ddp checkpoint.sharded=true | strategy=single trainer.num_nodes=2
        trainer.precision=16-mixed | trainer.precision=16-true | strategy=fsdp trainer.precision=64-true | tf32=true | data.on_device=true
        data.prefetch_factor=4 | data.persistent_workers=true | init_from=a resume=b | model=none | optim=none | schedule=none
        callbacks=[early_stopping] trainer.limit_val_batches=0 | checkpoint.monitor=val/loss | checkpoint.mode=max checkpoint.monitor=val/loss
        trainer.accumulate_grad_batches=2 trainer.val_check_interval=3 | trainer.accumulate_grad_batches=2 trainer.limit_train_batches=3
        task=regression | task=segmentation | task=multilabel | task=language_model | data.channels_last=${nothing} | optim.lr=${nothing}
        optim.lr=${optim.lr} | data.batch_size=${data.eval_batch_size} data.eval_batch_size=${data.batch_size} | data.batch_size=??? | optim.lr=???
        task.monitor=${checkpoint.monitor} | run=${oc.env:NOTHING} | debug=one_batch trainer.limit_train_batches=0""",
    "the command line itself": """
        hydra.mode=MULTIRUN | --config-name=eval | --config-name=nothing | --config-dir=nothing | --config-path=nothing | hydra.mode=abc
        optim.lr= | =5 | optim.lr | optim.lr==5 | data.mean=[1 | data.mean={a | +optim.lr=1 | ++nothing=1 | ~nothing | ~optim.lr=5 | hydra=5
        hydra.run=5 | hydra/launcher=nothing | hydra.sweeper=5 | --nothing | -x | --multirun=5 | hydra.run.dir=/x | train data
        model@foo=basic_net | optim.lr=1,2 | optim.lr=range(1,5) | optim.lr=choice(1,2) | experiment=5 | debug=5 | +experiment=mnist_basic_net""",
}  # fmt: skip
KEY_OF = {  # where the key that a message must name is not that of the last override
    "trainer.devices=2": "devices", "trainer.val_check_interval=3": "val_check_interval", "data.source=abc": "source", "task.monitor=acc": "monitor",
    "data.limit_train=1": "data.batch_size", "run=a": "resume=auto", "--config-dir=nothing": "nothing", "optim._target_=torch.optim.LBFGS": "optim.",
}  # fmt: skip


def lines() -> Iterator[Case]:
    for family, text in LINES.items():
        for line in text.replace("\n", "|").split("|"):
            if args := tuple(line.replace("{LONG}", 300 * "x").split()):
                last = args[-1].lstrip("+~-").partition("=")[0] or "error"
                yield Case(family, args, KEY_OF.get(args[-1], last), may_work=line.strip() == "~optim.lr")


def commands() -> Iterator[Case]:
    family = "the command line itself"
    yield Case(family, ("optim.lrr=1",), "optim.lr", env={"HYDRA_FULL_ERROR": "0"})
    yield Case(family, ("model=nothing",), "model", env={"HYDRA_FULL_ERROR": "0"})
    for name, content in {"a: [": b"a: [", "tabs": b"a:\n\t- b", "bytes": b"\xff\xfe\0", "list": b"- 1\n- 2", "text": b"abc",
                          "key": b"nothing: 5", "null": b"", "group": b"defaults: [nothing]"}.items():  # fmt: skip
        files = {"mine/experiment/mine.yaml": b"# @package _global_\n" + content}
        named = {"key": "nothing", "text": "abc", "group": "nothing"}.get(name, "mine")
        yield Case(family, ("--config-dir=mine", "experiment=mine"), named, files, what=name, works=name == "null")


def works() -> Iterator[Case]:
    for args in ("", "optim=sgd", "schedule=cosine", "trainer.max_time=00:01:00:00", "trainer.max_time={days:1}", "optim.betas=[0.5,0.9]",
                 "seed=4294967295", "schedule=step schedule.milestones=[0.2,0.4]", "trainer.max_epochs=2", "seed=null",
                 "callbacks=[default,ema]", "callbacks=[default,early_stopping]", "logger=[]", "callbacks=[]", "run=a/b", "run=7",
                 "trainer.val_check_interval=1", "trainer.gradient_clip_val=0.5", "schedule=cosine trainer.max_epochs=-1", "strategy=ddp", "strategy=fsdp",
                 "augment=[shift] augment.shift.pixels=2", "augment=strong",
                 "trainer.precision=32", "trainer.devices=1", "data.std=[1]", "data.num_workers=0", "+optim.amsgrad=true", "optim.eps=1e-6",
                 "task.label_smoothing=0.1", "task.class_weights=[1,1,1,1,1,1,1,1,1,1]", "checkpoint.monitor=val/loss checkpoint.mode=min",
                 "+task.metrics.f1={_target_:torchmetrics.classification.MulticlassF1Score}"):  # fmt: skip
        yield Case("what works", tuple(args.split()), "", works=True)


@cache
def cases() -> list[Case]:
    every = [*works(), *lines(), *commands(), *groups(), *names(), *keys(), *data()]
    return list({(case.args, *case.files.values(), *case.env.items()): case for case in reversed(every)}.values())[::-1]
