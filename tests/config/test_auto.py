"""What `auto` becomes, on machines of all kinds."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from lockstep.config import settings
from lockstep.config.checks import resolve
from lockstep.errors import UserError
from lockstep.launch import start
from lockstep.machine import system, world
from lockstep.machine.world import World, threads

WORLD = World("cpu", 1, 1, "single", one_process=True)
DATA = SimpleNamespace(evaluated=SimpleNamespace(bytes_in_memory=54_880_000), eval_batch_size=None, source="embedded")


def decided(**values: object):
    cfg = resolve(["trainer.accelerator=cpu"]).replace({key.replace("__", "."): value for key, value in values.items()})
    return settings.Settings.of(cfg).with_auto_resolved(DATA).cfg


@pytest.mark.parametrize(("has", "expected"), [(True, "bf16-mixed"), (False, "32-true")])
def test_bf16_is_used_where_there_are_units_for_it(monkeypatch, has, expected):
    monkeypatch.setattr(world, "has_bf16_units", lambda _: has)
    assert decided().trainer.precision == expected
    assert decided(trainer__precision="64-true").trainer.precision == "64-true"


FLAGS = {
    "flags\t\t: fpu avx512f avx512_bf16 sse": True,
    "flags\t\t: fpu amx_bf16 sse": True,
    "Features\t: fp asimd bf16": False,  # ARM, not measured
    "flags\t\t: fpu avx2 avx512f": False,
    "bogus : avx512_bf16": False,
}


def test_a_cpu_is_asked_what_it_can_do(monkeypatch, tmp_path):
    monkeypatch.setattr(world, "CPUINFO", tmp_path / "cpuinfo")
    for flags, expected in FLAGS.items():
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{flags}\n")
        assert world.has_bf16_units("cpu") is expected, flags


def test_a_run_has_at_least_20_rows_and_at_most_one_every_50_steps():
    for steps, expected in {1: 1, 20: 1, 56: 2, 843: 42, 1000: 50, 10**6: 50, math.inf: 50}.items():
        assert settings.log_interval(steps) == expected
    cfg = resolve(["loader.batch_size=32", "trainer.max_epochs=8", "trainer.accumulate_grad_batches=2"])
    for given, expected in (("auto", 2), (9, 9)):  # of 56 steps, 7 an epoch
        found = settings.Settings(cfg.replace({"trainer.log_every_n_steps": given}), WORLD).with_auto_resolved(
            DATA, samples=245
        )
        assert found.cfg.trainer.log_every_n_steps == expected


@pytest.fixture
def gpus(monkeypatch):
    """Makes the driver show GPUs of these compute capabilities, with an installed torch of that build."""

    def forget() -> None:
        world.capabilities.cache_clear()
        world.why_no_gpu.cache_clear()

    def show(*capabilities: int, driver=13000, built="13.0", of=world.CUDA) -> None:
        count, attribute, major, minor = of
        answers = {count: lambda: len(capabilities), "cuDriverGetVersion": lambda: driver}
        digits = {major: 0, minor: 1}
        answers[attribute] = lambda attribute, gpu: divmod(capabilities[gpu], 10)[digits[attribute]]
        monkeypatch.setattr(world, "query_driver", lambda name, *given: answers.get(name, lambda *_: 0)(*given))
        kind = "cuda" if of == world.CUDA else "hip"
        monkeypatch.setattr(world, "version_of_torch", lambda asked: built if asked == kind else "")
        forget()

    yield show
    forget()


@pytest.mark.parametrize(
    ("capabilities", "strategy", "expected"),
    [
        ([80, 90], "ddp", "bf16-mixed"),
        ([75], "single", "16-mixed"),  # a T4
        ([90, 75], "ddp", "16-mixed"),  # all processes compute alike
        ([75], "fsdp", "32-true"),  # which has no loss scaling
        ([61], "single", "32-true"),
    ],
)
def test_a_gpu_is_asked_for_its_generation(gpus, capabilities, strategy, expected):
    gpus(*capabilities)
    found = settings.Settings.of(resolve([f"strategy={strategy}"]), {})
    assert found.world.accelerator == "cuda"
    assert found.with_auto_resolved(DATA).cfg.trainer.precision == expected


UNUSABLE = [
    ({"built": ""}, "was built without CUDA"),
    ({"driver": 12040}, "needs a driver for CUDA 13.0"),
    ({"of": world.HIP, "built": ""}, "was built without HIP"),
]
USABLE = [
    {"of": world.HIP, "built": "6.4.43483-a187df25c"},
    {"built": None},
    {"driver": 13020},
]  # unknown: the driver is believed


def test_a_gpu_that_the_installed_torch_cannot_use_is_none(gpus):
    usual, asked = resolve([]), ["trainer.accelerator=gpu"]
    for shown, why in UNUSABLE:
        gpus(90, **shown)
        assert settings.Settings.of(usual, {}).world.accelerator == "cpu"
        with pytest.raises(UserError, match=f"^trainer.accelerator=gpu needs a GPU, but the installed torch .*{why}"):
            resolve(asked)
    for shown in USABLE:
        gpus(90, **shown)
        assert settings.Settings.of(usual, {}).world.accelerator == "cuda"
        assert (resolve(asked).trainer.accelerator, world.why_no_gpu()) == ("gpu", None)


def test_a_run_that_falls_back_to_the_cpu_says_why(gpus, train, capfd, monkeypatch):
    gpus(70, built="")
    monkeypatch.setattr(start.local, "run_in_this_process", lambda *_: 1 / 0)  # far enough
    with pytest.raises(ZeroDivisionError):
        train("trainer.accelerator=auto")
    warning = "WARNING: running on the CPU: the installed torch was built without CUDA"
    assert warning in capfd.readouterr().err


@pytest.mark.parametrize(
    ("size", "cores", "devices", "expected"),
    [(10, 16, 4, 0), (60, 16, 4, 3), (60, 2, 1, 1), (60, 2, 4, 1), (60, 128, 2, 8), (None, 16, 4, 3)],
)
def test_workers_load_what_does_not_fit_into_memory_or_has_to_be_decoded(monkeypatch, size, cores, devices, expected):
    monkeypatch.setattr(settings, "memory_bytes", lambda: 100)
    monkeypatch.setattr(settings, "cores", lambda: cores)
    assert settings.workers(size, replace(WORLD, devices=devices, strategy="ddp", one_process=False)) == expected


@pytest.mark.parametrize(("on_device", "expected"), [("auto", 3), (True, 0)])
def test_what_is_kept_on_a_gpu_needs_no_workers(monkeypatch, on_device, expected):
    monkeypatch.setattr(settings, "memory_bytes", lambda: 100)
    monkeypatch.setattr(settings, "cores", lambda: 4)
    assert decided(loader__on_device=on_device).loader.num_workers == expected


@pytest.mark.skipif(system.WINDOWS, reason="Windows has no such limits")
def test_a_container_has_less_memory_than_its_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(system, "CONTAINER_LIMITS", [])
    machine = system.memory_bytes()
    monkeypatch.setattr(system, "CONTAINER_LIMITS", [tmp_path / "memory.max", tmp_path / "absent"])
    for limit, expected in (("max", machine), ("1048576", 1048576), ("9223372036854771712", machine)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert system.memory_bytes() == expected


@pytest.mark.parametrize(
    ("external", "env", "expected"),
    [
        (None, {"OMP_NUM_THREADS": "1"}, None),
        ("torchrun", {"OMP_NUM_THREADS": "1"}, 4),  # what torchrun sets by itself
        ("torchrun", {"OMP_NUM_THREADS": "3"}, None),
        ("slurm", {}, 4),
        ("slurm", {"SLURM_CPUS_ON_NODE": "4"}, 2),  # of the node's 8
        ("slurm", {"SLURM_CPUS_ON_NODE": "16"}, 8),  # bound to these
        ("slurm", {"SLURM_CPUS_PER_TASK": "6"}, 6),
        ("slurm", {"OMP_NUM_THREADS": "2"}, None),
    ],
)
def test_processes_of_a_node_share_its_cores(monkeypatch, external, env, expected):
    monkeypatch.setattr("lockstep.machine.world.cores", lambda: 8)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert threads(replace(WORLD, devices=2, external=external), env) == expected
