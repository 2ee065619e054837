"""Poor environments: a run works in them, or says what it lacks. It imports nothing that it has no use for."""

import os
import re
import shlex
import subprocess
import sys

import pytest

from lockstep import ROOT

RUN = ["trainer.max_steps=2", "trainer.accelerator=cpu", "data.image_size=12", "trainer.limit_val_batches=1",
       "loader.batch_size=64", "loader.num_workers=2", "runs_dir=runs", "run=a", "data.cache_dir=cache"]  # fmt: skip
BARE = {"PATH": os.environ["PATH"], "TERM": "dumb", "LANG": "C", "LC_ALL": "C", "TMPDIR": "/proc"}  # no HOME


@pytest.mark.slow
def test_a_run_works_with_little_of_everything(tmp_path, mnist):
    command = shlex.join([sys.executable, str(ROOT / "train.py"), f"data.root={mnist}", *RUN])
    done = subprocess.run(
        ["sh", "-c", f"ulimit -n 64 && exec {command}"],
        cwd=tmp_path,
        env=BARE,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/a/report.html").is_file()
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_account_of_whoever_tests_decides_nothing(tmp_path):
    """A login and settings of W&B in the home of the account are not seen by a test, nor are variables of the client."""
    (tmp_path / ".netrc").write_text(f"machine api.wandb.ai\n  login someone\n  password {'1' * 40}\n")
    (tmp_path / ".config/wandb").mkdir(parents=True)
    (tmp_path / ".config/wandb/settings").write_text("[default]\nbase_url = http://127.0.0.1:9\n")
    account = {
        "HOME": str(tmp_path),
        "NETRC": str(tmp_path / ".netrc"),
        "WANDB_API_KEY": "2" * 40,
        "WANDB_BASE_URL": "http://127.0.0.1:9",
    }
    looked = "import conftest, os; from requests.utils import get_netrc_auth; from wandb import Settings; "
    looked += "print(os.environ.get('WANDB_API_KEY'), get_netrc_auth('https://api.wandb.ai'), '127.0.0.1' in Settings().base_url); conftest.pytest_unconfigure()"
    alone = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    command, tests = [sys.executable, "-c", looked], ROOT / "tests"
    done = subprocess.run(command, cwd=tests, env={**alone, **account}, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["None None False"], done.stderr


# Packages that a run with BasicNet, metrics.csv and no sweep has no use for. Not PIL: torchvision has the types of its annotations.
HEAVY = {
    "timm", "wandb", "tensorboard", "matplotlib", "transformers", "pandas", "plotly", "optuna", "sklearn", "scipy", "submitit",
    "mlxtend", "sqlalchemy", "huggingface_hub",
}  # fmt: skip


@pytest.mark.slow
def test_a_default_run_imports_nothing_heavy_that_it_does_not_use(tmp_path, mnist, cache):
    options = [f"data.root={mnist}", f"data.cache_dir={cache}", "trainer.max_steps=2", "trainer.limit_test_batches=1"]
    command = [sys.executable, "-X", "importtime", str(ROOT / "train.py"), "run=a", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300)
    packages = set(re.findall(r"^import time:.*\| +(\w+)", done.stderr, re.MULTILINE))
    assert {"torch", "lightning", "hydra", "lockstep"} <= packages
    assert not packages & HEAVY
