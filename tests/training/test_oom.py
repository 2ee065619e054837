"""When memory runs out: one message that helps, or with `auto` smaller micro-batches of the same global batch."""

import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import limited
import pytest
import torch
from omegaconf import OmegaConf

import lockstep
from lockstep import ROOT
from lockstep.config.compose import compose_config
from lockstep.config.settings import Settings, accumulations
from lockstep.errors import OutOfMemory
from lockstep.extras import comparison
from lockstep.launch import local
from lockstep.machine.world import World
from lockstep.models import BasicNet
from lockstep.training.oom import ran_out

AUTO = "trainer.accumulate_grad_batches=auto"
# 192 images of 48 pixels need some 250 MiB for their activations alone, and 16 of them 31.
LARGE = [
    "trainer.precision=32-true", "data.image_size=48", "data.batch_size=192", "trainer.max_steps=2", "checkpoint.every_n_steps=1", "data.eval_batch_size=16",
    "trainer.limit_val_batches=0", "trainer.limit_test_batches=1", "optim=sgd", "optim.lr=0.01", "callbacks=[]",
    "model.dropout_conv=0", "model.dropout_fc=0", "trainer.log_every_n_steps=1",
]  # fmt: skip
MARGIN_MIB = "240"  # a run in micro-batches of 64 needs 200 to 220, and one of 96 is more than that
CPU = "trainer.accelerator=cpu"
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def little(command, tmp_path):
    """Runs train.py with little memory."""
    environment = limited.install(tmp_path) | {limited.MARGIN_MIB: MARGIN_MIB}

    def run(*args: str, **more: str):
        return command("train.py", *LARGE, *args, env=environment | more)

    run.folder = command.folder / "runs"
    return run


def differences(runs: Path, first: str, second: str, *, exact: bool = True) -> dict[str, list[str]]:
    found = comparison.compare(comparison.find(first, runs), comparison.find(second, runs), exact=exact, tolerance=1e-6)
    return {section: lines for section, lines in found.items() if lines}


def words(err: str) -> list[str]:
    return [line for line in err.splitlines() if "from entry point" not in line]  # Lightning's, of the plugin


def batches(runs: Path, run: str) -> tuple[int, int, int]:
    """As the report has them; config.yaml has the same."""
    report = json.loads((runs / run / "report.json").read_text())
    accumulate = OmegaConf.load(runs / run / "config.yaml").trainer.accumulate_grad_batches
    assert report["accumulate_grad_batches"] == accumulate
    assert report["status"] == "done"
    assert report["micro_batch"] * accumulate * report["world_size"] == report["batch_size"]
    return report["batch_size"], accumulate, report["micro_batch"]


@pytest.mark.full
@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=NO_GPU)])
def test_one_message_names_a_micro_batch_that_fits_and_auto_ends_as_the_run_with_it(accelerator, little):
    here = f"trainer.accelerator={accelerator}"
    failed = little("run=a", here)
    assert failed.code == 1, failed
    (message,) = words(failed.err)
    assert message.startswith("error: a micro-batch of 192 does not fit in memory. One of ")
    assert message.endswith("; the global batch stays 192.")
    report = json.loads((little.folder / "a/report.json").read_text())
    assert (report["status"], report["error"]) == ("failed", message.replace("error:", "OutOfMemory:"))
    (key,) = re.findall(r"set (trainer\.accumulate_grad_batches=\d+);", message)
    named, auto = little("run=a", "resume=auto", key, here), little("run=auto", AUTO, here)
    assert (named.code, words(named.err)) == (0, []), named
    assert auto.code == 0, auto
    _, accumulate, micro_batch = batches(little.folder, "auto")
    assert accumulate == batches(little.folder, "a")[1] == int(key.partition("=")[2]) > 1
    assert words(auto.err) == [
        f"a micro-batch of 192 does not fit in memory; continuing with {micro_batch} x {accumulate} accumulated"
    ]
    assert differences(little.folder, "auto", "a") == {}


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_auto_starts_all_processes_again_when_one_has_too_little(strategy, little):
    two = [f"strategy={strategy}", "trainer.devices=2", "data.batch_size=384", CPU]
    done = little("run=auto", AUTO, *two, **{limited.RANK: "1"})
    assert done.code == 0, done
    assert 1 <= len(words(done.err)) <= 3  # fsdp tries one after the other
    assert all(
        re.fullmatch(r"a micro-batch of \d+ does not fit in memory; continuing with .*", w) for w in words(done.err)
    )
    _, accumulate, _ = batches(little.folder, "auto")
    assert accumulate > 1
    typed = little("run=typed", f"trainer.accumulate_grad_batches={accumulate}", *two, **{limited.RANK: "none"})
    assert typed.code == 0, typed
    assert differences(little.folder, "auto", "typed") == {}


