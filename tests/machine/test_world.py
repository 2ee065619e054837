"""Processes and devices, without torch: a launcher's variables are followed where they fit together, refused where they don't."""

import re

import pytest
import torch
from in_process import config_of

import lockstep
from lockstep.config.checks import check, resolve
from lockstep.config.compose import compose_config
from lockstep.config.draft import Draft, name_of_job, timestamp
from lockstep.config.settings import Settings
from lockstep.errors import UserError
from lockstep.machine import world
from lockstep.machine.world import external_launcher, launcher_problems, rank_of

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "job7", "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "3", "MASTER_ADDR": "host", "MASTER_PORT": "29400", "TORCHELASTIC_RESTART_COUNT": "1",
}  # fmt: skip
SLURM = {
    "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2",
    "SLURM_JOB_ID": "99", "SLURM_STEP_NUM_TASKS": "4",
}  # fmt: skip


CPU = "trainer.accelerator=cpu"


def draft(*overrides: str) -> Draft:
    return Draft(compose_config("train", overrides))


def problems(*overrides: str) -> tuple[str, ...]:
    with pytest.raises(UserError) as error:
        check(draft(*overrides))
    return error.value.problems


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


@pytest.mark.parametrize(
    ("env", "launcher", "rank"),
    [
        ({}, None, 0),
        (TORCHRUN, "torchrun", 3),
        (SLURM, "slurm", 1),
        ({**SLURM, **TORCHRUN}, "torchrun", 3),  # srun starts torchrun
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, None, 0),
        ({"SLURM_JOB_ID": "9", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}, None, 0),  # sbatch
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, None, 0),  # interactive
        ({"MASTER_ADDR": "host", "MASTER_PORT": "29400", "NODE_RANK": "1"}, None, 0),  # several nodes by hand
    ],
)
def test_a_complete_set_is_followed(env, launcher, rank):
    assert launcher_problems(env) == []
    assert (external_launcher(env), rank_of(env)) == (launcher, rank)


@pytest.mark.parametrize(("env", "parts"), [
    ({"RANK": "1"}, ["RANK=1", "neither torchrun", "run unset RANK, then rerun the command"]),
    ({"RANK": "abc"}, ["RANK=abc", "not a whole number"]),
    ({"RANK": ""}, ["RANK=", "not a whole number"]),
    ({**SLURM, "SLURM_NTASKS": "x"}, ["SLURM_NTASKS=x", "not a whole number"]),
    ({"SLURM_PROCID": "1", "SLURM_JOB_ID": "9"}, ["SLURM_PROCID=1", "unset SLURM_JOB_ID SLURM_PROCID"]),
    (without(TORCHRUN, "TORCHELASTIC_RUN_ID"), ["RANK=3", "neither torchrun", "MASTER_ADDR"]),
    (without(TORCHRUN, "RANK", "MASTER_PORT"), ["RANK, MASTER_PORT", "missing", "TORCHELASTIC_RUN_ID"]),
    (without(SLURM, "SLURM_PROCID"), ["SLURM_PROCID", "missing", "SLURM_STEP_ID"]),
    ({**TORCHRUN, "RANK": "6"}, ["RANK=6, WORLD_SIZE=6", "contradict"]),
    ({**TORCHRUN, "WORLD_SIZE": "5"}, ["WORLD_SIZE=5, LOCAL_WORLD_SIZE=2", "contradict"]),
    ({**TORCHRUN, "LOCAL_WORLD_SIZE": "0"}, ["LOCAL_WORLD_SIZE=0", "contradict"]),
    ({**SLURM, "SLURM_NTASKS": "3"}, ["SLURM_NTASKS=3, SLURM_NNODES=2", "contradict", "same number of processes"]),
    ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "3,1"}, ["SLURM_STEP_TASKS_PER_NODE=3,1", "contradict"]),
    ({**SLURM, "SLURM_PROCID": "7"}, ["SLURM_PROCID=7, SLURM_NTASKS=4", "contradict"]),
])  # fmt: skip
def test_a_part_of_a_set_is_refused_by_name_with_what_to_type(env, parts):
    (problem,) = launcher_problems(env)
    assert [part for part in parts if part not in problem] == [], problem
    left = without(env, *re.search(r"run unset ([\w ]+)", problem)[1].split())
    assert launcher_problems(left) == [], "what it says to type helps"


def test_variables_that_contradict_the_config_are_refused(monkeypatch):
    monkeypatch.setenv("NODE_RANK", "1")
    (problem,) = problems("strategy=ddp", "trainer.devices=2", CPU)
    assert re.search("NODE_RANK=1.*run unset NODE_RANK", problem)
    monkeypatch.delenv("NODE_RANK")
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    for strategy in ("dp", "single"):
        told = problems(f"strategy={strategy}", CPU)
        assert any(re.search("[Ss]et strategy=ddp", problem) for problem in told), told


