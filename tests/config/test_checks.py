"""The config check: what is shipped passes, what is wrong is told in full, and torch stays out of it."""

import importlib.util
import inspect
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf
from shipped_data import shipped

from lockstep import CONFIGS
from lockstep.config.checks import OWNED, check
from lockstep.config.compose import CONFIG_ERRORS, compose_config, dotted, explain, tried_alone
from lockstep.config.instantiate import ENGINE, SPECIAL
from lockstep.config.schema import CLOSED, KEYS, wrong_values
from lockstep.config.targets import parameters
from lockstep.errors import UserError
from lockstep.launch import resuming
from lockstep.machine import world

GROUPS = sorted(path.name for path in CONFIGS.iterdir() if path.is_dir() and path.name != "hydra")
SEVERAL = ("callbacks", "logger")
DATASET = "{_target_: lockstep.data.Arrays}"  # any class that imports no torch
NEEDS = {
    "model=timm": ["model.name=resnet10t"],
    "data=torch": [f"data.train={DATASET}", f"data.test={DATASET}"],
    "data=own_images": ["data._target_=lockstep.data.Images"],
    "data=torchvision": ["data.dataset=Flowers102"],
}
OPEN = {
    "own",
    "own_images",
    "none",
    "lightning_module",
    *(() if importlib.util.find_spec("mlflow") else ("mlflow",)),
}  # options that wait for a class of the user's, or leave all to it


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def problems(*overrides: str) -> list[str]:
    """What a user is told about a command line."""
    try:
        return check(compose_config("train", list(overrides)))
    except CONFIG_ERRORS as e:
        return explain(e, "train", list(overrides))


@pytest.mark.parametrize(
    "override",
    [f"{group}={option}" for group in GROUPS for option in options(group) if option not in OPEN]
    + ["callbacks=[]", "logger=[]"],
)
def test_each_shipped_option_is_possible(override):
    assert problems(override, *NEEDS.get(override, [])) == []


def test_every_argument_of_the_trainer_can_be_set_or_says_what_decides_it():
    from lightning.pytorch import Trainer

    arguments = {f"trainer.{name}" for name in inspect.signature(Trainer.__init__).parameters if name != "self"}
    listed = {f"trainer.{name}" for name in yaml.safe_load((CONFIGS / "trainer/default.yaml").read_text())}
    assert arguments <= listed | set(OWNED)
    assert not listed & set(OWNED)


def test_every_key_of_a_closed_group_has_a_check():
    cfg = compose_config("train", [])
    for group in CLOSED:
        assert {f"{group}.{name}" for name in cfg[group]} == {key for key in KEYS if key.startswith(f"{group}.")}


def components() -> Iterator[tuple[str, dict]]:
    """The nodes of the shipped options that name a class, and where they stand."""
    for group, option in (pair for name in GROUPS for pair in itertools.product([name], options(name))):
        node = shipped(group, option)
        nodes = {f"{group}.{name}": own for name, own in node.items()} if group in SEVERAL else {group: node}
        yield from (
            (place, own)
            for place, own in nodes.items()
            if isinstance(own, dict) and own.get("_target_", "???") != "???"
        )


def test_every_key_of_a_shipped_component_has_a_check():
    checked = set()
    for place, node in components():
        named = parameters(node["_target_"])
        for name in node.keys() - {*SPECIAL, *ENGINE.get(place, ())}:
            typed = name in named and named[name].annotation is not inspect.Parameter.empty
            assert f"{place}.{name}" in KEYS or typed, f"{place}.{name} of {node['_target_']}"
        checked |= {f"{place}.{name}" for name in node}
    checked |= set(dotted(OmegaConf.to_container(compose_config("train", []))))
    assert set(KEYS) <= checked  # no check is about a key that there is not


@pytest.mark.parametrize("key", KEYS)
def test_the_example_of_each_message_is_accepted(key):
    kind = KEYS[key]
    assert kind.accepts(yaml.safe_load(kind.example.replace("e-", ".0e-")))


