"""Composes a config, and reports everything that is wrong with a command line at once."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import SequenceMatcher
from itertools import islice, pairwise
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
from lockstep.config.checks import check
from lockstep.config.draft import Draft, advice, sweep_name
from lockstep.config.project import command, config_folders
from lockstep.config.renames import RENAMES, renamed_overrides
from lockstep.config.run_config import SEVERAL, RunConfig
from lockstep.config.schema import GROUPS, KEYS, OPTIONAL, RECIPES
from lockstep.config.words import shown, warn
from lockstep.errors import UserError, did_you_mean, raise_problems
from lockstep.machine.world import rank_of

# --- Dotted keys of a config ---


def dotted(tree: Any, key: str = "") -> dict[str, Any]:
    """The values of nested dicts by their dotted keys, each prefixed with `key`. A list is a value."""
    if not isinstance(tree, dict):
        return {key: tree}
    return {
        name: value
        for inner, node in tree.items()
        for name, value in dotted(node, f"{key}.{inner}" if key else str(inner)).items()
    }


# --- Values and overrides in Hydra's syntax ---

PLACE = ("run", "runs_dir", "resume")  # keys that say where a run is, not what it is


def typed(value: Any) -> str:
    """A value in Hydra's syntax."""
    if isinstance(value, list):
        return f"[{','.join(map(typed, value))}]"
    word = r"(?!(?:null|true|false|nan|inf)$)(?=.*[^\de.+_-])[\w/][\w/.+-]*"  # or as a number
    bare = not isinstance(value, str) or re.fullmatch(word, value, re.IGNORECASE | re.ASCII)
    return shown(value) if bare else QuotedString(value, Quote.single).with_quotes()


def kept(overrides: Sequence[str], earlier: Sequence[str] = ()) -> tuple[str, ...]:
    """What a run says of its overrides: without its place, after those of the run that it continues."""
    new = [o for o in overrides if key_of(o) not in PLACE and not o.startswith("+callbacks.pruning.")]
    keys = [*map(key_of, new)]
    return (*(o for o in earlier if key_of(o) not in keys), *new)


# --- Composes a config, and reports everything that is wrong with a command line at once ---

CONFIG_ERRORS = (HydraException, OmegaConfBaseException)


# At import, because a launcher may unpickle a job in another process.
OmegaConf.register_resolver("lockstep.sweep", sweep_name, replace=True)
OmegaConf.register_resolver("lockstep.tasks", lambda devices: devices if isinstance(devices, int) else 1, replace=True)


def search_path(argv: Sequence[str]) -> list[str]:
    """Hydra's option --config-dir as an override, for composing without its command line. Raises UserError: there is no such folder."""
    folders = [b for a, b in pairwise(argv) if a in ("--config-dir", "-cd")]
    folders += [arg.partition("=")[2] for arg in argv if arg.startswith(("--config-dir=", "-cd="))]
    raise_problems(
        f"--config-dir {folder}: there is no such folder." for folder in folders if not Path(folder).is_dir()
    )
    path = ",".join(f"file://{Path(folder).resolve()}" for folder in folders)
    return [f"hydra.searchpath=[{path}]"] if folders else []


@contextmanager
def callers_hydra_restored() -> Iterator[None]:
    theirs = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = theirs


def compose_config(config_name: str, overrides: Sequence[str], *, with_hydra: bool = False) -> DictConfig:
    """The config of `python <config_name>.py <overrides>`, with Hydra's own node if wanted. Raises one of CONFIG_ERRORS."""
    with callers_hydra_restored(), initialize_config_dir(str(CONFIGS)):
        try:
            cfg: DictConfig = compose(config_name, list(overrides), return_hydra_config=with_hydra)
        except CONFIG_ERRORS:
            raise
        except Exception as e:  # such as YAML's, or Hydra's ValueError for model=null; only configs are read here
            raise ConfigCompositionException(str(e)) from e
        return cfg


def composed(
    config_name: str, overrides: Sequence[str], always: Sequence[str] = (), *, with_hydra: bool = False
) -> DictConfig:
    """`compose_config`. Raises UserError: all that is wrong with the command."""
    try:
        return compose_config(config_name, [*always, *overrides], with_hydra=with_hydra)
    except CONFIG_ERRORS as e:
        raise UserError(*explain(e, config_name, overrides, always)) from None


def resolve(overrides: Sequence[str]) -> RunConfig:
    """The config of `python train.py <overrides>`. Raises UserError: all that is wrong with it."""
    overrides = renamed_command("train", overrides)
    return check(without_replaced_defaults(Draft(composed("train", overrides)), overrides).identified()).cfg


