"""A toy GPT-2 under AdamW through Hugging Face's Trainer: which methods reach plain DDP's loss, and at what bytes.

    python benchmarks/adapters.py --steps 300

It learns a fixed set of random sequences by heart, which AdamW does quickly with exact gradients, so that harm shows.
Two processes on this machine; prints the loss on all sequences after the last step, and the bytes on a worker's link.
"""

import argparse
import os
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.multiprocessing as mp
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import thinwire
from thinwire.integrations import DEFAULT
from thinwire.integrations.transformers import attach

METHODS = [
    "plain DDP",
    DEFAULT,
    "ErrorFeedback(PowerSGD(4))",
    "ErrorFeedback(LowBit(4))",
    "ErrorFeedback(TopK(0.1))",
    "ErrorFeedback(TopK(0.01))",
    "LocalSteps(Cast(Dense()), every=4)",
]


def work(rank: int, folder: str, method: str, steps: int, port: int, lr: float) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port), LOCAL_WORLD_SIZE="2")
    torch.manual_seed(0)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(64, (128, 32))]
    size = {"n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **size))
    given = {"use_cpu": True, "ddp_backend": "gloo", "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    arguments = TrainingArguments(
        folder, max_steps=steps, learning_rate=lr, per_device_train_batch_size=16, logging_strategy="no", **given
    )
    trainer = Trainer(model, arguments, train_dataset=data)
    callback = None if method == "plain DDP" else attach(trainer, method)
    trainer.train()
    model.eval()
    with torch.no_grad():
        rows = torch.stack([one["input_ids"] for one in data])
        loss = float(model(rows, labels=rows).loss)
    sent = 4.0 * sum(p.numel() for p in model.parameters()) * steps  # half out, half in, on two workers
    if callback is not None:
        assert callback.handle is not None
        sent = callback.handle.ledger.wire
    if rank == 0:
        Path(folder, "told").write_text(f"| `{method}` | {loss:.3f} | {sent / steps / 1000:.1f} kB |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=3e-3)
    asked = parser.parse_args()
    print(f"thinwire {thinwire.__version__}, {asked.steps} steps, AdamW at {asked.lr}")
    print("| method | loss at the end | a step |\n| --- | --- | --- |")
    for number, method in enumerate(METHODS):
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(
                work, (folder, method, asked.steps, 29700 + number, asked.lr), nprocs=2, start_method="fork"
            )
            print(Path(folder, "told").read_text(), flush=True)
