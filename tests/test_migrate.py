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
    "trainer.log_every_n_steps=1", "trainer.accumulate_grad_batches=1", "loader.batch_size=16", "logger=csv",
)  # fmt: skip
MNIST = ("data.root={mnist}", "data.cache_dir={cache}", "loader.limit_train=48")


def write_activity(root: Path) -> None:
    random, arrays = np.random.default_rng(0), dict[str, np.ndarray]()
    for part, count in (("train", 80), ("test", 20)):
        windows = random.normal(size=(count, 3, 40)).astype(np.float32)
        arrays |= {f"x_{part}": windows, f"y_{part}": np.arange(count) % 4}
    np.savez(root / "activity.npz", **arrays)


DATA |= {"plain-loop": write_activity, "accelerate": write_houses, "transformers-trainer": write_flowers}
TINY = "model.pretrained=false model.name=test_resnet schedule.warmup_steps=0 data.image_size=32 data.cache_dir={cache}"
PAGES = {
    "plain-loop": ("loader.num_workers=0",), "accelerate": ("schedule.warmup_steps=0",), "transformers-trainer": TINY.split(), "lightning-hydra-template": MNIST,
}  # fmt: skip


@pytest.mark.parametrize(("name", "quick"), PAGES.items())
@pytest.mark.filterwarnings("ignore:Attribute 'net' is an instance of `nn.Module`")  # advice to modules of the template
def test_the_example_trains_and_what_was_there_before_is_python(name, quick, tmp_path, monkeypatch, mnist, cache):
    page = Page(name, tuple(each.format(mnist=mnist, cache=cache) for each in quick), folder=FOLDER)
    assert all(ast.parse(content) for language, content in page.blocks if language == "python")
    monkeypatch.chdir(page.write(tmp_path))
    given = [each for each in page.typed[0] if not each.startswith(("run=", "resume="))]
    try:
        report = lockstep.train([*given, *QUICK, *page.quick])
    finally:
        forget()
    assert (report["status"], report["train/steps"]) == ("done", 2)
    assert json.loads(Path("runs/moved/report.json").read_text())[report["monitor"].replace("val/", "test/")] >= 0


def test_every_page_is_tested():
    assert {path.stem for path in FOLDER.glob("*.md")} == PAGES.keys()
