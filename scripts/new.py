"""Create your own project: a copy of this template's project files, which depends on the library Lockstep.

lockstep new <folder> [--package <name>]
lockstep new <folder> --upgrade

It copies train.py, eval.py, predict.py, configs/, src/project/ (as src/<package>/), tests/project/ (as tests/) and scripts/slurm.sbatch, adds
pyproject.toml, CI, a README, AGENTS.md and llms.txt, and makes a first commit. To change the library as well, clone Lockstep instead.
Without a checkout or an installation: uvx --from <Lockstep> lockstep new <folder>, where <Lockstep> is git+https://..., a wheel or a release.
  --package       default: the name of the folder
  --upgrade       an existing project gets this Lockstep and the versions that it was tested with
  --lockstep      the requirement of the project, such as 'lockstep @ git+https://...'. Default: what this Lockstep was installed from;
                  for a checkout, its remote and commit if others can reach them, else a wheel of it in the project's wheels/
"""

import argparse
import json
import keyword
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions, requires
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lockstep import PACKAGE, ROOT, TEMPLATE, WHEEL, __version__
from lockstep.config import checked
from lockstep.errors import UserError
from lockstep.launch.exits import after_output, exit_code
from lockstep.machine.files import local_path, to_json
from lockstep.machine.process import protect_streams

