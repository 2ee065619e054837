"""`--help` and the completion of keys."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
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
    assert "optim.lr=0.001 learning rate of a step with data.batch_size samples [a number of at least 0; for" in text
    assert f"strategy {', '.join(compose.options('strategy'))}" in text and "optim=adamw: torch.optim.AdamW" in text
    assert "data.batch_size=64 the GLOBAL batch" in text  # data=mnist has it from the option that it builds on
    for key in compose.dotted(compose.plain(compose.compose_config("train", []))):
        if not any(f".{part}." in f".{key}." for part in help.SET_BY_CHOICE) and "callbacks" not in key:
            assert f" {key}=" in text or key == "augment"


@pytest.mark.parametrize(("command", "own"), [("eval", "checkpoint=null"), ("predict", "top_k=1")])
def test_help_of_evaluations_shows_their_own_keys_and_the_examples_of_the_script(command: str, own: str) -> None:
    text = shown(command=command)
    assert own in text and "trainer.devices" in text and "optim.lr" not in text
    assert f"python {command}.py run=first " in text


def test_help_of_groups_and_keys_describes_them_alone_in_lines_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = shown("augment", "optim=sgd", "optim", "data.fold")
    assert [line for line in text.splitlines() if len(line) > 80] == []
    text = " ".join(text.split())
    assert "augment.rotate.degrees=15 at most, in either direction" in text
    assert "mixup Each sample with its neighbour" in text and "data.fold=0 which of them" in text
    assert "optim=sgd: torch.optim.SGD" in text and "optim.momentum=0.9" in text
    assert "trainer.max_steps" not in text
    with pytest.raises(UserError, match=r"--help optin: .*did you mean optim"):
        shown("optin")


@pytest.mark.parametrize("group", ["", *sorted(set(GROUPS) - set(RECIPES))])
def test_each_key_of_the_shipped_configs_has_a_comment(group: str) -> None:
    configs = [f"{group}/{option}" for option in compose.options(group)] if group else ["lockstep", "predict"]
    comments = {key for config in configs for key in help.comments_of(config)}
    keys = {key for config in configs for key in compose.dotted(help.option_node(config), group)} - set(GROUPS)
    chosen = (*help.SET_BY_CHOICE, "defaults", "hydra", "name")
    assert {key for key in keys - comments if not any(f".{part}." in f".{key}." for part in chosen)} == set()


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
    script.write_bytes(subprocess.check_output([sys.executable, "-m", "lockstep", "--completion"]))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        env = {**os.environ, "PATH": path, "TERM": "dumb", "PS1": "$ ", "HOME": str(tmp_path)}
        os.execvpe(SHELLS[shell][0], SHELLS[shell], env)
    try:
        for typed, expected in ((f". {script}; echo re''ady\n", "ready\r\n"), (f"{line}\t", completed)):
            os.write(terminal, typed.encode())
            read, deadline = "", time.monotonic() + LIMIT_S
            while expected not in read:
                assert select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0], read
                read += os.read(terminal, 4096).decode(errors="replace").replace("\a", "")
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(terminal)
