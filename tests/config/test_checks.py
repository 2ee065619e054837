"""The config check: what is shipped passes, mistakes are told at once with what is possible; torch stays out."""

import inspect
import re
from itertools import zip_longest
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf
from shipped_data import shipped

from lockstep.config.checks import check, explain
from lockstep.config.compose import (
    CONFIG_ERRORS,
    compose_config,
    compose_each,
    config_file,
    dotted,
    fixed_keys,
    options,
)
from lockstep.config.draft import Draft, advice, value_errors
from lockstep.config.instantiate import ENGINE, SPECIAL
from lockstep.config.project import config_folders
from lockstep.config.run_config import CLOSED, SHIPPED
from lockstep.config.schema import GROUPS, KEYS, RECIPES
from lockstep.config.targets import parameters
from lockstep.errors import UserError
from lockstep.launch import local, resuming
from lockstep.launch.cli import option_errors
from lockstep.launch.start import start
from lockstep.machine import world

OPTIONS = {
    group: options(group)
    for group in sorted(
        {path.name for each in config_folders() for path in each.iterdir() if path.is_dir()} - {"hydra"}
    )
}
LISTS = ("augment", "callbacks", "logger")
DATASET = "{_target_: lockstep.Arrays}"  # any class that imports no torch
NEEDS = {
    "model=timm": ["model.name=resnet10t"],
    "data=torch": [f"data.train={DATASET}", f"data.test={DATASET}"],
    "data=own_images": ["data._target_=lockstep.kit.Images"],
    "data=torchvision": ["data.dataset=Flowers102"],
}
# Options that wait for a class of the user's, or leave all to it.
OPEN = ["own", "none", "lightning_module"]


def draft(*overrides: str, job: str = "train") -> Draft:
    return Draft(compose_config(job, overrides))


def problems_of(config: Draft) -> list[str]:
    try:
        check(config)
    except UserError as e:
        return [*e.problems]
    return []


def problems(*overrides: str) -> list[str]:
    """What a user is told about a command line."""
    try:
        composed = draft(*overrides)
    except CONFIG_ERRORS as e:
        return explain(e, "train", overrides)
    return problems_of(composed)


def lines_of_options() -> list[str]:
    """Command lines with every shipped option: a recipe, a whole list, or one option of each other group."""
    possible = {group: [name for name in names if name not in OPEN] for group, names in OPTIONS.items()}
    recipes = [f"{group}={name}" for group in RECIPES for name in possible.pop(group)]
    lists = [f"{group}=[{','.join(possible.pop(group))}]" for group in LISTS]
    columns = [[f"{group}={name}" for name in names] for group, names in possible.items()]
    return [*recipes, *lists, "callbacks=[] logger=[]", *(" ".join(filter(None, row)) for row in zip_longest(*columns))]


@pytest.mark.parametrize("line", lines_of_options())
def test_each_shipped_option_is_possible(line):
    options = line.split()
    assert problems(*options, *(more for option in options for more in NEEDS.get(option, []))) == []


def test_every_argument_of_the_trainer_can_be_set_or_says_what_decides_it():
    from lightning.pytorch import Trainer

    arguments = {f"trainer.{name}" for name in inspect.signature(Trainer.__init__).parameters if name != "self"}
    listed = {f"trainer.{name}" for name in yaml.safe_load(config_file("trainer/default").read_text())}
    assert arguments <= listed | set(advice()["owned"])
    assert not listed & set(advice()["owned"])


def test_every_key_of_a_shipped_component_and_of_a_closed_group_has_a_check():
    cfg = compose_config("train", [])
    checked = set(dotted(OmegaConf.to_container(cfg)))
    for group in CLOSED:
        assert {f"{group}.{name}" for name in cfg[group]} == {key for key in KEYS if key.startswith(f"{group}.")}
    nodes = [(group, shipped(group, name)) for group, names in OPTIONS.items() if group not in LISTS for name in names]
    for group in LISTS:
        nodes += [(f"{group}.{key}", node) for name in OPTIONS[group] for key, node in shipped(group, name).items()]
    for place, node in nodes:
        if isinstance(node, dict) and node.get("_target_", "???") != "???":
            named = parameters(node["_target_"])
            for name in node.keys() - {*SPECIAL, *ENGINE.get(place, ())}:
                typed = name in named and named[name].annotation is not inspect.Parameter.empty
                assert f"{place}.{name}" in KEYS or typed, f"{place}.{name} of {node['_target_']}"
            checked |= {f"{place}.{name}" for name in node}
    assert set(KEYS) <= checked  # no check is about a key that there is not


