"""The size of the house, counted: what tests/test_layers.py holds below its ceilings.

python tests/house.py     # prints the table; with --places, also where the two worlds are separated
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
OWNED = sorted([*SRC.glob("project/*.py"), *ROOT.glob("*.py"), *ROOT.glob("configs/**/*.yaml")])  # what a fork edits
FILES = sorted(path for path in SRC.rglob("*.py") if path not in OWNED)
EXTRAS = [path for path in FILES if path.is_relative_to(SRC / "lockstep/extras")]
ENGINE = [path for path in FILES if path not in EXTRAS]
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
SHIPPED = re.compile(
    r"\.is_shipped\b|\bhas_nearest_base\("
)  # whether a class is imported before it is known to be needed
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
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    code = (token for token in tokens if token.type not in IGNORED)
    return len({line for token in code for line in range(token.start[0], token.end[0] + 1)} - left_out)


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


@dataclass(frozen=True)
class House:
    owned_lines: int  # of OWNED, with comments and blank lines: all that a forker reads
    engine_lines: int
    engine_modules: int
    extras_lines: int
    extras_modules: int
    functions_with_cfg: int
    files_with_cfg: int
    places_between_two_worlds: int
    questions_before_import: int  # uses of SHIPPED
    branches_on_logical_ranks: int


def counted() -> House:
    with_cfg = [path for path, node in nodes(FILES, *FUNCTIONS) if "cfg" in arguments(node)]
    asked = [found for path in FILES for found in SHIPPED.findall(path.read_text())]
    return House(
        owned_lines=sum(len(path.read_text().splitlines()) for path in OWNED),
        engine_lines=sum(map(lines_of_code, ENGINE)),
        engine_modules=len(ENGINE),
        extras_lines=sum(map(lines_of_code, EXTRAS)),
        extras_modules=len(EXTRAS),
        functions_with_cfg=len(with_cfg),
        files_with_cfg=len(set(with_cfg)),
        places_between_two_worlds=sum(separates(node) for _, node in nodes(FILES, ast.AST)),
        questions_before_import=len(asked),
        branches_on_logical_ranks=branches_on("logical_ranks"),
    )


if __name__ == "__main__":
    if "--places" in sys.argv:
        for path, node in nodes(FILES, ast.AST):
            if separates(node):
                print(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node).splitlines()[0]}")  # type: ignore[attr-defined]
    for name, value in vars(counted()).items():
        print(f"{name.replace('_', ' '):28} {value:7,}")
    for kind, files in (("tests", "tests"), ("benchmarks", "benchmarks"), ("scripts", "scripts")):
        paths = sorted((ROOT / files).rglob("*.py"))
        print(f"{kind:28} {sum(map(lines_of_code, paths)):7,} lines in {len(paths)} files")
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    print(f"{'README and docs':28} {sum(len(page.read_text().split()) for page in pages):7,} words")
