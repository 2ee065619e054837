"""Runs a script of an exported folder where only its requirements.txt is installed: python without_lockstep.py <script> [arguments]"""

import runpy
import sys
from collections.abc import Iterable
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def installed(lines: Iterable[str]) -> set[str]:
    """The distributions that an installer would bring for these requirements."""
    found, queue = set[str](), [canonicalize_name(Requirement(line).name) for line in lines]
    for name in queue:  # grows in the loop
        if name not in found:
            found.add(name)
            try:
                needed = map(Requirement, requires(name) or ())
            except PackageNotFoundError:  # for another platform
                continue
            queue += [canonicalize_name(r.name) for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


class Elsewhere:
    def __init__(self, folder: Path) -> None:
        there = installed((folder / "requirements.txt").read_text().splitlines())
        owners = {name: {canonicalize_name(each) for each in names} for name, names in packages_distributions().items()}
        self.absent = {name for name, names in owners.items() if not names & there}

    def find_spec(self, name, path=None, target=None):
        package = name.partition(".")[0]
        if path is None and package in ("lockstep", "garden", "mywork"):
            return PathFinder.find_spec(name, [place for place in sys.path if "exported" in place])
        return None if path is None and package in self.absent else PathFinder.find_spec(name, path, target)


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    folder = Path(sys.argv[0]).parent
    elsewhere = Elsewhere(folder)
    builtin = [each for each in sys.meta_path if each is not PathFinder and "editable" not in str(each).lower()]
    sys.meta_path[:] = [*builtin, elsewhere]
    for name in [name for name in sys.modules if name.partition(".")[0] in elsewhere.absent]:
        del sys.modules[name]  # what this script needed itself
    sys.path[:] = [str(folder), *(place for place in sys.path if not place.endswith("src"))]
    runpy.run_path(sys.argv[0], run_name="__main__")
