"""Refuses a task that communicates on its own where each micro-batch has a loss of its own: the result would depend on how a batch
is divided, which nothing else tells."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lockstep.compat.collectives import CollectiveCounter
from lockstep.errors import UserError
from lockstep.training.module import TaskModule


class TaskCollectives(Callback):
    """Watches the first micro-batch of a process. One process alone is not watched: tasks communicate if there are several."""

    def __init__(self, exact_shards: int | None) -> None:
        self.exact_shards, self.counter = exact_shards, CollectiveCounter()
        # The task's own attributes named `loss` and `outputs`, to put back; None: it is not watched.
        self.own: dict[str, Any] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        divided = self.exact_shards or trainer.accumulate_grad_batches > 1
        if isinstance(pl_module, TaskModule) and trainer.world_size > 1 and divided:
            task = pl_module.task
            watched = {"loss": self.watched_loss(task.loss), "outputs": self.watched_outputs(task.outputs)}
            self.own = {name: vars(task)[name] for name in watched if name in vars(task)}
            vars(task).update(watched)  # not setattr, which refuses the name of a submodule

    def watched_loss(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with self.counter:
                return loss(*args)

        return call

    def watched_outputs(self, outputs: Callable[..., Any]) -> Callable[..., Any]:
        """Without what the network does: a sharded one is gathered, and its batch norm may be synchronised."""

        def call(net: Callable[..., Any], batch: Any) -> Any:
            def unwatched(*args: Any, **kwargs: Any) -> Any:
                self.counter.__exit__(None, None, None)
                try:
                    return net(*args, **kwargs)
                finally:
                    self.counter.__enter__()

            with self.counter:
                return outputs(unwatched, batch)

        return call

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self.own is None:
            return
        task: Any = pl_module.task
        del vars(task)["loss"], vars(task)["outputs"]
        vars(task).update(self.own)
        self.own = None
        if not self.counter.count:
            return
        micro_batches = f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches}"
        key = f"exact.shards={self.exact_shards}" if self.exact_shards else micro_batches
        raise UserError(
            f"{type(task).__name__} communicates between processes in its loss or outputs, and {key} divides each process's samples: the "
            "result would depend on how. Set `between_samples = True` in the class, and the loss gets the samples of all processes without "
            f"communicating; then leave {key} out."
        )
