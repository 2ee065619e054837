"""Runs a script of an exported folder as where Lockstep is not installed: python without_lockstep.py <script> [arguments]"""

import runpy
import sys
from importlib.machinery import PathFinder
from pathlib import Path


class Elsewhere:
    def find_spec(self, name, path=None, target=None):
        package = name.partition(".")[0]
        if package in ("lightning", "hydra", "omegaconf"):
            raise ImportError(f"{name} is blocked")
        if package in ("lockstep", "garden", "mywork") and path is None:
            return PathFinder.find_spec(name, [place for place in sys.path if "exported" in place])
        return None


if __name__ == "__main__":
    sys.meta_path[:] = [Elsewhere(), *(each for each in sys.meta_path if "editable" not in str(each).lower())]
    sys.argv = sys.argv[1:]
    sys.path[:] = [str(Path(sys.argv[0]).parent), *(place for place in sys.path if not place.endswith("src"))]
    runpy.run_path(sys.argv[0], run_name="__main__")
