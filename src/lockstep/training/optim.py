"""The parameters of a network in groups, each with its learning rate and weight decay."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


def groups(
    net: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.0,
    no_decay: bool = False,
    layer_decay: float | None = None,
    head_lr: float | None = None,
) -> list[dict[str, Any]]:
    """For an optimizer. Parameters with the same rate and decay share a group.

    Args:
        no_decay: no weight decay for vectors (biases, norms) and for what the network names in `no_weight_decay()`.
        layer_decay: the rate of a layer is this factor times the rate of the next one (BEiT, Bao et al. 2022).
        head_lr: the rate of the head.
    """
    layer, head = layers(net), {id(p) for p in head_of(net).parameters()}
    last = max(layer.values(), default=0)
    spared = set(getattr(net, "no_weight_decay", set)())
    found: dict[tuple[float, float], list[Tensor]] = defaultdict(list)
    for name, p in net.named_parameters():
        rate = lr * (layer_decay or 1.0) ** (last - layer[name])
        if head_lr is not None and id(p) in head:
            rate = head_lr
        found[rate, 0.0 if no_decay and (p.dim() <= 1 or name in spared) else weight_decay].append(p)
    return [{"params": params, "lr": rate, "weight_decay": decay} for (rate, decay), params in found.items()]


def layers(net: nn.Module) -> dict[str, int]:
    """The layer of each parameter, from 0 at the input: as the network's `group_matcher()` says (timm's have one), or by `blocks`."""
    matcher = getattr(net, "group_matcher", None)
    if matcher is not None:
        from timm.models import group_parameters

        return group_parameters(net, matcher(coarse=False), reverse=True)
    found = dict.fromkeys((name for name, _ in net.named_parameters()), 0)
    for number, (prefix, block) in enumerate(blocks(net)):
        found |= {f"{prefix}.{name}": number for name, _ in block.named_parameters()}
    return found


def blocks(net: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The children of a network with parameters, in order; of a list of modules, its members."""
    for name, child in net.named_children():
        listed = isinstance(child, nn.Sequential | nn.ModuleList)
        members = [(f"{name}.{own}", each) for own, each in child.named_children()] if listed else [(name, child)]
        yield from ((path, each) for path, each in members if any(True for _ in each.parameters()))


def head_of(net: nn.Module) -> nn.Module:
    """What `get_classifier()` of the network returns (timm's have one), or the last module with parameters of its own."""
    known = getattr(net, "get_classifier", None)
    if known is not None:
        found = known()
        return nn.ModuleList(found) if isinstance(found, tuple | list) else found
    return [module for module in net.modules() if any(True for _ in module.parameters(recurse=False))][-1]
