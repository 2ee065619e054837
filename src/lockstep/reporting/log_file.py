"""train.log: what Lockstep and Lightning log, and all warnings, which also go to the screen."""

import logging
import re
import sys
from contextlib import suppress
from pathlib import Path

LOGGED = ("lockstep", "lightning.pytorch", "py.warnings")
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ([A-Z]+) (.*)")


class LogFile(logging.FileHandler):
    """A full disk ends no run here, and prints no traceback for each line."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class Logs:
    """The handlers of a run."""

    def __init__(self) -> None:
        self.handlers: list[logging.Handler] = []

    def open(self, folder: Path) -> None:
        to_file, to_screen = LogFile(folder / "train.log", encoding="utf-8"), logging.StreamHandler()
        to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        to_screen.setLevel(logging.WARNING)
        logging.captureWarnings(True)  # warnings go to both
        self.handlers = [to_file, to_screen]
        for name in ("lockstep", "py.warnings"):
            logging.getLogger(name).addHandler(to_screen)
        for name in LOGGED:
            logging.getLogger(name).addHandler(to_file)
        logging.getLogger("lockstep").setLevel(logging.INFO)

    def close(self) -> None:
        for handler in self.handlers:
            for name in LOGGED:
                logging.getLogger(name).removeHandler(handler)
            with suppress(OSError):  # what a full disk did not take
                handler.close()
        logging.captureWarnings(False)


def lines_of(path: Path) -> list[str]:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    return []


def warnings_in(lines: list[str]) -> list[str]:
    """The warnings of a train.log, each once."""
    found = (LINE.match(line) for line in lines)
    return list(dict.fromkeys(match[2] for match in found if match and match[1] == "WARNING"))
