"""Composes a config, and reports all errors of a command line at once."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep import CONFIGS
from lockstep.config.draft import Draft, advice, sweep_name, unknown_key
from lockstep.config.formatting import to_text, warn
from lockstep.config.project import config_folders
from lockstep.config.run_config import SEVERAL
from lockstep.config.schema import KEYS
from lockstep.errors import did_you_mean, raise_problems
from lockstep.machine.world import rank_of

# --- Dotted keys of a config ---


def dotted(tree: Any, key: str = "") -> dict[str, Any]:
    """Flattens nested dicts to dotted keys, each prefixed with `key`. A list counts as a value."""
    if not isinstance(tree, dict):
        return {key: tree}
    found: dict[str, Any] = {}
    for part, node in tree.items():
        found |= dotted(node, f"{key}.{part}" if key else str(part))
    return found


# --- Values and overrides in Hydra's syntax ---

PLACE = ("run", "runs_dir", "resume")  # keys that locate a run but do not define it


def to_hydra(value: Any) -> str:
    """A value in Hydra's syntax."""
    if isinstance(value, list):
        return f"[{','.join(map(to_hydra, value))}]"
    word = r"(?!(?:null|true|false|nan|inf)$)(?=.*[^\de.+_-])[\w/][\w/.+-]*"  # text that Hydra parses as text
    bare = not isinstance(value, str) or re.fullmatch(word, value, re.IGNORECASE | re.ASCII)
    return to_text(value) if bare else QuotedString(value, Quote.single).with_quotes()


def recorded_overrides(overrides: Sequence[str], earlier: Sequence[str] = ()) -> tuple[str, ...]:
    """The overrides that a run records: without the keys of PLACE, after the `earlier` ones of the run it continues."""
    new = [o for o in overrides if key_of(o) not in PLACE and not o.startswith("+callbacks.pruning.")]
    keys = [*map(key_of, new)]
    return (*(o for o in earlier if key_of(o) not in keys), *new)


# --- Composes a config, and reports all errors of a command line at once ---

CONFIG_ERRORS = (HydraException, OmegaConfBaseException)


# At import, because a launcher may unpickle a job in another process.
OmegaConf.register_resolver("lockstep.sweep", sweep_name, replace=True)
OmegaConf.register_resolver("lockstep.tasks", lambda devices: devices if isinstance(devices, int) else 1, replace=True)


def search_path(argv: Sequence[str]) -> list[str]:
    """Hydra's option --config-dir as an override, for composing without Hydra's command line.

    Raises:
        UserError: no such folder.
    """
    folders = [value for option, value in pairwise(argv) if option in ("--config-dir", "-cd")]
    folders += [arg.partition("=")[2] for arg in argv if arg.startswith(("--config-dir=", "-cd="))]
    raise_problems(f"--config-dir {folder}: no such folder." for folder in folders if not Path(folder).is_dir())
    path = ",".join(f"file://{Path(folder).resolve()}" for folder in folders)
    return [f"hydra.searchpath=[{path}]"] if folders else []


@contextmanager
def hydra_state_restored() -> Iterator[None]:
    previous = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = previous


# Hydra's assertions have no message; those that people meet are about this order
OVERRIDES_LAST = "In a `defaults` list, put the lines with `override` last."


def compose_config(config_name: str, overrides: Sequence[str], *, with_hydra: bool = False) -> DictConfig:
    """The config of `python <config_name>.py <overrides>`, optionally with Hydra's own node. Raises CONFIG_ERRORS."""
    with hydra_state_restored(), initialize_config_dir(str(CONFIGS)):
        try:
            cfg: DictConfig = compose(config_name, list(overrides), return_hydra_config=with_hydra)
        except Exception as e:  # e.g. from YAML, or Hydra's ValueError for model=null; this block only reads configs
            if isinstance(e, CONFIG_ERRORS) and str(e):
                raise
            raise ConfigCompositionException(str(e) or f"Hydra raised {type(e).__name__}. {OVERRIDES_LAST}") from e
        return cfg


def warn_of_replaced_choices(overrides: Sequence[str]) -> None:
    """Hydra takes the last of several choices of a group."""
    for group in SEVERAL:
        chosen = [override for override in overrides if override.startswith(f"{group}=")]
        if len(chosen) > 1 and rank_of() == 0:
            warn(f"of {' '.join(chosen)}, only the last applies. For several, pass {group}=[<name>,<name>].")


