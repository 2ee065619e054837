"""Runs and checkpoints of strangers are data: using one runs no code, and writes nothing but what the command says."""

import os
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from in_process import SMALL
from omegaconf import OmegaConf

import lockstep
from lockstep.errors import UserError
from lockstep.extras.export import export
from lockstep.extras.study import write_plots
from lockstep.launch import sweeps
from lockstep.launch.exits import exit_code
from lockstep.reporting import console
from lockstep.strategies.base import by_index

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
    if key in ("callbacks", "logger"):
        node = {"x": node}
    OmegaConf.update(cfg, key, node, merge=False)
    OmegaConf.save(cfg, "runs/a/config.yaml")
    content = torch.load("runs/a/checkpoints/last.ckpt", weights_only=True)
    torch.save({**content, "config": OmegaConf.to_container(cfg)}, "moved.ckpt")


SLOW = [("model", "import"), ("task", "module"), ("data", "pickle")]


@pytest.mark.parametrize(
    ("key", "way"),
    [("model", "nested"), ("callbacks", "pickle"), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_a_strangers_run_runs_no_code(key, way, evil, monkeypatch):
    monkeypatch.syspath_prepend(".")
    Path("stranger.py").write_text("import os\nos.mkdir('harmed')\n")
    node = evil[way]
    own = {"task": {"monitor": "val/loss", "mode": "min", "metrics": {}}, "data": {"batch_size": 48}}
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
    built = {"model": [*uses], "task": [*uses][:5], "data": [*uses][:4]}  # the others are made by a training alone
    for name in built.get(key, ["resume"]):
        with pytest.raises(UserError, match=r"may not be named|cannot be changed"):
            uses[name]()
    assert not Path("harmed").exists()


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_run_whose_checkpoints_are_all_damaged_is_left_alone(run_a):
    before = {path: path.read_bytes() for path in Path("runs/a").iterdir() if path.is_file()}
    for path in Path("runs/a/checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"no checkpoint .* damaged, or something else: best-step-12\.ckpt, last\.ckpt"):
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
    (state,) = [state for state in content["callbacks"].values() if "versions" in state]
    state["versions"]["torch"] = "1.0"
    content["network"]["image_size"] = 14
    torch.save(content, "runs/a/checkpoints/last.ckpt")
    options = ["trainer.max_steps=13", "trainer.max_epochs=2", "model.dropout_fc=0.25", "data.mean=[0.2]", *SMALL[1:]]
    lockstep.train(["run=a", "resume=auto", *options])
    lines = capsys.readouterr().out.splitlines()
    told = [line.partition(": ")[2] for line in lines if line.startswith("changed since")]
    assert told == [
        "model.dropout_fc was 0.5 and is 0.25",
        "data.mean was [0.1307] and is [0.2]",
        "the network's argument image_size was 14 and is 12",
        f"torch was 1.0 and is {torch.__version__.partition('+')[0]}",
    ]


# --- what is shown ---------------------------------------------------------------------------------------------------

NAMES = ["[/b]x", "a[red]b", "\x1b[31mred\x1b]0;title\x07", ":smile:", "\u202eright to left"]


@pytest.mark.parametrize("name", NAMES)
def test_names_reach_the_terminal_as_text(name, capsys, monkeypatch):
    monkeypatch.setattr(console.out, "width", 200)
    console.say(name)
    console.metrics_table([("report", name), (name, "")])
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
