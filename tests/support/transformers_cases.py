"""Workers of tests/integrations/test_transformers.py."""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from framework_cases import BATCH, LOCAL, LOSSY, STEPS, Heard, Meter, die_on_rank_1, examples, launched, network, told
from thinwire.integrations import DEFAULT
from thinwire.integrations.accelerate import FOLDER
from thinwire.integrations.transformers import Thinwire, attach

SAVE_AT = STEPS // 3  # a multiple of the local steps between two exchanges


class Model(nn.Module):
    """As the Trainer calls models: named inputs, a loss in what comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Any, labels: Any) -> dict[str, Any]:
        return {"loss": nn.functional.mse_loss(self.net(x), labels)}


class Counter(TrainerCallback):
    def __init__(self, thin: Thinwire, meter: Meter, die_at: int | None = None):
        self.thin, self.meter, self.seen, self.die_at = thin, meter, 0, die_at

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.meter.read(self.thin.handle)
        self.seen += 1
        if self.seen == self.die_at:
            die_on_rank_1()


def trained(folder: str) -> dict[str, Any]:
    launched()
    return {str(m): run(m, Path(folder) / str(m).split("(")[0]) for m in (None, DEFAULT, LOSSY, LOCAL)}


def resumed(folder: str) -> dict[str, Any]:
    rank, _ = launched()
    found: dict[str, Any] = {}
    for method in (DEFAULT, LOSSY, LOCAL):
        place = Path(folder) / method.split("(")[0]
        found[method] = run(method, place, resume=str(place / f"checkpoint-{SAVE_AT}"))
    without = Path(folder) / "without"
    if rank == 0:
        shutil.copytree(Path(folder) / "ErrorFeedback" / f"checkpoint-{SAVE_AT}", without)
        shutil.rmtree(without / FOLDER)
    torch.distributed.barrier()
    with Heard() as words:
        run(LOSSY, Path(folder) / "again", resume=str(without))
    return found | {"without": words}


def killed(folder: str) -> None:
    run(LOSSY, Path(folder), die_at=SAVE_AT + 1)


def after_the_kill(folder: str) -> dict[str, Any]:
    return run(LOSSY, Path(folder), resume=True)  # the newest checkpoint that the Trainer finds itself


def run(
    method: str | None, folder: Path, resume: str | bool | None = None, die_at: int | None = None
) -> dict[str, Any]:
    _, world = launched()
    x, y = examples(world)
    model, meter = Model(), Meter()
    arguments = TrainingArguments(
        str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=0.01,
        save_steps=SAVE_AT,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    )
    data = [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]
    trainer = Trainer(model, arguments, train_dataset=data)
    if method is None:
        trainer.train()
        return told(model.net, None, world)
    callback = attach(trainer, method)
    counter = Counter(callback, meter, die_at)
    trainer.add_callback(counter)
    trainer.train(resume_from_checkpoint=resume)
    return told(model.net, callback.handle, world, meter) | {"seen": counter.seen}
