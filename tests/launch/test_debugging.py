"""breakpoint() has a terminal, in one process and in a rank of several; what each rank prints is in its log."""

import os
import re
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import forked
import pytest
import thin_project
from in_process import SMALL
from terminal import Terminal

from lockstep.errors import UserError
from lockstep.machine import process

TASK = """import os, sys
from pathlib import Path
from lockstep.kit.tasks import Classification


class Stops(Classification):
    def loss(self, outputs, batch):
        rank = os.environ.get("RANK", "0")
        print(f"loss of rank {rank}")
        print(f"error of rank {rank}", file=sys.stderr)
        if os.environ.get("STOP") == rank and not Path("go").exists():
            __import__("pdb").set_trace()
        return super().loss(outputs, batch)
"""
OWN = {
    "src/bouquet/task.py": TASK,
    "configs/task/stops.yaml": "defaults: [classification]\n_target_: bouquet.task.Stops\n",
}
RUN = ["run=a", "task=stops", "loader.batch_size=48", "trainer.max_steps=2", "trainer.limit_test_batches=1", *SMALL]
TWO = ["strategy=ddp", "trainer.devices=2"]
PROMPT, END_S = "Pdb) ", 10  # another process may print after the first character of a prompt


class Run(Terminal):
    """train.py of a project whose task stops in the debugger, in the process of rank `stop`."""

    def __init__(self, command, *args: str, stop: int | None = None) -> None:
        script = str(thin_project.write(command.folder / "project", **OWN) / "train.py")
        given = [f"data.root={command.data}", f"data.cache_dir={command.cache}", *RUN, *args]
        self.folder = command.folder
        super().__init__([sys.executable, script, *given], self.folder, forked.Popen, STOP=str(stop))

    def log(self, rank: int) -> str:
        return (self.folder / f"runs/a/logs/rank-{rank}.log").read_text()


@pytest.fixture
def terminal(command):
    with ExitStack() as stack:

        def start(*args: str, stop: int | None = None) -> Run:
            run = Run(command, *args, stop=stop)
            stack.callback(run.close)
            return run

        yield start


@pytest.mark.slow
def test_one_process_stops_in_the_sanity_validation(terminal):
    command = terminal(stop=0)
    command.until(PROMPT)
    command.enter("p 6 * 7, outputs.is_meta\n")
    assert "(42, False)" in command.until(PROMPT)
    command.enter("q\ny\n" if sys.version_info >= (3, 14) else "q\n")  # which asks whether to end the process
    assert command.process.wait(100) == 130
    assert not (command.folder / "runs/a").exists()  # it has not trained a step


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_of_several_has_the_terminal_and_goes_on(strategy, terminal):
    command = terminal(f"strategy={strategy}", "trainer.devices=2", "debug_rank=1", "strategy.timeout_s=2", stop=1)
    command.until(PROMPT)
    time.sleep(3)  # longer than the timeout
    command.enter('p sorted(batch["index"].tolist()) != [], os.environ["RANK"]\n')
    assert "(True, '1')" in command.until(PROMPT)
    command.enter('Path("go").touch()\nc\n')
    assert command.process.wait(100) == 0, command.seen
    assert "loss of rank 0" not in command.seen
    assert "loss of rank 0" in command.log(0)
    assert "debug_rank: null" in (command.folder / "runs/a/config.yaml").read_text()


@pytest.mark.parametrize(("how", "code", "status"), [
    pytest.param(signal.SIGTERM, 1, "preempted", marks=pytest.mark.slow),
    (signal.SIGINT, 130, "interrupted"),
])  # fmt: skip
def test_a_signal_ends_all_processes_at_the_prompt(how, code, status, terminal):
    command = terminal(*TWO, "debug_rank=1", stop=1)
    command.until(PROMPT)
    began_s = time.monotonic()
    command.process.send_signal(how)  # the terminal would send Ctrl-C to all of them
    assert command.process.wait(100) == code
    assert time.monotonic() - began_s < END_S
    command.until(f"error: ended by {how.name} during debugging")
    assert f'"status": "{status}"' in (command.folder / "runs/a/report.json").read_text()


@pytest.mark.slow
def test_each_rank_has_a_log_and_the_terminal_shows_rank_0(terminal):
    command = terminal(*TWO)
    assert command.process.wait(200) == 0, command.seen
    for each in (0, 1):
        assert {f"loss of rank {each}", f"error of rank {each}"} <= set(command.log(each).splitlines())
        assert f"loss of rank {1 - each}" not in command.log(each)
    assert not re.search(r"\x1b|\u2501", command.log(0))  # the progress bar and the report's link
    assert "loss of rank 0" in command.seen
    assert "loss of rank 1" not in command.seen


@pytest.mark.parametrize(("options", "said"), [
    (["debug_rank=2", *TWO], "debug_rank=2 is none of the processes"),
    (["debug_rank=1"], "debug_rank=1 is none of the processes"),
    (["debug_rank=-1"], "debug_rank=-1"),
    (["run=\u00fcber"], "needs quotes"),
])  # fmt: skip
def test_a_rank_that_does_not_exist_and_a_name_that_hydra_cannot_read_are_rejected(options, said, train, monkeypatch):
    monkeypatch.setattr(process, "debug_rank", None)
    with pytest.raises(UserError, match=said):
        train(*options)
    assert not Path("runs").exists()


def test_what_was_printed_before_a_run_had_its_folder_is_in_its_log_once(tmp_path):
    """A worker, which is forked with a copy of the earlier lines, adds its own only."""
    with process.RankLog(tmp_path / "a", 0):
        process.log.write("early\n")
        (tmp_path / "a/checkpoints").mkdir(parents=True)
        if (worker := os.fork()) == 0:
            process.log.write("of a worker\n")
            os._exit(0)
        os.waitpid(worker, 0)
        process.log.write("late\n")
    assert (tmp_path / "a/logs/rank-0.log").read_text().splitlines() == ["of a worker", "early", "late"]
    with process.RankLog(tmp_path / "refused", 0):
        process.log.write("error\n")
    assert not (tmp_path / "refused").exists()
