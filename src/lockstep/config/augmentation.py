"""The operations of the `augment` group. Lockstep's own are free of torch, so a check makes them to check their arguments."""

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig

from lockstep.config.admitted import is_shipped
from lockstep.config.instantiate import create, has_own_loaders, to_plain
from lockstep.config.signatures import accepted
from lockstep.errors import UserError


def names(cfg: DictConfig, *, shipped: bool) -> list[str]:
    """Names of the nodes with a class of Lockstep's own, or with one of the user's."""
    return [str(name) for name, node in (cfg.get("augment") or {}).items() if is_shipped(node) == shipped]


def operation(cfg: DictConfig, name: str) -> Any:
    """Creates an operation. The data offers it `image_size`. Raises UserError if its arguments are wrong."""
    node = to_plain(cfg.augment[name])
    offered = accepted(str(node.get("_target_")), {"image_size": cfg.data.get("image_size")})
    return create(node, f"augment.{name}", **{key: value for key, value in offered.items() if key not in node})


def operations(cfg: DictConfig) -> dict[str, Any]:
    """All operations by name, in the order of the config."""
    return {str(name): operation(cfg, str(name)) for name in cfg.get("augment") or {}}


def mixing(cfg: DictConfig, *, shipped_only: bool = False) -> list[str]:
    """Names of the operations that mix samples with their partners."""
    known = [*names(cfg, shipped=True), *(() if shipped_only else names(cfg, shipped=False))]
    return [name for name in known if operation(cfg, name).mixes]


def operation_problems(cfg: DictConfig, _: object = None, *, shipped: bool = True) -> Iterator[str]:
    if names(cfg, shipped=shipped) and has_own_loaders(cfg):
        yield f"augment.{names(cfg, shipped=shipped)[0]} has no effect: {cfg.data._target_} makes its own batches. Type augment=none."
        return
    for name in names(cfg, shipped=shipped):
        try:
            operation(cfg, name)
        except UserError as e:
            yield from e.problems
