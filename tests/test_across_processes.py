"""The first lines of a run and its report say how far the result depends on the number of processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import thin_project
from in_process import options

import lockstep
from lockstep.training.invariance import ROUNDING, SAME_BITS

pytestmark = pytest.mark.xdist_group("across")
SHORT = ["trainer.max_steps=1", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1"]
OWN = """from torch.nn.functional import cross_entropy

from lockstep.kit.tasks import Classification


class Contrastive(Classification):
    def loss(self, output, batch):
        similar_BB = output @ output.T
        return cross_entropy(similar_BB, batch["target"] % len(similar_BB), reduction="none")


class Announced(Contrastive):
    between_samples = True
"""
RESNET, VIT = (
    f"model=timm model.name={name} data.image_size=32" for name in ("test_resnet", "test_vit +model.img_size=32")
)
DIFFERS, DRAWS = "depends on the number of processes, because", "each process draws its own random numbers in"
QUICK = {  # the default config is in tests/test_strategies_agree.py, more networks are in tests/training/test_invariance.py
    "exact.logical_ranks=2": SAME_BITS,
    "task=mine": f"{DIFFERS} the result of Contrastive (src/mine/__init__.py:7) for a sample",
    "task=mine task._target_=mine.Announced": ROUNDING,
}
SLOW = {
    RESNET: f"{DIFFERS} batch normalisation",
    f"{RESNET} trainer.sync_batchnorm=true": ROUNDING,
    f"{VIT} +model.attn_drop_rate=0.5": f"{DIFFERS} {DRAWS} Attention (timm.",
    f"{VIT} +model.drop_path_rate=0.5": ROUNDING,
}


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Iterator[Path]:
    task = "defaults: [classification]\n_target_: mine.Contrastive\n"
    files = {"src/mine/__init__.py": OWN, "configs/task/mine.yaml": task}
    with thin_project.entered(tmp_path_factory.mktemp("project"), "mine", **files) as root:
        yield root


@pytest.mark.parametrize(
    ("typed", "line"), [*QUICK.items(), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW.items())]
)
def test_the_line_of_a_run(typed, line, project, mnist, cache, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(project)
    report = lockstep.train([f"runs_dir={tmp_path}", "run=a", *options(mnist, cache), *SHORT, *typed.split()])
    assert report["across_processes"].startswith(line)
    assert f"result: {line}" in " ".join(capsys.readouterr().out.split())
    assert line in (tmp_path / "a/report.html").read_text()


@pytest.mark.slow  # compiles
def test_a_compiled_network_is_not_covered(forked_command):
    done = forked_command("train.py", "run=a", *SHORT, "compile=true")
    assert "because a compiled network draws separate random numbers" in done.out, done
