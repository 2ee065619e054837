"""Two runs are compared by the figures that they logged, whatever these are called."""

from pathlib import Path

from lockstep.reporting.comparison import Run, figure_differences


def run(**figures: float) -> Run:
    report = {
        "unit": "images",
        "wall_s": 1.5,
        "train/images_per_s": 90.0,
        "train/steps": 12,
        "train/epochs": 1,
        **figures,
    }
    columns = ["step", "train_loss", "train/images_per_s", *figures]
    return Run(Path("a"), config={}, report=report, rows=[], columns=columns)


def test_figures_of_a_module_are_compared():
    found = figure_differences(run(val_loss=0.5, test_loss=0.25), run(val_loss=0.5, test_loss=0.75), 1e-6)
    assert list(found) == ["test_loss: 0.25 | 0.75"]


def test_a_figure_of_one_run_alone_is_a_difference():
    assert list(figure_differences(run(**{"val/acc": 0.5}), run(), 1e-6)) == ["val/acc: 0.5 | None"]
