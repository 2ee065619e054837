"""Composing a config, and telling everything that is wrong with a command line at once."""

import re
import sys
from itertools import pairwise
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep import CONFIGS
from lockstep.config.checks import OWNED, check, nearest
from lockstep.config.identity import sweep_name

CONFIG_ERRORS = (HydraException, OmegaConfBaseException)


# When this module is imported, as it is by a job that a launcher has sent to another process.
OmegaConf.register_resolver("lockstep.sweep", sweep_name, replace=True)
OmegaConf.register_resolver("lockstep.tasks", lambda devices: devices if isinstance(devices, int) else 1, replace=True)


def searched(argv: list[str]) -> list[str]:
    """Hydra's option --config-dir as an override, for composing without its command line."""
    folders = [b for a, b in pairwise(argv) if a in ("--config-dir", "-cd")]
    folders += [arg.partition("=")[2] for arg in argv if arg.startswith(("--config-dir=", "-cd="))]
    return (
        [f"hydra.searchpath=[{','.join(f'file://{Path(folder).resolve()}' for folder in folders)}]"] if folders else []
    )


def compose_config(config_name: str, overrides: list[str]) -> DictConfig:
    """The config of `python <config_name>.py <overrides>`. Raises what Hydra and OmegaConf raise."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIGS)):
        cfg: DictConfig = compose(config_name, [*overrides, *searched(sys.argv)])
        return cfg


def key_of(override: str) -> str:
    return override.lstrip("+~").partition("=")[0].partition("@")[0]


def is_group(override: str) -> bool:
    return (CONFIGS / key_of(override)).is_dir()


def options(group: str) -> str:
    return ", ".join(sorted(path.stem for path in (CONFIGS / group).glob("*.yaml")))


def message(error: BaseException, override: str) -> str:
    """Hydra's and OmegaConf's words for one override, on one line."""
    key, text = key_of(override), f"{error} {error.__cause__ or ''}"
    if key in OWNED:
        return f"{key} cannot be set: {OWNED[key]}."
    near = re.search(r"Did you mean: '(.*?)'\?", text)
    if "is not in struct" in text or "Could not override" in text:
        meant = f"did you mean {'.'.join([*key.split('.')[:-1], near.group(1)])}? " if near else ""
        return f"{key} is not a key of this project; {meant}python train.py --help shows all."
    absent = re.search(r"Could not (?:find|load) '(.*)/(.*?)'", text)
    if absent and is_group(f"{absent.group(1)}="):
        return f"{override}: {absent.group(1)} has no {absent.group(2)}; use one of {options(absent.group(1))}{nearest(absent.group(2), options(absent.group(1)).split(', '))}."
    return f"{override}: {' '.join(str(error).split())}"


def variants(override: str) -> list[str]:
    """An override, or one for each value that it sweeps over."""
    parsed = OverridesParser.create().parse_override(override)
    if not parsed.is_sweep_override():
        return [override]
    if parsed.is_interval_sweep():  # a sweeper draws from between its ends
        interval = parsed.value()
        return [f"{parsed.get_key_element()}={end}" for end in (interval.start, interval.end)]
    return [f"{parsed.get_key_element()}={value}" for value in parsed.sweep_string_iterator()]


def tried_alone(config_name: str, overrides: list[str]) -> tuple[list[str], list[str]]:
    """What Hydra says against each override by itself, on top of the groups that compose; and the overrides it takes."""
    problems: list[str] = []
    groups: list[str] = []
    values: list[str] = []
    for given in sorted(overrides, key=lambda o: not is_group(o)):  # groups first: they decide which keys exist
        try:
            tried = variants(given)
        except HydraException as e:
            problems.append(message(e, given))
            continue
        for override in tried:
            try:
                compose_config(config_name, [*groups, override])
            except CONFIG_ERRORS as e:
                problems.append(message(e, override))
            else:
                (groups if is_group(override) else values).append(override)
    return problems, [*groups, *values]


def explain(error: BaseException, config_name: str, overrides: list[str]) -> list[str]:
    """All that is wrong with a command line on which Hydra gave up with `error`."""
    problems, good = tried_alone(config_name, overrides)
    try:
        composed = compose_config(config_name, good)
        problems += check(composed) if config_name == "train" else []  # eval's is merged with the run's own first
    except CONFIG_ERRORS as e:
        error = e
    return problems or [" ".join(str(error).split())]
