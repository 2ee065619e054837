"""Export a trained network as a folder that needs only torch and Pillow (and timm, for timm networks).

python scripts/export.py <run or checkpoint> [<folder>] [--network <name>] [--onnx] [--pt2] [--files <folder>]

The folder contains model.safetensors, load.py (loads the network and predicts files) and README.md (the model card). --onnx adds
model.onnx, --pt2 the graph of torch.export. Both graphs take uint8 images of any size, or the network's inputs if these are not images.
Before the folder is kept, all its models are compared with the trained network on 100 test samples of the run's data, or on --files.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

from lockstep.checkpoints.finding import tested_checkpoint
from lockstep.config.formatting import inline
from lockstep.config.project import python
from lockstep.errors import UserError
from lockstep.launch.exits import after_output, exit_code
from lockstep.machine.files import local_path
from lockstep.machine.process import protect_streams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what",
        type=local_path,
        help="the name of a run in ./runs, also as run=<name>, or a run directory: exports the checkpoint that the run tested; or a checkpoint",
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=local_path,
        help="default: exports/<run>[-<network>]; for a job of a sweep, exports/<sweep>-<job>",
    )
    parser.add_argument(
        "--network", default="", help="export one of several networks, by its attribute name, such as student.backbone"
    )
    parser.add_argument("--onnx", action="store_true", help="also write model.onnx; needs lockstep[onnx]")
    parser.add_argument("--pt2", action="store_true", help="also write model.pt2, for torch.export.load")
    parser.add_argument(
        "--files", "--images", help="compare on these files (as for predict.py), if the run's data is not available"
    )
    args = parser.parse_args()
    path = tested_checkpoint(str(args.what).removeprefix("run="), "run")  # as eval.py and predict.py name it
    run = path.resolve().parent.parent
    prefix = f"{run.parent.name}-" if (run.parent / "multirun.yaml").is_file() else ""
    name = "-".join(filter(None, (f"{prefix}{run.name}", args.network)))
    folder = args.folder or Path("exports") / name
    if "=" in folder.name:
        raise UserError(f"{folder}: options are written with dashes, such as --onnx. --help lists them.")
    if folder.exists():
        raise UserError(f"{folder} exists. Pass a different folder, or remove it.")
    from lockstep.extras.export import export  # 10 s; not needed to reject a command

    formats = [name for name in ("onnx", "pt2") if getattr(args, name)]
    exported = export(path, folder, formats, args.files, args.network)
    model = json.loads((exported / "model.json").read_bytes())
    reads_files = model["inputs"] is None or model["reader"]
    use = (
        f"Try it: {python()} {shlex.quote(f'{folder}/load.py')} <file>"
        if reads_files
        else "Its README.md shows how to call it."
    )
    print(inline(f"{path} is exported to {exported}. {use}"))


if __name__ == "__main__":
    protect_streams()
    sys.exit(after_output(exit_code(main)))
