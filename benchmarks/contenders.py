"""The contenders of benchmark.py: Lockstep, its network in a bare loop, a plain and a tuned loop, Lightning, Accelerate, and transformers' Trainer.

python benchmarks/contenders.py <plain | plain_our_net | tuned | lightning | accelerate | transformers | lockstep | lockstep_plain_net |
bare_loop> [key=value ...]

Each contender is a process that trains on request and waits otherwise. All take the options of train.py. Each line on standard input is a
number of optimizer steps; the answer is a line of JSON with their time and memory. 0 means the rest of the training and an evaluation.
The end of the input ends the process.

The bare loop trains Lockstep's network with its optimizer and precision on one batch. The peers read images one by one, as
torchvision's data sets do, and train in fp32 without Lockstep's other features: no logging, no saving, no clipping. The tuned loop trains
the peers' network as an expert would: images in memory as bytes, bf16, channels_last and a fused optimizer. With several processes, the
peers use DistributedDataParallel.
"""

# B batch · C channel · H W pixel · K class

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import IO, Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from measuring import ready, start_job
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision import transforms

from lockstep import build
from lockstep.config.checks import resolve
from lockstep.config.instantiate import create_data
from lockstep.config.settings import Settings
from lockstep.data.sampler import Split, val_count
from lockstep.kit.datamodule import DataModule
from lockstep.training.arithmetic import completes_step
from project.model import BasicNet

END = -1


class Turns:
    """Pauses a training loop between two optimizer steps until it is this contender's turn. Only rank 0 communicates."""

    def __init__(self, answers: IO[str]) -> None:
        self.answers = answers
        self.rank, self.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.metadata: dict[str, Any] = {}  # part of every answer
        self.waited_s: float | None = 0.0  # for data, since the process started; None if unknown
        self.group: Any = None
        self.left = self.images = 0
        self.began_s = self.waited_before_s = 0.0

    def begin(self) -> None:
        """Called before the first step, when everything is ready."""
        self.answer()
        self.wait()

    def stepped(self, images: int) -> None:
        """Called after each optimizer step with the images of this process."""
        self.images += images * self.world
        self.left -= 1
        if self.left == 0:
            synchronise()
            seconds = time.perf_counter() - self.began_s
            waited_s = None if self.waited_s is None else self.waited_s - self.waited_before_s
            self.answer(images=self.images, seconds=seconds, waited_s=waited_s, **peaks())
            self.wait()

    def timed(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yields `batches`, and counts the time until each arrives as waiting."""
        began_s = time.perf_counter()
        for batch in batches:
            self.waited_s = (self.waited_s or 0.0) + time.perf_counter() - began_s
            yield batch
            began_s = time.perf_counter()

    def wait(self) -> None:
        steps = self.granted()
        if steps == END:
            os._exit(0)  # a library's loop would treat an exception as its own failure
        self.left, self.images, self.waited_before_s = steps, 0, self.waited_s or 0.0
        synchronise()
        self.began_s = time.perf_counter()

    def granted(self) -> int:
        steps = int(sys.stdin.readline() or END) if self.rank == 0 else END
        if self.world == 1:
            return steps
        # gloo, because a process that waits in an NCCL collective keeps its GPU and a core busy during the other contenders' turns.
        self.group = self.group or dist.new_group(backend="gloo", timeout=timedelta(hours=6))
        shared = torch.tensor(steps)
        dist.broadcast(shared, 0, group=self.group)
        return int(shared)

    def answer(self, **figures: Any) -> None:
        if self.rank == 0:
            print(json.dumps({**self.metadata, **figures}), file=self.answers, flush=True)


def on_gpu() -> bool:
    return torch.cuda.is_available()  # benchmark.py hides the GPUs from contenders that must not use them


def synchronise() -> None:
    if on_gpu():
        torch.cuda.synchronize()


def peaks() -> dict[str, int | None]:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"peak_bytes": peak, "peak_device_bytes": torch.cuda.max_memory_allocated() if on_gpu() else None}


class ByTurns(pl.Callback):
    """Must be the last callback, so that the work of the other callbacks counts as part of the step."""

    def __init__(self, turns: Turns, data: DataModule) -> None:
        self.turns = turns

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.turns.begin()

    def on_train_batch_end(self, trainer: pl.Trainer, _: Any, outputs: Any, batch: Any, *__: Any) -> None:
        self.turns.waited_s = trainer.strategy.waited_s  # type: ignore[attr-defined]
        if completes_step(trainer):
            self.turns.stepped(len(batch["index"]) * trainer.accumulate_grad_batches)


class BareLoop(pl.Callback):
    """Takes over when training would start: by then, everything is on its device and in its memory format."""

    def __init__(self, turns: Turns, data: DataModule) -> None:
        self.turns = turns

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loader: Any = trainer.train_dataloader
        batch = trainer.precision_plugin.convert_input(next(iter(loader)))
        batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)  # as the network receives it
        image_BCHW, label_B = batch["input"], batch["target"]
        net, (optimizer,) = pl_module.net, trainer.optimizers
        assert isinstance(net, torch.nn.Module) and net.training

        self.turns.waited_s = None
        self.turns.begin()
        while True:  # until the input ends
            with trainer.precision_plugin.train_step_context():
                loss = F.cross_entropy(net(image_BCHW), label_B)
            # here, as Lightning does: after the step, the freed memory went back to the system (5,250 page faults a step, 0.8 times the speed)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            self.turns.stepped(len(label_B))


def fit(turns: Turns, overrides: list[str], callback: type[ByTurns | BareLoop], net: nn.Module | None = None) -> None:
    """Trains and tests like train.py, without the report; `net` replaces the config's network."""

    def job(settings: Settings, data: Any) -> None:
        loaders, trainer = ready(settings, data, net)
        trainer.callbacks.append(callback(turns, loaders.data))
        turns.metadata["precision"] = str(trainer.precision)
        trainer.fit(loaders.module, datamodule=loaders.data)
        turns.answer(accuracy=build.evaluate(settings, build.module, loaders.data, loaders.module)["test/acc"])

    start_job(job, overrides)


Statistics = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation of each channel
MNIST: Statistics = ((0.1307,), (0.3081,))
IMAGENET: Statistics = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def basic_net() -> nn.Module:
    """The network of pytorch/examples, mnist/main.py."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten(),
        nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10), nn.LogSoftmax(1),
    )  # fmt: skip


class Images(Dataset[tuple[Tensor, int]]):
    """Like torchvision's MNIST and CIFAR10, in memory: each image becomes a PIL image and passes through the transform."""

    def __init__(self, image_NCHW: NDArray[np.uint8], label_N: NDArray[np.uint8], transform: Callable) -> None:
        image_NHWC = np.ascontiguousarray(image_NCHW.transpose(0, 2, 3, 1))
        self.images = image_NHWC[..., 0] if image_NHWC.shape[-1] == 1 else image_NHWC
        self.labels, self.transform = label_N, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.images[index])), int(self.labels[index])


