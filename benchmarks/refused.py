"""Tests invalid command lines and files, and counts how they are rejected.

python benchmarks/refused.py [--only <text>]

A case is rejected well if train.py ends with exit code 2 and a message that names the key, without a traceback, before it creates the run
directory, and leaves no file. Some cases need torch: only a created network can show whether it accepts the images. Each case is a process
forked from one that has imported torch, because imports would take most of the time. The table adds the import time to the cases that
need torch. Needs Linux.

The cases are damaged data files, the command lines of refused.txt, and cases generated from the keys of the schema by general rules (such
as removing each key), so new keys need no new line here.
"""

import contextlib
import gzip
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import measuring

from lockstep import ROOT
from lockstep.config.schema import KEYS
from lockstep.config.validators import FLAG, TEXT
from lockstep.machine.system import cores

sys.path.append(str(ROOT / "tests"))
import forked  # processes from a server that has imported torch


@dataclass(frozen=True)
class Case:
    """A command line of train.py. The message must contain `key`. `works`: the command must be accepted instead; `may_work`: it may be."""

    family: str
    args: tuple[str, ...]
    key: str
    files: dict[str, bytes] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    what: str = ""  # description of the files
    works: bool = False
    may_work: bool = False

    @property
    def name(self) -> str:
        env = [f"{name}={value}" for name, value in self.env.items()]
        return " ".join([*env, *self.args]) + (f" ({self.what})" if self.what else "")


def idx(count: int, *shape: int, kind: int = 8) -> bytes:
    """An idx file with `count` items of `shape`."""
    sizes = b"".join(n.to_bytes(4, "big") for n in (count, *shape))
    return bytes([0, 0, kind, 1 + len(shape)]) + sizes + bytes(i % 10 for i in range(count * math.prod(shape)))


NAMES = {"train": "train-images-idx3", "test": "t10k-images-idx3", "train_labels": "train-labels-idx1", "test_labels": "t10k-labels-idx1"}  # fmt: skip


def digits(**other: bytes) -> dict[str, bytes]:
    """The files of MNIST, in a folder `own`."""
    good = {"train": idx(64, 12, 12), "test": idx(32, 12, 12), "train_labels": idx(64), "test_labels": idx(32)}
    return {f"own/{NAMES[part]}-ubyte": content for part, content in (good | other).items()}


def picture(side: int = 8) -> bytes:
    return b"P6 %d %d 255\n" % (side, side) + bytes(side * side * 3)


def pictures(**other: bytes) -> dict[str, bytes]:
    """A folder of two classes; `other` adds files to class `a`, by name."""
    files = {f"own/{part}/{kind}/{i}.ppm": picture() for part in ("train", "test") for kind in "ab" for i in range(32)}
    return files | {f"own/train/a/{name}.ppm": content for name, content in other.items()}


