"""Shared by all strategies: in-place changes to a network, division of batches, portable checkpoints."""

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchmetrics import Metric

from lockstep.checkpoints.finding import POSITION, leaves
from lockstep.checkpoints.weights import load_into, make_plain, materialize, sharded_like
from lockstep.compat.torch import tell_first_call
from lockstep.data.loaders import MicroBatchInfo
from lockstep.data.standard import Division, WrappedLoader, wrapped_loaders
from lockstep.data.streams import wrap_loader
from lockstep.errors import UserError
from lockstep.strategies.agreement import require_same_names, require_same_values
from lockstep.strategies.batch_norm import synchronise
from lockstep.training.arithmetic import StepArithmetic, completes_step, scale_gradients, steps_done
from lockstep.training.module import Means, call_own_train, digest
from lockstep.training.optim import add_base
from lockstep.training.seeds import StepSeeds

log = logging.getLogger("lockstep")

# --- In-place changes to a network before training; their order matters ---

GRAPHS = 8  # per compiled part: training, evaluation, smaller last batches; torch's own limit for one part


def prepare(module: pl.LightningModule, trainer: pl.Trainer, *, sync_batchnorm: bool, compile: bool) -> None:
    """Changes the networks of a LightningModule in place, and keeps its state keys."""
    strategy = cast(PortableCheckpoint, trainer.strategy)
    if sync_batchnorm:  # before sharding, because it replaces modules
        synchronise(module, strategy.root_device.type)
    if compile:  # before sharding and DDP: their hooks stay outside the compiled graphs
        parts = strategy.blocks_of(module) or [*networks_of(module)]
        compile_in_place(parts)
        strategy.lacks_call = bool(parts)
        for part in parts:
            tell_first_call(part, partial(setattr, strategy, "lacks_call", False))
    strategy.divide(module)


class ChangedInPlace(pl.LightningModule):
    """First base class of a LightningModule that a strategy changes once its networks exist."""

    configured: bool  # whether the networks exist, perhaps with weights loaded
    change: Callable[[pl.LightningModule, pl.Trainer], object] | None
    modes: list[tuple[nn.Module, bool]]  # whether each module was training before an evaluation

    def configure_model(self) -> None:
        if self.change:
            change, self.change = self.change, None
            if not self.configured:
                super().configure_model()
            change(self, self.trainer)

    def on_validation_model_eval(self) -> None:
        self.modes = [(module, module.training) for module in self.modules()]
        super().on_validation_model_eval()

    def on_validation_model_train(self) -> None:
        """Lightning 2.6 only sets `training`, but a module's own `train` may undo work it did for the evaluation, such as a merge."""
        call_own_train(self.modes)
        for module, training in self.modes:
            module.training = training
        if is_overridden("on_validation_model_train", super(), pl.LightningModule):  # type: ignore[arg-type]
            super().on_validation_model_train()


def change_in_place(module: pl.LightningModule, change: Callable[..., object], *, configured: bool) -> None:
    add_base(module, ChangedInPlace)
    target = cast(ChangedInPlace, module)
    target.change, target.configured = change, configured


def networks_of(module: nn.Module) -> Iterator[nn.Module]:
    """The children of a LightningModule that have parameters. Members of containers are yielded one by one."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from networks_of(child)
        elif not isinstance(child, Metric) and any(True for _ in child.parameters()):
            yield child


def compile_in_place(parts: list[nn.Module]) -> None:
    """Compiles without a wrapper, which would prefix every key with `_orig_mod.`.

    Blocks of one class share torch's cache of compiled graphs, and identical blocks share graphs. The 16 blocks of
    resnet50d need more than eight graphs in training and evaluation; by default torch stops compiling after eight.
    """
    config: Any = torch.compiler.config
    config.recompile_limit = max(config.recompile_limit, GRAPHS * len(parts))
    for part in parts:
        part.compile()


# --- One form for the state of networks and optimizers under every strategy: by parameter name, with whole tensors ---
#
# Lightning saves optimizer states by index under ddp and by name under fsdp, and neither loads the other's.

ONLY_WEIGHTS = "Pass init_from=<checkpoint> to start a new run from its weights."
# Optimizer options for how this process computes a step. A checkpoint must not restore them: SGD has no fused kernel
# for shards, and a fused optimizer unscales the gradients of 16-mixed itself.
OF_THIS_PROCESS = ("fused", "foreach", "capturable", "differentiable")


def call_step(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Lightning would take a StopIteration of a user's step for the end of the epoch."""
    try:
        return step(*args, **kwargs)
    except StopIteration as e:
        raise RuntimeError("a step raised StopIteration") from e


