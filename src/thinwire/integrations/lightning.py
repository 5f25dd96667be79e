"""Lightning: `Trainer(strategy=ThinwireStrategy(...))` and `Fabric(strategy=ThinwireFabricStrategy(...))`.

Both go through `thinwire.wrap`, so that every method works, distributed auto-differentiation too; and through
`thinwire.local` for a recipe of local steps, in which case there is no DDP at all.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer

from thinwire.capture.gradients.arrived import Grain
from thinwire.core.reducer import Reducer
from thinwire.doors.ddp import handle as handle_of
from thinwire.doors.ddp import wrap
from thinwire.doors.handle import Handle
from thinwire.doors.local import LocalHandle, local
from thinwire.doors.optimizers import left_behind
from thinwire.integrations import DEFAULT
from thinwire.spelling import recipe_of
from thinwire.wrappers.local_steps import LocalSteps

KEY = "thinwire"  # of our state in a checkpoint
_WITHOUT = "The checkpoint has no state of thinwire's"


class _Joint:
    """What both strategies do: build the DDP model, or none for local steps."""

    def __init__(self, recipe: Any, options: dict[str, Any]):
        self.recipe, self.options = recipe_of(recipe), options

    @property
    def apart(self) -> bool:
        """Whether workers take steps of their own."""
        return isinstance(self.recipe, LocalSteps)

    def wrap(self, model: nn.Module, device_ids: list[int] | None, precision: Any, ddp: dict[str, Any]) -> nn.Module:
        # DDP asks for its setup to be on a stream of its own where CUDA graphs may follow, as Lightning does it.
        beside = torch.cuda.stream(torch.cuda.Stream()) if device_ids is not None else nullcontext()
        with beside:
            scaler = getattr(precision, "scaler", None)
            assert not isinstance(self.recipe, LocalSteps)  # there is no DDP then
            return wrap(model, self.recipe, device_ids=device_ids, scaler=scaler, **self.options, **ddp)


class ThinwireStrategy(DDPStrategy):
    """Lightning's DDP with `reducer` (or its spelling) in place of the all-reduce; or local steps, for a `LocalSteps`.

    grain, overlap, check_every: as for `thinwire.wrap`. Everything else goes to Lightning's `DDPStrategy`. The state of
    all ranks is part of every checkpoint that holds the optimizer's, and `handle` is thinwire's handle during `fit`.
    """

    model: Any  # Lightning's property

    def __init__(
        self,
        reducer: Reducer[Any, Any] | LocalSteps | str = DEFAULT,
        *,
        grain: Grain | None = None,
        overlap: bool | None = None,
        check_every: int = 100,
        **ddp: Any,
    ):
        if ddp.get("ddp_comm_hook") is not None:
            raise TypeError("thinwire is this DDP's communication hook: leave out ddp_comm_hook")
        super().__init__(**ddp)
        self._joint = _Joint(reducer, {"grain": grain, "overlap": overlap, "check_every": check_every})
        self.handle: Handle | None = None

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if self._joint.apart and trainer.state.fn == TrainerFn.FITTING:
            self._let_go()
            self.handle = local(self.lightning_module, self.optimizers, self._joint.recipe)

    def configure_ddp(self) -> None:
        if not self._joint.apart:
            self.model = self._setup_model(self.model)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        self._let_go()
        wrapped = self._joint.wrap(model, self.determine_ddp_device_ids(), self.precision_plugin, self._ddp_kwargs)
        self.handle = handle_of(wrapped)
        return wrapped

    def _let_go(self) -> None:
        """Of the last `fit`: this one has new optimizers, and begins without what was not sent then."""
        if self.handle is not None:
            self.handle.detach()

    def on_train_end(self) -> None:
        super().on_train_end()
        if isinstance(self.handle, LocalHandle):
            self.handle.finish()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's; between two exchanges of local steps, what all workers have in common."""
        if not isinstance(self.handle, LocalHandle):
            return super().lightning_module_state_dict()
        with self.handle.anchored():
            return {
                name: value.detach().clone() if isinstance(value, torch.Tensor) else value
                for name, value in super().lightning_module_state_dict().items()
            }

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self.handle is not None and "optimizer_states" in checkpoint:  # on every rank, and rank 0 writes
            checkpoint[KEY] = self.handle.gathered().state_dict()
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self.handle is None:
            return
        if KEY in checkpoint:
            self.handle.gathered().load_state_dict(checkpoint[KEY])
        else:
            left_behind(self.handle, _WITHOUT)


class LogMetrics(Callback):
    """Logs `handle.metrics()` as thinwire/..., through the module's `self.log`, every `log_every_n_steps` steps."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        handle = getattr(trainer.strategy, "handle", None)
        if not isinstance(handle, Handle):
            raise TypeError(
                f"LogMetrics needs a ThinwireStrategy, this trainer has a {type(trainer.strategy).__name__}"
            )
        if trainer.log_every_n_steps and trainer.global_step % trainer.log_every_n_steps == 0:
            pl_module.log_dict({f"thinwire/{name}": float(value) for name, value in handle.metrics().items()})


class ThinwireFabricStrategy(FabricDDPStrategy):
    """Fabric's DDP with `reducer` in place of the all-reduce; or local steps, for a `LocalSteps`. Options as above.

    Every checkpoint that holds a module holds the state of all ranks too. `handles`: one for each model set up. After
    the last of local steps call `handles[0].finish()`.
    """

    def __init__(
        self,
        reducer: Reducer[Any, Any] | LocalSteps | str = DEFAULT,
        *,
        grain: Grain | None = None,
        overlap: bool | None = None,
        check_every: int = 100,
        **ddp: Any,
    ):
        super().__init__(**ddp)
        self._joint = _Joint(reducer, {"grain": grain, "overlap": overlap, "check_every": check_every})
        self.handles: list[Handle] = []
        if self._joint.apart:
            self._backward_sync_control = None  # there is no DDP whose exchange could be put off

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        if not self._joint.apart:
            return super().setup_module_and_optimizers(module, optimizers, scheduler)
        self.handles.append(local(module, optimizers, self._joint.recipe))
        return module, optimizers, scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        if self._joint.apart:
            raise TypeError("local steps need to see the optimizer: call fabric.setup(model, optimizer)")
        wrapped = self._joint.wrap(module, self._determine_ddp_device_ids(), self.precision, self._ddp_kwargs)
        self.handles.append(handle_of(wrapped))
        return wrapped

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if any(isinstance(part, nn.Module) for part in state.values()):
            state = state | {KEY: [handle.gathered().state_dict() for handle in self.handles]}
        super().save_checkpoint(path, state, *args, **kwargs)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        rest: dict[str, Any] = super().load_checkpoint(path, state, *args, **kwargs)
        if not isinstance(state, dict) or not any(isinstance(part, nn.Module) for part in state.values()):
            return rest
        saved = rest.pop(KEY, [])
        if saved and len(saved) != len(self.handles):
            raise ValueError(
                f"the checkpoint has thinwire's state for {len(saved)} models, and {len(self.handles)} were set up: "
                "call fabric.setup for the same models before fabric.load"
            )
        for number, handle in enumerate(self.handles):
            if saved:
                handle.gathered().load_state_dict(saved[number])
            else:
                left_behind(handle, _WITHOUT)
        return rest
