"""More ways in which the samples of a batch depend on each other, or only seem to, for benchmarks/check_truth.py."""

# B batch · C channel · T time · U different lengths · E expert

import coupled
import numpy as np
import torch
from coupled import Net, Weighted  # noqa: F401
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence


class Rare(coupled.Series):
    """Few targets are known, so batches of a process may have none."""

    def __getitems__(self, indices):
        return {**super().__getitems__(indices), "known": np.float32(np.array(indices) % 8 == 1)}


class Padded(coupled.Padded):
    def __init__(self, samples="Series"):
        self.train = self.test = self.val = {**vars(coupled), **globals()}[samples]()


class Fit(coupled.Fit):
    pass


# --- They depend on each other ---


class Hardest(Fit):
    """The half of a batch with the largest losses."""

    def loss(self, output, batch):
        loss_B = super().loss(output, batch)
        return loss_B * (loss_B >= loss_B.median())


class Clipped(Fit):
    def loss(self, output, batch):
        loss_B = super().loss(output, batch)
        return loss_B.clamp(max=loss_B.detach().quantile(0.8))


class ByFrequency(Fit):
    """Weights of classes from their frequencies in a batch."""

    def loss(self, output, batch):
        long_B = (batch["length"] > 8).long()
        return super().loss(output, batch) / torch.bincount(long_B, minlength=2).clamp(min=1)[long_B]


class BySize(Fit):
    def loss(self, output, batch):
        return super().loss(output, batch) * len(output) ** 0.5


class Balanced(Fit):
    """A loss that balances experts."""

    def outputs(self, net, batch):
        output_B, gate_BE = net(batch["input"], batch["length"])
        chosen_BE = F.one_hot(gate_BE.argmax(1), 4).to(gate_BE.dtype)
        balance = (gate_BE.mean(0) * chosen_BE.mean(0)).sum()
        return torch.stack([output_B, balance.expand_as(output_B)], 1)

    def loss(self, output, batch):
        return super().loss(output[:, 0], batch) + output[:, 1]


class Reversed(torch.autograd.Function):
    """Reverses gradients, scaled by a statistic of the batch."""

    @staticmethod
    def forward(ctx, x_BC):
        ctx.save_for_backward(x_BC)
        return x_BC.view_as(x_BC)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient * ctx.saved_tensors[0].abs().mean()


class ReversedNet(Net):
    def pooled(self, features_BCT, there_BT):
        return Reversed.apply(super().pooled(features_BCT, there_BT))


class ZeroHeadNet(ReversedNet):
    """No gradient passes its head in the first step."""

    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.b.weight)


class ZeroBranchNet(Net):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(8))

    def pooled(self, features_BCT, there_BT):
        pooled_BC = super().pooled(features_BCT, there_BT)
        return pooled_BC + self.gain * pooled_BC.mean(0)


class ZeroProductNet(Net):
    """What two zeros multiply has no gradient in the first step; weight noise or decay of the first brings it in."""

    def __init__(self):
        super().__init__()
        self.gate, self.gain = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))

    def pooled(self, features_BCT, there_BT):
        pooled_BC = super().pooled(features_BCT, there_BT)
        return pooled_BC + self.gate + self.gain * self.gate * pooled_BC.mean(0)


class WeakNet(Net):
    def pooled(self, features_BCT, there_BT):
        pooled_BC = super().pooled(features_BCT, there_BT)
        return pooled_BC + 1e-3 * pooled_BC.mean(0)


class TensorHookNet(Net):
    """Normalises a gradient of the batch."""

    def pooled(self, features_BCT, there_BT):
        pooled_BC = super().pooled(features_BCT, there_BT)
        if pooled_BC.requires_grad:
            pooled_BC.register_hook(lambda gradient: gradient / gradient.norm())
        return pooled_BC


class ParameterHookNet(Net):
    """Clips gradients by a hook of each parameter, before they are averaged over processes."""

    def __init__(self):
        super().__init__()
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


class QueueNet(Net):
    """Keeps the features of earlier batches in a list."""

    def __init__(self):
        super().__init__()
        self.queue = []

    def pooled(self, features_BCT, there_BT):
        pooled_BC = super().pooled(features_BCT, there_BT)
        center_C = torch.cat(self.queue).mean(0) if self.queue else 0
        if self.training:
            self.queue = [*self.queue[-1:], pooled_BC.detach()]
        return pooled_BC - center_C


