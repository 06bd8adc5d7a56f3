"""Hugging Face: `Trainer(callbacks=[hipress.transformers.CompressCallback(codec="int8")])`."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from hipress.codecs.base import Codec
from hipress.errors import MissingDependencyError
from hipress.session import Mode
from hipress.torch import Sync
from hipress.torch.frameworks import Figures, attach_wrapped, blank

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise MissingDependencyError("transformers", extra="frameworks") from error

if TYPE_CHECKING:
    import os

    from transformers import TrainerControl, TrainerState, TrainingArguments

_log = logging.getLogger("hipress")

__all__ = ["CompressCallback"]

FOLDER = "hipress"
"""Where the state of the codec is, in a checkpoint of the Trainer."""
MARK = "hipress.json"
"""The file beside it that says which step of which run it belongs to."""


class CompressCallback(TrainerCallback):
    """Compresses the gradients that a Trainer exchanges in a job of several processes.

    It attaches when training begins, with the Trainer's optimizer and gradient scaler. The state of
    the codec is written into the Trainer's checkpoints, in a folder that all hosts must see, and
    read when training is resumed, with any number of processes; that of another run is not read.
    Each call of `train` that resumes nothing starts without residuals. `hipress/ratio` and
    `hipress/sent_mb_per_step` are in `trainer.state.log_history` and in what the Trainer prints. In
    one process it does nothing.

    Args:
        codec: As for `hipress.attach`.
        resume_from_checkpoint: What `trainer.train` is given, if that is not
            `TrainingArguments.resume_from_checkpoint` or in the `output_dir` of this run.
        **options: All other arguments of `hipress.attach`.

    Example:
        >>> import hipress.torch
        >>> callback = CompressCallback(codec="onebit")
        >>> # Trainer(model, args, callbacks=[callback],
        >>> #         optimizer_cls_and_kwargs=(hipress.torch.AdamW, {"lr": 1e-4}), ...)
    """

    def __init__(
        self,
        codec: str | Codec | None = None,
        *,
        resume_from_checkpoint: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        self.options = {"codec": codec, **options}
        self.resume_from_checkpoint = resume_from_checkpoint
        self.sync: Sync | None = None
        """What `hipress.attach` returned; None before training."""
        self._model: nn.Module | None = None
        self._figures = Figures()
        _watch_wrapping()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attaches, and continues from the checkpoint that the Trainer has loaded."""
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        model = _wrappers.get(id(model), model)
        if model is self._model and self.sync is not None:  # train() was called again
            if self.sync.idle or self.sync.mode.current is not Mode.DETACHED:
                self.sync.load_state_dict(blank())
        else:
            found = {"optimizer": optimizer, "scaler": getattr(optimizer, "scaler", None)}
            self.sync = attach_wrapped(
                model,
                "give the callback to the Trainer before train(), and use neither FSDP nor "
                "DeepSpeed",
                **(found | self.options),
            )
            self._model, self._figures = model, Figures()
        if state.global_step and self.sync is not None:
            self._resume(self.sync, args, state)

    def _resume(self, sync: Sync, args: TrainingArguments, state: TrainerState) -> None:
        # The Trainer tells callbacks its state, and not the folder that it has resumed from.
        inside = _checkpoint(args, state.global_step)
        given = (self.resume_from_checkpoint, args.resume_from_checkpoint, inside)
        folders = [Path(folder) for folder in given if folder]
        held = [one for one in folders if (one / FOLDER).exists()]
        found = next((one for one in held if _mark_in(one) == _mark(state)), None)
        if sync.is_open:
            sync.engine.agree("resuming", {"folder with codec state": found and str(found)})
        if found is not None:
            sync.load(found / FOLDER)
            if args.process_index == 0:
                _log.info("the state of the codec was loaded from %r.", str(found / FOLDER))
        elif sync.is_open and args.process_index == 0:
            # Not an error: zero residuals lose less than a gradient, and the model is loaded.
            what = "no codec state"
            if held and _mark_in(held[0]) is None:
                what = f"codec state whose {MARK} is missing or damaged"
                what = f"{what} (an older version wrote it, or the save was cut off)"
            elif held:
                what = "the codec state of another run or step"
            _log.warning(
                "there is %s in %r, so residuals start at zero: if training was resumed from "
                "another folder, give CompressCallback(resume_from_checkpoint=...).",
                what, str((held or folders)[0] / FOLDER),
            )  # fmt: skip

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Writes the state of the codec into the checkpoint; the Trainer calls it on all ranks."""
        if self.sync is None or args.save_only_model:
            return
        if not state.is_hyper_param_search:  # such runs are not resumed
            folder = _checkpoint(args, state.global_step)
            self.sync.save(folder / FOLDER)
            if args.process_index == 0:
                (folder / MARK).write_text(json.dumps(_mark(state)))

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Adds scalars to the logs of a step."""
        logs: dict[str, float] = kwargs["logs"]
        if self.sync is None or not self.sync.is_open or "loss" not in logs:
            return
        figures = self._figures.read(self.sync)
        logs.update(figures)
        state.log_history[-1].update(figures)


def _checkpoint(args: TrainingArguments, step: int) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{step}"


def _mark(state: TrainerState) -> dict[str, Any]:
    """Returns what tells a checkpoint from those of other steps, and of other runs by their losses.

    The step of the session would not do: it is smaller if compression began in a resumed run.
    """
    log = json.dumps(state.log_history, sort_keys=True).encode()  # the Trainer sorts keys, too
    return {"global_step": state.global_step, "log_sha256": hashlib.sha256(log).hexdigest()}


def _mark_in(folder: Path) -> Any:
    try:
        return json.loads((folder / MARK).read_text())
    except (OSError, ValueError):  # ValueError: cut off, or no text
        return None


# --- the wrapper ----------------------------------------------------------------------------------
# The Trainer gives callbacks the model, and not the DistributedDataParallel that it has made of it.

_wrappers: weakref.WeakValueDictionary[int, DistributedDataParallel] = weakref.WeakValueDictionary()
"""The last wrapper of each module, by the module's id; it keeps the module alive."""


@functools.cache
def _watch_wrapping() -> None:
    """Notes which modules are wrapped from now on."""
    register_module_module_registration_hook(_note)


def _note(module: nn.Module, name: str, child: nn.Module | None) -> None:
    if isinstance(module, DistributedDataParallel) and name == "module":
        _wrappers[id(child)] = module
