"""List runs from their report.json and config.yaml, show one run, and print commands that rerun failed runs.

python scripts/runs.py [--where status=failed] [--where 'test/acc>0.9'] [--sort -test/acc] [--json | --csv]
python scripts/runs.py html [<sweep>] [--where ...] [--sort ...] [-o runs.html]
python scripts/runs.py show <run> [--json]
python scripts/runs.py failed [<sweep>] [--stale-min 30]

--where (= != < > <= >=) and --sort take keys of report.json and dotted keys of config.yaml, such as optim.lr=0.001. A run
without the key meets no condition and is sorted last. `html` writes a page with the curves, the metrics and the differing
settings of the runs. `show` prints the overrides, the report and the files.

A run has `died` if its report has the status `running` but no process on this machine runs it, such as after SIGKILL or a power failure.
`failed` prints a shell command for each run that failed, died, was interrupted, or is `running` on a different machine but wrote nothing for
--stale-min minutes. A run that diverged would diverge again, so it is not among them.
- with a complete checkpoint, `run=<name> resume=auto` continues with the run's own config and needs no other arguments;
- without one, resume=auto starts over, so the command repeats the overrides from the report;
- without one, a run that resumed from a different run cannot use resume=auto, so it gets a new name;
- a job that never started has no config.yaml, so the command is `run=<sweep>/<job>` and its overrides.
If the files do not contain enough information, the line is a comment.
"""

import argparse
import csv
import operator
import re
import shlex
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.table import Table

from lockstep.checkpoints.finding import checkpoints
from lockstep.config.compose import PLACE, key_of, to_hydra
from lockstep.config.formatting import inline, number, to_text, warn
from lockstep.config.project import command
from lockstep.config.run_config import Component
from lockstep.config.schema import GROUPS, KEYS, RECIPES
from lockstep.errors import UserError, did_you_mean, raise_problems
from lockstep.extras.runs_page import runs_page
from lockstep.launch.exits import after_output, exit_code
from lockstep.machine.files import local_path, to_json, write_text
from lockstep.machine.process import protect_streams
from lockstep.reporting.console import out, print_wide
from lockstep.reporting.report import Report
from lockstep.run import overrides_of, run_folders

COLUMNS = {
    "run": "run", "status": "status", "model": "model", "data/name": "data", "strategy": "strategy", "train/steps": "steps",
}  # fmt: skip
ABSENT = object()
COMPARE = {"=": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge}  # fmt: skip


def value_of(run: Report, key: str) -> Any:
    """A value of report.json or config.yaml; ABSENT without the key. A group has the value of its title."""
    if key in run or key.partition(".")[0] not in (*GROUPS, *KEYS):
        return run.get(key, ABSENT)  # config.yaml is read only if needed
    if key in run.settings:
        return run.settings[key]
    node = {name.removeprefix(f"{key}."): value for name, value in run.settings.items() if name.startswith(f"{key}.")}
    return Component.of(node).title if node.keys() & {"name", "_target_"} else ABSENT


def written_s(run: Report) -> float:
    try:
        return max(path.lstat().st_mtime for path in run.folder.rglob("*"))
    except FileNotFoundError:  # a file vanished meanwhile, so the run is active
        return time.time()


def began_s(run: Report) -> float:
    """When a run was last started or, if that is unknown, last written to."""
    with suppress(KeyError, TypeError, ValueError):
        return datetime.fromisoformat(run["started"]).timestamp()
    return written_s(run)


def find_runs(runs_dir: Path) -> list[Report]:
    """All runs below a folder, the newest last. Raises UserError if the folder does not exist."""
    if not runs_dir.is_dir():
        raise UserError(f"{runs_dir}/ does not exist. Train a run, or pass --runs-dir <folder of the runs>.")
    for link in (path for pattern in ("*", "*/*") for path in sorted(runs_dir.glob(pattern)) if path.is_symlink()):
        if (link / "config.yaml").is_file() or (link / "report.json").is_file():
            warn(f"{inline(link)} is a symbolic link and was skipped. To list its runs, pass --runs-dir <its target>.")
    runs = (Report.listed(folder, runs_dir) for folder in run_folders(runs_dir))
    return sorted(runs, key=lambda run: (began_s(run), run["run"]))


def find_named(runs: list[Report], target: str, runs_dir: Path) -> list[Report]:
    """The run with a name or directory, or the jobs of a sweep. Raises UserError with the nearest name."""
    name = target.rstrip("/").removeprefix(f"{runs_dir}/")
    matches = [run for run in runs if f"{run['run']}/".startswith(f"{name}/")]
    if not matches:
        names = list(dict.fromkeys(n for run in runs for n in (run["run"].rpartition("/")[0], run["run"]) if n))
        listing = f"The latest: {', '.join(names[-3:])}." if names else "There are no runs."
        raise UserError(f"{name}: no such run in {runs_dir}/{did_you_mean(name, names)}. {listing}")
    return matches


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def meets_condition(value: Any, sign: str, text: str) -> bool:
    """Compares numbers as numbers, anything else as text; only numbers and texts have an order."""
    if is_number(value):
        with suppress(ValueError):
            return bool(COMPARE[sign](value, float(text)))
    comparable = sign in ("=", "!=") or isinstance(value, str)
    return value is not ABSENT and comparable and bool(COMPARE[sign](to_text(value), text))


