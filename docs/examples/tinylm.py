"""A small transformer that predicts the next byte of a text: 0.35 million parameters at the default size."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Causal self-attention and a feed-forward net, each normalised before and added to what came in."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.joined = nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        x = x + self.dropout(self._attention(self.before_attention(x)))
        fed: Tensor = self.dropout(self.feed(self.before_feed(x)))
        return x + fed

    def _attention(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        parts = self.queries_keys_values(x).view(batch, time, 3, self.heads, width // self.heads)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        joined: Tensor = self.joined(mixed.transpose(1, 2).reshape(batch, time, width))
        return joined


class TinyLM(nn.Module):
    """A language model over bytes; ``forward`` gives the mean cross-entropy of predicting each next byte."""

    def __init__(
        self, length: int = 96, width: int = 96, layers: int = 3, heads: int = 4, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.bytes.weight
        nn.init.normal_(self.bytes.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """``text``: bytes as int64, (batch, length + 1)."""
        before, after = text[:, :-1], text[:, 1:]
        x = self.bytes(before) + self.places(torch.arange(before.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), after.flatten())
