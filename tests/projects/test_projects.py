"""Nine kinds of projects, each written in one file as its user would: the same result from two processes, an exact resume.

python tests/projects/test_projects.py     # prints the lines of code of each
"""

import csv
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))  # as pytest does

import forked as forked_processes  # noqa: E402
import thin_project  # noqa: E402
from house import lines_of_code  # noqa: E402
from in_process import state  # noqa: E402

import lockstep  # noqa: E402
from lockstep.errors import OutOfMemory, RunFailed  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:You passed in a `.*_dataloader` but have no", "ignore:.*LeafSpec"),
]
TASK = ["task=own", "data=own", "model=own", "loader.batch_size=8"]
MODULE = ["task=lightning_module", "data=none"]
# The overrides of each project, of one process. An epoch should have at least five steps.
PROJECTS: dict[str, list[str]] = {
    "series": [
        *TASK, "task._target_=series.Forecast", "data._target_=series.Windows", "model._target_=series.Mlp",
        "loader.val_gap=15", "task.monitor=val/mae",
    ],
    "text": [*MODULE, "task._target_=text.Adapted", "task.monitor=val/loss"],
    "distillation": [
        *TASK, "task=classification", "task._target_=distillation.Distillation", "data._target_=distillation.Points",
        "model._target_=distillation.Student",
    ],
    "autoencoder": [
        *TASK, "data=own_images", "task._target_=autoencoder.Reconstruct", "data._target_=autoencoder.Bars", "data.image_size=16",
        "model._target_=autoencoder.Autoencoder",
    ],
    "graphs": [*MODULE, "task._target_=graphs.Classifier", "task.monitor=val/acc", "task.mode=max"],
    "tabular": [
        *MODULE, "task._target_=tabular.Churn", "data._target_=tabular.Customers", "task.monitor=val/auroc", "task.mode=max",
    ],
    "stream": [*MODULE, "task._target_=stream.Forecast", "trainer.max_steps=12"],
    "two_heads": [*MODULE, "task._target_=two_heads.TwoHeads", "task.monitor=val/far/distance"],
    "lab": [
        *MODULE, "task._target_=lab.AutoEncoder", "data._target_=lab.PicturesData", "task.monitor=val_loss", "logger=wandb",
        "logger.wandb.mode=offline",
    ],
}  # fmt: skip
# Words in the names of weights that are not trained, and that no checkpoint has.
OMITTED = {"text": ("tokens", "places", "linear", "norm"), "distillation": ("teacher",)}
EVERY = [
    "trainer.accelerator=cpu", "trainer.precision=32-true", "trainer.max_epochs=2", "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false", "checkpoint.every_n_steps=3", "+callbacks.crash._target_=crash.Crash",
]  # fmt: skip
TWO = ["strategy=ddp", "trainer.devices=2"]
CRASH_AT = 8  # batches from the beginning, after the checkpoint of six
CRASH = """import lightning.pytorch as pl


class Crash(pl.Callback):
    def __init__(self, *, at: int | None = None) -> None:
        self.at = at

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.fit_loop.epoch_loop.batch_progress.total.processed == self.at:
            raise RuntimeError("a crash")
"""
# W&B's folder of pictures is made where the server of `forked` imports it, and deleted by the first process that ends.
OWN_PICTURES = """import tempfile

from wandb.sdk.data_types._private import MEDIA_TMP

MEDIA_TMP.name = tempfile.mkdtemp("wandb-media")
"""
MEASURED = ("_per_s", "peak_memory_gib")


def lines(name: str) -> int:
    """What the user of a project writes."""
    return lines_of_code(FOLDER / f"{name}.py")


@dataclass(frozen=True)
class Run:
    report: dict
    state_dict: dict
    rows: list[dict[str, float]]  # of metrics.csv, without speed and memory


