"""Language modelling: the next token of a sequence."""

# B batch · T token of a sequence · V token of the vocabulary

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric

from lockstep.tasks.panel import Panel, Tokens
from lockstep.tasks.panels import ByPosition
from lockstep.tasks.task import Task, refuse_outputs


class LanguageModel(Task):
    """logits_BTV and target_BT: the tokens of `input`, shifted by one. Every token has the same weight, in any sequence.

    Tokens equal to `ignore_index` (padding) do not count.
    """

    needs = ("vocabulary", "sequence_length")
    names = "vocabulary"

    def __init__(self, *, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    def network_arguments(self) -> dict[str, Any]:
        return {
            "vocabulary_size": len(self.about["vocabulary"]),
            "sequence_length": self.about["sequence_length"],
        }

    def loss(self, output: Tensor, batch: Mapping[str, Any]) -> Tensor:
        size = max(len(self.about["vocabulary"]), *output.shape[-1:])  # vocabularies are padded for speed
        refuse_outputs(output, *batch["target"].shape, size)
        loss_BT, counts_BT = self.token_losses(output, batch)
        return loss_BT.sum(1) / counts_BT.sum(1).clamp(min=1)

    def token_losses(self, output: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """loss_BT, and which tokens count."""
        logits_NV, target_N = self.metric_inputs(output, batch)
        loss_N = F.cross_entropy(logits_NV, target_N, reduction="none", ignore_index=self.ignore_index)
        return loss_N.view(batch["target"].shape), batch["target"] != self.ignore_index

    def weight(self, batch: Mapping[str, Any]) -> Tensor:
        """The number of tokens that count, as a share of a full sequence."""
        return (batch["target"] != self.ignore_index).sum(1) / self.about["sequence_length"]

    def metrics(self) -> dict[str, Metric]:
        return {"perplexity": Perplexity(self.ignore_index), "acc": TokenAccuracy(self.ignore_index)}

    def metric_arguments(self) -> dict[str, Any]:
        return {"num_classes": len(self.about["vocabulary"]), "ignore_index": self.ignore_index}

    def metric_inputs(self, output: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """logits_NV and target_N of the tokens of all sequences."""
        return output.flatten(0, 1), batch["target"].flatten().long()

    def predictions(self, output: Tensor) -> dict[str, Sequence[Any] | Tensor]:
        """The predicted token after each sequence."""
        probability_BV = output[:, -1].float().softmax(1)
        tokens = [self.about["vocabulary"][place] for place in probability_BV.argmax(1).tolist()]
        return {"token": tokens, "probability": probability_BV.amax(1)}

    def targets(self, batch: Mapping[str, Any]) -> dict[str, Sequence[Any] | Tensor]:
        """The token after each sequence; none if it does not count."""
        names, places = self.about["vocabulary"], batch["target"][:, -1].tolist()
        return {"target": [None if place == self.ignore_index else names[place] for place in places]}

    def panels(self) -> list[tuple[str, str, tuple[str, ...]]]:
        return [
            ("Loss", "cross-entropy of a token", ("train/loss", "val/loss")),
            ("Perplexity", "exp(loss)", ("val/perplexity",)),
            ("Accuracy", "share of tokens", ("val/acc",)),
        ]

    def test_panels(self) -> dict[str, Panel]:
        return {"position": ByPosition(self.about["sequence_length"], self.token_losses)}

    def describe(self, output: Tensor, batch: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Each token that was to be predicted, with its loss."""
        losses_BT, counts_BT = self.token_losses(output, batch)
        rows = zip(batch["target"].tolist(), losses_BT.tolist(), counts_BT.tolist(), strict=True)
        words = self.about["vocabulary"]
        texts = ([(str(words[t]), loss) for t, loss, counts in zip(*row, strict=True) if counts] for row in rows)
        return [{"text": Tokens(text)} for text in texts]


class TokenMean(Metric):
    """A sum over the tokens that count, and their number."""

    full_state_update = False
    zero: int | float
    total: Tensor
    count: Tensor

    def __init__(self, ignore_index: int) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.add_state("total", torch.tensor(self.zero), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")


class Perplexity(TokenMean):
    """exp of the mean cross-entropy of all tokens.

    torchmetrics' Perplexity (1.9) takes log(softmax), which underflows to -inf for improbable tokens.
    """

    zero = 0.0

    def update(self, logits_NV: Tensor, target_N: Tensor) -> None:
        loss_N = F.cross_entropy(logits_NV, target_N, reduction="none", ignore_index=self.ignore_index)
        self.total += loss_N.sum(dtype=self.total.dtype)
        self.count += (target_N != self.ignore_index).sum()

    def compute(self) -> Tensor:
        return (self.total / self.count).exp()


class TokenAccuracy(TokenMean):
    """The share of tokens that are predicted. torchmetrics' (1.9) waits for the GPU to count the tokens without padding."""

    zero = 0
    plot_upper_bound = 1.0

    def update(self, logits_NV: Tensor, target_N: Tensor) -> None:
        counts_N = target_N != self.ignore_index
        self.total += ((logits_NV.argmax(1) == target_N) & counts_N).sum()
        self.count += counts_N.sum()

    def compute(self) -> Tensor:
        return self.total / self.count
