"""Writes a trained network as a folder that torch (and timm, for timm's networks) loads by itself.

python scripts/export.py <run or checkpoint> [<folder>]

The folder has model.safetensors, config.yaml, classes.json, preprocessing.json and load.py, which shows how it is used.
"""

import argparse
import sys
from pathlib import Path

from lockstep.checkpoints.finding import tested_checkpoint
from lockstep.export.folder import export
from lockstep.launch.exits import exit_code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", help="a run's name or directory (its best checkpoint), or a checkpoint")
    parser.add_argument("folder", nargs="?", type=Path, help="where to write; by default exports/<run>")
    args = parser.parse_args()
    path = tested_checkpoint(args.what, "export")
    folder = args.folder or Path("exports") / path.resolve().parents[1].name
    print(f"{path} is exported to {export(path, folder)}; python {folder}/load.py <image> uses it")


if __name__ == "__main__":
    sys.exit(exit_code(main))
