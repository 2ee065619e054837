"""Runs jobs of a multirun side by side on one machine: assigns devices and starts a process per job."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf

from lockstep.config import project
from lockstep.config.identity import run_dir
from lockstep.config.run_files import read_report
from lockstep.errors import RunFailed, UserError
from lockstep.launch import local
from lockstep.machine.world import accelerator_of, cores, visible_gpus, world_of
from lockstep.reporting.report_file import mark_ended
from lockstep.sweeps import table

CONFIG = "LOCKSTEP_CONFIG"
running: list[subprocess.Popen[bytes]] = []
printing = threading.Lock()


def environments(cfg: DictConfig, jobs: int | str) -> list[dict[str, str]]:
    """One environment per simultaneous job: its GPUs, or its share of the cores.

    Raises:
        UserError: `jobs` is not a number, or needs more GPUs than there are.
    """
    if jobs != "auto" and not (type(jobs) is int and jobs > 0):
        raise UserError(f"hydra.launcher.jobs={jobs} is not possible; it takes auto, or a number of at least 1.")
    if isinstance(cfg.trainer.devices, ListConfig) or "," in str(cfg.trainer.devices):
        raise UserError(
            f"trainer.devices={cfg.trainer.devices}: hydra/launcher=slots assigns the GPUs. Type trainer.devices=<how many per job>."
        )
    accelerator = accelerator_of(str(cfg.trainer.accelerator))
    each = world_of(cfg).devices
    if accelerator == "cuda":
        gpus = visible_gpus()
        count = len(gpus) // each if jobs == "auto" else int(jobs)
        if not count or count * each > len(gpus):
            raise UserError(
                f"hydra.launcher.jobs={jobs} with {each} GPUs per job needs {max(1, count) * each} GPUs; this machine has {len(gpus)}. "
                f"Type hydra.launcher.jobs={max(1, len(gpus) // each)}, or fewer trainer.devices."
            )
        return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[i * each : (i + 1) * each])} for i in range(count)]
    count = max(1, cores() // each) if jobs == "auto" else int(jobs)
    return [{"OMP_NUM_THREADS": str(max(1, cores() // count // each))}] * count


def output(cfg: DictConfig) -> Path:
    folder = run_dir(cfg)
    return folder.with_name(f"{folder.name}.log")


def say(line: str) -> None:
    with printing:
        print(line, flush=True)


def run_job(script: Path, cfg: DictConfig, overrides: list[str], environment: dict[str, str]) -> int:
    """Runs `script` for one job and waits; returns its exit code. A killed process gets a report as well."""
    job = json.dumps({"config": OmegaConf.to_container(cfg), "overrides": overrides})
    place = environment.get("CUDA_VISIBLE_DEVICES")
    say(f"{cfg.run} begins" + (f" on GPU {place}" if place else "") + f": {' '.join(table.typed(overrides))}")
    output(cfg).parent.mkdir(parents=True, exist_ok=True)
    # Hide the SLURM job around all jobs: the launcher requeues that one.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environment = {**outside, **environment, **project.environment(), CONFIG: job}
    command, pipe = [sys.executable, str(script)], subprocess.PIPE
    # In a session of its own, so Ctrl-C reaches it once, through end_all.
    with (
        output(cfg).open("ab") as log,
        subprocess.Popen(
            command, env=environment, stdin=pipe, stdout=log, stderr=log, start_new_session=True
        ) as process,
    ):
        running.append(process)
        try:
            code = local.wait([process])
        finally:
            running.remove(process)
    if code:
        mark_ended(run_dir(cfg), RunFailed(f"its process ended with exit code {code}"))
    table.record(run_dir(cfg), overrides, failed=bool(code))
    say(f"{cfg.run} {read_report(run_dir(cfg)).get('status')}")
    return 2 if code == 2 else int(code != 0)


def end_all() -> None:
    """Interrupts the jobs: Ctrl-C reaches only the parent, because jobs have their own process groups."""
    local.stop(list(running), signal.SIGINT)


def received_config() -> tuple[DictConfig, list[str]] | None:
    """The config and the overrides that `run_job` gave to this process."""
    job = local.received(CONFIG)
    return (OmegaConf.create(job["config"]), job["overrides"]) if job else None
