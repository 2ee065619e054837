"""An Optuna sweep that can be interrupted, continued, and shared by several machines.

A study belongs to a storage, and several machines may work on it. A trial belongs to the sweep that started it. Its values are read
from its run's report, so every launcher works.
"""

import html
import json
import math
import os
import re
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import optuna
from hydra.core.utils import JobStatus
from omegaconf import DictConfig, OmegaConf
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from lockstep.compat.optuna_sweeper import SweeperSteps
from lockstep.config.compose import config_file, is_group
from lockstep.config.formatting import to_text
from lockstep.config.project import command
from lockstep.config.schema import RECIPES
from lockstep.errors import RunFailed, UserError, raise_problems
from lockstep.extras.pruning import STORAGE, trial_id
from lockstep.machine.files import locked, write_csv, write_text
from lockstep.run import RunFolder

COSTS = ("peak_memory_bytes", "parameters", "wall_s")
SAMPLERS = ["optuna.samplers.*", "optuna.pruners.*", "hydra_plugins.hydra_optuna_sweeper.*"]
ATTEMPTS = 5
OWNER = "sweep"  # the user attribute of a trial that names the sweep it belongs to


def directions(objective: Any, monitor: str | None, mode: str) -> dict[str, str]:
    """The metrics to optimise, with their directions. Raises UserError if a direction is unknown."""
    modes: dict[Any, str] = {"val/loss": "min", monitor: mode, **dict.fromkeys(COSTS, "min")}
    names: list[Any] = [objective] if isinstance(objective, str) else list(objective or [None])
    modes |= {name: "max" for name in names if str(name).endswith("_per_s")}
    raise_problems(
        f"hydra.sweeper.objective={to_text(name)} is invalid; expected {to_text(monitor)} (checkpoint.monitor), val/loss, {', '.join(COSTS)}, or a speed (train/..._per_s). For a different validation metric, set checkpoint.monitor=<metric> checkpoint.mode=max (or min). Selecting on the test set would invalidate its metrics."
        for name in names
        if name is None or name not in modes
    )
    return {name: {"min": "minimize", "max": "maximize"}[modes[name]] for name in names}


def open_study(url: str, name: str, **options: Any) -> tuple[RDBStorage, optuna.Study]:
    """The study `name` in the storage at `url`, created if it does not exist. Raises UserError: the storage cannot be used."""
    for _ in range(ATTEMPTS):  # creating the tables fails if two machines do it at once
        try:
            storage = RDBStorage(url)
            study = optuna.create_study(storage=storage, study_name=name, load_if_exists=True, **options)
            study.get_trials()
            return storage, study
        except (SQLAlchemyError, optuna.exceptions.OptunaError, ImportError, ValueError) as e:
            reason = str(e).partition("\n")[0]
        time.sleep(1)
    shown_url = re.sub(r"(//[^/@]*:)[^/@]*@", r"\1***@", url).partition("?")[0]
    raise UserError(
        f"{shown_url}: this sweep storage cannot be used ({reason}). Restore the database or start its server; or set run=<new name> for a new sweep, or a different hydra.sweeper.storage."
    )


