"""The rules of the layout that a reader relies on."""

import ast
import re
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import house
import pytest
from house import FILES, SRC, tree

import lockstep
from lockstep import ROOT

LOCKSTEP = SRC / "lockstep"

# From the bottom up; a room imports from those before it. `run` reads and writes the folder of a run. `data` knows nothing of training. `checkpoints` comes before
# `strategies`, which save and load them. `reporting` comes before the callbacks, which print. `build` joins all of these, and `launch`
# runs the scripts that call `build`. `kit` uses public names alone; `extras` are not needed to train.
ORDER = (
    "errors", "machine", "compat", "run", "config", "data", "training", "checkpoints", "strategies", "reporting", "callbacks", "build_trainer",
    "build", "launch", "__init__", "kit", "extras", "__main__", "hydra_plugins",
)  # fmt: skip
EVERYWHERE = {
    "ROOT",
    "PACKAGE",
    "WHEEL",
    "TEMPLATE",
    "CONFIGS",
    "LATER",
    "__version__",
}  # constants of the package itself

HEAVY = {
    "torch",
    "lightning",
    "torchvision",
    "torchmetrics",
    "timm",
    "wandb",
    "matplotlib",
    "optuna",
    "pandas",
    "scipy",
}
BEFORE_THE_CHECK = [
    ROOT / "train.py",
    ROOT / "eval.py",
    ROOT / "predict.py",
    *SRC.glob("hydra_plugins/*.py"),
    LOCKSTEP / "launch/cli.py",
]

# Private names outside of compat/, each with its reason.
PRIVATE = {
    "_exit": "os._exit is documented: the end of a process without clean-up",
    "_current_frames": "sys._current_frames is documented: where each thread is",
    "_foreach_norm": "torch's documented optimizers take foreach=True for these; they have no other name",
    "_foreach_mul_": "the same",
    "_foreach_add_": "the same",
    "_foreach_lerp_": "the same",
    "_fields": "documented: the fields of a named tuple, by which it is told from other tuples",
    "_replace": "documented: a named tuple with other values of some fields",
    "_per_s": "how names of rates end",
    "_memory_gib": "how the name of a measured figure ends",
    "_repr_html_": "IPython's documented name of a method that says how a notebook shows an object",
}
HYDRA_KEYS = ("_target_", "_partial_", "_args_", "_recursive_", "_convert_", "_self_", "_labels")


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def walk(node: ast.AST, *, functions: bool = True, types: bool = False) -> Iterator[ast.AST]:
    """All nodes, with `types` also those under `if TYPE_CHECKING`; without `functions`, only what runs when the file is imported."""
    yield node
    if not functions and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return
    for child in ast.iter_child_nodes(node):
        if types or not is_type_checking(child):
            yield from walk(child, functions=functions, types=types)


def imports(path: Path, **which: bool) -> Iterator[str]:
    """Dotted names that a file imports: modules, and names from modules."""
    for node in walk(ast.parse(path.read_text()), **which):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(path: Path) -> str:
    top, *rest = path.relative_to(SRC).with_suffix("").parts
    return rest[0] if top == "lockstep" else top


def imported_room(name: str) -> str | None:
    package, _, rest = name.partition(".")
    if package != "lockstep" or rest in EVERYWHERE:
        return None
    first = rest.partition(".")[0]
    return first if first in ORDER else "__init__"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_imports_go_down(path):
    """Names of the kit in the core are counted in tests/ceilings.toml."""
    own = ORDER.index(room(path))
    rooms = {imported_room(name) for name in imports(path)} - {None, room(path), "kit"}
    assert not {name for name in rooms if ORDER.index(name) > own}


@pytest.mark.parametrize("path", house.KIT, ids=lambda path: str(path.relative_to(SRC)))
def test_the_kit_uses_what_a_project_may_use(path):
    own = [name for name in imports(path) if name.startswith("lockstep.") and not name.startswith("lockstep.kit.")]
    assert {name.removeprefix("lockstep.") for name in own} <= set(lockstep.__all__)


def test_every_public_name_is_there_and_documented():
    text = (ROOT / "docs/python.md").read_text()
    for name in lockstep.__all__:
        assert getattr(lockstep, name) is not None
        assert f"`{name}`" in text or f"`{name}(" in text, name


