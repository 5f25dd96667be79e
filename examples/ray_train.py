"""Train with Ray, and go on from Ray's checkpoints, also with another number of workers:

python examples/ray_train.py --workers 2 --steps 100
python examples/ray_train.py --workers 3 --steps 200
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train.torch import TorchTrainer, prepare_model
from sklearn.datasets import load_digits
from torch import nn

import thinwire


def train(config: dict[str, Any]) -> None:
    """What each worker does; Ray has set up torch.distributed."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    shuffled = torch.randperm(len(images))
    images, labels = images[shuffled].float() / 16, labels[shuffled].long()

    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    model = thinwire.wrap(prepare_model(model, parallel_strategy=None), "ErrorFeedback(TopK(0.01))")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = thinwire.handle(model)

    done = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            kept = torch.load(Path(folder, "model.pt"), weights_only=True)
            model.module.load_state_dict(kept["model"])
            optimizer.load_state_dict(kept["optimizer"])
            handle.load(Path(folder, "thinwire"))  # on every rank
        done = kept["step"]
        print(f"rank {rank} of {world} goes on after step {done}")

    for step in range(done + 1, config["steps"] + 1):
        own = torch.Generator().manual_seed(1000 * rank + step)
        batch = torch.randint(1500, (32,), generator=own)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            with tempfile.TemporaryDirectory() as folder:
                if rank == 0:
                    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(state, Path(folder, "model.pt"))
                handle.save(Path(folder, "thinwire"))  # on every rank; Ray puts the ranks' files into one checkpoint
                total = sum(float(p.detach().double().sum()) for p in model.parameters())
                told = {"step": step, "workers": world, "loss": loss.item(), "sum_of_parameters": total}
                ray.train.report(told, checkpoint=ray.train.Checkpoint.from_directory(folder))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("checkpoints"))
    asked = parser.parse_args()
    ray.init(num_cpus=asked.workers)  # on one machine; on a cluster: ray.init()
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": asked.steps},
        scaling_config=ray.train.ScalingConfig(num_workers=asked.workers),
        # a run of the same name and folder goes on from its newest checkpoint
        run_config=ray.train.RunConfig(name="ray", storage_path=str(asked.out.resolve())),
    )
    print(trainer.fit().metrics)
