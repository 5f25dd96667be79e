"""What a link carries as workers are added, for sparsifiers and low-bit codes, relative to the dense ring all-reduce.

    python benchmarks/scale.py [--entries 500000] [--steps 60] [--density 0.01] [--only LowBit]

Up to 16 workers are threads that really exchange (`thinwire.comm.threads`): the bytes are those on the ledger of the
busiest worker, over the second half of the steps, because residuals, and loads with them, change most in the first.
64 and 256 workers are simulated: ExDyna and MiCRO by all their workers' decisions without the exchange
(`thinwire.lab.ranks`), the union of Top-k by the same on rows of a matrix, the others by a dry run of the real
method, which takes all workers to send what one sends.

Gradients are normal, a quarter of their variance common to all workers, in 32 layers of unlike scale; everything
runs under error feedback. The last lines hold ExDyna to its bar: the ratio at 16 workers at most 1.1 of that at 2; and
codes that go two ways to theirs: the ratio at 64 workers at most 1.01 of that at 4.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thinwire import Layout, Reducer, kernels, parse
from thinwire.comm import Comm, Ledger
from thinwire.comm.dry import DryComm
from thinwire.comm.threads import in_threads
from thinwire.core.draws import mix64
from thinwire.core.factors import Factors
from thinwire.exchange import bytes as wire
from thinwire.lab.run.ranks import Ranks
from thinwire.methods.exdyna.method import ExDyna

THREADS, SIMULATED = (2, 4, 8, 16), (64, 256)
SPELLINGS = (
    "ErrorFeedback(ExDyna({d}))",
    "ErrorFeedback(ExDyna({d}, topology='pairwise'))",
    "ErrorFeedback(MiCRO({d}))",
    "CLTK({d})",
    "ErrorFeedback(DEFT({d}))",
    "ErrorFeedback(GTopK({d}))",
    "ErrorFeedback(OkTopk({d}))",
    "ErrorFeedback(SIDCo({d}))",
    "ErrorFeedback(TopK({d}))",
    "ErrorFeedback(TopK({d}, agree=True))",
    "DGC({d})",
    "ErrorFeedback(PowerSGD(4))",
    "RankDAD(4)",
    "RankDAD(4, basis='own')",
    "ErrorFeedback(QSGD(2, rounding='nearest'))",
    "ErrorFeedback(QSGD(2, rounding='nearest', two_way=True))",
    "ErrorFeedback(SignSGD())",
    "ErrorFeedback(SignSGD(two_way=True))",
    "ErrorFeedback(LowBit(2, two_way=False))",
    TWO_WAYS := "ErrorFeedback(LowBit(2))",
)


class Gradients:
    """Windows of one pool of noise: cheap, and the same for every method."""

    def __init__(self, entries: int):
        generator = torch.Generator().manual_seed(0)
        self.entries = entries
        self.pool = torch.randn(2 * entries + 10_000, generator=generator)
        self.scale = torch.randn(32, generator=generator).exp().repeat_interleave(-(-entries // 32))[:entries]

    def window(self, *words: int) -> Tensor:
        start = mix64(*words) % (len(self.pool) - self.entries)
        return self.pool[start : start + self.entries]

    def __call__(self, step: int, rank: int) -> Tensor:
        return (0.5 * self.window(step, -1) + 0.866 * self.window(step, rank)) * self.scale


def layout_of(entries: int) -> Layout:
    """Eight matrices of equal size, and the rest: DEFT deals out tensors."""
    rows = entries // 8 // 100
    left = entries - 800 * rows
    shapes = [torch.Size([rows, 100])] * 8 + ([torch.Size([left])] if left else [])
    return Layout(tuple(f"p{i}" for i in range(len(shapes))), tuple(shapes))


def known(method: Reducer[Any, Any], gradient: Tensor, layout: Layout) -> Any:
    """A gradient, or the same as what a method of layers is handed of many rows: formed."""
    if method.wants is not Factors:
        return gradient
    return Factors(layout.shapes, [], dict(enumerate(layout.views(gradient))), [])


def wire_by_threads(method: Reducer[Any, Any], gradients: Gradients, workers: int, steps: int) -> float:
    layout = layout_of(gradients.entries)

    def work(comm: Comm) -> float:
        state, out, before = method.init(layout), layout.zeros(), 0.0
        for step in range(steps):
            if step == steps // 2:
                before = comm.ledger.wire
            method.reduce(known(method, gradients(step, comm.rank), layout), state, comm, out)
        return comm.ledger.wire - before

    return max(in_threads(workers, work, timeout=1800)) / (steps - steps // 2)


def wire_by_dry_run(method: Reducer[Any, Any], gradients: Gradients, workers: int, steps: int) -> float:
    layout, comm = layout_of(gradients.entries), DryComm(workers, rank=1)
    state, out, before = method.init(layout), layout.zeros(), 0.0
    for step in range(steps):
        if step == steps // 2:
            before = comm.ledger.wire
        method.reduce(known(method, gradients(step, 1), layout), state, comm, out)
    return (comm.ledger.wire - before) / (steps - steps // 2)


def wire_by_ranks(method: ExDyna, gradients: Gradients, workers: int, steps: int) -> float:
    ranks, before = Ranks(method, workers, gradients.entries), 0.0
    for step in range(steps):
        if step == steps // 2:
            before = ranks.ledger.wire
        ranks.step(torch.stack([gradients(step, rank) for rank in range(workers)]))
    return (ranks.ledger.wire - before) / (steps - steps // 2)


def wire_of_unions(density: float, gradients: Gradients, workers: int, steps: int) -> float:
    """Top-k with `agree`: indices gathered, values averaged at their union."""
    entries, k = gradients.entries, int(density * gradients.entries)
    residuals, ledger, before = torch.zeros(workers, entries), Ledger(workers), 0.0
    for step in range(steps):
        if step == steps // 2:
            before = ledger.wire
        for rank, row in enumerate(residuals):
            row += gradients(step, rank)
        picks = [kernels.top_k(row, k) for row in residuals]
        union = torch.unique(torch.cat(picks))
        ledger.enter_bytes("all_gather", max(wire.encode_index(index, entries).numel() for index in picks))
        ledger.enter_bytes("all_mean", 4 * union.numel())
        residuals[:, union.long()] = 0
    return (ledger.wire - before) / (steps - steps // 2)


def simulated(spelling: str, density: float) -> Callable[[Gradients, int, int], float]:
    method = parse(spelling)
    if "agree" in spelling:
        return lambda gradients, workers, steps: wire_of_unions(density, gradients, workers, steps)
    if "ExDyna" in spelling or "MiCRO" in spelling:
        inner = method.inner  # type: ignore[attr-defined]
        exdyna = inner if isinstance(inner, ExDyna) else ExDyna(density, topology="static")
        return lambda gradients, workers, steps: wire_by_ranks(exdyna, gradients, workers, steps)
    return lambda gradients, workers, steps: wire_by_dry_run(method, gradients, workers, steps)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=500_000)
    parser.add_argument("--simulated-entries", type=int, default=300_000, help="of 64 and 256 workers in one process")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--only", default="", help="rows whose spelling holds this")
    parser.add_argument("--no-simulation", action="store_true", help="only up to 16 workers")
    args = parser.parse_args()
    torch.set_num_threads(1)
    gradients, few = Gradients(args.entries), Gradients(args.simulated_entries)
    worlds = THREADS + (() if args.no_simulation else SIMULATED)
    print(f"wire bytes of the busiest link / dense ring's, density {args.density}, {args.entries} entries", end="")
    print(f" ({args.simulated_entries} from 64 workers on)")
    print(f"{'':48s}" + "".join(f"{world:>9d}" for world in worlds) + "    16 / 2")
    found: dict[str, dict[int, float]] = {}
    for pattern in (pattern for pattern in SPELLINGS if args.only in pattern):
        spelling = pattern.format(d=args.density)
        row = found[pattern] = {}
        print(f"{spelling:48s}", end="", flush=True)
        for world in worlds:
            if world in THREADS:
                sent, size = wire_by_threads(parse(spelling), gradients, world, args.steps), args.entries
            else:
                sent, size = simulated(spelling, args.density)(few, world, args.steps), args.simulated_entries
            row[world] = sent / (2 * (world - 1) / world * size * 4)
            print(f"{row[world]:9.4f}", end="", flush=True)
        print(f"{row[16] / row[2]:10.2f}", flush=True)
    missed = 0
    for pattern, name, first, last, bar in (
        (SPELLINGS[0], "ExDyna", 2, 16, 1.1),
        (TWO_WAYS, "LowBit two ways", 4, 64, 1.01),
    ):
        if pattern in found and last in found[pattern]:
            growth = found[pattern][last] / found[pattern][first]
            missed += growth > bar
            verdict = "MISSED" if growth > bar else "holds"
            print(f"{name} from {first} to {last} workers: {growth:.3f} (bar {bar}): {verdict}")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