# Classes of libraries, and those that a clone adds beside the template's.
OTHERS = [
    "schedule._target_=torch.optim.lr_scheduler.MultiStepLR ++schedule.milestones=[3,7]",
    "optim._target_=torch.optim.Adafactor ++optim.eps=[null,0.001]",
    "callbacks=[early_stopping] callbacks.early_stopping._target_=lightning.pytorch.callbacks.EarlyStopping callbacks.early_stopping.patience=0",
    "model._target_=project.model.Net ++model.dropout_fc=1.5 ++model.name=3 ++model.pretrained=imagenet",
    "data._target_=project.data.Cells ++data.image_size=[224,224] ++data.mean=0.1307 ++data.std=0.3 ++data.csv=[a,b] ++data.channels=4 "
    "++data.source=s3 ++data.cache_dir=3 ++data.resize=true ++data.test_fraction=[0.1,0.2]",
    "task._target_=project.module.Own ++task.threshold=[0.2,0.3] ++task.class_weights=auto ++task.dice=on ++task.ignore_index=null",
]


@pytest.mark.parametrize("line", OTHERS)
def test_a_keys_name_alone_validates_nothing(line):
    assert value_errors(draft(*line.split())) == {}


def test_what_lockstep_reads_of_any_optimizer_is_validated():
    assert [*value_errors(draft("optim._target_=torch.optim.Adafactor", "optim.layer_decay=2"))] == [
        "optim.layer_decay"
    ]


def test_the_classes_with_validators_are_those_that_configs_name():
    text = "".join(path.read_text() for folder in config_folders() for path in folder.glob("*/*.yaml"))
    named = {
        target
        for target in re.findall(r"(?m)^ *_target_: ([\w.]+)", text)
        if not target.startswith(("lockstep.", "my_package.", "torchvision."))
    }
    assert named - {"lightning.pytorch.LightningDataModule"} == {*SHIPPED}


def test_the_example_of_each_message_is_accepted():
    wrong = [key for key, kind in KEYS.items() if not kind.accepts(yaml.safe_load(kind.example.replace("e-", ".0e-")))]
    assert wrong == []


# --- Mistakes ---

