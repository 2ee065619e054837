"""How the processes of a run find each other, at one address with a key-value store.

torchrun's agents keep one store for all attempts, and torch 2.13 puts no prefix before its keys: a new process would read the address
of a dead one and wait for it (pytorch#135712). Here rank 0 draws a name for the attempt and answers each process that asks for it,
so all that live share the name, whatever is left of earlier attempts.
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

from lockstep.config.words import readable
from lockstep.errors import NoRendezvous, UserError
from lockstep.machine import process

ASKING, LOOK_S = "lockstep/asking", 0.02
GRACE = 1.5  # times the timeout, after which this process would have ended by itself
dist: Any = torch.distributed  # its type stubs lack the stores
group: Any = None  # that an earlier fit of this process initialised


def meet(strategy: Any, timeout: timedelta) -> None:
    """Initialises torch.distributed for a strategy of several processes. Lightning leaves it as it is.

    Raises:
        NoRendezvous: the processes did not find each other within `timeout`.
        UserError: the caller has initialised it.
    """
    global group
    if dist.is_initialized():
        if group is not dist.group.WORLD:  # not by an earlier fit of this process
            raise UserError("torch.distributed is initialised already. Remove init_process_group: Lockstep calls it.")
        return
    device = strategy.root_device
    strategy.accelerator.setup_device(device)
    strategy.set_world_ranks()
    place = strategy.cluster_environment
    rank, size = place.global_rank(), place.world_size()
    address = f"{place.main_address}:{place.main_port} (MASTER_ADDR, MASTER_PORT)"
    limit_s = GRACE * timeout.total_seconds()
    unmet = f"rank {rank} of {size} could not {'open' if rank == 0 else 'reach rank 0 at'} {address}"
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun's agent, otherwise by rank 0
    server = {"is_master": rank == 0 and not served, "multi_tenant": not served}
    with connecting(2 * limit_s, unmet):  # it connects, asks, and waits for the others
        shared = dist.TCPStore(
            place.main_address, place.main_port, size, timeout=timeout, wait_for_workers=False, **server
        )
        process.store = dist.PrefixStore(attempt(shared, rank, size, address, timeout), shared)
    with connecting(limit_s, f"rank {rank} of {size} met the others at {address} and lost them while they connected"):
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
def connecting(limit_s: float, failed: str) -> Iterator[None]:
    """Ends this process if the block takes longer. Clients of a store, gloo among them, wait for ever for one that stopped answering
    (torch 2.13): their timeouts are the server's. Raises NoRendezvous for torch's errors."""

    def end() -> None:
        print(readable(f"error: {failed}: no answer"), file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except dist.DistError as e:
        raise NoRendezvous(f"{failed}: {str(e).splitlines()[0]}", alike=False) from None
    finally:
        timer.cancel()


def attempt(shared: Any, rank: int, size: int, address: str, timeout: timedelta) -> str:
    """A name that all processes of this attempt share, and no earlier attempt."""
    if rank == 0:
        name = gather(shared, size, timeout)
    else:
        own = secrets.token_hex(8)
        shared.append(ASKING, f"{own} ")
        name = shared.get(f"lockstep/{own}").decode()
        shared.set(f"{name}/{rank}", "here")
    if missing := json.loads(shared.get(f"{name}/missing")):
        who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
        raise NoRendezvous(
            f"{who} of {size} did not come to {address} within strategy.timeout_s={timeout.total_seconds():g}. Start all "
            "processes, with the same address and port.",
            alike=True,
        )
    return name


def gather(shared: Any, size: int, timeout: timedelta) -> str:
    """Rank 0's part: answers each rank that asks, until all have joined; notes which ranks are missing."""
    name, deadline, answered = f"lockstep/{secrets.token_hex(8)}", time.monotonic() + timeout.total_seconds(), 0
    shared.append(ASKING, "")
    missing = list(range(1, size))
    while missing and time.monotonic() < deadline:
        asking = shared.get(ASKING).decode().split()
        for who in asking[answered:]:
            shared.set(f"lockstep/{who}", name)
        answered = len(asking)
        missing = [rank for rank in missing if not shared.check([f"{name}/{rank}"])]
        time.sleep(LOOK_S if missing else 0)
    shared.set(f"{name}/missing", json.dumps(missing))
    return name
