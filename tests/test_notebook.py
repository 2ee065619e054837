"""The notebook: what is stored is the output of its cells, and they still run."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

import lockstep
from lockstep import ROOT

QUICKSTART = ROOT / "notebooks/quickstart.ipynb"


def read(path: Path) -> nbformat.NotebookNode:
    """A notebook: every cell ran, in order, and none failed."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(cell.outputs for cell in cells)
    assert not [o for cell in cells for o in cell.outputs if o.output_type == "error" or o.get("name") == "stderr"]
    return notebook


def texts(notebook: nbformat.NotebookNode) -> str:
    """What a reader sees, without the pixels of pictures."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    data = [text for o in outputs for kind, text in o.get("data", {}).items() if not kind.startswith("image/")]
    return "\n".join([*(cell.source for cell in notebook.cells), *(o.get("text", "") for o in outputs), *data])


def test_what_is_stored_is_whole_small_and_of_no_machine():
    notebook = read(QUICKSTART)
    said = texts(notebook)
    assert re.findall(r"(?<![\w.])(?:/\w+/\S*|[A-Z]:\\\S*)", said) == []
    assert "srcdoc" not in said  # a report's page names the host
    assert said.count("left · loss") == 1  # of a line that was rewritten, the last one
    pictures = [o for cell in notebook.cells for o in cell.get("outputs", ()) if "image/png" in o.get("data", {})]
    assert len(pictures) == 2
    assert QUICKSTART.stat().st_size < 300_000
    assert {name for name in re.findall(r"lockstep\.(\w+)\(", said) if not hasattr(lockstep, name)} == set()


@pytest.mark.slow
def test_every_cell_runs(tmp_path):
    path = shutil.copy(QUICKSTART, tmp_path)
    tool = ROOT / "notebooks/execute.py"
    outside = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    done = subprocess.run(  # with that variable, ipykernel would not show what the processes of the run print
        [sys.executable, tool, path], cwd=tmp_path, env=outside, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    notebook = read(path)
    assert [cell.source for cell in notebook.cells] == [cell.source for cell in read(QUICKSTART).cells]
    assert re.search(r"ddp, 2 processes on cpu", texts(notebook))
    assert float(re.search(r"'([\d.]+)% of 1,000 test images", texts(notebook))[1]) > 90
    assert sorted(path.name for path in tmp_path.iterdir()) == ["quickstart.ipynb"]
