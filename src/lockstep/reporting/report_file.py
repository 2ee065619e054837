"""The status of a run that could not write its own end, and the names of its test figures. Free of torch."""

import socket
from pathlib import Path
from typing import Any

from lockstep.config.run_files import read_report
from lockstep.errors import UserError
from lockstep.machine import lock
from lockstep.machine.files import write_json

SEPARATOR = " | "  # of names in `evaluated`: values of report.json are neither lists nor dicts


def evaluated(report: dict[str, Any]) -> list[str]:
    """The names of the test figures, which a LightningModule may call as it likes."""
    return [name for name in str(report.get("evaluated", "")).split(SEPARATOR) if name in report]


def status(folder: Path, report: dict[str, Any]) -> str:
    """The status of a run; `died` if it did not write its end: `running`, on this machine, but no process holds its lock."""
    died = report["status"] == "running" and report.get("host") == socket.gethostname() and not lock.is_taken(folder)
    return "died" if died else str(report["status"])


def mark_ended(folder: Path, error: BaseException) -> None:
    """Sets the final status if the processes could not. At Ctrl-C, one may fail because another is gone already."""
    if getattr(error, "exit_code", 1) == 2 or isinstance(error, UserError) or not (folder / "report.json").is_file():
        return
    report = read_report(folder)
    if report["status"] in ("running", "failed" if isinstance(error, KeyboardInterrupt) else "running"):
        ended = "failed" if isinstance(error, Exception) else "interrupted"
        write_json(folder / "report.json", report | {"status": ended, "error": str(error) or type(error).__name__})