class Work:
    """What all peers share: data, network, loss and accuracy, from Lockstep's options. They train without Lockstep's code."""

    def __init__(self, overrides: list[str], net: nn.Module | None = None) -> None:
        torch.manual_seed(0)
        cfg = resolve(overrides)
        assert cfg.loader and cfg.trainer.max_epochs
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = bool(cfg.tf32)
        self.epochs, self.batch, self.lr = cfg.trainer.max_epochs, cfg.loader.batch_size, float(cfg.optim.get("lr"))
        data = create_data(cfg.data, cfg.loader)
        data.prepare()
        total = len(data.train)
        val = val_count(total, cfg.loader.val_fraction)
        train = data.train[Split(total, val, total - val).indices(np.arange(total - val))]
        mnist = data.name == "mnist"
        self.mean, self.std = MNIST if mnist else IMAGENET
        self.image_size = cfg.data.get("image_size")
        steps = [transforms.ToTensor(), transforms.Normalize(self.mean, self.std)]
        resized = [] if mnist else [transforms.Resize((self.image_size,) * 2)]
        transform = transforms.Compose([*resized, *steps])
        self.image_NCHW, self.label_N = torch.from_numpy(train["input"]), torch.from_numpy(train["target"]).long()
        self.train = Images(train["input"], train["target"], transform)
        self.test = Images(data.test.arrays["input"], data.test.arrays["target"], transform)
        if net is None and not mnist:
            import timm  # imported only if needed, because memory is measured

            net = timm.create_model(cfg.model.get("name"), num_classes=10)
        self.net: nn.Module = net or basic_net()
        self.loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy if net else F.nll_loss

    def optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(net.parameters(), lr=self.lr)

    def accuracy(self) -> float:
        self.net.eval()
        device = next(self.net.parameters()).device
        right = 0
        with torch.no_grad():
            for image_BCHW, label_B in DataLoader(self.test, batch_size=1000):
                right += int((self.net(image_BCHW.to(device)).argmax(1) == label_B.to(device)).sum())
        return right / len(self.test)


def local_device() -> torch.device:
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu() else torch.device("cpu")
    if on_gpu():
        torch.cuda.set_device(device)
    return device


def loop(turns: Turns, work: Work, net: nn.Module, optimizer: Any, loader: Any, backward: Callable) -> None:
    device = next(net.parameters()).device
    turns.begin()
    for epoch in range(work.epochs):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        for image_BCHW, label_B in turns.timed(loader):
            optimizer.zero_grad()
            backward(work.loss(net(image_BCHW.to(device)), label_B.to(device)))
            optimizer.step()
            turns.stepped(len(label_B))
    turns.answer(accuracy=work.accuracy())


