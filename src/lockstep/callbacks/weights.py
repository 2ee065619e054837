"""Callbacks on the weights: averaging, freezing, and digests of their bits."""

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lockstep.data.loaders import digest_of
from lockstep.errors import UserError
from lockstep.machine.world import all_gather_objects
from lockstep.run import RunFolder
from lockstep.training.arithmetic import completes_step, steps_done
from lockstep.training.optim import head_of

# --- An exponential moving average, which is validated, tested and saved instead of the weights ---


class EMA(Callback):
    """average = decay * average + (1 - decay) * weights, every `update_every_n_steps` steps, starting with the first.

    With `warmup`, update t (from 0) uses min(decay, (1 + t) / (10 + t)), as TensorFlow's ExponentialMovingAverage with
    `num_updates`. Without warm-up, the first weights dominate a short run: after 168 steps at 0.999 they still have a
    weight of 85%.

    Lightning's EMAWeightAveraging copies the whole module, which FSDP2 does not allow. Here the average has the same
    form as the weights under the strategy: whole, or this process's shards. Checkpoints have Lightning's layout: the
    average is in `state_dict`, the weights that training continues with are in `current_model_state`. Running
    statistics of batch normalisation are averaged too; counters are copied.
    """

    def __init__(self, decay: float = 0.999, update_every_n_steps: int = 1, *, warmup: bool = True) -> None:
        self.decay, self.update_every_n_steps, self.warmup = decay, update_every_n_steps, warmup
        self.average: list[Tensor] = []  # of `tensors`, from the first step on

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        step = steps_done(trainer)
        if not completes_step(trainer) or (step - 1) % self.update_every_n_steps:
            return
        current = tensors(pl_module)
        if not self.average:
            self.average = [tensor.clone() for tensor in current]
            return
        t = (step - 1) // self.update_every_n_steps  # derived from the step, so there is nothing to save
        decay = min(self.decay, (1 + t) / (10 + t)) if self.warmup else self.decay
        moving = [(old, new) for old, new in zip(self.average, current, strict=True) if new.is_floating_point()]
        torch._foreach_lerp_([old for old, _ in moving], [new for _, new in moving], 1 - decay)
        for old, new in zip(self.average, current, strict=True):
            if not new.is_floating_point():
                old.copy_(new)

    @torch.no_grad()
    def swap(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Swaps the values of average and weights in place: the optimizer keeps its tensors."""
        for average, weight in zip(self.average, tensors(pl_module) if self.average else (), strict=True):
            saved = weight.clone()
            weight.copy_(average)
            average.copy_(saved)

    on_validation_epoch_start = on_validation_epoch_end = swap

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.swap(trainer, pl_module)
        self.average = []

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if not self.average:
            return
        self.swap(trainer, pl_module)
        state = trainer.strategy.lightning_module_state_dict()
        average = {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}
        self.swap(trainer, pl_module)
        checkpoint["current_model_state"], checkpoint["state_dict"] = checkpoint["state_dict"], average

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """The strategy has already loaded the average into the network, in the form that it uses."""
        if "current_model_state" in checkpoint:
            self.average = [tensor.clone() for tensor in tensors(pl_module)]
            raw = {"state_dict": checkpoint["current_model_state"]}
            trainer.strategy.load_model_state_dict(raw, strict=pl_module.strict_loading)


@torch.no_grad()
def tensors(pl_module: LightningModule) -> list[Tensor]:
    """Weights and buffers, or this process's shards of them, without copying. Tied weights are listed once."""
    unique = dict.fromkeys(t for t in pl_module.state_dict(keep_vars=True).values() if isinstance(t, Tensor))
    return [(t.to_local() if isinstance(t, DTensor) else t).detach() for t in unique]


# --- Freezing parts of a network, for the whole run or until an epoch ---

BODY = "body"  # everything except the head


class Freeze(Callback):
    """Keeps parameters and buffers unchanged, for the whole run or until an epoch.

    `parameters`: `body`, or patterns of names such as `layer1.*`. `unfreeze`: pairs of a pattern and the epoch from
    which it is trained.

    Parameters that are never unfrozen need no gradient, so the backward pass ends before them. Gradients of other
    frozen parameters are removed before each step, because strategies read their parameters only once, at the start.
    Modules with buffers, such as batch norms, are in evaluation mode while they are frozen, so they keep their statistics.
    """

    def __init__(self, parameters: str | Sequence[str] = BODY, unfreeze: Sequence[tuple[str, int]] = ()) -> None:
        self.patterns = [parameters] if isinstance(parameters, str) else list(parameters)
        self.unfreeze = list(unfreeze)
        if not self.patterns:
            raise ValueError("parameters=[] freezes nothing. Remove callbacks.freeze.")
        self.thaws: dict[str, float] = {}  # frozen parameters and buffers: the epoch from which each is trained
        self.without_gradient: list[nn.Parameter] = []  # in this epoch
        # in training mode until they were frozen (the network's own `train` may keep others in evaluation mode), each
        # with the parameters and buffers that it waits for
        self.at_rest: dict[nn.Module, list[str]] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Finds what is frozen until when. Raises UserError if a pattern has no match."""
        net = getattr(pl_module, "net", pl_module)
        head = head_of(net)
        in_head = {id(tensor) for tensor in (*head.parameters(), *head.buffers())}
        self.names = {name for name, _ in net.named_parameters()}
        tensors = dict(net.named_parameters()) | dict(net.named_buffers())
        for pattern, epoch in [*((each, math.inf) for each in self.patterns), *self.unfreeze]:
            if pattern == BODY:
                names = {name for name, tensor in tensors.items() if id(tensor) not in in_head}
            elif not (names := {name for name in tensors if fnmatchcase(name, pattern)}):
                available = ", ".join(sorted({f"{name.split('.')[0]}.*" for name in tensors}))
                raise UserError(f"callbacks.freeze: no parameter matches {pattern}; available: {available}.")
            for name in names if epoch == math.inf else names & self.thaws.keys():
                self.thaws[name] = min(epoch, self.thaws.get(name, epoch))
        for name, epoch in self.thaws.items():
            if epoch == math.inf and name in self.names:
                tensors[name].requires_grad_(False)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.names != {name for name, _ in getattr(pl_module, "net", pl_module).named_parameters()}:
            raise UserError(
                "callbacks.freeze needs the layers before `setup` and `configure_model`. Create them in __init__."
            )

    @property
    def trained_later(self) -> set[nn.Module]:
        """Modules with statistics that are in evaluation mode until a later epoch."""
        return {module for module, names in self.at_rest.items() if any(self.thaws[name] < math.inf for name in names)}

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Modules with buffers are in evaluation mode while they are frozen: all their parameters, else their buffers."""
        net = getattr(pl_module, "net", pl_module)
        frozen = {name for name, thaws in self.thaws.items() if trainer.current_epoch < thaws}
        self.without_gradient = [p for name, p in net.named_parameters() if name in frozen]
        for path, module in net.named_modules():
            buffers = [name for name, _ in module.named_buffers(path, recurse=False)]
            names = [name for name, _ in module.named_parameters(path)]
            if not any(True for _ in module.parameters(recurse=False)):
                names += buffers
            is_frozen = frozen.issuperset(names)
            if buffers and module.training and is_frozen:
                self.at_rest[module] = names
                module.training = False  # not its children, such as dropout
            elif module in self.at_rest and not is_frozen:
                del self.at_rest[module]
                module.training = True

    on_train_start = on_train_epoch_start  # Lightning does not call it for a resumed epoch

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        for p in self.without_gradient:
            p.grad = None


# --- digests.csv (`exact.digests=true`), which shows where two runs first differ (extras/comparison.py) ---


def digest(tensor: Tensor) -> str:
    """A hash of the bits. For a sharded tensor every process must call it."""
    return digest_of(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)


class Digests(Callback):
    """Digests of each step.

    Covers losses of the logical ranks, summed gradients before clipping, and weights and statistics after the step.
    """

    def __init__(self, folder: Path) -> None:
        self.csv = RunFolder(folder).digests_log  # not `log`, which Lightning sets
        self.gradients: list[tuple[str, str]] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self.gradients = [(n, digest(p.grad)) for n, p in pl_module.named_parameters() if p.grad is not None]

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if not completes_step(trainer):
            return
        strategy: Any = trainer.strategy  # has logical ranks: the option needs them
        digests = {rank: digest(loss.reshape(1)) for rank, loss in strategy.arithmetic.losses.items()}
        losses = sorted(pair for by_rank in all_gather_objects(digests) for pair in by_rank.items())
        weights = [(name, digest(tensor)) for name, tensor in pl_module.state_dict().items()]
        if trainer.is_global_zero:
            parts = {"loss of logical rank": losses, "gradient": self.gradients, "weight": weights}
            rows = [{"what": what, "name": n, "digest": bits} for what, items in parts.items() for n, bits in items]
            self.csv.append(*({"step": steps_done(trainer), **row} for row in rows))
