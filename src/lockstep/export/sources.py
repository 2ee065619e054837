"""The source files that a network needs: its own, and those of its package that it imports, directly or through others."""

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from lockstep.errors import UserError

ALLOWED = {"torch", "torchvision", "timm", "numpy", "safetensors"}  # importable besides Python's own


def source_of(module: str) -> Path | None:
    """The file of a module; None if there is no such module or it is not Python's."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, AttributeError, ValueError):
        return None
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


def needed(module: str) -> dict[str, Path]:
    """The modules of its package that a module needs, itself first, with their files.

    Raises:
        UserError: one of them imports a package that the folder may not need.
    """
    package, found, foreign = module.partition(".")[0], dict[str, Path](), dict[str, set[str]]()
    left = [module]
    while left:
        name = left.pop(0)
        if name in found:
            continue
        path = source_of(name)
        assert path is not None, name
        found[name] = path
        names = imported(path, name)
        own = {each for each in names if each.partition(".")[0] == package}
        if others := {each.partition(".")[0] for each in names - own} - ALLOWED - sys.stdlib_module_names:
            foreign[path.name] = others
        left += sorted(each for each in own if source_of(each))
    if package == "lockstep" and len(found) > 1:
        foreign[found[module].name] = {"lockstep"}
    if foreign:
        which = "; ".join(f"{file} imports {', '.join(sorted(names))}" for file, names in foreign.items())
        raise UserError(
            f"{which}: the files of an exported network may import only torch, torchvision, timm, numpy and each other. "
            "Put other code that they need into your package."
        )
    return found


def imported(path: Path, module: str) -> set[str]:
    """The modules that a file imports, in full; without those for type checkers."""
    inside = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), inside)
            inner = {f"{base}.{alias.name}" for alias in node.names}
            modules = {name for name in inner if name.partition(".")[0] == module.partition(".")[0] and source_of(name)}
            found |= modules | ({base} if len(modules) < len(inner) else set())
    return found


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes except those under `if TYPE_CHECKING`."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield from walk(child)


def copy(modules: dict[str, Path], folder: Path) -> None:
    """Writes the modules into `folder` as packages; an __init__.py that no other needs is empty."""
    for name, path in modules.items():
        *above, last = name.split(".")
        for depth in range(1, len(above) + 1):
            init = folder.joinpath(*above[:depth], "__init__.py")
            init.parent.mkdir(parents=True, exist_ok=True)
            init.touch()
        place = folder.joinpath(*above, last)
        target = place / "__init__.py" if path.name == "__init__.py" else place.with_suffix(".py")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
