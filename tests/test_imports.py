"""What a command imports: nothing that it has no use for."""

import re
import subprocess
import sys

import pytest

from lockstep import ROOT

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
