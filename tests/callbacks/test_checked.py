"""The line of a run about its result: what is known without trying, or the check that still holds, or what has changed since."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import check
import pytest
import thin_project
from in_process import options
from torch import nn

import lockstep
from lockstep.callbacks import summary
from lockstep.config import checked
from lockstep.errors import UserError
from lockstep.strategies.batch_norm import GlobalBatchNorm
from lockstep.training.arithmetic import LogicalRanks, StepArithmetic

pytestmark = pytest.mark.xdist_group("checked")
SHORT = [
    "trainer.precision=32-true",
    "trainer.max_steps=1",
    "trainer.limit_val_batches=1",
    "trainer.limit_test_batches=1",
]
TASK = "from lockstep.kit.tasks import Classification\n\n\nclass Mine(Classification): ...\n"
LINE = "the same on 1 and 2 processes (checked: 5 steps, cpu, float64: 4e-16)"


@pytest.fixture
def project(tmp_path) -> Iterator[Path]:
    files = {
        "src/mine/__init__.py": TASK,
        "configs/task/mine.yaml": "defaults: [classification]\n_target_: mine.Mine\n",
    }
    with thin_project.entered(tmp_path / "project", "mine", **files) as root:
        yield root


@pytest.fixture
def first_line(project, mnist, cache, tmp_path, monkeypatch):
    """Trains a step of the project's task, and returns the line and what a check of the run is about."""
    asked = []
    quoted = checked.quoted
    monkeypatch.setattr(checked, "quoted", lambda *given: (asked.append(given), quoted(*given))[1])

    def train(*typed: str) -> tuple[str, dict]:
        name = f"run={len(asked)}"
        report = lockstep.train([f"runs_dir={tmp_path}", name, *options(mnist, cache), *SHORT, "task=mine", *typed])
        return report["across_processes"], checked.facts(*asked[-1][:2])

    return train


def test_a_run_quotes_its_check_until_something_changes(first_line, project, capsys):
    line, facts = first_line()
    assert line.startswith("not checked: ") and line.endswith(" task=mine")
    assert "src/mine/__init__.py" in facts["sources"]
    assert {"lockstep", "torch"} <= facts["versions"].keys() and len(facts["data"]) == 64
    check.store({"line": LINE, **facts})
    assert (project / "checks.json").is_file()
    assert first_line()[0] == LINE
    assert f"result: {LINE}" in " ".join(capsys.readouterr().out.split())
    same = ["optim.lr=0.1", "trainer.max_steps=2", "run=other", "trainer.accumulate_grad_batches=2", "seed=7"]
    assert first_line(*same)[0] == LINE
    assert first_line("optim=sgd")[0].startswith("not checked: ")
    assert first_line("trainer.precision=bf16-mixed")[0].startswith(
        f"{LINE}; bf16-mixed rounds each number by up to 4e-03"
    )
    line, other = first_line("model.dropout_fc=0.1")
    assert line.startswith("not checked since model.dropout_fc changed: ") and line.endswith("model.dropout_fc=0.1")
    check.store({"line": "of the other", **other})
    assert first_line("model.dropout_fc=0.1")[0] == "of the other" and first_line()[0] == LINE
    source = project / "src/mine/__init__.py"
    source.write_text(TASK + "# changed\n")
    line, facts = first_line()
    assert line.startswith("not checked since src/mine/__init__.py changed: ")
    check.store({"line": "again", **facts})
    assert first_line()[0] == "again" and len(checked.stored()) == 2
    for damaged in ("{", '[{"line": "x"}, 3]', "<<<<<<< HEAD\n[]"):
        (project / "checks.json").write_text(damaged)
        assert first_line()[0].startswith("not checked: ")
        with pytest.raises(UserError, match=r"checks\.json is damaged, so this check was not kept"):
            check.store({"line": LINE, **facts})
        assert (project / "checks.json").read_text() == damaged


def test_other_data_and_other_libraries_are_changes(first_line):
    _, facts = first_line()
    facts["versions"]["torch"] = "1.0"
    check.store({"line": LINE, **facts, "data": "0" * 64})
    assert first_line()[0].startswith("not checked since torch and 1 more changed: ")


class Net(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer


def of_module(module: Any) -> Any:
    module.trainer = SimpleNamespace(strategy=SimpleNamespace(arithmetic=StepArithmetic()))
    return SimpleNamespace(module=module, divided=True, needs_whole="")


@pytest.mark.parametrize(("layer", "compiled", "why"), [
    (nn.Linear(2, 2), False, ""),
    (nn.Dropout(0.1), False, ""),
    (nn.Dropout(0.1), True, "a compiled network"),
    (nn.Dropout(0.0), True, ""),
    (nn.BatchNorm1d(2), False, "batch normalisation"),
    (nn.BatchNorm1d(2).eval(), False, ""),
    (GlobalBatchNorm(2), False, ""),
    (nn.MultiheadAttention(4, 2), False, ""),
    (nn.TransformerEncoderLayer(4, 2), False, "MultiheadAttention layer.self_attn draws its own dropout"),
    (nn.LSTM(2, 2, 2, dropout=0.1), False, "LSTM layer draws"),
])  # fmt: skip
def test_what_is_known_without_trying(layer, compiled, why):
    loaders = of_module(Net(layer))
    found = summary.dependence(loaders, (), compiled=compiled)
    assert found.startswith(why) and bool(found) == bool(why)
    loaders.module.trainer.strategy.arithmetic = LogicalRanks(2)
    assert not summary.dependence(loaders, (), compiled=compiled)
    loaders.divided = False
    assert "does not divide" in summary.dependence(loaders, (), compiled=compiled)


def test_a_frozen_batch_norm_that_a_later_epoch_trains_counts():
    norm = nn.BatchNorm1d(2).eval()
    assert summary.dependence(of_module(Net(norm)), {norm}, compiled=False).startswith("batch normalisation")