@pytest.mark.full
def test_auto_goes_on_from_the_last_checkpoint_and_begins_with_the_micro_batch_that_it_had(little):
    plain = little("run=plain", CPU, **{limited.RANK: "none"})
    assert plain.code == 0, plain
    done = little("run=auto", AUTO, CPU, **{limited.STEP: "1"})
    assert done.code == 0, done
    assert len(words(done.err)) == 1
    report = json.loads((little.folder / "auto/report.json").read_text())
    assert report["resumed_from"] == "runs/auto/checkpoints/last.ckpt"
    found = differences(little.folder, "plain", "auto", exact=False)
    assert set(found) == {"config"}, found
    (difference,) = found["config"]
    assert difference.startswith("trainer.accumulate_grad_batches: 1 | ")
    again = little("run=auto", AUTO, CPU, "resume=auto", "trainer.max_steps=3", **{limited.STEP: "2"})
    assert again.code == 0, again
    assert words(again.err) == []
    assert batches(little.folder, "auto")[1] == report["accumulate_grad_batches"]


@pytest.fixture
def container(tmp_path):
    """The folder of a control group of 1,200 MiB, as a container's is."""
    places = [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")]
    top, key = next(((top, key) for top, key in places if Path(top, "cgroup.procs").exists()), ("", ""))
    group = Path(top, f"lockstep-test-{os.getpid()}")
    try:
        group.mkdir()
        (group / key).write_text(str(1200 * 2**20))
        if (group / "memory.swap.max").exists():
            (group / "memory.swap.max").write_text("0")
    except OSError:
        pytest.skip("control groups cannot be made here")
    yield group
    group.rmdir()


@pytest.mark.slow
def test_auto_goes_on_after_the_kernel_has_ended_a_process(container, command):
    options = [*LARGE, "data.image_size=64", "data.batch_size=512", CPU, "run=auto", AUTO, f"data.root={command.data}"]
    train = [sys.executable, str(ROOT / "train.py"), *options, f"data.cache_dir={command.cache}"]
    inside = ["sh", "-c", f'echo $$ > {container}/cgroup.procs && exec "$@"', "sh", *train]
    kills = local.kernel_kills()
    done = subprocess.run(inside, cwd=command.folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert batches(command.folder / "runs", "auto")[1] > 1
    assert local.kernel_kills() - kills >= len(done.stderr.splitlines()) >= 1
    assert all(line.startswith("a micro-batch of ") for line in done.stderr.splitlines())


# --- what is said, with a network that torch refuses memory to ---


@pytest.fixture
def train(tmp_path, mnist, cache, monkeypatch):
    """Trains in this process; more than `most` images at a time do not fit, in training or in an evaluation."""
    monkeypatch.chdir(tmp_path)
    forward = BasicNet.forward
    images = [f"data.root={mnist}", f"data.cache_dir={cache}"]

    def run(*overrides: str, training: int = 10**6, evaluation: int = 10**6):
        def limited_forward(self, image_BCHW):
            if len(image_BCHW) > (training if self.training else evaluation):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return forward(self, image_BCHW)

        monkeypatch.setattr(BasicNet, "forward", limited_forward)
        return lockstep.train([*images, CPU, "trainer.max_steps=2", "trainer.enable_progress_bar=false", *overrides])

    return run


@pytest.mark.parametrize(
    ("most", "options", "accumulate", "parts"),
    [
        ({"training": 20}, ["data.batch_size=60"], 3, ["of 60 does not", "One of 20 does", "grad_batches=3;"]),
        ({"training": 20}, ["data.batch_size=60", "trainer.precision=bf16-true"], 3, ["One of 20 does"]),
        ({"training": 7}, ["data.batch_size=60", "trainer.accumulate_grad_batches=6"], 10, ["of 10 does not", "One of 6 does"]),
        pytest.param(
            {"training": 0}, [], None, ["of 64 does not fit", "No smaller one does.", "bf16-mixed"], marks=pytest.mark.slow
        ),
        ({"training": 0}, ["data.batch_size=4", "trainer.accumulate_grad_batches=4"], None, ["of 1 does not fit", "There is no smaller"]),
        ({"evaluation": 16}, ["trainer.val_check_interval=1"], None, ["an evaluation's batch of 64", "data.eval_batch_size=32;"]),
        ({"training": 20}, ["data.batch_size=96", "exact.logical_ranks=2"], 8, ["of 48 does not", "One of 12 does", "set exact.logical_ranks=8 in a new run;"]),
        ({"evaluation": 5}, ["exact.logical_ranks=8", "trainer.val_check_interval=1"], None, ["an evaluation's batch of 8 does", "data.eval_batch_size=32;"]),
        ({"evaluation": 70}, ["trainer.max_epochs=1"], None, ["an evaluation's batch of 103", "data.eval_batch_size=51;"]),
    ],
)  # fmt: skip
def test_the_message_names_what_fits(most, options, accumulate, parts, train):
    with pytest.raises(OutOfMemory) as error:
        train("run=a", *options, **most)
    assert error.value.accumulate == accumulate
    for part in parts:
        assert part in str(error.value)
    assert "CUDA out of memory" in Path("runs/a/train.log").read_text()  # torch's own words


@pytest.mark.parametrize(("error", "expected"), [
    (torch.OutOfMemoryError("CUDA out of memory."), True),
    (MemoryError(), True),
    (RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"), True),
    (RuntimeError("could not create a primitive"), True),
    (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), True),
    (RuntimeError("GET was unable to find an engine to execute this computation"), True),
    (RuntimeError("could not create a primitive descriptor for a convolution"), False),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    (ValueError("out of memory"), False),
])  # fmt: skip
def test_what_counts_as_out_of_memory(error, expected):
    assert ran_out(error) == expected


# --- the attempts, without processes ---


@pytest.mark.parametrize(
    ("batch", "world", "expected"), [(64, 1, [1, 2, 4, 8, 16, 32, 64]), (12, 2, [1, 2, 3, 6]), (5, 5, [1])]
)
def test_accumulations_divide_the_global_batch(batch, world, expected):
    assert accumulations(batch, world) == expected


@pytest.mark.parametrize(("answers", "before", "expected"), [
    ([2, 8], None, [1, 2, 8]), ([2, None], None, [1, 2]), ([], 16, [2]),  # a run that continues begins with its micro-batch
])  # fmt: skip
def test_attempts_go_on_until_one_fits_or_no_number_helps(answers, before, expected, monkeypatch, tmp_path):
    """Each attempt fails and names a number, until there is none."""
    monkeypatch.chdir(tmp_path)
    tried, left = [], iter(answers)
    if before:
        (tmp_path / "runs/a").mkdir(parents=True)
        (tmp_path / "runs/a/report.json").write_text(json.dumps({"micro_batch": before}))

    def run(settings) -> None:
        tried.append(settings.cfg.trainer.accumulate_grad_batches)
        for answer in left:
            raise OutOfMemory("too large", answer)

    with pytest.raises(OutOfMemory) if None in answers else nullcontext():
        local.until_it_fits(run, Settings(compose_config("train", ["run=a", AUTO]), World("cpu", 2, 1, "ddp")))
    assert tried == expected


def test_the_kernel_counts_what_it_ends(monkeypatch, tmp_path):
    monkeypatch.setattr(local, "VMSTAT", tmp_path / "vmstat")
    assert local.kernel_kills() == 0
    (tmp_path / "vmstat").write_text(f"nr_free_pages 7{os.linesep}oom_kill 3{os.linesep}")
    assert local.kernel_kills() == 3


@pytest.mark.parametrize("trains", [True, False])
def test_the_words_for_a_killed_process_name_keys_of_its_own_command(trains):
    said = local.killed(
        Settings(compose_config("train", []), World("cpu", 2, 1, "ddp")), 1, by_kernel=True, trains=trains
    )
    assert ("trainer.accumulate_grad_batches=2" in str(said)) == trains == (said.accumulate == 2)
    assert str(said).startswith("rank 1 ")
    assert "data.eval_batch_size" in str(said)
