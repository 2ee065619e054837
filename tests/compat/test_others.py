"""torchmetrics still needs compat/others.py; when a test fails, see whether it can go."""

import inspect
import subprocess
import sys

import pytest
import torchmetrics.functional.audio
import torchmetrics.utilities.plot

IN_A_NEW_PROCESS = """
import sys
from lightning_utilities.core import imports
before = imports.package_available, imports.RequirementCache
import lockstep.compat.others
import lightning.pytorch, torch, torchmetrics
assert not {"scipy", "matplotlib"} & set(sys.modules)
assert before == (imports.package_available, imports.RequirementCache)
assert imports.package_available("scipy") and imports.RequirementCache("matplotlib")

import matplotlib.figure, scipy.signal  # a user's own
from torchmetrics.functional.audio import permutation_invariant_training, signal_noise_ratio
sound = torch.randn(2, 4, 100)  # for three voices and more torchmetrics needs scipy
assert permutation_invariant_training(sound[:, [2, 0, 3, 1]], sound, signal_noise_ratio)[1].tolist() == [[1, 3, 0, 2]] * 2

assert "matplotlib.pyplot" not in sys.modules
matplotlib.use("Agg")
matrix = torchmetrics.ConfusionMatrix(task="multiclass", num_classes=3)
matrix.update(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 1]))
figure, axes = matrix.plot()
assert isinstance(figure, matplotlib.figure.Figure) and axes.get_title() == "" and len(axes.texts) == 9
mean = torchmetrics.MeanMetric()
mean.update(1.0)
assert isinstance(mean.plot()[0], matplotlib.figure.Figure)
"""


def test_torchmetrics_still_imports_both():
    """When this fails, see whether compat/others.py can go."""
    assert "\n    import scipy.signal" in inspect.getsource(torchmetrics.functional.audio)
    assert "\n    import matplotlib" in inspect.getsource(torchmetrics.utilities.plot)


@pytest.mark.slow
def test_both_are_left_out_and_work_afterwards():
    done = subprocess.run([sys.executable, "-c", IN_A_NEW_PROCESS], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