def plain(turns: Turns, overrides: list[str], network: nn.Module | None = None) -> None:
    work, device = Work(overrides, network), local_device()
    net = work.net.to(device)
    sampler: DistributedSampler[Any] | None = None
    if turns.world > 1:
        dist.init_process_group("nccl" if on_gpu() else "gloo")
        net = DistributedDataParallel(net, device_ids=[device] if on_gpu() else None)
        sampler = DistributedSampler(work.train)
    loader = DataLoader(work.train, batch_size=work.batch // turns.world, shuffle=sampler is None, sampler=sampler)
    loop(turns, work, net, work.optimizer(net), loader, Tensor.backward)


def tuned(turns: Turns, overrides: list[str]) -> None:
    work, device = Work(overrides), local_device()
    net = work.net.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    if turns.world > 1:
        dist.init_process_group("nccl" if on_gpu() else "gloo")
        net = DistributedDataParallel(net, device_ids=[device] if on_gpu() else None, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=work.lr, fused=True)
    image_NCHW, label_N = work.image_NCHW.to(device), work.label_N.to(device)
    mean_C11, std_C11 = (255 * torch.tensor(values, device=device).view(-1, 1, 1) for values in (work.mean, work.std))
    size, turns.waited_s, turns.metadata["precision"] = work.image_size, 0.0, "bf16"
    turns.begin()
    for epoch in range(work.epochs):
        order_N = torch.randperm(len(label_N), generator=torch.Generator().manual_seed(epoch))
        for batch_B in order_N.split(work.batch):
            rows_B = batch_B[turns.rank :: turns.world].to(device)
            image_BCHW = image_NCHW[rows_B].float()
            if image_BCHW.shape[-1] != size:
                image_BCHW = F.interpolate(image_BCHW, (size, size), mode="bilinear", antialias=True)
            image_BCHW = image_BCHW.sub_(mean_C11).div_(std_C11).contiguous(memory_format=torch.channels_last)
            with torch.autocast(device.type, torch.bfloat16):
                loss = work.loss(net(image_BCHW), label_N[rows_B])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            turns.stepped(len(rows_B))
    turns.answer(accuracy=work.accuracy())


def lightning(turns: Turns, overrides: list[str]) -> None:
    work = Work(overrides)

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = work.net

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            image_BCHW, label_B = batch
            return work.loss(self.net(image_BCHW), label_B)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return work.optimizer(self.net)

        def on_train_start(self) -> None:
            turns.begin()

        def on_train_batch_end(self, outputs: Any, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            turns.stepped(len(batch[1]))

    trainer = pl.Trainer(
        accelerator="cuda" if on_gpu() else "cpu", devices=turns.world, strategy="ddp" if turns.world > 1 else "auto", max_epochs=work.epochs,
        barebones=True,
    )  # fmt: skip
    turns.waited_s = None
    trainer.fit(Classifier(), DataLoader(work.train, batch_size=work.batch // turns.world, shuffle=True))
    turns.answer(accuracy=work.accuracy())


def accelerate(turns: Turns, overrides: list[str]) -> None:
    from accelerate import Accelerator

    work, accelerator = Work(overrides), Accelerator(cpu=not on_gpu())
    assert accelerator.num_processes == turns.world
    loader = DataLoader(work.train, batch_size=work.batch // turns.world, shuffle=True)
    net, optimizer, loader = accelerator.prepare(work.net, work.optimizer(work.net), loader)
    loop(turns, work, net, optimizer, loader, accelerator.backward)


def collate(samples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    images, labels = zip(*samples, strict=True)
    return {"image": torch.stack(images), "label": torch.tensor(labels)}


def transformers(turns: Turns, overrides: list[str]) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    work = Work(overrides)
    images = 0

    class ByTurns(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            turns.begin()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            turns.stepped(images)

    class Classifier(Trainer):
        def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
            nonlocal images
            images = len(inputs["label"])
            return work.loss(model(inputs["image"]), inputs["label"])

        def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
            return super().get_batch_samples(turns.timed(epoch_iterator), *args, **kwargs)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=work.batch // turns.world, num_train_epochs=work.epochs,
            learning_rate=work.lr, weight_decay=0.01, lr_scheduler_type="constant", max_grad_norm=0, use_cpu=not on_gpu(),
            ddp_backend=None if turns.world == 1 else "nccl" if on_gpu() else "gloo", dataloader_num_workers=0,
            remove_unused_columns=False, save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True,
        )  # fmt: skip
        assert arguments.world_size == turns.world
        Classifier(work.net, arguments, collate, work.train, callbacks=[ByTurns()]).train()
    turns.answer(accuracy=work.accuracy())


CONTENDERS: dict[str, Callable[[Turns, list[str]], None]] = {
    "plain": plain,
    # measures Lockstep's network in a plain loop: it has cheap random numbers for dropout, and ReLU after the pool
    "plain_our_net": lambda turns, overrides: plain(turns, overrides, BasicNet()),
    "tuned": tuned,
    "lightning": lightning,
    "accelerate": accelerate,
    "transformers": transformers,
    "lockstep": lambda turns, overrides: fit(turns, overrides, ByTurns),
    # measures the engine with the plain loop's network: cross-entropy of log-probabilities is the negative log-likelihood
    "lockstep_plain_net": lambda turns, overrides: fit(turns, overrides, ByTurns, basic_net()),
    "bare_loop": lambda turns, overrides: fit(turns, overrides, BareLoop),
}


def main() -> None:
    kind, *overrides = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    CONTENDERS[kind](Turns(answers), overrides)


if __name__ == "__main__":
    main()