def data() -> Iterator[Case]:
    args, family = ("data.root=own",), "data files"
    for what, files, named in (
        ("test images of a different size", digits(test=idx(32, 14, 14)), "t10k-images"),
        ("no test images", digits(test=idx(0, 12, 12), test_labels=idx(0)), "t10k-images"),
        ("no training images", digits(train=idx(0, 12, 12), train_labels=idx(0)), "train-images"),
        ("images of 0 pixels", digits(train=idx(64, 0, 12), test=idx(32, 0, 12)), "train-images"),
        ("a huge dimension", digits(train=bytes([0, 0, 8, 3]) + b"\xff" * 12), "train-images"),
        ("labels above 9", digits(train_labels=idx(64)[:8] + bytes([200]) * 64), "train-labels"),
        ("fewer labels", digits(train_labels=idx(63)), "train-labels"),
        ("numbers of a different type", digits(train=idx(64, 12, 12, kind=9)), "train-images"),
        ("a truncated file", digits(train=idx(64, 12, 12)[:500]), "train-images"),
        ("an empty file", digits(train=b""), "train-images"),
        ("a file of text", digits(train=b"hello"), "train-images"),
        ("trailing bytes", digits(train=idx(64, 12, 12) + b"x"), "train-images"),
    ):
        yield Case(family, args, named, files, what=what)
    packed = {f"{name}.gz": gzip.compress(content) for name, content in digits().items()}
    name = "own/train-images-idx3-ubyte.gz"
    bomb = gzip.compress(idx(64, 12, 12)) + gzip.compress(bytes(2**24)) * 256  # 4 GB
    for what, content in {
        "a bomb": bomb, "truncated": packed[name][:-9], "truncated early": packed[name][:20], "a wrong checksum": packed[name][:-6] + bytes(6),
        "two bytes": b"\x1f\x8b", "nothing": b"", "text": b"text" * 99,
    }.items():  # fmt: skip
        yield Case(family, args, "train-images", {**packed, name: content}, what=f"archive: {what}")
    yield Case(family, args, "", packed, what="archives", works=True)
    yield Case(family, args, "own", {"own": b"a file"}, what="data.root is a file")
    folder = ("data=folder", "data.root=own")
    yield Case(family, folder, "", pictures(), what="good", works=True)
    for content in (b"", b"text", picture()[:50], b"P6 0 0 255\n", b"P6 99999 99999 255\n" + bytes(50)):
        yield Case(family, folder, "broken.ppm", pictures(broken=content), what=f"a file of {content[:15]!r}")
    for table in (b"", b"path,target", b"a,b\n1,2", b"path,target\nnothing.ppm,a\n", b"path,target\n,\n", b"\xff\xfe\0\0",
                  b"path,target,split\ntrain/a/0.ppm,a,abc\n", b"path,target\ntrain/a/0.ppm\n", b"path,target\n\0\n",
                  b"path,target,split\ntrain/a/0.ppm,a,test\n", b"path,target\ntrain/a/0.ppm,a\n", b'path,target\n"' + b"x" * 200_000):  # fmt: skip
        files = {**pictures(), "own/list.csv": table}
        yield Case(family, (*folder, "data.csv=list.csv"), "list.csv", files, what=repr(table[:50]))
    yield Case(family, folder, "own", {"own/a/0.txt": b"x"}, what="no images")
    yield Case(family, folder, "own", {"own/a/0.ppm": picture()}, what="one class")


# Overrides without which a key does not exist.
NEEDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("strategy.bucket_cap_mb", "strategy.gradient_as_bucket_view", "strategy.static_graph",
                     "strategy.find_unused_parameters", "strategy.comm_hook", "strategy.timeout_s"), ("strategy=ddp",)),
    **dict.fromkeys(("strategy.reshard_after_forward", "strategy.blocks"), ("strategy=fsdp",)),
    **dict.fromkeys(("data.csv", "data.channels", "data.decode", "data.skip_broken", "data.test_fraction", "data.presize"),
                    ("data=folder", "data.root=own")),
    **dict.fromkeys(("model.name", "model.pretrained", "model.checkpoint_path"), ("model=timm", "model.name=test_resnet")),
    "schedule.gamma": ("schedule=step",), "schedule.milestones": ("schedule=step",),
    "schedule.final_fraction": ("schedule=cosine",), "optim.momentum": ("optim=sgd",),
    "callbacks.ema.decay": ("callbacks=[ema]",), "callbacks.ema.update_every_n_steps": ("callbacks=[ema]",),
    "callbacks.early_stopping.patience": ("callbacks=[early_stopping]",),
    "callbacks.early_stopping.min_delta": ("callbacks=[early_stopping]",),
}  # fmt: skip
# Keys that may be null, but whose options these cases do not choose.
NOT_CHOSEN = ("task.pos_weight", *(f"callbacks.early_stopping.{key}" for key in ("monitor", "check_on_train_epoch_end")))  # fmt: skip
# Invalid values for every key of a kind.
WRONG = {
    "flag": ("abc", "5", "[true]", "null"),
    "text": ("[1]", "{a: 1}", "''", "5.5"),
    "whole number": ("abc", "[1,2]", "-1000", "inf", "0.5", "true", "1e30", "1" + 20 * "0"),
    "number": ("abc", "{a: 1}", "-1", "inf", "nan", "true"),
    "key of a different kind": ("{a: {b: 1}}", "''", "[[1]]", "nan"),
}
GROUPS = ("task", "model", "data", "loader", "strategy", "trainer", "optim", "schedule", "checkpoint", "exact")
WITHOUT_TARGET = ("loader", "trainer", "checkpoint", "exact")
EMPTY = ("callbacks", "logger")  # groups that may be empty


