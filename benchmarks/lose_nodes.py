"""Removes nodes from an elastic torchrun job, and checks that the result matches that of an uninterrupted run.

python benchmarks/lose_nodes.py [--losses 10] [--per-run 2] [--seed 0]

Three hosts with separate addresses (benchmarks/hosts.py) train one run with `torchrun --nnodes=1:3`. At random steps, one host is killed
or cut off from the network. Later it comes back, and the job grows again. The script records every image that a process trains on. At the
end, it compares the images of each step, the log, the metrics and the weights with those of one uninterrupted process. Exit code 1 if
anything differs. The first host is never lost, because it hosts torchrun's rendezvous. Needs Linux, root and iproute2.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import hosts
import measuring
from measuring import SMALL, differences, last_step, show, table, wait_until

from lockstep import launch
from lockstep.config.settings import Settings

STEPS = 300
# 64 bits: with 32, the rounding of sums over two or three processes grows to 1e-6 or 6e-6 within 300 steps, depending on the CPU.
RECIPE = [
    *SMALL, "loader.batch_size=60", "trainer.limit_train_batches=60", "trainer.max_epochs=5", "trainer.limit_val_batches=1",
    "trainer.limit_test_batches=1", "trainer.log_every_n_steps=1", "checkpoint.every_n_steps=10", "schedule=cosine",
    "trainer.gradient_clip_val=0.5", "augment=[shift]", "augment.shift.pixels=2", "trainer.precision=64-true", "optim=sgd",
    "optim.lr=0.001", "model.dropout_conv=0", "model.dropout_fc=0", "resume=auto",
]  # fmt: skip
LIMIT = 1e-6
ENVIRONMENT = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # otherwise, a waiting node does not announce its new port (torch 2.13)
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "10",  # seconds between SIGTERM and SIGKILL for a process that waits for a lost one
    "OMP_NUM_THREADS": "1",
}
ROUND_S = 240.0  # limit for the processes to meet and to reach a step
WAYS = {"killed": hosts.Host.kill, "cut off": hosts.Host.cut_off}


def until(true: Callable[[], bool], what: str) -> None:
    if not wait_until(true, ROUND_S):
        raise TimeoutError(f"timed out after {ROUND_S:.0f} s, waiting for {what}")


class Job:
    """An elastic run on several hosts. The first host, which has the rendezvous, is never lost."""

    def __init__(self, folder: Path, run: str, nodes: list[hosts.Host]) -> None:
        self.folder, self.name, self.nodes = folder, run, nodes
        self.report, self.metrics = (folder / "runs" / run / name for name in ("report.json", "metrics.csv"))
        self.notes = notes_folder(folder, run)
        self.agents = {node.name: self.start(node) for node in nodes}

    def start(self, node: hosts.Host) -> "subprocess.Popen[bytes]":
        torchrun = [
            sys.executable, "-m", "torch.distributed.run", f"--nnodes=1:{len(self.nodes)}", "--nproc-per-node=1", "--max-restarts=50",
            "--rdzv-backend=c10d", f"--rdzv-endpoint={self.nodes[0].address}:29400", f"--rdzv-id={self.name}",
            f"--local-addr={node.address}", f"--rdzv-conf=last_call_timeout=5,is_host={int(node is self.nodes[0])}", "--monitor-interval=0.5",
        ]  # fmt: skip
        job = [__file__, f"run={self.name}", "strategy=ddp", "strategy.timeout_s=30", *RECIPE]
        env = {**ENVIRONMENT, NOTES: str(self.notes)}
        return node.start([*torchrun, *job], env, self.folder / f"{self.name}.log", self.folder)

    def ended(self) -> bool:
        return self.report.exists() and '"status": "done"' in self.report.read_text()

    def trains_with(self, world: int, since: float) -> bool:
        return any(note.world == world and note.time > since for note in notes(self.notes))

    def come_back(self, node: hosts.Host) -> None:
        node.kill()  # the other hosts have given up on a host that was cut off
        self.agents[node.name].wait(30)
        node.connect()
        self.agents[node.name] = self.start(node)

    def wait(self, away: hosts.Host | None) -> None:
        """Waits until the run and every agent have ended. Kills the agent of a host that is still `away`: it would keep trying to reconnect."""
        until(self.ended, "the end of the run")
        if away:
            away.kill()
        for agent in self.agents.values():
            agent.wait(120)


def elastic_run(folder: Path, run: str, nodes: list[hosts.Host], losses: int, draw: random.Random) -> list[str]:
    """Trains while nodes are lost and come back; returns a description of each loss."""
    job, lost, away, count = Job(folder, run, nodes), [], None, len(nodes)
    until(lambda: job.trains_with(count, 0), "the first round with all nodes")
    for number in range(losses):
        low, high = STEPS * number // losses + 5, STEPS * (number + 1) // losses - 25
        step = draw.randint(max(low, last_step(job.metrics) + 2), max(high, last_step(job.metrics) + 4))
        until(lambda step=step: last_step(job.metrics) >= step, f"step {step}")  # type: ignore[misc]
        node, how, since = draw.choice(nodes[1:]), draw.choice(list(WAYS)), time.time()
        step = last_step(job.metrics)
        WAYS[how](node)
        away = node
        print(f"{run}: {node.address} {how} after step {step}", flush=True)
        lost.append(f"{how} after step {step}")
        until(lambda since=since: job.trains_with(count - 1, since), "a round without the lost node")  # type: ignore[misc]
        if number + 1 < losses or draw.random() < 0.5:
            since = time.time()
            job.come_back(node)
            away = None
            until(lambda since=since: job.trains_with(count, since) or job.ended(), "a round with all nodes")  # type: ignore[misc]
            print(f"{run}: {node.address} is back at step {last_step(job.metrics)}", flush=True)
    job.wait(away)
    for node in nodes:
        node.kill()
        node.connect()
    return lost


# --- records of what was trained on ---


class Note(NamedTuple):
    round: str
    world: int
    time: float
    step: int
    images: list[int]


NOTES = "LOSE_NODES_NOTES"  # environment variable with the folder


def noting(settings: Settings, data: Any) -> None:
    """The job of train.py, which notes what each process trains on, in a file for each round."""
    from lockstep.kit.datamodule import DataModule

    original, port, world = DataModule.on_after_batch_transfer, os.environ.get("MASTER_PORT", "alone"), settings.world
    path = Path(os.environ[NOTES], f"{port}-{world.rank}")

    def note(self: DataModule, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer and self.trainer.training:
            noted = Note(port, world.size, time.time(), self.trainer.global_step + 1, batch["index"].tolist())
            with path.open("a") as file:
                print(json.dumps(noted), file=file)
        return original(self, batch, dataloader_idx)

    DataModule.on_after_batch_transfer = note  # type: ignore[method-assign]
    launch.job("train").run(settings, data)


def notes_folder(folder: Path, run: str) -> Path:
    (place := folder / f"notes-{run}").mkdir()
    return place


def notes(folder: Path) -> list[Note]:
    """The records so far, without lines that a kill truncated."""
    lines = [line for path in folder.iterdir() for line in path.read_text().splitlines(keepends=True)]
    return [Note(*json.loads(line)) for line in lines if line.endswith("\n")]


def images_of_steps(records: Sequence[Note]) -> dict[int, list[int]]:
    """The images of each step, from the last round that ran it: earlier results were lost with a node."""
    last = {note.step: note.round for note in sorted(records, key=lambda note: note.time)}
    images: dict[int, list[int]] = {step: [] for step in sorted(last)}
    for note in records:
        if note.round == last[note.step]:
            images[note.step] += note.images
    return {step: sorted(numbers) for step, numbers in images.items()}


def uninterrupted(folder: Path) -> dict[int, list[int]]:
    """Trains the run `alone`; returns the images of each step."""
    records_folder = notes_folder(folder, "alone")
    env = {**os.environ, **ENVIRONMENT, NOTES: str(records_folder)}
    subprocess.run([sys.executable, __file__, "run=alone", *RECIPE], cwd=folder, env=env, check=True)
    return images_of_steps(notes(records_folder))


def main() -> int:
    parser = measuring.parser(__doc__)
    parser.add_argument("--losses", type=int, default=10, help="losses in total")
    parser.add_argument("--per-run", type=int, default=2, help="losses per run")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the steps, the hosts and the kinds of loss")
    args = parser.parse_args()
    if reason := hosts.missing():
        parser.error(reason)
    draw, rows = random.Random(args.seed), []
    with tempfile.TemporaryDirectory() as name, hosts.hosts(3) as nodes:
        folder = Path(name)
        expected = uninterrupted(folder)
        for number, first in enumerate(range(0, args.losses, args.per_run)):
            run = f"elastic-{number}"
            try:
                lost = elastic_run(folder, run, nodes, min(args.per_run, args.losses - first), draw)
            except TimeoutError as e:
                print(f"{run}: {e}\n" + (folder / f"{run}.log").read_text()[-8000:], file=sys.stderr)
                return 1
            noted = sorted(notes(folder / f"notes-{run}"), key=lambda note: note.time)
            images = images_of_steps(noted)
            changed = sum(images.get(step) != expected.get(step) for step in images.keys() | expected.keys())
            lines = differences(folder / "runs/alone", folder / "runs" / run, tolerance=LIMIT)
            lines += [f"{changed} steps have different images"] if changed else []
            print(f"{run}: {'; '.join(lines) or 'matches the uninterrupted run'}", flush=True)
            rounds = {note.round: str(note.world) for note in noted}.values()
            same = "no" if lines else "yes"
            rows.append([f"{number}", "; ".join(lost), ", ".join(rounds), f"{len(images)}", f"{changed}", same])
    head = ["run", "lost", "processes of each round", "steps", "with different images", f"same to within {LIMIT:g}"]
    show(table(head, rows))
    return int(any(row[-1] == "no" for row in rows))


if __name__ == "__main__":
    if NOTES in os.environ:
        launch.main(launch.Job("train", noting, launch.data))
    sys.exit(main())
