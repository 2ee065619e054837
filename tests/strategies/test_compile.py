"""compile=true, with a backend that runs the captured graphs as they are: which parts, the same weights and keys."""

import json
import os
from pathlib import Path

import forked
import pytest
import torch
from in_process import state
from torch import nn

import lockstep
from lockstep.launch import local
from lockstep.strategies.base import compile_in_place

# torch looks whether an activation has a gradient while it traces.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")
COMPILE = nn.Module.compile
GAVE_UP = "Dynamo recompile limit exceeded"


def given_up() -> list[str]:
    return [why for why in torch._dynamo.utils.counters["unimplemented"] if why.startswith(GAVE_UP)]


@pytest.fixture
def eager(monkeypatch):
    """Compiling takes no compiler; torch's limit and counters are as at the start."""
    monkeypatch.setattr(nn.Module, "compile", lambda self: COMPILE(self, backend="eager"))
    monkeypatch.setattr(torch.compiler.config, "recompile_limit", 8)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


def test_blocks_of_one_class_do_not_use_up_each_others_graphs(eager):
    """torch gives up after the eighth graph of a class: its limit is for one part. Each block has one in training and one in evaluation."""
    blocks, x = nn.Sequential(*(Block(width) for width in range(1, 11))), torch.ones(2, 1)
    expected = blocks(x)
    compile_in_place(list(blocks))
    torch.testing.assert_close(blocks(x), expected)
    with torch.inference_mode():
        blocks.eval()(x)
    assert not given_up()


def process(rank: str, port: str, strategy: str, folder: str, *given: str) -> None:
    """A run as one of torchrun's two processes; notes what was compiled."""
    names = ("GROUP_RANK", "RANK", "LOCAL_RANK", "GROUP_WORLD_SIZE", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    os.environ.update(zip(names, ("0", rank, rank, "1", "2", "2"), strict=True))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCHELASTIC_RUN_ID="a")
    parts: list[str] = []

    def compile(self: nn.Module) -> None:
        parts.append(type(self).__name__)
        COMPILE(self, backend="eager")

    nn.Module.compile = compile
    os.chdir(folder)
    lockstep.train([f"strategy={strategy}", "compile=true", f"run={strategy}", *given])
    Path(f"{strategy}-{rank}.json").write_text(json.dumps([parts, given_up()]))


@pytest.mark.slow
def test_compiled_strategies_agree_with_one_process_that_is_not(tmp_path, mnist, cache, train):
    trainer = "trainer.max_steps=3 trainer.limit_val_batches=1 trainer.limit_test_batches=1 trainer.precision=32-true"
    given = f"model=timm model.name=test_vit data.image_size=32 loader.batch_size=8 optim=sgd {trainer}".split()
    more = [f"data.root={mnist}", f"data.cache_dir={cache}", "trainer.accelerator=cpu", *given]
    with local.reserve_port() as ddp, local.reserve_port() as fsdp:
        places = [(i, str(port), name) for name, port in (("ddp", ddp), ("fsdp", fsdp)) for i in "01"]
        started = [forked.call(__file__, "process", *place, str(tmp_path), *more) for place in places]
        train("run=single", *given)
        assert [one.wait(600) for one in started] == [0] * 4
    parts = {name: json.loads((tmp_path / f"{name}-1.json").read_text()) for name in ("ddp", "fsdp")}
    assert parts["ddp"][0][0] == "VisionTransformer" and set(parts["fsdp"][0]) == {"Block"}
    assert parts["ddp"][1] == parts["fsdp"][1] == []
    expected, *found = (state(f"{name}/checkpoints/last.ckpt")["state_dict"] for name in ("single", "ddp", "fsdp"))
    for each in found:
        assert list(each) == list(expected)
        torch.testing.assert_close(each, expected, rtol=1e-5, atol=1e-6)
