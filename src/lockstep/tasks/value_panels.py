"""Panels about numbers: targets and predictions, residuals, the loss by position of a token."""

# B batch · N sample · T target, or token of a sequence

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.tasks.panel import EXACT, Bars, Content, Lines, Panel, Points, largest

SAMPLES = 1000  # points of a scatter plot
TARGETS = 6  # targets that are drawn
HASH, MODULUS = 2654435761, 2**32  # Knuth's multiplicative hash: spreads indices evenly, and no two below 2^32 meet


class Residuals(Panel):
    """Target and prediction of a fixed sample: the same indices in every evaluation, world and order."""

    key_N: Tensor
    index_N: Tensor
    pairs_N2T: Tensor
    count: Tensor

    def __init__(self, names: Sequence[str], inputs: Callable[[Any, Mapping[str, Any]], tuple[Any, ...]]) -> None:
        super().__init__()
        self.inputs = inputs
        self.names = [str(name) for name in names]
        self.add_state("key_N", torch.full((SAMPLES,), -MODULUS), dist_reduce_fx=None)
        self.add_state("index_N", torch.full((SAMPLES,), -1), dist_reduce_fx=None)
        self.add_state("pairs_N2T", torch.zeros(SAMPLES, 2, len(self.names)), dist_reduce_fx=None)
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, output: Any, batch: Mapping[str, Any], loss_B: Tensor) -> None:
        index_B, (output, target) = batch["index"], self.inputs(output, batch)
        pairs_B2T = torch.stack([x.reshape(len(index_B), -1).float() for x in (target, output)], 1)
        self.key_N, self.index_N, self.pairs_N2T = largest(
            SAMPLES,
            torch.cat([self.key_N, -(index_B * HASH % MODULUS)]),
            torch.cat([self.index_N, index_B]),
            torch.cat([self.pairs_N2T, pairs_B2T]),
        )
        self.count += len(index_B)

    def contents(self) -> Sequence[Content]:
        key_N, index_N = self.key_N.flatten(), self.index_N.flatten()
        _, index_N, pairs_N2T = largest(SAMPLES, key_N, index_N, self.pairs_N2T.flatten(end_dim=-3))
        pairs_N2T = pairs_N2T[index_N >= 0]
        note = "" if self.count <= SAMPLES else f"A fixed sample of {SAMPLES:,} of {self.count:,}."
        return [each for place in range(min(TARGETS, len(self.names))) for each in self.of(place, pairs_N2T, note)]

    def of(self, place: int, pairs_N2T: Tensor, note: str) -> Iterator[Content]:
        name, pairs = self.names[place], pairs_N2T[:, :, place].double().cpu()
        points = [(target, guess) for target, guess in pairs.tolist()]
        yield Points(f"Predictions of {name}", "target", "prediction", points, diagonal=True, note=note)
        residual_N = pairs[:, 1] - pairs[:, 0]
        residual_N = residual_N[residual_N.isfinite()]
        if len(residual_N) > 1:
            low, high = residual_N.min().item(), residual_N.max().item()
            counts, edges = torch.histogram(residual_N, 25, range=(low, high if high > low else low + 1))
            words = "prediction - target"
            yield Bars(f"Residuals of {name}", words, "samples", edges.tolist(), counts.tolist(), note)


class ByPosition(Panel):
    """The mean loss of the tokens at each place of a sequence; `losses` gives loss_BT and which tokens count."""

    sums_2T: Tensor

    def __init__(self, length: int, losses: Callable[[Any, Mapping[str, Any]], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.losses = losses
        self.add_state("sums_2T", torch.zeros(2, length, dtype=EXACT), dist_reduce_fx="sum")

    def update(self, output: Any, batch: Mapping[str, Any], loss_B: Tensor) -> None:
        loss_BT, counts_BT = self.losses(output, batch)
        sums_2T = torch.stack([(loss_BT * counts_BT).sum(0, dtype=EXACT), counts_BT.sum(0).to(EXACT)])
        self.sums_2T[:, : sums_2T.shape[1]] += sums_2T

    def contents(self) -> Sequence[Content]:
        points = [(float(at), loss / n) for at, (loss, n) in enumerate(self.sums_2T.T.tolist(), 1) if n]
        return [Lines("Loss by position", "place in the sequence", "mean loss of a token", {"loss": points})]
