"""Two runs are compared by the metrics that they logged, whatever these are called."""

from pathlib import Path

import pytest

from lockstep.extras.comparison import Run, grown_rounding, metric_differences


def run(**metrics: float) -> Run:
    report = {
        "unit": "images",
        "wall_s": 1.5,
        "train/images_per_s": 90.0,
        "train/steps": 12,
        "train/epochs": 1,
        **metrics,
    }
    logged = {"step": 12, "train_loss": 0.5, "train/images_per_s": 90.0, **metrics}
    return Run(Path("a"), config={}, report=report, rows=[logged])


def test_metrics_of_a_module_are_compared():
    found = metric_differences(run(val_loss=0.5, test_loss=0.25), run(val_loss=0.5, test_loss=0.75), 1e-6)
    assert list(found) == ["test_loss: 0.25 | 0.75"]


def test_a_metric_of_one_run_alone_is_a_difference():
    assert list(metric_differences(run(**{"val/acc": 0.5}), run(), 1e-6)) == ["val/acc: 0.5 | None"]


def logged(*apart: float, precision: str = "32-true") -> list[Run]:
    """Two runs whose losses have these relative differences."""
    rows = [
        [{"step": i, "train/loss": 2 + x} for i, x in enumerate(column)]
        for column in ([0] * len(apart), [2 * x for x in apart])
    ]
    return [Run(Path("a"), {"trainer.precision": precision}, {}, own) for own in rows]


@pytest.mark.parametrize(
    ("apart", "precision", "told"),
    [
        ([1e-7 * 1.12**i for i in range(40)], "32-true", "differs by 1e-07 at step 0, by at most 8.3e-06 later"),
        ([1e-7] * 20 + [2e-3] * 20, "32-true", "leaps apart at step 20, from 1e-06 to 0.002"),  # another batch
        ([1e-4] * 40, "32-true", "by 0.0001 at step 0 already"),  # another formula
        ([1e-4] * 40, "bf16-mixed", "in trainer.precision=32-true"),
        ([1e-7, 1e-4], "32-true", "with trainer.log_every_n_steps=1"),
    ],
)
def test_rounding_is_told_from_a_real_difference(apart, precision, told):
    grown, why = grown_rounding(*logged(*apart, precision=precision))
    assert told in why
    assert grown is told.startswith("differs")
