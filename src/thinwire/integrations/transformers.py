"""Hugging Face's Trainer: `attach(trainer, method)` before `trainer.train()`."""

from functools import wraps
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from thinwire.core.reducer import Reducer
from thinwire.doors.ddp import attach as attach_to_ddp
from thinwire.doors.ddp import handle as handle_of
from thinwire.doors.handle import Handle
from thinwire.doors.levels import ddp_inside, silence
from thinwire.doors.local import LocalHandle, local
from thinwire.integrations import DEFAULT
from thinwire.integrations.accelerate import load, save
from thinwire.spelling import recipe_of
from thinwire.wrappers.local_steps import LocalSteps


def attach(trainer: Trainer, reducer: Reducer[Any, Any] | LocalSteps | str = DEFAULT, **options: Any) -> "Thinwire":
    """Train `trainer`'s model with `reducer` in place of DDP's all-reduce, or with local steps, for a `LocalSteps`.

    options: those of `thinwire.attach`, or of `thinwire.local`. Each rank's state lies in the Trainer's own checkpoints
    and `trainer.train(resume_from_checkpoint=...)` goes on from it.
    """
    callback = Thinwire(trainer, reducer, **options)
    trainer.add_callback(callback)
    return callback


class Thinwire(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """What `attach` adds to a Trainer: attaches when training begins, saves and resumes. `handle` is thinwire's."""

    def __init__(self, trainer: Trainer, reducer: Reducer[Any, Any] | LocalSteps | str = DEFAULT, **options: Any):
        self.trainer, self.recipe, self.options = trainer, recipe_of(reducer), options
        self.handle: Handle | None = None
        self._resumes_from: str | None = None
        self._hear_of_resuming(trainer)

    def _hear_of_resuming(self, trainer: Trainer) -> None:
        """Callbacks are not told which checkpoint a run goes on from, so this listens to who is."""
        train = trainer.train

        @wraps(train)
        def listening(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
            chosen = resume_from_checkpoint or None
            self._resumes_from = get_last_checkpoint(trainer.args.output_dir) if chosen is True else chosen
            return train(resume_from_checkpoint, *args, **kwargs)

        trainer.train = listening

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The model and the optimizer are prepared, and what the Trainer itself has saved is loaded."""
        ddp = ddp_inside(self.trainer.model_wrapped)
        if ddp is None:
            if args.world_size > 1:
                raise TypeError(
                    f"the Trainer made no DDP model but a {type(self.trainer.model_wrapped).__name__}: thinwire takes "
                    "the place of DDP's all-reduce, so train with plain DDP (no FSDP, no DeepSpeed)"
                )
            return  # one process alone exchanges nothing
        if isinstance(self.recipe, LocalSteps):
            if self.handle is not None:
                self.handle.detach()
            self.handle = local(silence(ddp), self.trainer.optimizer, self.recipe, **self.options)
        else:
            try:
                self.handle = handle_of(ddp)  # trained before
            except KeyError:
                scaler = self.trainer.accelerator.scaler
                self.handle = attach_to_ddp(ddp, self.recipe, scaler=scaler, **self.options)
        if self._resumes_from is not None:
            load([self.handle], self._resumes_from)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """On every rank, right after the Trainer has written model and optimizer."""
        if self.handle is not None and not args.save_only_model:
            save([self.handle], Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Local steps end with equal models; the best one, if it was loaded back, is the same on all ranks already."""
        best = args.load_best_model_at_end and state.best_model_checkpoint is not None
        if isinstance(self.handle, LocalHandle) and not best:
            self.handle.finish()