@cache
def requires_closure(step: Callable[..., Any]) -> bool:
    """Whether this method of an optimizer cannot be called without a closure."""
    parameter = inspect.signature(step).parameters.get("closure")
    return parameter is not None and parameter.default is parameter.empty


COMPARED = 100  # micro-batches between two comparisons of what processes read; more frequent early in an epoch


class DividedBatches(Strategy):
    """Gives each process its part of the batches of any loader."""

    lightning_module: pl.LightningModule  # set before anything here is called
    seed = 0  # of the run
    arithmetic = StepArithmetic()
    seeds: StepSeeds
    lacks_call = False  # whether networks are compiled, but none was called yet
    has_updated = True  # whether an optimizer, if there is one, has had a gradient to step with
    # whether a process computes neighbouring micro-batches of a global batch; otherwise every `world size`-th
    contiguous_micro_batches = False
    means: Means
    # indices of parameters, as gradients arrived in the first backward, if DDP depends on it
    gradient_order: Sequence[int] = ()
    gathers = False  # whether the module computes with the samples of other processes
    gathered: tuple[int, slice] | None = None  # in this step: their number, and which are this process's
    lacks_update = False  # whether manual optimization has gradients for its next update; no checkpoint has them
    waited_s = 0.0  # how long training in this process has waited for loaders, augmentation and preprocessing
    training_loaders: list[WrappedLoader] | None = None  # users' loaders; None until a step needs them

    def process_dataloader(self, dataloader: object) -> object:
        trainer, loop = self.lightning_module.trainer, self.lightning_module.trainer.fit_loop
        if isinstance(dataloader, WrappedLoader):
            return dataloader
        options: dict[str, Any] = {"rank": trainer.global_rank, "world": trainer.world_size}
        if trainer.training:
            self.training_loaders = None
            epochs: Any = loop.epoch_progress.current
            options |= {
                "waited": self.wait,
                "accumulate": trainer.accumulate_grad_batches,
                "contiguous": self.contiguous_micro_batches,
                "reload_every": trainer.reload_dataloaders_every_n_epochs,  # type: ignore[attr-defined]
                "position": lambda: (epochs.processed, loop.epoch_loop.batch_progress.current.ready),
                "number": lambda loader: wrapped_loaders(trainer.train_dataloader).index(loader),
            }
        else:
            assert trainer.state.fn
            accumulate = max(1, self.arithmetic.evaluation_shares // trainer.world_size)
            part = {TrainerFn.TESTING: "test", TrainerFn.PREDICTING: "predict"}.get(trainer.state.fn, "val")
            limit = getattr(trainer, f"limit_{part}_batches")  # of the Trainer, in micro-batches
            limit = limit // accumulate if type(limit) is int else None
            options |= {"limit": limit, "accumulate": accumulate, "trains": False}
        return wrap_loader(dataloader, Division(seed=self.seed, **options))

    def wait(self, seconds: float) -> None:
        self.waited_s += seconds

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Periodically compares what the processes' loaders returned.

        The loader cannot do it, because one process may iterate it alone.
        """
        index = self.micro_batch
        compares = index & (index - 1) == 0 or index % COMPARED == 0  # 0, 1, 2, 4, 8, ... and every COMPARED
        for loader in self.loaders_of(index) if compares else ():
            if loader.batch_scope == "a share":
                loader.require_agreement(loader.batch_info[index].digest)
        self.gathered, self.means.nodes = None, {}
        self.arithmetic.before_forward(self.lightning_module, index)
        self.seeds.samples()
        result = call_step(super().training_step, *args, **kwargs)
        if self.lacks_call:
            raise UserError(
                f"compile=true has no effect: a step of {type(self.lightning_module).__name__} calls methods of its networks, not the networks "
                "themselves. Call the networks, or remove compile=true."
            )
        return result

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.evaluation_step(super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.evaluation_step(super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.evaluation_step(super().predict_step, *args, **kwargs)

    def evaluation_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.gathered = None
        self.seeds.samples()
        result = call_step(step, *args, **kwargs)
        self.seeds.step("batch end")
        return result

    @property
    def micro_batch(self) -> int:
        """The index of the current micro-batch in the epoch."""
        return self.lightning_module.trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1

    def loaders_of(self, micro_batch: int) -> list[WrappedLoader]:
        """Users' loaders that returned this micro-batch."""
        if self.training_loaders is None:
            self.training_loaders = wrapped_loaders(self.lightning_module.trainer.train_dataloader)
        return [loader for loader in self.training_loaders if micro_batch in loader.batch_info]

    def records(self, loader: int) -> list[MicroBatchInfo]:
        """Of the current micro-batch, in each loader that reports it."""
        trainer = self.lightning_module.trainer
        if trainer.training:
            return [item.batch_info[self.micro_batch] for item in self.loaders_of(self.micro_batch)]
        parts = trainer.val_dataloaders, trainer.test_dataloaders, trainer.predict_dataloaders
        chosen = wrapped_loaders(parts[trainer.testing + 2 * trainer.predicting])[loader : loader + 1]
        # the last one that was read, if nothing reads ahead
        return [max(each.batch_info.items())[1] for each in chosen if each.length and each.batch_info]

    def samples(self, loader: int) -> int | None:
        """The number of this process's samples in the current batch; None if no user's loader reports it.

        0 if the process has none and computes other samples in their place.
        """
        records = self.records(loader)
        if records and not any(record.weight for record in records):
            return 0
        return len(records[0].places) if len(records) == 1 and records[0].places is not None else None

    @property
    def places(self) -> range | None:
        """Positions in the epoch of the training micro-batch that moves to the device, before Lightning counts it."""
        return self.positions("places", self.micro_batch + 1)

    def positions(self, of: Literal["rows", "places"], micro_batch: int) -> range | None:
        """Positions of the samples in the global batch (rows) or in the epoch (places), if all loaders agree."""
        known = {getattr(loader.batch_info[micro_batch], of) for loader in self.loaders_of(micro_batch)}
        return known.pop() if len(known) == 1 else None

    def share(self) -> float:
        """The weight of the current micro-batch in the mean of a step: 1, unless users' loaders divide unevenly."""
        weights = [record.weight for record in self.records(0)]
        return sum(weights) / len(weights) if weights else 1.0  # the mean of several loaders

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Keeps means of integers exact. Lightning 2.6 rounds them, and `log(..., sync_dist=True)` divides by them."""
        is_integer = isinstance(tensor, Tensor) and not tensor.is_floating_point()
        return super().reduce(tensor.float() if is_integer else tensor, group, reduce_op)  # type: ignore[safe-super]

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Weights the loss: gradients are averaged over micro-batches that may divide the global batch unevenly."""
        self.lacks_update = not self.lightning_module.automatic_optimization
        self.has_updated |= not self.lacks_update
        if any(weight is not None for _, weight in self.means.nodes.values()):
            self.means.weigh(closure_loss)
        share = self.share()
        loss = closure_loss if share == 1 else closure_loss * share
        within_step = self.seeds.of_samples and self.lacks_update
        if not self.seeds.of_samples:
            self.seeds.samples()
        loss = self.arithmetic.to_backward(self.lightning_module, loss)
        detached = super().backward(loss, optimizer, *args, **kwargs)
        self.means.nodes = {}  # else the graph stays in memory
        if within_step:  # of manual optimization
            self.seeds.samples()
        return detached

    def post_backward(self, closure_loss: Tensor) -> None:
        """Divides the gradients of a step with several micro-batches by its weights, after the last one."""
        super().post_backward(closure_loss)
        trainer, weight = self.lightning_module.trainer, self.means.step_weight
        if weight is not None and completes_step(trainer):
            mean: Any = self.reduce(weight.clone(), reduce_op="mean")
            grads = [p.grad for p in self.lightning_module.parameters() if p.grad is not None]
            scale_gradients(grads, (trainer.accumulate_grad_batches / mean).where(mean > 0, 0.0))
            self.means.step_weight = None

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Optimizers such as LBFGS decide by the loss of their closure: give them that of all processes."""

        def loss_of_all() -> Any:
            loss = closure()
            return self.reduce(loss.detach() * self.share()) if isinstance(loss, Tensor) else loss

        reads_loss = self.lightning_module.trainer.world_size > 1 and requires_closure(type(optimizer).step)
        return super().optimizer_step(optimizer, loss_of_all if reads_loss else closure, *args, **kwargs)

    def close_loaders(self) -> None:
        trainer = self.lightning_module.trainer
        for loader in wrapped_loaders([trainer.train_dataloader, trainer.val_dataloaders, trainer.test_dataloaders]):
            loader.close()

    def teardown(self) -> None:
        self.close_loaders()
        super().teardown()


class PortableCheckpoint(DividedBatches):
    """Base of all strategies: saves and loads weights and optimizer states by name, in their saved precision."""

    omitted: frozenset[str] = frozenset()  # what checkpoints leave out
    agreed_at = 0  # the step after which the ranks were last compared
    hidden: list[Logger]  # loggers of the trainer, set before the barrier that shows them
    trained: Mapping[str, bool] = {}  # `requires_grad` of each parameter before training

    def blocks_of(self, net: nn.Module) -> list[nn.Module]:
        """The parts of a network that are computed one after the other, if the strategy handles them separately."""
        return []

    def divide(self, module: pl.LightningModule) -> None:
        """Changes the module in place: divides its networks, or their batches, among devices."""

    def device_rows(self, rows: range) -> dict[torch.device, range]:
        """Divides `rows` of the global batch, the micro-batch of this process, among the devices of this process."""
        return {self.root_device: rows}

    # Setup converts the network to the dtype of trainer.precision; loading the weights earlier would round them.
    restore_checkpoint_after_setup = True

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Raises UserError if shapes differ, or if names differ and `strict`, the module's `strict_loading`."""
        materialize(self.lightning_module, checkpoint["state_dict"])
        load_into(self.lightning_module, checkpoint["state_dict"], "the checkpoint", strict=strict)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, *args: Any, **kwargs: Any) -> None:
        self.make_loadable(checkpoint)
        self.write(checkpoint, Path(filepath))
        self.require_agreement()

    def write(self, checkpoint: dict[str, Any], path: Path) -> None:
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, path)

    def connect(self, model: pl.LightningModule) -> None:
        """Hides the loggers until the barrier before `setup`: Lightning would create a run of each on its server."""
        super().connect(model)
        self.hidden, model.trainer.loggers = model.trainer.loggers, []

    def barrier(self, name: str | None = None) -> None:
        if name == "pre_setup":
            self.lightning_module.trainer.loggers = self.hidden
        super().barrier(name)  # type: ignore[safe-super]

    def setup(self, trainer: pl.Trainer) -> None:
        self.seeds = StepSeeds(self.seed, self.arithmetic, trainer)
        if trainer.training:
            require_same_names(self.lightning_module)
            self.trained = {name: p.requires_grad for name, p in self.lightning_module.named_parameters()}
        super().setup(trainer)

    def require_agreement(self) -> None:
        """Compares the ranks' weights after a step, once. Every rank must call it."""
        step = steps_done(self.lightning_module.trainer)
        if self.lightning_module.trainer.world_size > 1 and step != self.agreed_at:
            self.agreed_at = step
            require_same_values(self.lightning_module, self.optimizers, self.root_device, step)

    def make_loadable(self, checkpoint: dict[str, Any]) -> None:
        """Leaves out what torch.load rejects with weights_only=True, and records what a hook left out.

        Every process must call it, after all hooks that write into the checkpoint.

        Raises:
            UserError: the checkpoint lacks trained weights.
        """
        trained = self.lightning_module.named_parameters()
        checkpoint["requires_grad"] = {n: p.requires_grad for n, p in trained if p.requires_grad != self.trained.get(n)}
        if "optimizer_states" in checkpoint:  # not in a checkpoint of weights only
            checkpoint["optimizer_sizes"] = [len(each.state_dict().get("state", ())) for each in self.optimizers]
        if new := {*make_plain(checkpoint)} - self.omitted:
            self.omitted |= new
            log.warning("checkpoints omit %s: only plain values are saved.", ", ".join(sorted(new)))
        self.record_unsaved(checkpoint)

    def record_unsaved(self, checkpoint: dict[str, Any]) -> None:
        """Records digests of the weights that a hook left out. Raises UserError if some of these are trained.

        If a part of the checkpoint has an unknown name and the shape of a weight, a hook has renamed this weight.
        """
        module, saved = self.lightning_module, checkpoint["state_dict"]
        named = dict(module.named_parameters(remove_duplicate=False))  # tied weights have several names
        weights = {name: x for name, x in (module.state_dict() | named).items() if isinstance(x, Tensor)}
        names = named.keys() | dict(module.named_buffers()).keys()
        parts = {key: value for key, value in checkpoint.items() if key not in POSITION}
        shapes = {x.shape for path, x in leaves(parts) if isinstance(x, Tensor) and path[-1] not in names}
        kept = {id(x) for name, x in weights.items() if name in saved or x.shape in shapes}
        # only rank 0 has whole tensors
        unsaved = self.broadcast([name for name, x in weights.items() if id(x) not in kept])
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        trained = {id(p) for group in groups for p in group["params"] if p.requires_grad}
        if lost := [name for name in unsaved if id(weights[name]) in trained]:
            raise UserError(
                f"checkpoints of {type(module).__name__} lack its trained weights {', '.join(lost)}, so a test or a resumed run would start with "
                "new ones. Keep them in `state_dict` and `on_save_checkpoint`, or remove them from the optimizer."
            )
        if unsaved:
            checkpoint["frozen"] = checkpoint.get("frozen", {}) | {name: digest(weights[name]) for name in unsaved}

    def named_groups(self, optimizer: Optimizer) -> list[dict[str, nn.Parameter]]:
        """The parameters of each of the optimizer's groups, by name. Raises UserError if one is not the module's."""
        names = {id(p): name for name, p in self.lightning_module.named_parameters()}
        if foreign := [p for group in optimizer.param_groups for p in group["params"] if id(p) not in names]:
            raise UserError(
                f"{type(optimizer).__name__} optimizes a tensor of shape {tuple(foreign[0].shape)} that is no parameter of "
                f"{type(self.lightning_module).__name__}, so no checkpoint would contain it. Make it one: self.<name> = torch.nn.Parameter(...)."
            )
        return [{names[id(p)]: p for p in group["params"]} for group in optimizer.param_groups]

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            self.watch(optimizer)

    def watch(self, optimizer: Optimizer) -> None:
        """Raises UserError if the optimizer could not be saved."""
        self.has_updated = not any(self.named_groups(optimizer))
        optimizer.register_step_pre_hook(lambda *_: self.seeds.begin_update())
        optimizer.register_step_post_hook(lambda *_: self.end_update())

    def end_update(self) -> None:
        self.lacks_update = False
        self.has_updated |= not self.lightning_module.automatic_optimization  # there, `backward` sets it
        self.seeds.end_update()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """`{"state": {name: {...}}, "param_groups": [{..., "params": names}]}`."""
        if not (state := optimizer.state_dict()):  # Lightning's mock optimizer if configure_optimizers returns None
            return {"state": {}, "param_groups": []}
        names = [list(by_name) for by_name in self.named_groups(optimizer)]
        flat = [name for group_names in names for name in group_names]
        return {
            "state": {flat[i]: values for i, values in state["state"].items()},
            "param_groups": [{**g, "params": keys} for g, keys in zip(state["param_groups"], names, strict=True)],
        }

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self.has_updated = True
        sizes = [len(saved["state"]) for saved in checkpoint["optimizer_states"]]
        if sizes != checkpoint.get("optimizer_sizes", sizes):
            raise UserError(f"the checkpoint lacks states of the optimizers. {ONLY_WEIGHTS}")
        parameters = dict(self.lightning_module.named_parameters())
        for name, p in parameters.items():  # as hooks have left it
            p.requires_grad_(checkpoint.get("requires_grad", {}).get(name, p.requires_grad))
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            if not optimizer.state_dict():
                continue
            for group in saved["param_groups"][len(optimizer.param_groups) :]:  # added by hooks
                own = {id(p) for each in optimizer.param_groups for p in each["params"]}
                if all(name in parameters and id(parameters[name]) not in own for name in group["params"]):
                    optimizer.add_param_group({"params": [parameters[name] for name in group["params"]]})
            groups = self.named_groups(optimizer)
            if [sorted(group["params"]) for group in saved["param_groups"]] != [sorted(by_name) for by_name in groups]:
                raise UserError(
                    f"the checkpoint's optimizer has different parameters than this network. {ONLY_WEIGHTS}"
                )
            optimizer.load_state_dict(by_index(optimizer, groups, saved))