# A command line, and below it what the check says, one line for each mistake; `...` stands for any text.
MISTAKES = """
model=resnet51 modle=resnet50d model@foo=basic_net optim=null callbacks=[default,emma] data.image_size=[
    model has no option resnet51 ... did you mean resnet50d
    modle is not a key ... model
    model@foo=basic_net: Could not override
    optim=null: Config group
    callbacks has no option emma ... did you mean ema?
    data.image_size=[
optim.lrr=1 optimm.lr=5 strategy.traits=5 augment.shift=5 +trainer.devcies=2 +foo=1
    optim.lrr is not a key ... did you mean optim.lr?
    optimm.lr is not a key ... did you mean optim.lr?
    strategy.traits is not a key
    augment.shift is not a key ... pass +augment.shift=<value>
    trainer.devcies is not a key ... trainer.devices
    foo is not a key
checkpoint=5 +callbacks.x=5 +logger.x.a=5 task.metrics=null optim._target_=5 +trainer.strategy=ddp
    checkpoint=5 is invalid
    callbacks.x=5 is invalid
    logger.x._target_ is missing
    task.metrics=null is invalid
    optim._target_=5 is invalid
    trainer.strategy cannot be set: choose it with strategy=ddp
task=segmentation task.class_weights=balanced model=timm trainer.fast_dev_run=true
    trainer.fast_dev_run cannot be set ... debug=one_batch
    task.class_weights is not a key of the chosen task ... task=<name>
    model.name is missing; set model.name=<name>
data=cifar10 data.source=embedded model=resnet50d
    data.source=embedded: no package contains cifar10 ... data.root= ... data.source=download
data.mean=[0.1,0.2,0.3]
    data.mean= ... but the images need 1
strategy=single trainer.devices=4 trainer.num_nodes=2 exact.digests=true
    exact.digests=true has no effect without exact.logical_ranks
    trainer.devices=4 requests 4. Set strategy=ddp
    runs in one process, but trainer.num_nodes=2 ... strategy=ddp
strategy=single trainer.devices=4 trainer.num_nodes=0 +foo=1
    trainer.num_nodes=0 is invalid
    foo is not a key
strategy=dp trainer.devices=2 trainer.sync_batchnorm=true compile=true
    strategy=dp uses one process ... strategy=ddp
    trainer.sync_batchnorm=true has no effect under strategy=dp
    compile=true has no effect under strategy=dp
strategy=ddp trainer.devices=2 loader.batch_size=63 trainer.precision=16-mixed checkpoint.sharded=true tf32=true
    loader.batch_size=63 ... into 2 equal micro-batches ... Set loader.batch_size=62 or 64
    trainer.precision=16-mixed is not supported on a CPU ... bf16-mixed
    checkpoint.sharded=true has no effect under strategy=ddp ... checkpoint.sharded=false
    tf32=true has no effect ... on cpu ... tf32=false
strategy=ddp strategy.comm_hook=fp16 loader.on_device=true loader.prefetch_factor=4
    strategy.comm_hook=fp16 has no effect ... on cpu ... strategy.comm_hook=null
    loader.on_device=true has no effect on a CPU ... loader.on_device=auto
    loader.prefetch_factor=4 has no effect without workers ... loader.num_workers=2
strategy=ddp trainer.num_nodes=2
    MASTER_ADDR ... torchrun
strategy=ddp trainer.devices=3
    loader.batch_size=64 ... 63 or 66
strategy=fsdp trainer.precision=64-true optim=sgd optim.momentum=0 optim.fused=true trainer.check_val_every_n_epoch=null
    trainer.check_val_every_n_epoch=null ... Set trainer.val_check_interval=<number of batches>
    strategy=fsdp does not support trainer.precision=64-true ... bf16-true
    optim.nesterov=true needs a momentum above 0
trainer.accumulate_grad_batches=3 trainer.limit_train_batches=5 loader.repeats=5
    loader.batch_size=64 ... 3 equal micro-batches (trainer.accumulate_grad_batches for each process), each a multiple of 5 samples (loader.repeats=5 ... 60 or 75
    trainer.limit_train_batches=5 ... a multiple of 3 ... trainer.limit_train_batches=3
trainer.accumulate_grad_batches=auto
    trainer.accumulate_grad_batches=auto is invalid ... 2
trainer.devices=[5]
    trainer.devices=[5] ... can use 0, numbered from 0
trainer.enable_checkpointing=false checkpoint.background=false checkpoint.monitor=val/loss
    would keep the worst ... checkpoint.mode=min
    checkpoint.background=false has no effect with trainer.enable_checkpointing=false
augment=crop augment.crop.scale=[1,0.5] trainer.gradient_clip_algorithm=value
    trainer.gradient_clip_algorithm=value has no effect without ... trainer.gradient_clip_val=1.0
    augment.crop.scale= ... the lower number must come first
exact.logical_ranks=8 strategy=dp
    exact.logical_ranks=8 ... strategy=dp ... strategy=ddp
exact.logical_ranks=8 strategy=ddp trainer.devices=3 loader.batch_size=60 trainer.accumulate_grad_batches=2 compile=true
    exact.logical_ranks=8 cannot be divided among 3 processes ... 1, 2, 4
    loader.batch_size=60 ... 8 equal micro-batches ... 56 or 64
    trainer.accumulate_grad_batches=2 has no effect ... larger exact.logical_ranks
    compile=true computes differently
exact.logical_ranks=2 strategy=ddp augment=[mixup] loader.batch_size=62 strategy.static_graph=true
    loader.batch_size=62 ... mixes pairs ... 60 or 64
    strategy.static_graph=true has no effect
exact.logical_ranks=8 strategy=fsdp trainer.precision=bf16-true strategy.reduce_each_micro_batch=true
    trainer.precision=bf16-true rounds the last elements ... bf16-mixed
    strategy.reduce_each_micro_batch=true has no effect
exact.logical_ranks=8 trainer.limit_train_batches=0.5 trainer.sync_batchnorm=true
    trainer.limit_train_batches=0.5 ... a fraction ... a number of steps
    trainer.sync_batchnorm=true ... normalises its own samples
"""
ON_TWO_GPUS = """
strategy=ddp trainer.devices=4
    4 cuda devices; this machine has 2 ... trainer.devices=2
strategy=ddp trainer.devices=2
exact.logical_ranks=8 optim.fused=true strategy=fsdp trainer.devices=2
    on GPU shards ... Remove optim.fused
exact.logical_ranks=8 optim.fused=true strategy=fsdp trainer.devices=2 trainer.accelerator=cpu
"""
VALUES = f"""
checkpoint.save_top_k=99999999999999999999 loader.batch_size=0 data.image_size=28.5 data.mean=[nan] loader.num_workers=many
data.crop_pct=0 data.eval_size=-1 data.interpolation=cubic data.resize=fill
data.std=[inf] exact.logical_ranks=6 optim.betas=5 optim.eps=abc optim.lr=abc run=../x runs_dir={300 * "x"}
schedule.gamma=inf schedule.milestones=[2,-1] seed=true strategy.bucket_cap_mb=inf strategy.timeout_s=1e18
task.class_weights=[-1] task.label_smoothing=inf task.mode=most trainer.accumulate_grad_batches=many
trainer.deterministic=maybe trainer.devices=0 trainer.gradient_clip_val=inf trainer.limit_train_batches=1.5
trainer.max_epochs=0 trainer.max_steps=0 trainer.max_time={{days:-1}} trainer.precision=fp17
trainer.val_check_interval=0 trainer.profiler=slow
"""
MORE_VALUES = f"run={300 * 'x'} seed=4294967296 trainer.devices=[0,0] data.image_size=0"


