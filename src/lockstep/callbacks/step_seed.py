"""Tells training/seeds.py and training/dropout.py where a run is: at which epoch, batch and evaluation."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from lockstep.strategies.base import PortableCheckpoint
from lockstep.training import dropout
from lockstep.training.arithmetic import completes_step, steps_done
from lockstep.training.seeds import StepSeeds, derive_seed, seed_generators

# Hooks around a forward. Nobody draws there as a rule, so seeding for each is left out where none is used.
AROUND = ("on_train_batch_start", "on_before_zero_grad", "optimizer_zero_grad", "on_before_backward")
# Hooks of a batch that logical ranks run once per step: with the first micro-batch of a process, or the last.
ONCE = {
    "on_train_batch_start": 0,
    "on_before_zero_grad": -1,
    "on_before_backward": -1,
    "on_after_backward": -1,
    "on_train_batch_end": -1,
}
OF_STEP = (*ONCE, "on_before_optimizer_step")
TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def strategy_of(trainer: Trainer) -> PortableCheckpoint:
    return cast(PortableCheckpoint, trainer.strategy)


def seeds_of(trainer: Trainer) -> StepSeeds:
    return strategy_of(trainer).seeds


class StepSeed(Callback):
    """Comes before the user's callbacks, which may draw random numbers too."""

    def __init__(self, seed: int, *, masks_by_row: bool) -> None:
        self.seed, self.masks_by_row = seed, masks_by_row
        self.used = set[str]()  # the hooks of AROUND that are used
        self.replaced: list[tuple[Any, str, Any]] = []  # hooks during training, with those of the instance itself
        self.deferred: list[Callable[[], Any]] = []  # to the last micro-batch of a step

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """What draws from here to the first batch, such as layers made in `configure_model`, draws the same everywhere.

        Lightning's strategies with several processes seed again, as before the module's constructor; that of one does not.
        """
        seed_generators(derive_seed(self.seed, "setup"), trainer.strategy.root_device.type)
        for holder in (pl_module, trainer.datamodule):  # type: ignore[attr-defined]
            for hook in TRANSFER:
                if holder and is_overridden(hook, holder):
                    draw_for_samples(holder, hook, trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Runs after a LightningModule has built its layers, perhaps in `setup` or `configure_model`."""
        if self.masks_by_row:
            dropout.use_row_masks(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        users = [each for each in (pl_module, *callbacks) if not type(each).__module__.startswith("lockstep.")]
        self.used = {hook for hook in AROUND for each in users if is_overridden(hook, each)}
        if strategy_of(trainer).arithmetic.same_bits and trainer.accumulate_grad_batches > 1:
            for each, hook in ((each, hook) for each in users for hook in ONCE if is_overridden(hook, each)):
                self.replace(each, hook, self.once_per_step(getattr(each, hook), hook, trainer))
        # Lightning skips what it cannot call, in 0.1 us; an empty hook takes 1.8 us, and a step has some 60
        own = [each for each in callbacks if type(each).__module__.startswith(("lockstep.", "lightning."))]
        for each, hook in ((each, hook) for each in own for hook in OF_STEP if hook not in vars(each)):
            if getattr(type(each), hook) is getattr(Callback, hook):
                self.replace(each, hook, None)
        seeds_of(trainer).reseed("train start", steps_done(trainer))

    def replace(self, holder: Any, hook: str, value: Any) -> None:
        self.replaced.append((holder, hook, vars(holder).get(hook)))
        setattr(holder, hook, value)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for holder, hook, own in self.replaced:
            delattr(holder, hook)
            vars(holder).update({hook: own} if own else {})
        self.replaced = []

    def once_per_step(self, call: Callable[..., Any], hook: str, trainer: Trainer) -> Callable[..., Any]:
        """A hook that changes what a forward reads changes the same in all processes only if each calls it equally often."""

        @wraps(call)
        def called(*args: Any, **kwargs: Any) -> Any:
            micro_batch = strategy_of(trainer).micro_batch % trainer.accumulate_grad_batches
            if hook == "on_before_zero_grad":  # Lightning calls it with the first
                self.deferred.append(partial(call, *args, **kwargs))
            elif micro_batch == ONCE[hook] % trainer.accumulate_grad_batches:
                return call(*args, **kwargs)

        return called

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        seeds_of(trainer).reseed("epoch start", steps_done(trainer))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.masks_by_row:
            strategy = strategy_of(trainer)
            rows = strategy.positions("rows", strategy.micro_batch)  # None if unknown: each process draws its own masks
            devices = strategy.device_rows(rows) if rows else {}
            dropout.begin(dropout.MicroBatch(self.seed, steps_done(trainer), devices) if rows else None)
        seeds_of(trainer).begin_batch(batch_idx, draws="on_train_batch_start" in self.used)

    def on_before_zero_grad(self, trainer: Trainer, *_: Any) -> None:
        if self.used & {"on_before_zero_grad", "optimizer_zero_grad"}:
            seeds_of(trainer).reseed("zero_grad", steps_done(trainer))

    def on_before_backward(self, trainer: Trainer, *_: Any) -> None:
        if self.deferred and completes_step(trainer):
            seeds_of(trainer).reseed("zero_grad", steps_done(trainer))
            for call in self.deferred:
                call()
            self.deferred = []
        if "on_before_backward" in self.used:
            seeds_of(trainer).step("before backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        seeds_of(trainer).step("update")
        strategy_of(trainer).arithmetic.after_backward(pl_module)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        dropout.begin(None)
        if seeds_of(trainer).of_samples:  # there was no backward
            seeds_of(trainer).step("batch end")

    # --- Evaluations ---

    def begin_evaluation(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_fit_start(trainer, pl_module)
        seeds_of(trainer).batch = -1
        seeds_of(trainer).reseed("evaluation start")

    def begin_batch(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, loader: int = 0
    ) -> None:
        seeds_of(trainer).begin_batch(batch_idx, loader)
        records = strategy_of(trainer).records(loader) if self.masks_by_row else []
        if records and records[0].places:  # layers that stay in training mode
            rows = strategy_of(trainer).device_rows(records[0].places)
            dropout.begin(dropout.MicroBatch(self.seed, f"evaluation {loader}", rows))

    def end_batch(self, *_: Any) -> None:
        dropout.begin(None)

    def end_epoch(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The number of batches may depend on the number of processes."""
        seeds_of(trainer).loader = 0
        seeds_of(trainer).reseed("evaluation epoch end")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            seeds_of(trainer).reseed("after evaluation", steps_done(trainer))

    on_validation_start = on_test_start = on_predict_start = begin_evaluation
    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = cast(Any, begin_batch)
    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = cast(Any, end_batch)
    on_validation_epoch_end = on_test_epoch_end = on_predict_epoch_end = end_epoch

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)
        self.end_batch(trainer)


def draw_for_samples(holder: pl.LightningModule | pl.LightningDataModule, hook: str, trainer: Trainer) -> None:
    """Seeds the random numbers of a hook that moves a batch to the device."""
    method = getattr(holder, hook)
    original = getattr(method, "unseeded", method)  # wrapped by an earlier Trainer

    @wraps(original)
    def seeded(*args: Any, **kwargs: Any) -> Any:
        seeds_of(trainer).transfer(hook)
        return original(*args, **kwargs)

    seeded.unseeded = original  # type: ignore[attr-defined]  # not __wrapped__, which a user's decorator sets as well
    setattr(holder, hook, seeded)