def by_index(optimizer: Optimizer, groups: list[dict[str, nn.Parameter]], saved: dict[str, Any]) -> dict[str, Any]:
    """Converts an optimizer's state from names to torch's indices."""
    parameters = {name: p for by_name in groups for name, p in by_name.items()}

    def convert(name: str, key: str, value: Any) -> Any:
        """A copy of a value in the form and the memory format of its parameter.

        Without a copy, the optimizer would update the memory-mapped file, and some systems could then not replace that
        file. Fused optimizers on CPUs (torch 2.13) traverse value and parameter in memory order: in different formats
        they mix up the elements.
        """
        p = parameters[name]
        value, expected = sharded_like(value, p), () if key == "step" else p.shape
        if not isinstance(value, Tensor):
            return value
        # A fused kernel works element by element: with such a value it would read and write out of bounds.
        if "fused" in optimizer.defaults and value.shape != expected:
            has = f"has a {key} of {tuple(value.shape)} for {name} instead of {tuple(expected)}"
            raise UserError(f"the checkpoint's optimizer {has}. {ONLY_WEIGHTS}")
        if isinstance(value, DTensor) or value.shape != p.shape:  # shards are contiguous
            return value.clone()
        return torch.empty_like(p, dtype=value.dtype, device=value.device).copy_(value)

    index = {name: i for i, name in enumerate(parameters)}
    state = {
        index[name]: {key: convert(name, key, value) for key, value in saved["state"][name].items()}
        for name in parameters
        if name in saved["state"]  # plain SGD has no state
    }
    param_groups = [
        {**values, **{k: group[k] for k in OF_THIS_PROCESS if k in group}, "params": [index[n] for n in by_name]}
        for group, by_name, values in zip(optimizer.param_groups, groups, saved["param_groups"], strict=True)
    ]
    return {"state": state, "param_groups": param_groups}
