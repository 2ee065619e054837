"""`lockstep.load_report`: what the files of a run hold, and what a notebook shows of it."""

import html
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from in_process import rows

import lockstep
from lockstep.errors import UserError
from lockstep.extras.panels import write_panels
from lockstep.kit.panels import Bars, Gallery, Lines, Mask, Matrix, Picture, Points, Sample, Share, Table, Tokens
from lockstep.reporting.report import read_panels


def test_a_report_is_what_the_files_say(run_a):
    report = lockstep.load_report("a")
    assert report == run_a == json.loads(json.dumps(report))
    assert lockstep.load_report("runs/a") == lockstep.load_report(Path("runs/a").resolve()) == report
    logged = rows("a")
    for name in ("train/loss", "val/acc", "test/acc"):
        steps, values = report.curves[name]
        assert values == [float(row[name]) for row in logged if row[name]]
        assert steps[-1] == run_a["train/steps"]
    assert report.curves["train/loss"].steps == list(range(1, 13))
    assert report.curves["val/acc"].values[-1] == report["val/acc"]
    frame = report.frame()
    assert frame["train/loss"].dropna().tolist() == report.curves["train/loss"].values
    assert len(frame) == len(logged)


def test_the_panels_are_those_of_the_page(run_a):
    panels = lockstep.load_report("a").panels
    page = Path("runs/a/report.html").read_text()
    assert {title for title in panels if f"<h3>{title}" not in page} == set()
    worst = panels["Largest losses"].samples
    assert len(worst) == 24 and f"#{worst[0].index}</small>" in page
    assert worst[0].image_CHW.shape == (1, 28, 28)  # as it lies on the disk


def test_every_panel_comes_back_from_its_file(tmp_path):
    noise_CHW = np.random.default_rng(0).integers(0, 256, (3, 20, 30), dtype=np.uint8)
    mask_HW = torch.tensor([[-1, 0, 300], [1, 2, 3]])
    mask = Mask(mask_HW, ignored=-1)
    facts = {
        "loss": float("inf"), "top": [("a", 0.5)], "mask": mask, "text": Tokens([("ab", 1.5)]),
        "again": Picture(noise_CHW), "curve": Lines("curve", "x", "y", {"a": [(0, 1.0), (1, float("nan")), (2, 3.0)]}),
    }  # fmt: skip
    panels = [
        Table("table", ["class", "recall"], [["a", Share(3, 4)], ["b", np.float32(0.5)]], "note"),
        Matrix("matrix", ["a", "b"], [[1, 2], [3, 4]]),
        Lines("lines", "x", "y", {"a": [(0.0, 1.0)]}),
        Points("points", "x", "y", [(0.0, 1.0)], diagonal=True),
        Bars("bars", "x", "y", [0.0, 1.0, 2.0], [3, 4]),
        Gallery("gallery", [Sample(7, facts, noise_CHW), Sample(None, {"own": {1, 2} and object}, noise_CHW[:1])]),
    ]
    path = tmp_path / "panels.json"
    assert read_panels(path) == []
    write_panels(path, panels)
    found = read_panels(path)
    assert [panel.kind for panel in found] == [type(panel).__name__ for panel in panels]
    assert (found[1].values, found[3].points, found[3].diagonal) == ([[1, 2], [3, 4]], [[0.0, 1.0]], True)
    *_, gallery = found
    assert (gallery.samples[0].image_CHW == noise_CHW).all()
    assert (gallery.samples[1].image_CHW == noise_CHW[:1]).all()
    assert gallery.samples[0].facts["mask"].classes_HW.tolist() == mask_HW.tolist()
    assert (gallery.samples[0].facts["again"].image_CHW == noise_CHW).all()
    assert str(gallery.samples[0].facts["curve"].series) == "{'a': [[0.0, 1.0], [1.0, nan], [2.0, 3.0]]}"
    assert vars(found[0].rows[0][1]) == {"kind": "Share", "right": 3, "count": 4}
    for damage in ("[", "[1]", "{}", '[{"__panel__": "Other"}]', '[{"__panel__": "Table"}]'):
        path.write_text(damage)
        with pytest.raises(UserError, match=r"panels\.json is damaged"):
            read_panels(path)


def test_a_notebook_shows_the_whole_page(run_a):
    frame = lockstep.load_report("a")._repr_html_()
    source = re.search('srcdoc="([^"]*)"', frame)[1]
    assert html.unescape(source) == Path("runs/a/report.html").read_text()
    assert 'sandbox="allow-scripts' in frame  # not allow-same-origin: the page's script must not reach the notebook


def test_a_run_that_failed_early_has_a_report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/bad").mkdir(parents=True)
    Path("runs/bad/report.json").write_text('{"status": "failed", "run": "bad", "error": "a < b"}')
    report = lockstep.load_report("bad")
    assert (report.curves, report.panels, len(report.frame())) == ({}, {}, 0)
    assert report._repr_html_() is None  # a notebook shows the dict


def test_what_is_no_run_is_told(run_a):
    with pytest.raises(
        UserError,
        match=r"b: neither a checkpoint nor a run \(runs/b/report.json or b/report.json is missing\)\. Runs there: a\.",
    ):
        lockstep.load_report("b")
