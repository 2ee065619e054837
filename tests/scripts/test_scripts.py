"""What is done with runs after they ended: models loaded and exported, runs compared."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import compare_runs
import consolidate
import export as export_script
import pytest
import torch

import lockstep
from lockstep import ROOT, errors
from lockstep.errors import UserError
from lockstep.extras.pruning import Pruned
from lockstep.launch.exits import exit_code

pytestmark = pytest.mark.xdist_group("scripts")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, mnist, cache) -> Path:
    """Two runs that differ by their seed, one more like the first, and one of a network of timm with an average."""
    runs = tmp_path_factory.mktemp("scripts") / "runs"
    trainer = "trainer.accelerator=cpu trainer.max_steps=6 trainer.log_every_n_steps=1 trainer.limit_val_batches=1"
    data = f"runs_dir={runs} data.root={mnist} data.cache_dir={cache} loader.batch_size=48"
    base = f"{data} {trainer} checkpoint.every_n_steps=3".split()
    timm = ["model=timm", "model.name=test_resnet", "callbacks=[default,ema]"]
    for run, more in {"a": [], "b": ["seed=1", "checkpoint.save_top_k=2"], "again": [], "timm": timm}.items():
        lockstep.train([*base, f"run={run}", *more])
    return runs


@pytest.mark.parametrize("run", ["a", "timm"])
def test_a_model_is_loaded_as_it_was_tested(runs, run):
    net = lockstep.load_model(runs / run)
    report = json.loads((runs / run / "report.json").read_text())
    assert type(net).__module__.split(".")[0] in ("project", "timm")
    assert not net.training
    tested = torch.load(runs / run / report["checkpoint"], weights_only=True)["state_dict"]
    assert {f"net.{key}" for key in net.state_dict()} == {key for key in tested if key.startswith("net.")}
    assert all(torch.equal(value, tested[f"net.{key}"]) for key, value in net.state_dict().items())


@pytest.mark.slow
def test_loading_a_model_imports_no_logger(runs):
    code = "import sys, lockstep; print(type(lockstep.load_model('runs/a')).__name__, {'mlflow', 'wandb'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], cwd=runs.parent, capture_output=True, text=True, timeout=120)
    assert done.stdout == "BasicNet set()\n", done.stderr


def test_a_model_is_found_by_name_directory_or_checkpoint(runs, monkeypatch, tmp_path):
    monkeypatch.chdir(runs.parent)
    moved = tmp_path / "moved.ckpt"
    shutil.copyfile(runs / "a" / json.loads((runs / "a" / "report.json").read_text())["checkpoint"], moved)
    states = [lockstep.load_model(what).state_dict() for what in ("a", "runs/a", str(runs / "a"), moved)]
    assert all(torch.equal(state[key], states[0][key]) for state in states for key in state)
    with pytest.raises(UserError, match=r"load_model=nothing: neither a checkpoint nor a run .* Runs there: .*"):
        lockstep.load_model("nothing")
    moved.write_bytes(moved.read_bytes()[:1000])
    with pytest.raises(UserError, match="is incomplete, or is not a checkpoint"):
        lockstep.load_model(moved)


def run_main(monkeypatch, capsys, module, *args: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, args)])
    returned: list[int | None] = []
    code = exit_code(lambda: returned.append(module.main()))
    return code or returned[0] or 0, *capsys.readouterr()


def test_the_scripts_tell_what_is_wrong(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(runs.parent)
    (tmp_path / "there").mkdir()
    for module, args, told in (
        (export_script, ("nothing",), "run=nothing: neither a checkpoint nor a run"),
        (export_script, ("a", tmp_path / "there"), "exists. Pass a different folder"),
        (consolidate, ("runs/a/checkpoints/last.ckpt",), "is not a complete sharded checkpoint"),
        (compare_runs, ("a", "nothing"), "nothing: neither a checkpoint nor a run"),
    ):
        code, _, err = run_main(monkeypatch, capsys, module, *args)
        assert (code, err.startswith("error: "), told in err) == (2, True, True), err


@pytest.mark.parametrize("typed", [
    "export.py", "export.py nothing", "consolidate.py", "consolidate.py nothing", "compare_runs.py a b", "runs.py show nothing",
    "show_batch.py optm.lr=1", "new.py",
])  # fmt: skip
def test_a_wrong_command_is_rejected_before_torch_is_imported(typed, tmp_path):
    script, *args = typed.split()
    command = [sys.executable, "-X", "importtime", str(ROOT / "scripts" / script), *args]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert not re.search(r"\| +(torch|lightning|timm)$", done.stderr, re.MULTILINE)


@pytest.mark.parametrize("typed", [
    "export.py s3://b/run", "export.py a s3://b/a", "consolidate.py a s3://b/a.ckpt", "runs.py --runs-dir gs://b", "runs.py html -o s3://b/all.html",
    "show_batch.py --out s3://b/batch.png", "new.py s3://b/mine",
])  # fmt: skip
def test_a_url_makes_no_local_folder(typed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    script, *args = typed.split()
    monkeypatch.setattr(sys, "argv", [script, *args])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "scripts" / script))["main"]()
    assert (end.value.code, [*tmp_path.iterdir()]) == (2, [])
    assert "is a URL, which is not supported. Pass a path, local or in a mounted folder." in capsys.readouterr().err


def test_where_two_runs_differ_is_told(runs, monkeypatch, capsys):
    code, out, _ = run_main(monkeypatch, capsys, compare_runs, runs / "a", runs / "again", "--exact")
    assert code == 0, out
    assert out.splitlines()[-1] == "the results are bit-identical"
    assert out.count("no difference") == 5
    code, out, _ = run_main(monkeypatch, capsys, compare_runs, runs / "a", runs / "b", "--json")
    found = json.loads(out)
    assert (code, found["verdict"], found["tolerance"]) == (1, "different", 1e-6)
    assert found["differences"]["config"] and {"seed: 0 | 1", "checkpoint.save_top_k: 1 | 2"} == {
        *found["differences"]["config"]
    }
    code, out, _ = run_main(monkeypatch, capsys, compare_runs, runs / "a", runs / "b")
    assert code == 1
    for told in ("  seed: 0 | 1", "  checkpoint.save_top_k: 1 | 2", "data: no difference", "last: state_dict:", "the results differ",
                 "train/loss: 6 of 6 rows differ, the first at step 1"):  # fmt: skip
        assert told in out


def test_every_field_of_a_report_is_documented(runs):
    text = (ROOT / "docs/report.md").read_text().partition("## report.json")[2]
    named = {*re.findall(r"`([\w/<>]+)`", text)}
    report = json.loads((runs / "a/report.json").read_text())
    fields = {name.replace(report["unit"], "<unit>") for name in report}
    assert fields - named == set()
    of_errors = {vars(kind).get("status") for kind in vars(errors).values() if isinstance(kind, type)} - {
        None,
        "refused",
    }
    statuses = {*of_errors, Pruned.status, "running", "done", "died", "damaged", "no report"}
    row = next(line for line in text.splitlines() if line.startswith("| `status`"))
    assert {*row.split("`")[3::2]} - {"runs --json"} == statuses


def test_a_bit_is_seen_only_when_every_bit_counts(runs, tmp_path, monkeypatch, capsys):
    shutil.copytree(runs / "a", tmp_path / "bit")
    path = tmp_path / "bit" / "checkpoints" / "last.ckpt"
    content = torch.load(path, weights_only=True)
    weight = content["state_dict"]["net.classifier.1.weight"].view(-1)
    weight[7] = torch.nextafter(weight[7], torch.tensor(1.0))
    torch.save(content, path)

    def compared(*options: str) -> tuple[int, str]:
        return run_main(monkeypatch, capsys, compare_runs, runs / "a", tmp_path / "bit", *options)[:2]

    assert compared()[0] == 0
    code, out = compared("--exact")
    assert code == 1 and "1 of 8 tensors differ; the largest difference is in net.classifier.1.weight" in out
    lines = (tmp_path / "bit" / "metrics.csv").read_text().splitlines(keepends=True)
    (tmp_path / "bit" / "metrics.csv").write_text("".join(lines[:3] + lines[4:]))
    code, out = compared()
    assert code == 1 and "train/loss: 6 | 5 rows; only the first run has step 3" in out


def test_the_cores_that_sbatch_was_asked_for_reach_each_task(tmp_path):
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "${SRUN_CPUS_PER_TASK-unset} $*"\n')
    srun.chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SRUN_"))}
    for cpus, expected in (({"SLURM_CPUS_PER_TASK": "8"}, "8"), ({}, "unset")):
        env = {**clean, "PATH": f"{tmp_path}:{os.environ['PATH']}", **cpus}
        script = ["bash", str(ROOT / "scripts/slurm.sbatch"), "strategy=ddp"]
        done = subprocess.run(script, env=env, capture_output=True, text=True, check=True, cwd=tmp_path)
        assert done.stdout.split()[0] == expected
        assert done.stdout.strip().endswith(" python train.py resume=auto strategy=ddp")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to(sys.executable)  # as `uv sync` leaves it
    for own, expected in (({}, ".venv/bin/python"), ({"PYTHON": "/opt/python"}, "/opt/python")):
        done = subprocess.run(script, env={**env, **own}, capture_output=True, text=True, check=True, cwd=tmp_path)
        assert done.stdout.strip().endswith(f" {expected} train.py resume=auto strategy=ddp")
