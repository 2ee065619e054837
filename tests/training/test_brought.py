"""Runs on every DataLoader of tests/packages/brought.py: what each step learns from, and the weights, on other processes and after a crash."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import thin_project
import torch
from in_process import Crash, state
from packages.brought import ALONE, DIVIDED, EVERY, TOGETHER

import lockstep

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings(
        "ignore:You passed in a `.*_dataloader` but have no",
        "ignore:Be aware that when using `ckpt_path`",
        "ignore:Trying to infer the `batch_size`",
        "ignore:.*LeafSpec",
    ),
]
EPOCHS = 2
Row = tuple[str, ...]


@pytest.fixture(scope="module", autouse=True)
def project(tmp_path_factory) -> Iterator[Path]:
    files = {**thin_project.package("brought"), "configs/data/brought.yaml": "_target_: brought.Data\nloader: ???\n"}
    with thin_project.entered(tmp_path_factory.mktemp("project"), "brought", **files) as root:
        yield root


def train(name: str, run: str, *more: str, notes: str = "") -> str:
    """The path of its last checkpoint. `notes-<notes or run>-<rank>` are what its steps learnt from."""
    task = f"task=lightning_module task._target_=brought.Sees task.monitor=null +task.notes=notes-{notes or run}"
    trainer = f"trainer.accelerator=cpu trainer.precision=32-true trainer.max_epochs={EPOCHS}"
    options = f"run={run} {task} {trainer} checkpoint.every_n_steps=1 data=brought".split()
    lockstep.train([*options, f'data.loader="{name}"', *more])
    return f"{run}/checkpoints/last.ckpt"


def noted(run: str) -> dict[tuple[int, int], list[Row]]:
    """What all processes learnt from at each step of each epoch."""
    found: dict[tuple[int, int], list[Row]] = {}
    for path in sorted(Path().glob(f"notes-{run}-?")):
        for line in path.read_text().splitlines():
            epoch, step, *row = line.split()
            found.setdefault((int(epoch), int(step)), []).append(tuple(row))
    return {step: sorted(rows) for step, rows in found.items()}


def weights(path: str) -> torch.Tensor:
    return torch.cat([value.flatten() for value in state(path)["state_dict"].values()])


def ddp(devices: int, accumulate: int = 1, strategy: str = "ddp") -> list[str]:
    return [f"strategy={strategy}", f"trainer.devices={devices}", f"trainer.accumulate_grad_batches={accumulate}"]


@pytest.mark.parametrize("name", [name for name in EVERY if name not in ALONE])
def test_other_processes_learn_from_the_same_samples_at_each_step(name, forked, request):
    run = f"{[*EVERY].index(name)}"
    single = weights(train(name, run, "strategy=single"))
    five = (2, 4), (3, 2), (2, 4, "fsdp")
    for number, processes in enumerate(five if name == "five samples" else ((2, 1), (3, 2))):
        other = f"{run}x{number}"
        found = weights(train(name, other, *ddp(*processes)))
        assert noted(other) == noted(run)
        if name not in TOGETHER:  # whose last batches do not divide evenly
            assert float((found - single).norm() / single.norm()) < 1e-5
    assert len(noted(run)) >= EPOCHS


@pytest.mark.parametrize("name", EVERY)
def test_a_crash_is_not_seen(name, forked, crash_at):
    """What is divided goes on with two processes."""
    run = f"{[*EVERY].index(name)}"
    whole = weights(train(name, f"{run}-whole", "strategy=single"))
    rows = noted(f"{run}-whole")
    crash_at(step := max(2, 2 * len(rows) // 3))
    with pytest.raises(Crash):
        train(name, f"{run}-crash", "strategy=single")
    crash_at(-1)
    more = ddp(2) if name in DIVIDED else ["strategy=single"]
    last = train(name, f"{run}-crash", "resume=auto", *more, notes=f"{run}-resumed")
    assert noted(f"{run}-resumed") == {place: rows[place] for place in rows if place[1] >= step - 1}
    assert float((weights(last) - whole).norm() / whole.norm()) < 1e-5


def test_the_parts_of_a_stream_that_divides_itself_are_the_whole(forked):
    train("a stream that divides itself", "sharded", *ddp(2))
    for epoch in range(EPOCHS):
        rows = [row for (of_epoch, _), rows in noted("sharded").items() if of_epoch == epoch for row in rows]
        assert sorted(float(index) for index, _ in rows) == [*map(float, range(23))]
