"""Connects the processes of a run, through a key-value store at one address.

torchrun's agents keep one store for all attempts, and torch 2.13 does not prefix its keys: a new process would read the
address of a dead one and wait for it (pytorch#135712). Here rank 0 draws a name for the attempt and sends it to each
process that asks. All live processes then share the name, regardless of what earlier attempts left in the store.
"""

import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from lockstep.config.formatting import readable
from lockstep.errors import RendezvousFailed, UserError
from lockstep.machine import process
from lockstep.machine.system import WINDOWS

ASKING, LOOK_S = "lockstep/asking", 0.02
GRACE = 1.5  # times the timeout: by then this process should have ended by itself
dist: Any = torch.distributed  # its type stubs lack the stores
group: Any = None  # initialised by an earlier fit of this process


def rendezvous(strategy: Any, timeout: timedelta) -> None:
    """Initialises torch.distributed for a strategy with several processes. Lightning then leaves it unchanged.

    Raises:
        RendezvousFailed: the processes did not connect within `timeout`.
        UserError: the caller has already initialised it.
    """
    global group
    if dist.is_initialized():
        if group is not dist.group.WORLD:  # not by an earlier fit of this process
            raise UserError("torch.distributed is already initialised. Remove init_process_group: Lockstep calls it.")
        return
    device = strategy.root_device
    strategy.accelerator.setup_device(device)
    strategy.set_world_ranks()
    environment = strategy.cluster_environment
    rank, size = environment.global_rank(), environment.world_size()
    address = f"{environment.main_address}:{environment.main_port} (MASTER_ADDR, MASTER_PORT)"
    limit_s = GRACE * timeout.total_seconds()
    failure = f"rank {rank} of {size} could not {'open' if rank == 0 else 'reach rank 0 at'} {address}"
    # torchrun's agent serves the store, otherwise rank 0
    has_agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    options = {"is_master": rank == 0 and not has_agent_store, "multi_tenant": not has_agent_store}
    with connect_within(2 * limit_s, failure):  # this connects, asks, and waits for the other ranks
        store = dist.TCPStore(
            environment.main_address,
            environment.main_port,
            size,
            timeout=timeout,
            wait_for_workers=False,
            use_libuv=not WINDOWS,  # torch's builds for Windows have none
            **options,
        )
        process.store = dist.PrefixStore(attempt(store, rank, size, address, timeout), store)
    with connect_within(
        limit_s, f"rank {rank} of {size} reached the other ranks at {address} but lost them while connecting"
    ):
        dist.init_process_group(
            dist.get_default_backend_for_device(device),
            store=process.store,
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=None if device.type == "cpu" else device,
        )
    group = dist.group.WORLD


@contextmanager
def connect_within(limit_s: float, failure: str) -> Iterator[None]:
    """Ends this process if the block takes longer. Raises RendezvousFailed for torch's errors.

    Clients of a store, including gloo, wait forever if it stops answering (torch 2.13), because the server keeps their
    timeouts.
    """

    def end() -> None:
        print(readable(f"error: {failure}: no response"), file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except dist.DistError as e:
        raise RendezvousFailed(f"{failure}: {str(e).splitlines()[0]}", alike=False) from None
    finally:
        timer.cancel()


def attempt(store: Any, rank: int, size: int, address: str, timeout: timedelta) -> str:
    """A name that all processes of this attempt share, different from those of earlier attempts."""
    if rank == 0:
        name = gather(store, size, timeout)
    else:
        token = secrets.token_hex(8)
        store.append(ASKING, f"{token} ")
        name = store.get(f"lockstep/{token}").decode()
        store.set(f"{name}/{rank}", "here")
    if missing := json.loads(store.get(f"{name}/missing")):
        ranks = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
        raise RendezvousFailed(
            f"{ranks} of {size} did not join at {address} within strategy.timeout_s={timeout.total_seconds():g}. Start all "
            "processes with the same address and port.",
            alike=True,
        )
    return name


def gather(store: Any, size: int, timeout: timedelta) -> str:
    """Rank 0: sends the name to each rank that asks, until all have joined. Records which ranks are missing."""
    name, deadline, answered = f"lockstep/{secrets.token_hex(8)}", time.monotonic() + timeout.total_seconds(), 0
    store.append(ASKING, "")
    missing = list(range(1, size))
    while missing and time.monotonic() < deadline:
        tokens = store.get(ASKING).decode().split()
        for token in tokens[answered:]:
            store.set(f"lockstep/{token}", name)
        answered = len(tokens)
        missing = [rank for rank in missing if not store.check([f"{name}/{rank}"])]
        time.sleep(LOOK_S if missing else 0)
    store.set(f"{name}/missing", json.dumps(missing))
    return name
