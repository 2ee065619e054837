"""Each command of the documentation is one that the config check lets through."""

import re
import shlex

import pytest

from lockstep import CONFIGS, ROOT
from lockstep.config.checks import check
from lockstep.config.compose import compose_config, tried_alone
from lockstep.machine import world

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "docs/exact.md",
    "docs/scaling.md",
    "NOTEBOOK.md",
    *(f"configs/experiment/{path.name}" for path in (CONFIGS / "experiment").glob("*.yaml")),
]
COMMAND = re.compile(r"(?:python|uv run) (train|eval)\.py((?: [^#`\n│]*)?)")


def inside(text: str) -> str:
    """`text` up to a bracket that was opened before it."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth < 0:
            return text[:i]
    return text


def commands() -> list[tuple[str, list[str]]]:
    found = []
    for page in PAGES:
        for script, rest in COMMAND.findall((ROOT / page).read_text()):
            args = shlex.split(re.sub(r"<[^>]*>", "x", inside(rest)).replace("…", "x"))
            found.append((script, args))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "args"), commands(), ids=lambda value: " ".join(value) if isinstance(value, list) else value
)
def test_commands_of_the_documentation_are_possible(script, args, monkeypatch):
    monkeypatch.setattr(world, "gpu_count", lambda: 4)
    overrides = [arg for arg in args if "=" in arg and "--config-dir" not in args]
    problems, good = tried_alone(script, overrides)
    assert problems == []
    if script == "train" and "-m" not in args:
        assert check(compose_config(script, good)) == []


def test_there_are_commands():
    assert len(commands()) > 15


PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_to_a_file_leads_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    missing = [link for link in links if not link.startswith("http") and not (page.parent / link).exists()]
    assert missing == []


def test_every_file_that_the_map_names_exists():
    page = (ROOT / "README.md").read_text()
    for name in set(re.findall(r"`(tests/[\w/.]+)`", page)) | set(re.findall(r"`(src/[\w/.]+)`", page)):
        assert (ROOT / name).exists(), name
    tree = page.split("    train.py  ")[1].split("\n\n")[0]
    for name in re.findall(r"([\w/]+\.py)", tree):
        assert list(ROOT.glob(f"**/{name}")), name
