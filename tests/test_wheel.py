"""The wheel is whole: installed elsewhere it trains, from a command, from Python and from a notebook, and beneath a thin project.

The environment's own site-packages has the wheel alone; everything else comes from the environment that runs the tests.
"""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest
import thin_project

from lockstep import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wheel")]
TWO = ["strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu"]
NOTEBOOK = """
import sys
import nbformat
from nbclient import NotebookClient
book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in sys.argv[1:]])
NotebookClient(book, kernel_name="wheel", timeout=300).execute()
print("".join(output.get("text", "") for output in book.cells[-1].outputs))
"""


@dataclass(frozen=True)
class Installed:
    """The Python that has the wheel, in a folder to work in."""

    bin: Path
    work: Path
    options: list[str]

    def run(self, *command: str | Path, cwd: Path | None = None, **more: str) -> subprocess.CompletedProcess:
        # PYTHONPATH would put the checkout before the wheel.
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | more
        return subprocess.run(command, cwd=cwd or self.work, env=env, capture_output=True, text=True, timeout=300)

    def lockstep(self, *args: str) -> str:
        """What a command prints that succeeds."""
        done = self.run(self.bin / "lockstep", *args)
        assert done.returncode == 0, done.stderr
        return done.stdout


def report(folder: Path, run: str) -> dict:
    return json.loads((folder / "runs" / run / "report.json").read_text())


@pytest.fixture(scope="module")
def installed(tmp_path_factory, mnist, cache) -> Installed:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "env", with_pip=True)
    (packages,) = (folder / "env/lib").glob("python*/site-packages")
    install = [folder / "env/bin/python", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel]
    subprocess.run(install, check=True)
    (packages / "rest.pth").write_text(sysconfig.get_paths()["purelib"])
    (folder / "work").mkdir()
    few = ["trainer.limit_train_batches=2", "trainer.accelerator=cpu"]
    return Installed(folder / "env/bin", folder / "work", [f"data.root={mnist}", f"data.cache_dir={cache}", *few])


def test_the_command_trains_and_evaluates_in_an_empty_folder(installed):
    installed.lockstep("train", "run=pair", *TWO, *installed.options)
    pair = report(installed.work, "pair")
    assert (pair["status"], pair["world_size"]) == ("done", 2)
    out = installed.lockstep("train", "run=one", *installed.options)
    assert out.splitlines()[-1] == f"evaluate it: {installed.bin / 'lockstep'} eval run=one"  # as typed
    one, folder = report(installed.work, "one"), installed.work / "runs/one"
    assert (one["status"], one["train/steps"], one["git_sha"]) == ("done", 2, None)
    evaluated = json.loads(installed.lockstep("eval", "run=one", "--json", *TWO))
    assert evaluated == json.loads((folder / "eval.json").read_text())
    assert evaluated.keys() == {"run", "checkpoint", "strategy", "world_size", "test/loss", "test/acc", "test/count"}
    assert evaluated["test/loss"] == pytest.approx(one["test/loss"], rel=1e-5)
    assert "</html>" in (folder / "report.html").read_text()
    assert installed.lockstep("runs").count("done") == 2
    installed.lockstep("runs", "html")
    predicted = json.loads(installed.lockstep("predict", "run=one", "input=test", "--json", *TWO))
    of_evaluation = {"run": "one", "checkpoint": evaluated["checkpoint"], "strategy": "ddp", "world_size": 2}
    counts = {"input": "test", "output": "runs/one/predictions.csv", "count": one["test/count"], "broken": 0}
    assert predicted == of_evaluation | counts
    assert len((folder / "predictions.csv").read_text().splitlines()) == 1 + one["test/count"]


def test_mistakes_and_help_come_without_torch(installed):
    for args, code, said in (
        (["--help"], 0, "Evaluate a checkpoint"),
        (["train", "--help"], 0, "ddp, dp, fsdp, single"),
        (["tran"], 2, "did you mean train?"),
        (["train", "optim.lrr=1"], 2, "did you mean optim.lr?"),
    ):
        done = installed.run(installed.bin / "lockstep", *args, PYTHONPROFILEIMPORTTIME="1")
        assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done
        assert "| torch\n" not in done.stderr.replace(" ", "").replace("|", "| ")


def test_a_python_file_of_a_thin_project_trains_in_two_processes(installed, tmp_path):
    """The processes run the project's own train.py, whose job is the wheel's."""
    root = thin_project.write(tmp_path / "flowers")
    (root / "use.py").write_text(
        "import os, lockstep\n"
        f"report = lockstep.train({['run=pair', *TWO, *installed.options]})\n"
        "print(lockstep.__file__, report['model'], report['world_size'], 'LOCKSTEP_PROJECT' in os.environ)\n"
    )
    done = installed.run(installed.bin / "python", "use.py", cwd=root)
    assert done.returncode == 0, done.stderr
    file, *said = done.stdout.splitlines()[-1].split()
    assert (Path(file).is_relative_to(installed.bin.parent), said) == (True, ["tulip", "2", "False"])
    assert report(root, "pair")["seed"] == 7


def test_a_notebook_trains_in_two_processes(installed, tmp_path):
    kernel = {"argv": [str(installed.bin / "python"), "-m", "ipykernel_launcher", "-f", "{connection_file}"],
              "display_name": "wheel", "language": "python"}  # fmt: skip
    (tmp_path / "kernels/wheel").mkdir(parents=True)
    (tmp_path / "kernels/wheel/kernel.json").write_text(json.dumps(kernel))
    cells = [
        f"import lockstep\nreport = lockstep.train({['run=notebook', *TWO, *installed.options]})",
        "print(lockstep.__file__, report['status'], report['world_size'])",
    ]
    done = installed.run(sys.executable, "-c", NOTEBOOK, *cells, JUPYTER_PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    file, *said = done.stdout.strip().splitlines()[-1].split()  # the lines before are what the runs printed
    assert (Path(file).is_relative_to(installed.bin.parent), said) == (True, ["done", "2"])
