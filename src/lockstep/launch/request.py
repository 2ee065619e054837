"""What a command line of predict.py asks for, checked before anything is imported or read. Free of torch."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict

from lockstep.config.auto import workers
from lockstep.config.compose import key_of
from lockstep.config.identity import run_dir
from lockstep.config.schema import PREDICT
from lockstep.config.words import nearest
from lockstep.data.image_files import PARTS, find_inputs
from lockstep.errors import UserError, raise_problems
from lockstep.machine.files import refuse_unwritable
from lockstep.machine.world import world_of

ENDINGS = (".csv", ".json", ".jsonl", ".parquet")  # of the tables that prediction writes
FEW = 256  # files that need no workers


def with_request(cfg: DictConfig, asked: DictConfig, overrides: list[str]) -> DictConfig:
    """`cfg`, the config of a run, with the node `predict`, made of the keys at the top level of `asked`.

    Raises:
        UserError: all that is wrong with them.
    """
    found: dict[str, Any] = {key: asked[key] for key in PREDICT}
    folder = run_dir(cfg) if run_dir(cfg).is_dir() else Path(cfg.init_from).parent  # of a checkpoint that was moved
    output = Path(found["output"] or folder / "predictions.csv").expanduser()
    part = found["input"] if found["input"] in PARTS else None
    problems, files = [*output_problems(output, found["overwrite"], found["gallery"])], 0
    try:
        files = 0 if part else len(find_inputs(found["input"]).names)
    except UserError as e:
        problems += e.problems
    raise_problems(problems)
    refuse_unwritable(output.parent, "output")
    cfg = cfg.copy()
    with open_dict(cfg):
        cfg.predict = {**found, "output": str(output), "part": part}
        typed = "data.num_workers" in map(key_of, overrides) and cfg.data.num_workers != "auto"
        if part is None and not typed:
            cfg.data.num_workers = workers(None, world_of(cfg)) if files > FEW else 0
    return cfg


def gallery_of(output: Path) -> Path:
    return output.with_name(f"{output.name}.html")


def output_problems(output: Path, overwrite: bool, gallery: bool = False) -> Iterator[str]:
    page = gallery_of(output)
    if output.suffix not in ENDINGS:
        yield f"output={output}: its ending must be one of {', '.join(ENDINGS)}{nearest(output.suffix, list(ENDINGS))}."
    elif output.is_dir():
        yield f"output={output} is a folder. Type output={output / 'predictions.csv'}."
    elif output.exists() and not overwrite:
        yield f"output={output} exists. Type another file, or overwrite=true."
    elif gallery and page.exists() and not overwrite:
        yield f"gallery=true: {page} exists. Type another output=, or overwrite=true."
    if output.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        yield f"output={output}: Parquet needs pyarrow, which is not installed. Type uv pip install pyarrow, or output={output.with_suffix('.csv')}."
