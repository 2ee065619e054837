"""The jobs that commands run, and the processes of a run on this machine, one per device."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep import PACKAGE, ROOT, TEMPLATE, WHEEL
from lockstep.config import project
from lockstep.config.draft import Draft
from lockstep.config.run_config import Request
from lockstep.config.settings import Settings
from lockstep.errors import Preempted, ProcessDied, RunFailed, UserError, did_you_mean, raise_problems
from lockstep.launch.exits import INTERRUPTED
from lockstep.machine import process, system
from lockstep.machine.files import parts_in
from lockstep.machine.world import World, rank_of

if TYPE_CHECKING:
    from lockstep.reporting.recorder import Page

# --- The scripts of commands, from the project or Lockstep, and the jobs that they define ---

SCRIPTS = (TEMPLATE, PACKAGE / "scripts" if WHEEL else ROOT / "scripts")


@dataclass(frozen=True)
class Job:
    """What a script defines: its name, which is that of its config, and functions that each process of a run calls."""

    name: str
    run: Callable[[Settings, Any], Any]  # the work of one process, from the settings and the data
    # Creates the data set, or returns None for a LightningDataModule. Called once in each process.
    data: Callable[[Settings], Any]
    page: "Page | None" = None  # writes the page of a run that ends, even if it fails before `run` is called
    # Completes the request of a command and checks it, before anything is imported or read. Gets the keys that are typed.
    request: Callable[[Settings, Request, list[str]], Settings] | None = None
    script: Path = field(default_factory=lambda: Path(sys.argv[0]).resolve())  # executed by the run's other processes

    @property
    def trains(self) -> bool:
        """False if the job evaluates an existing run."""
        return self.name not in ("eval", "predict")

    def __call__(self, settings: Settings, data: Any = None) -> Any:
        """Does this process's part, with the data that it has already read, or reads it."""
        from lockstep import build  # imports torch and Lightning (7 s)
        from lockstep.config.checks import signature_problems

        # a caller's process gets the state of the libraries back
        with nullcontext() if process.is_command else process.libraries_restored():
            build.process(settings)
            if self.trains:  # the config of an evaluation has already trained
                raise_problems(signature_problems(settings, shipped=False))
            numbered = settings.with_pretraining_values()
            is_read = data is not None and numbered is settings
            return self.run(numbered, data if is_read else self.read_data(numbered))

    def read_data(self, settings: Settings) -> Any:
        """The data set, ready to be read; None for data with its own dataloaders, or if the job needs no data set.

        Each process draws the same random numbers from its constructor to its last part.
        """
        if settings.loader is None or (settings.request and settings.request.part is None):  # files are predicted
            return None
        with process.seeded_and_restored(settings.seed):
            if (data := self.data(settings)) is not None:
                data.operations = settings.operations
                data.evaluates = settings.cfg.trainer.limit_train_batches == 0
                if rank_of() == 0 and (plan := data.storage_plan()):  # `prepare` may take long
                    print(plan, file=sys.stderr)
                data.prepare()
                for part in data.every_part:
                    data.samples(part)
        return data


def data(settings: Settings) -> Any:
    """Creates the data set of the config `data`. Free of torch if its class is."""
    from lockstep.config.instantiate import create_data

    assert settings.loader
    settings.built_groups.add("data")
    return create_data(settings.cfg.data, settings.loader)


def scripts() -> dict[str, Path]:
    """All scripts by name (train, eval, runs, ...): the project's if it exists, else Lockstep's."""
    root = project.current().root
    shipped = {path.stem: path for folder in SCRIPTS for path in sorted(folder.glob("*.py"))}
    own = {name: root / f"{name}.py" for name in shipped} if root else {}
    return {name: own[name] if name in own and own[name].is_file() else path for name, path in shipped.items()}


def script(name: str) -> Path:
    """The script `name`. Raises UserError if it does not exist."""
    found = scripts()
    if name not in found:
        hint = did_you_mean(name, found)
        raise UserError(f"lockstep {name}: there is no such command{hint}; use one of {', '.join(found)}.")
    return found[name]


