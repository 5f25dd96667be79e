"""How ExDyna's density follows its target: the fast control beside the published code's decisions.

    python benchmarks/exdyna_control.py [--workers 2 4 8 16] [--entries 100000] [--steps 1000]

For each density and number of workers (4 for the published code) a run from a first gradient scale (1e-6 and
1e3), which jumps to ten times that and falls back to it. After each change: how far the mean of 20 steps is off at
step 100, how far it is off at most from step 200 on, how far the mean from step 200 on is off, and the highest
density of a single step.

The bars: 10 % at step 100, and 3 % for any 20 steps from step 200 on.

Then balance: f = n max k_i / sum k_i after 500 steps of Poisson counts, 50 000 picks, for the three load profiles of
the specification, for each rule that moves blocks.
"""

import argparse
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from thinwire.lab.run.ranks import Ranks
from thinwire.methods.exdyna import partitions, published
from thinwire.methods.exdyna.method import ExDyna
from thinwire.methods.exdyna.partitions import Blocks

DENSITIES, SCALES = (0.1, 0.01, 0.001), (1e-6, 1e3)


def gradients(entries: int, workers: int, scales: list[float], seed: int = 0) -> Iterator[Tensor]:
    """Windows of a pool of noise, a quarter of the variance common to all, in 32 layers of unlike scale."""
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(4 * entries, generator=generator)
    layers = torch.randn(32, generator=generator).exp().repeat_interleave(-(-entries // 32))[:entries]
    for scale in scales:
        starts = torch.randint(0, 3 * entries, (workers + 1,), generator=generator).tolist()
        common, *own = (pool[start : start + entries] for start in starts)
        yield torch.stack([(0.5 * common + 0.866 * mine) * (layers * scale) for mine in own])


def track(method: ExDyna, workers: int, entries: int, scales: list[float]) -> Tensor:
    ranks, target = Ranks(method, workers, entries), int(method.density * entries + 1e-9)
    return torch.tensor([ranks.step(g).numel() / target for g in gradients(entries, workers, scales)])


def judge(ratios: Tensor) -> tuple[float, float, float, float]:
    means = ratios.unfold(0, 20, 1).mean(1) - 1
    late = float(means[181:].abs().max())
    return float(means[80].abs()), late, float((ratios[200:].mean() - 1).abs()), float(ratios.max())


def control(workers: list[int], entries: int, steps: int) -> bool:
    print(f"{'':52s}{'20 steps':>10s}{'20 steps':>10s}{'mean':>10s}{'highest':>10s}")
    print(f"{'control, density, workers, first scale, change':52s}", end="")
    print(f"{'at 100':>10s}{'200 on':>10s}{'200 on':>10s}{'step':>10s}")
    met = True
    for name in ("fast", "official"):
        for density in DENSITIES:
            for world in workers if name == "fast" else [4]:
                for scale in SCALES:
                    method = ExDyna(density) if name == "fast" else ExDyna.official(density)
                    scales = [scale] * steps + [10 * scale] * steps + [scale] * steps
                    ratios = track(method, world, entries, scales).split(steps)
                    for change, part in zip(("start", "x10", "x0.1"), ratios, strict=True):
                        at_100, late, mean, highest = judge(part)
                        good = at_100 <= 0.1 and late <= 0.03
                        met &= good or name == "official"
                        label = f"{name:9s} {density:<6} {world:3d} workers, {scale:.0e}, {change}"
                        print(f"{label:52s}{at_100:10.3f}{late:10.3f}{mean:10.4f}{highest:10.2f}", end="")
                        print("" if good else "   misses", flush=True)
    return met


def profiles(blocks: int, picks: int) -> dict[str, Tensor]:
    place, tenth = torch.arange(blocks), blocks // 10
    layers = torch.randn(32, generator=torch.Generator().manual_seed(1)).exp().repeat_interleave(blocks // 32)
    shapes = {
        "ramp 1.8 to 0.2": torch.linspace(1.8, 0.2, blocks),
        "32 lognormal layers": layers,
        "half in the first tenth": torch.where(place < tenth, 0.5 / tenth, 0.5 / (blocks - tenth)),
        "nine tenths in the first": torch.where(place < tenth, 0.9 / tenth, 0.1 / (blocks - tenth)),
    }
    return {name: shape / shape.sum() * picks for name, shape in shapes.items()}


def imbalance(rule: str, loads: Tensor, workers: int, steps: int = 500) -> float:
    """The mean f of the last 20 steps."""
    generator = torch.Generator().manual_seed(0)
    blocks, shares = Blocks(32 * len(loads), len(loads), 32), partitions.fair_shares(len(loads), workers)
    smooth: list[float] = []
    found = []
    for _ in range(steps):
        counts = torch.poisson(loads, generator=generator).long()
        picks = [int(part.sum()) for part in counts.split(shares)]
        found.append(workers * max(picks) / sum(picks))
        if rule == "recut":
            smooth = partitions.smoothed(smooth, counts.tolist())
            shares = partitions.recut(shares, smooth)
        elif rule == "pairwise":
            shares, smooth = partitions.move_pairwise(shares, partitions.smoothed(smooth, picks))
        elif rule == "official":
            shares = published.move(shares, picks, blocks)
    return sum(found[-20:]) / 20


def balance() -> bool:
    rules, met = ("static", "official", "pairwise", "recut"), True
    print(f"\nimbalance f after 500 steps, 50 000 picks{'':17s}" + "".join(f"{rule:>10s}" for rule in rules))
    for workers in (4, 8, 16, 64):
        for name, loads in profiles(max(1024, 64 * workers), 50_000).items():
            found = {rule: imbalance(rule, loads, workers) for rule in rules}
            print(f"{workers:3d} workers, {name:45s}" + "".join(f"{found[rule]:10.3f}" for rule in rules), flush=True)
            met &= workers != 8 or found["recut"] <= 1.15
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=1000, help="after each change of scale")
    args = parser.parse_args()
    torch.set_num_threads(1)
    followed, balanced = control(args.workers, args.entries, args.steps), balance()
    print(f"\nfast control: density {'holds' if followed else 'MISSED'}; recut, 8 workers: f at most 1.15", end=" ")
    print("holds" if balanced else "MISSED")
    return int(not (followed and balanced))


if __name__ == "__main__":
    sys.exit(main())
