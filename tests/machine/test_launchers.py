"""A launcher's variables: followed where they fit together, refused where they don't."""

import re

import pytest

import lockstep
from lockstep.config.checks import check
from lockstep.config.compose import compose_config
from lockstep.errors import UserError
from lockstep.machine.world import external_launcher, launcher_problems, rank_of

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "job7", "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "3", "MASTER_ADDR": "host", "MASTER_PORT": "29400", "TORCHELASTIC_RESTART_COUNT": "1",
}  # fmt: skip
SLURM = {
    "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2",
    "SLURM_JOB_ID": "99", "SLURM_STEP_NUM_TASKS": "4",
}  # fmt: skip


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


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


@pytest.mark.parametrize(
    ("env", "parts"),
    [
        ({"RANK": "1"}, ["RANK=1", "neither torchrun", "type unset RANK, then the command again"]),
        ({"LOCAL_RANK": "1"}, ["LOCAL_RANK=1", "LOCAL_RANK"]),
        ({"WORLD_SIZE": "2", "RANK": "0"}, ["WORLD_SIZE=2", "RANK", "WORLD_SIZE"]),
        ({"RANK": "abc"}, ["RANK=abc", "not a whole number", "RANK"]),
        ({"RANK": ""}, ["RANK=", "not a whole number"]),
        ({"RANK": "-1"}, ["RANK=-1", "not a whole number"]),
        ({"MASTER_PORT": "abc"}, ["MASTER_PORT=abc", "MASTER_PORT"]),
        ({"SLURM_NTASKS": "abc"}, ["SLURM_NTASKS=abc", "SLURM_NTASKS"]),
        ({"SLURM_RESTART_COUNT": "x"}, ["SLURM_RESTART_COUNT=x", "SLURM_RESTART_COUNT"]),
        ({"SLURM_PROCID": "1", "SLURM_JOB_ID": "9"}, ["SLURM_PROCID=1", "SLURM_PROCID", "SLURM_JOB_ID"]),
        (without(TORCHRUN, "TORCHELASTIC_RUN_ID"), ["RANK=3", "TORCHELASTIC_RUN_ID", "MASTER_ADDR"]),
        (without(TORCHRUN, "RANK", "MASTER_PORT"), ["RANK, MASTER_PORT", "missing", "TORCHELASTIC_RUN_ID"]),
        (without(SLURM, "SLURM_PROCID"), ["SLURM_PROCID", "missing", "SLURM_STEP_ID"]),
        ({**TORCHRUN, "RANK": "6"}, ["RANK=6, WORLD_SIZE=6", "contradict"]),
        ({**TORCHRUN, "WORLD_SIZE": "5"}, ["WORLD_SIZE=5, LOCAL_WORLD_SIZE=2", "contradict"]),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "0"}, ["LOCAL_WORLD_SIZE=0", "contradict"]),
        ({**SLURM, "SLURM_NTASKS": "3"}, ["SLURM_NTASKS=3, SLURM_NNODES=2", "contradict"]),
        ({**SLURM, "SLURM_PROCID": "7"}, ["SLURM_PROCID=7, SLURM_NTASKS=4", "contradict"]),
    ],
)
def test_a_part_of_a_set_is_refused_by_name_with_what_to_type(env, parts, monkeypatch):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as error:
        lockstep.train(["debug=one_batch"])
    (problem,) = error.value.problems
    assert [part for part in parts if part not in problem] == [], problem
    left = without(env, *re.search(r"type unset ([\w ]+)", problem)[1].split())
    assert launcher_problems(left) == [], "what it says to type helps"


def test_a_node_that_the_run_does_not_have_is_refused(monkeypatch):
    monkeypatch.setenv("NODE_RANK", "1")
    (problem,) = check(compose_config("train", ["strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu"]))
    assert "NODE_RANK=1" in problem
    assert "type unset NODE_RANK" in problem


def test_a_process_with_a_stale_rank_reports_it_itself(forked_command):
    done = forked_command("train.py", "debug=one_batch", env={"RANK": "1"})
    assert (done.code, forked_command.files()) == (2, []), done
    assert done.err.startswith("error: RANK=1"), done
