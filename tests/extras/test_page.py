"""The page of a run: what it holds for runs that end, fail or resume, the same for every number of processes."""

import re
from pathlib import Path
from typing import Any

import building
import lightning.pytorch as pl
import pytest
import torch
from in_process import logged_steps
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix
from torchmetrics.regression import MeanSquaredError
from your_own import Page

import lockstep
from lockstep import ROOT
from lockstep.callbacks import FiniteLoss
from lockstep.config.draft import Draft, values_of
from lockstep.config.settings import Settings
from lockstep.extras import page as pages
from lockstep.extras.panels import classes_of, is_right
from lockstep.kit.panels import Bars, Gallery, Matrix, Panel, Sample
from lockstep.kit.tasks import Classification
from lockstep.launch import local
from lockstep.run import RunFolder

pytestmark = pytest.mark.xdist_group("page")


def page_of(run: str) -> str:
    return Path("runs", run, "report.html").read_text()


def section(page: str, name: str) -> str:
    return page.split(f'<section id="{name}">')[1].split("</section>")[0]


def test_a_page_holds_what_is_known_of_a_run(run_a):
    page = page_of("a")
    for name in ("training", "test", "samples", "time", "commands", "metrics"):
        assert section(page, name)
    low, high = (float(x) for x in re.search(r"95% interval ([\d.]+) to ([\d.]+)%", page).groups())
    assert low < 100 * run_a["test/acc"] < high
    assert "103 images" in page
    counts = [part.count("<img") for part in section(page, "samples").split("<h3>")[1:]]
    assert counts == [24, 16, 16]  # the largest losses, random samples, the first batch
    assert page.count('data-right="right"') + page.count('data-right="wrong"') == 24 + 16
    assert "<td>loader.batch_size</td>" in page.replace(' class="mono"', "")
    assert " run=a" in section(page, "commands")
    assert "resume=a trainer.max_epochs=2" in section(page, "commands")
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")  # it needs no network
    assert len(page) < 150_000
    assert "data-every-s" not in page  # it is the last one
    parts = {name: run_a[f"time/{name}_s"] for name in pages.PARTS}
    assert sum(parts.values()) == pytest.approx(run_a["wall_s"], rel=0.02)
    assert min(parts.values()) >= 0


@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec")
def test_matrix_and_samples_are_those_of_the_checkpoints_predictions(run_a):
    settings = Settings.of(values_of(Draft.of_run(RunFolder("runs/a"))))
    data = building.batches(settings)
    net = building.module(settings.replace({"init_from": str(Path("runs/a", run_a["checkpoint"]))}), data).net.eval()
    batch = data.evaluated.preprocess(data.raw("test", range(103)))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=run_a["precision"] == "bf16-mixed"):
        logits = net(batch["input"]).float()
    panels = lockstep.load_report("a").panels
    assert panels["Confusion matrix"].values == MulticlassConfusionMatrix(10)(logits, batch["target"]).tolist()
    loss = torch.nn.functional.cross_entropy(logits, batch["target"], reduction="none")
    worst = panels["Largest losses"].samples
    assert [sample.index for sample in worst[:5]] == loss.argsort(descending=True)[:5].tolist()
    assert (worst[0].image_CHW == data.raw("test", [worst[0].index])["input"][0].numpy()).all()


def test_names_classes_and_values_are_text(run_a):
    evil = "<script>alert(3)</script>"
    report = {**run_a, "run": evil, "model": evil, "status": "failed", "error": "<script>alert(1)</script>"}
    folder = RunFolder("runs/a")
    config = values_of(Draft.of_run(folder).replace({"data.root": "<script>alert(2)</script>"}))
    panels = [
        Matrix(evil, [evil, "b"], [[1, 2], [3, 4]], evil),
        Bars(evil, evil, evil, [0, 1, 2], [1, 2]),
        Gallery(evil, [Sample(0, {"target": evil, "prediction": evil, evil: evil})]),
    ]
    pages.write_page(folder, config, report, None, panels)
    page = page_of("a")
    assert page.count("<script>") == page.count("</script>") == 1
    assert "&lt;script&gt;alert(2)" in page


