"""The ledger of runs, over folders as runs, sweeps and crashes leave them."""

import csv
import functools
import importlib
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lockstep import ROOT
from lockstep.checkpoints import weights
from lockstep.config.compose import compose_config
from lockstep.config.draft import Draft
from lockstep.config.formatting import plain
from lockstep.config.schema import GROUPS
from lockstep.errors import UserError
from lockstep.launch import resuming, sweeps
from lockstep.launch.exits import exit_code
from lockstep.run import RunFolder

ledger = importlib.import_module("runs")  # an import statement is sorted by whether there is a folder runs/
DAY_S = 86400


def iso(ago_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(time.time() - ago_s))


@functools.cache
def config_yaml(run: str, *overrides: str) -> str:
    return OmegaConf.to_yaml(compose_config("train", [f"run={run}", *overrides]), resolve=True)


def write(folder: Path, report: dict[str, Any] | str, *overrides: str, config: bool = True) -> Path:
    """A run's folder as report.Recorder leaves it: the config resolved, the report flat."""
    (folder / "checkpoints").mkdir(parents=True)
    if config:
        (folder / "config.yaml").write_text(config_yaml(folder.name, *overrides))
    own = {"overrides": shlex.join(overrides)} if config else {}
    (folder / "report.json").write_text(report if isinstance(report, str) else json.dumps(own | report))
    return folder


def written(folder: Path, ago_s: float) -> None:
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - ago_s,) * 2)


def report(status: str, ago_s: float, **more: Any) -> dict[str, Any]:
    what = {"model": "basic_net", "strategy": "single", "world_size": 1, "data/name": "mnist"}
    figures = {"unit": "images", "monitor": "val/acc", "monitor_mode": "max"}
    return {"status": status, "started": iso(ago_s), **what, **figures, **more}


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    """Runs of every kind, from the oldest to the newest."""
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "runs"
    figures = {"train/steps": 1200, "val/acc": 0.97, "test/acc": 0.96, "train/images_per_s": 1655.18}
    write(root / "old", report("done", 5 * DAY_S, resumed_from=None, **figures), "optim.lr=1e-2")
    many = {"strategy": "ddp", "world_size": 4, "test/acc": 0.91, "train/images_per_s": None}
    write(root / "several", report("done", 3 * DAY_S, **many), "strategy=ddp", "optim.lr=1e-5")
    write(root / "sweep" / "0", report("failed", 7200, error="ValueError: [bold]no[/bold]"))
    write(root / "sweep" / "1", {"status": "failed", "overrides": "optim.lr=0.1 seed=3"}, config=False)
    write(root / "half", '{"status": "do')
    written(root / "sweep" / "1", 3600)
    written(root / "half", 1200)
    write(root / "here", report("running", 180))
    (root / "here" / "report.json.part").write_text("{")
    (root / "here" / "wandb" / "files").mkdir(parents=True)
    (root / "here" / "wandb" / "files" / "config.yaml").write_text("wandb_version: 1")
    for name in ("exported", "begun.part"):
        (root / name).mkdir()
    (root / "exported" / "config.yaml").write_text(config_yaml("several"))
    (root / "begun.part" / "report.json.part").write_text("{")
    return root


def test_a_link_to_a_run_is_told_and_not_read(runs, call):
    write(runs.parent / "elsewhere/b", {"status": "done", "secret": "of another"})
    (runs / "b").symlink_to(runs.parent / "elsewhere/b")
    (runs / "sweep/7").symlink_to(runs.parent / "elsewhere/b")
    (runs / "notes").symlink_to(runs.parent)
    for args in ([], ["--json"], ["show", "old"], ["html"]):
        code, out, err = call("--runs-dir", str(runs), *args)
        assert code == 0 and "of another" not in out + (Path("runs.html").read_text() if args == ["html"] else "")
        assert [line.partition(" is a symbolic link")[0].rpartition("/")[2] for line in err.splitlines()] == ["b", "7"]


@pytest.fixture
def call(monkeypatch, capsys):
    """Runs the command and returns its exit code, output and errors."""

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["runs.py", *args])
        code = exit_code(ledger.main)
        return code, *capsys.readouterr()

    return run


