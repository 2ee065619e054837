"""Connects the processes of a run, through a key-value store at one address.

torchrun's agents keep one store for all attempts, and torch 2.13 does not prefix its keys: a new process would read the
address of a dead one and wait for it (pytorch#135712). Here rank 0 draws a name for the attempt and sends it to each
process that asks. All live processes then share the name, regardless of what earlier attempts left in the store.
"""

import os
import secrets
import threading
import time
from datetime import timedelta
from typing import Any

import torch

from lockstep.config.formatting import name_ranks
from lockstep.errors import RendezvousFailed, UserError
from lockstep.machine import process
from lockstep.machine.system import WINDOWS

ASKING, LOOK_S = "lockstep/asking", 0.02
GRACE = 3  # times the timeout: by then this process should have ended by itself
dist: Any = torch.distributed  # its type stubs lack the stores


def rendezvous(strategy: Any, timeout: timedelta) -> None:
    """Initialises torch.distributed for a strategy with several processes. Lightning then leaves it unchanged.

    Raises:
        RendezvousFailed: the processes did not connect within `timeout`.
        UserError: the caller has already initialised it.
    """
    if dist.is_initialized():
        if process.store is None:  # not by an earlier fit of this process
            raise UserError("torch.distributed is already initialised. Remove init_process_group: Lockstep calls it.")
        return
    device = strategy.root_device
    strategy.accelerator.setup_device(device)
    strategy.set_world_ranks()
    place = strategy.cluster_environment
    rank, size, host, port = place.global_rank(), place.world_size(), place.main_address, place.main_port
    failure = f"rank {rank} of {size} could not connect to the other ranks at {host}:{port} (MASTER_ADDR, MASTER_PORT)"
    # torchrun's agent serves the store, otherwise rank 0
    is_server = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    options = {"multi_tenant": True, "wait_for_workers": False, "use_libuv": not WINDOWS}  # not in torch for Windows
    # clients of a store, including gloo, wait forever if it stops answering (torch 2.13): the server keeps their timeouts
    timer = threading.Timer(GRACE * timeout.total_seconds(), process.end, [f"error: {failure}: no response"])
    timer.daemon = True
    timer.start()
    try:
        store = dist.TCPStore(host, port, size, is_server, timeout, **options)
        process.store = dist.PrefixStore(attempt(store, rank, size, timeout), store)
        backend, gpu = dist.get_default_backend_for_device(device), None if device.type == "cpu" else device
        group = {"store": process.store, "rank": rank, "world_size": size, "timeout": timeout, "device_id": gpu}
        dist.init_process_group(backend, **group)
    except dist.DistError as e:
        raise RendezvousFailed(f"{failure}: {str(e).splitlines()[0]}", alike=False) from None
    finally:
        timer.cancel()


def attempt(store: Any, rank: int, size: int, timeout: timedelta) -> str:
    """A name that all processes of this attempt share, different from those of earlier attempts.

    Rank 0 sends it to each rank that asks, until all have joined, and records which ranks are missing.
    """
    if rank:
        token = secrets.token_hex(8)
        store.append(ASKING, f"{token} ")
        name = store.get(token).decode()
        store.set(f"{name}/{rank}", "here")
    else:
        name, deadline = f"lockstep/{secrets.token_hex(8)}", time.monotonic() + timeout.total_seconds()
        absent = list(range(1, size))
        while absent and time.monotonic() < deadline:
            time.sleep(LOOK_S)
            for token in store.compare_set(ASKING, "", "").decode().split():
                store.set(token, name)
            absent = [other for other in absent if not store.check([f"{name}/{other}"])]
        store.set(f"{name}/missing", " ".join(map(str, absent)))
    if missing := store.get(f"{name}/missing").decode().split():
        message = f"{name_ranks(missing, size)} did not join within strategy.timeout_s={timeout.total_seconds():g}. Start all processes with the same address and port (MASTER_ADDR, MASTER_PORT)."
        raise RendezvousFailed(message, alike=True)
    return name