BAD = {
    "model=resnet51": ["model has no resnet51", "resnet50d"],
    "modle=resnet50d": ["modle is not a key", "model"],
    "optim.lrr=1": ["optim.lrr is not a key", "did you mean optim.lr?"],
    "+trainer.devcies=2": ["trainer.devcies is not a key", "trainer.devices"],
    "+foo=1": ["foo is not a key"],
    "+trainer.strategy=ddp": ["choose it with strategy=ddp"],
    "trainer.fast_dev_run=true": ["debug=one_batch"],
    "callbacks=[default,emma]": ["callbacks has no emma", "did you mean ema?"],
    "data.image_size=0": ["data.image_size=0 is invalid", "at least 1", "data.image_size=224"],
    "data.image_size=28.5": ["data.image_size=28.5"],
    "trainer.precision=fp17": ["trainer.precision=fp17", "32-true", "bf16-mixed"],
    "trainer.precision=16-mixed trainer.accelerator=cpu": ["not supported on a CPU", "bf16-mixed"],
    "strategy=fsdp trainer.precision=64-true": ["strategy=fsdp does not support", "bf16-true"],
    "strategy=single trainer.devices=4 trainer.accelerator=cpu": ["trainer.devices=4", "strategy=ddp"],
    "strategy=single trainer.num_nodes=2": ["one process", "strategy=ddp"],
    "strategy=dp trainer.devices=2 trainer.accelerator=cpu": ["strategy=dp", "strategy=ddp"],
    "strategy=ddp trainer.devices=2 trainer.accelerator=cpu data.batch_size=63": ["63", "62 or 64", "2 processes"],
    "trainer.accumulate_grad_batches=3": ["data.batch_size=63 or 66", "3 accumulated"],
    "trainer.accumulate_grad_batches=2 trainer.limit_train_batches=5": [
        "whole steps of 2",
        "trainer.limit_train_batches=4",
    ],
    "trainer.accumulate_grad_batches=many": ["a whole number of at least 1, or auto"],
    "trainer.accumulate_grad_batches=auto strategy=ddp trainer.devices=3 trainer.accelerator=cpu": ["63 or 66"],
    "trainer.accumulate_grad_batches=auto trainer.limit_train_batches=5": ["counts micro-batches", "grad_batches=1"],
    "trainer.accumulate_grad_batches=auto trainer.val_check_interval=5": ["counts micro-batches", "grad_batches=1"],
    "strategy=ddp trainer.num_nodes=2 trainer.accelerator=cpu": ["MASTER_ADDR", "torchrun"],
    "trainer.devices=0": ["trainer.devices=0", "a number of devices"],
    "strategy=ddp trainer.devices=[0,0] trainer.accelerator=cpu": ["trainer.devices"],
    "trainer.limit_train_batches=1.5": ["trainer.limit_train_batches=1.5", "fraction"],
    "trainer.gradient_clip_algorithm=value": ["no effect alone", "trainer.gradient_clip_val=1.0"],
    "trainer.deterministic=maybe": ["trainer.deterministic=maybe", "warn"],
    "optim.lr=abc": ["optim.lr=abc", "a number"],
    "seed=true": ["seed=true"],
    "run=../x": ["run=../x", "letters"],
    "model=timm": ["model.name is missing", "model.name=<name>"],
    "data.mean=[0.1,0.2,0.3]": ["data.mean", "1 channels"],
    "data.std=[0]": ["data.std", "from 0.0001 to 1000"],
    "task.mode=most": ["task.mode=most", "max, min"],
    "task.metric={}": ["task.metric is not a key", "did you mean task.metrics?"],
    "data=cifar10 data.source=embedded": ["no package contains cifar10", "data.root=", "data.source=download"],
    "strategy=dp trainer.sync_batchnorm=true": ["no effect under strategy=dp"],
    "strategy=dp compile=true": ["no effect under strategy=dp"],
    "strategy=ddp checkpoint.sharded=true": ["no effect under strategy=ddp", "strategy=fsdp"],
    "data.on_device=true trainer.accelerator=cpu": [
        "data.on_device=true has no effect on a CPU",
        "data.on_device=auto",
    ],
    "tf32=true trainer.accelerator=cpu": ["tf32=true has no effect on cpu", "NVIDIA"],
    "optim=sgd optim.fused=true strategy=fsdp trainer.accelerator=cpu": [
        "optim.fused=true has no kernel for SGD",
        "Remove optim.fused",
    ],
    "data.num_workers=many": ["data.num_workers=many", "or auto"],
    "checkpoint.background=false trainer.enable_checkpointing=false": ["checkpoint.background=false has no effect"],
    "data.prefetch_factor=4": ["data.prefetch_factor=4 has no effect without workers", "data.num_workers=2"],
    "data.persistent_workers=false": ["no effect without workers"],
    "strategy=ddp strategy.comm_hook=fp16 trainer.accelerator=cpu": ["no effect without GPUs"],
    "checkpoint.monitor=val/loss": ["would keep the worst", "checkpoint.mode=min"],
    "data.image_size=[": ["data.image_size=["],
    "exact.logical_ranks=6 data.batch_size=66": ["exact.logical_ranks=6", "a power of two", "exact.logical_ranks=8"],
    "exact.logical_ranks=8 data.batch_size=60": ["56 or 64", "8 logical ranks"],
    "exact.logical_ranks=4 augment=[mixup] data.batch_size=60": ["56 or 64", "mixes pairs"],
    "exact.logical_ranks=8 strategy=ddp trainer.devices=3 trainer.accelerator=cpu": ["among 3 processes", "1, 2, 4"],
    "exact.logical_ranks=2 strategy=ddp trainer.devices=4 trainer.accelerator=cpu": ["among 4 processes"],
    "exact.logical_ranks=8 strategy=dp": ["strategy=dp", "strategy=ddp"],
    "exact.logical_ranks=8 trainer.accumulate_grad_batches=2": ["no effect", "larger exact.logical_ranks"],
    "exact.logical_ranks=8 trainer.sync_batchnorm=true": ["normalises its own samples"],
    "exact.logical_ranks=8 compile=true": ["compile=true computes differently"],
    "exact.logical_ranks=8 strategy=fsdp strategy.reduce_each_micro_batch=true": ["has no effect"],
    "exact.logical_ranks=8 trainer.limit_train_batches=0.5": ["a fraction", "a number of steps"],
    "exact.logical_ranks=8 trainer.val_check_interval=0.25": ["a fraction", "a number of steps"],
    "exact.logical_ranks=8 strategy=ddp strategy.static_graph=true trainer.devices=2 trainer.accelerator=cpu": [
        "strategy.static_graph=true has no effect"
    ],
    "exact.logical_ranks=8 strategy=fsdp trainer.precision=bf16-true trainer.accelerator=cpu": [
        "rounds the last elements",
        "bf16-mixed",
    ],
    "exact.threads=2": ["no effect without exact.logical_ranks"],
    "exact.digests=true": ["exact.digests=true has no effect without exact.logical_ranks"],
    "task=segmentation task.class_weights=balanced": ["not a key of the chosen task", "task=<name>"],
    "exact.logical_rank=8": ["exact.logical_rank is not a key", "did you mean exact.logical_ranks?"],
}