def kind_of(key: str) -> str:
    kind = KEYS[key]
    if kind is FLAG:
        return "flag"
    if kind.takes.startswith(TEXT.takes) or key == "run":
        return "text"
    if kind.takes.startswith("a whole number"):
        return "whole number"
    return "number" if kind.takes.startswith(("a number ab", "a number of at")) else "key of a different kind"


def keys() -> Iterator[Case]:
    for key in KEYS:
        needs = NEEDS.get(key, ())
        files = pictures() if "data=folder" in needs else {}
        default = "." in key and not key.startswith(("trainer.", "checkpoint."))  # the class has one
        if key != "optim.momentum":  # torch reports it when the run begins
            yield Case("a key is removed", (*needs, f"~{key}"), key, files, may_work=default)
        nullable = KEYS[key].accepts(None) and key not in NOT_CHOSEN
        yield Case("a key is null", (*needs, f"{key}=null"), key, files, works=nullable)
        for value in WRONG[kind_of(key)]:
            if value != "null":
                yield Case(f"a wrong value for a {kind_of(key)}", (*needs, f"{key}={value}"), key, files)


def groups() -> Iterator[Case]:
    for group in (*GROUPS, *EMPTY):
        for override in (f"~{group}", f"{group}=null", f"{group}=5", f"{group}=abc", f"{group}.x=5"):
            yield Case("a group is removed, null or not a group", (override,), group)
    for group in (group for group in GROUPS if group not in WITHOUT_TARGET):
        yield Case("a target is removed, null or not a class", (f"~{group}._target_",), f"{group}._target_")
        for value in ("null", "5", "[1]", "lockstep.nothing.Here", "nothing.Here", "lockstep", "''"):
            yield Case("a target is removed, null or not a class", (f"{group}._target_={value}",), f"{group}._target_")
    for group in EMPTY:
        for value in ("5", "null", "abc", "[1]", "{}", "{a: 1}", "{_target_: 5}", "{_target_: lockstep.nothing.Here}"):
            yield Case("a target is removed, null or not a class", (f"+{group}.x={value}",), f"{group}.x")


def names() -> Iterator[Case]:
    for key in list(KEYS)[::2]:
        group, _, name = key.rpartition(".")
        if len(name) > 4:
            needs, wrong = NEEDS.get(key, ()), f"{group}.{name[:-2]}{name[-1]}".lstrip(".")
            yield Case("a name is misspelt", (*needs, f"{wrong}=5"), key, pictures() if "data=folder" in needs else {})
    for group, option in (("model", "resnet50"), ("data", "mnits"), ("optim", "adamww"), ("schedule", "cosin"), ("strategy", "dpp"),
                          ("task", "classificaton"), ("logger", "[csvv]"), ("callbacks", "[emma]"), ("debug", "limits")):  # fmt: skip
        yield Case("a name is misspelt", (f"{group}={option}",), "did you mean")
    for args in (("modle=resnet50d",), ("optimm.lr=1",), ("trainer.max_step=5",), ("+trainer.max_step=5",), ("data.rot=x",),
                 ("experiment=mnist_basic_nett",), ("callbacks=[default,ema]", "callbacks.emma.decay=0.9"), ("+sed=5",)):  # fmt: skip
        yield Case("a name is misspelt", args, "did you mean")


KEY_OF = {  # cases whose message must name a different key than that of the last override
    "trainer.devices=2": "devices", "trainer.val_check_interval=3": "val_check_interval", "data.source=abc": "source",
    "loader.limit_train=1": "loader.batch_size", "run=a": "resume=auto", "--config-dir=nothing": "nothing", "optim._target_=torch.optim.LBFGS": "optim.",
}  # fmt: skip


WORKING = "what works"  # a family in refused.txt: its command lines must work


