"""Lockstep's plugins for Hydra. Hydra imports this module at every start, so heavy imports are inside functions."""

import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra.experimental.callback import Callback
from hydra.plugins.launcher import Launcher
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import SlurmLauncher
from omegaconf import DictConfig, OmegaConf

from lockstep import CONFIGS
from lockstep.config.project import config_folders


class ProjectSearchPath(SearchPathPlugin):
    """Makes Hydra search for configs in the project before Lockstep.

    Does nothing in programs that use Hydra without Lockstep: they have a different `main` folder.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if any(element.provider == "main" and element.path == str(CONFIGS) for element in search_path.get_path()):
            for folder in config_folders()[:-1]:
                search_path.prepend("project", f"file://{folder}", SearchPathQuery(provider="main", path=None))


class SweepTable(Callback):
    """Writes the table of a multirun at its end.

    Every command creates this callback, so what the table needs is imported at the end.
    """

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        from lockstep.launch import sweeps

        sweeps.write_table(Path(config.hydra.sweep.dir))


class SlotsLauncher(Launcher):
    """Runs `jobs` jobs of a multirun at once on this machine, each on its own GPUs.

    With `jobs=auto`, as many as there are GPUs (or cores) for all their processes. joblib's launcher ignores GPUs and
    ends all jobs when one process is killed; submitit's local executor starts all jobs at once.
    """

    def __init__(self, jobs: int | str) -> None:
        self.jobs = jobs

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config
        self.script: Path = getattr(task_function, "script")  # noqa: B009  # set by launch/cli.py

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Raises UserError if there are too few GPUs, KeyboardInterrupt if the system or Ctrl-C ends the launcher."""
        from lockstep.config.draft import Draft
        from lockstep.launch import sweeps
        from lockstep.machine import process

        slots = sweeps.environments(Draft(self.config), self.jobs)
        jobs, returns = list[tuple[int, Draft, list[str]]](), dict[int, JobReturn]()
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            config = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
            task_config = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
            draft = sweeps.job_draft(Draft(task_config), config.hydra.sweep.dir, number)
            jobs.append((number, draft, list(filter_overrides(overrides))))
        pending = iter(jobs)

        def run_jobs(slot: dict[str, str]) -> None:
            for number, draft, overrides in pending:  # each job once: all slots share the iterator
                returns[number] = sweeps.run_in_subprocess(self.script, draft, overrides, slot)

        # Warning signals and each Ctrl-C are forwarded to the running jobs, which save and end, or end at once.
        with process.recording_signals(interrupt=process.on_interrupt), ThreadPoolExecutor(len(slots)) as pool:
            list(pool.map(run_jobs, slots))  # raises their errors
            if process.received:
                process.requeue(0)
                raise KeyboardInterrupt
        return [returns[number] for number in sorted(returns)]


class SlurmSweepLauncher(SlurmLauncher):
    """Submits a SLURM job for each job of a multirun and waits for all of them.

    Like submitit's launcher, but with independent jobs: a lost job does not end the other jobs. Ctrl-C cancels all of
    them.
    """

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        returns: dict[int, JobReturn] = {}

        def submit(number: int, overrides: Sequence[str]) -> None:
            try:
                (returns[number],) = super(SlurmSweepLauncher, self).launch([overrides], number)
            except Exception as e:  # the job was killed, or could not be submitted
                returns[number] = JobReturn(overrides=overrides, status=JobStatus.FAILED)
                returns[number].return_value = e

        jobs = enumerate(job_overrides, initial_job_idx)
        threads = [threading.Thread(target=submit, args=job, daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:
            names = [path.name for path in Path(self.params["submitit_folder"]).parent.iterdir() if path.name.isdigit()]
            subprocess.run(["scancel", *names], check=False)  # scancel ignores jobs that have ended
            raise
        return [returns[number] for number in sorted(returns)]


class ContinuedOptunaSweeper(Sweeper):
    """Continues a study, records failures, prunes trials and writes plots; see lockstep/extras/study.py.

    Takes the options of configs/hydra/sweeper/optuna.yaml.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from lockstep.extras.study import StudySweeper

        self.sweeper = StudySweeper(**self.options)
        self.sweeper.setup(hydra_context=hydra_context, task_function=task_function, config=config)

    def sweep(self, arguments: list[str]) -> None:
        self.sweeper.sweep(arguments)
