"""What docs/your-own says works as it is written there, touches no file of Lockstep's, and keeps every promise."""

import io
import json
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from your_own import FOLDER, Page, forget, samples_seen

import lockstep
from lockstep.checkpoints import finding
from lockstep.errors import OutOfMemory, RunFailed, UserError
from lockstep.extras import comparison, exported
from lockstep.extras.export import export

TWO = ("strategy=ddp", "trainer.devices=2")
SHARDED = ("strategy=fsdp", "trainer.devices=2")
QUICK = (
    "trainer.accelerator=cpu", "trainer.precision=32-true", "trainer.max_epochs=null", "trainer.max_steps=8",
    "trainer.log_every_n_steps=1", "checkpoint.every_n_steps=2", "optim=sgd", "optim.lr=0.02", "data.batch_size=8", "data.limit_train=48",
    "+callbacks.witness._target_=witness.Witness",
)  # fmt: skip
KILLED_AT = 5
MNIST = ("data.root={mnist}", "data.cache_dir={cache}")
PAGES = [
    Page("folder", ("data.image_size=16", "data.cache_dir={cache}")),
    Page("model", MNIST),
    Page("loss", MNIST, command=1),
    Page("metric", MNIST),
    Page("panel", MNIST),
    Page("multilabel", ("data.image_size=16", "data.cache_dir={cache}")),
    Page("regression", ("model.width=8",)),
    Page("segmentation", ("data.count=70", "data.image_size=16", "model.width=4")),
    Page("language-model", ("model.width=16", "model.dropout=0", "data.sequence_length=16")),
    Page("task", ("model.width=8", *MNIST), generated=True),
    Page("contrastive", ("model.width=8", "data.eval_batch_size=50", *MNIST), generated=True),
    Page(
        "detection",
        ("model.width=8", "data.count=70", "data.image_size=32", "trainer.check_val_every_n_epoch=1"),
        generated=True,
    ),
]
ELSEWHERE = {"lightning-module"}  # pages with a test of their own
QUICKEST = "segmentation"  # of those with a task, data and a network of their own


@dataclass(frozen=True)
class Runs:
    page: Page
    reports: dict[str, dict]
    evaluation: dict
    printed: str  # by the run with one process

    def weights(self, run: str) -> torch.Tensor:
        """All of them as one vector, from the checkpoint that was tested."""
        path = Path("runs", run, self.reports[run]["checkpoint"])
        state = torch.load(path, weights_only=True, map_location="cpu")["state_dict"]
        return torch.cat([value.double().flatten() for value in state.values()])

    def samples(self, run: str) -> dict[int, list[float]]:
        return samples_seen(Path("runs", run))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            page,
            id=page.name,
            marks=[pytest.mark.xdist_group(page.name), *([pytest.mark.slow] * (page.name != QUICKEST))],
        )
        for page in PAGES
    ],
)
def runs(request, tmp_path_factory, forked, mnist, cache) -> Iterator[Runs]:
    """The page's command, alone, as two processes, as two that shard the network, and as two that are killed and go on; and an evaluation."""
    page: Page = request.param
    quick = [text.format(mnist=mnist, cache=cache) for text in page.quick]
    common = [*page.typed[page.command], *QUICK, *quick]
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp(page.name)
        patch.chdir(page.write_in_generated(folder) if page.generated else page.write(folder))
        with redirect_stdout(io.StringIO()) as printed:
            reports = {"single": lockstep.train(["run=single", *common])}
        reports["ddp"] = lockstep.train(["run=ddp", *TWO, *common])
        reports["fsdp"] = lockstep.train(["run=fsdp", *SHARDED, *common])
        with pytest.raises((RunFailed, OutOfMemory)):  # which is what a SIGKILL looks like
            lockstep.train(["run=killed", *TWO, *common, f"+callbacks.witness.kill_at={KILLED_AT}"])
        reports["killed"] = lockstep.train(
            ["run=killed", "resume=auto", *TWO, *common, "+callbacks.witness.kill_at=null"]
        )
        evaluation = lockstep.evaluate(["run=ddp", "trainer.accelerator=cpu"])
        yield Runs(page, reports, evaluation, printed.getvalue())
    forget()


# --- the files ---