def select_and_sort(runs: list[Report], where: list[str], sort: str) -> tuple[list[Report], list[str]]:
    """The runs that meet all conditions, sorted, and the keys of the conditions."""
    conditions = [re.split(r"\s*(!=|<=|>=|=|<|>)\s*", text, maxsplit=1) for text in where]
    blank = [text for text, condition in zip(where, conditions, strict=True) if len(condition) == 1]
    raise_problems(f"--where {text} has no comparison. Quote it, for example --where 'test/acc>0.9'." for text in blank)
    by = sort.removeprefix("-")
    keys = list(dict.fromkeys(key for key in (*(key for key, _, _ in conditions), by) if key))
    unknown = [key for key in keys if runs and all(value_of(run, key) is ABSENT for run in runs)]
    known_keys = [*dict.fromkeys(key for run in runs for key in run), *KEYS]
    raise_problems(f"{key} is not a key of any run{did_you_mean(key, known_keys)}." for key in unknown)
    selected = [
        run for run in runs if all(meets_condition(value_of(run, key), sign, text) for key, sign, text in conditions)
    ]

    def sort_key(run: Report) -> tuple[Any, ...]:
        value = value_of(run, by)
        return (0, value, "") if is_number(value) else (1, 0, to_text(value))

    sortable = [run for run in selected if value_of(run, by) not in (ABSENT, None)]
    rest = [run for run in selected if value_of(run, by) in (ABSENT, None)]
    return sorted(sortable, key=sort_key, reverse=sort.startswith("-")) + rest, keys


def columns(runs: list[Report]) -> dict[str, str]:
    """The columns of the table with their headings: COLUMNS, monitored metrics, the same metrics of the test, and speeds."""
    monitored = dict.fromkeys(str(run["monitor"]) for run in runs if run.get("monitor"))
    metrics = [name for monitor in monitored for name in (monitor, monitor.replace("val", "test", 1))]
    units = dict.fromkeys(str(run["unit"]) for run in runs if run.get("unit"))
    metric_headings = {name: name.replace("/", " ") for name in metrics}
    return COLUMNS | metric_headings | {f"train/{unit}_per_s": f"{unit}/s" for unit in units}


def cell(run: Report, key: str, *, digits: bool) -> str:
    value, world = value_of(run, key), run.get("world_size", 1)
    text = "" if value is ABSENT else to_text(value) if digits else number(value)
    return f"{text} x{world}" if key == "strategy" and is_number(world) and world > 1 else text


def age(since_s: float) -> str:
    age_min = max(time.time() - since_s, 0) / 60
    h = age_min / 60
    return f"{age_min:.0f} min" if h < 1 else f"{h:.0f} h" if h < 48 else f"{h / 24:.0f} d"


def table(runs: list[Report], keys: list[str], headings: Mapping[str, str]) -> Table:
    table = Table(*(inline(headings.get(key, key)) for key in keys), "age")
    table.columns[0].overflow = "fold"  # do not wrap names: people copy them
    for run in runs:
        # The requested keys keep all digits, because learning rates need them.
        table.add_row(*(inline(cell(run, key, digits=key not in headings)) for key in keys), age(began_s(run)))
    return table


def fits(table: Table) -> bool:
    return out.measure(table, options=out.options.update(max_width=10_000)).maximum <= out.width


def print_runs(runs: list[Report], extra_keys: list[str], *, as_json: bool, as_csv: bool) -> None:
    headings = columns(runs)
    keys = list(dict.fromkeys([*headings, *extra_keys]))
    rows = [dict(run) | {key: v for key in extra_keys if (v := value_of(run, key)) is not ABSENT} for run in runs]
    if as_json:
        print(to_json(rows))
    elif as_csv:
        writer = csv.DictWriter(sys.stdout, list(dict.fromkeys([*keys, *(key for row in rows for key in row)])))
        writer.writerow({key: inline(key) for key in writer.fieldnames})
        writer.writerows({key: inline(v) if isinstance(v, str) else v for key, v in row.items()} for row in rows)
    else:
        least = [*(key for key in headings if key.endswith("_per_s")), *reversed(list(COLUMNS)[2:])]
        hidden = list[str]()
        while (wide := table(runs, keys, headings)) and out.is_terminal and least and not fits(wide):
            if (key := least.pop(0)) not in extra_keys:
                keys.remove(key)
                hidden.append(headings[key])
        print_wide(wide, columns=10_000)
        if hidden:
            print_wide(f"not shown: {', '.join(hidden)}. A wider terminal or --csv shows them.")


