"""A launcher that runs several jobs of a multirun at once on this machine, each on its own GPUs.

joblib's launcher ignores GPUs and ends all jobs when one process is killed. submitit's local executor starts all jobs at once.
Heavy imports come late: Hydra imports this module at every start.
"""

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict


class SlotsLauncher(Launcher):
    """Runs `jobs` at once; `auto`: as many as there are GPUs, or cores, for all their processes."""

    def __init__(self, jobs: int | str) -> None:
        self.jobs = jobs

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config
        self.script: Path = getattr(task_function, "script")  # noqa: B009  # launch/cli.py has put it there

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Raises UserError if there are too few GPUs, KeyboardInterrupt if the system ends the launcher."""
        from lockstep.launch import sweeps
        from lockstep.machine import process

        free: queue.Queue[dict[str, str]] = queue.Queue()
        for environment in sweeps.environments(self.config, self.jobs):
            free.put(environment)
        stopped = threading.Event()

        def run(job: tuple[DictConfig, list[str]]) -> JobReturn:
            environment = free.get()
            try:
                if stopped.is_set() or process.received:
                    return failed(job[0], "was not started")
                return self.run(*job, environment)
            finally:
                free.put(environment)

        Path(str(self.config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        jobs: list[tuple[DictConfig, list[str]]] = []
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            config = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
            with open_dict(config):
                config.hydra.job.num = number
            task_config = config.copy()
            with open_dict(task_config):
                del task_config["hydra"]
            jobs.append((sweeps.named(task_config, config.hydra), list(filter_overrides(overrides))))
        with process.noted(), ThreadPoolExecutor(free.qsize()) as pool:
            try:
                returns = list(pool.map(run, jobs))
            except KeyboardInterrupt:  # running jobs end with their parent
                stopped.set()
                sweeps.end_all()
                raise
            if process.received:
                process.requeue(0)
                raise KeyboardInterrupt
        return returns

    def run(self, cfg: DictConfig, overrides: list[str], environment: dict[str, str]) -> JobReturn:
        """Runs one job in its own process; its output goes to a file beside its directory."""
        from lockstep.config.identity import run_dir
        from lockstep.launch import sweeps
        from lockstep.run.folder import RunFolder

        code = sweeps.run_job(self.script, cfg, overrides, environment)
        if code:
            return failed(cfg, f"failed; see {sweeps.output(cfg)}", code)
        done = JobReturn(overrides=overrides, cfg=cfg, status=JobStatus.COMPLETED)
        done.return_value = RunFolder(run_dir(cfg)).report()
        return done


def failed(cfg: DictConfig, why: str, code: int = 1) -> JobReturn:
    from lockstep.errors import RunFailed

    job = JobReturn(cfg=cfg, status=JobStatus.FAILED)
    job.return_value = RunFailed(f"{cfg.run} {why}", code)
    return job