def trained(name: str, run: str, *more: str) -> Run:
    report = lockstep.train([*PROJECTS[name], *EVERY, f"run={run}", *more])
    with Path(f"runs/{run}/metrics.csv").open(newline="") as file:
        rows = [{k: float(v) for k, v in row.items() if v and not k.endswith(MEASURED)} for row in csv.DictReader(file)]
    return Run(report, state(f"{run}/checkpoints/last.ckpt")["state_dict"], rows)


@dataclass(frozen=True)
class Runs:
    name: str
    one: Run
    two: Run
    resumed: Run  # two processes that crashed

    def of_weights(self) -> tuple[float, str]:
        """The largest difference of a weight between one process and two."""
        pairs = [
            (name, self.one.state_dict[name].double(), value.double()) for name, value in self.two.state_dict.items()
        ]
        return max((float((a - b).abs().max()), name) for name, a, b in pairs if a.numel())

    def of_rows(self) -> tuple[float, str]:
        """The largest relative one of a number of metrics.csv."""
        numbers = [(k, x, b[k]) for a, b in zip(self.one.rows, self.two.rows, strict=True) for k, x in a.items()]
        return max((abs(x - y) / max(abs(x), abs(y), 1e-6), name) for name, x, y in numbers)


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in PROJECTS])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, forked: None) -> Iterator[Runs]:
    """A project that trained in one process, in two, and in two that crashed and went on."""
    name: str = request.param
    files = {f"src/{name}.py": (FOLDER / f"{name}.py").read_text(), "src/crash.py": CRASH, "pictures.py": OWN_PICTURES}
    with thin_project.entered(tmp_path_factory.mktemp(name), name, **files), pytest.MonkeyPatch.context() as patch:
        patch.setenv(forked_processes.HOOK, "pictures.py")
        whole = trained(name, "one"), trained(name, "two", *TWO)
        with pytest.raises((RunFailed, OutOfMemory)):
            trained(name, "crashed", *TWO, f"+callbacks.crash.at={CRASH_AT}")
        progress = state("crashed/checkpoints/last.ckpt")["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]
        assert 0 < progress["ready"] < CRASH_AT
        yield Runs(name, *whole, trained(name, "crashed", *TWO, "resume=auto", "+callbacks.crash.at=null"))
    sys.modules.pop("crash", None)


def test_two_processes_find_the_weights_and_the_log_of_one(runs: Runs) -> None:
    assert list(runs.one.state_dict) == list(runs.two.state_dict)
    assert [row.keys() for row in runs.one.rows] == [row.keys() for row in runs.two.rows]
    weights, rows = runs.of_weights(), runs.of_rows()
    print(f"{runs.name}: weights differ by {weights}, rows by {rows}")
    assert weights < (1e-5,)
    assert rows < (1e-4,)


def test_two_processes_that_crash_and_go_on_end_bit_identical(runs: Runs) -> None:
    assert runs.resumed.report["resumed_from"].endswith("last.ckpt")
    weights = runs.two.state_dict
    assert list(runs.resumed.state_dict) == list(weights)
    assert all(runs.resumed.state_dict[name].equal(value) for name, value in weights.items())
    assert runs.resumed.rows == runs.two.rows


def test_an_evaluation_repeats_the_test(runs: Runs) -> None:
    tested = {name: value for name, value in runs.two.report.items() if name.startswith("test/")}
    found = lockstep.evaluate(["run=two", "trainer.accelerator=cpu"])
    assert {name: found[name] for name in tested} == pytest.approx(tested, rel=1e-5)


def test_checkpoints_hold_what_is_trained_and_a_report_shows_what_its_task_adds(runs: Runs) -> None:
    assert not [name for name in runs.two.state_dict for word in OMITTED.get(runs.name, ()) if word in name]
    if runs.name == "autoencoder":
        gallery: Any = lockstep.load_report("two").panels["Reconstructions"]
        assert [sample.image_CHW.shape for sample in gallery.samples] == [(1, 16, 48)] * 8


if __name__ == "__main__":
    for name in PROJECTS:
        print(f"{name:16} {lines(name):4}")