def renamed_command(config_name: str, overrides: Sequence[str], always: Sequence[str] = ()) -> list[str]:
    """A command's overrides under the keys of today, with a line that says the new key."""
    if not any(override.partition("=")[0] in RENAMES for override in overrides):
        return list(overrides)
    with suppress(*CONFIG_ERRORS):  # explained later
        chosen = [o for o in overrides if o.startswith(("data=", "experiment=")) and "," not in o]
        draft = Draft(compose_config(config_name, [*always, *chosen]))
        overrides, told = renamed_overrides(overrides, draft.has)
        if told and rank_of() == 0:
            warn(f"{', '.join(told)}.")
    return list(overrides)


def without_replaced_defaults(draft: Draft, overrides: Sequence[str]) -> Draft:
    """Without the project's default network, optimizer and schedule, if the task has its own. What a command or a recipe chooses stays,
    and is rejected later."""
    task = draft.tree.get("task")
    named = task.get("replaces", ()) if isinstance(task, DictConfig) else ()
    replaced = [group for group in named if isinstance(draft.tree.get(group), DictConfig) and draft.tree[group]]
    if not replaced:
        return draft
    own: Any = OmegaConf.to_container(draft.tree)
    default: Any = OmegaConf.to_container(compose_config("train", []))
    typed = [key_of(override).partition(".")[0] for override in overrides]
    return draft.but({g: {} for g in replaced if g not in typed and own[g].items() <= default[g].items()})


def key_of(override: str) -> str:
    return override.lstrip("+~").partition("=")[0].partition("@")[0]


def fixed_keys(overrides: Sequence[str]) -> Iterator[str]:
    """Keys on the command line that only an option as a whole sets."""
    for override in overrides:
        if (key := key_of(override)) == "strategy.name" or key == "task.replaces":
            group = key.partition(".")[0]
            yield f"{override}: {key} cannot be set, because it says what the {group} is. Choose one with {group}=<name>."


def beyond_schema(overrides: Sequence[str]) -> bool:
    """Whether the command line sets a key without a Kind, or removes one: only the signature of its class can check that."""
    checked = ("data.", "hydra.", "augment.")  # nodes that are checked in any case
    typed = [o for o in overrides if not is_group(o) and not key_of(o).startswith(checked)]
    return any(o.startswith("~") or key_of(o) not in KEYS for o in typed)


def is_group(override: str) -> bool:
    return any((folder / key_of(override)).is_dir() for folder in config_folders())


def options(group: str) -> list[str]:
    return sorted({path.stem for folder in config_folders() for path in (folder / group).glob("*.yaml")})


def config_file(name: str) -> Path:
    """The file that Hydra finds for a config such as `data/mnist`."""
    files = [folder / f"{name}.yaml" for folder in config_folders()]
    return next((file for file in files if file.is_file()), files[-1])


def nearest_key(key: str, more: Sequence[str] = ()) -> str:
    """A known key of the same group, or the same key of another group, that differs by a letter or two; or one of `more`."""
    group, _, name = key.rpartition(".")
    known = [each.rpartition(".") for each in (*KEYS, *GROUPS)]
    near = [f"{g}.{n}".lstrip(".") for g, _, n in known
            if (g == group and did_you_mean(name, [n])) or (n == name and (not group or did_you_mean(group, [g])))] + [*more]  # fmt: skip
    return max(near, key=lambda k: SequenceMatcher(None, k, key).ratio(), default="")


