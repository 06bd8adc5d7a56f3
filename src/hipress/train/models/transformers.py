"""Transformers: GPT-2 (Radford et al., 2019), BERT with both heads of its pre-training (Devlin et
al., 2019), and the Transformer for translation (Vaswani et al., 2017).

GPT has token embeddings tied to the output; unlike the published model it has no dropout and uses
the exact GELU; sizes are the same. BERT's sequences are always full, so there is no mask for
padding. The Transformer has the base form of Tensor2Tensor: source, target and output share one
matrix; norms come before a layer and once at the end; attention has no biases; positions are sines
and cosines.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from hipress.errors import UsageError
from hipress.train.tasks import PADDING


class Attention(nn.Module):
    """Multi-head attention with separate matrices for query, key, value and output."""

    def __init__(self, width: int, num_heads: int, *, bias: bool, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.query = nn.Linear(width, width, bias=bias)
        self.key = nn.Linear(width, width, bias=bias)
        self.value = nn.Linear(width, width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(
        self, x: Tensor, memory: Tensor, *, mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Attend from the tokens of `x` to those of `memory`, which may be `x`.

        The mask is False for tokens of `memory` that are hidden.
        """
        mixed = functional.scaled_dot_product_attention(
            self._heads(self.query(x)),
            self._heads(self.key(memory)),
            self._heads(self.value(memory)),
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=is_causal,
        )
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _heads(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        return x.view(batch, length, self.num_heads, -1).transpose(1, 2)


def _check_length(tokens: Tensor, positions: nn.Embedding) -> None:
    """Raise a UsageError for sequences that are longer than the table of positions."""
    length, context = tokens.shape[1], positions.num_embeddings
    if length > context:
        raise UsageError(
            f"sequences of {length} tokens are longer than the {context} that this model has "
            f"positions for; choose a length of {context} or less."
        )


def _init_normal(layer: nn.Module) -> None:
    """Initialise weights as GPT-2 and BERT do."""
    if isinstance(layer, nn.Linear | nn.Embedding):
        nn.init.normal_(layer.weight, std=0.02)
    if isinstance(layer, nn.Linear):
        nn.init.zeros_(layer.bias)


# --- GPT ------------------------------------------------------------------------------------------


class Gpt(nn.Module):
    """A stack of blocks in which a token sees only earlier ones."""

    def __init__(
        self,
        *,
        vocabulary: int = 50_257,
        context: int = 1024,
        width: int,
        num_layers: int,
        num_heads: int,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(_GptBlock(width, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.apply(_init_normal)
        with torch.no_grad():
            for name, weight in self.named_parameters():
                # Every block adds to the same sum twice: 96 times in the largest model.
                if name.endswith(("out.weight", "mlp.3.weight")):
                    weight.mul_((2 * num_layers) ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token, for each token."""
        _check_length(tokens, self.positions)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.norm(self.blocks(self.tokens(tokens) + self.positions(places)))
        return functional.linear(hidden, self.tokens.weight)


class _GptBlock(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm(x)).view(batch, length, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return torch.add(x, self.mlp(x))


# --- BERT -----------------------------------------------------------------------------------------


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
        self.norm = _bert_norm(width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.Sequential(
            *(_BertLayer(width, num_heads, dropout) for _ in range(num_layers))
        )
        self.first = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))
        self.guess = nn.Sequential(nn.Linear(width, width), nn.GELU(), _bert_norm(width))
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        self.apply(_init_normal)

    def forward(self, tokens: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of each token, and of whether the second segment is the next one."""
        _check_length(tokens, self.positions)
        places = self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        embedded = self.tokens(tokens) + places + self.segments(segments)
        hidden = self.layers(self.dropout(self.norm(embedded)))
        logits = functional.linear(self.guess(hidden), self.tokens.weight, self.bias)
        return logits, self.first(hidden[:, 0])


class _BertLayer(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, num_heads, bias=True, dropout=dropout)
        self.attention_norm = _bert_norm(width)
        self.inner = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.inner_norm = _bert_norm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x, x)))
        return self.inner_norm(x + self.dropout(self.inner(x)))  # type: ignore[no-any-return]


def _bert_norm(width: int) -> nn.LayerNorm:
    return nn.LayerNorm(width, eps=1e-12)


# --- the Transformer ------------------------------------------------------------------------------


class Transformer(nn.Module):
    """An encoder and a decoder of `num_layers` each; one vocabulary serves both languages.

    The dropout acts on embeddings, on attention and on each layer's output.
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
                _TransformerLayer(width, inner, num_heads, dropout, has_memory)
                for _ in range(num_layers)
            )

        self.encoder = layers(has_memory=False)
        self.encoder_norm = nn.LayerNorm(width)
        self.decoder = layers(has_memory=True)
        self.decoder_norm = nn.LayerNorm(width)
        # Inputs are multiplied by sqrt(width), so that embeddings are as large as positions.
        nn.init.normal_(self.tokens.weight, std=width**-0.5)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)

    def forward(self, source: Tensor, target_in: Tensor) -> Tensor:
        """Return the logits of the next target token, for each target token."""
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
    """Return sines, then cosines, of wavelengths from 2 pi to 10,000 times that."""
    num_waves = width // 2
    steps = torch.arange(num_waves, device=device) / max(num_waves - 1, 1)
    angles = torch.arange(length, device=device)[:, None] * 10_000.0**-steps
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class _TransformerLayer(nn.Module):
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
        """Run the layer; with a memory, x is the target, whose tokens see only earlier ones."""
        normed = self.self_norm(x)
        if self.memory_norm is None or self.memory_attention is None:
            x = x + self.dropout(self.self_attention(normed, normed, mask=is_word))
        else:
            x = x + self.dropout(self.self_attention(normed, normed, is_causal=True))
            seen = self.memory_attention(self.memory_norm(x), memory, mask=is_word)
            x = x + self.dropout(seen)
        return torch.add(x, self.dropout(self.inner(x)))
