"""What Lockstep is compared with: a plain loop as tutorials write it, the same through Accelerate, and transformers' Trainer.

All three read images one by one, as torchvision's data sets give them, in fp32, and do nothing that the other two do not:
no logging, no saving, no clipping. Under several processes they use DistributedDataParallel.
"""

# B batch · C channel · H W pixel · K class

import os
import tempfile
from collections.abc import Callable, Sized
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from benchmark_turns import Turns, on_gpu
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision import transforms

from lockstep.config.compose import compose_config
from lockstep.config.instantiate import create_data
from lockstep.data.sampler import Split, val_count

MNIST = ((0.1307,), (0.3081,))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class BasicNet(nn.Module):
    """pytorch/examples, mnist/main.py."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        x = self.fc2(self.dropout2(x))
        return F.log_softmax(x, dim=1)


class Images(Dataset[tuple[Tensor, int]]):
    """In memory, as torchvision's MNIST and CIFAR10: each image becomes a PIL image and goes through the transform."""

    def __init__(self, image_NCHW: NDArray[np.uint8], label_N: NDArray[np.uint8], transform: Callable) -> None:
        image_NHWC = np.ascontiguousarray(image_NCHW.transpose(0, 2, 3, 1))
        self.images = image_NHWC[..., 0] if image_NHWC.shape[-1] == 1 else image_NHWC
        self.labels, self.transform = label_N, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.images[index])), int(self.labels[index])


class Work:
    """The same for all peers: data, network, loss and figures from Lockstep's options; no code of Lockstep's trains."""

    def __init__(self, overrides: list[str], net: nn.Module | None = None) -> None:
        torch.manual_seed(0)
        cfg = compose_config("train", overrides)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = bool(cfg.tf32)
        self.epochs, self.batch, self.lr = int(cfg.trainer.max_epochs), int(cfg.data.batch_size), float(cfg.optim.lr)
        data = create_data(cfg)
        data.prepare()
        total = len(data.train)
        val = val_count(total, cfg.data.val_fraction)
        train = data.train[Split(total, val, total - val).indices(np.arange(total - val))]
        mnist = data.name == "mnist"
        transform = transforms.Compose(
            [
                *([] if mnist else [transforms.Resize((cfg.data.image_size, cfg.data.image_size))]),
                transforms.ToTensor(),
                transforms.Normalize(*(MNIST if mnist else IMAGENET)),
            ]
        )
        self.train = Images(train["input"], train["target"], transform)
        self.test = Images(data.test.arrays["input"], data.test.arrays["target"], transform)
        self.net: nn.Module = net or (BasicNet() if mnist else timm_net(cfg.model.name))
        self.loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy if net or not mnist else F.nll_loss

    def optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(net.parameters(), lr=self.lr)

    def accuracy(self) -> float:
        self.net.eval()
        device = next(self.net.parameters()).device
        right = 0
        with torch.no_grad():
            for image_BCHW, label_B in DataLoader(self.test, batch_size=1000):
                right += int((self.net(image_BCHW.to(device)).argmax(1) == label_B.to(device)).sum())
        return right / sized(self.test)


def sized(data: Sized) -> int:
    return len(data)


def timm_net(name: str) -> nn.Module:
    import timm

    net: nn.Module = timm.create_model(name, num_classes=10)
    return net


def local_device() -> torch.device:
    if not on_gpu():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def plain(turns: Turns, overrides: list[str], network: nn.Module | None = None) -> None:
    work, device = Work(overrides, network), local_device()
    net = work.net.to(device)
    sampler: DistributedSampler[Any] | None = None
    if turns.world > 1:
        dist.init_process_group("nccl" if on_gpu() else "gloo")
        net = DistributedDataParallel(net, device_ids=[device] if on_gpu() else None)
        sampler = DistributedSampler(work.train)
    loader = DataLoader(work.train, batch_size=work.batch // turns.world, shuffle=sampler is None, sampler=sampler)
    optimizer = work.optimizer(net)
    turns.begin()
    for epoch in range(work.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for image_BCHW, label_B in turns.timed(loader):
            optimizer.zero_grad()
            loss = work.loss(net(image_BCHW.to(device)), label_B.to(device))
            loss.backward()
            optimizer.step()
            turns.stepped(len(label_B))
    turns.finish(work.accuracy())


def plain_our_net(turns: Turns, overrides: list[str]) -> None:
    """What Lockstep's network gives a plain loop: cheap random numbers for dropout, and ReLU after the pool."""
    from lockstep.models import BasicNet

    plain(turns, overrides, BasicNet())


def accelerate(turns: Turns, overrides: list[str]) -> None:
    from accelerate import Accelerator

    work, accelerator = Work(overrides), Accelerator(cpu=not on_gpu())
    assert accelerator.num_processes == turns.world
    loader = DataLoader(work.train, batch_size=work.batch // turns.world, shuffle=True)
    net, optimizer, loader = accelerator.prepare(work.net, work.optimizer(work.net), loader)
    turns.begin()
    for _ in range(work.epochs):
        for image_BCHW, label_B in turns.timed(loader):
            optimizer.zero_grad()
            loss = work.loss(net(image_BCHW), label_B)
            accelerator.backward(loss)
            optimizer.step()
            turns.stepped(len(label_B))
    turns.finish(work.accuracy())


def collate(samples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    return {
        "image": torch.stack([image for image, _ in samples]),
        "label": torch.tensor([label for _, label in samples]),
    }


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
    turns.finish(work.accuracy())
