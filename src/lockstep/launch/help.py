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
from lockstep.config.formatting import to_text
from lockstep.config.run_config import SEVERAL
from lockstep.config.schema import GROUPS, KEYS, PREDICT
from lockstep.errors import did_you_mean, raise_problems
from lockstep.launch.local import Job
from lockstep.run import LOADER

SET_BY_CHOICE = ("_target_", "strategy.name", "replaces")  # keys that only an option should set
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
    valid = (*GROUPS, *config.values)
    unknown = (name for name in topics if name not in valid)
    raise_problems(f"--help {name}: there is no such group or key{did_you_mean(name, valid)}." for name in unknown)
    return "\n".join(line for name in topics for line in config.topic(name)) or "\n".join(overview(job, config))


class Shown:
    """A composed config, as shown by the help."""

    def __init__(self, config_name: str, overrides: Sequence[str], search_path: Sequence[str] = ()) -> None:
        """Raises UserError if `overrides` are invalid."""
        tree: Any = OmegaConf.to_container(checks.composed(config_name, overrides, search_path, with_hydra=True))
        self.choices = tree.pop("hydra")["runtime"]["choices"]
        self.values = {key: value for key, value in configs.dotted(tree).items() if value != {}}
        files = ["lockstep"] if config_name == "train" else ["lockstep", "eval", config_name]
        for group in GROUPS:  # the chosen option last: an option may inherit keys from another one
            chosen = self.choices.get(group)
            files += [f"{group}/{name}" for name in sorted(configs.options(group), key=lambda name: name == chosen)]
        self.comments = {key: comment for file in files for key, comment in comments_of(file).items()}

    def key(self, key: str) -> str:
        """A key with its default, its comment, its valid values and an example."""
        value = self.values.get(key)
        default = "<value>" if value == "???" else to_text(value) if isinstance(value, str) else configs.to_hydra(value)
        about = self.comments.get(key, "")
        if (kind := {**KEYS, **PREDICT}.get(key)) and not kind.takes.startswith("UTF-8 text"):
            about += f" [{kind.takes}; for example {kind.example}]"
        return entry(f"  {key}={default}", about, INDENT)

    def group(self, name: str) -> Iterator[str]:
        """The keys of a group under its title, or a top-level key."""
        keys = [key for key in self.values if f"{key}.".startswith(f"{name}.")]
        if name in GROUPS and keys:
            choice = self.choices.get(name)
            title = f"{name}={choice}" if isinstance(choice, str) else name
            yield f"\n{title}: {self.values.get(f'{name}._target_', '')}".rstrip()
        for key in keys:
            if not any(f".{part}." in f".{key}." for part in SET_BY_CHOICE):
                yield self.key(key)

    def topic(self, name: str) -> Iterator[str]:
        """A group with its options and keys, or a single key."""
        if name in GROUPS:
            yield f"{name}: choose with {name}={'[<option>,...]' if name in SEVERAL else '<option>'}"
        for option in configs.options(name) if name in GROUPS else ():
            text = configs.config_file(f"{name}/{option}").read_text(encoding="utf-8")
            comments = takewhile(lambda line: line.startswith("#"), text.splitlines())
            header = [line for line in comments if "@package" not in line]
            node = configs.dotted(yaml.load(text, LOADER) or {}, name)
            classes = [value for key, value in node.items() if key.endswith("_target_")]
            yield entry(f"  {option}", " ".join(line.lstrip("# ") for line in header or classes), 22)
            if name in SEVERAL and f"{name}.defaults" not in node:  # those of all options: a run may have several
                self.values |= node
        yield from self.group(name)


def overview(job: Job, config: Shown) -> Iterator[str]:
    yield (ast.get_docstring(ast.parse(job.script.read_bytes())) or f"{job.name}.py") + "\n"
    names = ["run", "checkpoint", *(PREDICT if job.name == "predict" else ()), "runs_dir", "debug_rank"]
    if job.trains:
        yield "Groups. Choose with <group>=<option>, or [<option>,...]; `--help <group>` describes the options:"
        for group in filter(configs.options, GROUPS):
            yield entry(f"  {group}", ", ".join(configs.options(group)), 14)
        yield ""
        every = dict.fromkeys(key.partition(".")[0] for key in config.values)
        names = sorted(every, key=GROUPS.__contains__)  # single keys first
    yield "Keys. Set with <key>=<value>:"
    for name in names:
        yield from config.group(name) if job.trains else [config.key(name)]
    if not job.trains:
        yield "\nThe others are those of the run; strategy, trainer.devices, trainer.precision and data.root may be changed."
    yield "\n--json prints only the result, as JSON, on standard output."
    yield '--hydra-help shows Hydra\'s own options. Complete keys with TAB: eval "$(lockstep --completion)"'


def entry(name: str, text: str, indent: int) -> str:
    """`text` to the right of `name`, or below a long name, in lines that fit the terminal."""
    width = max(60, shutil.get_terminal_size().columns)
    block = textwrap.fill(text, width, initial_indent=" " * indent, subsequent_indent=" " * indent)
    return name + (block[len(name) :] if len(name) < indent else f"\n{block}".rstrip())


# --- Comments in configs/ ---


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