NAME = "project"  # the package of the template
COPIED = {
    "train.py": "train.py",
    "eval.py": "eval.py",
    "predict.py": "predict.py",
    "configs": "configs",
    f"src/{NAME}": "src/{package}",
    f"tests/{NAME}": "tests",
    "scripts/slurm.sbatch": "scripts/slurm.sbatch",
}
OF_LIBRARY = "\n## Only in Lockstep itself"  # the last section of AGENTS.md, which a project does not get
# The package name in targets, imports and paths. Elsewhere the word has its usual meaning.
NAMED = re.compile(rf"\b{NAME}(?=\.(?:model|module|data)\b)|(?<=src/){NAME}\b")
README = """# {package}

Classifies MNIST's digits, until you change `src/{package}/`. Trains with {lockstep}: the same result up to rounding on one process or many,
and a bit-identical one after a crash.

```bash
pip install uv
uv run train.py                                          # MNIST; a different data set: data=folder data.root=<folder>
uv run train.py strategy=ddp trainer.devices=2           # two processes
uv run pytest                                            # tests these promises on this project's network, loss and data
uv run eval.py run=<name>
uv run predict.py run=<name> input=<folder of images>
uv run train.py --help                                   # all keys
uv run lockstep runs                                     # a table of runs; `uv run lockstep` lists the other commands
```

| to change | edit |
| --- | --- |
| the network | `src/{package}/model.py`; its arguments are keys in `configs/model/` |
| the loss, a metric, a training step | `src/{package}/module.py`; its arguments are keys in `configs/task/classifier.yaml` |
| the data | `src/{package}/data.py`: a class, which a file in `configs/data/` names |
| the defaults, which `uv run pytest` tests too | `configs/project.yaml`: `override model: ...`, `override data: ...` |
| the optimizer, its schedule | `optim=adamw`, `adam` or `sgd`, `optim.lr`, `schedule=cosine`; several optimizers: a LightningModule, `task=lightning_module` |
| anything between the data and the report | `train.py` |

    train.py                 the steps from the data to the report, in order; eval.py and predict.py share its parts
    src/{package}/           model.py: the network · module.py: the loss, the metrics and the steps · data.py: the data sets
    configs/                 project.yaml: the defaults · a folder per group, whose files name the classes in src/
    tests/                   same result on one process and two, after a kill, and in an evaluation
    checks.json              what `lockstep check` found, which the first lines of a run quote

To upgrade Lockstep, run `uvx --from <a newer Lockstep: git+https://..., a wheel or a release> lockstep new . --upgrade`, then `uv run pytest`.
"""
LLMS = """# {package}

> A PyTorch project that trains with {lockstep}: Hydra configs choose the model, the data and the strategy (single, dp, ddp, fsdp), and the same
> command gives the same result on one process or many, and after a crash.

- [AGENTS.md](AGENTS.md): commands, where things are, rules
- [train.py](train.py): the steps from the data to the report
- [src/{package}/module.py](src/{package}/module.py): the loss, the metrics and the steps
- [src/{package}/model.py](src/{package}/model.py): the network
- [src/{package}/data.py](src/{package}/data.py): the data sets
- [configs/project.yaml](configs/project.yaml): the defaults

The documentation of the installed version: `uv run python -c "import lockstep; print(lockstep.DOCS)"` prints its folder; begin with README.md there.
"""
PYPROJECT = """[build-system]
requires = ["hatchling>=1.27,<2"]
build-backend = "hatchling.build"

[project]
name = "{title}"
version = "0.1.0"
requires-python = ">=3.11,<3.15"
dependencies = [
    "lockstep",
    "hydra-core>=1.4.0rc3,<1.5",   # pre-releases are installed only if requested by name
    "hydra-submitit-launcher>=1.4.0rc3,<1.5",
    "hydra-optuna-sweeper>=1.4.0rc3,<1.5",
]

[dependency-groups]
dev = ["pytest>=8.3,<10", "ruff>=0.8,<1"]

[tool.lockstep]
packages = []                      # installed packages that configs may name, besides those in src/

[tool.hatch.metadata]
allow-direct-references = true

[tool.hatch.build.targets.wheel]
packages = ["src/{package}"]

[tool.uv] # the versions that Lockstep was tested with; uv.lock is not committed, because it names a package index
constraint-dependencies = []

[tool.ruff]
line-length = 120

[tool.ruff.lint]
ignore = ["E501"] # error messages may be longer than a line

[tool.ruff.lint.isort]
known-first-party = ["lockstep", "{package}"]

[tool.pytest.ini_options]
testpaths = ["tests"]
"""
CI = """name: CI
on:
  push: {branches: [main]}
  pull_request:

permissions: {contents: read}

jobs:
  tests:
    runs-on: ubuntu-latest
    timeout-minutes: 30
    steps:
      - uses: actions/checkout@11d5960a326750d5838078e36cf38b85af677262 # v4.4.0
      - uses: astral-sh/setup-uv@d0cc045d04ccac9d8b7881df0226f9e82c39688e # v6.8.0
      - run: uv run ruff check .
      - run: uv run ruff format --check .
      - run: uv run pytest
"""
IGNORED = "\n".join(
    [
        ".venv/",
        "uv.lock",
        "__pycache__/",
        "*.egg-info/",
        ".pytest_cache/",
        ".ruff_cache/",
        "/runs/",
        "/exports/",
        "/data/",
        "slurm-*.out",
        "",
    ]
)
DEV = ("pytest", "ruff")  # development dependencies of a project
Wheel = tuple[str, bytes]  # name and content
REACHABLE = re.compile(r"(https?|ssh)://|[\w.-]+@[\w.-]+:")  # addresses that others can reach; uv lacks git://
BUILDERS = (  # commands that build a wheel into a folder
    [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d"],
    ["uv", "build", "--quiet", "--wheel", "--out-dir"],
    [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", ".", "-w"],
)


def check(folder: Path, package: str) -> None:
    """Raises UserError if the folder is not empty or the name is not a valid package name."""
    if not package.isidentifier() or keyword.iskeyword(package) or package in ("lockstep", "hydra_plugins", "tests"):
        raise UserError(f"--package {package} is not a valid package name. Use letters, digits and _, such as flowers.")
    here = Path(__file__).resolve().parent
    elsewhere = [path for path in sys.path if Path(path).resolve() != here]  # not this script and its neighbours
    if package in sys.stdlib_module_names or PathFinder.find_spec(package, elsewhere):
        raise UserError(
            f"--package {package}: Python or an installed library has a package of that name. Use a different name."
        )
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} exists and is not empty. Use a different folder.")


def create(folder: Path, package: str, requirement: str | None, wheel: Wheel | None) -> None:
    """Copies the files of COPIED under the new package name, and adds the other files of a project."""
    for source, target in COPIED.items():
        origin = TEMPLATE / source
        for path in sorted(origin.rglob("*")) if origin.is_dir() else [origin]:
            path_in_project = folder / target.format(package=package) / path.relative_to(origin)
            if path.is_file() and "__pycache__" not in path.parts:
                path_in_project.parent.mkdir(parents=True, exist_ok=True)
                path_in_project.write_text(NAMED.sub(package, path.read_text(encoding="utf-8")), encoding="utf-8")
                shutil.copymode(path, path_in_project)
    link = re.fullmatch(r".*(https?://.*?)(\.git)?(@[^@/]*)?", requirement or "")
    fields = {
        "package": package,
        "title": package.replace("_", "-"),
        "lockstep": f"[Lockstep]({link[1]})" if link else "Lockstep",
    }
    texts = {
        "README.md": README.format(**fields),
        "llms.txt": LLMS.format(**fields),
        "AGENTS.md": NAMED.sub(package, (TEMPLATE / "AGENTS.md").read_text(encoding="utf-8").partition(OF_LIBRARY)[0]),
        "pyproject.toml": PYPROJECT.format(**fields),
        ".gitignore": IGNORED,
        ".github/workflows/ci.yml": CI,
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / checked.FILE).write_text(to_json(checks(folder, package)) + "\n", encoding="utf-8")
    set_requirement(folder, requirement, wheel)


def checks(folder: Path, package: str) -> list[checked.Check]:
    """The template's results of `lockstep check` that hold for this Lockstep, as a check of the project writes them: with the digests
    of its files, and the versions of what these import."""
    file, found = TEMPLATE / checked.FILE, []
    for check in json.loads(file.read_text(encoding="utf-8")) if file.is_file() else ():
        sources = {name: was for name, was in check["sources"].items() if not name.startswith("src/hydra_plugins/")}
        now = [checked.digest(PACKAGE if name == "src/lockstep" else TEMPLATE / name) for name in sources]
        if now == [*sources.values()]:
            renamed = json.loads(NAMED.sub(package, json.dumps(check)))
            copied = [name for name in renamed["sources"] if (folder / name).is_file()]
            modules = (checked.IMPORTED.findall((folder / name).read_text(encoding="utf-8")) for name in copied)
            names, of = {"lockstep", "torch", "lightning"}.union(*modules), packages_distributions()
            libraries = {library for name in names for library in of.get(name, ())}
            versions = {name: was for name, was in renamed["versions"].items() if name in libraries}
            digests = {name: checked.digest(folder / name) for name in copied}
            found.append(renamed | {"sources": digests, "versions": versions})
    return found


def set_requirement(folder: Path, requirement: str | None, wheel: Wheel | None) -> None:
    """Writes the requirement, or the wheel, and the tested versions into the project."""
    file = folder / "pyproject.toml"
    text = file.read_text(encoding="utf-8")
    text = re.sub(r"^lockstep = \{path = .*\}\n", "", text, flags=re.MULTILINE)
    parts = {r'^    "lockstep\b.*",$': f'    "{requirement or "lockstep"}",',
             r"^constraint-dependencies = \[[^\]]*\]$": "\n".join(["constraint-dependencies = [", *pins(), "]"])}  # fmt: skip
    for pattern, new in parts.items():
        match = re.search(pattern, text, re.MULTILINE)
        if not match:
            raise UserError(f"{file} has no line that matches {pattern}, as written by lockstep new. Edit it by hand.")
        text = text[: match.start()] + new + text[match.end() :]
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


def with_dependencies(names: Iterator[str] | tuple[str, ...], packages: set[str]) -> set[str]:
    """Adds packages, and the installed packages that they need, to `packages`."""
    for name in map(canonicalize_name, names):
        if name not in packages:
            packages.add(name)
            try:
                deps = [Requirement(text) for text in requires(name) or ()]
            except PackageNotFoundError:  # such as pytest, where only Lockstep is installed
                continue
            with_dependencies(
                (dep.name for dep in deps if dep.marker is None or dep.marker.evaluate({"extra": ""})), packages
            )
    return packages


def pins() -> list[str]:
    """The tested versions of the packages that a project needs; without hashes, which belong to the files of one index."""
    names = with_dependencies(("lockstep", *DEV), set())
    lines = (
        line.rstrip(" \\")
        for line in (TEMPLATE / "requirements.txt").read_text(encoding="utf-8").splitlines()
        if "==" in line
    )
    return [f'    "{line}",' for line in lines if line.partition("==")[0] in names]


def git(*command: str) -> str:
    """The output of git in this checkout; empty if it fails."""
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
    return "" if done.returncode else done.stdout.strip()


def dependency() -> tuple[str | None, Wheel | None]:
    """What a project depends on: a requirement that others can install, or a wheel that the project contains.

    Raises:
        UserError: no wheel could be built or found.
    """
    if not WHEEL:
        requirement = git_requirement()
        return requirement, None if requirement else build_wheel(ROOT)
    recorded = distribution("lockstep").read_text("direct_url.json")  # PEP 610: absent if installed from an index
    if recorded is None:
        return f"lockstep=={__version__}", None
    origin = json.loads(recorded)
    address, path = without_token(origin["url"]), Path(url2pathname(urlsplit(origin["url"]).path))
    if not address.startswith("file:"):
        vcs = origin.get("vcs_info")
        return f"lockstep @ {vcs['vcs']}+{address}@{vcs['commit_id']}" if vcs else f"lockstep @ {address}", None
    if path.is_dir():
        return None, build_wheel(path)
    if not path.is_file():
        raise UserError(f"{path}, which Lockstep was installed from, no longer exists. Pass --lockstep.")
    return None, (path.name, path.read_bytes())


def without_token(address: str) -> str:
    return re.sub(r"^(https?://)[^/]*@", r"\1", address)


def git_requirement() -> str | None:
    """This commit at the first remote that has it and that others can reach; None if there is none, or files have changed since."""
    commit = git("rev-parse", "HEAD")
    if Path(git("rev-parse", "--show-toplevel")) != ROOT or git("status", "--porcelain", "--untracked-files=no"):
        return None
    for remote in git("remote").split():
        address = git("remote", "get-url", remote)
        if REACHABLE.match(address) and git("branch", "-r", "--contains", commit, "--list", f"{remote}/*"):
            if "://" not in address:  # git@host:path
                address = "ssh://" + address.replace(":", "/", 1)
            return f"lockstep @ git+{without_token(address)}@{commit}"
    return None


def build_wheel(checkout: Path) -> Wheel:
    """Name and bytes of a wheel of a checkout.

    Raises:
        UserError: no tool could build it.
    """
    errors = []
    for command in BUILDERS:
        with tempfile.TemporaryDirectory() as target:
            try:
                done = subprocess.run([*command, target], cwd=checkout, capture_output=True, text=True)
            except FileNotFoundError:
                continue
            if wheels := list(Path(target).glob("*.whl")):
                return wheels[0].name, wheels[0].read_bytes()
            errors += (done.stderr or done.stdout).strip().splitlines()[-1:]
    raise UserError(
        f"no wheel of Lockstep could be built: {'; '.join(errors)}. Install hatchling or uv, or pass a requirement with --lockstep."
    )


def commit(folder: Path, message: str) -> None:
    """Makes the project's first commit, if git works; without a configured author, as `lockstep new`."""
    if not shutil.which("git"):
        return
    has_author = subprocess.run(["git", "config", "user.email"], capture_output=True).returncode == 0
    author = [] if has_author else ["-c", "user.name=lockstep new", "-c", "user.email=lockstep@localhost"]
    for command in (["init", "--quiet", "-b", "main"], ["add", "-A"], [*author, "commit", "--quiet", "-m", message]):
        subprocess.run(["git", *command], cwd=folder, check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=local_path)
    parser.add_argument("--package")
    parser.add_argument("--upgrade", action="store_true")
    parser.add_argument("--lockstep", help="a requirement; default: what this Lockstep was installed from")
    args = parser.parse_args()
    if args.upgrade:
        if args.package or not (args.folder / "pyproject.toml").is_file():
            raise UserError(
                "--upgrade needs the folder of an existing project, and accepts only --lockstep as a further option."
            )
        requirement, wheel = (args.lockstep, None) if args.lockstep else dependency()
        set_requirement(args.folder, requirement, wheel)
        print(
            f"{args.folder} now depends on {requirement or 'the wheel in wheels/'}: cd {args.folder} && uv run pytest"
        )
        return
    package = args.package or re.sub(r"\W+", "_", args.folder.resolve().name).lower()
    check(args.folder, package)
    requirement, wheel = (args.lockstep, None) if args.lockstep else dependency()
    create(args.folder, package, requirement, wheel)
    commit(args.folder, f"{package}, created from Lockstep's template")
    print(f"{args.folder} is ready: cd {args.folder} && uv run pytest && uv run train.py")


if __name__ == "__main__":
    protect_streams()
    sys.exit(after_output(exit_code(main)))
