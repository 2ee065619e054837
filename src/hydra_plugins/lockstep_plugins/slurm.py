"""submitit's launcher with independent jobs: a lost job does not end the others, and Ctrl-C cancels all."""

import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import SlurmLauncher


class SlurmSweepLauncher(SlurmLauncher):
    """Submits one job of SLURM for each job of a multirun and waits for all of them."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        returns: dict[int, JobReturn] = {}

        def submit(number: int, overrides: Sequence[str]) -> None:
            try:
                (returns[number],) = super(SlurmSweepLauncher, self).launch([overrides], number)
            except Exception as e:  # it was killed, or could not be submitted
                returns[number] = JobReturn(overrides=overrides, status=JobStatus.FAILED)
                returns[number].return_value = e

        numbers = range(initial_job_idx, initial_job_idx + len(job_overrides))
        waiting = [
            threading.Thread(target=submit, args=job, daemon=True) for job in zip(numbers, job_overrides, strict=True)
        ]
        for thread in waiting:
            thread.start()
        try:
            for thread in waiting:
                thread.join()
        except BaseException:
            jobs = [path.name for path in Path(self.params["submitit_folder"]).parent.iterdir() if path.name.isdigit()]
            subprocess.run(["scancel", *jobs], check=False)  # scancel skips jobs that have ended
            raise
        return [returns[number] for number in numbers]
