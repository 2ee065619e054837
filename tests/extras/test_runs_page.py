"""The page of many runs: what it holds, what it links to, and how large it is."""

import importlib
import json
import re
from pathlib import Path

import pytest
import yaml

from lockstep.errors import UserError
from lockstep.extras import runs_page

ledger = importlib.import_module("runs")


def write_run(folder: Path, *, steps: int = 3, acc: float = 0.9, config: dict | None = None, **report) -> None:
    """A run that is done, with two metrics, and with these keys of its config."""
    folder.mkdir(parents=True)
    known = {"run": folder.name, "seed": 0, "data": {"num_workers": 2}, "strategy": {}, "trainer": {}, "checkpoint": {}}
    (folder / "config.yaml").write_text(yaml.safe_dump(known | {"optim": {"lr": 1e-3}} | (config or {})))
    rows = [f"{step},{1 / step:.4f},{acc - 0.1 / step:.4f}" for step in range(1, steps + 1)]
    (folder / "metrics.csv").write_text("\n".join(["step,train/loss,val/acc", *rows]) + "\n")
    found = {"status": "done", "monitor": "val/acc", "monitor_mode": "max", "val/acc": acc, "test/acc": acc - 0.01, "unit": "images",
             "evaluated": "test/acc", "batch_size": 64, "wall_s": 61.0, "train/steps": steps, **report}  # fmt: skip
    (folder / "report.json").write_text(json.dumps(found))
    (folder / "report.html").write_text("")


def headings(page: str) -> list[str]:
    return re.findall(r'<th scope="col" class="[^"]*"[^>]*><button type="button">(.*?)</button>', page)


def page_of(folder: Path, *args: str, monkeypatch, out: str = "runs.html") -> str:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", ["runs.py", "html", "-o", out, *args])
    ledger.main()
    return Path(out).read_text()


def test_metrics_come_first_then_settings_that_differ_then_classes(tmp_path, monkeypatch):
    for number, lr in enumerate((1e-5, 3e-4)):
        optim = {"lr": lr, "_target_": f"torch.optim.{'AS'[number]}"}
        write_run(tmp_path / f"runs/sweep/{number}", acc=0.905 + number / 50, config={"optim": optim})
    page = page_of(tmp_path, monkeypatch=monkeypatch)
    assert headings(page) == ["run", "status", "val/acc", "test/acc", "steps", "images/s", "time", "optim.lr", "optim"]
    assert ">1e-05<" in page and ">0.0003<" in page  # all digits of a setting
    assert ">92.50%<" in page and re.findall(r'<tr data-run="(\S+)" class="best"', page) == ["sweep/1"]
    assert 'href="runs/sweep/1/report.html"' in page
    assert page.count("<path") == 2 * 4  # of two metrics, over steps and over samples
    chosen = page_of(tmp_path, "sweep/1", monkeypatch=monkeypatch, out="deep.html")
    assert "optim.lr" not in headings(chosen)
    assert chosen.count("<path") == 2 * 2


def test_a_component_that_differs_is_one_column_and_not_each_of_its_keys(tmp_path, monkeypatch):
    ddp = {"name": "ddp", "_target_": "lockstep.strategies.DDP", "bucket_cap_mb": 25, "static_graph": False}
    single = {"name": "single", "_target_": "lockstep.strategies.SingleDevice"}
    sgd, adam = {"lr": 0.1, "momentum": 0.9, "_target_": "torch.optim.SGD"}, {"lr": 0.2, "_target_": "torch.optim.Adam"}
    write_run(tmp_path / "runs/0", config={"strategy": single, "optim": sgd})
    write_run(tmp_path / "runs/1", config={"strategy": ddp, "optim": adam})
    page = page_of(tmp_path, monkeypatch=monkeypatch)
    assert headings(page)[6:] == ["time", "optim.lr", "strategy", "optim"]
    assert ">ddp<" in page and ">single<" in page