def test_a_process_with_a_stale_rank_reports_it_itself(forked_command, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(UserError, match="RANK=1 in the environment"):
        lockstep.train(["debug=one_batch"])
    done = forked_command("train.py", "debug=one_batch", env={"RANK": "1"})
    assert (done.code, forked_command.files()) == (2, []), done
    assert done.err.startswith("error: RANK=1"), done


@pytest.mark.parametrize(("overrides", "gpus", "devices", "size"), [
    (["strategy=single"], 4, 1, 1),
    (["strategy=dp"], 4, 4, 1),
    (["strategy=ddp"], 4, 4, 4),
    (["strategy=ddp"], 0, 1, 1),
    (["strategy=fsdp", "trainer.devices=-1"], 3, 3, 3),
    (["strategy=ddp", "trainer.devices=[0,2]"], 4, 2, 2),
    (["strategy=ddp", "trainer.devices=2", "trainer.num_nodes=3"], 4, 2, 6),
    (["strategy=ddp", "trainer.devices=2", CPU], 4, 2, 2),
])  # fmt: skip
def test_devices_and_processes(overrides, gpus, devices, size, monkeypatch):
    monkeypatch.setattr(world, "gpu_count", lambda: gpus)
    found = Settings.of(config_of(*overrides), {}).world
    assert (found.devices, found.size) == (devices, size)
    assert found.accelerator == ("cpu" if not gpus or CPU in overrides else "cuda")


ALONE = {**SLURM, "SLURM_STEP_NUM_TASKS": "1"}  # an interactive step


@pytest.mark.parametrize(("env", "expected"), [
    (TORCHRUN, ("torchrun", 2, 3, 6, 3)), (SLURM, ("slurm", 2, 2, 4, 1)), (ALONE, (None, 2, 1, 2, 0)),
])  # fmt: skip
def test_torchrun_and_slurm_say_themselves_who_takes_part(env, expected):
    found = Settings.of(config_of("strategy=ddp", "trainer.devices=2", CPU), env).world
    assert (found.external, found.devices, found.nodes, found.size, found.rank) == expected


def test_runs_of_one_second_have_different_names():
    assert len({timestamp() for _ in range(20)}) == 20
    settings = check(draft(CPU))
    assert settings.with_run_identity().cfg.run != settings.with_run_identity().cfg.run
    assert check(draft("run=mine", CPU)).with_run_identity().cfg.run == "mine"


def test_all_ranks_of_a_cluster_job_find_the_same_name():
    ranks = [{**TORCHRUN, "RANK": str(rank)} for rank in range(6)]
    assert {name_of_job(draft().model_and_data, env) for env in ranks} == {"basic_net-mnist-job7"}
    tasks = [{**SLURM, "SLURM_PROCID": str(rank)} for rank in range(4)]
    assert {name_of_job(draft().model_and_data, env) for env in tasks} == {"basic_net-mnist-99.0"}


# --- What is read from torch's files is what torch itself says ---


def test_torch_was_built_for_what_its_files_say():
    """When this fails, machine/world.py looks in the wrong place."""
    assert world.version_of_torch("cuda") == (torch.version.cuda or "")
    assert world.version_of_torch("hip") == (torch.version.hip or "")


def test_a_build_without_cuda_has_none(tmp_path, monkeypatch):
    monkeypatch.setattr(world, "torch_folder", lambda: tmp_path)
    for text, expected in (("", None), ("cuda: Optional[str] = None\n", ""), ("cuda = '12.6'\n", "12.6")):
        (tmp_path / "version.py").write_text(text)
        assert world.version_of_torch.__wrapped__("cuda") == expected
    (tmp_path / "version.py").write_text("cuda = None\nhip: Optional[str] = '6.4.43483-a187df25c'\n")
    assert world.version_of_torch.__wrapped__("hip") == "6.4.43483-a187df25c"


def test_what_each_process_would_draw_for_itself_is_refused(monkeypatch):
    ddp = ["strategy=ddp", "trainer.accelerator=cpu", "seed=null"]
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="seed=null would give each process that slurm started a different seed"):
        resolve(ddp)
    for name in SLURM:
        monkeypatch.delenv(name)
    for name, value in {"MASTER_ADDR": "host", "MASTER_PORT": "29400", "NODE_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"needs MASTER_ADDR, MASTER_PORT and NODE_RANK .* and run=<name>"):
        resolve([*ddp, "trainer.num_nodes=2"])
    assert resolve([*ddp, "trainer.num_nodes=2", "run=a"]).seed is not None
