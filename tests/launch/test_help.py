"""`--help` and the completion of keys."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from terminal import Terminal

from lockstep import ROOT
from lockstep.config import compose
from lockstep.config.formatting import plain
from lockstep.config.schema import GROUPS, RECIPES
from lockstep.errors import UserError
from lockstep.launch import help, local

LIMIT_S = 25.0


def shown(*argv: str, command: str = "train") -> str:
    script = local.script(command)
    return help.text(local.load(script), [*argv, "--help"])


def test_help_of_train_shows_every_key_with_its_default_comment_and_example() -> None:
    text = " ".join(shown().split())
    assert "optim.lr=0.001 learning rate of a step with loader.batch_size samples [a number of at least 0; for" in text
    assert f"strategy {', '.join(compose.options('strategy'))}" in text and "optim=adamw: torch.optim.AdamW" in text
    assert "loader.batch_size=64 the GLOBAL batch" in text
    assert "data.eval_size=null image_size in evaluation" in text  # data=mnist has it from the option that it builds on
    for key in compose.dotted(plain(compose.compose_config("train", []))):
        if not any(f".{part}." in f".{key}." for part in help.SET_BY_CHOICE) and "callbacks" not in key:
            assert f" {key}=" in text or key == "augment"


@pytest.mark.parametrize(("command", "own"), [("eval", "checkpoint=null"), ("predict", "top_k=1")])
def test_help_of_evaluations_shows_their_own_keys_and_the_examples_of_the_script(command: str, own: str) -> None:
    text = shown(command=command)
    assert own in text and "trainer.devices" in text and "optim.lr" not in text
    assert f"python {command}.py run=first " in text


def test_help_of_groups_and_keys_describes_them_alone_in_lines_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = shown("augment", "optim=sgd", "optim", "loader.fold")
    assert [line for line in text.splitlines() if len(line) > 80] == []
    text = " ".join(text.split())
    assert "augment.rotate.degrees=15 maximum angle, in either direction" in text
    assert "mixup Blends each sample with its neighbour" in text and "loader.fold=0 which fold" in text
    assert "optim=sgd: torch.optim.SGD" in text and "optim.momentum=0.9" in text
    assert "trainer.max_steps" not in text
    for topic, key in (("optin", "optim"), ("trainer.max_epoch", "trainer.max_epochs")):
        with pytest.raises(UserError, match=rf"--help {topic}: there is no such group or key \(did you mean {key}\?\)"):
            shown(topic)


def test_each_key_of_the_shipped_configs_has_a_comment() -> None:
    chosen = (*help.SET_BY_CHOICE, "defaults", "hydra", "name")
    for group in ["", *sorted(set(GROUPS) - set(RECIPES))]:
        configs = [f"{group}/{option}" for option in compose.options(group)] if group else ["lockstep", "predict"]
        comments = {key for config in configs for key in help.comments_of(config)}
        nodes = [yaml.safe_load(compose.config_file(config).read_bytes()) or {} for config in configs]
        keys = {key for node in nodes for key in compose.dotted(node, group)} - set(GROUPS)
        assert {key for key in keys - comments if not any(f".{part}." in f".{key}." for part in chosen)} == set()


SHELLS = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}
COMPLETED = {"python train.py optim=ada": "optim=adam", "lockstep train trainer.max_t": "trainer.max_time="}


@pytest.mark.parametrize("shell", ["bash", pytest.param("zsh", marks=pytest.mark.slow)])
def test_tab_completes_in_a_terminal(shell: str, tmp_path: Path) -> None:
    if not shutil.which(shell):
        pytest.skip(f"no {shell}")
    script = tmp_path / "completion.sh"
    script.write_bytes(subprocess.check_output([sys.executable, "-m", "lockstep", "--completion"]))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    terminal = Terminal(SHELLS[shell], ROOT, PATH=path, TERM="dumb", PS1="$ ", HOME=str(tmp_path))
    try:
        terminal.enter(f". {script}; echo re''ady\n")
        terminal.until("ready\n", LIMIT_S)
        for line, completed in COMPLETED.items():
            terminal.enter(f"\x15{line}\t")  # after an empty line
            terminal.until(completed, LIMIT_S)
    finally:
        terminal.close()