def test_no_imports_form_a_circle():
    """Those in functions and for annotations too, and those of public names, where these are."""
    homes, package = {f"lockstep.{name}": home for name, home in lockstep.LATER.items()}, LOCKSTEP / "__init__.py"
    files = {path: {file_of(homes.get(name, name)) for name in imports(path, types=True)} for path in FILES}
    sorted_files = TopologicalSorter(
        {path: found - {None, path, package} for path, found in files.items()}
    ).static_order()
    assert {*FILES} <= {*sorted_files}  # else CycleError


def file_of(name: str) -> Path | None:
    """The file of a module of ours; a name from a module has that module's."""
    path = SRC.joinpath(*name.split("."))
    for found in (path.with_suffix(".py"), path / "__init__.py", path.parent.with_suffix(".py")):
        if found.is_file():
            return found
    return None


def imported_before_the_check() -> Iterator[Path]:
    """The files that run before a config is known to be right: what a command imports, transitively."""
    left, seen = list(BEFORE_THE_CHECK), set()
    while left:
        path = left.pop()
        if path in seen:
            continue
        seen.add(path)
        yield path
        for name in imports(path, functions=False):
            packages = [".".join(name.split(".")[:i]) for i in range(1, name.count(".") + 2)]
            left += [file for package in packages if package.startswith("lockstep") and (file := file_of(package))]


def test_what_runs_before_the_config_is_checked_imports_nothing_heavy():
    files = sorted(set(imported_before_the_check()))
    assert {"launch", "checkpoints", "config"} <= {path.parent.name for path in files}
    for path in files:
        assert not {name.split(".")[0] for name in imports(path, functions=False)} & HEAVY, path


def is_private(name: object) -> bool:
    """One underscore in front, which no name of ours has."""
    return isinstance(name, str) and name.isidentifier() and name not in HYDRA_KEYS and bool(re.match("_[^_]", name))


def names(path: Path) -> Iterator[object]:
    """What a file imports, uses of an object, overrides, or spells as a string."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    parts_of_text = [part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values]
    for node in nodes:
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield from node.name.split(".")
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module or "").split(".")
        elif isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Constant) and node not in parts_of_text:
            yield node.value


def test_private_names_of_libraries_are_touched_in_compat_only():
    found = {(room(path), name) for path in FILES if room(path) != "compat" for name in names(path) if is_private(name)}
    assert {name for _, name in found} == set(PRIVATE), sorted(found)
    for path in (file for place in ("*.py", "scripts", "benchmarks") for file in ROOT.glob(place)):
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            assert not {name for name in names(file) if is_private(name)} - set(PRIVATE), file


def sections_of_compat() -> Iterator[str]:
    """Each starts with `# --- title ---`; a file without such lines is one."""
    for path in FILES:
        if room(path) == "compat" and path.stem != "__init__":
            yield from path.read_text().split("\n# --- ")[1:] or [path.read_text()]


@pytest.mark.parametrize("section", sections_of_compat(), ids=lambda section: section.splitlines()[0])
def test_each_touch_says_when_it_can_go_and_names_its_test(section):
    reason = section.replace("\n#", "")
    named = re.search(r"Remove (?:this|it)\b.*?\bwhen\b.*?(tests/compat/test_\w+\.py)(?:::(\w+))?", reason, re.DOTALL)
    assert named and f"def {named[2] or 'test_'}" in (ROOT / named[1]).read_text()


def test_the_network_and_the_task_know_no_device():
    words = {"cuda", "device", "rank", "world_size"}
    for path in [LOCKSTEP / "kit/timm.py", *LOCKSTEP.glob("kit/tasks/*.py")]:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        used |= {node.id for node in nodes if isinstance(node, ast.Name)}
        assert not used & words, path


# What Hydra calls itself, with its own types.
HYDRAS = {"one_job", "on_multirun_end", "setup", "StudySweeper.__init__"}
OF_CONFIG = {"cfg", "config", "node", "nodes"}  # names of parameters


def signatures(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Functions, methods with their class, and their annotations by parameter."""
    for owner in ast.walk(tree(path)):
        for node in (
            getattr(owner, "body", ()) if isinstance(owner, ast.Module | ast.ClassDef | ast.FunctionDef) else ()
        ):
            if isinstance(node, ast.FunctionDef):
                name = f"{owner.name}.{node.name}" if node.name == "__init__" else node.name  # type: ignore[attr-defined]
                every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                found = {arg.arg: ast.unparse(arg.annotation) for arg in every if arg.annotation}
                yield name, found | {"return": ast.unparse(node.returns or ast.Constant(None))}


