"""What the documentation says to type: the commands, links and names of every page, found in its text."""

import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import thin_project

from lockstep import ROOT
from lockstep.launch.local import scripts

MARKDOWN = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
HEADERS = sorted((ROOT / "configs/experiment").glob("*.yaml"))  # a recipe's header has its command
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"(?:# @package _global_\n)?# (\S+/\S+\.(?:py|yaml))\n")  # Hydra wants its own line first
INLINE = re.compile(r"`([^`\n]+)`")
STARTS = re.compile(r"(?:[A-Z_]+=\S+ )*(?:sudo )?(?:python|uv|lockstep|torchrun|sbatch|srun|bash|kubectl|pip) ")
HOSTED = {"train.py", "eval.py", "predict.py", "slurm.sbatch"}  # scripts that take a config
END = {"&&", "||", ";", "|", "&"}


@dataclass(frozen=True)
class Command:
    """One command of a line: the script that it runs, if it is one of the repository's, and its arguments."""

    text: str
    script: Path | None
    args: tuple[str, ...]
    files: tuple[str, ...]  # of the repository, that it names

    @property
    def config(self) -> str | None:
        """The config that its arguments change."""
        if self.script is None or self.script.name not in HOSTED:
            return None
        return "train" if self.script.suffix == ".sbatch" else self.script.stem

    @property
    def overrides(self) -> tuple[str, ...]:
        foreign = "--config-dir" in self.args  # of a folder that a sweep writes
        given = [arg for arg in self.args if not arg.startswith("-") and ("=" in arg or arg.startswith("~"))]
        return tuple(arg for arg in given if not (foreign and arg.startswith("experiment=")))


def in_repository(word: str) -> bool:
    first, *rest = word.split("/")
    return bool(rest) and first not in ("runs", "src", "") and (ROOT / first).is_dir() and "." in rest[-1]


def parse(line: str) -> list[Command]:
    """The commands of a line of a shell. A `<placeholder>` is replaced by x."""
    line = re.sub(r"<[^<>]*>", "x", line.replace("\\|", "|")).replace("…", "x")
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&;|")
    lexer.whitespace_split = True
    found, words = [], list[str]()
    for word in [*lexer, ";"]:
        if word not in END:
            words.append(word)
            continue
        found += [command(words)] if words else []
        words = []
    return found


def command(words: list[str]) -> Command:
    while words and (re.match(r"[A-Z_]+=", words[0]) or words[0] in ("sudo", "uv", "run", "--group", "peers", "$")):
        words = words[1:]
    script, args = None, tuple[str, ...]()
    if words[:1] == ["lockstep"]:
        script, args = scripts().get(words[1] if words[1:] else "") or ROOT / "no-such-command", tuple(words[2:])
    else:
        for place, word in enumerate(words):
            if word in HOSTED or (word.endswith((".py", ".sbatch")) and in_repository(word)):
                script, args = ROOT / word, tuple(words[place + 1 :])
                break
    files = tuple(word for word in words if word in HOSTED or in_repository(word))
    return Command(" ".join(words), script, tuple(arg for arg in args if arg != "..."), files)


class Text:
    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.relative_to(ROOT).as_posix()

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def blocks(self) -> list[tuple[str, str]]:
        """(language, content) of each fenced block."""
        return FENCE.findall(self.text)

    @cached_property
    def prose(self) -> str:
        return FENCE.sub("", self.text)

    @cached_property
    def files(self) -> dict[str, str]:
        """Of blocks that begin with a path, and of the pages that this one continues ("the files of [a page](page.md)")."""
        continued = re.findall(r"the files of\s\[[^]]+\]\((\S+\.md)\)", self.prose)
        before = {name: block for link in continued for name, block in Text(self.path.parent / link).files.items()}
        return before | {found[1]: block for _, block in self.blocks if (found := NAMED.match(block))}

    def write(self, root: Path, **more: str) -> Path:
        """A project with the page's files."""
        thin = {name: thin_project.FILES[name] for name in ("pyproject.toml", "train.py")}
        for name, text in {**thin, **self.files, **more}.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        return root

    @cached_property
    def commands(self) -> list[Command]:
        if self.path.suffix == ".yaml":
            lines = re.findall(r"^# +(python .*)$", self.text, re.MULTILINE)
        else:
            shell = "\n".join(content for language, content in self.blocks if language in ("bash", "console", "sh"))
            typed = [line.removeprefix("$ ") for line in shell.replace("\\\n", " ").splitlines()]
            typed += re.findall(r"^    (.*)$", self.prose, re.MULTILINE)  # Markdown's other code blocks
            lines = [line for line in [*typed, *INLINE.findall(self.prose)] if STARTS.match(line)]
        return [each for line in lines for each in parse(line)]

    @cached_property
    def links(self) -> list[tuple[str, str]]:
        """(path, anchor) of each link to a file or a heading of the repository."""
        found = re.findall(r"\]\(([^)\s]+)\)", INLINE.sub("", self.prose))
        return [link.partition("#")[::2] for link in found if not re.match(r"\w+:|[A-Z_]+$", link)]

    @cached_property
    def anchors(self) -> set[str]:
        """Of its headings, as GitHub makes them."""
        headings = re.findall(r"^#+ +(.*?)\s*$", self.prose, re.MULTILINE)
        plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}
