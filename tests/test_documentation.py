"""What the documentation says can be typed, followed and found: its commands, examples, links, and names of files and tests."""

import argparse
import inspect
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import building
import conftest
import pytest
from pages import HEADERS, MARKDOWN, Command, Text
from PIL import Image
from your_own import forget

import lockstep
from lockstep import ROOT
from lockstep.config.checks import check, explain
from lockstep.config.compose import CONFIG_ERRORS, compose_config, expand_sweep, without_replaced_defaults
from lockstep.config.draft import Draft
from lockstep.errors import UserError
from lockstep.launch.cli import option_errors
from lockstep.machine import world

PAGES = [Text(path) for path in [*MARKDOWN, *HEADERS]]


@cache
def config_problems(config: str, args: tuple[str, ...], overrides: tuple[str, ...], project: Path) -> list[str]:
    """What the command would say before it imports torch; of a multirun, for the first and the last value of each key."""
    found = list(option_errors(list(args)))
    there = "hydra/launcher=slurm" in overrides  # several nodes need a launcher, which the job will have
    given = [
        expand_sweep(override) for override in overrides if not (there and override.startswith("trainer.num_nodes="))
    ]
    for chosen in {tuple(each[0] for each in given), tuple(each[-1] for each in given)}:
        try:
            draft = Draft(compose_config(config, chosen))
            if config == "train":
                check(without_replaced_defaults(draft, chosen))
        except CONFIG_ERRORS as e:
            found += explain(e, config, chosen)
        except UserError as e:
            found += e.problems
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
        for name in (
            "stdout",
            "stderr",
        ):  # a script may replace them, and pytest's would be closed with what replaces them
            patch.setattr(sys, name, io.StringIO())
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
    "page", [pytest.param(p, id=p.name, marks=[pytest.mark.slow] * (p.name not in FIRST)) for p in PAGES if p.commands]
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
    """And the README shows how to train, predict, export and begin a project."""
    assert len([each for each in Text(ROOT / "docs/commands.md").commands if each.config]) > 25
    typed = {each.script.name for each in Text(ROOT / "README.md").commands if each.script}
    assert typed >= {"train.py", "predict.py", "export.py", "new.py"}


def test_every_link_leads_somewhere():
    anchors = {page.path: page.anchors for page in PAGES if page.path.suffix == ".md"}
    for page in PAGES:
        for link, anchor in page.links:
            target = (page.path.parent / link).resolve() if link else page.path
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors.get(target, (anchor,)), f"{page.name}: {link}#{anchor}"


def test_every_file_and_test_that_is_named_exists():
    for page in [page for page in PAGES if page.name != "NOTEBOOK.md"]:  # what it names may be gone
        for name, test in re.findall(r"`((?:tests|src/lockstep|scripts|benchmarks)/[\w/.-]+)(?:::(\w+))?`", page.prose):
            assert (ROOT / name).exists(), f"{page.name}: {name}"
            assert not test or f"def {test}(" in (ROOT / name).read_text(), f"{page.name}: {name}::{test}"
    tree = (ROOT / "README.md").read_text().split("    train.py  ")[1].split("\n\n")[0]  # its map
    names = set(re.findall(r"([\w/]+\.py)", tree))
    assert names - {path.name for path in [*ROOT.glob("*.py"), *ROOT.glob("src/**/*.py")]} == set()


def test_the_index_leads_to_every_page():
    index = Text(ROOT / "docs/README.md")
    linked = {(index.path.parent / link).resolve() for link, _ in index.links}
    pages = {page.path for page in PAGES if page.name.startswith("docs/") and page.path.parent.name != "your-own"}
    assert pages - linked == {index.path}  # docs/your-own has an index of its own


def test_every_page_says_where_its_commands_run():
    pages = [page for page in PAGES if page.name.startswith("docs/") and any(each.script for each in page.commands)]
    places = ("Run commands in ", "Create a project with ", "lockstep new ../mywork")
    silent = [page.name for page in pages if not any(place in page.text[:900] for place in places)]
    assert silent == ["docs/changes.md"]  # old commands beside new ones
    assert len(pages) > 20