def files(page: Page, ending: str) -> list[str]:
    return [name for name in page.files if name.endswith(ending)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_needs_few_files_and_none_of_locksteps(page):
    assert (len(files(page, ".py")) <= 2, len(files(page, ".yaml")) <= 1) == (True, True)
    assert all(name.startswith(("src/mywork/", "configs/")) for name in page.files)
    assert not [name for name in page.files if (lockstep.ROOT / name).exists()]


def test_every_page_is_tested_and_the_index_has_its_lines():
    names = {path.stem for path in FOLDER.glob("*.md")} - {"README"}
    assert names - ELSEWHERE == {page.name for page in PAGES}
    rows = [re.sub(r"\) \(.*?\) ", ") ", line) for line in (FOLDER / "README.md").read_text().splitlines()]
    for page in map(Page, names):
        title = page.text.splitlines()[0].removeprefix("# ")
        assert f"| [{title}]({page.name}.md) | {page.lines} |" in rows
        links = re.findall(r"\]\(([\w-]+\.md)\)", page.text)
        assert [link for link in links if not (FOLDER / link).is_file()] == []


def test_a_key_that_the_class_does_not_have_is_refused(tmp_path, monkeypatch, mnist, cache):
    page = PAGES[1]
    monkeypatch.chdir(page.write(tmp_path))
    with pytest.raises(UserError) as refused:
        lockstep.train([*page.typed[1], f"data.root={mnist}", f"data.cache_dir={cache}"])
    assert f"error: {refused.value}" in page.text
    assert not Path("runs").exists()
    forget()


# --- the promises ---


def test_a_run_prints_what_the_page_shows(runs):
    """Its lines, whatever their numbers."""

    def words(text: str) -> set[str]:
        rows = re.findall(r"^│ (\S.*?) +│", text, re.MULTILINE)
        plans = re.findall(r"^\S+: (\S+) \(.*? · (\S+) (?:from|\()", text, re.MULTILINE)
        return {*rows, *(word for plan in plans for word in plan)}

    shown = words(runs.page.text)
    assert len(shown) >= 3
    assert shown <= words(runs.printed)


def test_two_processes_see_the_batches_of_one(runs):
    seen = runs.samples("single")
    assert (len(seen), {len(samples) for samples in seen.values()}) == (8, {8})
    assert runs.samples("ddp") == runs.samples("fsdp") == seen


def test_two_processes_find_the_weights_of_one(runs):
    single = runs.weights("single")
    for pair in ("ddp", "fsdp"):
        assert float((runs.weights(pair) - single).norm() / single.norm()) < 1e-6
        assert runs.reports[pair]["test/loss"] == pytest.approx(runs.reports["single"]["test/loss"], rel=1e-5)


def test_a_killed_run_that_is_typed_again_ends_bit_identical(runs):
    assert runs.reports["killed"]["resumed_from"].endswith("last.ckpt")
    assert runs.samples("killed").keys() == runs.samples("ddp").keys()
    found = comparison.compare(
        *(comparison.find(run, Path("runs")) for run in ("ddp", "killed")), exact=True, tolerance=0
    )
    assert {name: found[name] for name in ("log", "metrics", "weights")} == {"log": [], "metrics": [], "weights": []}


def test_an_evaluation_repeats_the_figures(runs):
    expected = {name: value for name, value in runs.reports["ddp"].items() if name.startswith("test/")}
    found = {name: value for name, value in runs.evaluation.items() if name.startswith("test/")}
    assert len(expected) > 2
    assert found == pytest.approx(expected, rel=1e-6)


PREDICTED = {
    "segmentation": "mask",
    "multilabel": "labels",
    "regression": "price",
    "language-model": "token",
    "contrastive": "similarity",
    "detection": "boxes",
}


def test_a_prediction_has_a_row_for_each_test_sample_from_one_process_and_from_two(runs, tmp_path):
    asked = ["run=ddp", "input=test", "trainer.accelerator=cpu"]
    tables = []
    for name, more in {"one": (), "two": TWO}.items():
        lockstep.predict([*asked, f"output={tmp_path}/{name}.jsonl", *more])
        tables.append([json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()])
    one, two = tables
    assert [row["index"] for row in one] == [row["index"] for row in two] == list(range(runs.evaluation["test/count"]))
    column = PREDICTED.get(runs.page.name, "class")
    number = (
        column if runs.page.name == "contrastive" else "loss"
    )  # whose loss depends on the other samples of its batch
    assert {column, number} <= one[0].keys()
    for a, b in zip(one, two, strict=True):
        assert a[number] == pytest.approx(b[number], rel=1e-4, abs=1e-6)
    if column == "mask":
        for row, other in zip(one, two, strict=True):
            masks = [np.asarray(Image.open(tmp_path / each["mask"])) for each in (row, other)]
            assert masks[0].shape == (16, 16)
            assert (masks[0] == masks[1]).mean() > 0.99


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch.onnx
def test_masks_are_augmented_predicted_for_files_and_exported(runs, tmp_path):
    """What the page of segmentation says to type after training, on photos of other sizes."""
    if runs.page.name != "segmentation":
        pytest.skip("it is about masks")
    typed = [*runs.page.typed[1], *QUICK, *runs.page.quick]
    lockstep.train(typed)
    (tmp_path / "photos").mkdir()
    for i, size in enumerate([(20, 31), (16, 16), (50, 12)]):
        Image.effect_noise(size, 90).save(tmp_path / f"photos/{i}.png")
    asked = [f"input={tmp_path}/photos", "gallery=true", f"output={tmp_path}/table.jsonl", "trainer.accelerator=cpu"]
    lockstep.predict(["run=light", *asked])
    rows = [json.loads(line) for line in (tmp_path / "table.jsonl").read_text().splitlines()]
    for row in rows:
        with Image.open(row["path"]) as image, Image.open(tmp_path / row["mask"]) as mask:
            assert (mask.mode, mask.size) == ("L", image.size)
    drawn = re.findall(r'src="data:image/png;base64,([^"]+)"', (tmp_path / "table.jsonl.html").read_text())
    assert len(drawn) == len(rows) == 3
    made = export(finding.tested_checkpoint("runs/light", "export"), tmp_path / "exported", ["onnx"])
    for row, other in zip(exported.load(made).predict_files(row["path"] for row in rows), rows, strict=True):
        with Image.open(tmp_path / other["mask"]) as mask:
            assert (np.asarray(row["mask"]) == np.asarray(mask)).mean() > 0.99


def test_the_monitored_figure_chooses_the_checkpoint(runs):
    report = runs.reports["single"]
    assert report["monitor"] in report
    assert report["checkpoint"].startswith("checkpoints/best")
