"""Tasks of a user's with weighted samples, and with losses between samples, for tests/test_losses.py."""

import torch
from torch import distributed, nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.kit.tasks import Classification


class Weighted(Classification):
    """High digits count more, and zeros not at all."""

    def weight(self, batch):
        return 0.5 * batch["target"].float()


def closeness(x_NE, target_N):
    """Samples of a class closer to each other than others are. Their order matters."""
    z_NE, place_N = F.normalize(x_NE, dim=1), torch.arange(len(target_N), device=target_N.device) / len(target_N)
    same_NN = (target_N[:, None] == target_N).float()
    near_NN = (z_NE @ z_NE.T / 0.2).log_softmax(1)
    return -(0.5 + place_N) * (same_NN * near_NN).sum(1) / same_NN.sum(1)


class Between(Classification):
    """Cross-entropy, and samples of a class closer to each other than others are; high digits count more."""

    def outputs(self, net, batch):
        logits_BK = net(batch["input"])
        return {"logits": logits_BK, "more": logits_BK.mean(1, keepdim=True)}

    def loss(self, output, batch):
        logits_NK, more_N1, target_N = map(self.gather, (output["logits"], output["more"], batch["target"]))
        return closeness(logits_NK + more_N1, target_N) + F.cross_entropy(logits_NK, target_N, reduction="none")

    def weight(self, batch):
        return 0.5 + 0.1 * batch["target"].float()

    def metric_inputs(self, output, batch):
        return output["logits"], batch["target"]

    def predictions(self, output):
        return super().predictions(output["logits"])

    def describe(self, output, batch):
        return super().describe(output["logits"], batch)


class Own(lockstep.Module):
    """With batches of 10, 10 and 4 of its own, and the loss of all samples or of this process's in each process."""

    def __init__(self, whole=True):
        super().__init__()
        self.whole, self.net = whole, nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def training_step(self, batch, batch_idx):
        x_B6, target_B = batch
        z_B4 = self.net(x_B6)
        loss_N = closeness(self.gather(z_B4) + self.gather(2 * z_B4.tanh()), self.gather(target_B))
        weight_N = 0.5 + self.gather(target_B)
        pair_N = loss_N, weight_N
        loss = self.mean(*(pair_N if self.whole else map(self.own_rows, pair_N)), log="train/loss")
        return loss + 0.1 * self.mean(z_B4.square().mean(1))

    def train_dataloader(self):
        x_N6 = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x_N6, torch.arange(24) % 3), batch_size=10, shuffle=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.5)


class Gathers(Classification):
    """Communicates by itself, and does not say so."""

    def loss(self, output, batch):
        if distributed.is_initialized() and torch.is_grad_enabled():
            output = output + 0 * torch.cat(all_gather(output)).mean()
        return super().loss(output, batch)
