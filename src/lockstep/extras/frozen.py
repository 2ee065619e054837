"""A frozen network next to those that are trained, such as a teacher or a perceptual loss."""

import hashlib
from typing import Any

import torch
from torch import Tensor, nn


class Frozen(nn.Module):
    """A network that is not trained, such as a teacher. Gradients reach its input.

    It stays in evaluation mode. Its weights get no gradients and are excluded from checkpoints, optimizers and communication between
    processes. `network` is the network itself, for its other methods. A checkpoint has a digest of the weights, as they were when
    the network was passed here.
    """

    place: Tensor

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        content = hashlib.blake2b(digest_size=16)
        for name, tensor in network.state_dict().items():
            content.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            content.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        self.frozen_digest = content.hexdigest()
        self.__dict__["held"] = network.eval().requires_grad_(False)  # not a registered submodule
        # torch moves and converts this buffer; `network` follows it
        self.register_buffer("place", torch.empty(0), persistent=False)
        self.moved = self.place.device, self.place.dtype

    @property
    def network(self) -> nn.Module:
        if self.moved != (current := (self.place.device, self.place.dtype)):
            self.moved = current
            self.__dict__["held"].to(*current)
        network: nn.Module = self.__dict__["held"]
        return network

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.network(*args, **kwargs)


frozen = Frozen  # as a project calls it
