"""How progress is shown: a bar on a terminal, a line that is rewritten in a notebook, else a line now and then; and what frameworks
say and Lockstep does not pass on."""

import io
import itertools
import json
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.accelerators import cuda
from lightning.pytorch.accelerators import CUDAAccelerator
from rich.console import Console

import lockstep
from lockstep.launch import sweeps
from lockstep.machine import process
from lockstep.reporting import console
from lockstep.reporting.console import ProgressLine


@pytest.fixture
def now_s(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.fixture
def all_lines(monkeypatch):
    monkeypatch.setattr(console, "LINES_S", (-1.0, -1.0))


def lines_of(capsys) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_a_day_of_training_leaves_a_few_hundred_lines(now_s, capsys):
    line = ProgressLine("step", 86_400)
    for step in range(5, 86_401, 5):
        now_s[0] += 5
        if line.due(step):
            line.show("epoch 1", step, "loss 0.5", "")
    line.end()
    lines = lines_of(capsys)
    assert 300 < len(lines) < 700
    assert lines[0] == "epoch 1 · step 15/86,400 · 23:59:45 left · loss 0.5"
    steps = [int(re.search(r"step ([\d,]+)/", line)[1].replace(",", "")) for line in lines]
    assert max(b - a for a, b in itertools.pairwise(steps)) < 0.011 * 86_400


def test_a_notebook_gets_one_line_that_is_written_again(now_s, capsys, monkeypatch):
    monkeypatch.setattr(process, "from_notebook", True)
    line = ProgressLine("step", 3600)
    for step in range(1, 3601):
        now_s[0] += 1
        if line.due(step):
            line.show("epoch 1", step, "loss 0.5")
    line.end()
    print("next")
    written, after, _ = capsys.readouterr().out.split("\n")
    assert after == "next"
    texts = written.split("\r")[1:]
    assert 300 < len(texts) < 1000
    assert re.match(r"epoch 1 · step 3,(59\d|600)/3,600", texts[-1])
    for before, text in itertools.pairwise(texts):  # what was longer is overwritten
        assert len(text) >= len(before.rstrip())


@pytest.fixture
def terminal(monkeypatch):
    made = io.StringIO()
    made.isatty = lambda: True
    monkeypatch.setattr(console, "out", Console(file=made, force_terminal=True, width=80, color_system="standard"))
    return made


LINK = re.compile(r"\x1b\]8;[^;]*;([^\x1b]*)\x1b\\")


def on_screen(terminal: io.StringIO) -> list[str]:
    """All lines that a terminal shows, one after the other, without colours and links."""
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", LINK.sub("", terminal.getvalue())))


@pytest.mark.parametrize("total", [1000, None])
def test_a_bar_on_a_terminal_is_one_line_with_what_fits(total, now_s, terminal):
    line = ProgressLine("step", total, first=400)  # as of a resumed run
    assert not line.due(500) and line.due(1000) == (total is not None)  # the last step is always shown
    now_s[0] += 60
    assert line.due(500)
    line.show("epoch 1", 500, "loss 0.1234 · 4,100 images/s · 3% waiting for data", "saved 0:12 ago")
    line.end()
    last = [line for line in on_screen(terminal) if line][-1]
    shown = "500/1,000 · 5:00 left" if total else "500/?"
    # without what does not fit: waiting for data, and the last checkpoint
    assert re.fullmatch(rf"epoch 1 [━╸╺]{{16}} {re.escape(shown)} · loss 0.1234 · 4,100 images/s", last)


def test_a_run_fits_into_80_columns_and_its_paths_can_be_copied(train, terminal):
    name = "basic_net-mnist-20261125-033520-ab12"
    report = train(f"run={name}", "debug=one_batch")
    lines = on_screen(terminal)
    assert [line for line in lines if len(line) > 80 and not line.startswith("evaluate it: ")] == []
    assert lines[0].startswith(f"{name}: basic_net (151,306 parameters) ·")
    assert any(line.endswith(" · 1 step") for line in lines)
    done, checkpoint, page, again = (line for line in lines[-5:] if line)
    assert re.fullmatch(r"done: 1 step in [\d.]+ m?s; checkpoint and report:", done)
    assert (checkpoint, page) == (f"runs/{name}/{report['checkpoint']}", f"runs/{name}/report.html")
    assert LINK.findall(terminal.getvalue())[0] == Path(page).resolve().as_uri()
    assert re.fullmatch(rf"evaluate it: \S.* run={name}", again)
    assert sum(name in line for line in lines) == 4  # the first line, two paths and the command


def test_a_narrow_terminal_gets_a_sweeps_first_columns(terminal, tmp_path):
    figures = {f"test/{i}": 0.5 for i in range(9)}
    row = {"run": "s/0", "overrides": "", "status": "done", "evaluated": " | ".join(figures), **figures}
    sweeps.print_table([row], [], tmp_path / "results.csv")
    lines = on_screen(terminal)
    assert max(map(len, lines[:-3])) <= 80
    assert "test/3" in lines[1] and "test/8" not in lines[1]
    assert lines[-3:] == ["done: 1 run; all columns are in", str(tmp_path / "results.csv"), ""]


def test_a_run_tells_loss_speed_waiting_and_the_last_checkpoint(train, all_lines, capsys):
    train("trainer.log_every_n_steps=6", "trainer.max_epochs=2", "checkpoint.every_n_steps=5")
    found = lines_of(capsys)
    lines = [line for line in found if line.startswith("epoch") and "validation" not in line and "val/loss" not in line]
    assert [line.split(" · ")[:2] for line in lines] == [
        [f"epoch {1 + (s > 12)}", f"step {s}/24"] for s in range(1, 25)
    ]
    figures = r"\d:\d\d left · loss \d\.\d{4} · [\d,]+ images/s · \d+% waiting for data"
    assert [bool(re.search(figures, line)) for line in lines] == [s >= 6 for s in range(1, 25)]
    assert ["saved 0:0" in line for line in lines] == [s > 5 for s in range(1, 25)]
    assert "val/acc" in lines[-1]
    validated = [line for line in found if "validation batch" in line]
    assert [" · validation batch 1 · " in line for line in validated] == [True, True]
    rows = [line for line in found if "val/loss" in line]
    row = r"epoch %d · step %d · loss \d\.\d{4} · val/loss \d\.\d{4} · val/acc [\d.]+%%( best)? · \d:\d\d"
    assert all(re.fullmatch(row % (epoch, 12 * epoch), line) for epoch, line in enumerate(rows, 1)) and len(rows) == 2
    best = sorted(Path("runs").glob("*/checkpoints/best-step-*.ckpt"))
    marked = [line for line in rows if " best" in line]
    assert " best" in rows[0] and [f"step {path.stem.removeprefix('best-step-')} " in marked[-1] for path in best] == [
        True
    ]
    assert [line for line in found if line.startswith("test · batch 1/1 · 0:00 left · ")]


def test_no_bar_no_line(train, all_lines, capsys):
    train("trainer.log_every_n_steps=6", "trainer.enable_progress_bar=false")
    assert "left" not in capsys.readouterr().out


def test_predict_tells_how_far_it_is(run_a, all_lines, capsys):
    assert run_a["status"] == "done"
    found = lockstep.predict(["run=a", "input=test", "loader.eval_batch_size=25", "trainer.accelerator=cpu"])
    lines = [line for line in lines_of(capsys) if line.startswith("predict · ")]
    assert [line.split(" · ")[1] for line in lines] == [f"batch {i}/5" for i in range(1, 6)]
    assert all(re.search(r"\d:\d\d left · [\d,]+ images/s$", line) for line in lines)
    assert json.loads(Path("runs/a/predict.json").read_text()) == found


def test_a_gpu_that_is_not_wanted_is_no_warning(monkeypatch):
    monkeypatch.setattr(CUDAAccelerator, "is_available", lambda: True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for expected in (True, False):
            pl.Trainer(accelerator="cpu", logger=False)
            assert any("not used" in str(each.message) for each in told) == expected
            console.quiet(0)
            told.clear()


def test_the_advice_about_tensor_cores_is_not_given(monkeypatch, capsys, caplog):
    """`tf32` has that setting, and false is meant."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H100")
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
    console.quiet(0)
    cuda._check_cuda_matmul_precision.cache_clear()
    cuda._check_cuda_matmul_precision(torch.device("cuda", 0))
    said = capsys.readouterr()
    assert "Tensor Cores" not in said.out + said.err + caplog.text
