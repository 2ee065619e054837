"""A process group that Lockstep did not initialise has a store too."""

from datetime import timedelta

import torch

from lockstep.machine import process
from lockstep.strategies import rendezvous


def test_the_store_of_a_group_that_is_there_already_is_used(monkeypatch):
    monkeypatch.setattr(process, "store", "of an earlier group")
    monkeypatch.setattr(rendezvous, "group", None)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        rendezvous.meet(None, timedelta(seconds=1))
        process.store.set("a", "b")
        assert process.store.get("a") == b"b"
    finally:
        torch.distributed.destroy_process_group()


def test_torch_has_no_public_way_to_it():
    """When it has, remove compat/default_store.py."""
    assert not [name for name in dir(torch.distributed) if "default_store" in name and not name.startswith("_")]
