"""A pretrained transformer learns sequences of different lengths with LoRA adapters and a new head."""

# B sequence · T token · H head · D width · V vocabulary
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import lockstep

VOCABULARY, LONGEST, PAD = 16, 12, -100


def sequences(count: int, seed: int) -> list[Tensor]:
    """They count on by a step of their own."""
    draw, found = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        first, step, length = (
            int(torch.randint(*ends, (), generator=draw)) for ends in ((0, 16), (1, 4), (3, LONGEST))
        )
        found.append((first + step * torch.arange(length + 1)) % VOCABULARY)
    return found


def padded(sequences: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """token_BT, and target_BT: the next token, or PAD."""
    inputs, targets = [x[:-1] for x in sequences], [x[1:] for x in sequences]
    return pad_sequence(inputs, batch_first=True), pad_sequence(targets, batch_first=True, padding_value=PAD)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.before, self.between = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x_BTD)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        found_BHTD = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(found_BHTD.transpose(1, 2).flatten(2))
        return x_BTD + self.down(F.gelu(self.up(self.between(x_BTD))))


class Transformer(nn.Module):
    def __init__(self, width: int = 16, heads: int = 2, blocks: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LONGEST, width)
        self.blocks, self.norm = nn.Sequential(*(Block(width, heads) for _ in range(blocks))), nn.LayerNorm(width)

    def forward(self, token_BT: Tensor) -> Tensor:
        place_T = torch.arange(token_BT.shape[1], device=token_BT.device)
        return self.norm(self.blocks(self.tokens(token_BT) + self.places(place_T)))


def pretrained() -> Transformer:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Transformer()


class LoRA(nn.Module):
    """Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021"""

    def __init__(self, linear: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.linear = lockstep.frozen(linear)
        self.into = nn.Linear(linear.in_features, rank, bias=False)
        self.out = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.out(self.into(x))


def adapt(module: nn.Module) -> None:
    """Freezes the layers in `module`, and adds adapters to the linear ones."""
    for name, child in module.named_children():
        if next(child.children(), None):
            adapt(child)
        else:
            setattr(module, name, LoRA(child) if isinstance(child, nn.Linear) else lockstep.frozen(child))


class Adapted(lockstep.Module):
    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        self.lr, self.base = lr, pretrained()
        adapt(self.base)
        self.head = nn.Linear(16, VOCABULARY)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        token_BT, target_BT = batch
        logits_BVT = self.head(self.base(token_BT)).transpose(1, 2)
        loss_BT = F.cross_entropy(logits_BVT, target_BT, ignore_index=PAD, reduction="none")
        return self.mean(loss_BT.sum(1) / (target_BT != PAD).sum(1), log=f"{self.stage}/loss")

    validation_step = test_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(sequences(60, 1), batch_size=8, shuffle=True, collate_fn=padded)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader:
        return DataLoader(sequences(13, 2), batch_size=8, collate_fn=padded)  # type: ignore[arg-type]

    test_dataloader = val_dataloader
