"""Merge a sharded checkpoint into one file, which you can resume, evaluate and export like any other.

python scripts/consolidate.py <folder of shards> [<file>]
"""

import argparse
import sys
from pathlib import Path

from lockstep.checkpoints.finding import is_checkpoint
from lockstep.config.formatting import inline
from lockstep.errors import UserError
from lockstep.launch.exits import after_output, exit_code
from lockstep.machine.files import atomic_replace, local_path
from lockstep.machine.process import protect_streams


def consolidate(folder: Path, file: Path) -> Path:
    """Raises UserError if `folder` is not a complete sharded checkpoint, or `file` exists."""
    if not folder.is_dir() or not is_checkpoint(folder):
        raise UserError(f"{folder} is not a complete sharded checkpoint, as written with checkpoint.sharded=true.")
    if file.exists():
        raise UserError(f"{file} exists. Pass a different file.")
    from lockstep.checkpoints import weights  # imports torch; not needed to reject a command

    content = weights.load(folder)
    weights.make_plain(content)
    with atomic_replace(file) as part:
        weights.write(content, part)
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=local_path)
    parser.add_argument("file", nargs="?", type=local_path, help="default: the folder's name, plus -whole")
    args = parser.parse_args()
    file = args.file or args.folder.with_name(f"{args.folder.stem}-whole.ckpt")
    print(inline(f"{args.folder} is now one file: {consolidate(args.folder, file)}"))


if __name__ == "__main__":
    protect_streams()
    sys.exit(after_output(exit_code(main)))
