"""The arithmetic of benchmarks/benchmark.py against figures worked out by hand, and a whole benchmark of a few steps."""

import subprocess
import sys

import benchmark
import pytest
from benchmark import Figures, problems, ratio, table

from lockstep import ROOT
from lockstep.config.checks import resolve


def figures(*rates: float, accuracy: float | None = None, waited_s: float | None = 0.5, **metadata: object) -> Figures:
    """One turn of two seconds for each rate in images/s."""
    turns = [{"images": round(2 * rate), "seconds": 2.0, "waited_s": waited_s, **metadata} for rate in rates]
    return Figures(turns, accuracy)


def test_ratios_are_taken_within_a_round():
    """The machine is four times slower in the second round: medians of the rates would say 200/100 = 2, or less."""
    contenders = {"plain": figures(400, 100, 100), "lockstep": figures(600, 150, 200)}
    assert ratio(contenders, "lockstep", "plain") == 1.5
    assert ratio(contenders, "lockstep", "bare loop") is ratio(contenders, "lockstep", None) is None
    with pytest.raises(ValueError, match="longer"):  # a round is missing
        ratio({"plain": figures(100, 100), "lockstep": figures(100)}, "lockstep", "plain")


def test_what_is_a_problem():
    """Ratios below the limits of those that ran, long waiting, and accuracies that are far apart."""
    contenders = {"plain": figures(100, 100, waited_s=1.0), "lockstep": figures(119, 121, waited_s=0.1)}
    assert list(problems(contenders, {("lockstep", "plain"): 1.2, ("lockstep", "bare loop"): 0.9})) == []
    (problem,) = problems(contenders, {("lockstep", "plain"): 1.21})
    assert problem == "lockstep is 1.20 times as fast as plain; at least 1.21 is expected"
    waits = {"lockstep": figures(100, waited_s=0.12), "bare loop": figures(100, waited_s=None)}
    assert list(problems(waits, {})) == []
    (problem,) = problems(waits, {("lockstep", "plain"): 1.0})
    assert problem == "lockstep waits for data for 6.0% of its time; at most 5% is expected"
    near = {"plain": figures(1, accuracy=0.98), "lockstep": figures(1, accuracy=0.985), "bare loop": figures(1)}
    assert list(problems(near, {})) == []
    (problem,) = problems({**near, "accelerate": figures(1, accuracy=0.96)}, {})
    assert "accelerate reached 96.00%" in problem and "98.00%" in problem


def test_the_table_has_an_empty_cell_for_what_is_not_known():
    plain = figures(100, 300, 200, accuracy=0.5, peak_bytes=2**30, peak_device_bytes=None)
    ours = figures(1.5, 1.5, 1.5, waited_s=None, precision="bf16-mixed", peak_bytes=2**30, peak_device_bytes=2**20)
    lines = table({"plain": plain, "lockstep": ours}).splitlines()
    assert lines[2] == "| plain | 32-true | 200 (100 to 300, 3) | 1.00 |  | 25.0% | 50.00% | 1,024 |"
    assert lines[3] == "| lockstep | bf16-mixed | 1.5 (1.5 to 1.5, 3) | 0.01 |  |  |  | 1,024 + 1 |"


def test_a_peer_that_is_not_installed_is_skipped_with_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setattr(benchmark.importlib.util, "find_spec", lambda name: None if name == "accelerate" else object())
    found = benchmark.chosen(benchmark.PEERS, 1, ["compile=true tf32=true"])
    ours = ["lockstep compile=true tf32=true"]
    assert list(found) == ["plain", "tuned", "lightning", "transformers", *benchmark.OURS, *ours]
    assert found[ours[0]] == ("lockstep", ["compile=true", "tf32=true"])
    assert "accelerate is skipped" in (said := capsys.readouterr().err) and "uv run --group peers" in said
    assert not any("bare loop" in name for name in benchmark.chosen(["plain"], world=2))
    # all that compute in fp32 on a GPU have the same TF32
    for device, more in (("cuda", ["tf32=true"]), ("cpu", [])):
        for name, (kind, options) in benchmark.chosen(["plain"], 1).items():
            fp32 = kind == "plain" or "equal precision" in name
            assert benchmark.arithmetic(kind, options, device) == [*options, *(more if fp32 else [])]


def test_peers_multiply_as_tf32_says(mnist, cache, monkeypatch):
    import contenders
    import torch

    # a check refuses it on a CPU
    monkeypatch.setattr(contenders, "resolve", lambda given: resolve(given).replace({"tf32": True}))
    for module in (torch.backends.cuda.matmul, torch.backends.cudnn):
        monkeypatch.setattr(module, "allow_tf32", False)
    contenders.Work([f"data.root={mnist}", f"data.cache_dir={cache}", "trainer.max_epochs=1"])
    assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is True


@pytest.mark.full  # seven processes with torch, four of them with Lightning: half a minute on two cores
def test_a_whole_benchmark(tmp_path):
    """All contenders of --quick take turns, learn for as long as the plain loop does, and are told to end."""
    options = [
        "--quick",
        "--peers",
        "plain,tuned,lightning",
        "--device",
        "cpu",
        "--segment",
        "2",
        "--rounds",
        "2",
        "--accuracy",
    ]
    command = [sys.executable, str(ROOT / "benchmarks/benchmark.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    rows = {line.split(" | ")[0].strip("| "): line.split(" | ") for line in done.stdout.splitlines() if "|" in line}
    names = [
        "plain",
        "tuned",
        "lightning",
        "lockstep",
        "lockstep equal precision",
        "bare loop",
        "bare loop equal precision",
    ]
    assert [name for name in rows if name in names] == names, done.stderr
    assert rows["lockstep equal precision"][1] == "32-true"
    for name in names:
        assert ", 2)" in rows[name][2] and float(rows[name][3]) > 0
    assert rows["tuned"][1] == "bf16"
    for name in names[:5]:
        assert 0.5 < float(rows[name][6].strip("|% ")) / 100 <= 1, rows[name]
    assert list(tmp_path.iterdir()) == []
