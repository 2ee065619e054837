"""Turns, given and taken: each contender of benchmarks/benchmark.py is a process that trains when it is told to, and waits otherwise.

python benchmarks/benchmark_turns.py <plain | plain_our_net | accelerate | transformers | lockstep | lockstep_plain_net | upper_bound> [key=value ...]

The options are those of train.py, for all contenders. A line on standard input grants so many optimizer steps; the answer is
a line of JSON with what they took. 0 grants the rest of the training and an evaluation; the end of the input, nothing more.
"""

import contextlib
import importlib
import json
import os
import resource
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, TypeVar

from lockstep.errors import TrainingFailed
from lockstep.machine.world import cores, visible_gpus

T = TypeVar("T")
REST, END = 0, -1
ANSWER_S = 1800  # a turn on a slow machine; a contender that hangs ends the benchmark
MODULES = {
    "plain": "benchmark_contenders",
    "accelerate": "benchmark_contenders",
    "transformers": "benchmark_contenders",
    "lockstep": "benchmark_contenders",
    "upper_bound": "benchmark_contenders",
    "plain_our_net": "benchmark_contenders",
    "lockstep_plain_net": "benchmark_contenders",
}


class Turns:
    """In the contender: holds a training loop between two optimizer steps until it is its turn. Only rank 0 talks."""

    def __init__(self, answers: IO[str]) -> None:
        self.answers = answers
        self.rank, self.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.about: dict[str, Any] = {}  # goes with every answer
        self.waited_s: float | None = 0.0  # for data, since the process began; None where it is not known
        self.group: Any = None
        self.left = self.images = 0
        self.began_s = self.waited_before_s = 0.0

    def begin(self) -> None:
        """Called before the first step, when everything stands."""
        self.answer()
        self.wait()

    def stepped(self, images: int) -> None:
        """Called after each optimizer step with the images of this process."""
        self.images += images * self.world
        self.left -= 1
        if self.left == 0:
            self.end_turn()
            self.wait()

    def finish(self, accuracy: float) -> None:
        self.answer(accuracy=accuracy)

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """`batches`, with the time that each takes to come counted as waiting."""
        iterator, end = iter(batches), object()
        while True:
            began_s = time.perf_counter()
            batch: Any = next(iterator, end)
            self.waited_s = (self.waited_s or 0.0) + time.perf_counter() - began_s
            if batch is end:
                return
            yield batch

    def end_turn(self) -> None:
        synchronise()
        seconds = time.perf_counter() - self.began_s
        waited_s = None if self.waited_s is None else self.waited_s - self.waited_before_s
        self.answer(images=self.images, seconds=seconds, waited_s=waited_s, **peaks())

    def wait(self) -> None:
        steps = self.granted()
        if steps == END:
            os._exit(0)  # from within a library's loop, which would take an exception for its own failure
        self.left, self.images, self.waited_before_s = steps, 0, self.waited_s or 0.0
        synchronise()
        self.began_s = time.perf_counter()

    def granted(self) -> int:
        steps = int(sys.stdin.readline() or END) if self.rank == 0 else END
        if self.world == 1:
            return steps
        import torch
        import torch.distributed as dist

        # gloo: a process that waits in a collective of nccl keeps its GPU and a core busy, and it is others' turn now.
        self.group = self.group or dist.new_group(backend="gloo", timeout=timedelta(hours=6))
        shared = torch.tensor(steps)
        dist.broadcast(shared, 0, group=self.group)
        return int(shared)

    def answer(self, **figures: Any) -> None:
        if self.rank == 0:
            print(json.dumps({**self.about, **figures}), file=self.answers, flush=True)


class Contender:
    """In the benchmark: a process, or a torchrun of several, that trains when it is told to."""

    def __init__(self, name: str, kind: str, overrides: list[str], folder: Path, *, device: str, world: int) -> None:
        self.name = name
        script = [str(Path(__file__).resolve()), kind, *overrides]
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)] if world > 1 else []
        threads = {"OMP_NUM_THREADS": str(max(1, cores() // world))} if world > 1 else {}
        gpus = ",".join(visible_gpus()[:world]) if device == "cuda" else ""  # Trainer would use all that it sees
        self.log = folder / f"{name}.log"
        self.process = subprocess.Popen(
            [sys.executable, *torchrun, *script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
            env={**os.environ, **threads, "CUDA_VISIBLE_DEVICES": gpus},
        )

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], ANSWER_S)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            end = "\n".join(self.log.read_text().splitlines()[-30:])
            why = "ended before its time" if ready else f"did not answer within {ANSWER_S} s"
            raise TrainingFailed(f"the contender {self.name} {why}; its last words:\n{end}")
        found: dict[str, Any] = json.loads(line)
        return found

    def train(self, steps: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        return self.answer()

    def end(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()  # which tells it
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait()


def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()  # benchmark.py shows the GPUs to those only that are to use them


def synchronise() -> None:
    import torch

    if on_gpu():
        torch.cuda.synchronize()


def peaks() -> dict[str, int | None]:
    import torch

    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        "peak_device_bytes": torch.cuda.max_memory_allocated() if on_gpu() else None,
    }


def main() -> None:
    kind, *overrides = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not come between the answers
    getattr(importlib.import_module(MODULES[kind]), kind)(Turns(answers), overrides)


if __name__ == "__main__":
    main()
