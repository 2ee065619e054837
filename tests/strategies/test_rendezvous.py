"""Processes of one attempt find each other, and nobody else; without success they say who is missing."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import Mock

import forked
import pytest
import torch
from torch.distributed import HashStore, TCPStore

from lockstep.errors import RendezvousFailed, UserError
from lockstep.strategies import rendezvous

LONG = timedelta(seconds=60)


def strategy_of(rank: int, port: int, host: str = "127.0.0.1") -> Mock:
    """One of two processes."""
    place = SimpleNamespace(global_rank=lambda: rank, world_size=lambda: 2, main_address=host, main_port=port)
    return Mock(root_device=torch.device("cpu"), cluster_environment=place)


def names(store, ranks: list[int], size: int, timeout: timedelta = LONG) -> list[object]:
    """What each rank gets: the attempt's name, or the error."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        asked = [threads.submit(rendezvous.attempt, store, rank, size, timeout) for rank in ranks]
    return [each.exception() or each.result() for each in asked]


def test_each_attempt_in_one_store_has_a_name_of_its_own():
    store = HashStore()
    store.append(rendezvous.ASKING, "0123456789abcdef ")  # of a process that is dead
    first, second = names(store, [0, 1, 2], 3), names(store, [0, 1], 2)
    assert (len({*first}), len({*second}), len({*first, *second})) == (1, 1, 2)


def test_who_did_not_come_is_named_once():
    for error in names(HashStore(), [0, 2], 4, timedelta(seconds=1)):
        assert "ranks 1, 3 of 4 did not join within strategy.timeout_s=1." in str(error)
        assert error.alike


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_address_that_cannot_work_is_named(rank, monkeypatch, port):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(rendezvous, "GRACE", 60)  # the process that would be ended is the test's
    other = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if rank == 0 else None
    told = rf"rank {rank} of 2 could not connect to the other ranks at 127\.0\.0\.1:{port} .*$"
    with pytest.raises(RendezvousFailed, match=told) as error:
        rendezvous.rendezvous(strategy_of(rank, port), timedelta(seconds=1))
    assert "\n" not in str(error.value)
    assert not error.value.alike
    del other


def test_a_process_group_of_the_caller_is_refused():
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UserError, match="Remove init_process_group"):
            rendezvous.rendezvous(None, LONG)
    finally:
        torch.distributed.destroy_process_group()


def process(rank: str, port: str, moment: str) -> None:
    """Meets as one of two ranks; rank 0, which keeps the store, stops at a moment: before it answers, or before it connects."""
    if rank == "0":
        owner, name = (rendezvous, "attempt") if moment == "answers" else (rendezvous.dist, "init_process_group")
        done = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGSTOP) or done(*args, **kwargs))
    rendezvous.rendezvous(strategy_of(int(rank), int(port)), timedelta(seconds=2))


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["answers", "connects"])
def test_one_that_is_lost_while_all_meet_is_not_waited_for(moment, monkeypatch, port):
    """As when the network goes down then. The store's clients themselves would wait for ever."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    stopped, other = (forked.call(__file__, "process", rank, str(port), moment) for rank in "01")
    assert other.wait(60) == 1
    stopped.kill()
    assert stopped.wait(60) != 0


def test_an_error_of_gloo_names_the_rank_that_lost_the_others(monkeypatch):
    monkeypatch.setattr(rendezvous.dist, "TCPStore", lambda *_, **__: HashStore())
    monkeypatch.setattr(rendezvous, "attempt", lambda *_: "a")
    lost = Mock(side_effect=rendezvous.dist.DistStoreError("wait timeout\nmore"))
    monkeypatch.setattr(rendezvous.dist, "init_process_group", lost)
    told = r"rank 1 of 2 could not connect to the other ranks at host:7 .*: wait timeout$"
    with pytest.raises(RendezvousFailed, match=told):
        rendezvous.rendezvous(strategy_of(1, 7, "host"), LONG)