def load(path: Path) -> Job:
    """The JOB of a script. Raises UserError if the script has none."""
    # Not with runpy, which does not guarantee that functions can be used afterwards.
    spec = util.spec_from_file_location(f"lockstep_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    earlier = sys.modules.pop("train", None)  # perhaps of a different project; eval.py imports the one in its folder
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
        sys.modules.pop("train", None)
        sys.modules |= {"train": earlier} if earlier else {}
    job: Job | None = getattr(module, "JOB", None)
    if not isinstance(job, Job):
        raise UserError(f'{path} has no JOB. Add JOB = launch.Job("{path.stem}", <function>, data) to it.')
    return replace(job, script=path)


def job(name: str) -> Job:
    """The template's job `train`, `eval` or `predict`, for a project's script that does not define its own job."""
    return replace(load(TEMPLATE / f"{name}.py"), script=Path(sys.argv[0]).resolve())


# --- What a process that Lockstep starts gets from its parent ---
#
# Lightning starts processes by repeating the command line, so under a Hydra multirun each child would repeat the whole
# sweep (Lightning#11300). Here each process gets the config of its job; LOCAL_RANK shows Lightning that the processes
# are started.

VARIABLE = "LOCKSTEP_JOB"  # the file of the hand-over: an environment string holds at most 128 KiB
Process = subprocess.Popen[bytes]


@dataclass(frozen=True)
class Handover:
    """The settings of a rank of a run; or the draft of a job of a multirun, which is a separate command."""

    work: Settings | Draft
    overrides: Sequence[str] = ()  # of a job
    debug_rank: int | None = None
    from_notebook: bool = False
    end_file: Path | None = None  # which a rank creates when it is done


def spawn(script: Path, env: Mapping[str, str], handover: Handover, **options: Any) -> Process:
    """Runs `script` in a process that ends with this one, because its standard input is a pipe from this one.

    It reads the hand-over from a new file, which no other user can read, and removes the file.
    """
    descriptor, file = tempfile.mkstemp(prefix="lockstep-")
    with os.fdopen(descriptor, "wb") as stream:
        pickle.dump(handover, stream)
    env = {**env, **project.environment(), VARIABLE: file}
    return subprocess.Popen([sys.executable, str(script)], env=env, **{"stdin": subprocess.PIPE, **options})


def received_handover() -> Handover | None:
    """The parent's hand-over; None in a process that a user started."""
    if VARIABLE not in os.environ:
        return None
    file = Path(os.environ.pop(VARIABLE))
    handover: Handover = pickle.loads(file.read_bytes())  # only this user can write it
    file.unlink()
    rank = handover.work.world.rank if isinstance(handover.work, Settings) else None
    process.started_by_lockstep, process.debug_rank = rank is not None, handover.debug_rank
    process.from_notebook = handover.from_notebook
    process.end_with_parent(has_pipe=rank is None or rank != handover.debug_rank)
    return handover


# --- The processes of a run on this machine, one per device. All end if one fails or the parent dies ---

# Time for the other processes to end after one failed: rank 0 may be writing the report, and its loggers have 5 s.
FAILING_S = 6.0
SAVING_S = 60.0  # the same after a warning signal or while saving: rank 0 may be finishing W&B's run
EXIT_S = 60.0  # time for the other processes and for exit handlers after the first process is done
GRACE_S = 10.0  # from a second Ctrl-C until the parent ends a process


@contextmanager
def reserve_port() -> Iterator[int]:
    """Reserves a port of this machine until rank 0 opens it, which takes seconds because rank 0 imports torch first.

    Two sockets that both reuse addresses, as torch's do, can be bound to the same port as long as only one of them
    listens.
    """
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("127.0.0.1", 0))
        port = int(s.getsockname()[1])
        if system.WINDOWS:  # torch requires exclusive use of the port there
            s.close()
        yield port


