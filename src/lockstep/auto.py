"""What `auto` means here: decided once, by the process that reads the command line, and written into the run's config.

So a run that goes on, and its evaluation, compute as it began; processes that decide for themselves, as torchrun's do,
must agree (callbacks/plan.py).
"""

from omegaconf import DictConfig, open_dict

from lockstep.hardware import multiplies_bf16
from lockstep.world import World


def decided(cfg: DictConfig, world: World) -> DictConfig:
    """`cfg` with a value in the place of each `auto` that depends on the hardware."""
    cfg = cfg.copy()
    with open_dict(cfg):
        if cfg.trainer.precision == "auto":
            cfg.trainer.precision = "bf16-mixed" if multiplies_bf16(world.accelerator) else "32-true"
        if cfg.optim.get("fused") == "auto":
            unscaled_first = str(cfg.trainer.precision).startswith("16") and cfg.trainer.gradient_clip_val is not None
            cfg.optim.fused = (
                not unscaled_first
            )  # fused steps unscale fp16's gradients themselves, too late to clip them
    return cfg
