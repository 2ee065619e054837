"""Trains third-party LightningModules and LightningDataModules unchanged, and compares results on two processes, after a kill, and in evaluation.

python benchmarks/theirs.py <folder> [--data <folder>] [--only <text>]

<folder> has checkouts of github.com/Lightning-AI/pytorch-lightning and github.com/ashleve/lightning-hydra-template, under these names. --data
is the folder that has MNIST/raw with the .gz files. Missing parts are skipped. Each command is a process forked from one that has imported
torch.
"""

import argparse
import csv
import gzip
import json
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import measuring
import numpy as np
import torch
from PIL import Image

from lockstep import ROOT

sys.path.append(str(ROOT / "tests"))
import forked  # processes from a server that has imported torch

HOOK = str(Path(__file__).with_name("theirs_hook.py").resolve())
LIMIT_S = 300
PACKAGES = ("torchgeo", "torch_uncertainty", "lightning_uq_box", "lightly")
DEMOS = "lightning.pytorch.demos"
EPOCHS = 2
BASE = (
    *measuring.CPU, "task=lightning_module", "trainer.precision=32-true", f"trainer.max_epochs={EPOCHS}", "trainer.limit_train_batches=10",
    "trainer.log_every_n_steps=1", "checkpoint.every_n_steps=4",
)  # fmt: skip
KILL = "15"  # finished batches: the next is the sixth of the second epoch, and the last checkpoint has 12 steps
TWO = ("strategy=ddp", "trainer.devices=2")
ACCUMULATED = ("trainer.accumulate_grad_batches=2", "trainer.limit_train_batches=20")  # the limit counts micro-batches
SHARDED = ("strategy=fsdp", "trainer.devices=2")


@dataclass(frozen=True)
class Case:
    """A third-party module and its data; `none`: the module's own dataloaders."""

    name: str
    module: str
    data: str = "none"
    args: tuple[str, ...] = ()
    two: tuple[str, ...] = ()  # overrides for several processes
    needs: str = ""  # a package, or a folder in <folder>
    differs: str = ""  # why the bits of a result may differ

    def options(self, *more: str) -> list[str]:
        """Overrides for train.py; later ones win."""
        named = [
            f"task._target_={self.module}",
            "data=none",
            *([f"data._target_={self.data}"] if self.data != "none" else []),
        ]
        if TWO[1] in more:
            more += tuple(each for each in self.two if TWO[0] in more or not each.startswith("strategy."))
        return [*{each.partition("=")[0]: each for each in (*BASE, *named, *self.args, *more)}.values()]


def nested(key: str, target: str, **arguments: object) -> tuple[str, ...]:
    """Overrides for an argument of the module that is an object or, with _partial_="true", a function."""
    return (f"+task.{key}._target_={target}", *(f"+task.{key}.{name}={value}" for name, value in arguments.items()))


