"""Workers of tests/integrations/test_lightning.py."""

from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import thinwire
from framework_cases import (
    BATCH,
    BATCHES,
    EPOCHS,
    LOCAL,
    LOSSY,
    STEPS,
    Heard,
    Meter,
    batch,
    by_hand,
    die_on_rank_1,
    examples,
    launched,
    loss_of,
    network,
    optimizer_for,
    told,
)
from thinwire.integrations import DEFAULT
from thinwire.integrations.lightning import KEY, LogMetrics, ThinwireFabricStrategy, ThinwireStrategy


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, pair: Any) -> Any:
        return loss_of(self.net, *pair)

    def configure_optimizers(self) -> Any:
        return optimizer_for(self.net)


class Metered(Callback):
    def __init__(self, die_at: int | None) -> None:
        self.meter, self.die_at = Meter(), die_at

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if isinstance(trainer.strategy, ThinwireStrategy):
            self.meter.read(trainer.strategy.handle)
        if trainer.global_step == self.die_at:
            die_on_rank_1()


def fit(
    folder: str, strategy: Any, resume: Path | None = None, plugins: Any = None, die_at: int | None = None
) -> tuple[dict[str, Any], Trainer]:
    rank, world = launched()
    module, name = Module(), f"{id(strategy)}"
    saver = ModelCheckpoint(Path(folder) / name, filename="{epoch}", every_n_epochs=1, save_top_k=-1)
    metered = Metered(die_at)
    thin = isinstance(strategy, ThinwireStrategy)
    quiet: Any = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        max_epochs=EPOCHS,
        callbacks=[saver, metered, LogMetrics()] if thin else [saver, metered],
        log_every_n_steps=1,
        plugins=plugins,
        use_distributed_sampler=False,  # it would shuffle
        **quiet,
    )
    data = TensorDataset(*examples(world))
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data, world, rank, shuffle=False))
    trainer.fit(module, loader, ckpt_path=resume)
    found = told(module.net, strategy.handle if thin else None, world, metered.meter)
    first = trainer.strategy.broadcast(str(Path(saver.dirpath) / "epoch=0.ckpt"))
    logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return found | {"checkpoint": first, "logged": logged}, trainer


def trained(folder: str) -> dict[str, Any]:
    rank, world = launched()
    found: dict[str, Any] = {"plain": fit(folder, DDPStrategy())[0]}
    for method in (DEFAULT, LOSSY, LOCAL, "RankDAD(2)"):
        found[method] = fit(folder, ThinwireStrategy(method))[0]
        found[f"{method} by hand"] = by_hand(rank, world, method, inside=True)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=64.0))
    strategy = ThinwireStrategy(LOSSY)
    scaled, _ = fit(folder, strategy, plugins=plugin)
    assert strategy.handle is not None and strategy.handle.capture.scaler is plugin.scaler
    return found | {"scaled": scaled, "scale": strategy.handle.capture.scale}


def resumed(folder: str, checkpoints: dict[str, str]) -> dict[str, Any]:
    rank, _ = launched()
    found: dict[str, Any] = {m: fit(folder, ThinwireStrategy(m), Path(path))[0] for m, path in checkpoints.items()}
    kept = torch.load(checkpoints[LOSSY], weights_only=True)
    del kept[KEY]
    without = Path(folder) / f"without-{rank}.ckpt"
    torch.save(kept, without)
    with Heard() as words:
        fit(folder, ThinwireStrategy(LOSSY), without)
    return found | {"without": words}


def killed(folder: str) -> None:
    fit(folder, ThinwireStrategy(LOSSY), die_at=BATCHES + 1)


def after_the_kill(folder: str) -> dict[str, Any]:
    (kept,) = Path(folder).rglob("epoch=0.ckpt")  # of the epoch before the one in which the worker died
    return fit(folder, ThinwireStrategy(LOSSY), kept)[0]


def fabric(folder: str) -> dict[str, Any]:
    """Twice to the end: at one go, and from a checkpoint half way, in another model."""
    rank, world = launched()
    found: dict[str, Any] = {}
    for method in (DEFAULT, LOSSY, LOCAL, "RankDAD(2)"):
        path = Path(folder) / method.split("(")[0]
        found[method] = _fabric(method, path, rank, world, resume=False)
        found[f"{method} resumed"] = _fabric(method, path, rank, world, resume=True)
        found[f"{method} by hand"] = by_hand(rank, world, method)
    if rank == 0:
        kept = torch.load(Path(folder) / "ErrorFeedback", weights_only=True)
        del kept[KEY]
        torch.save(kept, Path(folder) / "without")
    torch.distributed.barrier()
    with Heard() as words:
        _fabric(LOSSY, Path(folder) / "without", rank, world, resume=True)
    return found | {"without": words}


def _fabric(method: str, path: Path, rank: int, world: int, resume: bool) -> dict[str, Any]:
    strategy = ThinwireFabricStrategy(method)
    made = Fabric(accelerator="cpu", devices=world, strategy=strategy)
    made.launch()
    net, meter = network(), Meter()
    model, optimizer = made.setup(net, optimizer_for(net))
    state = {"model": model, "optimizer": optimizer}
    if resume:
        made.load(path, state)
    for step in range(BATCHES if resume else 0, STEPS):
        optimizer.zero_grad()
        made.backward(loss_of(model, *batch(step, rank, world)))
        optimizer.step()
        meter.read(strategy.handles[0])
        if step == BATCHES - 1:
            made.save(path, state)
            made.barrier()
    handle: Any = strategy.handles[0]
    if isinstance(handle, thinwire.LocalHandle):
        handle.finish()
    else:
        assert thinwire.handle(model) is handle
    return told(net, handle, world, meter)
