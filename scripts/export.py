"""Exports a trained network as a folder that needs only torch (and timm, for timm's networks).

python scripts/export.py <run or checkpoint> [<folder>]

The folder contains model.safetensors, config.yaml, classes.json, preprocessing.json, and load.py, which shows how to use it.
"""

import argparse
import sys
from pathlib import Path

from lockstep.checkpoints.finding import tested_checkpoint
from lockstep.export.folder import export
from lockstep.launch.exits import exit_code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what", help="a run's name in ./runs, its directory, or a checkpoint; of a run, the checkpoint that it tested"
    )
    parser.add_argument("folder", nargs="?", type=Path, help="where to write; default: exports/<run>")
    args = parser.parse_args()
    path = tested_checkpoint(args.what, "export")
    folder = args.folder or Path("exports") / path.resolve().parents[1].name
    print(f"{path} is exported to {export(path, folder)}. Try it: python {folder}/load.py <image>")


if __name__ == "__main__":
    sys.exit(exit_code(main))
