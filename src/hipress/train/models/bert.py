"""BERT with both heads of its pre-training (Devlin et al., 2019).

Sequences are always full, so there is no mask for padding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from hipress.train.models.gpt import check_length, init_normal
from hipress.train.models.transformer import Attention


class Bert(nn.Module):
    """An encoder that predicts masked tokens, and whether one segment follows the other.

    The dropout acts on embeddings, on attention and on each layer's output.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 30_522,
        context: int = 512,
        width: int,
        num_layers: int,
        num_heads: int,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.segments = nn.Embedding(2, width)
        self.norm = _norm(width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.Sequential(*(_Layer(width, num_heads, dropout) for _ in range(num_layers)))
        self.first = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))
        self.guess = nn.Sequential(nn.Linear(width, width), nn.GELU(), _norm(width))
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        self.apply(init_normal)

    def forward(self, tokens: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of each token, and of whether the second segment is the next one."""
        check_length(tokens, self.positions)
        places = self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        embedded = self.tokens(tokens) + places + self.segments(segments)
        hidden = self.layers(self.dropout(self.norm(embedded)))
        logits = functional.linear(self.guess(hidden), self.tokens.weight, self.bias)
        return logits, self.first(hidden[:, 0])


class _Layer(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, num_heads, bias=True, dropout=dropout)
        self.attention_norm = _norm(width)
        self.inner = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.inner_norm = _norm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x, x)))
        return self.inner_norm(x + self.dropout(self.inner(x)))  # type: ignore[no-any-return]


def _norm(width: int) -> nn.LayerNorm:
    return nn.LayerNorm(width, eps=1e-12)
