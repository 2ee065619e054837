"""Language modelling: the next token of a sequence."""

# B batch · T token of a sequence · V token of the vocabulary

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric

from lockstep.kit.panels import Content, Lines, Panel, Tokens
from lockstep.kit.task import Targets, Task, validate_outputs


class LanguageModel(Task):
    """Takes logits_BTV and target_BT, the tokens of `input` shifted by one. Tokens have equal weight in any sequence.

    Tokens equal to `ignore_index` (padding) are ignored.
    """

    needs = ("vocabulary", "sequence_length")
    names = "vocabulary"
    target_spec = Targets("a token number for each position", dims=1, ignored=-100)
    activation = "next_token"
    titles: ClassVar = {
        "loss": ("Loss", "cross-entropy per token"),
        "perplexity": ("Perplexity", "exp(loss)"),
        "acc": ("Accuracy", "fraction of tokens"),
    }

    def __init__(self, *, ignore_index: int = -100, **given: Any) -> None:
        super().__init__(**given)
        self.ignore_index = ignore_index
        self.target_spec = self.target_spec and replace(self.target_spec, ignored=ignore_index)

    @classmethod
    def network_arguments(cls, metadata: Mapping[str, Any], **keys: Any) -> dict[str, Any]:
        return {"vocabulary_size": len(metadata["vocabulary"]), "sequence_length": metadata["sequence_length"]}

    def loss(self, output: Tensor, batch: Mapping[str, Any]) -> Tensor:
        size = max(len(self.value_names), *output.shape[-1:])  # a model's vocabulary may be padded for speed
        validate_outputs(output, *batch["target"].shape, size)
        loss_BT, counts_BT = self.token_losses(output, batch)
        return loss_BT.sum(1) / counts_BT.sum(1).clamp(min=1)

    def token_losses(self, output: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """loss_BT, and a mask of the tokens that count."""
        logits_NV, target_N = self.metric_inputs(output, batch)
        loss_N = F.cross_entropy(logits_NV, target_N, reduction="none", ignore_index=self.ignore_index)
        return loss_N.view(batch["target"].shape), batch["target"] != self.ignore_index

    def weight(self, batch: Mapping[str, Any]) -> Tensor:
        """The number of tokens that count, as a fraction of a full sequence."""
        return (batch["target"] != self.ignore_index).sum(1) / self.metadata["sequence_length"]

    def metrics(self) -> dict[str, Metric]:
        return {"perplexity": Perplexity(self.ignore_index), "acc": TokenAccuracy(self.ignore_index)}

    def metric_arguments(self) -> dict[str, Any]:
        return super().metric_arguments() | {"ignore_index": self.ignore_index}

    def metric_inputs(self, output: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """logits_NV and target_N of the tokens of all sequences."""
        return output.flatten(0, 1), batch["target"].flatten().long()

    def predictions(self, output: Tensor) -> dict[str, Sequence[Any] | Tensor]:
        """The predicted token after each sequence."""
        probability_BV = output[:, -1].float().softmax(1)
        tokens = [self.value_names[index] for index in probability_BV.argmax(1).tolist()]
        return {"token": tokens, "probability": probability_BV.amax(1)}

    def targets(self, batch: Mapping[str, Any]) -> dict[str, Sequence[Any] | Tensor]:
        """The token after each sequence; None if it is ignored."""
        names, indices = self.value_names, batch["target"][:, -1].tolist()
        return {"target": [None if index == self.ignore_index else names[index] for index in indices]}

    def test_panels(self) -> dict[str, Panel]:
        return {"position": ByPosition(self.metadata["sequence_length"], self.token_losses)}

    def describe(self, output: Tensor, batch: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Each target token, with its loss."""
        losses_BT, counts_BT = self.token_losses(output, batch)
        rows = zip(batch["target"].tolist(), losses_BT.tolist(), counts_BT.tolist(), strict=True)
        names = self.value_names
        token_lists = ([(str(names[t]), loss) for t, loss, counts in zip(*row, strict=True) if counts] for row in rows)
        return [{"text": Tokens(tokens)} for tokens in token_lists]


class ByPosition(Panel):
    """The mean loss of the tokens at each position. `losses` returns loss_BT and a mask of the tokens that count."""

    sums_2T: Tensor

    def __init__(self, length: int, losses: Callable[[Any, Mapping[str, Any]], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.losses = losses
        self.add_state("sums_2T", torch.zeros(2, length, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, output: Any, batch: Mapping[str, Any], loss_B: Tensor) -> None:
        loss_BT, counts_BT = self.losses(output, batch)
        dtype = self.sums_2T.dtype
        sums_2T = torch.stack([(loss_BT * counts_BT).sum(0, dtype=dtype), counts_BT.sum(0).to(dtype)])
        self.sums_2T[:, : sums_2T.shape[1]] += sums_2T

    def contents(self) -> Sequence[Content]:
        points = [(float(position), loss / n) for position, (loss, n) in enumerate(self.sums_2T.T.tolist(), 1) if n]
        return [Lines("Loss by position", "position in the sequence", "mean loss per token", {"loss": points})]


class TokenMean(Metric):
    """The mean over the tokens that count."""

    full_state_update = False
    zero: int | float
    total: Tensor
    count: Tensor

    def __init__(self, ignore_index: int) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.add_state("total", torch.tensor(self.zero), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def of_tokens(self, logits_NV: Tensor, target_N: Tensor) -> Tensor:
        """The values to average; 0 for ignored tokens."""
        raise NotImplementedError

    def update(self, logits_NV: Tensor, target_N: Tensor) -> None:
        self.total += self.of_tokens(logits_NV, target_N).sum(dtype=self.total.dtype)
        self.count += (target_N != self.ignore_index).sum()

    def compute(self) -> Tensor:
        return self.total / self.count


class Perplexity(TokenMean):
    """exp of the mean cross-entropy of all tokens.

    torchmetrics' Perplexity (1.9) takes log(softmax), which underflows to -inf for improbable tokens.
    """

    zero = 0.0

    def of_tokens(self, logits_NV: Tensor, target_N: Tensor) -> Tensor:
        return F.cross_entropy(logits_NV, target_N, reduction="none", ignore_index=self.ignore_index)

    def compute(self) -> Tensor:
        return super().compute().exp()


class TokenAccuracy(TokenMean):
    """The fraction of correctly predicted tokens.

    torchmetrics' accuracy (1.9) waits for the GPU to count the tokens without padding.
    """

    zero = 0
    plot_upper_bound = 1.0

    def of_tokens(self, logits_NV: Tensor, target_N: Tensor) -> Tensor:
        return (logits_NV.argmax(1) == target_N) & (target_N != self.ignore_index)
