"""`--help` of train.py, eval.py and predict.py: keys with defaults, comments of configs/ and values. Free of torch."""

import ast
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

import yaml
from omegaconf import OmegaConf

from lockstep.config import checks
from lockstep.config import compose as configs
from lockstep.config.draft import advice, nearest_key
from lockstep.config.formatting import to_text
from lockstep.config.run_config import SEVERAL
from lockstep.config.schema import GROUPS, KEYS, PREDICT
from lockstep.errors import UserError, did_you_mean
from lockstep.launch.local import Job
from lockstep.run import LOADER

SET_BY_CHOICE = ("_target_", "strategy.name", "replaces")  # keys that only an option should set
EVALUATION = (  # keys of a run that an evaluation may change
    "strategy", "trainer.accelerator", "trainer.devices", "trainer.num_nodes", "trainer.precision", "data.root",
    "loader.eval_batch_size", "loader.num_workers",
)  # fmt: skip
INDENT = 34  # width of the column for a key and its default
COMMENTED = re.compile(r"( *)([\w/ ]+):(?: .*?)??(?: +# *(.*))?")  # a line of a config: indentation, key, comment


def text(job: Job, argv: Sequence[str]) -> str:
    """The help of a command, or only that of groups or keys, as in `--help optim`.

    Raises:
        UserError: there is no such group or key.
    """
    pairs = zip(["", *argv], argv, strict=False)
    topics = [b for a, b in pairs if not b.startswith("-") and "=" not in b and a not in ("--config-dir", "-cd")]
    overrides = [arg for arg in argv if not arg.startswith("-") and "=" in arg]
    config = Shown(job.name, overrides, configs.search_path(argv))
    valid = [*GROUPS, *config.values]
    if unknown := [name for name in topics if name not in valid]:
        key, is_key, _ = advice()["keys"].get(unknown[0], nearest_key(unknown[0]) + "=").partition("=")
        hint = f" (did you mean {key}?)" if key and is_key else did_you_mean(unknown[0], valid)
        raise UserError(f"--help {unknown[0]}: there is no such group or key{hint}; --help lists all of them.")
    parts = [config.topic(name) for name in topics] or [overview(job, config)]
    return "\n\n".join("\n".join(part) for part in parts)


