"""Kills a process of a run at one of the moments around everything that it writes, or fills its disk there. Set by the environment."""

import os
import resource
import signal
import threading
from pathlib import Path

AT, RANK, COUNT = "TEST_KILL_AT", "TEST_KILL_RANK", "TEST_COUNT_EVENTS"
ROOM = "TEST_ROOM"  # where it is set, the disk has no more room for larger files from that moment on, instead of a kill


def count_events() -> None:
    """Counts the moments, and kills this process at the one that is asked for."""
    from lockstep.callbacks import FiniteLoss
    from lockstep.checkpoints import saving, weights
    from lockstep.machine import files
    from lockstep.reporting.loggers import MetricsCsv

    at, seen, one_thread = int(os.environ[AT]), [0], threading.Lock()

    def event(name: str) -> None:
        with one_thread:
            seen[0] += 1
            if COUNT in os.environ:
                with Path(os.environ[COUNT]).open("a") as file:
                    file.write(f"{name}\n")
            if seen[0] == at and ROOM in os.environ:
                resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ[ROOM]), resource.RLIM_INFINITY))
            elif seen[0] == at:
                os.kill(os.getpid(), signal.SIGKILL)

    def around(owner: object, name: str, *, after: bool = True) -> None:
        original = getattr(owner, name)

        def wrapped(*args: object, **kwargs: object) -> object:
            event(f"before {name}")
            result = original(*args, **kwargs)
            if after:
                event(f"after {name}")
            return result

        setattr(owner, name, wrapped)

    write = weights.write

    def write_in_two_parts(content: object, path: Path) -> None:
        write(content, path)
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        event("half of a checkpoint is written")
        path.write_bytes(whole)

    weights.write = write_in_two_parts
    for name in ("rename", "replace"):
        around(Path, name, after=False)
    around(files, "take_place")
    around(files, "remove")
    around(MetricsCsv, "log_metrics")
    around(files, "write_csv")
    around(FiniteLoss, "on_train_batch_end")
    around(saving.LastCheckpoint, "save")
    around(saving.LastCheckpoint, "tidy")
