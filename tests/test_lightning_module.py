"""A LightningModule and a LightningDataModule run as they are: the code blocks of docs/your-own/lightning-module.md."""

import csv
import gzip
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from your_own import Page

import lockstep
from lockstep.errors import RunFailed

TWO = ("strategy=ddp", "trainer.devices=2")
QUICK = (
    "trainer.accelerator=cpu", "trainer.precision=32-true", "trainer.max_epochs=2", "trainer.log_every_n_steps=1",
    "checkpoint.every_n_steps=4", "trainer.enable_progress_bar=false", "+callbacks.witness._target_=witness.Witness",
)  # fmt: skip
MNIST = (
    "data.root={mnist}",
    "data.cache_dir={cache}",
    "data.batch_size=16",
    "data.limit_train=96",
    "data.eval_batch_size=51",
)
OWN = ("data.data_dir={raw}", "data.batch_size=96", "data.num_workers={workers}")
UNUSED = ("strategy.find_unused_parameters=true",)
# Writes down the rows of every step, and fails at one: a callback of the project's.
WITNESS = """import json
from pathlib import Path

import lightning.pytorch as pl


class Witness(pl.Callback):
    def __init__(self, *, fail_at: int | None = None) -> None:
        self.fail_at = fail_at

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        step = trainer.fit_loop.epoch_loop.batch_progress.total.processed
        rows = batch[0].flatten(1).double().square().sum(1).tolist()
        with (Path(trainer.default_root_dir) / f"seen-{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "rows": rows}) + "\\n")
        if step == self.fail_at and trainer.global_rank == trainer.world_size - 1:
            raise RuntimeError("the test stops this run")
"""


@dataclass(frozen=True)
class Case:
    """One of the page's commands. It fails before step `fails_at` of each process and resumes after `resumes_at`."""

    name: str
    given: tuple[str, ...]
    two: tuple[str, ...] = TWO
    fails_at: int = 7
    resumes_at: int = 4


CASES = [
    Case("classifier", ("task=lit_classifier", "task.hidden_dim=16", *MNIST)),
    Case("gan", ("task=lit_gan", "task.width=16", *MNIST), (*TWO, *UNUSED)),
    # Three batches an epoch for each of two processes: it fails in the second epoch and resumes from the end of the first.
    Case("own_data", ("task=lit_classifier", "data=lit_mnist", *OWN), fails_at=4, resumes_at=3),
]


@dataclass(frozen=True)
class Runs:
    case: Case
    folder: Path
    reports: dict[str, dict]
    evaluation: dict

    def checkpoint(self, run: str) -> dict:
        return torch.load(Path("runs", run, "checkpoints/last.ckpt"), weights_only=True)

    def rows(self, run: str) -> dict[int, list[float]]:
        """The samples of each step, of all processes together."""
        found: dict[int, list[float]] = {}
        for path in sorted(Path("runs", run).glob("seen-*.jsonl")):
            for line in map(json.loads, path.read_text().splitlines()):
                found.setdefault(line["step"], []).extend(line["rows"])
        return {step: sorted(rows) for step, rows in found.items()}

    def log(self, run: str) -> list[dict[str, str]]:
        with Path("runs", run, "metrics.csv").open() as file:
            return [{k: v for k, v in row.items() if not k.endswith("_per_s")} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def project(tmp_path_factory, mnist) -> Path:
    root = Page("lightning-module").write(tmp_path_factory.mktemp("project"))
    (root / "src/witness").mkdir(exist_ok=True)
    (root / "src/witness/__init__.py").write_text(WITNESS)
    raw = root / "raw/MNIST/raw"
    raw.mkdir(parents=True)
    for path in (mnist / "MNIST/raw").glob("*.gz"):  # torchvision wants them unpacked
        (raw / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    return root


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def runs(request, project, forked, mnist, cache) -> Iterator[Runs]:
    """Alone, alone and interrupted, as two processes, as two that fail and go on; and an evaluation of those."""
    case: Case = request.param
    places = {"mnist": mnist, "cache": cache, "raw": project / "raw"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)

        def train(run: str, *more: str, workers: int = 0) -> dict:
            given = [text.format(**places, workers=workers) for text in (*case.given, *QUICK, *more)]
            return lockstep.train([f"run={case.name}-{run}", *given])

        reports = {"single": train("single"), "ddp": train("ddp", *case.two)}
        with pytest.raises(RunFailed):
            train("stopped", *case.two, f"+callbacks.witness.fail_at={case.fails_at}")
        reports["stopped"] = train("stopped", "resume=auto", *case.two, "+callbacks.witness.fail_at=null")
        evaluation = lockstep.evaluate([f"run={case.name}-ddp"])
        yield Runs(case, project, reports, evaluation)
    for name in [name for name in sys.modules if name.split(".")[0] in ("mywork", "witness")]:
        del sys.modules[name]


def test_it_trains_and_reports(runs):
    for name, report in runs.reports.items():
        assert report["status"] == "done", name
    print(json.dumps(runs.reports, indent=1))