def show(runs: list[Report], *, as_json: bool) -> None:
    shown = [
        {"run": run["run"], "report": dict(run), "overrides": overrides_of(run), "files": files_of(run)} for run in runs
    ]
    if as_json:
        print(to_json(shown))
        return
    for run in shown:
        metrics = [f"{key}: {to_text(v)}" for key, v in run["report"].items() if key != "run"]
        overrides = ["unknown"] if run["overrides"] is None else run["overrides"] or ["none"]
        for heading, lines in ((f"{run['run']}:", metrics), ("overrides:", overrides), ("files:", run["files"])):
            print(*map(inline, (heading, *lines)), sep="\n  ")


def files_of(run: Report) -> list[str]:
    return sorted(path.relative_to(run.folder).as_posix() for path in run.folder.rglob("*") if path.is_file())


def has_failed(run: Report, stale_min: float) -> bool:
    status = run["status"]
    stale = status not in ("done", "pruned", "diverged") and time.time() - written_s(run) > 60 * stale_min
    return stale or status in ("failed", "interrupted", "died")


def rerun_command(run: Report, runs_dir: Path) -> str:
    """The command that reruns a run, by the rules at the top of this file."""
    name, has_config, recorded = run["run"], run.run_folder.has_config(), overrides_of(run)
    saved = has_config and next(checkpoints(run.folder), None)
    if (has_config and not run.settings) or (not saved and recorded is None):
        return f"# {inline(name)}: its files lack the information to rerun it"
    if saved:
        words = ["resume=auto"]
    else:
        words = [word for word in recorded or () if not word.startswith("-")]  # an option, such as --config-dir
        origin = run.get("resumed_from")
        is_other_run = origin and run.folder.resolve() not in Path(origin).resolve().parents
        start = [f"resume={to_hydra(origin)}"] if is_other_run else ["resume=auto"] if has_config else []
        name += "-again" if has_config and is_other_run else ""
        dropped = (*PLACE, "init_from", *RECIPES) if is_other_run else PLACE  # what the other run started from
        words = [*start, *(o for o in words if key_of(o) not in dropped)]
    location = [] if runs_dir == Path("runs") else [f"runs_dir={to_hydra(str(runs_dir))}"]
    line = shlex.join([*shlex.split(command("train")), f"run={to_hydra(name)}", *location, *words])
    return (
        line
        if inline(line) == line
        else f"# {inline(name)}: its name or settings contain characters that a command cannot contain"
    )


def main() -> None:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--runs-dir", type=local_path, default=argparse.SUPPRESS, help="default: runs")
    filters = argparse.ArgumentParser(add_help=False)
    where_help = "a condition; can be repeated, all must hold"
    filters.add_argument("--where", action="append", default=argparse.SUPPRESS, metavar="'key=value'", help=where_help)
    filters.add_argument("--sort", default=argparse.SUPPRESS, metavar="[-]key", help="default: newest last")
    as_json = argparse.ArgumentParser(add_help=False)
    as_json.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="a list in JSON, for programs")
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, parents=[common, filters, as_json])
    parser.add_argument("--csv", action="store_true", help="a table in CSV")
    commands = parser.add_subparsers(dest="command", metavar="{html,show,failed}")
    html = commands.add_parser("html", parents=[common, filters])
    html.add_argument("run", nargs="?", metavar="sweep")
    html.add_argument("-o", "--out", type=local_path, default=Path("runs.html"))
    commands.add_parser("show", parents=[common, as_json]).add_argument("run")
    failed = commands.add_parser("failed", parents=[common])
    failed.add_argument("run", nargs="?", metavar="sweep")
    failed.add_argument("--stale-min", type=float, default=30.0)
    argv = sys.argv[1:]
    with suppress(ValueError):  # argparse would read the value of `--sort -test/acc` as an option
        index = argv.index("--sort")
        argv[index : index + 2] = ["=".join(argv[index : index + 2])]
    args = parser.parse_args(argv, argparse.Namespace(runs_dir=Path("runs"), where=[], sort="", json=False))
    effects = {"--where": (None, "html"), "--sort": (None, "html"), "--json": (None, "show"), "--csv": (None,)}
    raise_problems(
        f"{option} has no effect on {args.command}. Remove it."
        for option, with_effect in effects.items()
        if getattr(args, option[2:]) and args.command not in with_effect
    )
    if args.json and args.csv:
        raise UserError("--json and --csv exclude each other. Pass one of them.")
    runs = find_runs(args.runs_dir)
    if args.command is not None and args.run is not None:
        runs = find_named(runs, args.run, args.runs_dir)
    if args.command == "html":
        chosen_runs, _ = select_and_sort(runs, args.where, args.sort)
        if not chosen_runs:
            raise UserError("no run meets the conditions. Remove a --where.")
        write_text(args.out, runs_page(chosen_runs, args.runs_dir, args.out.resolve()))
        print(f"{len(chosen_runs)} runs: {args.out}")
    elif args.command is None:
        print_runs(*select_and_sort(runs, args.where, args.sort), as_json=args.json, as_csv=args.csv)
    elif args.command == "show":
        show(runs, as_json=args.json)
    else:
        for run in runs:
            if has_failed(run, args.stale_min):
                print(rerun_command(run, args.runs_dir))


if __name__ == "__main__":
    protect_streams()
    sys.exit(after_output(exit_code(main)))
