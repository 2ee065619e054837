"""When memory runs out: one message that helps."""

import re
from pathlib import Path

import limited
import pytest
import torch
from in_process import report
from omegaconf import OmegaConf

from lockstep.errors import OutOfMemory
from lockstep.training.oom import is_oom
from project.model import BasicNet

# 192 images of 48 pixels need some 250 MiB for their activations alone, and 16 of them 31.
TRAINING = "trainer.precision=32-true data.image_size=48 loader.batch_size=192 trainer.max_steps=2 checkpoint.every_n_steps=1 loader.eval_batch_size=16 trainer.limit_val_batches=0"
LARGE = f"{TRAINING} trainer.limit_test_batches=1 optim=sgd optim.lr=0.01 callbacks=[] model.dropout_conv=0 model.dropout_fc=0 trainer.log_every_n_steps=1".split()
MARGIN_MIB = "240"  # a run in micro-batches of 64 needs 200 to 220, and one of 96 is more than that
CPU = "trainer.accelerator=cpu"
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def little(command, tmp_path):
    """Runs train.py with little memory; returns the lines on stderr, without Lightning's of the plugin."""
    environment = limited.install(tmp_path) | {limited.MARGIN_MIB: MARGIN_MIB}

    def run(*args: str, code: int = 0, **more: str) -> list[str]:
        done = command("train.py", *LARGE, *args, env=environment | more)
        assert done.code == code, done
        return [line for line in done.err.splitlines() if "from entry point" not in line]

    run.folder = command.folder / "runs"
    return run


def division(run: Path) -> tuple[int, int]:
    """Accumulated micro-batches and their size, as the report has them; config.yaml has the same."""
    found, accumulate = report(run), OmegaConf.load(run / "config.yaml").trainer.accumulate_grad_batches
    assert (found["accumulate_grad_batches"], found["status"]) == (accumulate, "done")
    assert found["micro_batch"] * accumulate * found["world_size"] == found["batch_size"]
    return accumulate, found["micro_batch"]


@pytest.mark.full
@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=NO_GPU)])
def test_one_message_names_a_micro_batch_that_fits(accelerator, little):
    here = f"trainer.accelerator={accelerator}"
    (message,) = little("run=a", here, code=1)
    assert message.startswith("error: a micro-batch of 192 does not fit in memory. A size of ")
    assert message.endswith("; the global batch stays 192.")
    assert not (little.folder / "a").exists()  # it had no step
    (key,) = re.findall(r"set (trainer\.accumulate_grad_batches=\d+);", message)
    assert little("run=a", "resume=auto", key, here) == []
    assert division(little.folder / "a")[0] == int(key.partition("=")[2]) > 1


# --- what is said, with a network that torch refuses memory to ---


@pytest.fixture
def fits(monkeypatch):
    """`fits("training", 20)`: no more than 20 images at a time fit in memory in training."""
    forward = BasicNet.forward

    def limit(phase: str, most: int) -> None:
        def limited_forward(self, image_BCHW):
            if len(image_BCHW) > most and self.training == (phase == "training"):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return forward(self, image_BCHW)

        monkeypatch.setattr(BasicNet, "forward", limited_forward)

    return limit


@pytest.mark.parametrize(("phase", "most", "options", "parts"), [
    ("training", 20, ["loader.batch_size=60"], ["of 60 does not", "A size of 30 may fit", "grad_batches=2;"]),
    pytest.param("training", 7, ["loader.batch_size=60", "trainer.accumulate_grad_batches=6"], ["of 10 does not", "A size of 6 may fit"], marks=pytest.mark.slow),
    pytest.param("training", 0, ["loader.batch_size=4", "trainer.accumulate_grad_batches=4"], ["of 1 does not fit", "There is no smaller"], marks=pytest.mark.slow),
    pytest.param("training", 20, ["loader.batch_size=96", "exact.logical_ranks=2"], ["of 48 does not", "may fit", "in a new run;"], marks=pytest.mark.slow),
    ("evaluation", 16, ["trainer.num_sanity_val_steps=0", "trainer.val_check_interval=1"], ["an evaluation batch does not fit", "smaller loader.eval_batch_size"]),
])  # fmt: skip
def test_the_message_names_what_may_fit(phase, most, options, parts, train, fits, caplog):
    fits(phase, most)
    with pytest.raises(OutOfMemory) as error:
        train("run=a", "trainer.max_steps=2", *options)
    for part in parts:
        assert part in str(error.value)
    assert "CUDA out of memory" in caplog.text  # torch's own words
    assert Path("runs/a").exists() == (phase == "evaluation")  # after a step


@pytest.mark.parametrize(("error", "expected"), [
    (MemoryError(), True),
    (RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"), True),
    (RuntimeError("could not create a primitive"), True),
    (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), True),
    (RuntimeError("GET was unable to find an engine to execute this computation"), True),
    (RuntimeError("could not create a primitive descriptor for a convolution"), False),
    (ValueError("out of memory"), False),
])  # fmt: skip
def test_what_counts_as_out_of_memory(error, expected):
    assert is_oom(error) == expected
