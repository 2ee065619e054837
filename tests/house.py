"""The size of the house, counted: what tests/test_layers.py holds below the ceilings of tests/ceilings.toml.

python tests/house.py     # prints the table; with --places, also where the two worlds are separated
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
OWNED = sorted([*SRC.glob("project/*.py"), *ROOT.glob("*.py"), *ROOT.glob("configs/**/*.yaml")])  # what a fork edits
FILES = sorted(path for path in SRC.rglob("*.py") if path not in OWNED)
KIT, EXTRAS, CHECK = (
    [path for path in FILES if path.is_relative_to(SRC / "lockstep" / name)]
    for name in ("kit", "extras", "extras/check")
)
EXTRAS = [path for path in EXTRAS if path not in CHECK]
CORE = [path for path in FILES if path not in KIT + EXTRAS + CHECK]
OWNED_PYTHON = [path for path in OWNED if path.suffix == ".py"]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
CEILINGS = ROOT / "tests/ceilings.toml"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Places that separate what Lockstep has of its own from what users bring: a flag that is asked, a type that is compared, a base class whose
# subclass is the other kind. An object should answer instead.
FLAGS = {
    "own_loaders",
    "custom_module",
    "engine_data",
    "of_task",
    "module_of_task",
    "trains_task",
    "named_batches",
    "fills",
}
ASKED = FLAGS | {"share", "mean", "for_files"}  # of Lockstep's strategies, modules and data sets
KINDS = re.compile(r"\b(?:Task|Module|DataModule|DataSet|TaskWorkload|LightningModule|LightningDataModule)\b")
BASES = {"Workload", "Loaders"}
SHIPPED = re.compile(r"\.is_shipped\b|\bhas_base\(")  # whether a class is imported before it is known to be needed
IGNORED = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def nodes(files: list[Path], *kinds: type[ast.AST]) -> Iterator[tuple[Path, ast.AST]]:
    return ((path, node) for path in files for node in ast.walk(tree(path)) if isinstance(node, kinds))


def lines_of_code(path: Path) -> int:
    """Without docstrings, comments and blank lines."""
    documented = [
        node.body[0]
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and ast.get_docstring(node, clean=False) is not None
    ]
    left_out = {line for node in documented for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return len({line for token in tokens(path) for line in range(token.start[0], token.end[0] + 1)} - left_out)


def tokens(path: Path) -> list[tokenize.TokenInfo]:
    """Without comments and ends of lines. A docstring is one."""
    every = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return [token for token in every if token.type not in IGNORED]


def longest_function(files: list[Path]) -> int:
    """Lines, without its docstring."""
    found = [0]
    for _, node in nodes(files, *FUNCTIONS):
        body = node.body[ast.get_docstring(node) is not None :]  # type: ignore[attr-defined, arg-type]
        found.append(node.end_lineno - body[0].lineno + 1 if body else 0)  # type: ignore[attr-defined]
    return max(found)


def names_of_kit() -> int:
    """Names of the kit that the core imports: none when loader and module are of one kind."""
    found = [f"{node.module}.{alias.name}" for _, node in nodes(CORE, ast.ImportFrom) for alias in node.names]  # type: ignore[attr-defined]
    found += [alias.name for _, node in nodes(CORE, ast.Import) for alias in node.names]  # type: ignore[attr-defined]
    return sum(f"{name}.".startswith("lockstep.kit.") for name in found)


def arguments(node: ast.AST) -> set[str]:
    assert isinstance(node, FUNCTIONS)
    return {arg.arg for arg in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]}


def branches_on(word: str) -> int:
    tests = nodes(FILES, ast.If, ast.IfExp, ast.While)
    return sum(word in ast.unparse(node.test) for _, node in tests)  # type: ignore[attr-defined]


def separates(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in FLAGS and isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.ClassDef):
        return any(ast.unparse(base) in BASES for base in node.bases)
    if isinstance(node, ast.Compare):
        return bool(re.search(r"\bwork\.task is (?:not )?None", ast.unparse(node)))
    if not isinstance(node, ast.Call) or len(node.args) < 2:
        return False
    asks = ast.unparse(node.func)
    if asks in ("isinstance", "issubclass"):
        return bool(KINDS.search(ast.unparse(node.args[1]).replace("nn.Module", "")))
    return asks in ("getattr", "hasattr") and getattr(node.args[1], "value", None) in ASKED


def size(files: list[Path]) -> dict[str, int]:
    return {
        "lines": sum(map(lines_of_code, files)),
        "tokens": sum(len(tokens(path)) for path in files),
        "modules": len(files),
        "longest_function": longest_function(files),
    }


def counted() -> dict[str, dict[str, int]]:
    """As in tests/ceilings.toml."""
    with_cfg = [path for path, node in nodes(FILES, *FUNCTIONS) if "cfg" in arguments(node)]
    asked = [found for path in FILES for found in SHIPPED.findall(path.read_text())]
    return {
        "core": {
            **size(CORE),
            "names_of_kit": names_of_kit(),
            "functions_with_cfg": len(with_cfg),
            "files_with_cfg": len(set(with_cfg)),
            "places_between_two_worlds": sum(separates(node) for _, node in nodes(FILES, ast.AST)),
            "questions_before_import": len(asked),
            "branches_on_logical_ranks": branches_on("logical_ranks"),
        },
        "kit": size(KIT),
        "extras": size(EXTRAS),
        "check": size(CHECK),
        "owned": {
            **size(OWNED_PYTHON),
            "lines": sum(len(path.read_text().splitlines()) for path in OWNED),
            "modules": len(OWNED),
        },
        "tests": size(TESTS),
        "pages": {"words": sum(len(page.read_text().split()) for page in PAGES)},
    }


# --- the history of the ceilings ---

Ceilings = dict[str, dict[str, int]]


def git(*command: str, folder: Path = ROOT) -> str:
    return subprocess.run(["git", *command], cwd=folder, check=True, capture_output=True, text=True).stdout


def history(file: Path) -> list[tuple[str, Ceilings]]:
    """The subject of each commit that changed the ceilings, oldest first, with what it made of them; and the file as it is."""
    folder, versions = file.parent, []
    for line in git("log", "--reverse", "--format=%H %s", "--", file.name, folder=folder).splitlines():
        commit, _, subject = line.partition(" ")
        versions.append((subject, tomllib.loads(git("show", f"{commit}:./{file.name}", folder=folder))))
    return [*versions, ("what is not committed", tomllib.loads(file.read_text()))]


def rises(versions: list[tuple[str, Ceilings]]) -> list[str]:
    """The ceilings that were raised, but to a former value in a commit that reverts another; and those that are gone."""
    former: dict[str, list[int]] = {}
    found = []
    for subject, ceilings in versions:
        now = {f"{package}.{name}": value for package, values in ceilings.items() for name, value in values.items()}
        for name, value in now.items():
            *_, before = former.get(name, [value])
            if value > before and not (subject.startswith('Revert "') and value in former[name]):
                found.append(f"{name}: {before} -> {value} in {subject!r}")
            former.setdefault(name, []).append(value)
        found += [f"{name} is gone in {subject!r}" for name in former.keys() - now.keys()]
    return found


if __name__ == "__main__":
    if "--places" in sys.argv:
        for path, node in nodes(FILES, ast.AST):
            if separates(node):
                print(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node).splitlines()[0]}")  # type: ignore[attr-defined]
    ceilings = tomllib.loads(CEILINGS.read_text())
    for package, values in counted().items():
        for name, value in values.items():
            print(f"{package:7} {name.replace('_', ' '):28} {value:8,} of {ceilings[package][name]:8,}")
    for kind in ("benchmarks", "scripts"):
        paths = sorted((ROOT / kind).rglob("*.py"))
        print(f"{kind:36} {sum(map(lines_of_code, paths)):8,} lines in {len(paths)} files")
