"""A launcher that runs several jobs of a multirun at once on this machine, each on its own GPUs.

joblib's launcher ignores GPUs and ends all jobs when one process is killed. submitit's local executor starts all jobs at once.
Heavy imports come late: Hydra imports this module at every start.
"""

import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hydra.core.utils import JobReturn, filter_overrides
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict


class SlotsLauncher(Launcher):
    """Runs `jobs` at once; `auto`: as many as there are GPUs, or cores, for all their processes."""

    def __init__(self, jobs: int | str) -> None:
        self.jobs = jobs

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config
        self.script: Path = getattr(task_function, "script")  # noqa: B009  # launch/cli.py has put it there

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Raises UserError if there are too few GPUs, KeyboardInterrupt if the system or Ctrl-C ends the launcher."""
        from lockstep.launch import sweeps
        from lockstep.machine import process

        free: queue.Queue[dict[str, str]] = queue.Queue()
        for slot in sweeps.environments(self.config, self.jobs):
            free.put(slot)

        def run(job: tuple[DictConfig, list[str]]) -> JobReturn:
            slot = free.get()
            try:
                return sweeps.run_job(self.script, *job, slot)
            finally:
                free.put(slot)

        Path(str(self.config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        jobs: list[tuple[DictConfig, list[str]]] = []
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            config = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
            with open_dict(config):
                config.hydra.job.num = number
            task_config = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
            jobs.append((sweeps.named(task_config, config.hydra), list(filter_overrides(overrides))))
        # Warnings and each Ctrl-C are passed on to the running jobs, which save and end, or end at once.
        with process.noted(interrupt=process.on_interrupt), ThreadPoolExecutor(free.qsize()) as pool:
            returns = list(pool.map(run, jobs))
            if process.received:
                process.requeue(0)
                raise KeyboardInterrupt
        return returns
