"""Processes and devices, without torch."""

import pytest

from lockstep.config.checks import check
from lockstep.config.compose import compose_config
from lockstep.config.run_config import identify, name_of_job, stamp
from lockstep.machine import world
from lockstep.machine.world import world_of

TORCHRUN = {"TORCHELASTIC_RUN_ID": "job7", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "6", "RANK": "3"}
SLURM = {"SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_PROCID": "1", "SLURM_JOB_ID": "99", "SLURM_STEP_ID": "0"}


def config(*overrides: str):
    return compose_config("train", list(overrides))


@pytest.mark.parametrize(("overrides", "gpus", "devices", "size"), [
    (["strategy=single"], 4, 1, 1),
    (["strategy=dp"], 4, 4, 1),
    (["strategy=ddp"], 4, 4, 4),
    (["strategy=ddp"], 0, 1, 1),
    (["strategy=fsdp", "trainer.devices=-1"], 3, 3, 3),
    (["strategy=ddp", "trainer.devices=[0,2]"], 4, 2, 2),
    (["strategy=ddp", "trainer.devices='0,2,3'"], 4, 3, 3),
    (["strategy=ddp", "trainer.devices='1,'"], 4, 1, 1),
    (["strategy=ddp", "trainer.devices=2", "trainer.num_nodes=3"], 4, 2, 6),
    (["strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu"], 4, 2, 2),
])  # fmt: skip
def test_devices_and_processes(overrides, gpus, devices, size, monkeypatch):
    monkeypatch.setattr(world, "gpu_count", lambda: gpus)
    found = world_of(config(*overrides), {})
    assert (found.devices, found.size) == (devices, size)
    assert found.accelerator == ("cpu" if not gpus or "trainer.accelerator=cpu" in overrides else "cuda")


def test_torchrun_and_slurm_say_themselves_who_takes_part():
    found = world_of(config("strategy=ddp"), TORCHRUN)
    assert (found.external, found.devices, found.nodes, found.size, found.rank) == ("torchrun", 2, 3, 6, 3)
    found = world_of(config("strategy=ddp"), SLURM)
    assert (found.external, found.devices, found.nodes, found.size, found.rank) == ("slurm", 2, 2, 4, 1)
    assert world_of(config(), {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}).external is None


def test_an_interactive_step_is_one_process():
    found = world_of(
        config("strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu"), {**SLURM, "SLURM_STEP_NUM_TASKS": "1"}
    )
    assert (found.external, found.size) == (None, 2)


@pytest.mark.parametrize("strategy", ["dp", "single"])
def test_a_strategy_of_one_process_is_refused_where_several_were_started(strategy, monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    problems = check(config(f"strategy={strategy}", "trainer.accelerator=cpu"))
    assert any("Type strategy=ddp" in problem or "or type strategy=ddp" in problem for problem in problems), problems


def test_runs_of_one_second_have_different_names():
    assert len({stamp() for _ in range(20)}) == 20
    assert identify(config("run=mine"), "disk").run == "mine"
    assert identify(config(), "disk").run != identify(config(), "disk").run


def test_all_ranks_of_a_cluster_job_find_the_same_name():
    ranks = [{**TORCHRUN, "RANK": str(rank)} for rank in range(6)]
    assert {name_of_job(config(), env) for env in ranks} == {"basic_net-mnist-job7"}
    tasks = [{**SLURM, "SLURM_PROCID": str(rank)} for rank in range(4)]
    assert {name_of_job(config(), env) for env in tasks} == {"basic_net-mnist-99.0"}