def lines() -> Iterator[Case]:
    """The cases of refused.txt."""
    family = ""
    for line in Path(__file__).with_name("refused.txt").read_text().splitlines():
        if line.startswith("["):
            family = line.strip("[]")
        for text in line.split("|") if family and not line.startswith("[") else ():
            if args := tuple(text.replace("{LONG}", 300 * "x").split()):
                last = args[-1].lstrip("+~-").partition("=")[0] or "error"
                key = KEY_OF.get(args[-1], last)
                yield Case(family, args, key, works=family == WORKING, may_work=args == ("~optim.lr",))


def commands() -> Iterator[Case]:
    family = "the command line itself"
    yield Case(family, ("optim.lrr=1",), "optim.lr", env={"HYDRA_FULL_ERROR": "0"})
    yield Case(family, ("model=nothing",), "model", env={"HYDRA_FULL_ERROR": "0"})
    for name, content in {"a: [": b"a: [", "tabs": b"a:\n\t- b", "bytes": b"\xff\xfe\0", "list": b"- 1\n- 2", "text": b"abc",
                          "key": b"nothing: 5", "null": b"", "group": b"defaults: [nothing]"}.items():  # fmt: skip
        files = {"mine/experiment/mine.yaml": b"# @package _global_\n" + content}
        named = {"key": "nothing", "text": "abc", "group": "nothing"}.get(name, "mine")
        yield Case(family, ("--config-dir=mine", "experiment=mine"), named, files, what=name, works=name == "null")


@cache
def cases() -> list[Case]:
    pool = [Case(WORKING, (), "", works=True), *lines(), *commands(), *groups(), *names(), *keys(), *data()]
    return list({(case.args, *case.files.values(), *case.env.items()): case for case in reversed(pool)}.values())[::-1]


# --- how a case is rejected ---

