"""What a training job says of itself: facts before it, rows on the way, a result after it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Known before the first step."""

    model: str
    num_parameters: int
    data: str
    num_train: int
    num_test: int
    codec: str
    """`uncompressed`: DDP as it comes; `plan`: a plan decides."""
    strategy: str | None
    num_compressed: int
    """Gradients that a codec works on."""
    num_gradients: int
    compressed_share: float
    """Of the elements."""
    num_ranks: int
    device: str
    backend: str
    batch: int
    """Examples per rank and step."""
    first_step: int
    num_steps: int
    num_epochs: float
    steps_per_epoch: int
    unit: str
    """images or tokens."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Known after the last step."""

    num_steps: int
    """Done by this start of the job."""
    seconds: float
    """From the first step to the end, evaluations and checkpoints among them."""
    steps_per_s: float
    """Without evaluations, checkpoints and the first steps."""
    units_per_s: float
    """Of all ranks."""
    units_per_s_per_rank: float
    unit: str
    wire_bytes_per_step: float
    """Sent by a rank, the mean; of DDP as it comes what a ring sends of float32."""
    ratio: float
    """Of the bytes of plain all-reduce to those."""
    loss: float | None
    """Of training, the mean over ranks since the last row."""
    test_loss: float | None
    accuracy: float | None
    """Percent right of the test data; None where there is no right and wrong."""
    memory_bytes: int
    """Beyond DDP, on this rank: what codecs remember, and buffers."""
