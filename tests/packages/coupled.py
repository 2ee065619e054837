"""Padded series, graphs, and ways in which the samples of a batch do or do not depend on each other, for tests/test_true_line.py."""

# B batch · C channel · T time · N node of all graphs · F feature

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from lockstep import DataSet
from lockstep.kit.task import Task

COUNT, CHANNELS, LONGEST = 96, 4, 3  # 3: the index of one of the longest


class Series:
    """Each sample has a length of its own; a batch is padded to its longest. A third of the targets is missing."""

    def __len__(self):
        return COUNT

    def one(self, index):  # lengths are 3 to 13
        numbers = np.random.default_rng(index)
        length = 3 + 7 * index % 11
        series_CT = numbers.normal(size=(CHANNELS, length)).astype(np.float32)
        return series_CT, np.float32(series_CT[0].mean())

    def __getitems__(self, indices):
        series, targets = zip(*map(self.one, indices), strict=True)
        lengths = [x.shape[1] for x in series]
        padded = np.stack([np.pad(x, ((0, 0), (0, max(lengths) - x.shape[1]))) for x in series])
        known = np.array([index % 3 > 0 for index in indices], np.float32)
        return {"input": padded, "length": np.array(lengths), "target": np.array(targets), "known": known}


class Fixed(Series):
    """All are padded to one length."""

    def __getitems__(self, indices):
        batch = super().__getitems__([*indices, LONGEST])
        return {name: value[: len(indices)] for name, value in batch.items()}


class Graphs(Series):
    """The nodes of all graphs in a row, and the graph of each."""

    def __getitems__(self, indices):
        graphs, targets = zip(*map(self.one, indices), strict=True)
        nodes = np.concatenate([x.T for x in graphs])
        graph_of = np.repeat(np.arange(len(graphs)), [x.shape[1] for x in graphs])
        return {"input": nodes, "graph": graph_of, "target": np.array(targets), "class": np.array(indices) % 3}


class Padded(DataSet):
    def __init__(self, samples="Series"):
        self.train = self.test = self.val = globals()[samples]()


class Net(nn.Module):
    """series_BCT and length_B to output_B."""

    def __init__(self, p=0.5):
        super().__init__()
        self.a, self.b, self.drop = nn.Conv1d(CHANNELS, 8, 3, padding=1), nn.Linear(8, 1), nn.Dropout(p)

    def features(self, series_BCT, there_BT):
        return torch.tanh(self.a(series_BCT)) * there_BT[:, None]

    def pooled(self, features_BCT, there_BT):
        return features_BCT.sum(2) / there_BT.sum(1, keepdim=True)

    def forward(self, series_BCT, length_B):
        there_BT = (torch.arange(series_BCT.shape[2], device=length_B.device) < length_B[:, None]).to(series_BCT.dtype)
        return self.b(self.pooled(self.features(series_BCT, there_BT), there_BT))[:, 0]


class DroppedNet(Net):
    def features(self, series_BCT, there_BT):
        return self.drop(super().features(series_BCT, there_BT))


class FunctionalNet(Net):
    def features(self, series_BCT, there_BT):
        return F.dropout(super().features(series_BCT, there_BT), 0.5, self.training)


class PooledNet(Net):
    def pooled(self, features_BCT, there_BT):
        return features_BCT.mean(2)


class NormedNet(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def pooled(self, features_BCT, there_BT):
        return self.norm(super().pooled(features_BCT, there_BT))


class AttentiveNet(Net):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

    def features(self, series_BCT, there_BT):
        tokens_BTC = super().features(series_BCT, there_BT).mT
        return (
            self.attention(tokens_BTC, tokens_BTC, tokens_BTC, key_padding_mask=there_BT == 0)[0].mT * there_BT[:, None]
        )


class CenteredNet(Net):
    """Subtracts a running mean."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(8))

    def pooled(self, features_BCT, there_BT):
        pooled_BC = super().pooled(features_BCT, there_BT)
        centered_BC = pooled_BC - self.center
        if self.training:
            self.center.lerp_(pooled_BC.detach().mean(0), 0.5)
        return centered_BC


class MaskedNet(Net):
    """A masked autoencoder hides inputs at random, in evaluations too."""

    def features(self, series_BCT, there_BT):
        return Net.features(self, series_BCT * (torch.rand_like(series_BCT) > 0.5), there_BT)


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(CHANNELS, 8), nn.Linear(8, 1)

    def forward(self, node_NF, graph_N):
        node_NF, count = torch.tanh(self.a(node_NF)), int(graph_N.max()) + 1
        sums = node_NF.new_zeros(count, 8).index_add(0, graph_N, node_NF)
        return self.b(sums / torch.bincount(graph_N)[:, None])[:, 0]


class Fit(Task):
    def outputs(self, net, batch):
        return net(batch["input"], batch["length"])

    def loss(self, output, batch):
        return (output - batch["target"]).square()


class OfKnown(Fit):
    """The mean over the known targets of a batch, instead of a weight for each sample."""

    def loss(self, output, batch):
        return super().loss(output, batch) * batch["known"] / batch["known"].mean()


class Weighted(Fit):
    def weight(self, batch):
        return batch["known"]


class Compared(Fit):
    def loss(self, output, batch):
        apart_BB = output[:, None] - output
        return (apart_BB - (batch["target"][:, None] - batch["target"])).square().mean(1)


class Announced(Compared):
    def loss(self, output, batch):
        self.gather(batch["input"].flatten(2))  # padded to the longest of each process
        return super().loss(self.gather(output), {"target": self.gather(batch["target"])})


class OfGraphs(Fit):
    def outputs(self, net, batch):
        return net(batch["input"], batch["graph"])


# --- tasks with a training step of their own ---


class Smooth(Fit):
    """A gradient penalty with one number for each sample."""

    def training_step(self, batch, batch_idx):
        series_BCT = batch["input"].requires_grad_()
        output_B = self({**batch, "input": series_BCT})
        (slope_BCT,) = torch.autograd.grad(output_B.sum(), series_BCT, create_graph=True)
        return self.mean_loss(output_B, batch) + 0.1 * self.mean(slope_BCT.square().sum((1, 2)), log="train/penalty")


class SmoothOverall(Fit):
    """The norm of the gradient of the mean loss, which depends on the number of samples."""

    def training_step(self, batch, batch_idx):
        series_BCT = batch["input"].requires_grad_()
        loss = self.mean_loss(self({**batch, "input": series_BCT}), batch)
        (slope_BCT,) = torch.autograd.grad(loss, series_BCT, create_graph=True)
        return loss + slope_BCT.norm()


class Spread(Fit):
    def training_step(self, batch, batch_idx):
        output_B = self(batch)
        return {"loss": self.mean_loss(output_B, batch) - 0.1 * output_B.std()}
