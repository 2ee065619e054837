"""Runs in each process of refused.py before train.py (see HOOK in tests/forked.py): limits its memory and records its stages."""

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.config.settings import Settings
from lockstep.launch import start
from lockstep.run import RunFolder

MEMORY_BYTES = 3 * 2**30  # of data, so unpacking a larger archive raises MemoryError


def noting(stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        with Path(os.environ["REFUSED_STAGES"]).open("a") as file:
            file.write(f"{stage}\n")
        return call(*args, **kwargs)

    return noted


resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
for owner, name, stage in (
    (start, "check_classes", "classes"), (Settings, "with_auto_resolved", "torch"), (RunFolder, "snapshot_restorer", "run"),
):  # fmt: skip
    setattr(owner, name, noting(stage, getattr(owner, name)))
