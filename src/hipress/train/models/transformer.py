"""The Transformer for translation (Vaswani et al., 2017), as Tensor2Tensor lays its base form out.

One matrix serves source, target and output; norms come before a layer and once at the end;
attention has no biases; positions are sines and cosines.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from hipress.train.models.attention import Attention
from hipress.train.tasks import PADDING


class Transformer(nn.Module):
    """Encoder and decoder.

    Args:
        vocabulary: Number of tokens, of both languages together.
        width: Of an embedding.
        inner: Width within a feed-forward layer.
        num_layers: Of the encoder, and of the decoder.
        num_heads: Of the attention in each layer.
        dropout: Of embeddings, of attention and of what a layer adds.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 33_708,
        width: int = 512,
        inner: int = 2048,
        num_layers: int = 6,
        num_heads: int = 8,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(dropout)

        def layers(has_memory: bool) -> nn.ModuleList:
            return nn.ModuleList(
                _Layer(width, inner, num_heads, dropout, has_memory) for _ in range(num_layers)
            )

        self.encoder = layers(has_memory=False)
        self.encoder_norm = nn.LayerNorm(width)
        self.decoder = layers(has_memory=True)
        self.decoder_norm = nn.LayerNorm(width)
        # Times sqrt(width) on the way in, so that embeddings are as large as positions.
        nn.init.normal_(self.tokens.weight, std=width**-0.5)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)

    def forward(self, source: Tensor, target_in: Tensor) -> Tensor:
        """Logits of the next target token, for each target token."""
        is_word = (source != PADDING)[:, None, None, :]
        x = self._embedded(source)
        for layer in self.encoder:
            x = layer(x, is_word)
        memory = self.encoder_norm(x)
        y = self._embedded(target_in)
        for layer in self.decoder:
            y = layer(y, is_word, memory)
        return functional.linear(self.decoder_norm(y), self.tokens.weight)

    def _embedded(self, tokens: Tensor) -> Tensor:
        width = self.tokens.embedding_dim
        places = positions(tokens.shape[1], width, tokens.device)
        return self.dropout(  # type: ignore[no-any-return]
            self.tokens(tokens) * math.sqrt(width) + places
        )


def positions(length: int, width: int, device: torch.device) -> Tensor:
    """Sines, then cosines, of wavelengths from 2 pi to 10,000 times that."""
    num_waves = width // 2
    steps = torch.arange(num_waves, device=device) / max(num_waves - 1, 1)
    angles = torch.arange(length, device=device)[:, None] * 10_000.0**-steps
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class _Layer(nn.Module):
    def __init__(
        self, width: int, inner: int, num_heads: int, dropout: float, has_memory: bool
    ) -> None:
        super().__init__()

        def attention() -> Attention:
            return Attention(width, num_heads, bias=False, dropout=dropout)

        self.self_norm = nn.LayerNorm(width)
        self.self_attention = attention()
        self.memory_norm = nn.LayerNorm(width) if has_memory else None
        self.memory_attention = attention() if has_memory else None
        self.inner = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, inner),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(inner, width),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, is_word: Tensor, memory: Tensor | None = None) -> Tensor:
        """With a memory x is the target, whose tokens see those before them."""
        normed = self.self_norm(x)
        if self.memory_norm is None or self.memory_attention is None:
            x = x + self.dropout(self.self_attention(normed, normed, mask=is_word))
        else:
            x = x + self.dropout(self.self_attention(normed, normed, is_causal=True))
            seen = self.memory_attention(self.memory_norm(x), memory, mask=is_word)
            x = x + self.dropout(seen)
        return torch.add(x, self.dropout(self.inner(x)))
