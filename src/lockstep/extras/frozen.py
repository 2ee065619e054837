"""A network that is not trained, beside those that are: a teacher, a perceptual loss."""

import hashlib
from typing import Any

import torch
from torch import Tensor, nn


class Frozen(nn.Module):
    """A network beside those that are trained, such as a teacher: in evaluation mode, without gradients of its weights, left out of
    checkpoints, optimizers and what processes exchange. Gradients reach its input. `network` is the network, for its other methods.

    A checkpoint has a digest of the weights, which are those that the network has when it is passed here.
    """

    place: Tensor

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        content = hashlib.blake2b(digest_size=16)
        for name, tensor in network.state_dict().items():
            content.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            content.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        self.frozen_digest = content.hexdigest()
        self.__dict__["held"] = network.eval().requires_grad_(False)  # no child
        self.register_buffer("place", torch.empty(0), persistent=False)  # moved and converted in its stead
        self.moved = self.place.device, self.place.dtype

    @property
    def network(self) -> nn.Module:
        if self.moved != (now := (self.place.device, self.place.dtype)):
            self.moved = now
            self.__dict__["held"].to(*now)
        network: nn.Module = self.__dict__["held"]
        return network

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.network(*args, **kwargs)