def cases(text: str, gpus: int) -> list[tuple[str, list[str], int]]:
    blocks = [block.splitlines() for block in re.split(r"\n(?! )", text.strip())]
    return [(line, [message.strip() for message in messages], gpus) for line, *messages in blocks]


@pytest.mark.parametrize(("line", "messages", "gpus"), cases(MISTAKES, 0) + cases(ON_TWO_GPUS, 2))
def test_all_mistakes_of_a_command_are_told_each_once_with_what_is_possible(line, messages, gpus, monkeypatch):
    monkeypatch.setattr(world, "gpu_count", lambda: gpus)
    told = problems(*line.split())
    for message in messages:
        pattern = ".*".join(map(re.escape, message.split(" ... ")))
        assert sum(bool(re.search(pattern, text)) for text in told) == 1, (message, told)
    assert len(told) == len(messages), told


@pytest.mark.parametrize("values", [VALUES.split(), MORE_VALUES.split()])
def test_values_that_no_run_can_use_are_told_together_with_an_example(values):
    told = problems("strategy=ddp", "schedule=step", *values)
    for key in (value.partition("=")[0] for value in values):
        (message,) = [text for text in told if text.startswith(f"{key}=") and "is invalid; expected" in text]
        assert f", for example {key}={KEYS[key].example}." in message


def test_each_value_of_a_sweep_is_tried_before_it_starts():
    told, good = compose_each("train", ["optim.lr=1e-3,3e-3", "model=basic_net,resnet51", "optim.lrr=1,2"])
    assert ["resnet51" in told[0], "optim.lrr" in told[1]] == [True, True]
    assert good == ["model=basic_net", "optim.lr=0.001", "optim.lr=0.003"]