def test_a_failed_run_has_a_page_with_its_error_and_last_rows(train, crash_at, capsys):
    crash_at(7)
    with pytest.raises(RuntimeError):
        train("run=bad", "trainer.log_every_n_steps=1")
    page = page_of("bad")
    assert "report: runs/bad/report.html" in capsys.readouterr().out.splitlines()
    assert "<h1>Failed</h1>" in page and re.search(r"the log ends at step [67]<", page)
    assert 'class="chip failed"' in page
    assert "Crash" in section(page, "notes")
    assert "The last rows of the log" in page
    assert "lockstep train run=bad resume=auto" in page
    assert "<path" in section(page, "training")
    assert 'id="test"' not in page


def test_a_train_py_that_hands_over_no_page_writes_none(train, monkeypatch, capsys):
    text = (ROOT / "train.py").read_text()
    for part in (", page=write_page", ", write_page", ", LivePage(config)"):
        assert part in text
        text = text.replace(part, "")
    Path("train.py").write_text(text)
    monkeypatch.setattr(local, "script", lambda _: Path("train.py"))
    assert train("run=bare", "trainer.max_steps=2")["status"] == "done"
    assert "runs/bare/report.json" in capsys.readouterr().out.splitlines()
    assert not {"report.html", "panels.json"} & {path.name for path in Path("runs/bare").iterdir()}
    report = lockstep.load_report("bare")
    assert report.panels == {} and report.curves and report._repr_html_() is None


@pytest.mark.slow
def test_a_page_renews_itself_while_the_run_trains(train, monkeypatch):
    seen = []

    def look(self, trainer, *_) -> None:
        if not trainer.sanity_checking:
            seen.append(page_of("live"))

    monkeypatch.setattr(FiniteLoss, "on_validation_end", look)
    monkeypatch.setattr(pages.LivePage, "EVERY_S", 0.0)
    monkeypatch.setattr(pages.LivePage, "PAUSE", 0)
    train("run=live", "trainer.log_every_n_steps=2", "checkpoint.every_n_steps=5", "trainer.val_check_interval=10")
    page = seen[0]
    assert 'content="0.0"' in page and 'class="chip running"' in page
    assert re.search(r'<progress max="12" value="(\d+)"', page)
    for name in ("Step", "Epoch", "Time left", "Last checkpoint"):
        assert f"<dt>{name}</dt>" in page
    assert "last.ckpt, " in page and "<path" in section(page, "training")
    assert "data-every-s" not in page_of("live") and 'http-equiv="refresh' not in page_of("live")


class Broken(Panel):
    def update(self, output, batch, loss_B):
        raise LookupError("no such thing")


def test_a_panel_of_the_users_is_shown_and_one_that_fails_costs_no_figure(tmp_path, mnist, cache, monkeypatch):
    known = Classification.test_panels
    monkeypatch.setattr(Classification, "test_panels", lambda self: {"own": Broken(), **known(self)})
    monkeypatch.chdir(Page("panel").write(tmp_path))
    options = [f"data.root={mnist}", f"data.cache_dir={cache}", "loader.batch_size=48", "trainer.accelerator=cpu"]
    report = lockstep.train(["run=b", *Page("panel").typed[0], *options, "trainer.max_steps=2"])
    assert (report["status"], report["test/count"]) == ("done", 103)
    assert "the report omits the panel own, which failed: LookupError: no such thing" in page_of("b")
    shown = section(page_of("b"), "test")
    assert "Wrong predictions" in shown and "<rect" in shown and "Confusion matrix" in shown


