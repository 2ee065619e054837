"""Every option that is shipped can be built and takes a step: networks, optimizers, schedules, callbacks, loggers."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import building
import lightning.pytorch as pl
import pytest
import torch
from conftest import write_cifar10
from in_process import config_of
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from pictures import write_classes

import lockstep
from lockstep import build
from lockstep.config import compose
from lockstep.config.instantiate import create_data
from lockstep.config.settings import Settings
from lockstep.machine.world import World
from lockstep.training.batches import Loaders
from project.data import Cifar10

pytestmark = pytest.mark.xdist_group("build")
CPU = "trainer.accelerator=cpu"
SMALL = [CPU, "trainer.max_steps=1", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1"]


def files(root: Path, cache: Path) -> list[str]:
    return [f"data.root={root}", f"data.cache_dir={cache}"]


def settings_of(*overrides: str) -> Settings:
    return Settings.of(config_of(*overrides))


def options(group: str) -> list[str]:
    """Those that name something to build."""
    return [name for name in compose.options(group) if name not in ("none", "own")]


@pytest.fixture
def cifar10(tmp_path, monkeypatch):
    """Made images as CIFAR-10's files, with checksums that fit them."""
    monkeypatch.setattr(Cifar10, "md5", write_cifar10(tmp_path / "cifar", 40))
    return tmp_path / "cifar"


@pytest.mark.parametrize("group", ["optim", "schedule", "callbacks", "logger", "strategy"])
def test_options_are_built(group, mnist, cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for option in options(group):
        composed = settings_of(f"{group}={option}", *files(mnist, cache), CPU, "run=a")
        cfg, settings = composed.cfg, composed.with_auto_resolved(create_data(composed.cfg.data, composed.cfg.loader))
        data = building.batches(settings)
        module = building.module(settings, data)
        trainer = build.trainer(settings, module, data)
        assert len(trainer.loggers) == (2 if group == "logger" and option != "csv" else 1)
        assert type(trainer.strategy).__name__ == cfg.strategy.target.split(".")[-1]
        module.trainer = SimpleNamespace(estimated_stepping_batches=100)
        optimizer = module.optimizer(module.parameters())
        schedule = module.scheduler(optimizer)
        for _ in range(100):
            optimizer.step()
            schedule.step()
        falls = group == "schedule" and option in ("cosine", "exponential", "linear", "step")
        assert (optimizer.param_groups[0]["lr"] < cfg.optim.get("lr")) is falls
    assert not (tmp_path / "runs").exists()


SLOW = ("cifar10_resnet50d", "folder_finetune")


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in options("experiment")]
)
def test_recipes_take_a_step(recipe, mnist, cifar10, cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = {"cifar10": cifar10, "mnist": mnist, "folder": tmp_path / "pictures"}[recipe.partition("_")[0]]
    small = ["loader.batch_size=4", "loader.eval_batch_size=4", "data.image_size=28", *SMALL]
    small += ["trainer.enable_checkpointing=false", "schedule.warmup_steps=0"]  # checkpoints: 300 MB of resnet50d
    if root.name == "pictures":
        write_classes(root, 10)
        small += ["model.pretrained=false"]  # its weights are on a server
    if recipe == "cifar10_resnet50d":  # whose size is what takes long
        small.remove("data.image_size=28")
    report = lockstep.train([f"experiment={recipe}", *files(root, cache), *small])
    assert (report["status"], report["train/steps"], report["data/name"]) == ("done", 1, recipe.partition("_")[0])


@pytest.mark.parametrize(("overrides", "expected"), [
    ([], True),
    (["optim=sgd"], True),
    (["optim=sgd", "strategy=fsdp"], False),
    (["strategy=fsdp"], True),
    (["trainer.precision=16-mixed", "trainer.gradient_clip_val=1.0"], True),
    (["optim.fused=false"], False),
    (["exact.logical_ranks=8", "optim=sgd", "strategy=fsdp"], True),
    (["exact.logical_ranks=8", "trainer.accelerator=cuda"], False),
])  # fmt: skip
def test_optimizers_are_fused_where_they_can_be(overrides, expected):
    optimizer = build.optimizer(settings_of(CPU, *overrides), lambda: [torch.nn.Identity()])
    assert optimizer([torch.nn.Parameter(torch.zeros(3))]).defaults["fused"] is expected


@pytest.mark.parametrize(
    ("strategy", "tf32", "kept"), [("single", True, True), ("ddp", False, True), ("fsdp", True, False)]
)
def test_a_process_multiplies_as_tf32_says_and_keeps_freed_memory_unless_it_shards(strategy, tf32, kept, monkeypatch):
    calls = []
    monkeypatch.setattr(build, "keep_freed_memory", lambda *given, is_sharded: calls.append((*given, is_sharded)))
    monkeypatch.setattr(build, "threads", lambda _: None)
    settings = Settings(config_of(f"strategy={strategy}", f"tf32={str(tf32).lower()}"), World("cpu", 2, 1, strategy))
    build.process(settings)
    assert torch.backends.cudnn.allow_tf32 is torch.backends.cuda.matmul.allow_tf32 is tf32
    assert calls == [("cpu", not kept)]


def test_a_rate_of_0_for_the_head_is_a_rate():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizers = [build.optimizer(settings_of(*keys, CPU), lambda: [net]) for keys in (["optim.head_lr=0"], [])]
    rates = [[group["lr"] for group in make(net.parameters()).param_groups] for make in optimizers]
    assert rates == [[1e-3, 0], [1e-3]]


def test_exact_threads_stay_when_lightning_launches(monkeypatch):
    """Its launcher of processes sets a number of threads, unless the environment names one."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    before = torch.get_num_threads()
    try:
        build.process(settings_of("exact.logical_ranks=2", CPU))
        _set_num_threads_if_needed(num_processes=1)
        assert (os.environ["OMP_NUM_THREADS"], torch.get_num_threads()) == ("1", 1)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("accelerator", "expected"), [("cuda", True), ("cpu", False)])
def test_logical_ranks_ask_for_deterministic_kernels_on_gpus(accelerator, expected):
    settings = settings_of("exact.logical_ranks=8", "trainer.limit_val_batches=2")
    world = replace(settings.world, accelerator=accelerator)
    made = build.arithmetic(settings).trainer_arguments(vars(settings.cfg.trainer), world)
    assert bool(made["deterministic"]) == expected
    assert (made["accumulate_grad_batches"], made["limit_val_batches"]) == (8, 16)


@pytest.mark.parametrize(("strategy", "inference"), [("single", True), ("fsdp", False)])
def test_shards_are_not_gathered_in_inference_mode(strategy, inference, tmp_path):
    """Lightning uses torch.no_grad under gloo, so no evaluation on CPUs shows it."""
    settings = settings_of(f"runs_dir={tmp_path}", "run=a", f"strategy={strategy}", CPU, "trainer.precision=32-true")
    trainer = build.evaluator(settings, Loaders(None, pl.LightningModule()))
    assert trainer.validate_loop.inference_mode is trainer.test_loop.inference_mode is inference
