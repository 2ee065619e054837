"""Keeps parts of a network as they are, for the whole run or up to some epoch."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.optim import Optimizer

from lockstep.errors import UserError
from lockstep.training.optim import head_of

BODY = "body"  # everything except the head
Patterns = str | Sequence[str]


class Freeze(Callback):
    """`parameters`: `body`, or patterns of their names such as `layer1.*`. `unfreeze`: pairs of a pattern and the epoch from which on
    it is trained.

    What is never unfrozen needs no gradient, so the backward pass ends before it. Other frozen parameters get their gradients
    removed before each step: the strategies take their parameters once, at the start. Frozen batch norms keep their statistics.
    """

    def __init__(self, parameters: Patterns = BODY, unfreeze: Sequence[tuple[str, int]] = ()) -> None:
        self.patterns = [parameters] if isinstance(parameters, str) else list(parameters)
        self.unfreeze = [(pattern, epoch) for pattern, epoch in unfreeze]
        self.thaws: dict[str, int | None] = {}  # frozen parameters: the epoch from which each is trained
        self.without_gradient: list[nn.Parameter] = []  # in this epoch

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.freeze(self.network(pl_module))

    def freeze(self, net: nn.Module) -> None:
        """Finds what is frozen until when. Raises UserError: a pattern matches no parameter, or nothing is left to train."""
        of_head = {id(p) for p in head_of(net).parameters()}
        every = {name: id(p) not in of_head for name, p in net.named_parameters()}
        frozen = [n for n in every if any(every[n] if p == BODY else fnmatchcase(n, p) for p in self.patterns)]
        for pattern in {*self.patterns} - {BODY} | {pattern for pattern, _ in self.unfreeze}:
            if not any(fnmatchcase(name, pattern) for name in every):
                raise UserError(
                    f"callbacks.freeze: no parameter is called {pattern}; they are {', '.join(sorted({n.split('.')[0] + '.*' for n in every}))}."
                )
        for name in frozen:
            epochs = [epoch for pattern, epoch in self.unfreeze if fnmatchcase(name, pattern)]
            self.thaws[name] = min(epochs, default=None)
        if len(frozen) == len(every) and 0 not in self.thaws.values():
            raise UserError("callbacks.freeze.parameters freezes the whole network. Name fewer of them.")
        for name, p in net.named_parameters():
            if name in self.thaws and self.thaws[name] is None:
                p.requires_grad_(False)

    @staticmethod
    def network(pl_module: LightningModule) -> nn.Module:
        return getattr(pl_module, "net", pl_module)

    def is_frozen(self, name: str, epoch: int) -> bool:
        thaws = self.thaws.get(name, 0)
        return thaws is None or epoch < thaws

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_train_epoch_start(trainer, pl_module)  # not called for an epoch that is resumed

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Modules with statistics evaluate while all their parameters are frozen."""
        net, epoch = self.network(pl_module), trainer.current_epoch
        named = net.named_parameters()
        self.without_gradient = [p for name, p in named if p.requires_grad and self.is_frozen(name, epoch)]
        for path, module in net.named_modules():
            own = [f"{path}.{name}".lstrip(".") for name, _ in module.named_parameters(recurse=False)]
            if own and any(True for _ in module.buffers(recurse=False)):
                module.train(not all(self.is_frozen(name, epoch) for name in own))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        for p in self.without_gradient:
            p.grad = None
