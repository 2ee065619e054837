"""What `lockstep check` found, and what has changed since. Free of torch.

A project keeps its checks in checks.json: of each the line, the config, digests of the project's sources that it imported, versions of the
libraries that these import, and the fingerprint of the data.
"""

import json
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Any

from lockstep import PACKAGE
from lockstep.config import project
from lockstep.config.compose import dotted, key_of
from lockstep.config.project import command
from lockstep.config.run_config import RunConfig
from lockstep.machine.files import read_text, to_json

FILE = "checks.json"
# Keys that cannot change whether the ways of running agree: names, places, loggers, lengths, rates, and the ways themselves.
IRRELEVANT = (
    "run", "runs_dir", "resume", "init_from", "debug_rank", "seed", "logger.", "checkpoint.", "exact.digests", "exact.threads",
    "data.root", "data.cache_dir", "data.source", "loader.num_workers", "callbacks.lockstep_check.", "optim.lr", "trainer.accelerator", "trainer.devices",
    "trainer.num_", "trainer.precision", "trainer.max_", "trainer.min_", "trainer.limit_", "trainer.log_", "trainer.enable_",
    "strategy._target_", "strategy.name", "strategy.timeout_s", "strategy.bucket_", "strategy.gradient_", "strategy.static_", "strategy.find_", "strategy.blocks", "strategy.reshard_", "strategy.reduce_",
    "trainer.val_check_interval", "trainer.check_val_", "trainer.profiler", "trainer.inference_mode", "trainer.accumulate_grad_batches",
)  # fmt: skip
IN_WHEELS = {"template", "scripts"}  # folders of Lockstep that a checkout has elsewhere
IMPORTED = re.compile(r"^\s*(?:from|import)\s+(\w+)", re.MULTILINE)
Check = dict[str, Any]
FORM = {"line", "config", "sources", "versions", "data"}


def relevant(config: RunConfig) -> dict[str, Any]:
    every = dotted(config.values).items()
    return json.loads(to_json({k: v for k, v in every if v is not None and not k.startswith(IRRELEVANT)}))


def digest(path: Path) -> str:
    """Of a file, or of all modules in a folder."""
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    files = [file for file in files if not IN_WHEELS & {*file.relative_to(path).parts}]
    contents = ((file.relative_to(path).as_posix(), file.read_bytes()) for file in files if file.is_file())
    return sha256(repr([*contents]).encode()).hexdigest()[:16]


def sources(root: Path) -> Iterator[Path]:
    """The project's files that this process has imported, and the folder of Lockstep if it is in the project."""
    if PACKAGE.is_relative_to(root) and not PACKAGE.is_relative_to(sys.prefix):
        yield PACKAGE
    files = {Path(getattr(module, "__file__", None) or "/") for module in [*sys.modules.values()]}
    own = (file for file in files if file.suffix == ".py" and file.is_relative_to(root))
    yield from sorted(file for file in own if not any(map(file.is_relative_to, (Path(sys.prefix), PACKAGE))))


def version_of(library: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(library)
    return None


def facts(config: RunConfig, data: str | None) -> Check:
    """What a check of this process is about. `data`: the fingerprint of the data."""
    root = project.current().root
    files = list(sources(root)) if root else []
    modules = (each for file in files for each in (file.rglob("*.py") if file.is_dir() else [file]))
    names = {"lockstep", "torch", "lightning"}.union(*(IMPORTED.findall(read_text(module)) for module in modules))
    of = packages_distributions()  # such as pillow of PIL
    libraries = {library for name in names & sys.modules.keys() for library in of.get(name, ())}
    return {
        "config": relevant(config),
        "sources": {file.relative_to(root).as_posix(): digest(file) for file in files if root},
        "versions": {name: found for name in sorted(libraries) if (found := version_of(name))},
        "data": data,
    }


def stored() -> list[Check]:
    """The checks of the project, the newest first; none of a damaged file."""
    root = project.current().root
    with suppress(Exception):
        every = json.loads(read_text(root / FILE)) if root else []
        return [each for each in every if each.keys() >= FORM]
    return []


def changes(check: Check, now: dict[str, Any], data: str | None) -> list[str]:
    """What is no longer as it was."""
    root, then = project.current().root or Path(), check["config"]
    found = [name for name, was in check["sources"].items() if digest(root / name) != was]
    found += [key for key in {**then, **now} if then.get(key) != now.get(key)]
    found += [name for name, was in check["versions"].items() if version_of(name) != was]
    return found + ["the data"] * (check["data"] != data)


def quoted(config: RunConfig, data: str | None, overrides: Sequence[str] | None) -> tuple[str, str]:
    """The line of the nearest check and "", or what has changed since and the command that checks again."""
    now, typed = relevant(config), [each for each in overrides or () if not key_of(each).startswith(IRRELEVANT)]
    found = [(changes(check, now, data), check["line"]) for check in stored()]
    found = [pair for pair in found if "._target_" not in " ".join(pair[0])]  # of the same classes
    changed, line = min(found, key=lambda pair: len(pair[0]), default=([], ""))
    if line and not changed:
        return line, ""
    more = f" and {len(changed) - 1} more" if changed[1:] else ""
    since = f" since {changed[0]}{more} changed" if changed else ""
    return f"not checked{since}", f"{command('check')} {shlex.join(typed)}".strip()