@pytest.mark.parametrize("line", BAD)
def test_a_mistake_is_told_with_what_is_possible(line):
    told = problems(*line.split())
    assert len(told) == 1, told
    for part in BAD[line]:
        assert part in told[0]


def test_auto_is_refused_where_something_else_has_started_the_processes(monkeypatch):
    auto = ["strategy=ddp", "trainer.accelerator=cpu", "trainer.accumulate_grad_batches=auto"]
    assert problems(*auto, "trainer.devices=2", "trainer.val_check_interval=0.5") == []
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK"):
        monkeypatch.setenv(name, "0")
    (told,) = problems(*auto, "trainer.num_nodes=2", "run=a")
    assert "more than one parent process started them" in told
    for name, value in {"TORCHELASTIC_RUN_ID": "a", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    (told,) = problems(*auto)
    assert "torchrun started them" in told
    assert "trainer.accumulate_grad_batches=1" in told


def test_all_mistakes_are_told_at_once():
    told = problems(
        "optim.lrr=1", "data.image_size=0", "strategy=single", "trainer.devices=4", "trainer.accelerator=cpu"
    )
    assert [any(key in line for line in told) for key in ("optim.lrr", "data.image_size", "trainer.devices=4")] == [
        True
    ] * 3
    assert len(told) == 3


def test_more_devices_than_there_are(monkeypatch):
    monkeypatch.setattr(world, "gpu_count", lambda: 2)
    (told,) = problems("strategy=ddp", "trainer.devices=4")
    assert "4 cuda devices; this machine has 2" in told
    assert "trainer.devices=2" in told
    assert problems("strategy=ddp", "trainer.devices=2") == []


def test_a_fused_optimizer_of_logical_ranks_is_refused_on_shards_of_gpus(monkeypatch):
    monkeypatch.setattr(world, "gpu_count", lambda: 2)
    typed = ["exact.logical_ranks=8", "optim.fused=true", "strategy=fsdp", "trainer.devices=2"]
    (told,) = problems(*typed)
    assert "on shards of GPUs" in told
    assert "Remove optim.fused" in told
    assert problems(*typed, "trainer.accelerator=cpu") == []


def test_each_value_of_a_sweep_is_tried_before_it_starts():
    told, good = tried_alone("train", ["optim.lr=1e-3,3e-3", "model=basic_net,resnet51", "optim.lrr=1,2"])
    assert ["resnet51" in told[0], "optim.lrr" in told[1]] == [True, True]
    assert good == ["model=basic_net", "optim.lr=0.001", "optim.lr=0.003"]


@pytest.mark.parametrize(("overrides", "told"), [
    (["resume=auto"], "run=<name>"),
    (["resume=nothing"], "neither a checkpoint nor a run"),
    (["resume=nothing.ckpt"], "does not exist"),
    (["init_from=nothing"], "neither a checkpoint nor a run"),
    (["resume=a", "init_from=b"], "exclude each other"),
    (["run=a", "resume=auto", "init_from=nothing"], "init_from=nothing: neither a checkpoint nor a run"),
])  # fmt: skip
def test_what_is_not_there_cannot_be_continued(overrides, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = compose_config("train", overrides)
    assert isinstance(cfg, DictConfig)
    with pytest.raises(UserError, match=told):
        resuming.for_training(cfg, overrides)
    assert list(Path.cwd().iterdir()) == []


# --- as commands ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["optim.lrr=1", "data.image_size=0", "optim._target_=os.system"],
        pytest.param(["--cfg", "job"], marks=pytest.mark.slow),
        pytest.param(["-m", "modle=a,b"], marks=pytest.mark.slow),
    ],
)
def test_help_and_mistakes_answer_without_torch_and_leave_nothing(command, args):
    libraries = command.folder.with_name("libraries")
    done = command(
        "train.py", *args, env={"PYTHONPROFILEIMPORTTIME": "1", "LD_DEBUG": "files", "LD_DEBUG_OUTPUT": str(libraries)}
    )
    opened = "".join(path.read_text() for path in libraries.parent.glob("libraries.*"))
    assert "libcuda" not in opened or not args[0].startswith("--")  # asking eight GPUs may take seconds
    modules = {line.rsplit("|", 1)[-1].strip() for line in done.err.splitlines() if line.startswith("import time:")}
    assert "omegaconf" in modules
    assert not modules & {"torch", "lightning", "torchvision", "timm", "matplotlib.pyplot", "wandb", "pandas"}
    assert done.code == (0 if args[0].startswith("--") else 2), done
    assert command.files() == []