@pytest.mark.parametrize("broken", [False, True])
def test_the_site_is_built_and_a_link_that_leads_nowhere_is_an_error(broken, tmp_path):
    for name in ("mkdocs.yml", "docs", "deploy", "train.py", "notebooks", "configs", "CONTRIBUTING.md", ".ci"):
        (tmp_path / name).symlink_to(ROOT / name)
    if broken:
        (tmp_path / "docs").unlink()
        shutil.copytree(ROOT / "docs", tmp_path / "docs")
        with (tmp_path / "docs/faq.md").open("a") as page:
            page.write("[one](commands.md#no-such-section) [two](../docs/no-such-page.md)\n")
    env = {**os.environ, "REPOSITORY": "https://example.org/lockstep", "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    found = [name in done.stderr for name in ("no-such-section", "no-such-page")]
    assert (done.returncode, found) == ((1, [True, True]) if broken else (0, [False, False])), done.stderr
    if not broken:
        page = (tmp_path / "site/changes/index.html").read_text()
        assert 'href="https://example.org/lockstep/blob/main/train.py"' in page


def test_the_changes_begin_with_this_version():
    heading = Text(ROOT / "docs/changes.md").text.split("\n## ")[1].splitlines()[0]
    assert heading.endswith(f" → {lockstep.__version__.rpartition('.')[0]}")


def test_the_custom_loss_is_a_focal_loss():
    torch, written = pytest.importorskip("torch"), dict[str, Any]()
    exec(Text(ROOT / "docs/your-own/loss.md").files["src/mywork/task.py"], written)
    focal = building.task(written["Focal"], keys={"gamma": 1.5}, classes=["daisy", "rose", "tulip"])
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


# --- English ---

# Earlier wording that readers stumbled over, by the wording that replaced it.
REPLACED = {
    "rerunning completes exactly the missing trials": ["with the trials that it was to have"],
    "a bundled subset is used": ["neither found nor fetched", "that come with a dependency", "images stand in"],
    "applies only until the run's first checkpoint": ["it is of effect", "of effect until"],
    "started in the same second": ["two jobs of one second", "jobs of one second"],
    "elastic jobs": ["machines come and go"],
    "measures the stall": ["what training waits"],
    "declares a peer lost": ["process that is cut off", "cut off says nothing"],
    "out-of-memory errors": ["— when it runs out"],
    "rerun the same command": ["types it again", "type it again", "typed again", "typing it again"],
    "the result of an uninterrupted run": ["undisturbed", "to the bits that"],
    "reached the correct result": ["ended in the right result", "1 badly (fixed"],
    "rejected, with the offending key and the valid options": ["were refused before a run", "with the key and what is possible"],
    "regardless of which process computes them": ["whoever computes", "answers whoever"],
    "changes the result by rounding error only": ["equal to rounding", "as different as another seed"],
    "has already trained": ["what has trained is right"],
    "a clearer message": ["has better words"],
    "the dataset changed": ["no longer what it was"],
    "an abandoned continuation": ["past that was given up"],
    "exactly as in training": ["the training data need not", "training data need not be there"],
    "how much work a crash would lose": ["what a crash would cost"],
    "differs": ["has other bits", "has other figures"],
    "if needed": ["if need be"],
}  # fmt: skip


def as_one_line(text: str) -> str:
    """Without the breaks of lines, of comments and of strings that follow each other."""
    joined = re.sub(r"""["']?[ \t]*\n\s*(?:# ?|f?["'])?""", " ", text)
    return re.sub(r"\s+", " ", joined).lower()


def test_earlier_wording_does_not_return():
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    code = [path for folder in ("src", "configs", "scripts") for path in ROOT.glob(f"{folder}/**/*") if path.is_file()]
    files = [*pages, *(path for path in code if path.suffix in (".py", ".yaml", ".j2", ".js", ".sbatch", ".sh"))]
    assert len(files) > 100
    texts = {path.relative_to(ROOT).as_posix(): as_one_line(path.read_text()) for path in files}
    phrases = [(phrase, better) for better, earlier in REPLACED.items() for phrase in earlier]
    found = [
        f"{n}: {phrase!r}: write {better!r}"
        for n, text in texts.items()
        for phrase, better in phrases
        if phrase in text
    ]
    assert found == []


def test_percentages_have_no_space():
    for page in PAGES:
        assert not re.findall(r"\d %.*", page.prose), page.name


# --- docs/commands.md and the README run, from top to bottom, in one folder: each with small data and two steps ---

# Another launcher, a network from the Hub, a minute of compiling, or what makes no run: other tests have them.
ELSEWHERE = ("torchrun", "sbatch", "pretrained=true", "compile=true", "lockstep new", "--help", "data.root=")
SMALLER = {
    "data=cifar10": "data=mnist", "data.image_size=224": "data.image_size=32", "model.name=convnext_tiny": "model.name=test_resnet",
    "loader.batch_size=4096": "loader.batch_size=64", "hydra.sweeper.n_trials=30": "hydra.sweeper.n_trials=2",
    "schedule.warmup_steps=100": "schedule.warmup_steps=1", "trainer.devices=4": "trainer.devices=2",
    "trainer.max_epochs=10": "trainer.max_epochs=2", "trainer.max_epochs=20": "trainer.max_epochs=3",
}  # fmt: skip
SHORT = ["trainer.accelerator=cpu", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1"]
DIFFERENT = 1  # the exit code of compare_runs.py


def typed(command: Command, data: list[str]) -> list[str]:
    """Its arguments, made small."""
    assert command.script
    args = [SMALLER.get(arg, arg) for arg in command.args]
    name = command.script.name
    if name == "train.py":
        going_on = any(arg.startswith("resume=") and arg != "resume=auto" for arg in args)
        args += SHORT if going_on else [*data, *SHORT, *["trainer.max_epochs=1"] * ("trainer.max_epochs=2" not in args)]
    elif name in ("eval.py", "predict.py"):
        args += ["trainer.accelerator=cpu"]
    elif name == "show_batch.py":
        args += [*data, "trainer.accelerator=cpu"]
    return args


@pytest.mark.full
def test_the_commands_run_one_after_the_other(forked_command, tmp_path, mnist, cache):
    folder, data = forked_command.folder, [f"data.root={mnist}", f"data.cache_dir={cache}", "loader.limit_train=128"]
    (folder / "x").mkdir()  # <folder of images>
    for i in range(3):
        Image.new("L", (28, 28), 80 * i).save(folder / f"x/{i}.png")

    def run(script: Path, *args: str) -> tuple[int, str]:
        given = [sys.executable, str(script), *args]
        with (tmp_path / "out.txt").open("w") as out:
            code = forked_command.popen(given, cwd=folder, stdout=out, stderr=out, start_new_session=True).wait(600)
        return code, (tmp_path / "out.txt").read_text()

    assert run(ROOT / "train.py", "run=second", *data, *SHORT)[0] == 0  # which the page compares with the first
    typed_there = [*Text(ROOT / "docs/commands.md").commands, *Text(ROOT / "README.md").commands]
    found = [each for each in typed_there if each.script and each.args]
    commands = {(each.script, *each.args): each for each in found}  # with `python` on one page, `uv run` on the other
    wanted = [each for each in commands.values() if not any(word in each.text for word in ELSEWHERE)]
    assert len(wanted) > 25
    failed = {}
    for command in wanted:
        shutil.rmtree(folder / "exports", ignore_errors=True)  # both pages export
        code, out = run(command.script, *typed(command, data))
        if code not in ({0, DIFFERENT} if command.script.name == "compare_runs.py" else {0}):
            failed[command.text] = f"exit code {code}\n{out[-3000:]}"
    assert not failed, "\n".join(f"{text}: {why}" for text, why in failed.items())


# --- docs/python.md ---

PYTHON = (ROOT / "docs/python.md").read_text()


def test_every_function_has_its_signature_and_an_example():
    functions = {n for n, v in vars(lockstep).items() if inspect.isfunction(v) and v.__module__ == "lockstep"}
    public = functions - {"__getattr__"}
    assert set(re.findall(r"^## (\w+)\n\n`", PYTHON, re.MULTILINE)) == public
    for name in public:
        written = re.search(rf"^`{name}\((.*?)\) -> ", PYTHON, re.MULTILINE)[1]
        given = [str(p).replace("pathlib.", "") for p in inspect.signature(getattr(lockstep, name)).parameters.values()]
        assert [re.sub(r"[\w.]*\bPath\b", "Path", p) for p in given] == [written]
        assert "```python" in PYTHON.split(f"\n## {name}\n")[1].split("\n## ")[0]


@pytest.mark.slow
def test_the_examples_run(tmp_path, monkeypatch, cache, forked):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    conftest.write_mnist(tmp_path / "data", 640, 103)
    known: dict[str, object] = {}
    for example in re.findall(r"```python\n(.*?)```", PYTHON, re.DOTALL):
        exec(example, known)
    assert known["report"]["status"] == "done"
    assert known["metrics"]["world_size"] == 2
    assert len(known["jobs"]) == 2
    assert known["accuracy"][-1] == known["report"]["val/acc"]
