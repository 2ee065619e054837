"""The main job under each strategy: one run, one report, the same result, evaluated to the same figures."""

import json
from pathlib import Path

import pytest
import torch
from in_process import SMALL, rows, state

import lockstep
from lockstep import ROOT

pytestmark = pytest.mark.xdist_group("strategies")
TWO = ["trainer.devices=2"]
STRATEGIES = {
    "single": ["strategy=single"],
    "dp": ["strategy=dp"],
    "ddp": ["strategy=ddp", *TWO],
    "fsdp": ["strategy=fsdp", *TWO],
    "accumulated": ["strategy=single", "trainer.accumulate_grad_batches=4"],
}
REPORT = (
    "status", "test/acc", "test/loss", "test/count", "val/acc", "train/images_per_s", "train/steps", "world_size", "strategy",
    "precision", "data/source", "data/sha256", "checkpoint", "wall_s", "peak_memory_bytes", "git_sha", "versions",
)  # fmt: skip
FILES = {"config.yaml", "metrics.csv", "checkpoints", "report.json", "report.html", "panels.json", "train.log"}
FIGURES = {
    "status": "done", "test/count": 103, "train/steps": 10,
    "data/source": "disk", "data/train": 576, "data/val": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory, mnist, cache, forked) -> list[str]:
    """10 steps in fp32 with dropout on, SGD, gradients clipped; a row of the log for each step."""
    runs = tmp_path_factory.mktemp("strategies") / "runs"
    data = f"runs_dir={runs} data.root={mnist} data.cache_dir={cache} loader.batch_size=48 loader.eval_batch_size=20 loader.repeats=2"
    optim = "optim=sgd optim.momentum=0.5 optim.lr=0.02 augment=[light,strong] augment.shift.pixels=2"
    trainer = "trainer.gradient_clip_val=0.5 trainer.precision=32-true trainer.max_steps=10 trainer.log_every_n_steps=1"
    return [*f"{data} {optim} {trainer}".split(), *SMALL]


@pytest.fixture(scope="module")
def reports(base) -> dict[str, dict]:
    return {name: lockstep.train([*more, f"run={name}", *base]) for name, more in STRATEGIES.items()}


@pytest.fixture(scope="module")
def runs(base) -> Path:
    return Path(base[0].removeprefix("runs_dir="))


def relative_difference(reference: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Of all weights as one vector."""
    a, b = (torch.cat([value.double().flatten() for value in weights.values()]) for weights in (reference, other))
    return float((b - a).norm() / a.norm())


def test_each_run_is_one_directory_with_one_report(reports, runs):
    assert sorted(path.name for path in runs.iterdir()) == sorted(STRATEGIES)
    for name, report in reports.items():
        without_git = set() if (ROOT / ".git").exists() else {"git_sha"}
        assert {key for key in REPORT if report.get(key) is None} == without_git
        assert json.loads((runs / name / "report.json").read_text()) == report
        assert not any(isinstance(value, dict | list) for value in report.values())
        logs = {"logs"} if report["world_size"] > 1 else set()  # one process prints to the caller's terminal
        assert {path.name for path in (runs / name).iterdir()} == FILES | logs
        assert (runs / name / "checkpoints" / "last.ckpt").is_file()
        known = {"strategy": "single" if name == "accumulated" else name, "world_size": 1 + (name in ("ddp", "fsdp"))}
        assert report.items() >= {**FIGURES, **known}.items()


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "single"])
def test_weights_and_losses_agree_with_a_single_process(name, reports, runs):
    reference, other = (state(runs / each / reports[each]["checkpoint"])["state_dict"] for each in ("single", name))
    assert list(reference) == list(other)
    assert relative_difference(reference, other) < 1e-6
    expected, found = (
        [float(row["train/loss"]) for row in rows(runs / each) if row["train/loss"]] for each in ("single", name)
    )
    assert len(expected) == 10
    assert expected[-1] < expected[0]
    assert found == pytest.approx(expected, rel=2e-6)
    for figure in ("test/loss", "val/loss", "test/acc"):
        assert reports[name][figure] == pytest.approx(reports["single"][figure], rel=1e-5)


def test_an_evaluation_gives_the_same_figures_again_on_any_number_of_processes(reports, base, runs, tmp_path):
    """Of runs and of a checkpoint alone, which lies elsewhere."""

    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in runs.rglob("*") if path.is_file() and path.parent.name != "logs"}

    moved = tmp_path / "moved.ckpt"
    moved.write_bytes((runs / "ddp" / reports["ddp"]["checkpoint"]).read_bytes())
    before = contents()
    for name, more, strategy, world_size, file in (
        ("ddp", [f"checkpoint={moved}"], "single", 1, moved.with_suffix(".eval.json")),
        ("fsdp", ["run=fsdp", base[0]], "single", 1, runs / "fsdp/eval.json"),
        ("single", ["run=single", base[0], "strategy=fsdp", *TWO], "fsdp", 2, runs / "single/eval.json"),
    ):
        again = lockstep.evaluate([*more, base[2], "trainer.accelerator=cpu"])
        assert (again["strategy"], again["world_size"], again["test/count"]) == (strategy, world_size, 103)
        for figure in ("test/loss", "test/acc"):
            assert again[figure] == pytest.approx(reports[name][figure], rel=1e-6)
        assert json.loads(file.read_text()) == again
    assert {path: content for path, content in contents().items() if path.name != "eval.json"} == before
