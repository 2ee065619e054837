"""Runs and checkpoints of strangers are data: using one runs no code, and writes nothing but what the command says."""

import ast
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import yaml
from conftest import write_cifar10
from in_process import SMALL
from omegaconf import OmegaConf
from PIL import Image, UnidentifiedImageError

import lockstep
from lockstep import ROOT
from lockstep.checkpoints import finding, saving
from lockstep.checkpoints.weights import load
from lockstep.config.checks import check
from lockstep.config.compose import compose_config
from lockstep.config.draft import Draft
from lockstep.config.run_config import SEVERAL
from lockstep.config.schema import GROUPS, RECIPES
from lockstep.errors import UserError
from lockstep.extras.export import export
from lockstep.extras.runs_page import runs_page
from lockstep.extras.study import write_plots
from lockstep.kit import cache as cache_module
from lockstep.kit import images
from lockstep.kit.pixels import Frame
from lockstep.launch import resuming, sweeps
from lockstep.launch.exits import exit_code
from lockstep.machine import files, process
from lockstep.machine.files import write_json, write_text
from lockstep.reporting import console
from lockstep.reporting.report import Report
from lockstep.run import RunFolder, run_folders
from lockstep.strategies.base import by_index
from project import data as project_data
from project.data import Cifar10

pytestmark = pytest.mark.xdist_group("strangers")


class Evil:
    def __reduce__(self):
        return os.mkdir, ("harmed",)


@pytest.fixture
def evil(run_a, mnist, cache) -> dict[str, dict]:
    """Nodes that would do harm, in a folder with the run `a`."""
    torch.save(Evil(), "evil.pth")
    folder = Path("exported")
    folder.mkdir()
    (folder / "network.py").write_text("import os\nos.mkdir('harmed')\n")
    (folder / "model.json").write_text('{"timm": null, "class": "Net", "arguments": {}}')
    return {
        "pickle": {"_target_": "timm.models.load_state_dict", "checkpoint_path": "evil.pth", "weights_only": False},
        "module": {"_target_": "lockstep.extras.exported.load", "folder": "exported"},
        "import": {"_target_": "stranger.Net"},
        "nested": {"_target_": "torch.nn.Sequential", "_args_": [{"_target_": "lockstep.extras.exported.load", "folder": "exported"}]},
    }  # fmt: skip


def change(key: str, node: dict) -> None:
    """Names `node` in the run's config.yaml, and in the config of a checkpoint outside of it."""
    cfg = OmegaConf.load("runs/a/config.yaml")
    if key in ("augment", "callbacks", "logger"):
        node = {"x": node}
    OmegaConf.update(cfg, key, node, merge=False)
    OmegaConf.save(cfg, "runs/a/config.yaml")
    content = torch.load("runs/a/checkpoints/last.ckpt", weights_only=True)
    torch.save({**content, "config": OmegaConf.to_container(cfg)}, "moved.ckpt")


SLOW = [("callbacks", "pickle"), ("model", "import"), ("task", "module"), ("data", "pickle"), ("augment", "pickle")]


