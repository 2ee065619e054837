"""A config as what to type: its differences from the defaults, in Hydra's syntax."""

import re
from typing import Any

import yaml
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf

from lockstep.config.compose import compose_config, config_file, default_config, is_group, options
from lockstep.config.keys import dotted
from lockstep.config.words import plain, shown

PLACE = ("run", "runs_dir", "resume")  # keys that say where a run is, not what it is
ABSENT = object()
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # PyYAML may be built without libyaml


def typed(value: Any) -> str:
    """A value in Hydra's syntax."""
    if isinstance(value, list):
        return f"[{','.join(map(typed, value))}]"
    word = r"(?!(?:null|true|false|nan|inf)$)(?=.*[^\de.+_-])[\w/][\w/.+-]*"  # or as a number
    bare = not isinstance(value, str) or re.fullmatch(word, value, re.IGNORECASE | re.ASCII)
    return shown(value) if bare else QuotedString(value, Quote.single).with_quotes()


def options_of(group: str, own: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """The options of a group that a config may come from, each with its distance; the smallest is the best match."""
    found: dict[str, tuple[int, int]] = {}
    for name in options(group):
        option = dotted(yaml.load(config_file(f"{group}/{name}").read_text(), LOADER) or {}, group)
        what = {k: v for k, v in option.items() if k.endswith(("._target_", ".name"))}
        fits = all(v in (own.get(k), "???") for k, v in what.items())
        if fits and (option or f"{group}._target_" not in own):  # an option without keys means no class
            same = sum(v == own.get(k) for k, v in what.items())
            found[name] = (-same, len(option.keys() - own.keys() - {f"{group}.defaults"}))
    return found


def several(group: str, own: dict[str, Any]) -> list[str]:
    """The options that a group of several may come from, in the order of their nodes. Options of other options alone are left out."""
    nodes = list(dict.fromkeys(key.split(".")[1] for key in own if key.startswith(f"{group}.")))
    place: dict[str, int] = {}
    for name, _ in sorted(options_of(group, own).items(), key=lambda found: found[1]):
        option = yaml.load(config_file(f"{group}/{name}").read_text(), LOADER) or {}
        made = [node for node in option if node != "defaults"]
        if made and set(made) <= set(nodes):
            place[name] = nodes.index(made[0])
            nodes = ["" if node in made else node for node in nodes]  # an option's alone
    return sorted(place, key=place.__getitem__)


def as_overrides(config: DictConfig) -> list[str]:
    """The overrides that give this config: group options, then keys. A key that the config lacks is newer than the run."""
    own, (composed, defaults), chosen = dotted(plain(config)), default_config("train"), []
    usual = dotted(plain(composed))
    for group in filter(is_group, map(str, config)):
        found = options_of(group, own)
        if group in defaults:
            default, choice = defaults[group], min(found, key=found.__getitem__, default=defaults[group])
        else:  # it takes several
            default, choice = several(group, usual), several(group, own)
        chosen += [f"{group}={typed(choice)}"] if choice != default else []
    if chosen:
        composed = compose_config("train", chosen)
    OmegaConf.resolve(composed)
    base = dotted(plain(composed))
    changed = [key for key in own if key not in PLACE and shown(own[key]) != shown(base.get(key, ABSENT))]
    return chosen + [f"{'' if key in base else '++'}{key}={typed(own[key])}" for key in changed]
