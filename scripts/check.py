"""Check that a command gives the same result on any number of processes: a few steps in each way of running, compared.

python scripts/check.py [key=value ...] [steps=5] [from=<run>] [--json]

Takes the keys of train.py. It runs the first steps of the command on one process, on two (ddp, fsdp), with accumulated gradients, with workers,
killed and resumed, with logical ranks, and evaluates on one and two; in float64 where that is possible. For each way it prints how far it is
apart from one process, as `same bits`, `rounding` or `differs`, with the layer, loss, hook or optimizer where they part; or why it was refused
or failed. `from` continues a run, to check what begins later, such as unfreezing. The project's checks.json keeps the result, which the first
lines of a run quote.
Exit code: 0 if no way differs or fails, 1 if one does, 2 if the command is invalid.
"""

import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config import checked, project
from lockstep.config.formatting import pluralize
from lockstep.errors import UserError, explain_os_error
from lockstep.launch.exits import after_output, exit_code
from lockstep.machine.files import read_text, to_json, write_text
from lockstep.machine.process import protect_streams

if TYPE_CHECKING:
    from lockstep.extras.check import Result

OWN = ("steps", "from")  # keys that are not those of train.py
FLOATS = {"64-true": "float64", "32-true": "float32"}
TWO = "ddp on two processes"
COLUMNS = ("gradients", "weights", "end", "rows", "metrics")


def wrong_ways(result: "Result") -> list[dict[str, Any]]:
    return [way for way in result.ways if way["verdict"] in ("differs", "failed")]


def line(result: "Result") -> str:
    """The verdict of a check, with what was compared."""
    first, *_, last = result.steps * 2
    steps = pluralize(len(result.steps), "step") if first == 1 else f"steps {first} to {last}"
    how = f"checked: {steps}, {result.device}, {FLOATS.get(result.precision, result.precision)}"
    if wrong := wrong_ways(result):
        more = f" and {len(wrong) - 1} more" if wrong[1:] else ""
        return f"{wrong[0]['verdict'].upper()} in: {wrong[0]['way']}{more}; {wrong[0]['note']} ({how})"
    if alone := next(
        (way for way in result.ways if way["way"] == TWO and way["verdict"] in ("refused", "not run")), None
    ):
        return f"not compared on 2 processes: {alone['note']} ({how})"
    apart = next((way["end"] for way in result.ways if way["way"] == TWO), None)
    return f"the same on 1 and 2 processes ({how}: {f'{apart:.0e}' if apart else 'same bits'})"


def table(result: "Result") -> Iterator[str]:
    width = max(len(way["way"]) for way in result.ways)
    yield f"{'':{width}}{''.join(f'{name:>11}' for name in COLUMNS)}  verdict"
    for way in result.ways:
        cells = ("" if way[name] is None else f"{way[name]:.0e}" if way[name] else "=" for name in COLUMNS)
        yield f"{way['way']:{width}}{''.join(f'{cell:>11}' for cell in cells)}  {way['verdict']}"
    yield from (f"{way['way']}: {way['note']}" for way in result.ways if way["note"])
    yield from (f"note: {note}" for note in result.notes)
    yield f"result: {line(result)}"


def store(check: dict[str, Any]) -> None:
    """Keeps a check in place of an earlier one of the same config and data, if there is a project.

    Raises UserError if the file is not one of checks, such as after a conflict of git: the others would be lost.
    """
    every = checked.stored()
    others = [each for each in every if (each["config"], each["data"]) != (check["config"], check["data"])]
    if root := project.current().root:
        if not every and (root / checked.FILE).is_file() and read_text(root / checked.FILE).strip() != "[]":
            raise UserError(f"{checked.FILE} is damaged, so this check was not kept. Mend it, or remove it.")
        write_text(root / checked.FILE, to_json([check, *others][:20]) + "\n")


def main(argv: list[str]) -> int:
    """Raises UserError if the command is invalid."""
    project.enter(Path.cwd())
    own = {key: value for key, _, value in (arg.partition("=") for arg in argv) if key in OWN}
    overrides = [arg for arg in argv if arg.partition("=")[0] not in OWN and arg != "--json"]
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    problems = [
        f"{arg}: check takes only key=value, no options but --json." for arg in overrides if arg.startswith("-")
    ]
    steps = own.get("steps", "5")
    if not steps.isdecimal() or not 2 <= int(steps) <= 1000:
        problems.append(f"steps={steps}: expected a number from 2 to 1000.")
    if "from" in own and not own["from"]:
        problems.append("from= needs a run: from=<name of a run>.")
    problems += [
        f"{arg}: to check from a run or checkpoint, use from=." for arg in overrides if arg.startswith("resume=")
    ]
    if problems:
        raise UserError(*problems)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the ways, too
    from lockstep.extras.check import measure

    result = measure(overrides, steps=int(steps), start=own.get("from"))
    print(to_json(asdict(result)) if "--json" in argv else "\n".join(table(result)), flush=True)
    if "from" in own:  # about later steps, which the first lines of a run do not quote
        return int(bool(wrong_ways(result)))
    with explain_os_error(checked.FILE, "The first lines of a run do not quote this check."):
        store({"line": line(result), **result.facts})
    return int(bool(wrong_ways(result)))


if __name__ == "__main__":
    protect_streams()
    codes: list[int] = []
    code = exit_code(lambda: codes.append(main(sys.argv[1:])))
    sys.exit(after_output(code or codes[0]))