def listed(call, *args: str) -> list[str]:
    code, out, err = call(*args, "--json")
    assert (code, err) == (0, "")
    return [row["run"] for row in json.loads(out)]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_every_run_is_in_the_table_the_newest_last(runs, call):
    code, out, err = call()
    assert (code, err) == (0, "")
    rows = [cells(line) for line in out.splitlines() if line.startswith("│")]
    assert rows == [
        ["old", "done", "basic_net", "mnist", "single", "1,200", "0.9700", "0.9600", "1,655.2", "5 d"],
        ["several", "done", "basic_net", "mnist", "ddp x4", "", "", "0.9100", "", "3 d"],
        ["sweep/0", "failed", "basic_net", "mnist", "single", "", "", "", "", "2 h"],
        ["sweep/1", "failed", *[""] * 7, "1 h"],
        ["half", "damaged", "basic_net", "", "single", "", "", "", "", "20 min"],
        ["here", "running", "basic_net", "mnist", "single", "", "", "", "", "3 min"],
    ]


def test_columns_are_the_figures_that_the_runs_monitored_and_their_speeds(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    text = {"unit": "sequences", "monitor": "val/perplexity", "val/perplexity": 7.5, "test/perplexity": 8.25}
    speed = {"train/sequences_per_s": 12.5, "train/flops_per_s": 1e9, "train/data_wait_share": 0.5}
    write(Path("runs/text"), report("done", 120, **text, **speed))
    write(Path("runs/loss"), report("done", 60, **{"monitor": "val/loss", "val/loss": 0.5, "test/loss": 0.25}))
    heading, *rows = [cells(line.replace("┃", "│")) for line in call()[1].splitlines() if line[0] in "┃│"]
    figures = ["val perplexity", "test perplexity", "val loss", "test loss", "sequences/s", "images/s"]
    assert heading == ["run", "status", "model", "data", "strategy", "steps", *figures, "age"]
    values = ["7.5000", "8.2500", "", "", "12.5000", ""], ["", "", "0.5000", "0.2500", "", ""]
    assert [row[6:12] for row in rows] == [*values]
    name = "a-long-sweep-of-many-things-" + "x" * 150 + "/0"  # whole in a pipe, with values as they are
    write(Path("runs", name), report("failed", 0, error="[bold]no[/bold] :smile:"))
    out = call("--where", f"run={name}", "--where", "error!=x")[1]
    assert name in out and "[bold]no[/bold] :smile:" in out


@pytest.mark.parametrize(
    ("conditions", "names"),
    [
        (["status!=done"], ["sweep/0", "sweep/1", "half", "here"]),
        (["test/acc>=0.91"], ["old", "several"]),
        (["test/acc = 0.910"], ["several"]),
        (["test/acc!=0.91"], ["old"]),  # a run without the key is in no result
        (["test/acc<high"], []),
        (["train/images_per_s=null"], ["several"]),
        (["train/images_per_s>1"], ["old"]),  # null has no place among numbers
        (["optim.betas=[0.9, 0.999]", "compile=false"], ["old", "several", "sweep/0", "half", "here"]),
        (["strategy.bucket_cap_mb>1"], ["several"]),
        ([f"started>{iso(3 * DAY_S)[:10]}"], ["several", "sweep/0", "here"]),
        (["status=done", "optim.lr<1", "test/acc>0.95"], ["old"]),
    ],
    ids=str,
)
def test_conditions_choose_runs(runs, call, conditions, names):
    assert listed(call, *(word for condition in conditions for word in ("--where", condition))) == names


def test_runs_without_the_key_are_sorted_last_both_ways(runs, call):
    rest = ["sweep/0", "sweep/1", "half", "here"]
    assert listed(call, "--sort", "test/acc") == ["several", "old", *rest]
    assert listed(call, "--sort", "-test/acc") == ["old", "several", *rest]
    assert listed(call, "--sort", "-train/images_per_s")[0] == "old"  # null is no value
    assert listed(call, "--sort=optim.lr") == ["several", "sweep/0", "half", "here", "old", "sweep/1"]


def test_csv_and_json_parse_back_and_a_table_has_the_digits_of_what_was_asked_for(runs, call):
    _, out, _ = call("--sort", "optim.lr")
    assert cells(next(line for line in out.splitlines() if "several" in line))[-2] == "1e-05"
    _, out, _ = call("--json", "--sort", "optim.lr")
    rows = {row["run"]: row for row in json.loads(out)}
    stored = json.loads((runs / "several" / "report.json").read_text())
    assert rows["several"] == stored | {"run": "several", "optim.lr": 1e-5}
    assert rows["sweep/1"] == {"status": "failed", "overrides": "optim.lr=0.1 seed=3", "run": "sweep/1"}
    _, out, _ = call("--csv", "--sort", "optim.lr")
    table = list(csv.DictReader(io.StringIO(out)))
    assert [row["run"] for row in table] == list(rows)
    values = {key: "" if value is None else str(value) for key, value in rows["several"].items()}
    assert table[0] == dict.fromkeys(table[0], "") | values


@pytest.mark.parametrize("content", ["[1]", '{"status": "done"', "\x00\x01", "{}", None])
def test_damaged_files_hide_no_run(runs, call, content):
    report_file = runs / "several" / "report.json"
    if content is None:
        report_file.unlink()
    else:
        report_file.write_text(content)
    (runs / "several" / "config.yaml").write_bytes(b"optim: {lr: [\xff")
    (runs / "here" / "config.yaml").write_text("")
    rows = {row["run"]: row["status"] for row in json.loads(call("--json")[1])}
    assert (len(rows), rows["several"]) == (6, "no report" if content is None else "damaged")
    assert listed(call, "--where", "optim.lr>0") == ["old", "sweep/0", "half"]
    assert "overrides:\n  unknown" in call("show", "several")[1]


def test_show_tells_the_report_the_config_and_the_files(runs, call):
    code, out, _ = call("show", "several")
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == "several:"
    assert {"  status: done", "  world_size: 4", "  test/acc: 0.91", "  train/images_per_s: null"} <= set(lines)
    overrides = lines[lines.index("overrides:") + 1 : lines.index("files:")]
    assert overrides == ["  strategy=ddp", "  optim.lr=1e-5"]
    assert "overrides:\n  none\n" in call("show", "here")[1]
    assert lines[lines.index("files:") + 1 :] == ["  config.yaml", "  report.json"]
    assert call("show", "runs/several/") == (0, out, "")  # as a shell completes it
    (shown,) = json.loads(call("show", "several", "--json")[1])
    assert shown["report"].items() >= json.loads((runs / "several/report.json").read_text()).items()
    assert [shown["run"], *shown] == ["several", "run", "report", "overrides", "files"]
    assert shown["files"] == [line.strip() for line in lines[lines.index("files:") + 1 :]]
    headings = [line for line in call("show", "sweep")[1].splitlines() if not line.startswith(" ")]
    assert headings[::3] == ["sweep/0:", "sweep/1:"]


@pytest.mark.parametrize("options", [["--json"], ["show", "several", "--json"], []])
def test_a_reader_that_ends_first_is_no_error(runs, options):
    """As in `lockstep runs --json | head -1`."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    script = [sys.executable, str(ROOT / "scripts/runs.py"), "--runs-dir", str(runs), *options]
    with os.fdopen(write_end, "wb") as stdout:
        done = subprocess.run(script, stdout=stdout, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_unknown_is_told_with_what_is_near(runs, call):
    for args, told in (
        (["show", "sevral"], "error: sevral: no such run in runs/ (did you mean several?). The latest: "),
        (["--where", "tets/acc>1"], "error: tets/acc is not a key of any run (did you mean test/acc?).\n"),
        (["--sort", "-staretd"], "error: staretd is not a key of any run (did you mean started?).\n"),
        (["--where", "test/acc"], "error: --where test/acc has no comparison. Quote it"),
        (["--runs-dir", "rnus"], "error: rnus/ does not exist."),
        (["--sort", "run", "show", "old"], "error: --sort has no effect on show. Remove it."),
        (["--json", "html"], "error: --json has no effect on html."),
        (["--json", "--csv"], "error: --json and --csv exclude each other."),
    ):
        code, out, err = call(*args)
        assert (code, out, err.startswith(told)) == (2, "", True), err
    assert call("--where", "a=1", "--sort", "b")[2].count("error: ") == 2  # all at once
    (runs / "none").mkdir()
    assert listed(call, "--runs-dir", "runs/none", "--sort", "run") == []
    code, _, err = call("show", "first", "--runs-dir", "runs/none")
    assert (code, "There are no runs." in err) == (2, True)


# --- what to run again


def checkpoint(folder: Path) -> None:
    position = {"optimizer_states": [], "lr_schedulers": [], "callbacks": {"a": 0}, "epoch": 0}
    position |= {"accumulate_grad_batches": 1, "gradient_order": [], "loops": {}}
    content = {
        "global_step": 3,
        "state_dict": {},
        "config": {group: {} for group in GROUPS},
        "pytorch-lightning_version": "2.6.6",
    }
    weights.write(content | position, folder / "checkpoints" / "last.ckpt")


def commands(call, *args: str) -> dict[str, list[str]]:
    """The overrides of each command that was printed, by the run's name; each must be one that composes."""
    code, out, _ = call("failed", *args)
    assert code == 0
    found = {}
    for line in out.splitlines():
        python, script, *overrides = shlex.split(line)
        assert (python, script) == ("lockstep", "train")
        found[str(compose_config("train", overrides).run)] = overrides
    return found


def started(overrides: list[str]) -> Draft:
    """The config with which train.py would begin: what launch/resuming.py makes of the command."""
    return resuming.for_training(Draft(compose_config("train", overrides)), overrides)


def without(cfg: Any, *keys: str) -> dict[str, Any]:
    return {key: value for key, value in plain(cfg).items() if key not in ("resume", "run", *keys)}


@pytest.mark.slow
def test_what_failed_and_what_wrote_nothing_for_long_is_run_again(runs, call):
    write(runs / "stopped", report("interrupted", 0))
    states = ("preempted", "pruned", "running", "done")
    for status in states:
        checkpoint(write(runs / status, report(status, 0)))
    assert list(commands(call)) == ["sweep/0", "sweep/1", "stopped"]
    assert list(commands(call, "sweep")) == ["sweep/0", "sweep/1"]
    place = shutil.copytree(runs, runs.parent / "other place")
    for args in (["failed", "sweep", "--runs-dir", str(place)], ["--runs-dir", str(place), "failed", "sweep"]):
        typed = [shlex.split(line)[2:] for line in call(*args)[1].splitlines()]
        assert [compose_config("train", overrides).runs_dir for overrides in typed] == [str(place)] * 2
    assert commands(call, "old") == {}
    for name in ("here", "sweep/0"):
        checkpoint(runs / name)
    (runs / "here" / "metrics.csv").write_text("")
    for name, minutes in {**dict.fromkeys((*states, "here"), 31), "half": 29}.items():
        written(runs / name, minutes * 60)
    assert sorted(commands(call)) == ["here", "preempted", "running", "stopped", "sweep/0", "sweep/1"]
    half = "# half: its files lack the information to rerun it"  # its report is cut off
    assert half in call("failed", "--stale-min", "28")[1].splitlines()
    os.utime(runs / "here" / "metrics.csv")
    assert "here" not in commands(call)


def test_a_job_of_a_sweep_gets_its_overrides_and_a_run_that_says_too_little_is_a_comment(runs, call):
    write(runs / "lost", {"status": "failed"}, config=False)
    (write(runs / "broken", report("failed", 0)) / "config.yaml").write_text("optim: {")
    comments = [line for line in call("failed")[1].splitlines() if line.startswith("#")]
    assert comments == [f"# {name}: its files lack the information to rerun it" for name in ("broken", "lost")]
    for name in ("broken", "lost"):
        shutil.rmtree(runs / name)
    typed = ["model=timm", "model.name='a b'", "data.mean=[0.1, 0.2]", "+model.x={a: 1}", "~callbacks.throughput"]
    sweeps.record_failure(RunFolder(runs / "sweep" / "2"), ["run=sweep", "resume=auto", "runs_dir=x", *typed])
    write(runs / "sweep" / "3", report("failed", 0, overrides="optim.lr=0.1 seed=3"), "optim.lr=0.1", "seed=3")
    found = commands(call)
    assert found["sweep/2"] == ["run=sweep/2", *typed]  # it never began
    assert found["sweep/3"] == ["run=sweep/3", "resume=auto", "optim.lr=0.1", "seed=3"]


def test_a_run_with_a_checkpoint_needs_nothing_else(runs, call):
    folder = write(runs / "ended", report("failed", 0), "optim.lr=0.5", "strategy=ddp", "trainer.max_epochs=7")
    checkpoint(folder)
    assert commands(call)["ended"] == ["run=ended", "resume=auto"]
    draft = started(["run=ended", "resume=auto"])
    assert draft.resume == "runs/ended/checkpoints/last.ckpt"
    assert without(draft.tree) == without(OmegaConf.load(folder / "config.yaml"))


@pytest.mark.parametrize(
    "overrides",
    [
        ["++trainer.max_time.minutes=5", "trainer.devices=[0,1]", "trainer.precision='16'", "optim.eps=1e-12", "seed=null", "~callbacks.throughput"],
        ["data.root='/with space/and=more'", "data.cache_dir='it\\'s \"quoted\"'", "augment=[light,mixup]", "augment.shift.pixels=2", "callbacks=[default,early_stopping]"],
        pytest.param(["model=timm", "model.name=vit_tiny.augreg", "++model.img.size=3", "strategy=fsdp", "strategy.blocks=[A,B]", "callbacks=[ema]", "callbacks.ema.decay=0.5", "logger=[csv,wandb]", "logger.wandb.tags=[a b,'1',c]"], marks=pytest.mark.slow),
        pytest.param(["experiment=mnist_airbench", "debug=overfit", "augment=strong", "~augment.erase", "init_from=runs/old/checkpoints/last.ckpt", "callbacks=[]", "logger=[]"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_run_without_a_checkpoint_begins_anew_with_its_own_config(runs, call, overrides):
    checkpoint(runs / "old")
    folder = write(runs / "early", report("failed", 0), *overrides)
    command = commands(call)["early"]
    assert command[:2] == ["run=early", "resume=auto"]
    draft, own = started(command), OmegaConf.load(folder / "config.yaml")
    assert draft.resume is None
    assert without(draft.tree) == without(own)
    assert list(draft.get("augment")) == list(own.augment)  # operations run in this order


def test_a_run_that_was_to_go_on_from_another_gets_a_new_name(runs, call):
    """launch/resuming.py refuses resume=<other> in a folder that is taken."""
    checkpoint(runs / "old")
    other = "runs/old/checkpoints/last.ckpt"
    typed = [
        "optim.lr=1e-2",
        "trainer.max_epochs=9",
        "init_from=what/old/began/from.ckpt",
        "experiment=mnist_basic_net",
    ]
    write(runs / "on", report("failed", 0, resumed_from=other), *typed)
    write(runs / "own", report("failed", 0, resumed_from="runs/own/checkpoints/last.ckpt"))
    found = commands(call)
    assert found["on-again"] == ["run=on-again", f"resume={other}", "optim.lr=1e-2", "trainer.max_epochs=9"]
    draft = started(found["on-again"])
    assert (draft.resume, draft.get("optim.lr"), draft.get("trainer.max_epochs")) == (other, 0.01, 9)
    assert found["own"] == ["run=own", "resume=auto"]
    with pytest.raises(UserError, match="is a different run"):
        started(["run=on", *found["on-again"][1:]])


@example("null")
@example("True")
@example("inf")
@example("1e5")
@example("it's \\")
@given(st.text(st.characters(codec="utf-8", exclude_characters="\0")) | st.integers() | st.floats(allow_nan=False) | st.booleans() | st.none())  # fmt: skip
def test_hydra_reads_a_value_back(value):
    typed = ledger.to_hydra([value])
    (back,) = OverridesParser.create().parse_override(f"key={typed}").value()
    back = getattr(back, "text", back)
    assert (type(back), back) == (type(value), value)


def test_from_a_shell_without_torch(runs):
    code = "import runpy, sys; sys.argv[0] = 'runs.py'; sys.modules['torch'] = sys.modules['lightning'] = None\n"
    code += f"runpy.run_path({str(ROOT / 'scripts' / 'runs.py')!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code, "failed"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    again = "lockstep train run=sweep/0 resume=auto", "lockstep train run=sweep/1 optim.lr=0.1 seed=3"
    assert done.stdout.splitlines() == [*again]


@pytest.mark.slow
def test_a_thousand_runs_are_listed_quickly(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "runs" / "r0", report("done", 60, **{"train/steps": 0, "test/acc": 0.9}), "optim.lr=1e-2")
    for i in range(1, 1000):
        shutil.copytree(tmp_path / "runs" / "r0", tmp_path / "runs" / f"r{i}")
    began_s = time.process_time()
    assert len(listed(call, "--where", "optim.lr=0.01", "--where", "train/steps<1")) == 1000
    assert time.process_time() - began_s < 8  # 2 s on a machine with nothing else to do; 20 with OmegaConf
