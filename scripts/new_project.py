"""Begins a project of your own.

python scripts/new_project.py <folder> --package <name> [--data folder|arrays|none] [--full [--strip]]

By default a THIN project, which depends on Lockstep: train.py, eval.py, configs/ with what differs, src/<name>/, tests of
Lockstep's promises on the project's own data, pyproject.toml, CI, README, and a first commit. A newer Lockstep is an upgrade.
  --data folder   images in class folders (default) · arrays: an own data set of arrays · none: MNIST, until there is data
  --full          a renamed copy of all of Lockstep instead; --strip leaves out its benchmarks, notebook and templates
  --lockstep      what a thin project depends on: a requirement such as 'lockstep @ git+https://...'; by default this checkout
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
    "folder": "images in data/<class>/; another folder: data.root=<folder>",
    "arrays": "data/train.npz and data/test.npz; another folder: data.root=<folder>",
    "none": "MNIST, until this project has data of its own",
}
STRIPPED = (
    "benchmarks/", "tests/benchmarks/", "NOTEBOOK.md", "templates/", "scripts/new_project.py", "tests/scripts/test_new_project.py",
    "tests/test_readme.py",
)  # fmt: skip


def check(folder: Path, package: str) -> None:
    """Raises UserError: the folder has something in it, or the name is no package's."""
    if not package.isidentifier() or keyword.iskeyword(package) or package in ("lockstep", "hydra_plugins", "tests"):
        raise UserError(
            f"--package {package} is no name for a package. Type letters, digits and _, as in --package flowers."
        )
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} exists and is not empty. Type another folder.")


def copy(source: Path, target: Path, name: dict[str, str]) -> None:
    """A file, with the words of `name` replaced; what is no text is copied as it is."""
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
    """Copies the template, and over it what belongs to the kind of data."""
    words = {NAME: package, NAME.replace("_", "-"): package.replace("_", "-")}
    words |= {"DATA_LINE": FIRST_LINE[data], "LOCKSTEP_ADDRESS": address(folder, requirement)}
    for source in (TEMPLATES / "project", TEMPLATES / f"data-{data}"):
        for path in sorted(path for path in source.rglob("*") if path.is_file()):
            place = path.relative_to(source)
            if not any(part.startswith((".", "__pycache__")) for part in place.parts):  # what tools have left there
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
    """Where Lockstep is, as the new project says it."""
    return requirement.partition("@")[2].strip() if requirement else os.path.relpath(ROOT, folder.resolve())


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, f"{path}: the template lacks {old!r}"
    path.write_text(text.replace(old, new, 1))


def full(folder: Path, package: str, strip: bool) -> None:
    """Copies every file that git knows, with Lockstep's name replaced."""
    words = {
        "lockstep": package,
        "Lockstep": package.replace("_", " ").title().replace(" ", ""),
        "LOCKSTEP": package.upper(),
    }
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        raise UserError(
            "--full copies a checkout of Lockstep, and this is none: git ls-files failed. Clone Lockstep first."
        )
    for name in listed.stdout.splitlines():
        if not (strip and name.startswith(STRIPPED)):
            copy(ROOT / name, folder / replaced(name, words), words)
    if strip:
        edit(folder / "pyproject.toml", 'files = ["src", "scripts", "benchmarks",', 'files = ["src", "scripts",')


def commit(folder: Path, message: str) -> None:
    """Begins the project's history; without git, or a name for the author, there is none."""
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
    parser.add_argument("--lockstep", help="a requirement; by default the path of this checkout")
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