@pytest.mark.parametrize(("args", "parts"), [
    (["data.root=nowhere", "data.source=disk"], ["data.root=nowhere does not exist", "train-images-idx3-ubyte.gz"]),
    (["data.batch_size=100000"], ["more than the 576 training images", "data.batch_size=576"]),
    (["trainer.precision=fp17", "optim.lrr=1"], ["fp17", "optim.lrr"]),
])  # fmt: skip
def test_bad_input_is_one_message_exit_code_2_and_nothing_written(forked_command, args, parts):
    command = forked_command
    done = command("train.py", *args)
    assert done.code == 2, done
    assert "Traceback" not in done.err
    assert all(line.startswith("error: ") for line in done.err.splitlines()), done
    for part in parts:
        assert part in done.err
    assert command.files() == []


def test_an_evaluation_needs_a_run_or_a_checkpoint(forked_command):
    command = forked_command
    for args, told in (
        ([], "run=<name>"),
        (["run=none"], "neither a checkpoint nor a run"),
        (["checkpoint=x.ckpt"], "does not exist"),
    ):
        done = command("eval.py", *args)
        assert (done.code, told in done.err, "Traceback" in done.err) == (2, True, False), done
    assert command.files() == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["run=${oc.env:OUTSIDE}"], ["run=/elsewhere, from ${oc.env:OUTSIDE}, is invalid"]),
        (["run=a/${oc.env:OUTSIDE}"], ["run=a//elsewhere, from a/${oc.env:OUTSIDE}, is invalid"]),
        (["resume=${oc.env:EMPTY}"], ["resume=, from ${oc.env:EMPTY}, is invalid"]),
        (["optim.lr=${oc.env:OUTSIDE}"], ["optim.lr=/elsewhere, from"]),
        (["data.batch_size=${task.monitor}"], ["data.batch_size=val/acc, from"]),
        (["data.mean=[${oc.env:OUTSIDE}]"], ["data.mean=['/elsewhere'], from"]),
        (
            ["task.mode=nosuch"],
            ["task.mode=nosuch is invalid"],
        ),  # and checkpoint.mode, which refers to it, is not told
        (
            ['optim.lr="${oc.decode:${oc.env:RATE}}"', "run=${oc.env:NAME}", "data.eval_batch_size=${data.batch_size}"],
            [],
        ),
    ],
)
def test_an_interpolation_is_judged_by_its_value(monkeypatch, overrides, said):
    for name, value in {"OUTSIDE": "/elsewhere", "EMPTY": "", "RATE": "1e-3", "NAME": "mine"}.items():
        monkeypatch.setenv(name, value)
    problems = list(wrong_values(compose_config("train", overrides)))
    assert len(problems) == len(said)
    assert all(problem.startswith(text) for problem, text in zip(problems, said, strict=True))
