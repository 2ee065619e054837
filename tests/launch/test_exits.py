"""What a process says when another one is gone."""

import pytest

from lockstep.launch.exits import exit_code

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (f"{GLOO}pair.cc:538] Connection closed by peer [10.77.0.2]:24577", "another process at 10.77.0.2 is lost"),
        (f"{GLOO}pair.cc:534] Read error [fe80::1]:9: Connection reset by peer", "another process at fe80::1 is lost"),
        ("NCCL communicator was aborted on rank 1.", "another process is lost"),
        (f"{GLOO}unbound_buffer.cc:78] Timed out waiting 15000ms for recv operation", "within strategy.timeout_s"),
    ],
)
def test_a_lost_process_is_named_by_its_address_without_a_traceback(error, said, capsys):
    def fail() -> None:
        raise RuntimeError(error)

    assert exit_code(fail, rank=3) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: [rank 3] ") and said in told and told.count("\n") == 1
