"""Costs counted on the meta device are those of a real step, and the plan's sums are those of the formulas."""

import re
import sys
from dataclasses import replace
from functools import partial

import plan as script
import pytest
import torch
from torch import nn

from lockstep.errors import UserError
from lockstep.extras.planning import BUCKET_BYTES, DEVICES, Costs, Setting, plan, state_bytes

SINGLE = Setting(world=1, nodes=1, shards=False, half=False, micro_batch=32, accumulate=1)
COSTS = Costs(parameters=1000, trained=1000, weight_bytes=4000, gradient_bytes=4000, optimizer_bytes=8000, largest_block_bytes=400,
              blocks=10, activation_bytes=100.0, fixed_bytes=50.0, flops=1e9)  # fmt: skip


@pytest.fixture(scope="module")
def given(mnist, cache) -> list[str]:
    return [f"data.root={mnist}", f"data.cache_dir={cache}", "loader.batch_size=32", "trainer.accelerator=cpu"]


@pytest.mark.parametrize(
    ("name", "size", "above"),
    [("test_resnet", 32, 0.01), ("test_vit", 160, 0.25)],  # the meta device has no fused attention, which keeps less
)
def test_costs_are_those_of_a_real_step(name, size, above, given):
    import timm

    net = timm.create_model(name, in_chans=1, num_classes=10)
    typed = ["model=timm", f"model.name={name}", f"data.image_size={size}", "optim=sgd"]
    found, samples = script.costs_of(script.checked([*given, *typed]))
    own, kept = sum(p.numel() for p in net.parameters()), []
    for count in (2, 6):  # what backward keeps of a real forward pass
        seen = {p.untyped_storage().data_ptr(): 0 for p in net.parameters()}

        def note(tensor: torch.Tensor, seen: dict = seen) -> torch.Tensor:
            seen.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = net(torch.rand(count, 1, size, size))  # kept, so that no storage is reused
        kept.append(sum(seen.values()))
        assert len(output) == count
    assert (found.parameters, found.gradient_bytes, found.optimizer_bytes, samples) == (own, 4 * own, 4 * own, 576)
    real = (kept[1] - kept[0]) / 4
    assert 0.99 * real < found.activation_bytes < (1 + above) * real


def test_what_is_frozen_has_no_gradient_and_no_moments(given):
    whole, head = (script.costs_of(script.checked([*given, *more]))[0] for more in ([], ["callbacks=[default,freeze]"]))
    assert whole.optimizer_bytes == pytest.approx(2 * whole.gradient_bytes, rel=1e-3)  # AdamW's two moments
    assert (head.parameters, head.trained) == (whole.parameters, 128 * 10 + 10)
    assert head.gradient_bytes == 4 * head.trained
    assert head.optimizer_bytes == pytest.approx(8 * head.trained, rel=1e-2)


def test_one_device_holds_everything_and_several_send_what_rings_send():
    found = plan(COSTS, SINGLE, DEVICES["t4"], utilisation=0.5)
    assert found.memory_bytes == 4000 + 4000 + 8000 + 50 + 32 * 100
    assert (found.communicated_bytes, found.communication_s) == (0, 0)
    assert found.step_s == pytest.approx(32e9 / (0.5 * 8.1e12))
    assert found.largest_micro_batch == int((16e9 * 0.92 - 16050) // 100)
    ddp, fsdp = (replace(SINGLE, world=4, shards=shards) for shards in (False, True))
    assert plan(COSTS, ddp, DEVICES["t4"], utilisation=0.5).communicated_bytes == 2 * 3 / 4 * 4000
    found = plan(COSTS, fsdp, DEVICES["t4"], utilisation=0.5)
    assert found.communicated_bytes == 3 * 3 / 4 * 4000
    assert found.memory_bytes == 16000 / 4 + 2 * 400 + 50 + 32 * 100
    again = plan(COSTS, replace(fsdp, accumulate=2), DEVICES["t4"], utilisation=0.5)
    assert again.communicated_bytes == 5 * 3 / 4 * 4000  # gathered again in each micro-batch, reduced once


def test_communication_shows_only_where_backward_does_not_hide_it():
    large = replace(COSTS, gradient_bytes=100 * BUCKET_BYTES)
    slow = plan(large, replace(SINGLE, world=8), DEVICES["t4"], utilisation=1.0)
    assert slow.step_s == pytest.approx(slow.compute_s + slow.communication_s - slow.compute_s * 2 / 3)
    fast = plan(COSTS, replace(SINGLE, world=8), DEVICES["h100"], utilisation=0.01)
    assert fast.step_s == fast.compute_s


@pytest.mark.parametrize(
    ("args", "told"),
    [(["--on", "abacus"], "known kinds are h100"), (["--utilisation", "2"], "fraction of the peak"), (["--devices", "7"], "cannot be divided"),
     (["--measure", "strategy=ddp", "trainer.devices=2"], "trains in this process"), (["optim.lr=-1"], "optim.lr")],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(args, told, given, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["plan.py", *given, *args])
    with pytest.raises(UserError, match=told):
        script.main()


def test_the_table_has_a_row_for_each_strategy_and_a_measured_run_is_compared(given, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    asked = ["--devices", "1,2,3", "--on", "a100", "--price", "2", "loader.repeats=2"]
    monkeypatch.setattr(sys, "argv", ["plan.py", *given, *asked])
    script.main()
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")] for line in out.splitlines() if line.startswith("│")]
    assert [row[1] for row in rows] == ["single", "ddp", "fsdp"]
    assert [row[3] for row in rows] == ["32", "16", "16"]  # the micro-batch of a device
    assert "a100 at 35% of its peak" in out and "cost" in out and "mixed precision" in out
    assert "not on 3 devices: loader.batch_size=32 cannot be divided by them" in out
    assert rows[0][9] == rows[0][10]  # an epoch is the run
    monkeypatch.setattr(sys, "argv", ["plan.py", *given, "trainer.precision=32-true", "--measure"])
    script.main()
    out = capsys.readouterr().out
    assert ", fp32, batch 32" in out  # the precision is that of the keys
    assert re.search(r"^here: .* measured, .* predicted · .* samples/s, .* GFLOP/s$", out, re.MULTILINE)


def test_what_an_optimizer_will_hold_is_counted_on_the_meta_device():
    net = nn.Linear(100, 100, device="meta")
    net.bias.requires_grad_(False)
    adamw, sgd = (partial(kind, list(net.parameters())) for kind in (torch.optim.AdamW, torch.optim.SGD))
    made = [adamw(fused=True), adamw(amsgrad=True), sgd(lr=0.1), sgd(lr=0.1, momentum=0.9, foreach=True)]
    made.append(torch.optim.LBFGS(net.parameters()))  # its step takes a closure: unknown
    found = [state_bytes(optimizer) / (4 * 100 * 100) for optimizer in made]
    assert found == pytest.approx([2, 3, 0, 1, 0], rel=1e-3)