SGD = nested("optimizer", "torch.optim.SGD", _partial_="true", lr=0.01)
BORING, MNIST = f"{DEMOS}.boring_classes", f"{DEMOS}.mnist_datamodule.MNISTDataModule"
RANDOM, STREAM = f"{BORING}.BoringDataModule", f"{BORING}.BoringDataModuleNoLen"
EXAMPLES, TEMPLATE = "pytorch-lightning/examples/pytorch", "lightning-hydra-template/src"
BASICS, DOMAINS, REPORT = (
    "examples.basics",
    "examples.domain_templates",
    "examples.bug_report.bug_report_model.BoringModel",
)
SMALL, VOCABULARY = ("+data.batch_size=32", "+data.num_workers=0"), ("+task.vocab_size=3000",)
UNUSED, SYNCED = ("strategy.find_unused_parameters=true",), ("trainer.sync_batchnorm=true",)
CASES = [
    Case("BoringModel", f"{BORING}.BoringModel"),
    Case("BoringModel, BoringDataModule", f"{BORING}.BoringModel", RANDOM),
    Case("ManualOptimBoringModel", f"{BORING}.ManualOptimBoringModel"),
    Case("DemoModel, BoringDataModule", f"{BORING}.DemoModel", RANDOM),
    Case("DemoModel, BoringDataModuleNoLen", f"{BORING}.DemoModel", STREAM),
    Case("LightningTransformer", f"{DEMOS}.transformer.LightningTransformer", args=VOCABULARY, differs="dropout within attention"),
    Case("LightningLSTM", f"{DEMOS}.lstm.LightningLSTM", args=VOCABULARY, differs="it carries its hidden state from step to step, outside of state_dict, and diverges at its learning rate of 20"),
    Case("bug_report_model, BoringDataModule", REPORT, RANDOM, needs=EXAMPLES),
    Case("bug_report_model, BoringDataModuleNoLen", REPORT, STREAM, needs=EXAMPLES),
    Case("autoencoder", f"{BASICS}.autoencoder.LitAutoEncoder", f"{BASICS}.autoencoder.MyDataModule", SMALL[:1], needs=EXAMPLES),
    Case("backbone_image_classifier", f"{BASICS}.backbone_image_classifier.LitClassifier", f"{BASICS}.backbone_image_classifier.MyDataModule", SMALL[:1], needs=EXAMPLES),
    Case("generative_adversarial_net", f"{DOMAINS}.generative_adversarial_net.GAN", MNIST, (*SMALL, "logger=tensorboard"), UNUSED, EXAMPLES, "random input"),
    Case("reinforce_learn_ppo", f"{DOMAINS}.reinforce_learn_ppo.PPOLightning", "none", ("+task.env=CartPole-v0", "+task.batch_size=32", "+task.steps_per_epoch=320"), UNUSED, EXAMPLES, "it generates its data with its own weights"),
    Case("semantic_segmentation", f"{DOMAINS}.semantic_segmentation.SegModel", args=("+task.data_path=data/kitti",), needs=EXAMPLES),
    Case(
        "imagenet", f"{DOMAINS}.imagenet.ImageNetLightningModel", "none",
        ("+task.data_path=data/imagenet", "+task.batch_size=8", "+task.workers=0", "+task.lr=1e-3"), (*SYNCED, "+task.batch_size=16"), EXAMPLES,
        "batch norm, which accumulation does not synchronise; it divides its batch_size by the number of processes",
    ),
    Case(
        "lightning-hydra-template", "src.models.mnist_module.MNISTLitModule", "src.data.mnist_datamodule.MNISTDataModule",
        (*nested("net", "src.models.components.simple_dense_net.SimpleDenseNet"), "+task.scheduler=null", "+task.compile=false", *SGD,
         "+data.data_dir=data", *SMALL, "+data.train_val_test_split=[59000,1000,1000]"),
        (*SYNCED, "+data.batch_size=64"), TEMPLATE, "batch norm, which accumulation does not synchronise; it divides its batch_size by the number of processes",
    ),
    Case(
        "torch-uncertainty", "torch_uncertainty.routines.ClassificationRoutine", "torch_uncertainty.datamodules.MNISTDataModule",
        ("+task.num_classes=10", *nested("model", "torch_uncertainty.models.mlp.mlp", in_features=784, num_outputs=10, hidden_dims="[32]", flatten_start_dim=1),
         *nested("loss", "torch.nn.CrossEntropyLoss"), *nested("optim_recipe", "torch_uncertainty.optim_recipes.optim_cifar10_resnet18", _partial_="true"),
         "+data.root=data", *SMALL, "+data.persistent_workers=false"), needs="torch_uncertainty",
    ),
    Case(
        "lightning-uq-box", "lightning_uq_box.uq_methods.MVERegression", "lightning_uq_box.datamodules.ToyHeteroscedasticDatamodule",
        (*nested("model", "lightning_uq_box.models.MLP", n_inputs=1, n_outputs=2), "+task.burnin_epochs=1", *SGD, "+data.batch_size=16"), needs="lightning_uq_box",
    ),
    Case(
        "torchgeo", "torchgeo.trainers.ClassificationTask", "torchgeo.datamodules.UCMercedDataModule",
        ("+task.model=test_resnet", "+task.num_classes=2", "+data.batch_size=8"), SYNCED, "torchgeo", "batch norm, which accumulation does not synchronise",
    ),
    Case(
        "lightly", "lightly.utils.benchmarking.LinearClassifier", MNIST,
        (*nested("model", "torch.nn.Flatten"), "+task.batch_size_per_device=32", "+task.feature_dim=784", "+task.num_classes=10", *SMALL), needs="lightly",
    ),
]  # fmt: skip


# --- the project: third-party code in src/, and data in the layout that it expects ---


