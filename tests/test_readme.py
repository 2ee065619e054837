"""What the documentation says can be typed, followed and found: its commands, links and names of files and tests."""

import argparse
import re
import runpy
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pages import HEADERS, MARKDOWN, Command, Text
from your_own import forget

from lockstep import ROOT
from lockstep.config.checks import check
from lockstep.config.compose import CONFIG_ERRORS, compose_config, explain, variants
from lockstep.launch.cli import refused_options
from lockstep.machine import world

PAGES = [Text(path) for path in [*MARKDOWN, *HEADERS]]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@cache
def config_problems(config: str, args: tuple[str, ...], overrides: tuple[str, ...], project: Path) -> list[str]:
    """What the command would say before it imports torch; of a multirun, for the first and the last value of each key."""
    found = list(refused_options(list(args)))
    there = "hydra/launcher=slurm" in overrides  # several nodes need a launcher, which the job will have
    given = [variants(override) for override in overrides if not (there and override.startswith("trainer.num_nodes="))]
    for chosen in {tuple(each[0] for each in given), tuple(each[-1] for each in given)}:
        try:
            cfg = compose_config(config, chosen)
        except CONFIG_ERRORS as e:
            found += explain(e, config, chosen)
        else:
            found += check(cfg) if config == "train" else []
    # the reader's files and packages
    return [each for each in found if " does not exist" not in each and " is not installed" not in each]


class Parsed(BaseException):
    """A script has read its arguments."""


def script_problems(command: Command, monkeypatch) -> list[str]:
    """Runs a script up to where it has parsed its arguments; those that are keys of train.py are checked too."""
    parsed = list[argparse.Namespace]()

    def stop(original):
        def parse(*args, **kwargs):
            parsed.append(original(*args, **kwargs))
            raise Parsed

        return parse

    with monkeypatch.context() as patch:
        for name in ("parse_args", "parse_intermixed_args"):
            patch.setattr(argparse.ArgumentParser, name, stop(getattr(argparse.ArgumentParser, name)))
        patch.setattr(sys, "argv", [str(command.script), *command.args])
        with suppress(Parsed, SystemExit):
            runpy.run_path(str(command.script), run_name="__main__")
    if not parsed:
        return ["its arguments are refused"]
    overrides = tuple(getattr(parsed[0], "overrides", ()))
    return config_problems("train", (), overrides, Path.cwd()) if overrides else []


def problems(command: Command, monkeypatch) -> list[str]:
    missing = [f"{name} does not exist" for name in command.files if not (ROOT / name).exists()]
    if missing or command.script is None or "--help" in command.args:
        return missing
    if not command.script.is_file():
        return ["no such command"]
    if command.config:
        return config_problems(command.config, command.args, command.overrides, Path.cwd())
    return script_problems(command, monkeypatch) if "ArgumentParser" in command.script.read_text() else []


FIRST = ("README.md", "CONTRIBUTING.md")  # what strangers run; a command takes 0.2 s to compose and check


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=() if page.name in FIRST else pytest.mark.slow)
        for page in PAGES
        if page.commands
    ],
)
def test_every_command_can_be_typed(page, monkeypatch, tmp_path):
    """In a project with the files that the page says to write."""
    monkeypatch.setattr(world, "gpu_count", lambda: 4)
    if page.files:
        monkeypatch.chdir(page.write(tmp_path))
    forget()
    found = {command.text: problems(command, monkeypatch) for command in page.commands}
    forget()
    assert {text: each for text, each in found.items() if each} == {}


def test_commands_are_found():
    assert len([each for each in Text(ROOT / "docs/commands.md").commands if each.config]) > 25


def test_the_readme_shows_how_to_train_predict_export_and_begin_a_project():
    typed = {each.script.relative_to(ROOT).as_posix() for each in Text(ROOT / "README.md").commands if each.script}
    assert typed >= {"train.py", "predict.py", "scripts/export.py", "scripts/new_project.py"}


anchors = cache(lambda path: Text(path).anchors)


@every_page
def test_every_link_leads_somewhere(page):
    missing = []
    for link, anchor in page.links:
        target = (page.path.parent / link).resolve() if link else page.path
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            missing.append(f"{link}#{anchor}")
    assert missing == []


@every_page
def test_every_file_and_test_that_is_named_exists(page):
    if page.name == "NOTEBOOK.md":
        pytest.skip("it is a history: what it names may be gone")
    for name, test in re.findall(r"`((?:tests|src/lockstep|scripts|benchmarks)/[\w/.-]+)(?:::(\w+))?`", page.prose):
        assert (ROOT / name).exists(), name
        assert not test or f"def {test}(" in (ROOT / name).read_text(), f"{name}::{test}"


def test_every_file_that_the_map_names_exists():
    tree = (ROOT / "README.md").read_text().split("    train.py  ")[1].split("\n\n")[0]
    names = set(re.findall(r"([\w/]+\.py)", tree))
    assert names - {path.name for path in [*ROOT.glob("*.py"), *ROOT.glob("src/**/*.py")]} == set()


def test_the_index_leads_to_every_page():
    index = Text(ROOT / "docs/README.md")
    linked = {(index.path.parent / link).resolve() for link, _ in index.links}
    listed = {page.path for page in PAGES if page.name.startswith("docs/") and page.path != index.path}
    own = {path for path in listed if path.parent.name == "your-own"}  # which has an index of its own
    assert (listed - own) - linked == set()


def test_the_custom_loss_is_a_focal_loss():
    torch, written = pytest.importorskip("torch"), dict[str, Any]()
    exec(Text(ROOT / "docs/your-own/loss.md").files["src/mywork/task.py"], written)
    focal = written["Focal"](gamma=1.5)
    focal.bind({"classes": ["daisy", "rose", "tulip"]})
    output_BK, target_B = torch.randn(5, 3), torch.tensor([0, 2, 1, 1, 0])
    right_B = output_BK.softmax(1)[torch.arange(5), target_B]
    expected_B = -((1 - right_B) ** 1.5) * right_B.log()
    assert torch.allclose(focal.loss(output_BK, {"target": target_B}), expected_B)


def numbers(text: str) -> set[float]:
    return {float(each.replace(",", "")) for each in re.findall(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", text)}


def test_every_figure_of_the_readme_stands_on_the_page_that_it_links_to():
    table = (ROOT / "README.md").read_text().split("## Why trust it")[1].split("\n## ")[0]
    rows = [line.split("|")[2:4] for line in table.splitlines() if "](docs/" in line and line.startswith("|")]
    assert len(rows) >= 4
    for result, page in rows:
        (path,) = re.findall(r"\]\((.*?)\)", page)
        assert numbers(result) - numbers((ROOT / path.partition("#")[0]).read_text()) == set(), result
