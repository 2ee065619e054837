"""The Lockstep side of each page of docs/migrate works as it is written there: its files make a project, its first command trains."""

import ast
import json
from pathlib import Path

import numpy as np
import pytest
from your_own import DATA, Page, forget, write_flowers, write_houses

import lockstep
from lockstep import ROOT

FOLDER = ROOT / "docs/migrate"
QUICK = (
    "run=moved", "trainer.accelerator=cpu", "trainer.precision=32-true", "trainer.max_epochs=null", "trainer.max_steps=2",
    "trainer.log_every_n_steps=1", "trainer.accumulate_grad_batches=1", "data.batch_size=16", "logger=csv",
)  # fmt: skip
MNIST = ("data.root={mnist}", "data.cache_dir={cache}", "data.limit_train=48")


def write_activity(root: Path) -> None:
    random = np.random.default_rng(0)
    parts = {
        part: (random.normal(size=(n, 3, 40)).astype(np.float32), np.arange(n) % 4)
        for part, n in (("train", 80), ("test", 20))
    }
    np.savez(
        root / "activity.npz", **{f"{k}_{part}": v for part, xy in parts.items() for k, v in zip("xy", xy, strict=True)}
    )


DATA |= {"plain-loop": write_activity, "accelerate": write_houses, "transformers-trainer": write_flowers}
PAGES = [
    Page("plain-loop", ("data.num_workers=0",), folder=FOLDER),
    Page("accelerate", ("schedule.warmup_steps=0",), folder=FOLDER),
    Page(
        "transformers-trainer",
        (
            "model.pretrained=false",
            "model.name=test_resnet",
            "schedule.warmup_steps=0",
            "data.image_size=32",
            "data.cache_dir={cache}",
        ),
        folder=FOLDER,
    ),
    Page("lightning-hydra-template", MNIST, folder=FOLDER),
]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@every_page
@pytest.mark.filterwarnings(
    "ignore:Attribute 'net' is an instance of `nn.Module`"  # Lightning's advice to modules of the template
)
def test_the_example_trains(page, tmp_path, monkeypatch, mnist, cache):
    monkeypatch.chdir(page.write(tmp_path))
    given = [each for each in page.typed[0] if not each.startswith(("run=", "resume="))]
    quick = [each.format(mnist=mnist, cache=cache) for each in page.quick]
    try:
        report = lockstep.train([*given, *QUICK, *quick])
    finally:
        forget()
    assert (report["status"], report["train/steps"]) == ("done", 2)
    assert json.loads(Path("runs/moved/report.json").read_text())[report["monitor"].replace("val/", "test/")] >= 0


@every_page
def test_what_was_there_before_is_python(page):
    blocks = [content for language, content in page.blocks if language == "python"]
    assert all(ast.parse(block) for block in blocks)


def test_every_page_is_tested():
    assert {path.stem for path in FOLDER.glob("*.md")} == {page.name for page in PAGES}
