"""Two runs are compared by the metrics that they logged, whatever these are called."""

import csv
import json

import pytest

from lockstep.extras.comparison import compare, rounding_verdict
from lockstep.reporting.report import Report
from lockstep.run import RunFolder


@pytest.fixture
def run(tmp_path):
    def write(name: str, rows: list[dict[str, float]], precision: str = "32-true", **report: float) -> Report:
        folder = tmp_path / name
        folder.mkdir()
        with (folder / "metrics.csv").open("w") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        (folder / "report.json").write_text(json.dumps({"run": name, **report}))
        (folder / "config.yaml").write_text(f"trainer: {{precision: '{precision}'}}")
        return Report(RunFolder(folder))

    return write


def test_metrics_of_a_module_are_compared_and_one_of_one_run_alone_is_a_difference(run):
    def trained(name: str, speed: float, **metrics: float) -> Report:
        logged = {"train_loss": 0.5, "train/images_per_s": speed, **metrics}
        return run(name, [{"step": 12, **logged}], **{"wall_s": speed, "train/steps": 12, "train/epochs": 1, **logged})

    both = trained("a", 90.0, val_loss=0.5, test_loss=0.25), trained("b", 80.0, test_loss=0.75)
    assert compare(*both, exact=False, tolerance=1e-6)["metrics"] == ["val_loss: 0.5 | None", "test_loss: 0.25 | 0.75"]


@pytest.mark.parametrize(
    ("apart", "precision", "told"),
    [
        ([1e-7 * 1.12**i for i in range(40)], "32-true", "differs by 1e-07 at step 0, by at most 8.3e-06 later"),
        ([1e-7] * 20 + [2e-3] * 20, "32-true", "jumps at step 20, from 1e-06 to 0.002"),  # another batch
        ([1e-4] * 40, "32-true", "by 0.0001 already at step 0"),  # another formula
        ([1e-4] * 40, "bf16-mixed", "with trainer.precision=32-true"),
        ([1e-7, 1e-4], "32-true", "with trainer.log_every_n_steps=1"),
    ],
)
def test_rounding_is_told_from_a_real_difference(run, apart, precision, told):
    losses = [2.0] * len(apart), [2 + 2 * x for x in apart]
    both = [
        run(name, [{"step": i, "train/loss": loss} for i, loss in enumerate(column)], precision)
        for name, column in zip("ab", losses, strict=True)
    ]
    grown, why = rounding_verdict(*both)
    assert told in why
    assert grown is told.startswith("differs")
