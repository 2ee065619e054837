"""A GPU of FakeTensorMode: tensors with a device, shapes and types but no values. It tells where a program would wait for the GPU."""

import functools
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep import build_trainer

DEVICE = torch.device("cuda", 0)


class FakeGpu(CPUAccelerator):
    """Lightning's view of it."""

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [DEVICE]

    def setup_device(self, device: torch.device) -> None:
        pass


class OneMode(FakeTensorMode):
    """A copied tensor keeps it. torch (2.13) copies the mode, with weak references to storages that both then free: the heap breaks later."""

    def __deepcopy__(self, memo: object) -> "OneMode":
        return self


class Waits(TorchDispatchMode):
    """Where the CPU waited for the GPU while `on`: it read a value or a shape, or copied without `non_blocking`."""

    def __init__(self) -> None:
        super().__init__()
        self.on, self.places = False, []

    def note(self, function: Any) -> None:
        frames = [f for f in traceback.extract_stack() if f.filename != __file__ and "/torch/" not in f.filename]
        if self.on:
            self.places.append(f"{function} at {frames[-1].filename}:{frames[-1].lineno}")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, kwargs = function.__name__, kwargs or {}
        first = args[0] if args else None
        if name.startswith("_local_scalar_dense") and isinstance(first, FakeTensor):
            if first.device == DEVICE:
                self.note(name)
            return 1.0 if first.is_floating_point() else 1
        try:
            result = function(*args, **kwargs)
        except DynamicOutputShapeException:
            self.note(name)
            raise
        if name.startswith(("_to_copy", "copy_")):
            source = args[1] if name.startswith("copy_") else first
            asynchronous = kwargs.get("non_blocking", False) or (name.startswith("copy_") and args[2:3] == (True,))
            if source.device != result.device and not asynchronous:
                self.note(name)
        return result


def numpy(self: Tensor) -> Any:
    """Fake tensors have no values; on the host, zeros do."""
    assert self.device.type == "cpu", "an array of a tensor on the GPU"
    return np.zeros(tuple(self.shape), str(self.dtype).removeprefix("torch."))


def apply(self: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
    """nn.Module's swaps the tensors of parameters, which fake ones cannot."""
    for child in self.children():
        child._apply(function)
    with torch.no_grad():
        for name, p in self._parameters.items():
            self._parameters[name] = None if p is None else nn.Parameter(function(p), p.requires_grad)
    for name, b in self._buffers.items():
        if b is not None:
            b.constant = None  # of torch.tensor(0), whose copy to the GPU would be a real one
            self._buffers[name] = function(b)
    return self


@contextmanager
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Waits]:
    """Within it every tensor is fake, and Lockstep's Trainer has the GPU. Autograd needs a driver: gradients come without it."""

    original = build_trainer.pl.Trainer

    @functools.wraps(original)
    def trainer(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **{**kwargs, "accelerator": FakeGpu(), "devices": 1})
        made.strategy.parallel_devices = [DEVICE]
        monkeypatch.setattr(Tensor, "backward", lambda *_: give_gradients(made.lightning_module))
        return made

    def give_gradients(module: nn.Module) -> None:
        for p in module.parameters():
            p.grad = torch.ones_like(p)

    monkeypatch.setattr(build_trainer.pl, "Trainer", trainer)
    monkeypatch.setattr(nn.Module, "_apply", apply)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(FakeTensor, "numpy", numpy, raising=False)
    # torch's sets a storage
    monkeypatch.setattr(FakeTensor, "__deepcopy__", lambda self, _: self.clone(), raising=False)
    monkeypatch.setattr("lockstep.data.keyed.generators_in", lambda *_: [])  # their states have no bytes
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    waits = Waits()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.note("synchronize"))
    with OneMode(allow_non_fake_inputs=True), waits:
        yield waits
