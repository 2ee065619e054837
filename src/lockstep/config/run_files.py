"""The files of a run that later commands read: config.yaml, report.json, metrics.csv. Free of torch.

All functions raise UserError, which names the file, if it is damaged.
"""

import csv
import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lockstep.errors import UserError, raise_problems

PARTS = ("run", "seed", "data", "augment", "strategy", "trainer", "checkpoint", "exact")  # every config has these


def load_config(path: Path) -> DictConfig:
    try:
        found = OmegaConf.load(path)
        if isinstance(found, DictConfig) and all(part in found for part in PARTS):
            return found
        why = "it is not the whole config of a run"
    except (YAMLError, OmegaConfBaseException, OSError, ValueError) as e:
        why = str(e).split("\n")[0]
    raise UserError(f"{path} is damaged: {why}. Put the file back, or type run=<another name> to start over.")


def read_report(folder: Path) -> dict[str, Any]:
    """The report of a run; empty without one."""
    path = folder / "report.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        why = "" if isinstance(found, dict) else "it is not a report"
    except (OSError, ValueError, RecursionError) as e:
        why = str(e)
    if why:
        raise UserError(f"{path} is damaged: {why}. Remove the file: the run continues without it.")
    return found


def whole_rows(path: Path) -> "csv.DictReader[str]":
    """The rows of a CSV file that a run appends to, without a last one that a kill cut off; none without a file."""
    text = path.read_text() if path.is_file() else ""
    return csv.DictReader(line for line in text.splitlines(keepends=True) if line.endswith("\n"))


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of metrics.csv, without empty cells; no rows without a file."""
    try:
        rows = [{name: float(value) for name, value in row.items() if value} for row in whole_rows(path)]
        if all(row.get("step", 0.5).is_integer() for row in rows):
            return rows
        why = "a row has no step"
    except (OSError, ValueError, TypeError, AttributeError, csv.Error) as e:  # such as a row with too many cells
        why = str(e)
    raise UserError(
        f"{path} is damaged: {why}. Repair it, or move it away: the run continues without its earlier rows."
    )


def refuse_damage(folder: Path) -> None:
    """Raises UserError for all that is wrong with the files that continuing a run reads."""
    problems: list[str] = []
    files = ((load_config, "config.yaml"), (read_report, ""), (read_metrics, "metrics.csv"))
    for read, name in files:
        try:
            read(folder / name)
        except UserError as e:
            problems.extend(e.problems)
    raise_problems(problems)
