"""Lightning: `Trainer(callbacks=[hipress.lightning.Compress(codec="onebit")])`."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from hipress.codecs.base import Codec
from hipress.errors import MissingDependencyError
from hipress.torch import Sync
from hipress.torch.frameworks import Figures, attach_wrapped

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise MissingDependencyError("lightning", extra="frameworks") from error

_log = logging.getLogger("hipress")

__all__ = ["Compress"]


class Compress(Callback):
    """Compresses the gradients that Lightning's DDP strategies exchange.

    It attaches when training starts, with the Trainer's optimizer and gradient scaler. The state of
    the codec is in Lightning's checkpoints, which may be resumed on another number of devices; a
    search for a learning rate leaves it as it was. Each call of `fit` without a checkpoint starts
    without residuals. The Trainer's loggers get the scalars `hipress/ratio` and
    `hipress/sent_mb_per_step`. On a single device it does nothing and logs that.

    Args:
        codec: As for `hipress.attach`.
        **options: All other arguments of `hipress.attach`.

    Example:
        >>> compress = Compress(codec="int8")  # Trainer(callbacks=[compress], ...)
    """

    def __init__(self, codec: str | Codec | None = None, **options: Any) -> None:
        self.options = {"codec": codec, **options}
        self.sync: Sync | None = None
        """What `hipress.attach` returned; None before training."""
        self._loaded: dict[str, Any] | None = None
        self._figures = Figures()
        self._model: nn.Module | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forgets the last call of `fit`, whose state a search would save and load as that of this.

        Also forgets what `test(ckpt_path=...)` has loaded since.
        """
        if stage == "fit":
            self.sync = self._model = self._loaded = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attaches to the model that Lightning has wrapped."""
        model = trainer.strategy.model
        assert model is not None
        if model is not self._model:
            self.sync = attach_wrapped(
                model, "use Trainer(strategy='ddp')", **self._found(trainer), **self.options
            )
            self._figures = Figures()
            # Lightning drops it after fit, and the exchange ends with it: save_checkpoint needs it.
            self._model = model

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Continues from the checkpoint that the Trainer has loaded.

        Not once when training starts: a search for a learning rate that a callback begins later,
        such as in each epoch, loads the checkpoint from before it, and its steps must not count.
        """
        if self._loaded is not None and self.sync is not None:
            self.sync.load_state_dict(self._loaded)
            self._loaded = None

    def _found(self, trainer: Trainer) -> dict[str, Any]:
        """Returns what the Trainer knows and the user has not given."""
        found: dict[str, Any] = {"scaler": getattr(trainer.precision_plugin, "scaler", None)}
        if len(trainer.optimizers) == 1:
            found["optimizer"] = trainer.optimizers[0]
        elif "optimizer" not in self.options and trainer.is_global_zero:
            _log.warning(
                "the module has %d optimizers and attach takes one, so none is checked and "
                "momentum is not exchanged.", len(trainer.optimizers),
            )  # fmt: skip
        return {name: value for name, value in found.items() if name not in self.options}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Logs scalars in the steps in which the Trainer logs."""
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # of a connector
        if self.sync is None or not trainer.loggers or not every or trainer.global_step % every:
            return
        pl_module.log_dict(self._figures.read(self.sync))

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the codec; Lightning calls it on all ranks."""
        if self._loaded is not None or self.sync is None:
            return self._loaded or {}
        return self.sync.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the state until the next batch: Lightning may not have wrapped the model yet."""
        self._loaded = state_dict
