"""Attention with a matrix of its own for each of query, key, value and output."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Several heads; queries come from one sequence, keys and values from the same or another.

    Args:
        width: Of a token on the way in and out.
        num_heads: Parts of the width that attend apart.
        bias: Whether the four matrices have one.
        dropout: Of the weights of the mean.
    """

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
        """What each token of `x` takes from `memory`.

        Args:
            x: Who asks.
            memory: Who is asked.
            mask: False where a token of `memory` is not to be seen.
            is_causal: Whether a token sees only itself and those before it.
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