@pytest.mark.parametrize(
    ("key", "way"),
    [("model", "nested"), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_a_strangers_run_runs_no_code(key, way, evil, monkeypatch):
    monkeypatch.syspath_prepend(".")
    Path("stranger.py").write_text("import os\nos.mkdir('harmed')\n")
    node = evil[way]
    own = {"task": {"monitor": "val/loss", "mode": "min", "metrics": {}}}
    change(key, {**node, **own.get(key, {})})
    cpu = SMALL[1:]
    uses = {
        "resume": lambda: lockstep.train(["run=a", "resume=auto", "trainer.max_epochs=2", *cpu]),
        "run": lambda: lockstep.evaluate(["run=a", *cpu]),
        "predict": lambda: lockstep.predict(["run=a", "input=test", *cpu]),
        "checkpoint": lambda: lockstep.evaluate(["checkpoint=moved.ckpt", *cpu]),
        "export": lambda: export(Path("moved.ckpt"), Path("out")),
        "load_model": lambda: lockstep.load_model("moved.ckpt"),
    }
    built = {"model": [*uses], "task": [*uses], "data": [*uses][:5]}  # the others are made by a training alone
    refused = built.get(key, ["resume"])
    for name, use in uses.items():
        with pytest.raises(UserError, match=r"is not allowed|cannot be changed") if name in refused else nullcontext():
            use()
    assert not Path("harmed").exists()


@pytest.mark.parametrize("way", ["module", "pickle"])
def test_what_a_checkpoint_gives_to_its_network_is_no_node(way, evil, monkeypatch):
    content = torch.load("runs/a/checkpoints/last.ckpt", weights_only=True)
    torch.save({**content, "network": {**content["network"], "in_channels": evil[way]}}, "moved.ckpt")
    with pytest.raises((UserError, TypeError)):
        lockstep.load_model("moved.ckpt")
    assert not Path("harmed").exists()


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_run_whose_checkpoints_are_all_damaged_is_left_alone(run_a):
    before = {path: path.read_bytes() for path in Path("runs/a").iterdir() if path.is_file()}
    for path in Path("runs/a/checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(
        UserError, match=r"no checkpoint .* damaged or not a checkpoint: best-step-12\.ckpt, last\.ckpt"
    ):
        lockstep.train(["run=a", "resume=auto", *SMALL[1:]])
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("shape", [(3,), (1000, 7), ()])
def test_an_optimizer_state_of_another_shape_is_refused(shape):
    p = torch.nn.Parameter(torch.zeros(4, 5))
    for optimizer in (torch.optim.AdamW([p], fused=True), torch.optim.AdamW([p])):
        p.grad = torch.ones(4, 5)
        optimizer.step()
        group = {**optimizer.param_groups[0], "params": ["p"]}
        for key, wrong in (("exp_avg", shape), ("step", (0,))):
            state = {"p": {**optimizer.state[p], key: torch.zeros(wrong)}}
            with pytest.raises(UserError, match=re.escape(f"has a {key} of {wrong} for p instead of")):
                by_index(optimizer, [{"p": p}], {"state": state, "param_groups": [group]})


def test_what_changed_since_the_checkpoint_is_told(run_a, capsys):
    content = torch.load("runs/a/checkpoints/last.ckpt", weights_only=True)
    (state,) = [state for state in content["callbacks"].values() if "torch" in state]
    state |= {"torch": "1.0", "network argument image_size": "14"}
    torch.save(content, "runs/a/checkpoints/last.ckpt")
    options = ["trainer.max_steps=13", "trainer.max_epochs=2", "model.dropout_fc=0.25", "data.mean=[0.2]", *SMALL[1:]]
    lockstep.train(["run=a", "resume=auto", *options])
    lines = capsys.readouterr().out.splitlines()
    told = [line.partition(": ")[2] for line in lines if line.startswith("changed since")]
    assert told == [
        "model.dropout_fc was 0.5 and is now 0.25",
        "data.mean was [0.1307] and is now [0.2]",
        "network argument image_size was 14 and is now 12",
        f"torch was 1.0 and is now {torch.__version__.partition('+')[0]}",
    ]


# --- what is shown ---------------------------------------------------------------------------------------------------

NAMES = ["[/b]x", "a[red]b", "\x1b[31mred\x1b]0;title\x07", ":smile:", "\u202eright to left"]


@pytest.mark.parametrize("name", NAMES)
def test_names_reach_the_terminal_as_text(name, capsys, monkeypatch):
    monkeypatch.setattr(console.out, "width", 200)
    console.print_line(name)
    console.metrics_table({"report": name, name: ""})
    sweeps.print_table([{"run": name, "test/acc": 0.5}], [], Path("sweep.csv"))

    assert exit_code(Mock(side_effect=UserError(f"model.name={name} is unknown"))) == 2
    out, err = capsys.readouterr()
    text = ascii(name)[1:-1]
    assert (out.count(text), err) == (4, f"error: model.name={text} is unknown\n")


def test_the_page_of_a_study_escapes_its_name(tmp_path):
    study = pytest.importorskip("optuna").create_study(study_name="<script>alert(1)</script>")
    write_plots(study, ["val/loss", "wall_s"], tmp_path)  # it has one objective: Optuna draws nothing
    page = (tmp_path / "study.html").read_text()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_what_is_written_follows_the_umask(run_a):
    before = os.umask(0o077)
    try:
        folder = export(Path("runs/a/checkpoints/last.ckpt"), Path("exports/a"))
    finally:
        os.umask(before)
    assert not [path for path in (folder.parent, folder, *folder.iterdir()) if path.stat().st_mode & 0o077]


# --- one place opens the files of a run ------------------------------------------------------------------------------

OPENS = (
    "open",
    "read_text",
    "read_bytes",
    "write_text",
    "write_bytes",
    "FileHandler",
    "copyfile",
    "copytree",
    "fromfile",
    "touch",
)
OPENS_BY_NAME = ("torch.load", "np.load", "OmegaConf.load", "zipfile.ZipFile", "np.memmap")
OURS = ("read_text", "read_bytes", "write_text")  # of machine/files.py, called by their names or as files.x
FREE = {  # what a module opens in another way, and why it may
    "reporting/recorder.py": ("self.open", "its own method"),
    "reporting/report.py": ("Image.open", "bytes in memory"),
    "checkpoints/finding.py": ("zipfile.ZipFile archive.open", "a file that was opened in the one place"),
    "checkpoints/weights.py": ("torch.load", "torch maps by path: a file that was judged in the line before"),
    "checkpoints/saving.py": ("shutil.copyfile shutil.copytree", "a checkpoint that was judged, into a new folder of its own"),
    "launch/local.py": ("file.read_bytes path.read_bytes end_file.touch", "files of a private temporary folder"),
    "launch/help.py": ("read_text read_bytes", "configs of the project"),
}  # fmt: skip
NOT_OF_A_RUN = ("machine/", "config/", "data/", "kit/", "extras/", "__main__.py")


COPIES = ("shutil.copyfile", "shutil.copytree")


def opened_in(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in COPIES:
            yield ast.unparse(node)
        elif isinstance(node, ast.Call):
            name = re.sub(r"\(.*\)|'.*'", "", ast.unparse(node.func))
            if name in OPENS_BY_NAME or name.rpartition(".")[2] in OPENS:
                yield name


def test_no_file_of_a_run_is_opened_around_the_one_place():
    """The rooms that handle a run call open_plain, read_text and read_bytes as functions, never a method of a path."""
    seen: dict[str, set[str]] = {}
    for path in sorted((ROOT / "src/lockstep").rglob("*.py")):
        place = path.relative_to(ROOT / "src/lockstep").as_posix()
        if not place.startswith(NOT_OF_A_RUN):
            other = {name for name in opened_in(path) if name.removeprefix("files.") not in OURS}
            seen |= {place: other} if other else {}
    allowed = {place: set(names.split()) for place, (names, _) in FREE.items()}
    around = {
        place: {n for n in names if not any(n == a or n.endswith(f".{a}") for a in allowed.get(place, ()))}
        for place, names in seen.items()
    }
    assert {place: names for place, names in around.items() if names} == {}
    assert set(FREE) == seen.keys(), "an exception that nothing needs any more"


def test_while_a_run_is_trained_and_evaluated_its_files_are_opened_without_following_links(train, tmp_path):
    opened, guarded, others = Counter[str](), Counter[str](), set[str]()

    def note(event: str, args: tuple) -> None:
        path, mode, flags = args if event == "open" else (None, None, 0)
        if watching and isinstance(path, str | os.PathLike) and isinstance(flags, int):
            place = Path(os.fsdecode(path)).absolute()
            is_part = any(part.startswith(files.PART) for part in place.parts)
            if place.is_relative_to(tmp_path / "runs/w") and not place.is_dir() and not is_part:
                if mode is not None:  # before the opener, which is asked next
                    opened[place.name] += 1
                elif flags & os.O_NOFOLLOW:
                    guarded[place.name] += 1
                else:
                    others.add(place.name)

    watching = True
    sys.addaudithook(note)  # for ever, so it looks at nothing else
    try:
        train("run=w", "trainer.max_steps=2", "logger=csv")
        lockstep.evaluate(["run=w", *SMALL[1:]])
        train("run=w", "resume=auto", "trainer.max_steps=3", "trainer.max_epochs=2")
    finally:
        watching = False
    assert {"config.yaml", "report.json", "metrics.csv", "train.log", "last.ckpt"} <= guarded.keys()
    judged = {
        ".lock",
        "last.ckpt",
        "best-step-2.ckpt",
        "best-step-3.ckpt",
    }  # filelock and torch open them, after a look
    assert {name for name, count in opened.items() if count > guarded[name]} | others <= judged


# --- links, pipes and devices in a run -------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    def end(*_: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


SECRET = "the password of a user"
ODD = {
    "link": lambda path, victim: path.symlink_to(victim),
    "dangling": lambda path, victim: path.symlink_to(victim.with_name("new")),
    "pipe": lambda path, _: os.mkfifo(path),
    "device": lambda path, _: path.symlink_to("/dev/zero"),
}
OF_A_RUN = ("config.yaml", "report.json", "metrics.csv", "digests.csv", "train.log", "report.html", "panels.json", ".lock", "logs/rank-0.log")  # fmt: skip


def replaced(name: str, kind: str) -> tuple[Path, Path]:
    """The path of a file of the run `a` that is now something odd, and the user's file."""
    victim, path = Path("victim").absolute(), Path("runs/a", name)
    victim.write_text(SECRET)
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    ODD[kind](path, victim)
    return path, victim


@pytest.mark.parametrize(
    "kind", ["link", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("pipe", "dangling", "device"))]
)
@pytest.mark.parametrize("name", OF_A_RUN)
def test_a_run_with_links_pipes_or_devices_is_refused_and_nothing_is_touched(name, kind, run_a, train, capfd):
    path, victim = replaced(name, kind)
    with pytest.raises(UserError) as error:
        train("run=a", "resume=auto", "trainer.max_epochs=2")
    assert path.name in str(error.value) or "exists" in str(error.value) or "is missing" in str(error.value)
    with pytest.raises(UserError):
        lockstep.evaluate(["run=a", *SMALL[1:]])
    report = Report.listed(RunFolder("runs/a"), Path("runs"))
    runs_page([report], Path("runs"), Path("page.html"))
    with suppress(UserError, OSError):
        report._repr_html_()
    assert victim.read_text() == SECRET
    assert not victim.with_name("new").exists()
    assert SECRET not in "".join(capfd.readouterr())


@pytest.mark.parametrize("name", ["checkpoints", "logs"])
def test_a_folder_of_a_run_that_is_a_link_is_refused(name, run_a, train):
    path, elsewhere = Path("runs/a", name), Path("elsewhere")
    if path.exists():
        path.rename(elsewhere)
    elsewhere.mkdir(exist_ok=True)
    path.symlink_to(elsewhere.absolute())
    before = sorted(elsewhere.iterdir())
    for use in (
        lambda: train("run=a", "resume=auto", "trainer.max_epochs=2"),
        lambda: lockstep.evaluate(["run=a", *SMALL[1:]]),
    ):
        with pytest.raises(UserError, match=f"{name} is a link"):
            use()
    with process.RankLog(Path("runs/a"), 0):
        print("text")
        process.log.write("text")
    assert sorted(elsewhere.iterdir()) == before


def test_links_to_folders_and_paths_out_of_a_run_lead_nowhere(run_a, tmp_path, caplog):
    victim, run = tmp_path / "victim", RunFolder("runs/a")
    shutil.copytree("runs/a", victim)
    writer = saving.AtomicCheckpointIO(Path("runs/a"), background=False)
    for path in ("runs/a/../../victim/config.yaml", "runs/a/..", victim / "checkpoints/last.ckpt"):
        writer.remove_checkpoint(path)
    assert caplog.text.count("is not removed") == 3 and (victim / "config.yaml").exists()
    for named in (f"{victim}/checkpoints/last.ckpt", "../../victim/checkpoints/last.ckpt"):
        run.write_report(run_a | {"checkpoint": named})
        assert finding.checkpoint_of_report(run.path).parent == run.checkpoints
    Path("runs/a/checkpoints/last.ckpt").unlink()
    Path("runs/a/checkpoints/last.ckpt").symlink_to(victim / "checkpoints/last.ckpt")
    assert finding.step_of(Path("runs/a/checkpoints/last.ckpt")) == -1
    with pytest.raises(UserError, match="is a link, a pipe or a device"):
        finding.tested_checkpoint("runs/a/checkpoints/last.ckpt", "checkpoint")
    Path("runs/a/tensorboard").symlink_to(victim)
    with pytest.raises(UserError, match="runs/a/tensorboard is a link"):
        run.refuse_links()
    Path("runs/a/tensorboard").unlink()
    Path("runs/a/tensorboard").mkdir()
    Path("runs/a/tensorboard/hparams.yaml").symlink_to(victim / "new")  # Lightning would make it
    with pytest.raises(UserError, match=r"hparams\.yaml is a link"):
        run.refuse_links()
    shutil.copytree(victim, "runs/.lockstep-01234567.part/a")
    assert [each.path for each in run_folders("runs")] == [run.path]


def test_other_names_of_a_runs_files_keep_their_content(run_a, train):
    """Hard links cannot be told from files: what `cp -al` made, or a stranger, is read, and no write reaches it."""
    others = {
        Path("others", str(number)): path for number, path in enumerate(Path("runs/a").rglob("*")) if path.is_file()
    }
    Path("others").mkdir()
    for other, path in others.items():
        os.link(path, other)
    before = {other: other.read_bytes() for other in others}
    assert train("run=a", "resume=auto", "trainer.max_epochs=2", "trainer.max_steps=13")["status"] == "done"
    lockstep.evaluate(["run=a", *SMALL[1:]])
    assert {other: other.read_bytes() for other in others} == before
    assert {"train.log", "metrics.csv", "last.ckpt"} <= {path.name for path in others.values()}


@pytest.mark.parametrize("linked", ["runs", "runs/a"])
def test_runs_may_be_on_another_disk(linked, run_a, train):
    Path(linked).rename("disk")
    Path(linked).symlink_to(Path("disk").absolute())
    assert train("run=a", "resume=auto", "trainer.max_epochs=2", "trainer.max_steps=13")["status"] == "done"
    assert lockstep.evaluate(["run=a", *SMALL[1:]])["test/count"] == 103


def test_a_checkpoint_that_the_user_links_is_evaluated(run_a):
    Path("mine.ckpt").symlink_to(Path("runs/a/checkpoints/last.ckpt").absolute())
    assert lockstep.evaluate(["checkpoint=mine.ckpt", *SMALL[1:]])["test/count"] == 103


def test_a_checkpoint_cannot_name_the_run_that_its_evaluation_writes_into(run_a):
    shutil.copytree("runs/a", "runs/mine")
    Path("runs/x").mkdir()
    content = torch.load("runs/a/checkpoints/last.ckpt", weights_only=True)
    content["config"]["run"] = "mine"
    torch.save(content, "runs/x/moved.ckpt")
    Path("runs/x/y").mkdir()
    Path("runs/x/moved.ckpt").rename("runs/x/y/moved.ckpt")  # two folders below runs
    before = sorted(Path("runs/mine").rglob("*"))
    lockstep.evaluate(["checkpoint=runs/x/y/moved.ckpt", *SMALL[1:]])
    assert sorted(Path("runs/mine").rglob("*")) == before
    assert Path("runs/x/y/moved.eval.json").is_file()


# --- references in what is read back ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("data.root", "${oc.env:LOCKSTEP_PASSWORD}"),
        ("trainer.max_epochs", "${nosuch}"),
        ("model.name", "x${oc.env:LOCKSTEP_PASSWORD}y"),
        ("loader.batch_size", "???"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("optim.lr", "${"), ("task.monitor", "${lockstep.sweep:a}")]
        ),
    ],
)
def test_what_is_read_back_from_a_run_refers_to_nothing(key, text, run_a, monkeypatch, capfd):
    monkeypatch.setenv("LOCKSTEP_PASSWORD", SECRET)
    values = yaml.safe_load(Path("runs/a/config.yaml").read_text())
    group, name = key.split(".")
    values[group][name] = text
    Path("runs/a/config.yaml").write_text(yaml.safe_dump(values))
    content = torch.load("runs/a/checkpoints/last.ckpt", weights_only=True)
    torch.save({**content, "config": values}, "moved.ckpt")
    cpu = SMALL[1:]
    uses = (
        lambda: lockstep.evaluate(["run=a", *cpu]),
        lambda: lockstep.evaluate(["run=a", "trainer.precision=32-true", *cpu]),
        lambda: lockstep.predict(["run=a", "input=test", *cpu]),
        lambda: lockstep.train(["run=a", "resume=auto", "trainer.max_epochs=2", *cpu]),
        lambda: lockstep.evaluate(["checkpoint=moved.ckpt", *cpu]),
        lambda: export(Path("moved.ckpt"), Path("out")),
        lambda: lockstep.load_model("moved.ckpt"),
    )
    for use in uses:
        with pytest.raises(UserError) as error:
            use()
        assert text in str(error.value)
        assert SECRET not in str(error.value)
    assert RunFolder("runs/a").config_file.exists()
    runs_page([Report.listed(RunFolder("runs/a"), Path("runs"))], Path("runs"), Path("page.html"))
    assert SECRET not in "".join(capfd.readouterr())