def write_project(root: Path, folder: Path, data: Path | None) -> None:
    packages = ", ".join(f'"{name}"' for name in ("lightning", *PACKAGES))
    (root / "pyproject.toml").write_text(f"[project]\nname = 'theirs'\n\n[tool.lockstep]\npackages = [{packages}]\n")
    for name in ("train", "eval", "predict"):
        shutil.copy(ROOT / f"{name}.py", root)
    for place, package in ((EXAMPLES, "examples"), (TEMPLATE, "src")):
        if (folder / place).is_dir():
            shutil.copytree(folder / place, root / "src" / package)
    if data:
        unpack(data / "MNIST/raw", root / "data/MNIST/raw")
        (root / "src/Datasets").symlink_to(root / "data")  # where the examples look for data
    (root / "data").mkdir(exist_ok=True)
    (root / "data/wikitext-2.txt").write_text(words())
    write_images(root / "data")


def words() -> str:
    """Replaces WikiText2: 11 batches for Lightning's LSTM."""
    return " ".join(" ".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))).split()[:7700])


def unpack(source: Path, target: Path) -> None:
    """Unpacks MNIST for torchvision, with the first 1,000 test images."""
    target.mkdir(parents=True)
    for path in source.glob("*.gz"):
        content = gzip.decompress(path.read_bytes())
        if path.name.startswith("t10k"):
            head, each = (16, 784) if "images" in path.name else (8, 1)
            content = content[:4] + (1000).to_bytes(4, "big") + content[8 : head + 1000 * each]
        (target / path.stem).write_bytes(content)


def write_images(root: Path) -> None:
    """Writes noise images in the layouts of UC Merced, ImageNet and KITTI."""
    random = np.random.default_rng(0)
    for part, count in (("train", 80), ("val", 21), ("test", 21)):
        names = [f"{part}{i}.tif" for i in range(count)]
        (root / f"uc_merced-{part}.txt").write_text("\n".join(names))
        for i, name in enumerate(names):
            write_noise(random, root / "UCMerced_LandUse/Images" / ("beach", "river")[i % 2] / name)
            write_noise(random, root / f"imagenet/{part}/{i % 2}/{i}.png")
    for i in range(10):
        write_noise(random, root / f"kitti/training/image_2/{i}.png")
        write_noise(random, root / f"kitti/training/semantic/{i}.png")


