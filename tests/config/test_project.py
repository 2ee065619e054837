"""A project that depends on Lockstep: its configs come first, its packages may be named, its script is what runs."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import thin_project
from hydra.core.global_hydra import GlobalHydra

import lockstep
from lockstep import CONFIGS, ROOT
from lockstep.config import checks, compose, project
from lockstep.config.draft import Draft
from lockstep.config.run_config import Component
from lockstep.errors import UserError
from lockstep.launch import local


@pytest.fixture
def bouquet(tmp_path, monkeypatch) -> Path:
    root = thin_project.write(tmp_path / "bouquet")
    monkeypatch.chdir(root)
    return root


# --- which project -------------------------------------------------------------------------------------------------


def test_the_nearest_table_above_a_folder_is_the_project_with_the_packages_in_src_and_those_that_are_listed(bouquet):
    (bouquet / "src/bouquet/data").mkdir()
    (bouquet / "src/bouquet/pyproject.toml").write_text("[tool.ruff]\n# lockstep has no table here\n")
    assert project.find(bouquet / "src/bouquet/data") == project.Project(bouquet)
    assert project.find(bouquet.parent) == project.Project()
    assert project.find(ROOT / "tests") == project.Project(ROOT)
    for name in ("petals", "bouquet.egg-info", "__pycache__"):
        (bouquet / "src" / name).mkdir()
    for name in ("rose.py", "__init__.py", "README", "py.typed"):
        (bouquet / "src" / name).touch()
    (bouquet / "pyproject.toml").write_text("[tool.lockstep]\npackages = ['monai', 'sklearn.linear_model']\n")
    assert project.current().packages == ("bouquet", "petals", "rose", "monai", "sklearn.linear_model", "project")


def test_the_template_where_there_is_no_project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert project.current() == project.Project()
    assert (project.current().packages, project.config_folders()) == (("project",), [ROOT / "configs", CONFIGS])
    assert (local.script("train"), local.script("runs")) == (ROOT / "train.py", ROOT / "scripts/runs.py")
    assert checks.resolve([]).model.title == "basic_net"


def test_a_mistake_in_the_table_is_said(tmp_path):
    for text, said in (
        ("[tool.lockstep]\npackage = []", "the only key of tool.lockstep is packages"),
        ("[tool.lockstep]\npackages = 'monai'", "packages, a list of package names"),
        ("[tool.lockstep]\npackages = ['src/monai']", "packages, a list of package names"),
        ("[tool.lockstep\n", "pyproject.toml: "),
    ):
        (tmp_path / "pyproject.toml").write_text(text)
        with pytest.raises(UserError, match=said):
            project.find(tmp_path)


SAYS = "from lockstep.config import project\nproject.enter(__import__('pathlib').Path(__file__).parent)\n"
UV = """#!/bin/sh
shift
export UV=$0 VIRTUAL_ENV={prefix}
if [ "$1" = lockstep ]; then exec "$VIRTUAL_ENV/bin/$@"; fi
exec {python} "$@"
"""


@pytest.fixture
def programs(bouquet, monkeypatch) -> Path:
    """A folder on PATH with `python`, `lockstep`, and `uv`, a stand-in that sets what uv sets."""
    venv.create(bouquet.parent, symlinks=True)
    folder = bouquet.parent / "bin"
    (folder / "uv").write_text(UV.format(prefix=bouquet.parent, python=folder / "python"))
    (folder / "lockstep").write_text(f"#!{folder}/python\nfrom lockstep.__main__ import main\nmain()\n")
    for name in ("uv", "lockstep"):
        (folder / name).chmod(0o755)
    for name in ("UV", "VIRTUAL_ENV", project.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), sysconfig.get_path("purelib")]))
    return folder


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("../bin/python train.py", "python eval.py run=a"),
        ("uv run train.py", "uv run eval.py run=a"),
        ("lockstep train", "python eval.py run=a"),
        ("cd src && python ../train.py", "python ../eval.py run=a"),
    ],
)
def test_a_printed_command_runs_as_printed_in_the_way_that_was_typed(typed, expected, bouquet, programs):
    """A second process prints what the typed one would."""
    second = "import subprocess, sys\ntold = {**os.environ, **project.environment()}\n"
    second += "subprocess.run([sys.executable, '-c', 'from lockstep.config import project; print(project.command(\"eval\"))'], env=told)\n"
    (bouquet / "train.py").write_text(f"import os\n{SAYS}{second}")
    (bouquet / "eval.py").write_text("import sys\nprint('evaluated', *sys.argv[1:])\n")
    first = subprocess.run(typed, shell=True, capture_output=True, text=True)
    assert first.stdout == expected.removesuffix(" run=a") + "\n", first.stderr
    place = bouquet / "src" if "../eval.py" in expected else bouquet
    again = subprocess.run(expected, shell=True, capture_output=True, text=True, cwd=place)
    assert again.stdout == "evaluated run=a\n", again.stderr


def test_the_environment_names_the_project_of_a_process(bouquet, tmp_path, monkeypatch):
    told = project.environment()
    monkeypatch.chdir(tmp_path)
    assert project.current() == project.Project()
    monkeypatch.setenv(*next(iter(told.items())))
    assert project.current() == project.Project(bouquet)
    monkeypatch.setenv(project.VARIABLE, "")
    monkeypatch.chdir(bouquet)
    assert project.current() == project.Project()
    monkeypatch.setenv(project.VARIABLE, str(tmp_path))
    with pytest.raises(UserError, match=r"no table \[tool.lockstep\]"):
        project.current()


# --- its configs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        ("train", [], ("tulip", 7, 5e-3)),
        ("eval", [], ("tulip", 7, 5e-3)),
        ("train", ["model=resnet50d", "seed=1"], ("resnet50d", 1, 5e-3)),
        ("train", ["experiment=garden", "model=tulip", "optim.lr=1"], ("tulip", 8, 1)),
        ("train", ["experiment=mnist_basic_net"], ("basic_net", 7, 5e-3)),
    ],
)
def test_typed_wins_over_a_recipe_and_a_recipe_over_the_project(bouquet, name, overrides, expected):
    cfg = compose.compose_config(name, overrides)
    assert (Component.of(cfg.model).title, cfg.seed, cfg.optim.lr) == expected
    assert cfg.runs_dir == "runs"  # of Lockstep's defaults


def test_a_project_may_replace_any_config(bouquet):
    (bouquet / "configs/optim").mkdir()
    (bouquet / "configs/optim/sgd.yaml").write_text("_target_: torch.optim.SGD\nlr: 1\nmomentum: 0.5\n")
    (bouquet / "configs/train.yaml").write_text("defaults: [project]\n")
    assert compose.compose_config("train", ["optim=sgd"]).optim == {
        "_target_": "torch.optim.SGD",
        "lr": 5e-3,
        "momentum": 0.5,
    }
    with pytest.raises(compose.CONFIG_ERRORS):
        compose.compose_config("train", ["experiment=garden"])


@pytest.mark.parametrize(
    ("overrides", "left"),
    [
        ([], ["model", "optim", "schedule"]),
        (["task=lit"], []),
        (["task=lit", "model=tulip"], ["model"]),
        (["task=lit", "optim.lr=1"], ["optim"]),
        (["experiment=garden", "task=lit"], ["model"]),
    ],
)
def test_a_lightning_module_replaces_the_projects_defaults_and_nothing_that_was_chosen(bouquet, overrides, left):
    (bouquet / "configs/task").mkdir()
    (bouquet / "configs/task/lit.yaml").write_text("defaults: [lightning_module]\n_target_: bouquet.net.Lit\n")
    draft = compose.without_replaced_defaults(Draft(compose.compose_config("train", overrides)), overrides)
    assert [group for group in ("model", "optim", "schedule") if draft.get(group)] == left


def test_mistakes_name_the_projects_options_too(bouquet):
    problems, good = compose.compose_each("train", ["model=tulp", "data=mnist", "experiment=gardn"])
    assert "model has no option tulp; use one of airbench, basic_net, " in problems[0]
    assert "(did you mean tulip?)" in problems[0]
    assert "did you mean garden?" in problems[1]
    assert good == ["data=mnist"]


def test_the_callers_hydra_is_left_alone(tmp_path, monkeypatch):
    from hydra import initialize_config_dir

    (tmp_path / "own.yaml").write_text("a: 1\n")
    with initialize_config_dir(str(tmp_path)):
        theirs = GlobalHydra.instance().hydra
        monkeypatch.setattr("sys.argv", ["program", "--config-dir", str(tmp_path / "nowhere")])
        compose.compose_config("train", [])
        with pytest.raises(compose.CONFIG_ERRORS):
            compose.compose_config("train", ["modle=a"])
        assert GlobalHydra.instance().hydra is theirs is not None


def test_other_programs_that_use_hydra_do_not_find_our_configs(bouquet):
    from hydra import initialize_config_dir

    with initialize_config_dir(str(bouquet / "configs")):
        assert GlobalHydra.instance().config_loader().list_groups("") == ["experiment", "hydra", "model"]


# --- as commands ---------------------------------------------------------------------------------------------------


def test_help_lists_the_projects_options_without_torch_and_asks_no_gpu(bouquet, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    monkeypatch.setenv("LD_DEBUG", "files")
    monkeypatch.setenv("LD_DEBUG_OUTPUT", str(tmp_path / "libraries"))
    done = subprocess.run([sys.executable, "train.py", "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "  model       airbench, basic_net, " in done.stdout
    assert "timm, tulip" in done.stdout
    assert " torch\n" not in done.stderr
    opened = "".join(path.read_text() for path in tmp_path.glob("libraries.*"))
    assert "libtorch" not in opened and "libcuda" not in opened  # asking eight GPUs may take seconds
    assert "libc.so" in opened, "else that would show nothing"


def test_a_thin_project_trains_its_own_model_in_this_process(bouquet, mnist, cache):
    data = [f"data.root={mnist}", f"data.cache_dir={cache}", "trainer.limit_train_batches=2"]
    try:
        report = lockstep.train(["run=one", *data])  # the working directory is the project's
        assert (report["model"], report["seed"], "bouquet.net" in sys.modules) == ("tulip", 7, True)
        assert str(bouquet / "src") not in sys.path
        assert type(lockstep.load_model("one")).__name__ == "Tulip"
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "bouquet"]:
            del sys.modules[name]