class StudySweeper(SweeperSteps):
    """Runs the missing trials of `n_trials`: first this sweep's interrupted ones, with `resume=auto`, then new ones."""

    def __init__(
        self, objective: Any, monitor: str | None, mode: str, pruner: Any, sampler: Any, **options: Any
    ) -> None:
        from hydra.utils import instantiate

        metrics = directions(objective, monitor, mode)
        self.objectives = list(metrics)
        self.pruner, first = pruner, self.objectives[0]
        if pruner and (len(metrics) > 1 or first in COSTS or first.endswith("_per_s")):  # known only at the end
            raise UserError(
                f"hydra/sweeper/pruner has no effect with hydra.sweeper.objective={objective}: trials are pruned by one validation metric. Set hydra/sweeper/pruner=none."
            )
        if options["n_jobs"] < 1:
            raise UserError(f"hydra.sweeper.n_jobs={options['n_jobs']} is invalid; expected at least 1.")
        self.unfinished: set[int] = set()  # trials that the system ended; rerunning the sweep continues them
        sampler = instantiate(sampler, _execution_whitelist_=SAMPLERS)
        super().__init__(sampler=sampler, direction=list(metrics.values()), max_failure_rate=1.0, **options)

    def setup(self, *, config: DictConfig, **others: Any) -> None:
        super().setup(config=config, **others)
        self.folder = Path(str(config.hydra.sweep.dir))
        self.name = str(self.folder.relative_to(str(config.runs_dir)))
        self.url = self.storage or f"sqlite:///{self.folder.resolve() / 'study.db'}"
        os.environ[STORAGE] = self.url  # for extras/pruning.py
        self.study_name = self.study_name or self.name

    def sweep(self, arguments: list[str]) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder / ".lock", f"run={self.name}: this sweep is already running. Set run=<new name>.", 0):
            space, fixed, removed = self.search_space(arguments)
            fixed = {key: value for key, value in fixed.items() if key not in ("run", "resume")}
            raise_problems(
                f"{group}={fixed[group]} has no file in configs/{group}, which best.yaml would refer to. Copy the file there."
                for group in RECIPES
                if group in fixed and not config_file(f"{group}/{fixed[group]}").is_file()
            )
            if not space and not self.custom_search_space_extender:
                raise UserError("there is nothing to search over. Set for example 'optim.lr=interval(1e-4,1e-2)'.")
            self.study = self.open(space)
            while batch := self.batch():
                values = self.overrides_of(batch, space, fixed, removed)
                self.launch(batch, [(*v, *self.overrides(trial)) for trial, v in zip(batch, values, strict=True)])
            write_files(self.study, self.objectives, self.folder)
        if not any(t.state is TrialState.COMPLETE for t in self.study.trials):
            raise RunFailed(f"no trial of {self.name} produced a value")

    def launch(self, trials: list[Trial], overrides: list[tuple[str, ...]]) -> None:
        returns = self.launcher.launch(overrides, initial_job_idx=self.job_idx)
        self.job_idx += len(returns)
        for trial, job in zip(trials, returns, strict=True):
            try:
                self.record(trial, done=job.status is JobStatus.COMPLETED)
            except RuntimeError as e:
                if "Study.stop" not in str(e):  # the grid sampler raises it when the grid is exhausted
                    raise

    def open(self, space: dict[str, optuna.distributions.BaseDistribution]) -> optuna.Study:
        if getattr(self.sampler, "func", None) is optuna.samplers.GridSampler:  # it still lacks its grid
            grid = self.grid(space)
            self.sampler = self.sampler(grid)
            self.n_trials = min(self.n_trials, math.prod(map(len, grid.values())))
        name = str(self.study_name)
        self.database, study = open_study(self.url, name, sampler=self.sampler, directions=self.direction)
        if (found := study.user_attrs.get("objectives", self.objectives)) != self.objectives:
            raise UserError(
                f"hydra.sweeper.objective={self.objectives}: the study optimises {found}. Set run=<new name>."
            )
        study.set_user_attr("objectives", self.objectives)
        numbers = {t.number for t in study.trials if t.user_attrs.get(OWNER) == self.name}
        runs = [p.name for p in self.folder.iterdir() if p.name.isdigit() and int(p.name) not in numbers]
        if runs:
            raise UserError(f"{self.folder} has runs of a different study ({', '.join(runs[:5])}). Set run=<new name>.")
        if study.trials:
            study.sampler.reseed_rng()  # the same seed would suggest the first trials again
        return study

    def batch(self) -> list[Trial]:
        """The next trials to run in parallel: interrupted ones, else new ones; none if all are done."""
        trials = self.study.get_trials(deepcopy=False)
        running = [t for t in trials if t.state is TrialState.RUNNING and t.user_attrs.get(OWNER) == self.name]
        if numbers := [t.number for t in running if t.number not in self.unfinished][: self.n_jobs]:
            name = self.study.study_name
            return [Trial(self.study, trial_id(self.database, name, number)) for number in numbers]
        new: list[Trial] = []
        for _ in range(min(self.n_jobs, self.n_trials - len(trials))):
            new.append(self.study.ask())
            new[-1].set_user_attr(OWNER, self.name)
        return new

    def overrides(self, trial: Trial) -> list[str]:
        """The place of a trial, and the callback that reports its validations."""
        place = [f"run={self.name}/{trial.number}", "resume=auto"]
        if not self.pruner:
            return place
        values = {"study": self.study_name, "trial": trial.number, "monitor": self.objectives[0]}
        values |= {"_target_": "lockstep.extras.pruning.Pruning", **{f"pruner.{k}": v for k, v in self.pruner.items()}}
        return place + [f"+callbacks.pruning.{key}={json.dumps(value)}" for key, value in values.items()]

    def record(self, trial: Trial, done: bool) -> None:
        """Reports to the study how a trial ended: with values, pruned, or failed. A trial that the system ended stays open."""
        report = {"status": "failed"} | RunFolder(self.folder / str(trial.number)).report()
        status = report["status"]
        values: list[Any] = [report.get(name) for name in self.objectives]
        if "train/steps" in report:
            trial.set_user_attr("steps", report["train/steps"])
        if status in ("preempted", "interrupted"):
            self.unfinished.add(trial.number)
        elif status == "pruned":
            self.study.tell(trial, state=TrialState.PRUNED)
        elif not done or None in values:  # NaN is null in a report
            trial.set_user_attr("error", str(report.get("error", f"{status}, without {' or '.join(self.objectives)}")))
            self.study.tell(trial, state=TrialState.FAIL)
        else:
            self.study.tell(trial, values)


