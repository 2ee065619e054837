"""Whether batches divide among processes and accumulated micro-batches. Free of torch."""

from collections.abc import Iterator

from omegaconf import DictConfig

from lockstep.config.components import is_shipped
from lockstep.machine.world import World


def accumulated(cfg: DictConfig) -> int:
    """`trainer.accumulate_grad_batches` as a number; 1 for `auto`, which starts with it."""
    given: int | str = cfg.trainer.accumulate_grad_batches
    return 1 if given == "auto" else int(given)


def batch_problems(cfg: DictConfig, world: World) -> Iterator[str]:
    """Checks shipped data only; config/classes.py checks other data, once its class is imported."""
    if is_shipped(cfg.data):
        yield from division_problems(cfg, world)


def division_problems(cfg: DictConfig, world: World) -> Iterator[str]:
    """The global batch must divide into processes x micro-batches; evaluation batches need not."""
    batch, accumulate = cfg.data.batch_size, accumulated(cfg)
    parts = world.size * accumulate
    if batch % parts:
        low, high = batch // parts * parts, (batch // parts + 1) * parts
        choice = f"{low} or {high}" if low else str(high)
        yield (
            f"data.batch_size={batch} is the global batch; it cannot be divided among {world.size} processes x {accumulate} "
            f"accumulated micro-batches. Type data.batch_size={choice}, or change trainer.devices or trainer.accumulate_grad_batches."
        )


def auto_problems(cfg: DictConfig, world: World) -> Iterator[str]:
    """Limits of trainer.accumulate_grad_batches=auto, which restarts the processes."""
    auto = "trainer.accumulate_grad_batches=auto"
    if cfg.trainer.accumulate_grad_batches != "auto":
        return
    if world.external or world.nodes > 1:
        who = world.external or "more than one parent process"
        yield (
            f"{auto} restarts the processes when memory runs out, but {who} started them. Type trainer.accumulate_grad_batches=1: "
            "if a micro-batch does not fit, the error names a number that does."
        )
    for key in ("limit_train_batches", "val_check_interval"):
        if cfg.trainer[key] and (isinstance(cfg.trainer[key], int) or key == "limit_train_batches"):
            yield (
                f"trainer.{key}={cfg.trainer[key]} counts micro-batches; with {auto} their number per step is not known yet. "
                "Type trainer.accumulate_grad_batches=1, or a larger number."
            )
