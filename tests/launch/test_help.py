"""`--help` and the completion of keys."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep import ROOT
from lockstep.config import compose
from lockstep.config.schema import GROUPS, RECIPES
from lockstep.errors import UserError
from lockstep.launch import help, local

LIMIT_S = 25.0


def shown(*argv: str, command: str = "train") -> str:
    script = local.script(command)
    return help.text(local.Job(command, script, local.load(script)), [*argv, "--help"])


def test_help_of_train_shows_every_key_with_its_default_comment_and_example() -> None:
    text = " ".join(shown().split())
    assert (
        "optim.lr=0.001 learning rate of a step with data.batch_size samples [a number of at least 0; for example 1e-3]"
        in text
    )
    assert f"strategy {', '.join(compose.options('strategy'))}" in text and "optim=adamw: torch.optim.AdamW" in text
    for key in compose.dotted(compose.plain(compose.compose_config("train", []))):
        if not any(f".{part}." in f".{key}." for part in help.SET_BY_CHOICE) and "callbacks" not in key:
            assert f" {key}=" in text or key == "augment"


@pytest.mark.parametrize(
    ("command", "own", "of_train"), [("eval", "checkpoint=null", "optim.lr"), ("predict", "top_k=1", "optim.lr")]
)
def test_help_of_evaluations_shows_their_own_keys(command: str, own: str, of_train: str) -> None:
    text = shown(command=command)
    assert own in text and "trainer.devices=" in text and of_train not in text


def test_help_of_a_group_describes_its_options() -> None:
    text = " ".join(shown("augment", "optim=sgd", "optim").split())
    assert (
        "augment.rotate.degrees=15 at most, in either direction" in text
        and "mixup Each sample with its neighbour" in text
    )
    assert "optim=sgd: torch.optim.SGD" in text and "optim.momentum=0.9" in text
    assert "trainer.max_steps" not in text


def test_help_of_a_key_and_of_a_name_that_does_not_exist() -> None:
    assert shown("data.fold").split()[:2] == ["data.fold=0", "which"]
    with pytest.raises(UserError, match=r"--help optin: .*did you mean optim"):
        shown("optin")


@pytest.mark.parametrize("base", ["ddp", "/strategy/ddp"])
def test_a_key_of_an_option_that_builds_on_another_has_its_comment(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = "defaults: [BASE, _self_]\ntimeout_s: 600   # less\n".replace("BASE", base)
    read = help.configs.config_file
    gossip = type("File", (), {"read_text": staticmethod(lambda: written)})
    monkeypatch.setattr(help.configs, "config_file", lambda name: gossip if name == "strategy/gossip" else read(name))
    found = help.comments_of("strategy/gossip")
    assert found["strategy.timeout_s"] == "less" and found["strategy.static_graph"].startswith("true: every step")


def test_lines_fit_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    wide = [line for line in shown("trainer", "data", "checkpoint", "exact").splitlines() if len(line) > 80]
    assert wide == []


def test_each_key_of_the_shipped_configs_has_a_comment() -> None:
    configs = [f"{group}/{option}" for group in set(GROUPS) - set(RECIPES) for option in compose.options(group)]
    for config in [*configs, "lockstep", "predict"]:
        group = config.rpartition("/")[0]
        for key in compose.dotted(help.option_node(config), group):
            chosen = (
                any(f".{part}." in f".{key}." for part in (*help.SET_BY_CHOICE, "defaults", "hydra")) or key in GROUPS
            )
            assert chosen or key.endswith(".name") or key in help.comments_of(config), f"{config}: {key}"


SHELLS = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("line", "completed"),
    [("python train.py optim=ada", "optim=adam"), ("lockstep train trainer.max_t", "trainer.max_time=")],
)
def test_tab_completes_in_a_terminal(shell: str, line: str, completed: str, tmp_path: Path) -> None:
    if not shutil.which(shell):
        pytest.skip(f"no {shell}")
    script = tmp_path / "completion.sh"
    script.write_text(
        subprocess.run(
            [sys.executable, "-m", "lockstep", "--completion"], capture_output=True, text=True, check=True
        ).stdout
    )
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TERM": "dumb",
        "PS1": "$ ",
        "HOME": str(tmp_path),
    }
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execvpe(SHELLS[shell][0], SHELLS[shell], env)
    try:
        os.write(terminal, f". {script}; echo re''ady\n".encode())
        read_until(terminal, lambda text: "ready\r\n" in text)
        os.write(terminal, f"{line}\t".encode())
        read_until(terminal, lambda text: completed in text)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(terminal)


def read_until(terminal: int, done: Callable[[str], bool]) -> None:
    text, deadline = "", time.monotonic() + LIMIT_S
    while not done(text):
        assert select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0], text
        text += os.read(terminal, 4096).decode(errors="replace").replace("\a", "")