@pytest.mark.parametrize("path", [p for p in FILES if room(p) != "config"], ids=lambda path: str(path.relative_to(SRC)))
def test_no_untyped_config_crosses_a_signature_outside_of_config(path):
    for function, annotations in signatures(path):
        for name, text in annotations.items():
            assert "DictConfig" not in text or function in HYDRAS, (function, name)
            assert name not in OF_CONFIG or not re.search(r"Mapping|dict|Any", text) or function in HYDRAS, (
                function,
                name,
            )


# What a system may lack, and how to ask which one it is.
OF_SYSTEMS = re.compile(
    r"\b(?:fcntl|resource|termios|pwd|grp|pty)\.\w|^(?:fcntl|resource|termios|pwd|grp|pty)$"
    r"|\bos\.(?:getuid|sysconf|sched_getaffinity|O_NONBLOCK|O_NOFOLLOW|fork|kill|killpg|setsid|getpgrp|name)\b"
    r"|\bsignal\.SIG(?!INT\b|TERM\b|_)|\bsys\.platform\b|\bplatform\.(?:system|machine)\b",
    re.MULTILINE,
)


def test_one_module_knows_the_systems():
    text = {path.name: "\n".join([ast.unparse(tree(path)), *imports(path)]) for path in FILES}
    assert {name for name in text if OF_SYSTEMS.search(text[name])} == {"system.py"}


@pytest.mark.parametrize("path", [*FILES, *ROOT.glob("scripts/*.py")], ids=lambda path: path.name)
def test_text_is_utf_8_on_every_system(path):
    """`Path.read_text()` uses the system's encoding."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            has_encoding = any(keyword.arg == "encoding" for keyword in node.keywords)
            is_paths = node.func.attr == "read_text" and not node.args
            is_paths |= node.func.attr == "write_text" and ast.unparse(node.func.value) != "files"
            assert has_encoding or not is_paths, ast.unparse(node)


def test_the_house_does_not_grow():
    ceilings = tomllib.loads(house.CEILINGS.read_text())
    counted = house.counted()
    assert {name: {*values} for name, values in counted.items()} == {
        name: {*values} for name, values in ceilings.items()
    }
    above = {
        f"{package}.{name}": (value, ceilings[package][name])
        for package, values in counted.items()
        for name, value in values.items()
        if value > ceilings[package][name]
    }
    assert above == {}


def test_ceilings_only_fall():
    if not (ROOT / ".git").exists() or house.git("rev-parse", "--is-shallow-repository").strip() == "true":
        pytest.skip("only a whole clone has the history of the ceilings")
    assert house.rises(house.history(house.CEILINGS)) == []


def test_a_raised_ceiling_is_found(tmp_path):
    """In a repository with these values, one commit each."""
    file = tmp_path / "ceilings.toml"
    house.git("init", "-q", folder=tmp_path)
    house.git("config", "user.email", "someone@example.org", folder=tmp_path)
    house.git("config", "user.name", "Someone", folder=tmp_path)

    def commit(subject: str, lines: int, more: str = "") -> None:
        file.write_text(f"[core]\nlines = {lines}\n{more}")
        house.git("add", ".", folder=tmp_path)
        house.git("commit", "-q", "-m", subject, folder=tmp_path)

    commit("first", 9)
    commit("less, and a package", 7, "[check]\nlines = 3\n")
    assert house.rises(house.history(file)) == []
    commit("more", 8)
    commit('Revert "less"', 9)
    commit("less again", 7)
    commit('Revert "less again"', 10)
    commit("less", 7)
    file.write_text("[core]\nlines = 8\n[check]\nlines = 4\n")
    assert [told for told in house.rises(house.history(file)) if "is gone" not in told] == [
        "core.lines: 7 -> 8 in 'more'",
        "core.lines: 7 -> 10 in 'Revert \"less again\"'",
        "core.lines: 7 -> 8 in 'what is not committed'",
        "check.lines: 3 -> 4 in 'what is not committed'",
    ]
    assert "check.lines is gone in 'more'" in house.rises(house.history(file))