def environment(world: World, port: int) -> dict[str, str]:
    """The environment variables of the process with rank `world.rank`."""
    count, (node, local_rank) = world.size // world.nodes, divmod(world.rank, world.devices)
    # One thread per core in every process would slow all of them down. A single process keeps torch's default.
    several = {"OMP_NUM_THREADS": str(max(1, system.cores() // count))} if count > 1 else {}
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if world.nodes == 1 else {}
    # As torchrun sets them: data sets and libraries read them. Not TORCHELASTIC_RUN_ID: no agent supervises the process.
    place = dict.fromkeys(("RANK", "ROLE_RANK"), world.rank) | dict.fromkeys(("NODE_RANK", "GROUP_RANK"), node)
    place |= {"LOCAL_RANK": local_rank, "WORLD_SIZE": world.size, "LOCAL_WORLD_SIZE": count}
    return {**several, **os.environ, **here, **{name: str(number) for name, number in place.items()}}


def run_in_this_process(job: Job, settings: Settings, data: Any = None, *, end_file: Path | None = None) -> Any:
    """Runs the job in this process and logs its output.

    Then creates `end_file`, to report to the parent that this rank is done, and waits for the other ranks: if this
    process ended first, each of them would fail with a traceback about a lost connection.
    """
    log = process.RankLog(settings.folder.path, settings.world.rank) if process.is_command else nullcontext()
    with process.breakpoints(), log, ExitStack() as end:
        end.push(lambda error, *_: process.monitor and process.monitor.finish(failed=error is not None))
        try:
            result = job(settings, data)
        except SystemExit as e:
            if isinstance(e.__context__, KeyboardInterrupt):
                raise
            if process.received:  # raised by Lightning after SIGTERM, in a job with its own Trainer
                raise Preempted(f"ended by {process.received[0].name}; rerun the command.") from None
            if not e.code:  # it would count as done
                raise RuntimeError("sys.exit was called before the run was done") from e
            raise
        if end_file is not None:
            end_file.touch()
        return result


def run_processes(script: Path, settings: Settings, *, trains: bool = True) -> None:
    """Runs `script` once for each process of this node and waits until all have ended.

    Raises:
        RunFailed: a process failed; has the exit code of the first one.
        ProcessDied: a signal ended a process.
        KeyboardInterrupt: after the processes have saved, or immediately after a second Ctrl-C.
    """
    world, debug_rank = settings.world, process.debug_rank
    if trains or debug_rank is not None:
        process.install(interrupt=process.on_interrupt)
    processes: list[Process] = []
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder, reserve_port() as port:
        end_files = [Path(folder) / str(local_rank) for local_rank in range(world.size // world.nodes)]
        try:
            for rank, end_file in enumerate(end_files, world.rank):
                work = replace(settings, world=replace(world, rank=rank))
                streams: dict[str, Any] = {"stdin": None} if rank == debug_rank else {}
                if rank != (debug_rank or 0):
                    streams["stdout"] = subprocess.DEVNULL
                part = Handover(work, (), debug_rank, process.in_notebook(), end_file)
                processes.append(spawn(script, environment(work.world, port), part, **streams))
            code = wait(processes, end_files, settings.folder.checkpoints)
            rank = world.rank + next((i for i, child in enumerate(processes) if child.poll() == code), 0)
        finally:
            for child in processes:  # the others wait for the failed one, and SIGTERM would only make them save
                child.kill()
            for child in processes:
                with child:  # waits and closes its pipe
                    pass
    if code and signal.SIGINT in process.received:
        raise KeyboardInterrupt
    if -code in process.received:  # before the process could save
        raise Preempted(f"ended by {signal.Signals(-code).name} before anything could be saved; rerun the command.")
    if code < 0:
        name = signal.Signals(-code).name
        advice = " If memory ran out, try fewer loader.num_workers or smaller batches." if name == "SIGKILL" else ""
        raise ProcessDied(f"rank {rank} was killed by {name}; the other processes ended too.{advice}")
    if code:
        raise RunFailed(f"a process of the run ended with exit code {code}", code if code in (2, INTERRUPTED) else 1)


def wait(processes: list[Process], end_files: Sequence[Path] = (), checkpoints: Path | None = None) -> int:
    """Waits; 0 if all processes succeed, else the first nonzero exit code, after FAILING_S for the others to fail.

    After the first process, which writes the report, is done, the others have EXIT_S: they are no longer needed, and
    one may hang. Warning signals are forwarded, so the processes save and end. After a second Ctrl-C they have GRACE_S.
    """
    first, deadline, passed_on = 0, float("inf"), 0
    while True:
        for warning in process.received[passed_on:]:
            for child in processes:
                child.send_signal(warning)
            passed_on += 1
        if process.received.count(signal.SIGINT) > 1:
            deadline = min(deadline, time.monotonic() + GRACE_S)
        codes = [child.poll() for child in processes]
        failed = [code for code in codes if code]
        if failed and not first:
            saving = passed_on or (checkpoints and parts_in(checkpoints))
            first = next((code for code in failed if code < 0), failed[0])  # a killed process makes the others fail
            deadline = time.monotonic() + (SAVING_S if saving else FAILING_S)
        elif deadline == float("inf") and any(path.exists() for path in end_files[:1]) and process.debug_rank is None:
            deadline = time.monotonic() + EXIT_S
        if None not in codes or time.monotonic() > deadline:
            return first
        time.sleep(0.05)
