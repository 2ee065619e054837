"""An exponential moving average of the weights, which is validated, tested and saved in their place."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor

from lockstep.training.steps import completes_step, steps_done


class EMA(Callback):
    """average = decay * average + (1 - decay) * weights, after every `update_every_n_steps`-th step from the first on.

    With `warmup`, update t (from 0) uses min(decay, (1 + t) / (10 + t)), as TensorFlow's ExponentialMovingAverage with `num_updates`. Without,
    the first weights dominate a short run: 168 steps at 0.999 still have 85 % of them.

    Lightning's EMAWeightAveraging copies the whole module, which FSDP2 does not allow. Here the average has the same
    form as the weights under the strategy: whole, or this process's shards. Checkpoints have Lightning's layout: the average
    is in `state_dict`, the weights that training continues with are in `current_model_state`. Running statistics of batch
    normalisation are averaged too; counters are taken as they are.
    """

    saved_weights = 1  # copies of the weights in a checkpoint, besides state_dict

    def __init__(self, decay: float = 0.999, update_every_n_steps: int = 1, *, warmup: bool = True) -> None:
        self.decay, self.update_every_n_steps, self.warmup = decay, update_every_n_steps, warmup
        self.average: list[Tensor] | None = None

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = steps_done(trainer)
        if not completes_step(trainer, batch_idx) or (step - 1) % self.update_every_n_steps:
            return
        now = tensors(pl_module)
        if self.average is None:
            self.average = [tensor.clone() for tensor in now]
            return
        t = (step - 1) // self.update_every_n_steps  # of the steps, so there is nothing to save
        decay = min(self.decay, (1 + t) / (10 + t)) if self.warmup else self.decay
        moving = [(old, new) for old, new in zip(self.average, now, strict=True) if new.is_floating_point()]
        torch._foreach_lerp_([old for old, _ in moving], [new for _, new in moving], 1 - decay)
        for old, new in zip(self.average, now, strict=True):
            if not new.is_floating_point():
                old.copy_(new)

    @torch.no_grad()
    def swap(self, pl_module: LightningModule) -> None:
        """Swaps the values of average and weights in place: the optimizer keeps its tensors."""
        for own, weight in zip(self.average or (), tensors(pl_module) if self.average else (), strict=True):
            kept = weight.clone()
            weight.copy_(own)
            own.copy_(kept)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.swap(pl_module)

    on_validation_epoch_end = on_validation_epoch_start

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.swap(pl_module)
        self.average = None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.average is None:
            return
        self.swap(pl_module)
        state = trainer.strategy.lightning_module_state_dict()
        average = {name: None if value is None else value.clone() for name, value in state.items()}
        self.swap(pl_module)
        checkpoint["current_model_state"], checkpoint["state_dict"] = checkpoint["state_dict"], average

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """By now the strategy has loaded the average into the network, in the form that it uses."""
        if "current_model_state" in checkpoint:
            self.average = [tensor.clone() for tensor in tensors(pl_module)]
            trainer.strategy.load_model_state_dict({"state_dict": checkpoint["current_model_state"]}, strict=True)


@torch.no_grad()
def tensors(pl_module: LightningModule) -> list[Tensor]:
    """Weights and buffers themselves, or this process's shards of them. A tied weight is one tensor under several names."""
    once = dict.fromkeys(pl_module.state_dict(keep_vars=True).values())
    return [(t.to_local() if isinstance(t, DTensor) else t).detach() for t in once]
