"""Every option that is shipped can be built and takes a step: networks, optimizers, schedules, callbacks, loggers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import write_cifar10
from pictures import write_classes

import lockstep
from lockstep import CONFIGS, build
from lockstep.config.compose import compose_config
from lockstep.config.instantiate import create, create_data, network, to_plain
from lockstep.config.settings import Settings
from lockstep.data import Cifar10
from lockstep.machine.world import World
from lockstep.training.schedules import scheduler

pytestmark = pytest.mark.xdist_group("build")
SMALL = [
    "trainer.accelerator=cpu",
    "trainer.max_steps=1",
    "trainer.limit_val_batches=1",
    "trainer.limit_test_batches=1",
]


def files(root: Path, cache: Path) -> list[str]:
    return [f"data.root={root}", f"data.cache_dir={cache}"]


def options(group: str) -> list[str]:
    """Those that name something to build."""
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml") if path.stem not in ("none", "own"))


@pytest.fixture
def cifar10(tmp_path, monkeypatch):
    """Made images as CIFAR-10's files, with checksums that fit them."""
    monkeypatch.setattr(Cifar10, "md5", write_cifar10(tmp_path / "cifar", 40))
    return tmp_path / "cifar"


@pytest.mark.parametrize("model", options("model"))
@pytest.mark.parametrize("data", ["mnist", "cifar10"])
def test_models_fit_data(model, data, mnist, cifar10, cache):
    given = [f"model={model}", f"data={data}", *files(mnist if data == "mnist" else cifar10, cache)]
    given += ["model.name=resnet10t"] * (model == "timm")
    cfg = Settings.of(compose_config("train", given)).with_numbers().cfg
    dataset, task = create_data(cfg.data), create(cfg.task, "task")
    task.bind(dataset.about)
    channels, size = dataset.about["channels"], dataset.about["image_size"]
    assert (channels, size) == ((1, 28) if data == "mnist" else (3, 336))
    with torch.device("meta"):
        net = network(to_plain(cfg.model), dataset.network_arguments() | task.network_arguments())
        logits = net.eval()(torch.zeros(2, channels, size, size))
    assert logits.shape == (2, 10)


@pytest.mark.parametrize("group", ["optim", "schedule", "callbacks", "logger", "strategy"])
def test_options_are_built(group, mnist, cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for option in options(group):
        cfg = compose_config("train", [f"{group}={option}", *files(mnist, cache), "trainer.accelerator=cpu", "run=a"])
        settings = Settings.of(cfg).decided(create_data(cfg.data)).identified("disk")
        data = build.data(settings)
        work = build.workload(settings, data)
        trainer, module = build.trainer(settings, work), work.module
        assert len(trainer.loggers) == (2 if group == "logger" and option != "csv" else 1)
        assert type(trainer.strategy).__name__ == cfg.strategy._target_.split(".")[-1]
        optimizer = module.new_optimizer()
        schedule = scheduler(module.make_schedule, optimizer, 100)
        for _ in range(100):
            optimizer.step()
            schedule.step()
        falls = group == "schedule" and option in ("cosine", "exponential", "linear", "step")
        assert (optimizer.param_groups[0]["lr"] < cfg.optim.lr) is falls
    assert not (tmp_path / "runs").exists()


SLOW = ("cifar10_resnet50d", "folder_finetune")


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in options("experiment")]
)
def test_recipes_take_a_step(recipe, mnist, cifar10, cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = {"cifar10": cifar10, "mnist": mnist, "folder": tmp_path / "pictures"}[recipe.partition("_")[0]]
    small = ["data.batch_size=4", "data.eval_batch_size=4", "data.image_size=28", *SMALL]
    small += ["trainer.enable_checkpointing=false", "schedule.warmup_steps=0"]  # checkpoints: 300 MB of resnet50d
    if root.name == "pictures":
        write_classes(root, 10)
        small += ["model.pretrained=false"]  # its weights are on a server
    if recipe == "cifar10_resnet50d":  # whose size is what takes long
        small.remove("data.image_size=28")
    report = lockstep.train([f"experiment={recipe}", *files(root, cache), *small])
    assert (report["status"], report["train/steps"], report["data/name"]) == ("done", 1, recipe.partition("_")[0])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], True),
        (["optim=sgd"], True),
        (["optim=sgd", "strategy=fsdp"], False),
        (["strategy=fsdp"], True),
        (["trainer.precision=16-mixed", "trainer.gradient_clip_val=1.0"], True),
        (["optim.fused=false"], False),
        (["exact.logical_ranks=8", "optim=sgd", "strategy=fsdp"], True),
        (["exact.logical_ranks=8", "trainer.accelerator=cuda"], False),
    ],
)
def test_optimizers_are_fused_where_they_can_be(overrides, expected):
    optimizer = build.optimizer(Settings.of(compose_config("train", ["trainer.accelerator=cpu", *overrides])))[
        "optimizer"
    ]
    assert optimizer([torch.nn.Parameter(torch.zeros(3))]).defaults["fused"] is expected


@pytest.mark.parametrize("tf32", [True, False])
def test_a_process_multiplies_as_tf32_says(tf32, monkeypatch):
    monkeypatch.setattr(build, "keep_freed_memory", lambda: None)
    build.process(Settings(compose_config("train", [f"tf32={str(tf32).lower()}"]), World("cpu", 1, 1, "single")))
    assert torch.backends.cudnn.allow_tf32 is torch.backends.cuda.matmul.allow_tf32 is tf32


@pytest.mark.parametrize(("strategy", "kept"), [("single", 1), ("ddp", 1), ("fsdp", 0)])
def test_freed_memory_is_kept_but_where_sharding_is_to_save_memory(strategy, kept, monkeypatch):
    calls = []
    monkeypatch.setattr(build, "keep_freed_memory", lambda: calls.append(1))
    monkeypatch.setattr(build, "threads", lambda _: None)
    build.process(Settings(compose_config("train", [f"strategy={strategy}"]), World("cpu", 2, 1, strategy)))
    assert len(calls) == kept


def test_a_rate_of_0_for_the_head_is_a_rate(mnist, cache):
    cfg = compose_config("train", ["optim.head_lr=0", "trainer.accelerator=cpu"])
    groups = build.optimizer(Settings.of(cfg))["parameters"](
        torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    )
    assert [group["lr"] for group in groups] == [1e-3, 0]
    assert "parameters" not in build.optimizer(Settings.of(compose_config("train", ["trainer.accelerator=cpu"])))


def test_exact_threads_are_of_one_job_of_a_sweep():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for ranks, threads in (("2", 1), ("4", 1), ("null", 3)):
            cfg = compose_config("train", [f"exact.logical_ranks={ranks}", "trainer.accelerator=cpu"])
            build.process(Settings.of(cfg))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_exact_shards_ask_for_deterministic_kernels_on_gpus():
    for accelerator, expected in (("cuda", True), ("cpu", False)):
        cfg = compose_config("train", ["exact.logical_ranks=8", "trainer.limit_val_batches=2"])
        world = replace(Settings.of(cfg).world, accelerator=accelerator)
        made = build.arithmetic(Settings.of(cfg)).trainer_arguments(cfg.trainer, world)
        assert bool(made["deterministic"]) == expected
        assert (made["accumulate_grad_batches"], made["limit_val_batches"]) == (8, 16)
