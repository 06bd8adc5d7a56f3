"""Decoders of GPT-2's shape (Radford et al., 2019), with token embeddings tied to the output.

Unlike the published model they have no dropout and use the exact GELU; sizes are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from hipress.errors import UsageError


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
        self.blocks = nn.Sequential(*(_Block(width, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.apply(init_normal)
        with torch.no_grad():
            for name, weight in self.named_parameters():
                # Every block adds to the same sum twice: 96 times in the largest model.
                if name.endswith(("out.weight", "mlp.3.weight")):
                    weight.mul_((2 * num_layers) ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token, for each token."""
        check_length(tokens, self.positions)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.norm(self.blocks(self.tokens(tokens) + self.positions(places)))
        return functional.linear(hidden, self.tokens.weight)


def check_length(tokens: Tensor, positions: nn.Embedding) -> None:
    """Raise a UsageError for sequences that are longer than the table of positions."""
    length, context = tokens.shape[1], positions.num_embeddings
    if length > context:
        raise UsageError(
            f"sequences of {length} tokens are longer than the {context} that this model has "
            f"positions for; choose a length of {context} or less."
        )


class _Block(nn.Module):
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


def init_normal(layer: nn.Module) -> None:
    """Initialise weights as GPT-2 and BERT do."""
    if isinstance(layer, nn.Linear | nn.Embedding):
        nn.init.normal_(layer.weight, std=0.02)
    if isinstance(layer, nn.Linear):
        nn.init.zeros_(layer.bias)
