"""Whether the machine and its launcher have the devices and processes that a config asks for."""

import os
from collections.abc import Iterator

from omegaconf import DictConfig

from lockstep.config.kinds import is_devices
from lockstep.config.words import plain, shown
from lockstep.machine.hardware import why_no_gpu
from lockstep.machine.launchers import number
from lockstep.machine.world import World, available


def device_problems(cfg: DictConfig, world: World) -> Iterator[str]:
    given, there = shown(plain(cfg.trainer.devices)), available(world.accelerator)
    if world.accelerator == "cuda" and not there:
        yield f"trainer.accelerator={cfg.trainer.accelerator} needs a GPU, but {why_no_gpu() or 'this machine shows none'}. Type trainer.accelerator=cpu."
    elif there is not None and world.devices > there and not world.external:
        yield f"trainer.devices={given} asks for {world.devices} {world.accelerator} devices; this machine has {there}. Type trainer.devices={there}, or trainer.accelerator=cpu."
    ids = plain(cfg.trainer.devices)
    if isinstance(ids, list) and is_devices(ids) and world.accelerator == "cpu":
        yield f"trainer.devices={given} names GPUs by their ids, but a CPU has none. Type trainer.devices={world.devices}."
    elif isinstance(ids, list) and is_devices(ids) and there and max(ids) >= there:
        yield f"trainer.devices={given}: this machine has {there} {world.accelerator} devices, 0 to {there - 1}."
    if world.external and there is not None and there < world.devices:
        yield f"{world.external} started {world.devices} processes on this node, but this one sees {there} {world.accelerator} devices. Let each process see all of them: --gpus-per-node={world.devices}, not --gpus-per-task."
    if world.one_process and cfg.strategy.traits.splits_batches and world.external and world.devices * world.nodes > 1:
        yield f"strategy={world.strategy} is one process with all GPUs, but {world.external} started {world.devices * world.nodes}. Start one, or type strategy=ddp."
    if world.one_process and not cfg.strategy.traits.splits_batches and world.devices > 1:
        yield f"strategy={world.strategy} uses one device; trainer.devices={given} asks for {world.devices}. Type strategy=ddp, or trainer.devices=1."
    if cfg.strategy.traits.splits_batches and world.accelerator == "cpu" and world.devices > 1:
        yield f"strategy={world.strategy} splits batches over GPUs, but trainer.devices={given} on a CPU has none. Type strategy=ddp, or trainer.devices=1."
    if world.one_process and world.nodes > 1:
        yield f"strategy={world.strategy} is one process, but trainer.num_nodes={world.nodes} needs several. Type strategy=ddp, or trainer.num_nodes=1."
    if world.nodes > 1 and not world.external and not world.one_process:
        absent = [name for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK") if name not in os.environ]
        if absent or not cfg.run:
            yield (
                f"trainer.num_nodes={world.nodes} without torchrun or SLURM needs MASTER_ADDR, MASTER_PORT and NODE_RANK in the "
                "environment of each node, and run=<name>. Type torchrun --nnodes=... train.py, or trainer.num_nodes=1."
            )
    if not world.external and (node := number(os.environ, "NODE_RANK", default=0)) >= max(1, world.nodes):
        yield (
            f"NODE_RANK={node} is in the environment, but trainer.num_nodes={world.nodes} starts with node 0. If it is left over "
            "from another job, type unset NODE_RANK; otherwise trainer.num_nodes=<how many there are>."
        )
    if world.external and cfg.trainer.devices not in ("auto", -1, world.devices):
        yield f"trainer.devices={given} contradicts {world.external}, which started {world.devices} processes on this node. Leave trainer.devices out."
    if world.external and cfg.seed is None and cfg.resume is None:
        yield f"seed=null would be drawn separately by each process that {world.external} started. Type seed=<number>."
    if world.external and cfg.trainer.num_nodes not in (1, world.nodes):
        yield f"trainer.num_nodes={cfg.trainer.num_nodes} contradicts {world.external}, which started {world.nodes} nodes. Leave trainer.num_nodes out."
