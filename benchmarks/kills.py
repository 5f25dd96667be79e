"""Kill workers at random times, in saves and in exchanges: is there always a whole set, and are its bits always right?

    python benchmarks/kills.py --kills 100 --seconds 600

Workers train by local steps and save after each exchange. One of them, or all, are killed without a word; then they
start anew from the newest set. Every life notes a digest of all parameters after every step: one step has one digest,
whatever lives led to it. Ends with 1, and the seed, if a life finds no set where one was saved before, or other bits.
"""

import argparse
import hashlib
import multiprocessing
import os
import random
import sys
import tempfile
import time
import warnings
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch.distributed as dist
from torch import nn

import thinwire
from thinwire.kernels import warm
from thinwire.step.sets import sets_in

LIMIT = 60.0  # seconds in which a life must make its first save


def life(rank: int, world: int, folder: Path, port: int, number: int) -> None:
    """Go on from the newest set, if there is one, until somebody ends it."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.PrefixStore(f"life{number}", dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=20))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    handle = thinwire.local(model, optimizer, thinwire.ErrorFeedback(thinwire.TopK(0.05)), every=2)
    with (folder / f"log{rank}").open("a", buffering=1) as log:
        if sets_in(folder / "sets"):
            try:
                handle.load(folder / "sets")
            except thinwire.CheckpointError as error:
                log.write(f"refused {str(error).splitlines()[0]}\n")
                raise
            log.write(f"{handle.steps} {digest(model)}\n")
        while True:
            batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(handle.steps * world + rank))
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            log.write(f"{handle.steps} {digest(model)}\n")
            if handle.steps % 2 == 1:  # in the middle of a round, where every rank has something of its own
                handle.save(folder / "sets")
                (folder / f"saved{rank}").touch()


def digest(model: nn.Module) -> str:
    raw = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(raw).hexdigest()


def start(rank: int, world: int, folder: Path, port: int, number: int) -> None:
    with (folder / f"errors{rank}").open("a") as errors:
        os.dup2(errors.fileno(), 2)
        with suppress(Exception):  # the others are gone: how this life ends is all that counts
            life(rank, world, folder, port, number)
    os._exit(3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=600, help="stop after so many, with what was done until then")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    warm()
    rng, began, kills = random.Random(asked.seed), time.monotonic(), 0
    context = multiprocessing.get_context("fork")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # which no kill takes along
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        while kills < asked.kills and time.monotonic() - began < asked.seconds:
            for mark in folder.glob("saved*"):
                mark.unlink()
            workers = [
                context.Process(target=start, args=(rank, asked.workers, folder, store.port, kills))
                for rank in range(asked.workers)
            ]
            for worker in workers:
                worker.start()
            until = time.monotonic() + LIMIT
            while not (folder / "saved0").exists() and time.monotonic() < until and workers[0].is_alive():
                time.sleep(0.005)
            if not (folder / "saved0").exists():
                return told(f"life {kills} made no save within {LIMIT:.0f} s", folder, asked.seed, workers)
            time.sleep(rng.uniform(0, 0.1))
            doomed = workers if rng.random() < 0.3 else [rng.choice(workers)]
            for worker in doomed:
                worker.kill()
                time.sleep(rng.choice((0.0, 0.0, 0.002)))
            kills += 1
            for worker in workers:
                worker.join(30)
            if any(worker.is_alive() for worker in workers):
                return told(f"a rank waits for one that kill {kills} has ended", folder, asked.seed, workers)
            if wrong := other_bits(folder, asked.workers):
                return told(wrong, folder, asked.seed, workers)
        steps = max(int(line.split()[0]) for line in (folder / "log0").read_text().splitlines())
        left = sum(1 for path in (folder / "sets").iterdir() if path.name.endswith(".part"))
    took = time.monotonic() - began
    print(f"{kills} kills in {took:.0f} s, {steps} steps: always a whole set, always the same bits; {left} left over")
    return 0


def other_bits(folder: Path, world: int) -> str | None:
    for rank in range(world):
        seen: dict[str, str] = {}
        for line in (folder / f"log{rank}").read_text().splitlines():
            step, _, bits = line.partition(" ")
            if step == "refused":
                return f"rank {rank} refused to go on: {bits}"
            if len(bits) == 64 and seen.setdefault(step, bits) != bits:  # a kill may have cut a line short
                return f"step {step} of rank {rank} has other bits than in an earlier life"
    return None


def told(what: str, folder: Path, seed: int, workers: list[multiprocessing.context.ForkProcess]) -> int:
    for worker in workers:
        worker.kill()
    errors = "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("errors*")))
    print(f"{what} (--seed {seed})\n{errors}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