LIMIT_S = 20.0  # a case that trains longer than this was accepted
HOOK = str(Path(__file__).with_name("refused_hook.py").resolve())
OFFLINE = {"WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
WELL, LATE, DIM, TRACEBACK, SILENT = "rejected well", "late", "unclear", "traceback", "accepted silently"
LEFT, WORKS, WRONGLY = "left files", "works", "wrongly rejected"
COLUMNS = (WELL, LATE, DIM, LEFT, TRACEBACK, SILENT)
STAGES = ("run", "torch", "classes")  # recorded by refused_hook.py, last stage first
BASE = ["data.root=own", "data.source=disk", "loader.batch_size=16", "data.image_size=12", "trainer.accelerator=cpu", "trainer.max_steps=2",
        "trainer.limit_val_batches=1", "trainer.limit_test_batches=1", "trainer.enable_progress_bar=false"]  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    case: Case
    verdict: str
    elapsed_s: float
    message: str


def verdict(case: Case, code: int | None, message: str, stage: str, left: list[str]) -> str:
    """`code` is None for a case that ran too long. `stage`: config (only the config was read), classes, torch (everything was built), or
    run."""
    if case.works or (case.may_work and code == 0):
        return WORKS if code == 0 else WRONGLY
    if code == 0 or (code is None and stage == "run"):
        return SILENT
    if code != 2 or "Traceback" in message:
        return TRACEBACK
    if stage == "run":
        return LATE
    if left:
        return LEFT
    lines = [line for line in message.splitlines() if not line.startswith("WARNING")]
    is_clear = any("error: " in line for line in lines) and any(case.key in line for line in lines)
    return WELL if is_clear else DIM


# --- a case in a separate process, forked from a server that has imported torch ---


def import_s(what: str) -> float:
    """Seconds of `import what` in a new process: the faster of two."""
    command = [sys.executable, "-c", f"import {what}"]
    return min(timeit.repeat(partial(subprocess.run, command, check=True), repeat=2, number=1))


def write_files(case: Case, folder: Path) -> None:
    has_data = any(name.startswith("own") for name in case.files)
    for name, content in {**({} if has_data else digits()), **case.files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    folder.mkdir(exist_ok=True)


def tried(case: Case, folder: Path, cost_s: dict[str, float]) -> Outcome:
    """Runs `python train.py` in `folder`, for at most LIMIT_S."""
    write_files(case, folder)
    before, began_s = set(folder.rglob("*")), time.monotonic()
    errors, stages = folder.with_suffix(".err"), folder.with_suffix(".stages")
    typed = [arg.partition("=")[0] for arg in case.args] + ["data.source"] * ("data=folder" in case.args)
    base = [arg for arg in BASE if arg.partition("=")[0] not in typed]
    command = [sys.executable, str(ROOT / "train.py"), *base, f"data.cache_dir={folder.parent / 'cache'}", *case.args]
    env = {**os.environ, **OFFLINE, **case.env, forked.HOOK: HOOK, "REFUSED_STAGES": str(stages)}
    nothing, code = forked.DEVNULL, None
    with errors.open("wb") as file:
        process = forked.Popen(command, cwd=folder, env=env, stdin=nothing, stdout=nothing, stderr=file, start_new_session=True)  # fmt: skip
    with contextlib.suppress(forked.TimeoutExpired):
        code = process.wait(LIMIT_S)
    elapsed_s = time.monotonic() - began_s
    with contextlib.suppress(ProcessLookupError):  # the command and its child processes
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    noted = stages.read_text().split() if stages.exists() else []
    stage = next((name for name in STAGES if name in noted), "config")
    imports = stage == "classes" and any("_target_" in arg or arg[0] == "+" for arg in case.args)
    elapsed_s += cost_s["torch" if stage in ("torch", "run") or imports else "config"]
    message = errors.read_text(errors="replace")
    left = sorted(str(path.relative_to(folder)) for path in set(folder.rglob("*")) - before)
    return Outcome(case, verdict(case, code, message, stage, left), elapsed_s, message)


def outcomes_of(every: list[Case]) -> Iterator[Outcome]:
    """Runs as many cases at once as there are cores."""
    config_s = import_s("lockstep.launch.start, lockstep.config.compose")
    cost_s = {"config": config_s, "torch": config_s + import_s("lockstep.build")}
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(cores()) as pool:
        forked.start_server(Path(name))
        folders = [Path(name, str(number)) for number in range(len(every))]
        yield from pool.map(tried, every, folders, [cost_s] * len(every))


# --- the table ---


def table(outcomes: list[Outcome]) -> str:
    rows = []
    refusable = [o for o in outcomes if o.verdict not in (WORKS, WRONGLY)]
    for family in [*dict.fromkeys(o.case.family for o in refusable), "all"]:
        own = [o for o in refusable if family in (o.case.family, "all")]
        counts = Counter(o.verdict for o in own)
        times = [o.elapsed_s for o in own]
        late = f"{statistics.quantiles(times, n=20, method='inclusive')[-1]:.1f}" if len(times) > 1 else ""
        rows.append([family, str(len(own)), *(str(counts[name]) for name in COLUMNS), late])
    return measuring.table(["family", "cases", *COLUMNS, "s, 95th percentile"], rows)


def page(outcomes: list[Outcome]) -> str:
    works = Counter(o.verdict for o in outcomes)
    bad = sorted(f"- {o.verdict}: `{o.case.name[:150]}`" for o in outcomes if o.verdict not in (WELL, WORKS))
    must = f"Of {works[WORKS] + works[WRONGLY]} command lines that must work, {works[WORKS]} did."
    return "\n".join([table(outcomes), "", must, "", "Not rejected well:", "", *(bad or ["none"])])


def main() -> int:
    parser = measuring.parser(__doc__)
    parser.add_argument("--only", default="", help="only cases whose family or command line contains this text")
    args = parser.parse_args()
    chosen = [case for case in cases() if args.only in case.family or args.only in case.name]
    outcomes = []
    for outcome in outcomes_of(chosen):
        outcomes.append(outcome)
        bad = outcome.verdict not in (WELL, WORKS)
        if args.only or bad:
            print(f"{outcome.verdict:20} {outcome.elapsed_s:5.1f} s  {outcome.case.name}", file=sys.stderr, flush=True)
            print(outcome.message[-600:] if bad else "", file=sys.stderr)
    measuring.show(page(outcomes))
    return int(any(outcome.verdict not in (WELL, WORKS) for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
