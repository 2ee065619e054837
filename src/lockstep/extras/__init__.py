"""Everything that training does not need: pages, export, prediction tables, sweeps, run comparison, data of other libraries.

The engine does not import this package; the scripts do, and configs name its classes.
"""

import importlib.util
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.config.run_config import Request
from lockstep.config.settings import Settings, workers
from lockstep.errors import did_you_mean, raise_problems
from lockstep.machine import files


def write_page(*args: Any) -> None:
    """Writes report.html. The import is here because it takes seconds, and scripts name this function before the config is checked."""
    from lockstep.extras import page

    page.write_page(*args)


# --- The request of a predict.py command line, checked before anything is imported or read ---

TABLES = (".csv", ".json", ".jsonl", ".parquet")  # extensions of the files that prediction writes
FEW = 256  # up to this number of files, no workers are needed


def with_request(settings: Settings, request: Request, typed: Collection[str]) -> Settings:
    """The settings of a run with the request of a command line. `typed`: the keys that it sets.

    Raises:
        UserError: the request is invalid; lists all problems.
    """
    from lockstep.data.sampler import PARTS
    from lockstep.kit.listing import LISTS, find_inputs
    from lockstep.kit.pixels import ENDINGS

    cfg, default = settings.cfg, settings.evaluation_file("predict").with_name("predictions.csv")
    output = Path(request.output or default).expanduser()
    part = request.input if request.input in (*PARTS, "predict") else None
    raise_problems(output_problems(output, request.overwrite, request.gallery))
    endings = ENDINGS if cfg.data.target.startswith("lockstep.") else ("",)  # a user's class defines what it reads
    paths = [] if part else find_inputs(request.input, endings).paths
    files.refuse_unwritable(output.parent, "output")
    chosen = "loader.num_workers" in typed and cfg.loader and cfg.loader.num_workers != "auto"
    if part is None and not chosen:
        many = len(paths) > FEW or Path(request.input).suffix.lower() in LISTS  # a list may be long
        settings = settings.replace({"loader.num_workers": workers(None, settings.world) if many else 0})
    return replace(settings, request=replace(request, output=str(output), part=part))


def gallery_of(output: Path) -> Path:
    return output.with_name(f"{output.stem}-gallery.html")


def output_problems(output: Path, overwrite: bool, gallery: bool = False) -> Iterator[str]:
    page = gallery_of(output)
    if output.suffix not in TABLES:
        yield f"output={output}: the file extension must be one of {', '.join(TABLES)}{did_you_mean(output.suffix, TABLES)}."
    elif output.exists() and (output.is_dir() or not overwrite):
        yield f"output={output} already exists. Set a different file, or overwrite=true."
    elif gallery and page.exists() and not overwrite:
        yield f"gallery=true: {page} already exists. Set a different output=, or overwrite=true."
    if output.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        yield f"output={output}: Parquet needs pyarrow, which is not installed. Run uv pip install pyarrow, or set output={output.with_suffix('.csv')}."