# --- The files of a sweep: a table, the best config, and Optuna's plots ---


def write_files(study: optuna.Study, objectives: list[str], folder: Path) -> None:
    """Writes trials.csv, experiment/best.yaml and study.html. With several objectives: best-0.yaml, ... for the Pareto front."""
    trials = study.get_trials(deepcopy=False)
    write_table(trials, objectives, folder / "trials.csv")
    if not any(t.state is TrialState.COMPLETE for t in trials):
        return
    recipes = folder / "experiment"
    recipes.mkdir(exist_ok=True)
    for old in recipes.glob("best*.yaml"):
        old.unlink()
    for number, trial in enumerate(study.best_trials if len(objectives) > 1 else [study.best_trial]):
        name = f"best-{number}" if len(objectives) > 1 else "best"
        write_text(recipes / f"{name}.yaml", recipe(study, trial, objectives, folder, name))
    write_plots(study, objectives, folder)


def write_table(trials: list[FrozenTrial], objectives: list[str], path: Path) -> None:
    names, rows = sorted({name for trial in trials for name in trial.params}), []
    for trial in trials:
        row: dict[str, Any] = {"trial": trial.number, "state": trial.state.name.lower()}
        row |= zip(objectives, trial.values or (), strict=False)
        row["steps"] = max(trial.intermediate_values, default="")
        rows.append(row | trial.params | trial.user_attrs)
    write_csv(path, ["trial", "state", *objectives, *names, "steps", "error"], rows)


def recipe(study: optuna.Study, trial: FrozenTrial, objectives: list[str], folder: Path, name: str) -> str:
    """An experiment config with the trial's values and with the overrides that all trials shared."""
    left_out = ("sweep", "error", "resume", "runs_dir", "steps")
    chosen = {key: value for key, value in (trial.user_attrs | trial.params).items() if key not in left_out}
    texts = "\n".join(f"{key}: {value}" for key, value in chosen.items() if isinstance(value, str))
    parsed: Any = OmegaConf.to_container(OmegaConf.create(texts))
    chosen |= parsed
    recipes = [f"/{group}/{recipe}" for group in RECIPES if (recipe := chosen.pop(group, None))]
    groups = [{f"override /{key}": chosen.pop(key)} for key in list(chosen) if is_group(key)]
    body = OmegaConf.create({"defaults": [*recipes, "_self_", *groups]})
    for key, value in chosen.items():
        OmegaConf.update(body, key.lstrip("+"), value)
    values = ", ".join(f"{objective}={value:.6g}" for objective, value in zip(objectives, trial.values, strict=True))
    return f"""# @package _global_
# The best of {len(study.trials)} trials of the study {study.study_name}: {values}.
#   {command("train")} --config-dir {folder} experiment={name}
{OmegaConf.to_yaml(body)}"""


def write_plots(study: optuna.Study, objectives: list[str], folder: Path) -> None:
    """Writes study.html. Plots that need more trials are omitted."""
    options = {"target_names": objectives} if len(objectives) > 1 else {}
    for_one = ["optimization_history", "param_importances", "parallel_coordinate", "slice"]
    kinds = ["pareto_front"] if options else for_one
    if any(trial.intermediate_values for trial in study.trials):  # Optuna warns without a pruner
        kinds.append("intermediate_values")
    pages: list[str] = []
    for kind in kinds:
        with warnings.catch_warnings(), suppress(ValueError, RuntimeError):
            warnings.simplefilter("ignore")  # these functions are experimental
            figure = getattr(optuna.visualization, f"plot_{kind}")(study, **options)
            pages.append(figure.to_html(full_html=False, include_plotlyjs=not pages))
    title = html.escape(f"{study.study_name}: {len(study.trials)} trials")
    head = f"<!doctype html><meta charset='utf-8'><title>{title}</title><h1>{title}</h1>"
    write_text(folder / "study.html", head + "".join(pages))
