"""The variables by which torchrun and SLURM tell a process its place, and whether they fit together. Free of torch."""

from collections.abc import Iterable, Iterator, Mapping

TORCHRUN, SLURM = "torchrun", "slurm"
STARTED_BY = {TORCHRUN: "TORCHELASTIC_RUN_ID", SLURM: "SLURM_STEP_ID"}
NEEDED = {  # besides
    TORCHRUN: ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    SLURM: ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_JOB_ID"),
}
OTHERS = ("GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK", "TORCHELASTIC_RESTART_COUNT", "SLURM_NNODES", "SLURM_JOB_NUM_NODES",
          "SLURM_STEP_NUM_TASKS", "SLURM_RESTART_COUNT", "SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE")  # fmt: skip
NUMBERS = [name for name in (*NEEDED[TORCHRUN], *NEEDED[SLURM], *OTHERS) if name != "MASTER_ADDR"]
# In the order of (a place, how many there are). The first count is a multiple of the second.
PLACES = {
    TORCHRUN: (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("GROUP_RANK", "GROUP_WORLD_SIZE")),
    SLURM: (("SLURM_PROCID", "SLURM_NTASKS"), ("SLURM_NODEID", "SLURM_NNODES")),
}
# What a process that nobody else started may find: one process at place 0. SLURM's counts are those of the whole job.
ALONE = {
    "RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "GROUP_WORLD_SIZE": 1,
    "SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_NODEID": 0,
}  # fmt: skip


def number(env: Mapping[str, str], *names: str, default: int = 1) -> int:
    """The first of `names` that is set; `default` if none is, or if it is not a number (see `launcher_problems`)."""
    value = next((env[name] for name in names if name in env), "")
    return int(value) if value.isdecimal() else default


def external_launcher(env: Mapping[str, str]) -> str | None:
    """The launcher that started this process as one of several, if not Lockstep."""
    if STARTED_BY[TORCHRUN] in env:
        return TORCHRUN
    # Tasks of the step; an interactive step has 1. The batch script itself has no step id.
    tasks = number(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    return SLURM if tasks > 1 and STARTED_BY[SLURM] in env else None


def way_out(env: Mapping[str, str], names: Iterable[str]) -> str:
    """What to type. A launcher's variables go together: without one of them the others are refused."""
    wrong = set(names)
    families = [[STARTED_BY[who], *NEEDED[who], *(n for pair in PLACES[who] for n in pair)] for who in NEEDED]
    there = [n for family in families if wrong & set(family) for n in family if n in env]
    unset = " ".join(dict.fromkeys([*there, *(n for n in wrong if n in env)]))
    return f"If they are left over from another job, type unset {unset}, then the command again."


def contradictions(env: Mapping[str, str], launcher: str) -> Iterator[tuple[str, str]]:
    for place, count in PLACES[launcher]:
        if place in env and count in env and int(env[place]) >= int(env[count]):
            yield place, count
    (_, whole), (_, part), *_ = PLACES[launcher]
    if part in env and (int(env[part]) == 0 or int(env[whole]) % int(env[part])):
        yield whole, part


def launcher_problems(env: Mapping[str, str]) -> list[str]:
    """Why this process cannot know its place: variables that are garbage, or not of one launcher."""
    launcher = external_launcher(env)
    needed = [STARTED_BY[launcher], *NEEDED[launcher]] if launcher else []
    missing = [name for name in needed if not env.get(name)]
    wrong = [name for name in NUMBERS if name in env and not env[name].isdecimal()]
    if wrong:
        what = ": not a whole number"
    elif launcher is None:
        wrong = [name for name, value in ALONE.items() if int(env.get(name, value)) != value]
        what = (
            f" says that this process is one of several, but neither torchrun ({STARTED_BY[TORCHRUN]}) nor a step of SLURM "
            f"({STARTED_BY[SLURM]} and SLURM_NTASKS) started it"
        )
    elif missing:
        wrong = [name for name in needed if env.get(name)]
        what = f": {launcher} also sets {', '.join(missing)}, which is missing"
    else:
        wrong = list(dict.fromkeys(name for pair in contradictions(env, launcher) for name in pair))
        what = " contradict each other"
    found = ", ".join(f"{name}={env[name]}" for name in wrong)
    return [f"{found} in the environment{what}. {way_out(env, [*wrong, *missing])}"] if wrong else []