def test_runs_that_differ_by_their_seed_are_put_together(tmp_path, monkeypatch):
    for number, (lr, acc) in enumerate([(1e-3, 0.90), (1e-3, 0.92), (1e-2, 0.80), (1e-3, 0.1)]):
        status = "failed" if acc == 0.1 else "done"
        write_run(tmp_path / f"runs/{number}", acc=acc, status=status, config={"seed": number, "optim": {"lr": lr}})
    page = page_of(tmp_path, monkeypatch=monkeypatch)
    rows = page.split("averaged over seeds")[1].split("<tbody>")[1].split("</tbody>")[0].strip().split("\n")
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows]
    assert cells == [["0.001", "2", "91.00% ± 1.41%", "90.00% ± 1.41%"], ["0.01", "1", "80.00%", "79.00%"]]


def test_runs_of_different_data_are_not_ranked_together(tmp_path, monkeypatch):
    for name, data, acc in (("a", "mnist", 0.9), ("b", "mnist", 0.95), ("c", "photos", 0.7), ("d", "photos", 0.6)):
        write_run(tmp_path / f"runs/{name}", acc=acc, **{"data/name": data, "data/sha256": data})
    page = page_of(tmp_path, monkeypatch=monkeypatch)
    assert re.findall(r'<tr data-run="(\w)" class="best"', page) == ["b", "c"]
    assert re.findall(r"<h2>(\w+)<small> (\d) runs", page) == [("mnist", "2"), ("photos", "2")]
    assert [set(json.loads(each)) for each in re.findall(r"json\">(.*?)</script>", page)] == [{"a", "b"}, {"c", "d"}]


def test_runs_with_other_batches_are_also_drawn_over_the_samples_seen(tmp_path, monkeypatch):
    write_run(tmp_path / "runs/a")
    write_run(tmp_path / "runs/b", batch_size=128, config={"data": {"batch_size": 128}})
    page = page_of(tmp_path, monkeypatch=monkeypatch)
    values = re.findall(r'data-name="b" data-values="([\d.,e -]+)"', page)
    assert [each.split(" ")[0].split(",")[0] for each in values] == ["1", "128", "1", "128"]


def test_conditions_choose_and_none_is_refused(tmp_path, monkeypatch):
    for number in range(3):
        write_run(tmp_path / f"runs/{number}", acc=0.7 + number / 10)
    page = page_of(tmp_path, "--where", "val/acc>0.75", "--sort", "-val/acc", monkeypatch=monkeypatch)
    assert re.findall(r'<tr data-run="(\d)"', page) == ["2", "1"]
    with pytest.raises(UserError, match="no run meets"):
        page_of(tmp_path, "--where", "val/acc>2", monkeypatch=monkeypatch)


def test_damaged_runs_are_rows_and_names_are_text(tmp_path, monkeypatch):
    write_run(tmp_path / "runs/a")
    write_run(tmp_path / "runs/b")
    write_run(tmp_path / "runs/<script>alert(1)<", status="<script>x")
    (tmp_path / "runs/b/metrics.csv").write_text("step,x\nq,1\n")
    (tmp_path / "runs/b/report.json").write_text("{")
    (tmp_path / "runs/b/config.yaml").write_text(":")
    page = page_of(tmp_path, monkeypatch=monkeypatch)
    assert 'class="chip damaged"' in page
    assert page.count("<path") == 2 * 4  # of the other two
    assert "<script>alert" not in page
    assert page.count("</script>") == page.count("<script") == 2  # the page's own and the runs' values


@pytest.mark.slow
def test_a_hundred_runs_stay_small(tmp_path, monkeypatch):
    for number in range(100):
        write_run(tmp_path / f"runs/{number}", steps=500, batch_size=64 + number % 2)
    assert len(page_of(tmp_path, monkeypatch=monkeypatch)) < 3e6
    monkeypatch.setattr(runs_page, "METRICS", 1)
    assert page_of(tmp_path, monkeypatch=monkeypatch).count("<path") == 100 * 2