class Shown:
    """A composed config, as shown by the help."""

    def __init__(self, config_name: str, overrides: Sequence[str], search_path: Sequence[str] = ()) -> None:
        """Raises UserError if `overrides` are invalid."""
        composed = checks.composed(config_name, overrides, search_path, with_hydra=True)
        self.choices = dict(composed.hydra.runtime.choices)
        tree = OmegaConf.to_container(OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"]))
        self.values = {key: value for key, value in configs.dotted(tree).items() if value != {}}
        self.comments = comments_of("lockstep")
        if config_name != "train":
            self.comments |= comments_of("eval") | comments_of(config_name)
        for group in GROUPS:  # an option may inherit keys from another one
            for option in sorted(configs.options(group), key=lambda name: name == self.choices.get(group)):
                self.comments |= comments_of(f"{group}/{option}")

    def key(self, key: str, value: Any = None) -> Iterator[str]:
        """A key with its default or `value`, its comment, its valid values and an example."""
        value = value or self.values.get(key)
        default = "<value>" if value == "???" else to_text(value) if isinstance(value, str) else configs.to_hydra(value)
        kind = {**KEYS, **PREDICT}.get(key)
        values = ""
        if kind and not kind.takes.startswith("UTF-8 text"):
            example = "" if kind.takes.startswith("one of ") else f"; for example {kind.example}"
            values = f"[{kind.takes.removeprefix('one of ')}{example}]"
        return hanging_indent(f"  {key}={default}", f"{self.comments.get(key, '')} {values}".strip(), INDENT)

    def group(self, name: str) -> Iterator[str]:
        """The keys of a group under its title, or a top-level key."""
        keys = [key for key in self.values if f"{key}.".startswith(f"{name}.")]
        if name in GROUPS and keys:
            choice = self.choices.get(name)
            target = self.values.get(f"{name}._target_")
            yield f"\n{name}{f'={choice}' if isinstance(choice, str) else ''}{f': {target}' if target else ':'}"
        for key in keys:
            if not any(f".{part}." in f".{key}." for part in SET_BY_CHOICE):
                yield from self.key(key)

    def topic(self, name: str) -> Iterator[str]:
        """A group with its options and keys, or a single key."""
        if name not in GROUPS:
            yield from self.key(name)
            return
        is_list, options = name in SEVERAL, configs.options(name)
        if options:
            yield f"{name}: choose with {name}={'[<option>,...]' if is_list else '<option>'}"
        for option in options:
            yield from hanging_indent(f"  {option}", option_description(f"{name}/{option}"), 22)
        single = [option for option in options if not option_node(f"{name}/{option}").get("defaults")]
        yield from (Shown("train", [f"{name}=[{','.join(single)}]"]) if is_list else self).group(name)


def overview(job: Job, config: Shown) -> Iterator[str]:
    yield (ast.get_docstring(ast.parse(job.script.read_bytes())) or f"{job.name}.py") + "\n"
    if not job.trains:
        yield "Keys. Set with <key>=<value>:"
        for key in ("run", "checkpoint", *(PREDICT if job.name == "predict" else ()), "runs_dir", "debug_rank"):
            yield from config.key(key)
        yield "\nKeys of the run that may be changed; `--help data strategy trainer` shows more:"
        for key in EVALUATION:
            yield from config.key(key, "???")  # the default is the run's value
    else:
        yield "Groups. Choose with <group>=<option>, or [<option>,...]; `--help <group>` describes the options:"
        for group in filter(configs.options, GROUPS):
            yield from hanging_indent(f"  {group}", ", ".join(configs.options(group)), 14)
        yield "\nKeys. Set with <key>=<value>:"
        names = dict.fromkeys(key.partition(".")[0] for key in config.values)
        for name in sorted(names, key=GROUPS.__contains__):  # single keys first
            yield from config.group(name)
    yield "\n--json prints only the result, as JSON, on standard output."
    yield '--hydra-help shows Hydra\'s own options. Complete keys with TAB: eval "$(lockstep --completion)"'


def hanging_indent(name: str, text: str, indent: int) -> Iterator[str]:
    """`text` to the right of `name`, or below a long name, in lines that fit the terminal."""
    lines = textwrap.wrap(text, max(60, shutil.get_terminal_size().columns) - indent)
    if lines and len(name) < indent:
        yield f"{name:{indent}}{lines.pop(0)}"
    else:
        yield name
    yield from (" " * indent + line for line in lines)


# --- Comments in configs/ ---


def option_node(config: str) -> dict[str, Any]:
    return yaml.load(configs.config_file(config).read_bytes(), LOADER) or {}


def option_description(config: str) -> str:
    """The description of an option: the comment at the top of its file, or else its class."""
    lines = configs.config_file(config).read_text(encoding="utf-8").splitlines()
    doc = [line.lstrip("# ") for line in takewhile(lambda line: line.startswith("#"), lines) if "@package" not in line]
    return " ".join(doc) or " ".join(
        v for k, v in configs.dotted(option_node(config)).items() if k.endswith("_target_")
    )


def comments_of(config: str) -> dict[str, str]:
    """The comments after the keys of a config."""
    group = config.rpartition("/")[0]
    parents, comments = [(-1, group)] if group else [], dict[str, str]()
    lines = configs.config_file(config).read_text(encoding="utf-8").splitlines()
    for line in filter(None, map(COMMENTED.fullmatch, lines)):
        indent = len(line[1])
        parents = [*(parent for parent in parents if parent[0] < indent), (indent, line[2])]
        if line[3]:
            comments[".".join(name for _, name in parents)] = line[3].strip()
    return comments
