"""Show where two runs differ: config, data, rows of the log, metrics, weights and the rest of their state.

python scripts/compare_runs.py <run> <run> [--exact] [--tolerance 1e-6] [--runs-dir runs] [--json]

Without --exact, numbers agree if their relative difference is at most the tolerance. For a tensor, this is the norm of the difference
divided by the norm. With --exact, every bit counts, including the optimizer's state. Speed and time are ignored.
Differences that grow step by step from 1e-6 to at most 1e-2 are reported as accumulated rounding: AdamW at its default learning rate amplifies
rounding that much within 40 steps. This check needs trainer.precision=32-true and trainer.log_every_n_steps=1.
Exit code: 0 if the results agree or differ by accumulated rounding, 1 if they differ, 2 if there is nothing to compare. Config differences are shown but do
not count.
"""

import argparse
import sys
from pathlib import Path

from lockstep.config.formatting import inline, readable
from lockstep.errors import UserError
from lockstep.extras.comparison import ENDS, agree, compare, find, rounding_verdict
from lockstep.launch.exits import after_output
from lockstep.machine.files import local_path, to_json
from lockstep.machine.process import protect_streams
from lockstep.reporting.report import Report


def conclude(a: Report, b: Report, differences: dict[str, list[str]], *, exact: bool) -> tuple[str, str | None]:
    """The verdict, `same`, `rounding` or `different`, and the reason unless it is obvious."""
    if agree(differences):
        return "same", None
    if exact:
        return "different", None
    grown, reason = rounding_verdict(a, b)
    grown = grown and agree(compare(a, b, exact=False, tolerance=ENDS))
    return "rounding" if grown else "different", reason


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs=2, metavar="run", help="a run's name or directory")
    parser.add_argument("--exact", action="store_true", help="compare the whole state bit by bit")
    parser.add_argument("--tolerance", type=float, default=1e-6, help="relative difference that counts as equal")
    parser.add_argument("--runs-dir", type=local_path, default=Path("runs"))
    parser.add_argument("--json", action="store_true", help="an object in JSON, for programs")
    args = parser.parse_args()
    try:
        a, b = (find(name, args.runs_dir) for name in args.runs)
    except UserError as e:
        print(readable(f"error: {e}"), file=sys.stderr)
        return 2
    differences = compare(a, b, exact=args.exact, tolerance=args.tolerance)
    verdict, reason = conclude(a, b, differences, exact=args.exact)
    if args.json:
        compared = {"exact": args.exact, "tolerance": 0.0 if args.exact else args.tolerance}
        found = {"verdict": verdict, "reason": reason, "differences": differences}
        print(to_json({"runs": args.runs, **compared, **found}))
    else:
        for section, lines in differences.items():
            print(f"{section}: {'no difference' if not lines else ''}")
            for line in lines:
                print(f"  {inline(line)}")
        agreement = "bit-identical" if args.exact else f"the same to within {args.tolerance:g}"
        lines_by_verdict = {
            "same": f"the results are {agreement}",
            "rounding": f"the results differ only by accumulated rounding: {reason}",
            "different": f"the results differ ({reason})" if reason else "the results differ",
        }
        print(lines_by_verdict[verdict])
    return int(verdict == "different")


if __name__ == "__main__":
    protect_streams()
    sys.exit(after_output(main()))