@pytest.mark.slow
def test_every_group_class_and_key_that_the_engine_reads_is_missed():
    whole = draft()
    keys = [key for key in KEYS if key.rpartition(".")[0] in CLOSED or "." not in key]
    groups = [group for group in GROUPS if group not in RECIPES]
    targets = [f"{group}._target_" for group in ("task", "model", "data", "strategy", "optim", "schedule")]
    assert problems_of(whole) == []
    for key in [*keys, *groups, *targets]:
        cfg = OmegaConf.create(OmegaConf.to_container(whole.tree))
        group, _, name = key.rpartition(".")
        del (cfg[group] if group else cfg)[name]
        told = problems_of(Draft(cfg))
        assert any(text.startswith(f"{key} is missing") for text in told), key
        for value in (None, "abc") if key in groups else ():
            told = problems_of(whole.replace({key: value}))
            assert any(text.startswith(f"{key}=") for text in told), (key, value)


def test_options_and_facts_that_would_do_something_else_are_refused():
    hydra = (
        ["--config-name=eval"],
        ["--config-name", "eval"],
        ["hydra.mode=MULTIRUN"],
        ["hydra.run.dir=x"],
        ["hydra/launcher=slots"],
    )
    assert [len(list(option_errors(argv))) for argv in hydra] == [1] * len(hydra)
    assert list(option_errors(["-m", "hydra/launcher=slots", "--config-dir=x", "optim.lr=1"])) == []
    told = list(fixed_keys(["strategy.name=abc", "task.replaces=[]", "strategy=ddp"]))
    assert ["strategy.name cannot be set" in told[0], len(told)] == [True, 2]


def test_broken_yaml_is_a_mistake_of_the_config(tmp_path):
    (tmp_path / "experiment").mkdir()
    for content in ("a: [", "- 1"):
        (tmp_path / "experiment/mine.yaml").write_text(f"# @package _global_\n{content}")
        told = problems(f"hydra.searchpath=[file://{tmp_path}]", "experiment=mine")
        assert any("mine" in text for text in told), told


def test_an_error_of_hydra_without_a_message_is_explained(tmp_path, command):
    """In a process of its own: pytest gives the assertions of Hydra a message."""
    (tmp_path / "experiment").mkdir()
    lines = ["# @package _global_", "defaults:", "  - override /callbacks: [default, ema]", "  - /schedule: cosine"]
    (tmp_path / "experiment/mine.yaml").write_text("\n".join(lines))
    done = command("train.py", "--config-dir", str(tmp_path), "experiment=mine")
    told = "Hydra raised AssertionError. In a `defaults` list, put the lines with `override` last."
    assert (done.code, done.err.strip()) == (2, f"error: experiment=mine: {told}")


OUTSIDE = {
    "run=${oc.env:OUTSIDE}": "run=/elsewhere, from ${oc.env:OUTSIDE}, is invalid",
    "resume=${oc.env:EMPTY}": "resume=, from ${oc.env:EMPTY}, is invalid",
    "optim.lr=${oc.env:OUTSIDE}": "optim.lr=/elsewhere, from",
    "loader.batch_size=${task.monitor}": "loader.batch_size=val/acc, from",
    "data.mean=[${oc.env:OUTSIDE}]": "data.mean=['/elsewhere'], from",
    "task.mode=nosuch": "task.mode=nosuch is invalid",  # but not checkpoint.mode, which refers to it
}
INSIDE = ['optim.lr="${oc.decode:${oc.env:RATE}}"', "run=${oc.env:NAME}", "loader.eval_batch_size=${loader.batch_size}"]


def test_an_interpolation_is_judged_by_its_value(monkeypatch):
    for name, value in {"OUTSIDE": "/elsewhere", "EMPTY": "", "RATE": "1e-3", "NAME": "mine"}.items():
        monkeypatch.setenv(name, value)
    told = value_errors(draft(*OUTSIDE))
    for override, text in OUTSIDE.items():
        assert told.pop(override.partition("=")[0]).startswith(text)
    assert not told
    (told,) = value_errors(draft("run=a/${oc.env:OUTSIDE}")).values()
    assert told.startswith("run=a//elsewhere, from a/${oc.env:OUTSIDE}, is invalid")
    assert value_errors(draft(*INSIDE)) == {}