def message(error: BaseException, override: str) -> str:
    """Hydra's or OmegaConf's error about one override, on one line."""
    key, text, value = key_of(override), f"{error} {error.__cause__ or ''}", override.partition("=")[2]
    if why := advice()["owned"].get(key):
        return f"{key} cannot be set: {why}."
    if not key:
        return f"{override} names no key. Pass <key>=<value>; {command('train')} --help shows all."
    if "@" in (name := override.partition("=")[0]):
        return f"{name} cannot be set: a group stands under its own name. Set {key}=<option>."
    if key in GROUPS and override.startswith("~"):
        return f"{override}: {key} is not in the config then, and the engine reads it. Choose an option, {key}=<name>."
    if key in RENAMES and override.startswith("~"):
        return f"{override}: {key} is {RENAMES[key]} now, and every run has it. Remove {override}."
    if "is not in struct" in text or "Could not override" in text or "Could not delete" in text:
        if instead := advice()["keys"].get(key) or (RENAMES[key] + "={value}" if key in RENAMES else None):
            return f"{key} is not a key of this project. Pass {instead.format(value=value)}."
        near, wrong = re.search(r"Did you mean: '(.*?)'\?", text), re.search(r"Key '(.*?)' is not in struct", text)
        parts = [near[1] if near and wrong and part == wrong[1] else part for part in key.split(".")]
        if key in KEYS:
            group = key.partition(".")[0]
            return f"{key} is not a key of the chosen {group}. Remove it, or choose another with {group}=<name>."
        meant = nearest_key(key, [".".join(parts)] if parts != key.split(".") else [])
        meant = meant and f"did you mean {meant}? "
        if not meant and key.partition(".")[0] in (*OPTIONAL, *SEVERAL, "task", "data"):
            meant = f"to add it as an argument of a class, pass +{key}=<value>; "
        return f"{key} is not a key of this project; {meant}{command('train')} --help shows all."
    absent = re.search(r"Could not (?:find|load) '(.*)/(.*?)'", text)
    if absent and is_group(f"{absent.group(1)}="):
        option = absent[2] if absent[1] == key else value  # which may be a path
        known, more = options(key), advice()["options"].get(key, "").format(value=option)
        return f"{override}: {key} has no {option}; use one of {', '.join(known)}{did_you_mean(option, known)}. {more}".rstrip()
    if "token recognition error" in text:  # Hydra's grammar
        return f"{override}: this value needs quotes for Hydra and for the shell. Set '{key}=\"{value}\"'."
    return f"{override}: {' '.join(str(error).split())}"


MOST_JOBS = 10_000
MOST_TRIED = 100  # values of one override; and wrong overrides, before a message stops looking for more


def variants(override: str) -> list[str]:
    """An override, or one override for each value that it sweeps over; of more than MOST_JOBS, one more than these."""
    parsed = OverridesParser.create().parse_override(override)
    with callers_hydra_restored(), initialize_config_dir(str(CONFIGS)):
        parsed.config_loader = GlobalHydra.instance().config_loader()  # which finds what a glob matches
    if not parsed.is_sweep_override():
        return [override]
    if parsed.is_interval_sweep():  # a sweeper draws values between its ends
        interval = parsed.value()
        return [f"{parsed.get_key_element()}={end}" for end in (interval.start, interval.end)]
    values = islice(parsed.sweep_string_iterator(), MOST_JOBS + 1)
    found = [f"{parsed.get_key_element()}={value}" for value in values]
    if not found:  # of a glob
        raise HydraException(f"it matches no option; use one of {', '.join(options(key_of(override))) or 'none'}")
    return found


def jobs(overrides: Sequence[str]) -> int:
    """How many runs they stand for; those that cannot be read count as one."""
    count = 1
    for override in overrides:
        with suppress(*CONFIG_ERRORS):
            count *= len(variants(override))
    return count


def tried_alone(config_name: str, overrides: Sequence[str], always: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """Hydra's error for each override tried alone on top of `always` and the valid groups; and the overrides that it accepts."""
    problems: list[str] = []
    groups: list[str] = []
    values: list[str] = []
    for given in sorted(overrides, key=lambda o: not is_group(o)):  # groups first, because they decide which keys exist
        try:
            tried = variants(given)
        except HydraException as e:
            problems.append(message(e, given))
            continue
        for override in tried[:MOST_TRIED] if len(problems) < MOST_TRIED else ():
            try:
                compose_config(config_name, [*always, *groups, override])
            except CONFIG_ERRORS as e:
                problems.append(message(e, override))
            else:
                (groups if is_group(override) else values).append(override)
    return problems, [*groups, *values]


def explain(error: BaseException, config_name: str, overrides: Sequence[str], always: Sequence[str] = ()) -> list[str]:
    """All mistakes of a command line that Hydra rejected with `error`."""
    problems, good = tried_alone(config_name, overrides, always)
    try:
        composed = compose_config(config_name, [*always, *good])
        if config_name == "train":  # the config of eval is merged with that of the run first
            # a data set's class is imported only for the sake of a command that is about it
            with_data = any(key_of(o).partition(".")[0] in ("data", *RECIPES) for o in good)
            check(without_replaced_defaults(Draft(composed), good), with_data=with_data)
    except UserError as e:
        problems += e.problems
    except CONFIG_ERRORS as e:
        error = e
    return problems or [" ".join(str(error).split())]
