"""One worker of a training run as a rank of torch.distributed: DDP with `hipress.attach`.

It has the model, batches, rates and optimizer of the virtual worker of its number. What is left to
differ: gradients cross a network, are cut into pieces that several ranks aggregate, and meet in
another order of rounding; and codecs draw the same random numbers whatever the seed.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, autograd
from torch.nn.parallel import DistributedDataParallel

import hipress
from hipress.session.buckets import has_momentum
from hipress.train.convergence import Task, loss, make_model, make_optimizer
from hipress.train.data import DataSet
from hipress.train.virtual_sync import MIN_NUMEL, PLAIN, is_exempt


class RealWorker:
    """A rank's share of a run, to be trained by `follow` on all ranks.

    Args:
        expression: A codec, or `PLAIN`: DDP as it comes.
        task: The model and the rate.
        data: The data set of that task.
        seed: Decides first weights.
        strategy: How gradients travel.
    """

    def __init__(
        self, expression: str, task: Task, data: DataSet, *, seed: int, strategy: str
    ) -> None:
        self.data = data
        self.rank = dist.get_rank()
        self.model = make_model(task, data, seed)
        self._ddp = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        is_plain = expression == PLAIN
        codec = None if is_plain else hipress.codec(expression)
        brings_momentum = codec is not None and has_momentum(codec)
        parameters = list(self.model.parameters())
        self.optimizer = make_optimizer(
            parameters, [brings_momentum and not is_exempt(p) for p in parameters]
        )
        self.sync = hipress.attach(
            self._ddp,
            codec=codec,
            strategy=strategy,
            min_size=MIN_NUMEL,
            optimizer=self.optimizer,
            enabled=not is_plain,
        )

    def backward(self, batches: list[Tensor], step: int) -> None:
        """Give every parameter the mean gradient of all ranks."""
        self.optimizer.zero_grad(set_to_none=True)
        autograd.backward(loss(self._ddp, self.data, batches[self.rank]))

    def close(self) -> None:
        """End the exchange; when all ranks are done with it."""
        if self.sync.enabled:
            self.sync.engine.close()