# --- What a run continues from, and what a command prints ---


URLS = {
    "train": "runs_dir=s3://b/r resume=gs://b/last.ckpt init_from=https://b/last.ckpt run=s3://b/r data=folder data.root=file:///b data.csv=s3://b/a.csv "
             "data.cache_dir=hdfs://b/c model=timm model.name=resnet10t model.checkpoint_path=s3://b/w.pth",
    "eval": "checkpoint=s3://b/last.ckpt runs_dir=s3://b/r",
    "predict": "run=a runs_dir=s3://b/r input=s3://b/photos output=s3://b/out.csv",
}  # fmt: skip


@pytest.mark.parametrize("job", URLS)
def test_a_url_is_no_path(job, tmp_path, monkeypatch):
    """pathlib would make a local folder of `s3://bucket`."""
    monkeypatch.chdir(tmp_path)
    overrides = URLS[job].split()
    with pytest.raises(UserError) as error:
        start(local.load(local.script(job)), draft(*overrides, job=job), overrides)
    errors = [*error.value.problems]
    if job == "train":
        errors += value_errors(draft(*overrides)).values()
    told = [override for override in overrides if "://" in override]
    assert [override for override in told if not any(each.startswith(override) for each in errors)] == []
    assert all("URLs are not supported" in each for each in errors if not each.startswith("run="))
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(("job", "overrides", "told"), [
    ("train", ["resume=auto"], "run=<name>"),
    ("train", ["resume=nothing"], "neither a checkpoint nor a run"),
    ("train", ["resume=nothing.ckpt"], "does not exist"),
    ("train", ["init_from=nothing"], "neither a checkpoint nor a run"),
    ("train", ["resume=a", "init_from=b"], "are mutually exclusive"),
    ("train", ["run=a", "resume=auto", "init_from=nothing"], "init_from=nothing: neither a checkpoint nor a run"),
    ("eval", [], "run=<name>"),
    ("eval", ["run=none"], "neither a checkpoint nor a run"),
    ("eval", ["checkpoint=x.ckpt"], "does not exist"),
])  # fmt: skip
def test_what_is_not_there_cannot_be_continued_or_evaluated(job, overrides, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=told):
        start(local.load(local.script(job)), draft(*overrides, job=job), overrides)
    assert list(Path.cwd().iterdir()) == []


def test_what_a_resumed_run_recalls_without_effect_is_set_aside(capsys):
    cpu = ["trainer.accelerator=cpu", "strategy=single"]
    left = resuming.drop_ineffective_keys(draft(*cpu, "checkpoint.sharded=true", "tf32=true"), [*cpu, "tf32=true"])
    assert (left.get("checkpoint.sharded"), left.get("tf32")) == (False, True)  # typed ones stay an error
    assert "checkpoint.sharded=true of the resumed run has no effect here" in capsys.readouterr().err


@pytest.mark.parametrize(("args", "code"), [
    (["optim.lrr=1", "data.image_size=0", "optim._target_=os.system"], 2),
    pytest.param(["--cfg", "job"], 0, marks=pytest.mark.slow),
    pytest.param(["-m", "modle=a,b"], 2, marks=pytest.mark.slow),
])  # fmt: skip
def test_mistakes_and_configs_are_printed_without_torch_and_leave_nothing(command, args, code):
    done = command("train.py", *args, env={"PYTHONPROFILEIMPORTTIME": "1"})
    lines = done.err.splitlines()
    imports = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    assert "omegaconf" in imports
    assert not imports & {"torch", "lightning", "torchvision", "timm", "matplotlib.pyplot", "wandb", "pandas"}
    messages = [line for line in lines if not line.startswith("import time:")]
    assert all(line.startswith("error: ") for line in messages), done
    assert (done.code, bool(messages)) == (code, code == 2), done
    assert command.files() == []
