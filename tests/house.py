"""The size of the house, counted: what tests/test_layers.py holds below its ceilings.

python tests/house.py     # prints the table
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
FILES = sorted(SRC.rglob("*.py"))
EXTRAS = [path for path in FILES if path.is_relative_to(SRC / "lockstep/extras")]
ENGINE = [path for path in FILES if path not in EXTRAS]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Questions of the kind "is it ours or the user's", which an object should answer.
SWITCHES = re.compile(
    r"\bis_shipped\(|\bis_a\(|\bsettings\.(?:own_loaders|custom_module)\b|\bisinstance\([^()]*\b(?:Task|DataModule)\b"
)
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


def has_one_statement(node: ast.AST) -> bool:
    """Without methods that subclasses fill in."""
    assert isinstance(node, FUNCTIONS)
    own = node.body[ast.get_docstring(node) is not None :]
    return len(own) == 1 and "NotImplementedError" not in ast.unparse(own[0])


def branches_on(word: str) -> int:
    tests = nodes(FILES, ast.If, ast.IfExp, ast.While)
    return sum(word in ast.unparse(node.test) for _, node in tests)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class House:
    engine_lines: int
    engine_modules: int
    extras_lines: int
    extras_modules: int
    one_statement_functions: int
    functions_with_cfg: int
    files_with_cfg: int
    switches: int  # uses of SWITCHES
    branches_on_logical_ranks: int


def counted() -> House:
    functions = list(nodes(FILES, *FUNCTIONS))
    with_cfg = [path for path, node in functions if "cfg" in arguments(node)]
    uses = [found for path in FILES for found in SWITCHES.findall(path.read_text())]
    return House(
        engine_lines=sum(map(lines_of_code, ENGINE)),
        engine_modules=len(ENGINE),
        extras_lines=sum(map(lines_of_code, EXTRAS)),
        extras_modules=len(EXTRAS),
        one_statement_functions=sum(has_one_statement(node) for _, node in functions),
        functions_with_cfg=len(with_cfg),
        files_with_cfg=len(set(with_cfg)),
        switches=len(uses),
        branches_on_logical_ranks=branches_on("logical_ranks"),
    )


if __name__ == "__main__":
    for name, value in vars(counted()).items():
        print(f"{name.replace('_', ' '):28} {value:7,}")
    for kind, files in (("tests", "tests"), ("benchmarks", "benchmarks"), ("scripts", "scripts")):
        paths = sorted((ROOT / files).rglob("*.py"))
        print(f"{kind:28} {sum(map(lines_of_code, paths)):7,} lines in {len(paths)} files")
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    print(f"{'README and docs':28} {sum(len(page.read_text().split()) for page in pages):7,} words")
