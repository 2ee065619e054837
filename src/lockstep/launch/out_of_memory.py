"""Restarts a run with smaller micro-batches, for `trainer.accumulate_grad_batches=auto`. Free of torch."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig

from lockstep.checkpoints.finding import checkpoint_if_any
from lockstep.config.batches import unit
from lockstep.config.identity import run_dir
from lockstep.config.instantiate import has_own_loaders
from lockstep.config.run_files import read_report
from lockstep.errors import OutOfMemory
from lockstep.machine import signals
from lockstep.machine.world import World
from lockstep.training.micro_batches import accumulations, batches

VMSTAT = Path("/proc/vmstat")


def first(cfg: DictConfig, world: World) -> int:
    """The fewest micro-batches; for a resumed run, the number that gives the micro-batch it had."""
    had, batch = read_report(run_dir(cfg)).get("micro_batch"), cfg.data.batch_size
    return next(
        k for k in accumulations(batch, world.size, unit(cfg)[0]) if had is None or batch // (world.size * k) <= had
    )


def begin_anew(cfg: DictConfig) -> None:
    """Removes the files of a run that died before its first checkpoint."""
    for left in ("config.yaml", "metrics.csv"):
        (run_dir(cfg) / left).unlink(missing_ok=True)
    shutil.rmtree(run_dir(cfg) / "tensorboard", ignore_errors=True)


def until_it_fits(run: Callable[[DictConfig, World], None], cfg: DictConfig, world: World) -> None:
    """Runs with as few micro-batches per step as memory allows. Each attempt continues from the previous one's last checkpoint.

    Raises:
        OutOfMemory: a smaller micro-batch does not help, or does not exist.
    """
    cfg = cfg.copy()
    cfg.trainer.accumulate_grad_batches = first(cfg, world)
    while True:
        try:
            return run(cfg, world)
        except OutOfMemory as e:
            if e.accumulate is None or signals.received:
                raise
            before = batches(cfg, world)["micro_batch"]
            cfg.trainer.accumulate_grad_batches = e.accumulate
        newest = checkpoint_if_any(run_dir(cfg))
        cfg.resume = str(newest) if newest else cfg.resume
        if not cfg.resume:
            begin_anew(cfg)
        now = batches(cfg, world)
        words = f"{now['micro_batch']} x {now['accumulate_grad_batches']} accumulated"
        print(f"a micro-batch of {before} does not fit in memory; continuing with {words}", file=sys.stderr, flush=True)


def kernel_kills() -> int:
    """How many processes the kernel has killed because the machine or a container ran out of memory; 0 if unknown."""
    try:
        lines = VMSTAT.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def killed(cfg: DictConfig, world: World, rank: int, *, by_kernel: bool, trains: bool) -> OutOfMemory:
    """The error for a process ended by SIGKILL, which usually means that the kernel ran out of memory."""
    by = "by the kernel: memory ran out" if by_kernel else "by SIGKILL, which usually means that memory ran out"
    who = f"rank {rank}" if world.size > 1 else "the process"
    fewer = "fewer data.num_workers, or a smaller data.eval_batch_size"
    if not trains:
        return OutOfMemory(f"{who} of the evaluation was ended {by}. Try {fewer}; the figures stay the same.")
    if has_own_loaders(cfg):
        return OutOfMemory(
            f"{who} of the run was ended {by}. Try smaller batches or fewer workers in {cfg.data._target_}."
        )
    now, batch = cfg.trainer.accumulate_grad_batches, cfg.data.batch_size
    more = next((k for k in accumulations(batch, world.size, unit(cfg)[0]) if k > now), None)
    smaller = f"trainer.accumulate_grad_batches={more} (the global batch stays {batch})" if more else "a smaller model"
    return OutOfMemory(f"{who} of the run was ended {by}. Try {smaller}, {fewer}.", more if by_kernel else None)
