"""What docs/your-own says works as it is written there, touches no file of Lockstep's, and keeps every promise."""

import csv
import gzip
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
from in_process import same, state
from PIL import Image
from your_own import FOLDER, Page, forget, samples_seen

import lockstep
from lockstep.errors import ProcessDied, RunFailed, UserError
from lockstep.extras import comparison

TWO = ("strategy=ddp", "trainer.devices=2")
SHARDED = ("strategy=fsdp", "trainer.devices=2")
EVERY = (
    "trainer.accelerator=cpu", "trainer.precision=32-true", "trainer.log_every_n_steps=1", "trainer.enable_progress_bar=false",
    "+callbacks.witness._target_=witness.Witness",
)  # fmt: skip
QUICK = (
    *EVERY, "trainer.max_epochs=null", "trainer.max_steps=8", "checkpoint.every_n_steps=2", "optim=sgd", "optim.lr=0.02",
    "loader.batch_size=8", "loader.limit_train=48",
)  # fmt: skip
MNIST = ("data.root={mnist}", "data.cache_dir={cache}")
PAGES = [
    Page("data", ("data.image_size=16",)),
    Page("folder", ("data.image_size=16", "data.cache_dir={cache}")),
    Page("model", MNIST),
    Page("loss", MNIST, command=1),
    Page("metric", MNIST),
    Page("panel", MNIST),
    Page("multilabel", ("data.image_size=16", "data.cache_dir={cache}")),
    Page("regression", ("model.width=8",)),
    Page("segmentation", ("data.count=70", "data.image_size=16", "model.width=4")),
    Page("language-model", ("model.width=16", "model.dropout=0", "data.sequence_length=16")),
    Page("task", MNIST, generated=True),
    Page("contrastive", ("model.width=8", "loader.eval_batch_size=50", *MNIST), generated=True),
    Page("detection", ("model.width=8", "data.count=70", "data.image_size=32", "trainer.check_val_every_n_epoch=1"), generated=True),
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What is trained, and before which step the last of two processes is killed; it resumes after an earlier one."""

    name: str
    page: Page
    common: tuple[str, ...]
    two: tuple[str, ...] = TWO
    kill_at: int = 5
    steps: int = 8  # of two processes
    loss: str = "train/loss"
    module: str = ""  # the class of a LightningModule
    promises: tuple[str, ...] = ()

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        return [pytest.mark.xdist_group(self.name), pytest.mark.slow]

    def typed(self, places: dict[str, object]) -> list[str]:
        command = [] if self.module else [*self.page.typed[self.page.command], *QUICK]
        return [*command, *(text.format(**places) for text in self.common)]


MODULES = Page("lightning-module", generated=True)
OF_MODULES = (*EVERY, "trainer.max_epochs=2")
IMAGES = (
    *MNIST,
    "loader.batch_size=16",
    "loader.limit_train=96",
    "loader.eval_batch_size=51",
    "checkpoint.every_n_steps=4",
)
SAME_BATCHES = ("result: ",)
CASES = [
    *(Case(page.name, page, page.quick) for page in PAGES),
    Case(
        "classifier", MODULES, (*OF_MODULES, "task=lit_classifier", "task.hidden_dim=16", *IMAGES),
        kill_at=7, steps=12, loss="train_loss", module="LitClassifier", promises=SAME_BATCHES,
    ),
    Case(
        "gan", MODULES, (*OF_MODULES, "task=lit_gan", "+task.width=16", *IMAGES), (*TWO, "strategy.find_unused_parameters=true"),
        kill_at=7, steps=12, loss="g_loss", module="LitGAN", promises=SAME_BATCHES,
    ),
    # Seven batches an epoch, the last of 6 images: it is killed in the second epoch and resumes within it.
    Case(
        "own_data", MODULES,
        (*OF_MODULES, "task=lit_classifier", "data=lit_mnist", "data.data_dir={raw}", "data.batch_size=95", "data.num_workers=1", "checkpoint.every_n_steps=4"),
        kill_at=11, steps=14, loss="train_loss", module="LitClassifier", promises=(*SAME_BATCHES, "batch 95 = 2 x 47 or 48"),
    ),
]  # fmt: skip


@dataclass(frozen=True)
class Runs:
    case: Case
    reports: dict[str, dict]
    evaluation: dict
    printed: str  # by the run with one process

    def weights(self, run: str) -> torch.Tensor:
        """All of them as one vector, from the checkpoint that was tested."""
        tested = state(f"{run}/{self.reports[run]['checkpoint']}")["state_dict"]
        return torch.cat([value.double().flatten() for value in tested.values()])

    def samples(self, run: str) -> dict[int, list[float]]:
        return samples_seen(Path("runs", run))


@pytest.fixture(scope="module", params=[pytest.param(case, id=case.name, marks=case.marks) for case in CASES])
def runs(request, tmp_path_factory, forked, mnist, cache) -> Iterator[Runs]:
    """The command alone, as two processes, as two that shard a task's network, and as two that are killed and go on; and an evaluation."""
    case: Case = request.param
    folder = tmp_path_factory.mktemp(case.name)
    common = case.typed({"mnist": mnist, "cache": cache, "raw": folder / "raw"})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(case.page.write_in_generated(folder) if case.page.generated else case.page.write(folder))
        unpack(mnist, folder / "raw")
        with redirect_stdout(io.StringIO()) as printed:
            reports = {"single": lockstep.train(["run=single", *common])}
        for name, more in {"ddp": case.two, **({} if case.module else {"fsdp": SHARDED})}.items():
            reports[name] = lockstep.train([f"run={name}", *more, *common])
        killed = ["run=killed", *case.two, *common]
        with pytest.raises((RunFailed, ProcessDied)):  # which is what a SIGKILL looks like
            lockstep.train([*killed, f"+callbacks.witness.kill_at={case.kill_at}"])
        reports["killed"] = lockstep.train([*killed, "resume=auto", "+callbacks.witness.kill_at=null"])
        evaluation = lockstep.evaluate(["run=ddp", "trainer.accelerator=cpu"])
        yield Runs(case, reports, evaluation, printed.getvalue())
    forget()


def unpack(mnist: Path, root: Path) -> None:
    """As torchvision wants the files."""
    (root / "MNIST/raw").mkdir(parents=True)
    for path in (mnist / "MNIST/raw").glob("*.gz"):
        (root / "MNIST/raw" / path.stem).write_bytes(gzip.decompress(path.read_bytes()))


# --- the files ---


def test_every_page_is_tested_and_in_the_index_and_needs_few_files_and_none_of_locksteps():
    names = {path.stem for path in FOLDER.glob("*.md")} - {"README"}
    assert names == {case.page.name for case in CASES}
    rows = [re.sub(r"\) \(.*?\) ", ") ", line) for line in (FOLDER / "README.md").read_text().splitlines()]
    for page in map(Page, names):
        title = page.text.splitlines()[0].removeprefix("# ")
        assert f"| [{title}]({page.name}.md) | {page.lines} |" in rows
        links = re.findall(r"\]\(([\w-]+\.md)\)", page.text)
        assert [link for link in links if not (FOLDER / link).is_file()] == []
    for page in PAGES:
        endings = [Path(name).suffix for name in page.files]
        assert endings.count(".py") <= 2 and endings.count(".yaml") <= 1, page.name
        assert all(name.startswith(("src/mywork/", "configs/")) for name in page.files)
        assert not [name for name in page.files if (lockstep.ROOT / name).exists()]


def test_a_key_that_the_class_does_not_have_is_refused(tmp_path, monkeypatch, mnist, cache):
    page = next(page for page in PAGES if page.name == "model")
    monkeypatch.chdir(page.write(tmp_path))
    with pytest.raises(UserError) as refused:
        lockstep.train([*page.typed[1], f"data.root={mnist}", f"data.cache_dir={cache}"])
    assert f"error: {refused.value}" in page.text
    assert not Path("runs").exists()
    forget()


# --- the promises ---


def printed_words(text: str) -> set[str]:
    """Names of metrics, network and data: what a run prints, whatever its numbers."""
    rows = re.findall(r"^│ (\S.*?) +│", text, re.MULTILINE)
    plans = re.findall(r"^\S+: (\S+) \(.*? · (\S+) (?:from|\()", text, re.MULTILINE)
    return {*rows, *(word for plan in plans for word in plan)}


def test_a_run_prints_what_the_page_shows_and_logs_each_step(runs):
    if not runs.case.module:  # of which the page shows a run on all images
        shown = printed_words(runs.case.page.text)
        assert len(shown) >= 3
        assert shown <= printed_words(runs.printed)
    for run, report in runs.reports.items():
        steps = runs.case.steps
        assert (report["status"], report["train/steps"]) == ("done", steps)
        with Path("runs", run, "metrics.csv").open() as file:
            logged = [int(row["step"]) for row in csv.DictReader(file) if row[runs.case.loss]]
        assert logged == list(range(1, steps + 1))
        if report["monitor"] is not None:
            assert report["monitor"] in report
            assert report["checkpoint"].startswith("checkpoints/best")
    printed = Path("runs/ddp/train.log").read_text()
    assert all(words in printed for words in runs.case.promises)


def test_two_processes_see_the_batches_and_find_the_weights_of_one(runs):
    single, ddp = runs.samples("single"), runs.samples("ddp")
    assert len(single) == runs.case.steps
    sizes = {95, 6} if runs.case.name == "own_data" else {16 if runs.case.module else 8}
    assert {len(samples) for samples in single.values()} == sizes
    assert ddp == single
    if runs.case.module:  # which averages its loss as it likes
        return
    assert runs.samples("fsdp") == single
    weights = runs.weights("single")
    for pair in ("ddp", "fsdp"):
        assert float((runs.weights(pair) - weights).norm() / weights.norm()) < 1e-6
        assert runs.reports[pair]["test/loss"] == pytest.approx(runs.reports["single"]["test/loss"], rel=1e-5)


def test_a_killed_run_that_is_typed_again_ends_bit_identical(runs):
    assert runs.reports["killed"]["resumed_from"].endswith("last.ckpt")
    assert runs.samples("killed").keys() == runs.samples("ddp").keys()
    ddp, killed = (comparison.find(run, Path("runs")) for run in ("ddp", "killed"))
    found = comparison.compare(ddp, killed, exact=True, tolerance=0)
    # Resuming steps a plateau's scheduler outside of Lightning's loop, which counts its steps.
    weights = [line for line in found["weights"] if not (runs.case.module and "scheduler_progress" in line)]
    assert (found["log"], found["metrics"], weights) == ([], [], [])


def test_an_evaluation_repeats_the_figures_and_a_module_loads(runs):
    report = runs.reports["ddp"]
    expected, found = (
        {name: value for name, value in figures.items() if name.startswith("test")}
        for figures in (report, runs.evaluation)
    )
    assert len(expected) >= 1
    assert found == pytest.approx(expected, rel=1e-6)
    if not runs.case.module:
        return
    # plain hyperparameters, and every optimizer by name
    saved = state("ddp/checkpoints/last.ckpt")
    assert saved["config"]["task"]["_target_"].startswith("mywork.")
    assert set(saved["hyper_parameters"]) > {"lr" if runs.case.name == "gan" else "learning_rate"}
    named = [name for optimizer in saved["optimizer_states"] for name in optimizer["state"]]
    trained = [n for n in saved["state_dict"] if not n.split(".")[-1].startswith(("running", "num_"))]
    assert sorted(named) == sorted(trained)
    assert len(saved["optimizer_states"]) == (2 if runs.case.name == "gan" else 1)
    module = lockstep.load_model("runs/ddp")
    assert (type(module).__name__, module.training) == (runs.case.module, False)
    assert same(dict(module.state_dict()), dict(state(f"ddp/{report['checkpoint']}")["state_dict"]))


PREDICTED = {
    "segmentation": "mask", "multilabel": "labels", "regression": "price", "language-model": "token", "contrastive": "similarity",
    "detection": "boxes",
}  # fmt: skip


def test_a_prediction_has_a_row_for_each_test_sample_from_one_process_and_from_two(runs, tmp_path):
    if runs.case.module:
        pytest.skip("these modules have no predict_step")
    tables = []
    for name, more in {"one": (), "two": TWO}.items():
        lockstep.predict(["run=ddp", "input=test", "trainer.accelerator=cpu", f"output={tmp_path}/{name}.jsonl", *more])
        tables.append([json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()])
    assert all([row["index"] for row in rows] == list(range(runs.evaluation["test/count"])) for rows in tables)
    column = PREDICTED.get(runs.case.name, "class")
    number = "similarity" if runs.case.name == "contrastive" else "loss"  # which depends on the batch there
    assert {column, number} <= tables[0][0].keys()
    for a, b in zip(*tables, strict=True):
        assert a[number] == pytest.approx(b[number], rel=1e-4, abs=1e-6)
        if column == "mask":
            masks = [np.asarray(Image.open(tmp_path / row["mask"])) for row in (a, b)]
            assert masks[0].shape == (16, 16)
            assert (masks[0] == masks[1]).mean() > 0.99


@pytest.mark.slow
def test_masks_are_augmented_and_predicted_for_files(runs, tmp_path):
    """What the page of segmentation says to type after training, on photos of other sizes."""
    if runs.case.name != "segmentation":
        pytest.skip("it is about masks")
    lockstep.train([*runs.case.page.typed[1], *QUICK, *runs.case.page.quick])
    (tmp_path / "photos").mkdir()
    for i, size in enumerate([(20, 31), (16, 16), (50, 12)]):
        Image.effect_noise(size, 90).save(tmp_path / f"photos/{i}.png")
    asked = [f"input={tmp_path}/photos", "gallery=true", f"output={tmp_path}/table.jsonl", "trainer.accelerator=cpu"]
    lockstep.predict(["run=light", *asked])
    rows = [json.loads(line) for line in (tmp_path / "table.jsonl").read_text().splitlines()]
    for row in rows:
        with Image.open(row["path"]) as image, Image.open(tmp_path / row["mask"]) as mask:
            assert (mask.mode, mask.size) == ("L", image.size)
    drawn = re.findall(r'src="data:image/png;base64,([^"]+)"', (tmp_path / "table-gallery.html").read_text())
    assert len(drawn) == len(rows) == 3
