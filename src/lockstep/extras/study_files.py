"""The files of an Optuna sweep: a table, the best config, and Optuna's plots."""

import html
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
from omegaconf import DictConfig, OmegaConf
from optuna.trial import FrozenTrial, TrialState

from lockstep.config.compose import config_file, is_group
from lockstep.config.project import command
from lockstep.config.schema import RECIPES
from lockstep.machine.files import write_csv

HEADER = """# @package _global_
# The best of {count} trials of the study {study}: {values}.
#   {command} --config-dir {folder} experiment=best
"""


def write(study: optuna.Study, objectives: list[str], folder: Path) -> None:
    """Writes trials.csv, experiment/best.yaml, study.html and plots/. Several objectives: best-0.yaml, ... of the Pareto front."""
    write_table(study, objectives, folder / "trials.csv")
    if not any(t.state is TrialState.COMPLETE for t in study.get_trials(deepcopy=False)):
        return
    best = study.best_trials
    (folder / "experiment").mkdir(exist_ok=True)
    for old in (folder / "experiment").glob("best*.yaml"):
        old.unlink()
    for number, trial in enumerate(best if len(objectives) > 1 else best[:1]):
        name = f"best-{number}" if len(objectives) > 1 else "best"
        (folder / "experiment" / f"{name}.yaml").write_text(recipe(study, trial, objectives, folder, name))
    write_plots(study, objectives, folder)


def write_table(study: optuna.Study, objectives: list[str], path: Path) -> None:
    trials = study.get_trials(deepcopy=False)
    names = sorted({name for trial in trials for name in trial.params})
    rows = []
    for trial in trials:
        values = dict(zip(objectives, trial.values or (), strict=False))
        steps = trial.user_attrs.get("steps", max(trial.intermediate_values, default=""))
        row = {"trial": trial.number, "state": trial.state.name.lower(), **values, **trial.params, "steps": steps}
        rows.append(row | {"error": trial.user_attrs.get("error", "")})
    write_csv(path, ["trial", "state", *objectives, *names, "steps", "error"], rows)


def recipe(study: optuna.Study, trial: FrozenTrial, objectives: list[str], folder: Path, name: str) -> str:
    """An experiment config with the trial's values and with the overrides that all trials shared."""
    skipped = ("sweep", "error", "resume", "runs_dir", "steps")
    chosen = {key: value for key, value in {**trial.user_attrs, **trial.params}.items() if key not in skipped}
    chosen |= {key: OmegaConf.create(f"it: {v}").it for key, v in chosen.items() if isinstance(v, str)}
    body: Any = OmegaConf.create()
    groups: dict[str, Any] = {}
    for recipe_group in RECIPES:  # a config can name one experiment only, so write out the sweep's own
        if chosen.get(recipe_group):
            of = OmegaConf.load(config_file(f"{recipe_group}/{chosen.pop(recipe_group)}"))
            assert isinstance(of, DictConfig)
            for override in of.pop("defaults", []):
                groups |= {str(key).removeprefix("override /"): value for key, value in override.items()}
            body.merge_with(of)
    groups |= {key: chosen.pop(key) for key in list(chosen) if is_group(key)}
    for key, value in chosen.items():
        OmegaConf.update(body, key.lstrip("+"), value)
    defaults = {"defaults": [{f"override /{group}": value} for group, value in groups.items()]} if groups else {}
    body = OmegaConf.merge(OmegaConf.create(defaults), body)
    values = ", ".join(f"{objective}={value:.6g}" for objective, value in zip(objectives, trial.values, strict=True))
    header = HEADER.format(
        command=command("train"), count=len(study.trials), study=study.study_name, values=values, folder=folder
    )
    return header.replace("experiment=best", f"experiment={name}") + OmegaConf.to_yaml(body)


def write_plots(study: optuna.Study, objectives: list[str], folder: Path) -> None:
    """Writes study.html, and the same plots by matplotlib in plots/. Plots that need more trials are left out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from optuna import visualization
    from optuna.visualization import matplotlib as drawn

    one = len(objectives) == 1
    kinds = ["optimization_history", "param_importances", "parallel_coordinate", "slice"]
    if any(trial.intermediate_values for trial in study.trials):  # Optuna warns without a pruner
        kinds.append("intermediate_values")
    plots = kinds if one else ["pareto_front"]
    options = {} if one else {"target_names": objectives}
    pages: list[str] = []
    (folder / "plots").mkdir(exist_ok=True)
    for kind in plots:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # these functions are experimental
            figure = plotted(getattr(visualization, f"plot_{kind}"), study, **options)
            if figure is None:
                continue
            pages.append(figure.to_html(full_html=False, include_plotlyjs=not pages))
            if plotted(getattr(drawn, f"plot_{kind}"), study, **options) is not None:
                pyplot.savefig(folder / "plots" / f"{kind}.png", dpi=120, bbox_inches="tight")
            pyplot.close("all")
    title = html.escape(f"{study.study_name}: {len(study.trials)} trials")
    page = f"<!doctype html><html><head><meta charset='utf-8'><title>{title}</title></head><body><h1>{title}</h1>{''.join(pages)}</body></html>"
    (folder / "study.html").write_text(page)


def plotted(plot: Callable[..., Any], study: optuna.Study, **options: Any) -> Any:
    try:
        return plot(study, **options)
    except (ValueError, RuntimeError):
        return None
