"""Losses and figures of next tokens against the formulas in NumPy, token by token."""

import numpy as np
import pytest
import torch
from evaluated import evaluated

from lockstep.tasks import LanguageModel

IGNORED = -100


def samples() -> tuple[np.ndarray, np.ndarray]:
    """Sequences of different lengths, padded to six tokens; one is empty."""
    random = np.random.default_rng(0)
    target_BT = random.integers(0, 5, (9, 6))
    for row, length in zip(target_BT, [6, 1, 4, 0, 6, 2, 3, 6, 5], strict=True):
        row[length:] = IGNORED
    return random.normal(size=(9, 6, 5)) * 2, target_BT


def task(**arguments) -> LanguageModel:
    made = LanguageModel(**arguments)
    made.bind({"vocabulary": list("abcde"), "sequence_length": 6})
    return made


def tokens(logits_BTV: np.ndarray, target_BT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cross-entropy of each real token, and whether it was guessed."""
    logits_NV, target_N = logits_BTV[target_BT != IGNORED], target_BT[target_BT != IGNORED]
    loss_N = np.log(np.exp(logits_NV).sum(1)) - logits_NV[np.arange(len(target_N)), target_N]
    return loss_N, logits_NV.argmax(1) == target_N


@pytest.mark.parametrize("batch", [1, 4, 9])
def test_every_real_token_weighs_the_same(batch):
    logits_BTV, target_BT = samples()
    loss_N, hit_N = tokens(logits_BTV, target_BT)
    expected = {"loss": loss_N.mean(), "perplexity": np.exp(loss_N.mean()), "acc": hit_N.mean()}
    assert evaluated(task(), logits_BTV, target_BT, batch) == pytest.approx(expected, rel=1e-6)


def test_the_perplexity_of_an_improbable_token_is_finite():
    metric = task().metrics()["perplexity"]
    metric.update(torch.tensor([[0.0, 200.0], [0.0, 0.0]]), torch.tensor([0, IGNORED]))
    metric.update(torch.tensor([[200.0, 0.0]] * 9), torch.zeros(9, dtype=torch.int64))
    assert float(metric.compute()) == pytest.approx(np.exp(20))


def test_a_prediction_is_the_token_after_the_sequence():
    logits_BTV = torch.zeros(2, 6, 5)
    logits_BTV[0, -1, 3], logits_BTV[1, -1, 0], logits_BTV[:, :-1, 1] = 9, 9, 9
    assert task().predictions(logits_BTV)["token"] == ["d", "a"]


def test_the_network_may_ask_for_the_sizes():
    assert task().network_arguments() == {"vocabulary_size": 5, "sequence_length": 6}
