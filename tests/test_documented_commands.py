"""The commands of docs/commands.md and the README run, from top to bottom, in one folder: each with small data and two steps."""

import io
import shutil
import sys
from pathlib import Path

import pytest
from pages import Command, Text
from PIL import Image

from lockstep import ROOT

PAGES = ("docs/commands.md", "README.md")
# Another launcher, a network from the Hub, a minute of compiling, or what makes no run: other tests have them.
ELSEWHERE = ("torchrun", "sbatch", "pretrained=true", "compile=true", "new_project", "--help", "data.root=")
SMALLER = {
    "data=cifar10": "data=mnist", "data.image_size=224": "data.image_size=32", "model.name=convnext_tiny": "model.name=test_resnet",
    "data.batch_size=4096": "data.batch_size=64", "hydra.sweeper.n_trials=30": "hydra.sweeper.n_trials=2",
    "schedule.warmup_steps=100": "schedule.warmup_steps=1", "trainer.devices=4": "trainer.devices=2",
    "trainer.max_epochs=10": "trainer.max_epochs=2", "trainer.max_epochs=20": "trainer.max_epochs=3",
}  # fmt: skip
SHORT = ["trainer.accelerator=cpu", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1"]  # fmt: skip
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
    elif name in ("show_batch.py", "lr_range.py"):
        args += [*data, "trainer.accelerator=cpu", *["--steps", "12"] * (name == "lr_range.py")]
    return args


@pytest.mark.full
def test_the_commands_run_one_after_the_other(forked_command, tmp_path, mnist, cache):
    folder, data = forked_command.folder, [f"data.root={mnist}", f"data.cache_dir={cache}", "data.limit_train=128"]
    (folder / "x").mkdir()  # <folder of images>
    for i in range(3):
        Image.new("L", (28, 28), 80 * i).save(folder / f"x/{i}.png")

    def run(script: Path, *args: str) -> tuple[int, str]:
        with (tmp_path / "out.txt").open("w+") as out:
            given = [sys.executable, str(script), *args]
            code = forked_command.popen(given, cwd=folder, stdout=out, stderr=out, start_new_session=True).wait(600)
            out.seek(io.SEEK_SET)
            return code, out.read()

    assert run(ROOT / "train.py", "run=second", *data, *SHORT)[0] == 0  # which the page compares with the first
    found = [each for page in PAGES for each in Text(ROOT / page).commands if each.script and each.args]
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
