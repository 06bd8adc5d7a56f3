"""A language model of LSTM layers whose output uses the embedding's matrix.

The sizes are those of PyTorch's word-level example at its largest (`--emsize 1500 --nhid 1500
--dropout 0.65 --tied`) on WikiText-2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Lstm(nn.Module):
    """LSTM layers with dropout around and between them; each sequence starts with a zero state."""

    def __init__(
        self,
        *,
        vocabulary: int = 33_278,
        width: int = 1500,
        num_layers: int = 2,
        dropout: float = 0.65,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        # Separate layers: cuDNN's dropout inside nn.LSTM has its own random state, which
        # torch.manual_seed does not set, so that a resumed run would differ.
        self.layers = nn.ModuleList(
            nn.LSTM(width, width, batch_first=True) for _ in range(num_layers)
        )
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        self.dropout = nn.Dropout(dropout)
        nn.init.uniform_(self.tokens.weight, -0.1, 0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token, for each token."""
        hidden = self.tokens(tokens)
        for layer in self.layers:
            hidden, _ = layer(self.dropout(hidden))
        return functional.linear(self.dropout(hidden), self.tokens.weight, self.bias)