def write_noise(random: np.random.Generator, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(random.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(path)


# --- a case ---


@dataclass
class Runs:
    """The commands of a case, run in the project's folder."""

    case: Case
    root: Path
    row: dict[str, str] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)  # by column: why there is no result

    def command(self, script: str, run: str, *args: str, **env: str) -> str:
        """Runs the command. Returns the reason if it failed, else ''."""
        notes = self.root / "notes" / f"{run}-{script}"
        notes.mkdir(parents=True, exist_ok=True)
        log = notes / "log"
        typed = [sys.executable, str(self.root / f"{script}.py"), f"run={run}", *args]
        given = {**os.environ, forked.HOOK: HOOK, "THEIRS_NOTES": str(notes), **env}
        process = measuring.start_command(typed, log, forked.Popen, cwd=self.root, env=given)
        try:
            code = process.wait(LIMIT_S)
        except forked.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return f"still running after {LIMIT_S} s"
        return reason(log.read_text(errors="replace")) or f"exit code {code}" if code else ""

    def train(self, run: str, *more: str, **env: str) -> str:
        return self.command("train", run, *self.case.options(*more), **env)

    def named(self, kind: str) -> str:
        return f"{CASES.index(self.case)}-{kind}"

    def state(self, run: str) -> dict[str, torch.Tensor]:
        return torch.load(self.root / f"runs/{run}/checkpoints/last.ckpt", weights_only=True)["state_dict"]

    def difference(self, run: str, other: str) -> str:
        """The difference of the weights, relative to their norm."""
        a, b = (
            torch.cat([each.double().flatten() for each in self.state(name).values() if each.is_floating_point()])
            for name in (run, other)
        )
        return "same bits" if torch.equal(a, b) else f"{float((a - b).norm() / b.norm()):.0e}"

    def samples(self, run: str, script: str, stage: str) -> Counter[tuple[int, str]]:
        found: Counter[tuple[int, str]] = Counter()
        for path in (self.root / "notes" / f"{run}-{script}").glob("*.jsonl"):
            for kind, loader, values in map(json.loads, path.read_text().splitlines()):
                found.update((loader, f"{value:.9g}") for value in values if kind == stage)
        return found

    def evaluated(self, run: str, other: str, script: str = "train") -> str:
        """How many samples both runs evaluated, or how the numbers differ."""
        texts = []
        for name, stage in {"val": f"val {EPOCHS - 1}", "test": "test"}.items():
            ours, theirs = (self.samples(each, script, stage) for each in (run, other))
            texts += [f"{ours.total():,} {name}"] if ours == theirs and ours else []
            texts += [f"{name}: {ours.total():,}, not {theirs.total():,}"] if ours != theirs else []
        return ", ".join(texts) or "none"

    def fill(self) -> "Runs":
        single, whole = self.named("single"), self.named("ddp")
        if not self.cell("single", self.train(single, "strategy=single"), lambda: f"{self.steps(single)} steps"):
            return self
        for column, more in {
            "ddp x2": TWO,
            "fsdp x2": SHARDED,
            "accumulation 2": ("strategy=single", *ACCUMULATED),
        }.items():
            run = self.named(column.split()[0])
            self.cell(column, self.train(run, *more), partial(self.difference, run, single))
        for column, more, reference in (("killed", ("strategy=single",), single), ("killed, ddp x2", TWO, whole)):
            run = self.named(column.replace(", ", "-").replace(" ", "-"))
            if self.row.get("ddp x2", "-") == "-" and more == TWO:
                continue
            self.train(run, *more, THEIRS_KILL=KILL)
            self.cell(
                column,
                self.train(run, *more, "resume=auto"),
                partial(self.difference, run, reference),
            )
        if self.row["ddp x2"] != "-":
            self.row["evaluated once"] = self.evaluated(whole, single)
        self.cell("eval.py", self.command("eval", single, *measuring.CPU), lambda: self.metrics(single))
        self.cell(
            "predict.py", self.command("predict", single, "input=test", *measuring.CPU), lambda: self.predicted(single)
        )
        return self

    def cell(self, column: str, failed: str, value: Callable[[], str]) -> bool:
        self.row[column] = "-" if failed else value()
        self.said |= {column: failed} if failed else {}
        print(f"{self.case.name} · {column}: {failed or self.row[column]}", file=sys.stderr, flush=True)
        return not failed

    def steps(self, run: str) -> str:
        return str(json.loads((self.root / f"runs/{run}/report.json").read_text())["train/steps"])

    def metrics(self, run: str) -> str:
        """Whether the evaluation reproduces the test metrics of training."""
        report = json.loads((self.root / f"runs/{run}/report.json").read_text())
        path = next((self.root / f"runs/{run}").glob("eval*.json"))
        found = {
            name: value for name, value in json.loads(path.read_text()).items() if name in report and "test" in name
        }
        differ = [name for name, value in found.items() if report[name] != value]
        return f"differs: {', '.join(differ)}" if differ else f"{len(found)} equal" if found else "no metric"

    def predicted(self, run: str) -> str:
        with (self.root / f"runs/{run}/predictions.csv").open() as file:
            return f"{sum(1 for _ in csv.reader(file)) - 1:,} rows"


def reason(log: str) -> str:
    """The error message of a command, or its last line."""
    lines = [line for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines[-1:] or [""])[-1]


COLUMNS = [
    "single",
    "ddp x2",
    "fsdp x2",
    "accumulation 2",
    "killed",
    "killed, ddp x2",
    "evaluated once",
    "eval.py",
    "predict.py",
]


def absent(case: Case, folder: Path) -> str:
    if case.needs in PACKAGES:
        return "" if find_spec(case.needs) else f"{case.needs} is not installed"
    return "" if not case.needs or (folder / case.needs).is_dir() else f"{case.needs} is not in the folder"


def rows(args: argparse.Namespace, root: Path) -> Iterator[Runs]:
    root.mkdir(parents=True, exist_ok=True)
    write_project(root, args.folder, args.data)
    for case in CASES:
        if any(text in case.name for text in args.only.split(",")):
            why = absent(case, args.folder)
            yield Runs(case, root, said={"skipped": why}) if why else Runs(case, root).fill()


def main() -> None:
    parser = measuring.parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--only", default="", help="only cases whose names contain one of these comma-separated texts")
    parser.add_argument("--keep", type=Path, help="create the project in this folder, and keep it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        forked.start_server(Path(name))
        found = [*rows(args, args.keep or Path(name, "project"))]
    table = [[each.case.name, *(each.row.get(column, "") for column in COLUMNS)] for each in found]
    said = [f"- {each.case.name}, {column}: {text}" for each in found for column, text in each.said.items()]
    said += [f"- {each.case.name}: {each.case.differs}" for each in found if each.case.differs]
    installed = [f"{name} {version(name)}" for name in PACKAGES if find_spec(name)]
    measuring.show("\n".join([measuring.table(["module", *COLUMNS], table), "", *said]), *installed)


if __name__ == "__main__":
    main()
