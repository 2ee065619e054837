"""The first lines of a run and its report say how far the result depends on the number of processes."""

from pathlib import Path

import pytest

from lockstep.training.invariance import ROUNDING, SAME_BITS

pytestmark = pytest.mark.xdist_group("across")
SHORT = ["trainer.max_steps=1", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1"]
RESNET = ["model=timm", "model.name=test_resnet", "data.image_size=32"]
CASES = {
    "default": ([], ROUNDING),
    "exact": (["exact.shards=2"], SAME_BITS),
    "batch norm": (RESNET, "differs with the number of processes, because batch normalisation"),
    "synchronised": ([*RESNET, "trainer.sync_batchnorm=true"], ROUNDING),
    "attention": (
        ["model=timm", "model.name=test_vit", "data.image_size=32", "+model.img_size=32", "+model.attn_drop_rate=0.5"],
        "differs with the number of processes, because each process draws its own random numbers in Attention (timm.",
    ),
    "drop path": (
        ["model=timm", "model.name=test_vit", "data.image_size=32", "+model.img_size=32", "+model.drop_path_rate=0.5"],
        ROUNDING,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_line_of_a_run(name, train, capsys):
    more, line = CASES[name]
    report = train("run=a", *SHORT, *more)
    assert report["across_processes"].startswith(line)
    assert f"result: {line}" in " ".join(capsys.readouterr().out.split())
    assert line in Path("runs/a/report.html").read_text()


@pytest.mark.slow  # compiles
def test_a_compiled_network_is_not_covered(train):
    report = train("run=a", *SHORT, "compile=true")
    assert "because a compiled network draws random numbers" in report["across_processes"]
