"""Runs and checkpoints of strangers are data: using one runs no code, and writes nothing but what the command says."""

import os
from pathlib import Path

import pytest
import torch
from in_process import SMALL
from omegaconf import OmegaConf

import lockstep
from lockstep.errors import UserError
from lockstep.export.folder import export

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
        "module": {"_target_": "lockstep.export.exported.load", "folder": "exported"},
        "import": {"_target_": "stranger.Net"},
        "nested": {"_target_": "torch.nn.Sequential", "_args_": [{"_target_": "lockstep.export.exported.load", "folder": "exported"}]},
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


@pytest.mark.parametrize(
    ("key", "way"),
    [
        ("model", "nested"),
        ("callbacks", "pickle"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("model", "import"), ("task", "module"), ("data", "pickle"))
        ),
    ],
)
def test_a_strangers_run_runs_no_code(key, way, evil, monkeypatch):
    monkeypatch.syspath_prepend(".")
    Path("stranger.py").write_text("import os\nos.mkdir('harmed')\n")
    node = evil[way]
    own = {"task": {"monitor": "val/loss", "mode": "min", "metrics": {}}, "data": {"batch_size": 48}}
    change(key, {**node, **own.get(key, {})})
    uses = {
        "resume": lambda: lockstep.train(["run=a", "resume=auto", "trainer.max_epochs=2", *SMALL[1:]]),
        "run": lambda: lockstep.evaluate(["run=a", *SMALL[1:]]),
        "checkpoint": lambda: lockstep.evaluate(["checkpoint=moved.ckpt", *SMALL[1:]]),
        "load_model": lambda: lockstep.load_model("moved.ckpt"),
        "export": lambda: export(Path("moved.ckpt"), Path("out")),
    }
    needed = {"resume": True, "run": key in ("model", "task", "data"), "checkpoint": key in ("model", "task", "data")}
    needed |= {"load_model": key == "model", "export": key in ("model", "task")}
    for name in [name for name, needs in needed.items() if needs]:
        with pytest.raises(UserError, match="may not be named|cannot be changed"):
            uses[name]()
    assert not Path("harmed").exists()
