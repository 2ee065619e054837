"""Tasks of a user's with weighted samples, and with losses between samples, for tests/test_losses.py."""

import torch
from torch import distributed
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F

from lockstep.kit.tasks import Classification


class Weighted(Classification):
    """High digits count more, and zeros not at all."""

    def weight(self, batch):
        return 0.5 * batch["target"].float()


class Between(Classification):
    """Cross-entropy, and samples of a class closer to each other than others are; high digits count more."""

    between_samples = True

    def outputs(self, net, batch):
        batch["rows"] = list(batch["index"].split(1))
        logits_BK = net(batch["input"])
        return {"logits": logits_BK, "more": (logits_BK.mean(1, keepdim=True),)}

    def loss(self, output, batch):
        assert len(batch["input"]) == len(batch["index"]) == len(output["logits"])
        if "rows" in batch and not batch["index"].is_meta:
            assert torch.equal(torch.cat(batch["rows"]), batch["index"])  # a list of tensors
        target_N, z_NK = batch["target"], F.normalize(output["logits"] + output["more"][0], dim=1)
        same_NN = (target_N[:, None] == target_N).float()
        near_NN = (z_NK @ z_NK.T / 0.2).log_softmax(1)
        apart_N = -(same_NN * near_NN).sum(1) / same_NN.sum(1)
        place_N = torch.arange(len(target_N), device=target_N.device) / len(target_N)  # the order matters
        return F.cross_entropy(output["logits"], target_N, reduction="none") + (0.5 + place_N) * apart_N

    def weight(self, batch):
        return 0.5 + 0.1 * batch["target"].float()

    def metric_inputs(self, output, batch):
        return output["logits"], batch["target"]

    def predictions(self, output):
        return super().predictions(output["logits"])

    def describe(self, output, batch):
        return super().describe(output["logits"], batch)


class Ragged(Between):
    def outputs(self, net, batch):
        return {**super().outputs(net, batch), "boxes": [torch.ones(1 + i) for i in range(len(batch["index"]))]}


class Gathers(Classification):
    """Communicates by itself, and does not say so."""

    def loss(self, output, batch):
        if distributed.is_initialized() and torch.is_grad_enabled():
            output = output + 0 * torch.cat(all_gather(output)).mean()
        return super().loss(output, batch)
