"""Restarts with smaller micro-batches, for `trainer.accumulate_grad_batches=auto`. Free of torch."""

import sys
from collections.abc import Callable

from lockstep.checkpoints.finding import checkpoint_if_any
from lockstep.config.settings import Settings
from lockstep.errors import OutOfMemory
from lockstep.machine import process
from lockstep.run import RunFolder


def run_with_auto_accumulation(run: Callable[[Settings], None], settings: Settings) -> None:
    """Runs with as few micro-batches per step as memory allows. Each attempt continues from the newest checkpoint.

    Raises:
        OutOfMemory: a smaller micro-batch does not help, or does not exist.
    """
    folder, batch, key = settings.folder, settings.steps.batch_size, "trainer.accumulate_grad_batches"
    had = max(1, folder.report().get("micro_batch") or batch)  # micro-batch of a resumed run
    fits = (k for k in settings.accumulations if batch // (settings.world.size * k) <= had)
    settings = settings.replace({key: next(fits)})
    while True:
        earlier = newest_saved(folder)
        try:
            return run(settings)
        except OutOfMemory as e:
            if e.accumulate is None or process.received:
                raise
            before, settings = settings.batches["micro_batch"], settings.replace({key: e.accumulate})
        if (newest := newest_saved(folder)) and newest != earlier:  # an old one may belong to an abandoned continuation
            settings = settings.replace({"resume": newest[0]})
        if not settings.cfg.resume:
            folder.discard()
        now = settings.batches
        words = f"{now['micro_batch']} x {now['accumulate_grad_batches']} accumulated"
        print(f"a micro-batch of {before} does not fit in memory; continuing with {words}", file=sys.stderr, flush=True)


def newest_saved(folder: RunFolder) -> tuple[str, int] | None:
    """The newest checkpoint of a run and its modification time."""
    newest = checkpoint_if_any(folder.path)
    return (str(newest), newest.stat().st_mtime_ns) if newest else None
