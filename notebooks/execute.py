"""Runs a notebook and saves its outputs: python notebooks/execute.py [notebooks/quickstart.ipynb]

The notebook runs in a temporary folder. Of a line that a cell rewrites, only the last version is saved.
"""

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

QUICKSTART = Path(__file__).with_name("quickstart.ipynb")


def executed(path: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs, run in `folder`. Raises CellExecutionError: a cell failed."""
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=600, coalesce_streams=True, record_timing=False, resources=where).execute()
    notebook.metadata = nbformat.from_dict({"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    return notebook


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else QUICKSTART
    with tempfile.TemporaryDirectory() as folder:
        nbformat.write(executed(path, Path(folder)), path)