class LateNet(Net):
    """Its samples depend on each other from the second step on."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def pooled(self, features_BCT, there_BT):
        pooled_BC = super().pooled(features_BCT, there_BT)
        self.calls += self.training
        return pooled_BC - pooled_BC.mean(0) if self.calls > 1 else pooled_BC


class RunningInstanceNet(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm1d(8, track_running_stats=True)

    def features(self, series_BCT, there_BT):
        return self.norm(super().features(series_BCT, there_BT))


class CapacityNet(Net):
    """Experts drop the samples beyond their capacity."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 2), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def pooled(self, features_BCT, there_BT):
        pooled_BC = super().pooled(features_BCT, there_BT)
        gate_BE = self.gate(pooled_BC).softmax(1)
        result_BC = pooled_BC.clone()
        for e, expert in enumerate(self.experts):
            chosen = (gate_BE.argmax(1) == e).nonzero()[:, 0][: -(-len(pooled_BC) // 2)]
            result_BC[chosen] = result_BC[chosen] + gate_BE[chosen, e, None] * expert(pooled_BC[chosen])
        return result_BC


class GatedNet(Net):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 4)

    def pooled(self, features_BCT, there_BT):
        self.gate_BE = self.gate(super().pooled(features_BCT, there_BT)).softmax(1)
        return super().pooled(features_BCT, there_BT)

    def forward(self, series_BCT, length_B):
        return super().forward(series_BCT, length_B), self.gate_BE


class TransposedNet(Net):
    """Attention gets samples where it expects time."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)

    def features(self, series_BCT, there_BT):
        tokens_BTC = super().features(series_BCT, there_BT).mT
        return self.attention(tokens_BTC, tokens_BTC, tokens_BTC)[0].mT


class SortedDropNet(Net):
    """Sorts samples by length, as RNNs once needed, and drops some of what it sorted."""

    def forward(self, series_BCT, length_B):
        order = length_B.argsort(descending=True, stable=True)
        return super().forward(series_BCT[order], length_B[order])[order.argsort()]

    def features(self, series_BCT, there_BT):
        return self.drop(super().features(series_BCT, there_BT))


class MyDropout(nn.Dropout):
    pass


class SubclassNet(Net):
    def features(self, series_BCT, there_BT):
        return self.mine(super().features(series_BCT, there_BT))

    def __init__(self):
        super().__init__()
        self.mine = MyDropout(0.5)


# --- They do not ---


class NormsNet(Net):
    """Norms of each sample."""

    def __init__(self):
        super().__init__()
        self.norms = nn.Sequential(nn.GroupNorm(2, 8), nn.InstanceNorm1d(8, affine=True))
        self.layer_norm = nn.LayerNorm(8)

    def features(self, series_BCT, there_BT):
        return self.layer_norm(self.norms(super().features(series_BCT, there_BT)).mT).mT


class SpectralNet(Net):
    def __init__(self):
        super().__init__()
        self.a = nn.utils.parametrizations.spectral_norm(self.a)
        self.b = nn.utils.parametrizations.weight_norm(self.b)


class PackedNet(Net):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(8, 8, batch_first=True)

    def forward(self, series_BCT, length_B):
        feature_BTC = torch.tanh(self.a(series_BCT)).mT
        there_BT1 = torch.arange(series_BCT.shape[2])[None, :, None] < length_B[:, None, None]
        feature_BTC = feature_BTC * there_BT1
        packed = pack_padded_sequence(feature_BTC, length_B.cpu(), batch_first=True, enforce_sorted=False)
        return self.b(self.rnn(packed)[1][0][0])[:, 0]


class DedupNet(Net):
    """Computes what depends on the length once for each length."""

    def __init__(self):
        super().__init__()
        self.of_length = nn.Sequential(nn.Linear(1, 8), nn.Tanh())

    def pooled(self, features_BCT, there_BT):
        length_U, place_B = torch.unique(there_BT.sum(1), return_inverse=True)
        return super().pooled(features_BCT, there_BT) + self.of_length(length_U[:, None] / 10)[place_B]


class LoopNet(Net):
    """Calls a layer for each sample, as often as its length asks for."""

    def __init__(self):
        super().__init__()
        self.block = nn.Linear(8, 8)

    def pooled(self, features_BCT, there_BT):
        rows = []
        for row, there in zip(super().pooled(features_BCT, there_BT), there_BT, strict=True):
            for _ in range(1 + int(there.sum()) // 5):
                row = torch.tanh(self.block(row))
            rows.append(row)
        return torch.stack(rows)


class SortedNet(SortedDropNet):
    def features(self, series_BCT, there_BT):
        return Net.features(self, series_BCT, there_BT)


class TimeFirstNet(Net):
    """A transformer's layer with time first."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)

    def features(self, series_BCT, there_BT):
        token_TBC = super().features(series_BCT, there_BT).permute(2, 0, 1)
        return self.layer(token_TBC, src_key_padding_mask=there_BT == 0).permute(1, 2, 0) * there_BT[:, None]


class AnnealedNet(Net):
    """Counts its calls in a Python attribute: each process counts the same."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def pooled(self, features_BCT, there_BT):
        self.calls += self.training
        return super().pooled(features_BCT, there_BT) * (1 + 0.9**self.calls)


class KeptNet(Net):
    """Keeps what it computed for whoever wants to look at it."""

    def pooled(self, features_BCT, there_BT):
        self.last = super().pooled(features_BCT, there_BT)
        return self.last


class Bfloat16Net(Net):
    """Rounds the sum of a gradient over the samples of its process."""

    def features(self, series_BCT, there_BT):
        a = self.a
        result = F.conv1d(series_BCT.bfloat16(), a.weight.bfloat16(), a.bias.bfloat16(), padding=1)
        return torch.tanh(result.to(series_BCT.dtype)) * there_BT[:, None]


class Float32Net(Net):
    def pooled(self, features_BCT, there_BT):
        return F.rms_norm(super().pooled(features_BCT.float(), there_BT.float()), (8,)).to(features_BCT.dtype)
