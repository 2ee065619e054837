"""Classifies graphs of different sizes: rings and stars."""

# G graph · N node of all graphs · E edge of all graphs · F feature · D width
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lockstep

FEATURES = 3
Batch = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass
class Graph:
    node_NF: Tensor
    edge_2E: Tensor
    label: int


def graphs(count: int, seed: int) -> list[Graph]:
    draw, found = torch.Generator().manual_seed(seed), []
    for i in range(count):
        size, label = int(torch.randint(3, 9, (), generator=draw)), i % 2
        node_N = torch.arange(size)
        edge_2E = torch.stack([node_N, torch.zeros_like(node_N) if label else (node_N + 1) % size])
        found.append(
            Graph(torch.randn(size, FEATURES, generator=draw), torch.cat([edge_2E, edge_2E.flip(0)], 1), label)
        )
    return found


def joined(graphs: Sequence[Graph]) -> Batch:
    """node_NF, edge_2E, the graph of each node, and label_G"""
    sizes = torch.tensor([len(graph.node_NF) for graph in graphs])
    first_G = sizes.cumsum(0) - sizes
    edge_2E = torch.cat([graph.edge_2E + first for graph, first in zip(graphs, first_G, strict=True)], 1)
    graph_N = torch.arange(len(graphs)).repeat_interleave(sizes)
    return torch.cat([g.node_NF for g in graphs]), edge_2E, graph_N, torch.tensor([g.label for g in graphs])


class Classifier(lockstep.Module):
    def __init__(self, width: int = 16, rounds: int = 2, lr: float = 1e-2) -> None:
        super().__init__()
        self.lr, self.encode, self.head = lr, nn.Linear(FEATURES, width), nn.Linear(width, 2)
        self.rounds = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(rounds))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        node_NF, (from_E, to_E), graph_N, label_G = batch
        x_ND = self.encode(node_NF)
        for layer in self.rounds:
            heard_ND = torch.zeros_like(x_ND).index_add(0, to_E, x_ND[from_E])
            x_ND = x_ND + layer(torch.cat([x_ND, heard_ND], 1)).relu()
        logits_GK = self.head(x_ND.new_zeros(len(label_G), x_ND.shape[1]).index_add(0, graph_N, x_ND))
        self.mean((logits_GK.argmax(1) == label_G).float(), log=f"{self.stage}/acc")
        return self.mean(F.cross_entropy(logits_GK, label_G, reduction="none"), log=f"{self.stage}/loss")

    validation_step = test_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(graphs(60, 1), batch_size=8, shuffle=True, collate_fn=joined)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader:
        return DataLoader(graphs(13, 2), batch_size=8, collate_fn=joined)  # type: ignore[arg-type]

    test_dataloader = val_dataloader
