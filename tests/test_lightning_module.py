"""A LightningModule and a LightningDataModule run as they are, in a generated project: the code of docs/your-own/lightning-module.md."""

import csv
import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from your_own import Page, forget, samples_seen

import lockstep
from lockstep.checkpoints.finding import leaves
from lockstep.errors import OutOfMemory, RunFailed

TWO = ("strategy=ddp", "trainer.devices=2")
QUICK = (
    "trainer.accelerator=cpu", "trainer.precision=32-true", "trainer.max_epochs=2", "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false", "+callbacks.witness._target_=witness.Witness",
)  # fmt: skip
MNIST = (
    "data.root={mnist}",
    "data.cache_dir={cache}",
    "data.batch_size=16",
    "data.limit_train=96",
    "data.eval_batch_size=51",
    "checkpoint.every_n_steps=4",
)
OWN = ("data.data_dir={raw}", "data.batch_size=96", "data.num_workers={workers}")
UNUSED = ("strategy.find_unused_parameters=true",)


@dataclass(frozen=True)
class Case:
    """One of the page's commands. Its last process is killed before step `kill_at`, and resumes after an earlier one."""

    name: str
    given: tuple[str, ...]
    two: tuple[str, ...] = TWO
    kill_at: int = 7
    loss: str = "train_loss"
    promises: tuple[str, ...] = ("the same batches, exact resume and one-format checkpoints hold",)


CASES = [
    Case("classifier", ("task=lit_classifier", "task.hidden_dim=16", *MNIST)),
    Case("gan", ("task=lit_gan", "+task.width=16", *MNIST), (*TWO, *UNUSED), loss="g_loss"),
    # Three batches an epoch for each of two processes: it is killed in the second epoch and resumes from the end of the first.
    Case(
        "own_data",
        ("task=lit_classifier", "data=lit_mnist", *OWN),
        kill_at=4,
        promises=(
            "LitMNIST's own dataloaders: one-format checkpoints hold; batches are theirs",
            "from the end of an epoch only",
        ),
    ),
]


@dataclass(frozen=True)
class Runs:
    case: Case
    folder: Path
    reports: dict[str, dict]
    evaluation: dict

    @property
    def steps(self) -> int:
        """Of the runs in two processes."""
        return 6 if self.case.name == "own_data" else 12

    def checkpoint(self, run: str) -> dict:
        return torch.load(Path("runs", f"{self.case.name}-{run}", "checkpoints/last.ckpt"), weights_only=True)

    def samples(self, run: str) -> dict[int, list[float]]:
        return samples_seen(Path("runs", f"{self.case.name}-{run}"))

    def log(self, run: str) -> list[dict[str, str]]:
        with Path("runs", f"{self.case.name}-{run}", "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        return [{k: v for k, v in row.items() if not k.endswith(("_per_s", "_memory_gib"))} for row in rows]


@pytest.fixture(scope="module")
def project(tmp_path_factory, mnist) -> Path:
    root = Page("lightning-module").write_in_generated(tmp_path_factory.mktemp("project"))
    raw = root / "raw/MNIST/raw"
    raw.mkdir(parents=True)
    for path in (mnist / "MNIST/raw").glob("*.gz"):  # torchvision wants them unpacked
        (raw / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    return root


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            case,
            id=case.name,
            marks=[pytest.mark.xdist_group(f"module-{case.name}"), *[pytest.mark.slow] * (case.name != "classifier")],
        )
        for case in CASES
    ],
)
def runs(request, project, forked, mnist, cache) -> Iterator[Runs]:
    """The command alone, as two processes, and as two that are killed and go on; and an evaluation."""
    case: Case = request.param
    places = {"mnist": mnist, "cache": cache, "raw": project / "raw"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)

        def train(run: str, *more: str, workers: int = 0) -> dict:
            given = [text.format(**places, workers=workers) for text in (*case.given, *QUICK, *more)]
            return lockstep.train([f"run={case.name}-{run}", *given])

        reports = {"single": train("single"), "ddp": train("ddp", *case.two)}
        with pytest.raises((RunFailed, OutOfMemory)):  # which is what a SIGKILL looks like
            train("killed", *case.two, f"+callbacks.witness.kill_at={case.kill_at}")
        reports["killed"] = train("killed", "resume=auto", *case.two, "+callbacks.witness.kill_at=null")
        evaluation = lockstep.evaluate([f"run={case.name}-ddp"])
        yield Runs(case, project, reports, evaluation)
    forget()


def figures(report: dict) -> dict:
    return {name: value for name, value in report.items() if name.startswith("test")}


def test_it_trains_and_reports(runs):
    for report in runs.reports.values():
        steps = 12 if report["strategy"] == "single" else runs.steps
        assert (report["status"], report["train/steps"]) == ("done", steps)
        assert len(figures(report)) >= 1
        assert "</html>" in Path("runs", report["run"], "report.html").read_text()


def test_the_log_has_a_row_for_every_step(runs):
    logged = [int(row["step"]) for row in runs.log("ddp") if row[runs.case.loss]]
    assert logged == list(range(1, runs.steps + 1))


def test_two_processes_see_the_batches_of_one(runs):
    single, ddp = runs.samples("single"), runs.samples("ddp")
    if runs.case.name == "own_data":  # batches of its own in each process
        assert {len(rows) for rows in ddp.values()} == {2 * 96}
    else:
        assert {len(rows) for rows in single.values()} == {16}
        assert ddp == single


def test_a_killed_run_that_is_typed_again_ends_bit_identical(runs):
    killed, ddp = runs.checkpoint("killed"), runs.checkpoint("ddp")
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert differing(killed[part], ddp[part]) == [], part
    assert runs.log("killed") == runs.log("ddp")
    assert figures(runs.reports["killed"]) == figures(runs.reports["ddp"])


def differing(a: object, b: object) -> list[tuple]:
    pairs = zip(leaves(a), leaves(b), strict=True)
    return [
        place for (place, x), (other, y) in pairs if place != other or not (x is y or torch.as_tensor(x == y).all())
    ]


def test_an_evaluation_repeats_the_modules_figures(runs):
    assert figures(runs.evaluation) == pytest.approx(figures(runs.reports["ddp"]), rel=1e-6)


def test_checkpoints_hold_the_config_plain_hyper_parameters_and_every_optimizer_by_name(runs):
    saved = runs.checkpoint("ddp")
    assert saved["config"]["task"]["_target_"].startswith("mywork.")
    assert set(saved["hyper_parameters"]) > {"lr" if runs.case.name == "gan" else "learning_rate"}
    named = [name for state in saved["optimizer_states"] for name in state["state"]]
    assert sorted(named) == sorted(
        n for n in saved["state_dict"] if not n.split(".")[-1].startswith(("running", "num_"))
    )
    assert len(saved["optimizer_states"]) == (2 if runs.case.name == "gan" else 1)


def test_load_model_returns_the_module_with_the_weights_that_were_tested(runs):
    report = runs.reports["ddp"]
    module = lockstep.load_model(f"runs/{report['run']}")
    tested = torch.load(Path("runs", report["run"], report["checkpoint"]), weights_only=True)["state_dict"]
    assert type(module).__name__ == ("LitGAN" if runs.case.name == "gan" else "LitClassifier")
    assert not module.training
    assert differing(dict(module.state_dict()), dict(tested)) == []


def test_the_plan_says_which_promises_hold(runs):
    plan = Path("runs", f"{runs.case.name}-ddp", "train.log").read_text()
    assert all(words in plan for words in runs.case.promises)
