"""Creates your own project.

python scripts/new_project.py <folder> --package <name> [--data folder|arrays|none] [--full [--strip]]

By default a THIN project, which depends on Lockstep: train.py, eval.py, predict.py, configs/ with what differs, src/<name>/,
tests of Lockstep's promises on the project's own data, pyproject.toml, CI, README, and a first commit. It can upgrade Lockstep.
  --data folder   images in class folders (default) · arrays: a data set of arrays · none: MNIST, until you have data
  --full          a renamed copy of all of Lockstep instead; --strip leaves out its benchmarks, notebook and templates
  --lockstep      the requirement of a thin project, such as 'lockstep @ git+https://...'; default: this checkout
"""

import argparse
import keyword
import os
import shutil
import subprocess
import sys
from pathlib import Path

from lockstep import ROOT
from lockstep.errors import UserError
from lockstep.launch.exits import exit_code

TEMPLATES = ROOT / "templates"
NAME = "my_project"  # of the template, which is a project that runs
DATA = ("folder", "arrays", "none")
FIRST_LINE = {
    "folder": "images in data/<class>/, or in another folder: data.root=<folder>",
    "arrays": "data/train.npz and data/test.npz, or another folder: data.root=<folder>",
    "none": "MNIST, until this project has its own data",
}
STRIPPED = (
    "benchmarks/", "tests/benchmarks/", "NOTEBOOK.md", "templates/", "scripts/new_project.py", "tests/scripts/test_new_project.py",
    "tests/test_readme.py", "tests/test_documented_commands.py",
    "tests/test_waits.py", "tests/prediction/test_flat_memory.py", "tests/reporting/test_browser.py",  # of benchmarks
)  # fmt: skip


def check(folder: Path, package: str) -> None:
    """Raises UserError if the folder is not empty or the name is not a valid package name."""
    if not package.isidentifier() or keyword.iskeyword(package) or package in ("lockstep", "hydra_plugins", "tests"):
        raise UserError(
            f"--package {package} is not a valid package name. Type letters, digits and _, for example --package flowers."
        )
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} exists and is not empty. Type another folder.")


def copy(source: Path, target: Path, name: dict[str, str]) -> None:
    """Copies a file with `name` replaced; binary files are copied unchanged."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        text = source.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        shutil.copyfile(source, target)
        return
    target.write_text(replaced(text, name), encoding="utf-8")
    shutil.copymode(source, target)


def replaced(text: str, words: dict[str, str]) -> str:
    for old, new in words.items():
        text = text.replace(old, new)
    return text


def thin(folder: Path, package: str, data: str, requirement: str | None) -> None:
    """Copies the template, then the files for the kind of data."""
    words = {NAME: package, NAME.replace("_", "-"): package.replace("_", "-")}
    link = address(folder, requirement)
    words |= {
        "DATA_LINE": FIRST_LINE[data],
        "[Lockstep](LOCKSTEP_ADDRESS)": f"[Lockstep]({link})" if link else "Lockstep",
    }
    for source in (TEMPLATES / "project", TEMPLATES / f"data-{data}"):
        for path in sorted(path for path in source.rglob("*") if path.is_file()):
            place = path.relative_to(source)
            if not any(part.startswith((".", "__pycache__")) for part in place.parts):  # leftovers of tools
                copy(path, folder / str(place).replace("dot-", ".").replace(NAME, package), words)
    if data == "none":
        edit(folder / "configs/project.yaml", f"  - override data: {package}\n", "")
    project = folder / "pyproject.toml"
    if requirement:
        edit(project, '    "lockstep",\n', f'    "{requirement}",\n')
        edit(
            project,
            "[tool.hatch.build.targets.wheel]\n",
            "[tool.hatch.metadata]\nallow-direct-references = true\n\n[tool.hatch.build.targets.wheel]\n",
        )
    else:
        table = f'[tool.uv.sources]\nlockstep = {{path = "{address(folder, None)}", editable = true}}\n\n[tool.hatch'
        edit(project, "[tool.hatch", table)


def address(folder: Path, requirement: str | None) -> str:
    """The address of Lockstep for the new project."""
    return requirement.partition("@")[2].strip() if requirement else os.path.relpath(ROOT, folder.resolve())


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, f"{path}: the template lacks {old!r}"
    path.write_text(text.replace(old, new, 1))


def full(folder: Path, package: str, strip: bool) -> None:
    """Copies every file tracked by git, with Lockstep's name replaced."""
    words = {
        "lockstep": package,
        "Lockstep": package.replace("_", " ").title().replace(" ", ""),
        "LOCKSTEP": package.upper(),
    }
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        raise UserError("--full copies a git checkout of Lockstep, and git ls-files failed here. Clone Lockstep first.")
    for name in listed.stdout.splitlines():
        if not (strip and name.startswith(STRIPPED)):
            copy(ROOT / name, folder / replaced(name, words), words)
    if strip:
        edit(folder / "pyproject.toml", 'files = ["src", "scripts", "benchmarks",', 'files = ["src", "scripts",')


def commit(folder: Path, message: str) -> None:
    """Makes the project's first commit, if git and an author's name are there."""
    who = ["-c", "user.name=new_project", "-c", "user.email=new_project@localhost"]
    known = subprocess.run(["git", "config", "user.email"], capture_output=True).returncode == 0
    for command in (
        ["init", "--quiet", "-b", "main"],
        ["add", "-A"],
        [*([] if known else who), "commit", "--quiet", "-m", message],
    ):
        subprocess.run(["git", *command], cwd=folder, check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--package", required=True)
    parser.add_argument("--data", choices=DATA, default="folder")
    parser.add_argument("--lockstep", help="a requirement; default: the path of this checkout")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--strip", action="store_true")
    args = parser.parse_args()
    check(args.folder, args.package)
    if args.strip and not args.full:
        raise UserError("--strip has no effect on a thin project, which has no examples. Leave it out, or type --full.")
    if args.full:
        full(args.folder, args.package, args.strip)
    else:
        thin(args.folder, args.package, args.data, args.lockstep)
    commit(args.folder, f"{args.package}, begun from Lockstep's template")
    print(f"{args.folder} is ready: cd {args.folder} && uv run pytest && uv run train.py")


if __name__ == "__main__":
    sys.exit(exit_code(main))
