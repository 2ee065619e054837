"""How many floating-point operations a training step takes, counted without computing any."""

import logging
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch.utils.flop_counter import FlopCounterMode

from lockstep.config.instantiate import network


def flops_per_image(model: dict[str, Any], about: dict[str, Any]) -> int:
    """Of forward and backward, for the network of a `model` node: those of matrix multiplications and convolutions, as
    torch's counter has them; a multiplication and an addition are two. On the meta device: 0.4 s for resnet50d."""
    size = about["image_size"]
    with torch.device("meta"):
        net = network(model, about, with_weights=False).train()
        image_BCHW = torch.empty(2, about["channels"], size, size)
    with FlopCounterMode(display=False) as counter:
        net(image_BCHW).sum().backward()
    return int(counter.get_total_flops()) // 2


def flops_per_s(cfg: DictConfig, about: dict[str, Any], images_per_s: float | None) -> float | None:
    """Of all processes together. None where the speed is not known, or the network cannot be made without computing."""
    model = OmegaConf.to_container(cfg.model, resolve=True)
    if images_per_s is None or not isinstance(model, dict):
        return None
    try:
        return flops_per_image({str(key): value for key, value in model.items()}, about) * images_per_s
    except Exception as e:  # a network of one's own may do anything; a figure of the report is not worth a failed run
        logging.getLogger("lockstep").info("train/flops_per_s was not counted: %s: %s", type(e).__name__, e)
        return None
