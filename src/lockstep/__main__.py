"""The command `lockstep`, which runs a script of the project or of Lockstep from any folder.

lockstep <command> [key=value ...]

It runs `python <command>.py [key=value ...]` of the project that the current directory belongs to. To start several processes,
pass strategy=ddp trainer.devices=2, or run torchrun --nproc-per-node=2 -m lockstep train. Complete keys with TAB in bash and zsh:
eval "$(lockstep --completion)"
"""

import ast
import runpy
import sys
from pathlib import Path

from lockstep.config import project
from lockstep.launch.exits import after_output, exit_code
from lockstep.launch.local import script, scripts
from lockstep.machine.process import protect_streams


def usage() -> str:
    """This module's docstring, and the first docstring line of each script."""
    lines = {
        name: (ast.get_docstring(ast.parse(path.read_bytes())) or "").split("\n")[0] for name, path in scripts().items()
    }
    width = max(map(len, lines))
    return "\n".join([str(__doc__), *(f"  {name:{width}}  {line}" for name, line in lines.items())])


def run(name: str, *args: str) -> None:
    project.enter(Path.cwd())
    if name in ("-h", "--help"):
        print(usage())
    elif name == "--completion":
        print((Path(__file__).parent / "launch/completion.sh").read_text(encoding="utf-8"))
    else:
        path = script(name)
        sys.argv = [str(path), *args]
        sys.path.insert(0, str(path.parent))  # as for `python <script>`
        runpy.run_path(str(path), run_name="__main__")


def main() -> None:
    """Exits with the exit code of the script: 0 done, 2 invalid config or input, 1 failed while running."""
    protect_streams()
    sys.exit(after_output(exit_code(lambda: run(*(sys.argv[1:] or ["--help"])))))


if __name__ == "__main__":
    main()
