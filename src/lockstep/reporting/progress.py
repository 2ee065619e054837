"""A line that says how far something is: a bar on a terminal, a line that is rewritten in a notebook, else a line now and then."""

import math
import sys
import time

from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from lockstep.machine.streams import in_notebook
from lockstep.reporting.console import out, say

# Seconds between two lines: at least so many, and a hundredth of the time so far; a notebook is read while it runs.
LINES_S, NOTEBOOK_S = (10.0, math.inf), (1.0, 10.0)
BAR_S = 0.1  # between two changes of a bar


def clock(seconds: float) -> str:
    minutes, s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{s:02}" if hours else f"{minutes}:{s:02}"


class Line:
    """Counts up to `total`, None if that is not known, from `first`: what a resumed run has done took no time now."""

    def __init__(self, what: str, total: float | None, first: int = 0) -> None:
        self.what, self.total, self.first = what, None if total is None or math.isinf(total) else int(total), first
        self.began_s = self.shown_s = time.monotonic()
        self.notebook, self.width = in_notebook(), 0
        self.bar: Progress | None = None
        if sys.stdout.isatty() and not out.is_dumb_terminal:
            rest = TextColumn("{task.fields[rest]}", markup=False, table_column=Column(no_wrap=False))
            columns = (TextColumn("{task.description}"), BarColumn(bar_width=16), rest)
            self.bar = Progress(*columns, console=out, refresh_per_second=4)
            self.bar.add_task("", total=self.total, completed=first, rest=f"first {what}")  # it may compile
            self.bar.start()

    def left(self, done: int, now_s: float) -> str:
        if self.total is None or done <= self.first:
            return ""
        return f"{clock((now_s - self.began_s) * (self.total - done) / (done - self.first))} left"

    def due(self, done: int) -> bool:
        """Whether `show` would change anything: asked at every step, before the figures are put into words."""
        now_s = time.monotonic()
        if self.bar is not None:
            return done == self.total or now_s - self.shown_s > BAR_S
        least, most = NOTEBOOK_S if self.notebook else LINES_S
        return now_s - self.shown_s > min(most, max(least, (now_s - self.began_s) / 100))

    def show(self, title: str, done: int, *figures: str) -> None:
        self.shown_s = now_s = time.monotonic()
        place = f"{done:,}/{'?' if self.total is None else format(self.total, ',')}"
        rest = [part for part in (self.left(done, now_s), *figures) if part]
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=done, description=title, rest=" · ".join([place, *rest]))
            return
        text = " · ".join([title, f"{self.what} {place}", *rest])
        if self.notebook:
            print(f"\r{text:{self.width}}", end="", flush=True)
            self.width = len(text)
        else:
            say(text)

    def end(self) -> None:
        if self.bar is not None:
            self.bar.stop()
        elif self.width:
            print(flush=True)
        self.bar, self.width = None, 0