def without_replaced_defaults(draft: Draft, overrides: Sequence[str]) -> Draft:
    """Drops the project's default network, optimizer and schedule if the task has its own.

    Groups that a command or a recipe chooses stay, and are rejected later.
    """
    groups = [group for group in draft.group("task").get("replaces", ()) if draft.group(group)]
    if not groups:
        return draft
    defaults = Draft(compose_config("train", []))
    chosen = [key_of(override).partition(".")[0] for override in overrides]
    unchanged = [group for group in groups if draft.group(group).items() <= defaults.group(group).items()]
    return draft.replace({group: {} for group in unchanged if group not in chosen})


def key_of(override: str) -> str:
    return override.lstrip("+~").partition("=")[0].partition("@")[0]


def fixed_keys(overrides: Sequence[str]) -> Iterator[str]:
    """Overrides of keys that only the choice of an option can set."""
    for override in overrides:
        if (key := key_of(override)) == "strategy.name" or key == "task.replaces":
            group = key.partition(".")[0]
            yield f"{override}: {key} cannot be set: it identifies the {group}. Choose a {group} with {group}=<name>."


def needs_signature_check(overrides: Sequence[str]) -> bool:
    """Whether the command line removes a key or sets one without a Validator. Only the class's signature can check these."""
    always_checked = ("data.", "hydra.", "augment.")
    keys = [o for o in overrides if not is_group(o) and not key_of(o).startswith(always_checked)]
    return any(o.startswith("~") or key_of(o) not in KEYS for o in keys)


def is_group(override: str) -> bool:
    return any((folder / key_of(override)).is_dir() for folder in config_folders())


def options(group: str) -> list[str]:
    return sorted({path.stem for folder in config_folders() for path in (folder / group).glob("*.yaml")})


def config_file(name: str) -> Path:
    """The file that Hydra loads for a config such as `data/mnist`."""
    files = [folder / f"{name}.yaml" for folder in config_folders()]
    return next((file for file in files if file.is_file()), files[-1])


def message(error: BaseException, override: str) -> str:
    """An error of Hydra or OmegaConf about one override, on one line."""
    key, text, value = key_of(override), f"{error} {error.__cause__ or ''}", override.partition("=")[2]
    missing = re.search(r"Could not (?:find|load) '(.*)/(.*?)'|Parent (traversal)", text)
    if missing and is_group(f"{missing.group(1) or key}="):
        option = missing[2] if missing[1] == key else value  # may be a path
        names, tip = options(key), advice()["options"].get(key, "").format(value=option)
        return f"{override}: {key} has no option {option}; use one of {', '.join(names)}{did_you_mean(option, names)}. {tip}".rstrip()
    if "token recognition error" in text or "mismatched input '='" in text:  # Hydra's grammar
        return f"{override}: this value needs quotes for Hydra and for the shell. Set '{key}=\"{value}\"'."
    return f"{override}: {' '.join(str(error).split())}"


MAX_COMPOSED = 100  # values checked of one override


def expand_sweep(override: str) -> list[str]:
    """One override for each value of a sweep; without a sweep, the override itself."""
    parsed = OverridesParser.create().parse_override(override)
    with hydra_state_restored(), initialize_config_dir(str(CONFIGS)):
        parsed.config_loader = GlobalHydra.instance().config_loader()  # resolves globs
    if not parsed.is_sweep_override():
        return [override]
    if parsed.is_interval_sweep():  # a sweeper draws values between the bounds
        interval = parsed.value()
        return [f"{parsed.get_key_element()}={bound}" for bound in (interval.start, interval.end)]
    overrides = [f"{parsed.get_key_element()}={value}" for value in parsed.sweep_string_iterator()]
    if not overrides:  # a glob that matches nothing
        raise HydraException(f"it matches no option; use one of {', '.join(options(key_of(override))) or 'none'}")
    return overrides


def compose_each(config_name: str, overrides: Sequence[str], always: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """The errors of all overrides, and the valid ones. Groups come first: they decide which keys exist."""
    problems, groups, values = list[str](), list[str](), list[str]()
    for override in overrides:
        try:
            variants = expand_sweep(override)[:MAX_COMPOSED]
            for variant in variants if is_group(override) else ():
                compose_config(config_name, [*always, *groups, variant])
                groups.append(variant)
            values += () if is_group(override) else variants
        except CONFIG_ERRORS as e:
            problems.append(message(e, override))
    draft = Draft(compose_config(config_name, [*always, *groups]))
    unknown = [v for v in values if not (v.startswith("+") or draft.has(key_of(v)) or key_of(v).startswith("hydra"))]
    problems += dict.fromkeys(unknown_key(draft, key_of(o), o.partition("=")[2]) for o in unknown)
    return problems, [*groups, *(value for value in values if value not in unknown)]