@pytest.mark.parametrize("text", ["a: &a0 [x]\n" + "".join(f"b{i}: &a{i + 1} [*a{i}, *a{i}]\n" for i in range(40)), "a: &a [" + "x," * 2000 + "]\nb: &b [" + "*a," * 2000 + "]\nc: [" + "*b," * 2000 + "]\n", "[" * 5000, "a: 1\na: 2\n", "", "- 1", "x", "\0", "!!python/object/apply:os.mkdir [harmed]"], ids=lambda text: text[:20])  # fmt: skip
def test_a_config_of_a_stranger_that_is_none_is_named(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(text)
    with pytest.raises(UserError, match=r"config\.yaml is damaged"):
        Draft.of_run(RunFolder(tmp_path))
    assert not Path("harmed").exists()
    assert isinstance(Report.listed(RunFolder(tmp_path), tmp_path.parent).settings, dict)


@pytest.mark.parametrize("odd", [pytest.param(5, marks=pytest.mark.slow), ["x"], pytest.param(None, marks=pytest.mark.slow), {"_target_": 5}], ids=str)  # fmt: skip
def test_a_group_of_a_config_that_holds_something_else_is_named(odd, run_a):
    values = yaml.safe_load(Path("runs/a/config.yaml").read_text())
    uses = {
        "train": lambda: resuming.for_training(Draft(compose_config("train", given)), given),
        "eval": lambda: resuming.for_evaluation(Draft(compose_config("eval", given[:1])), given[:1]),
    }
    given = ["run=a", "resume=auto", "trainer.max_epochs=2"]
    for group in (
        SEVERAL if odd == {"_target_": 5} else GROUPS if odd is None or odd == 5 else ("strategy", "callbacks", "debug")
    ):
        Path("runs/a/config.yaml").write_text(yaml.safe_dump({**values, group: odd}))
        for name, use in uses.items():
            if group in RECIPES:
                check(use(), evaluating=name == "eval")
                continue
            with pytest.raises(UserError, match=rf"{group}(=|\._target_)"):
                use()


@pytest.mark.parametrize("text", ["5", "[5]", '[{"__panel__": "Matrix"}]', '[{"__panel__": "Matrix", "names": 5, "values": "x"}]', '[{"__panel__": ["x"]}]', "[" * 90_000, "{}"], ids=lambda text: text[:40])  # fmt: skip
def test_panels_that_are_none_hide_no_run(text, run_a):
    Path("runs/a/panels.json").write_text(text)
    Path("runs/a").rename("runs/\udcff")  # no UTF-8
    report = Report.listed(RunFolder("runs/\udcff"), Path("runs"))
    assert 'href="runs/%FF/report.html"' in runs_page([report], Path("runs"), Path("page.html").resolve())
    with pytest.raises(UserError, match=r"panels\.json is damaged"):
        _ = report.panels


def test_files_without_an_end_are_not_read(tmp_path):
    run = RunFolder(tmp_path)
    for path, read in (
        (run.config_file, run.saved_config),
        (run.report_file, run.report),
        (run.metrics_log.path, run.metrics),
    ):
        with path.open("wb") as file:
            file.truncate(2**40)
        with pytest.raises(UserError, match=rf"{path.name} is damaged: .*bytes, more than"):
            read()


# --- checkpoints of strangers ----------------------------------------------------------------------------------------


def itself() -> list:
    node: list = []
    node.append(node)
    return node


def test_a_config_of_a_checkpoint_that_contains_itself_ends(run_a):
    values = finding.read_pickle(Path("runs/a/checkpoints/last.ckpt"))
    values["config"]["data"]["x"] = itself()
    with pytest.raises(UserError, match=r"more than 1,000,000 values"):
        finding.Checkpoint.parse(Path("x.ckpt"), values)


@pytest.mark.slow
def test_what_a_run_wrote_itself_is_read_back_whatever_its_size(run_a):
    folder, (_, text) = RunFolder("runs/a"), RunFolder("runs/a").saved_config()
    write_text(folder.config_file, f"{text}x: {'x' * 2**23}\n")
    assert len(Draft.of_run(folder).get("x")) == 2**23


@pytest.mark.parametrize("named", ["checkpoints/gone.ckpt", "../../x.ckpt", ""])
def test_another_checkpoint_than_the_one_of_the_report_is_told(named, run_a, capsys):
    write_json(Path("runs/a/report.json"), run_a | {"checkpoint": named})
    assert finding.checkpoint_of_report(Path("runs/a")).name in ("last.ckpt", run_a["checkpoint"].rpartition("/")[2])
    assert f"checkpoint={named} is not a complete checkpoint" in capsys.readouterr().err


def save(**changed: object) -> None:
    path = "runs/a/checkpoints/last.ckpt"
    torch.save({**torch.load(path, weights_only=True), **changed}, path)


@pytest.mark.parametrize(
    "form",
    [
        "none",
        *(pytest.param(form, marks=pytest.mark.slow) for form in ("complex", "text", "shape")),
    ],
)
def test_weights_of_another_form_are_named(form, run_a, train):
    weights = torch.load("runs/a/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    name, value = next((n, v) for n, v in weights.items() if v.dim() == 2)
    odd = {"complex": value.to(torch.complex64), "text": "x", "none": None, "shape": value[:1]}[form]
    save(state_dict={**weights, name: odd})
    shutil.copy("runs/a/checkpoints/last.ckpt", "moved.ckpt")
    cpu = SMALL[1:]
    for use in (
        lambda: lockstep.evaluate(["checkpoint=moved.ckpt", *cpu]),
        lambda: lockstep.load_model("moved.ckpt"),
        lambda: train("run=a", "resume=auto", "trainer.max_epochs=2"),
    ):
        with pytest.raises(UserError, match=re.escape(name.removeprefix("net.")) + " is "):
            use()


def test_a_checkpoint_without_lightnings_version_says_so(run_a, train):
    content = torch.load("runs/a/checkpoints/last.ckpt", weights_only=True)
    del content["pytorch-lightning_version"]
    torch.save(content, "runs/a/checkpoints/last.ckpt")
    with pytest.raises(UserError, match="it has no pytorch-lightning_version"):
        train("run=a", "resume=auto", "trainer.max_epochs=2")


def test_code_in_the_newest_checkpoint_is_told_and_no_older_one_is_taken(run_a, train):
    save(optimizer_states=[Evil()])
    for use in (lambda: train("run=a", "resume=auto", "trainer.max_epochs=2"), lambda: lockstep.evaluate(["checkpoint=runs/a/checkpoints/last.ckpt"])):  # fmt: skip
        with pytest.raises(UserError, match=r"last\.ckpt is not a checkpoint of Lockstep: it contains objects that could run code \(posix\.mkdir\)"):  # fmt: skip
            use()
    assert not Path("harmed").exists()


@pytest.mark.parametrize("leads_to", ["a file", "a folder", "nothing"])
def test_what_is_kept_while_last_ckpt_is_replaced_may_not_be_a_link(leads_to, run_a, train):
    Path("victim").mkdir()
    Path("victim/kept").touch()
    to = {"a file": "victim/kept", "a folder": "victim", "nothing": "gone"}[leads_to]
    Path("runs/a/checkpoints/last.ckpt.old").symlink_to(Path(to).absolute())
    assert train("run=a", "resume=auto", "trainer.max_epochs=2", "trainer.max_steps=13")["status"] == "done"
    Path("new").mkdir()
    files.take_place(Path("new"), Path("runs/a/checkpoints/last.ckpt"))
    assert Path("victim/kept").exists()


@pytest.mark.parametrize("reader", ["unpickled", "weights"])
def test_memory_that_runs_out_is_no_damage(reader, run_a, monkeypatch):
    path = Path("runs/a/checkpoints/last.ckpt")
    uses = {
        "unpickled": (finding.Outline, "load", lambda: finding.read_pickle(path)),
        "weights": (torch, "load", lambda: load(path)),
    }
    owner, name, use = uses[reader]
    monkeypatch.setattr(owner, name, Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        use()


# --- data of strangers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pipe", "device", "huge"])
def test_images_are_regular_files_with_an_end(kind, tmp_path):
    path, good = tmp_path / "x.png", tmp_path / "good.png"
    Image.new("L", (4, 4)).save(good)
    if kind == "huge":
        with path.open("wb") as file:
            file.truncate(2**40)
    else:
        ODD[kind](path, good)
    (tmp_path / "link.png").symlink_to(good)
    names = ["x.png", "good.png", "link.png"]
    found = list(images.read_all(tmp_path, names, "reading"))
    assert [file.problem is None for file in found] == [False, True, True]
    assert re.search("not a regular file|bytes, more than", str(found[0].problem))
    for read in (
        lambda: images.decode(path, channels=1, frame=Frame(4)),
        lambda: images.Images(image_size=4).mask_size(path),
    ):
        with pytest.raises((OSError, UnidentifiedImageError)):
            read()
    assert images.decode(tmp_path / "link.png", channels=1, frame=Frame(4)).shape == (1, 4, 4)


@pytest.mark.parametrize("name", ["about.json", "train/input.npy", "train/more.npy"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_cache_of_a_stranger_does_not_hang(name, kind, tmp_path):
    cached = cache_module.write({"train/input": np.zeros((2, 3), np.uint8)}, {}, tmp_path / "cache")
    path = cached.folder / name
    path.unlink(missing_ok=True)
    ODD[kind](path, tmp_path)
    if cache_module.load_cache_or_none(cached.folder) is not None:
        with pytest.raises(OSError, match=r"link|regular"):
            cached.arrays("train")


def test_the_bytes_of_cifar_that_were_hashed_are_those_that_are_parsed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Cifar10, "md5", write_cifar10(tmp_path, 3))
    found, read = Cifar10.find(tmp_path), project_data.read_bytes

    def swapped(path: Path, **options: bool) -> bytes:
        content = read(path, **options)
        path.write_bytes(pickle.dumps(Evil()))  # by somebody else, at once
        return content

    monkeypatch.setattr(project_data, "read_bytes", swapped)
    assert len(Cifar10.read_files(found)["train/input"]) == 15
    with pytest.raises(UserError, match="MD5 differs"):
        Cifar10.read_files(found)
    assert not Path("harmed").exists()


@pytest.mark.parametrize("made", ["link", "file", "open", "of another", "old"])
def test_the_temporary_cache_is_the_users_alone(made, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first, victim = tmp_path / f"lockstep-{os.getuid()}", tmp_path / "victim"
    victim.mkdir(mode=0o700)
    if made == "link":
        first.symlink_to(victim)
    elif made == "file":
        first.touch()
    else:
        first.mkdir(mode=0o700)
        first.chmod(0o777 if made == "open" else 0o755 if made == "old" else 0o700)
    if made == "of another":
        if os.getuid():
            pytest.skip("only root gives a folder away")
        os.chown(first, 12345, 12345)
    with pytest.raises(UserError, match=r"is not a folder that only you can access. Set data\.cache_dir="):
        cache_module.private_folder()
    assert list(victim.iterdir()) == []


def test_the_temporary_cache_is_made_once_with_a_private_mode(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = cache_module.private_folder()
    assert folder == tmp_path / f"lockstep-{os.getuid()}" == cache_module.private_folder()
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("text", ["5", "null", "[" * 100_000])
def test_a_cache_whose_description_is_something_else_is_damaged(text, tmp_path):
    (tmp_path / "about.json").write_text(text)
    assert cache_module.load_cache(tmp_path) is None


def test_the_page_of_all_runs_links_to_files_alone(run_a):
    Path("runs/a").rename("runs/javascript:alert(1)")
    report = Report.listed(RunFolder("runs/javascript:alert(1)"), Path("runs"))
    report.run_folder.page_file.touch()
    assert 'href="javascript:' not in runs_page([report], Path("runs"), Path("runs/page.html").resolve())


# --- what SECURITY.md promises ---------------------------------------------------------------------------------------

PROMISES = {  # how each sentence begins, and its tests; what a file's workflow does has none here
    "Checkpoints, configs, caches and run directories": "test_a_strangers_run_runs_no_code test_a_cache_of_a_stranger_does_not_hang",
    "Loading one runs none": "test_a_strangers_run_runs_no_code test_code_in_the_newest_checkpoint_is_told_and_no_older_one_is_taken",
    "For each key": "test_a_strangers_run_runs_no_code",
    "They must come from Lockstep": "test_a_strangers_run_runs_no_code",
    "Nothing else is imported": "test_a_strangers_run_runs_no_code test_a_config_of_a_stranger_that_is_none_is_named",
    "A saved run contains": "test_what_is_read_back_from_a_run_refers_to_nothing",
    "A `${...}` in its config": "test_what_is_read_back_from_a_run_refers_to_nothing",
    "A checkpoint cannot name": "test_a_checkpoint_cannot_name_the_run_that_its_evaluation_writes_into",
    "Links, pipes and devices": "test_a_run_with_links_pipes_or_devices_is_refused_and_nothing_is_touched "
    "test_a_folder_of_a_run_that_is_a_link_is_refused test_no_file_of_a_run_is_opened_around_the_one_place",
    "The directory itself": "test_runs_may_be_on_another_disk test_a_link_to_a_run_is_told_and_not_read",
    "Hard links cannot": "test_other_names_of_a_runs_files_keep_their_content",
    "Files that are read into memory": "test_files_without_an_end_are_not_read",
    "Images may be links": "test_images_are_regular_files_with_an_end",
    "Downloads use https": "test_mnist_is_fetched_from_the_mirror_that_has_it_and_what_is_damaged_again",
    "Paths in archives": "test_cifar10_is_unpacked_to_where_it_is_looked_for_and_again_without_the_network",
    "Lockstep parses the same bytes": "test_the_bytes_of_cifar_that_were_hashed_are_those_that_are_parsed",
    "The decoded cache": "test_a_damaged_cache_is_decoded_again_with_a_warning test_the_temporary_cache_is_the_users_alone",
    "Your files are never": "test_only_parts_of_ours_are_removed test_a_prediction_leaves_the_folders_of_others_and_no_part_of_its_own",
    "Unfinished files": "test_only_parts_of_ours_are_removed",
    "Names are text": "test_names_reach_the_terminal_as_text test_the_page_of_a_study_escapes_its_name",
    "Files follow your umask": "test_what_is_written_follows_the_umask",
    "Releases are built": "",
    "`requirements.txt` pins": "",
}  # fmt: skip


def test_each_sentence_of_what_is_promised_has_a_test():
    text = (ROOT / "SECURITY.md").read_text().partition("## Guarantees")[2].partition("\n## ")[0]
    bullets = [" ".join(each.replace("**", "").split()) for each in text.split("\n- ")[1:]]
    sentences = [
        each
        for bullet in bullets
        for each in re.split(r"(?<=[.:]) (?=[A-Z`])", bullet)
        if not each.startswith(("`eval.py`", "`gh ", "HTML "))
    ]
    assert [next((p for p in PROMISES if each.startswith(p)), each) for each in sentences] == list(PROMISES)
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for names in PROMISES.values() for name in names.split() if f"def {name}(" not in tests] == []
