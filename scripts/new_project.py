"""Create a new project.

python scripts/new_project.py <folder> --package <name> [--data folder|arrays|none] [--full]
python scripts/new_project.py <folder> --upgrade

The default is a THIN project, which depends on Lockstep and can upgrade it. It has train.py, eval.py, predict.py, configs/ with what
differs from the defaults, src/<name>/, tests of Lockstep's promises on the project's data, pyproject.toml, CI, README, and a first commit.
  --data folder   images in class folders (default) · arrays: a data set of arrays · none: MNIST, until you have data
  --upgrade       upgrade a thin project to this checkout's Lockstep and the package versions that it was tested with
  --full          create a renamed copy of all of Lockstep instead
  --lockstep      how a thin project requires Lockstep, such as 'lockstep @ git+https://...'. Default: the remote and commit of
                  this checkout if others can reach them, else a wheel in the project's wheels/
"""

import argparse
import keyword
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from lockstep import ROOT
from lockstep.errors import UserError
from lockstep.launch.exits import exit_code

TEMPLATES = ROOT / "templates"
NAME = "my_project"  # of the template, which is a runnable project
DATA = ("folder", "arrays", "none")
WORDS = {  # of the README
    "folder": {
        "ABOUT_DATA": "It classifies the images in `data/`, which has one folder per class, with or without `train/`, `val/` and `test/` above them.\n"
        "`uv run tests/made.py` writes a small sample there, until you add your images.",
        "DATA_LINE": "images in data/<class>/, or in another folder: data.root=<folder>",
        "CONFIG_FILES": "configs/model/ data/     one file per option: the network in src/, and the location of the images",
        "SOURCE_FILES": "model.py: the network",
    },
    "arrays": {
        "ABOUT_DATA": "It classifies the arrays in `data/train.npz` and `data/test.npz`: `input` (uint8, NCHW) and `target` (N).\n"
        "`uv run tests/made.py` writes a small sample there, until you add your arrays.",
        "DATA_LINE": "data/train.npz and data/test.npz, or another folder: data.root=<folder>",
        "CONFIG_FILES": "configs/model/ data/     one file per option; each names a class in src/",
        "SOURCE_FILES": "model.py, data.py: the network, and the class that reads the arrays",
    },
    "none": {
        "ABOUT_DATA": "It classifies the digits of MNIST, until it has its own data.",
        "DATA_LINE": "MNIST, until this project has its own data",
        "CONFIG_FILES": "configs/model/           one file per option; each names a class in src/",
        "SOURCE_FILES": "model.py: the network",
    },
}
Wheel = tuple[str, bytes]  # name and content
REACHABLE = re.compile(r"(https?|ssh)://|[\w.-]+@[\w.-]+:")  # addresses that others may reach; uv has no git://
BUILDERS = (  # of a wheel, into a folder
    [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d"],
    ["uv", "build", "--quiet", "--wheel", "--out-dir"],
    [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", ".", "-w"],
)


def check(folder: Path, package: str) -> None:
    """Raises UserError if the folder is not empty or the name is not a valid package name."""
    if not package.isidentifier() or keyword.iskeyword(package) or package in ("lockstep", "hydra_plugins", "tests"):
        raise UserError(f"--package {package} is not a valid package name. Use letters, digits and _, such as flowers.")
    if package in sys.stdlib_module_names or (find_spec(package) and package != NAME):
        raise UserError(
            f"--package {package}: Python or an installed library has a package of that name. Use a different name."
        )
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} exists and is not empty. Use a different folder.")


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


def thin(folder: Path, package: str, data: str, requirement: str | None, wheel: Wheel | None) -> None:
    """Copies the template, then the files for the kind of data."""
    link = re.fullmatch(r".*(https?://.*?)(\.git)?(@[^@/]*)?", requirement or "")
    words = WORDS[data] | {
        NAME: package,
        NAME.replace("_", "-"): package.replace("_", "-"),
        "[Lockstep](LOCKSTEP_ADDRESS)": f"[Lockstep]({link[1]})" if link else "Lockstep",
    }
    for source in (TEMPLATES / "project", TEMPLATES / f"data-{data}"):
        for path in sorted(path for path in source.rglob("*") if path.is_file()):
            place = path.relative_to(source)
            if not any(part.startswith((".", "__pycache__")) for part in place.parts):  # leftovers of tools
                copy(path, folder / str(place).replace("dot-", ".").replace(NAME, package), words)
    if data == "none":
        config = folder / "configs/project.yaml"
        config.write_text(replaced(config.read_text(), {f"  - override data: {package}\n": ""}))
    depend(folder, requirement, wheel)


def depend(folder: Path, requirement: str | None, wheel: Wheel | None) -> None:
    """Writes the requirement, or the wheel, and the tested versions into the project."""
    file = folder / "pyproject.toml"
    text = file.read_text(encoding="utf-8")
    text = re.sub(r"^lockstep = \{path = .*\}\n", "", text, flags=re.MULTILINE)
    parts = {r'^    "lockstep\b.*",$': f'    "{requirement or "lockstep"}",',
             r"^constraint-dependencies = \[[^\]]*\]$": "\n".join(["constraint-dependencies = [", *pins(), "]"])}  # fmt: skip
    for pattern, new in parts.items():
        found = re.search(pattern, text, re.MULTILINE)
        if not found:
            raise UserError(f"{file} has no line {pattern}, which a project of new_project.py has. Change it by hand.")
        text = text[: found.start()] + new + text[found.end() :]
    if wheel:
        table = "[tool.uv.sources]\n"
        text = text if table in text else f"{text}\n{table}"
        text = text.replace(table, f'{table}lockstep = {{path = "wheels/{wheel[0]}"}}\n')
    for old in folder.glob("wheels/lockstep-*.whl"):
        old.unlink()
    if wheel:
        (folder / "wheels").mkdir(exist_ok=True)
        (folder / "wheels" / wheel[0]).write_bytes(wheel[1])
    file.write_text(text, encoding="utf-8")


def pins() -> list[str]:
    """The tested package versions, without hashes, because hashes belong to the files of one index."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return [f'    "{line.rstrip(" " + chr(92))}",' for line in lines if "==" in line and not line.startswith(" ")]


def git(*command: str) -> str:
    """The output of git in this checkout; empty if it is no git repository."""
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
    return "" if done.returncode else done.stdout.strip()


def git_requirement() -> str | None:
    """This commit at the first reachable remote that has it; None if there is none, or if files have changed since."""
    commit = git("rev-parse", "HEAD")
    if Path(git("rev-parse", "--show-toplevel")) != ROOT or git("status", "--porcelain", "--untracked-files=no"):
        return None
    for remote in git("remote").split():
        address = git("remote", "get-url", remote)
        if REACHABLE.match(address) and git("branch", "-r", "--contains", commit, "--list", f"{remote}/*"):
            if "://" not in address:  # git@host:path
                address = "ssh://" + address.replace(":", "/", 1)
            public = re.sub(r"^(https?://)[^/]*@", r"\1", address)  # without a token
            return f"lockstep @ git+{public}@{commit}"
    return None


def build_wheel() -> Wheel:
    """Name and bytes of a wheel of this checkout.

    Raises:
        UserError: no tool could build it.
    """
    errors = []
    for command in BUILDERS:
        with tempfile.TemporaryDirectory() as target:
            try:
                done = subprocess.run([*command, target], cwd=ROOT, capture_output=True, text=True)
            except FileNotFoundError:
                continue
            if found := list(Path(target).glob("*.whl")):
                return found[0].name, found[0].read_bytes()
            errors += (done.stderr or done.stdout).strip().splitlines()[-1:]
    raise UserError(
        f"no wheel of Lockstep could be built: {'; '.join(errors)}. Install one of hatchling and uv, or name an address with --lockstep."
    )


def full(folder: Path, package: str) -> None:
    """Copies every file tracked by git, with Lockstep's name replaced."""
    title = package.replace("_", " ").title().replace(" ", "")
    words = {"lockstep": package, "Lockstep": title, "LOCKSTEP": package.upper()}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        raise UserError("--full copies a git checkout of Lockstep, and git ls-files failed here. Clone Lockstep first.")
    for name in listed.stdout.splitlines():
        copy(ROOT / name, folder / replaced(name, words), words)


def commit(folder: Path, message: str) -> None:
    """Makes the project's first commit, if git and an author's name are there."""
    known = subprocess.run(["git", "config", "user.email"], capture_output=True).returncode == 0
    who = [] if known else ["-c", "user.name=new_project", "-c", "user.email=new_project@localhost"]
    for command in (["init", "--quiet", "-b", "main"], ["add", "-A"], [*who, "commit", "--quiet", "-m", message]):
        subprocess.run(["git", *command], cwd=folder, check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--package")
    parser.add_argument("--upgrade", action="store_true")
    parser.add_argument("--data", choices=DATA, default="folder")
    parser.add_argument("--lockstep", help="the requirement; default: this checkout's commit at its remote, or a wheel")
    parser.add_argument("--full", action="store_true")
    args = parser.parse_args()
    requirement = args.lockstep or git_requirement()
    if args.upgrade:
        if args.package or args.full or not (args.folder / "pyproject.toml").is_file():
            raise UserError("--upgrade takes the folder of an existing thin project, and no option but --lockstep.")
        depend(args.folder, requirement, None if requirement else build_wheel())
        now = requirement or "the wheel in wheels/"
        print(f"{args.folder} now depends on {now}: cd {args.folder} && uv run pytest")
        return
    if not args.package:
        raise UserError("--package is missing. Pass the name of the package, for example --package flowers.")
    check(args.folder, args.package)
    if args.full:
        full(args.folder, args.package)
    else:
        thin(args.folder, args.package, args.data, requirement, None if requirement else build_wheel())
    commit(args.folder, f"{args.package}, begun from Lockstep's template")
    print(f"{args.folder} is ready: cd {args.folder} && uv run pytest && uv run train.py")


if __name__ == "__main__":
    sys.exit(exit_code(main))