def test_the_first_batch_is_shown_as_the_network_saw_it():
    batch = {"input": torch.zeros(3, 1, 4, 4), "target": torch.tensor([1, 0, 1]), "index": torch.tensor([7, 8, 9])}
    samples = pages.samples_of(batch, {"mean": [0.5], "std": [0.25], "classes": ["cat", "dog"]})
    assert [sample.index for sample in samples] == [7, 8, 9]
    assert [sample.facts["target"] for sample in samples] == ["dog", "cat", "dog"]
    assert (samples[0].image_CHW == 128).all()
    assert (
        pages.samples_of({"input": torch.zeros(3, 5)}, {})
        == pages.samples_of(None, {})
        == pages.samples_of([], {})
        == []
    )
    pairs = pages.samples_of([torch.rand(2, 3, 4, 4), torch.rand(2)], {})
    assert [sample.facts for sample in pairs] == [{}, {}]


def test_a_short_run_has_curves_with_the_same_interval_when_resumed(train):
    train("run=short", "trainer.max_steps=41")
    assert len(logged_steps("short")) == 20
    drawn = section(page_of("short"), "training")
    assert drawn.count("<path") >= 4  # loss, learning rate, speed, memory
    train("run=short", "resume=auto", "trainer.max_steps=81")  # every 4 steps if it were decided again
    assert len(logged_steps("short")) == 40
    assert "Resumed 1 time" in page_of("short")


def drawn(metrics: dict[str, torch.nn.Module], **columns: list[float]) -> list[dict]:
    """The charts of these columns of metrics.csv, for a task with these metrics."""
    series = {f"val/{name}": list(enumerate(values)) for name, values in columns.items()}
    curves = [(name, "", (f"val/{name}",)) for name in columns]
    module: Any = lockstep.Module()
    module.curves, module.evaluated = (lambda: curves), {"val": (None, metrics)}
    return list(pages.drawn_curves(module, set(), series, {}))


def axis(chart: dict) -> list[str]:
    """The numbers on the y axis, from below."""
    return re.findall(r'text-anchor="end">([-\d.]+%?)<', chart["svg"])


def test_one_value_is_a_number_and_axes_of_fractions_end_at_1():
    metrics = {"share": MulticlassAccuracy(3), "error": MeanSquaredError(), "acc": MulticlassAccuracy(3)}
    flat, rising = [0.9, 0.9, 0.9], [0.9, 0.95]
    share, error, unknown, one, acc = drawn(metrics, share=flat, error=flat, unknown=rising, one=[0.12345], acc=rising)
    assert [max(map(float, axis(chart))) for chart in (share, error)] == [1.0, 1.2]
    assert "<path" in unknown["svg"]
    assert (one["svg"], one["values"]) == ("", [("", "0.1235")])
    assert axis(acc)[:2] == ["90%", "91%"]
    values = [(metrics, 0.925), ({}, 92.5)]  # a metric that is not the task's may be in percent already
    assert [drawn(known, acc=[acc])[0]["values"] for known, acc in values] == [[("", "92.50%")], [("", "92.5000")]]


def test_samples_are_filtered_by_each_of_their_labels_and_names_may_have_commas():
    one, none = Sample(0, {"target": "tench, Tinca tinca", "prediction": "hen"}), Sample(1, {"target": 2.5})
    several = Sample(2, {"target": ["a", "b"], "prediction": ["a", "b"]})
    assert classes_of([Gallery("", [one, none, several])]) == ["a", "b", "tench, Tinca tinca"]
    assert [is_right(sample) for sample in (one, none, several)] == [False, None, True]


def test_curves_of_unknown_metrics_are_grouped():
    logged = ["train_loss", "val_loss", "val/acc", "val/count", "train/samples_per_s"]
    module = pl.LightningModule()
    charts = list(pages.drawn_curves(module, set(), {name: [(1, 0.5), (2, 0.25)] for name in logged}, {}))
    assert [chart["title"] for chart in charts] == ["loss", "acc", "Speed"]
    assert re.findall(r'<path .*?data-name="(.*?)"', charts[0]["svg"]) == ["train_loss", "val_loss"]
    assert list(pages.drawn_curves(module, set(), {}, {})) == []  # of a run that failed before its first row
    assert pages.labels(["train/loss", "val/loss"]) == ["train", "val"]
    assert pages.labels(["val/rmse", "val/mae"]) == ["rmse", "mae"]
    assert pages.labels(["a", "b"]) == ["a", "b"]
