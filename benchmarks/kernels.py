"""The kernels against one `add_` over the same entries, against their plain-torch twins and against torch.topk.

    python benchmarks/kernels.py --json kernels.json

A density of 0.001 throughout. Vectors are prepared so that every round finds the same work: what a selection clears is
put back, what is added is taken away the next time.
"""

import os
from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch
from _ratio import Row, arguments, ratio, report
from torch import Tensor

from thinwire import kernels
from thinwire.exchange import bytes as wire

DENSITY = 0.001
WORKERS = 4
GROUPS = 160  # tensors of a model: that many headers in a message of Variance


def main() -> None:
    chosen = arguments(__doc__)
    n, k = chosen.entries, int(DENSITY * chosen.entries)
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    threshold = kernels.kth_magnitude(x, k)
    target = torch.zeros(n)
    turns = cycle([x, -x])

    def add() -> None:
        target.add_(next(turns))

    bench = Bench(n, k, x, threshold)
    kernels.warm()
    rows = []
    for name, (work, before, bar, slow_rounds) in bench.cases().items():
        fast = ratio(add, work, chosen.rounds, before)
        twin = None
        if slow_rounds:
            os.environ["THINWIRE_KERNELS"] = "reference"
            twin = fast / ratio(add, work, slow_rounds, before)
            del os.environ["THINWIRE_KERNELS"]
        rows.append(Row(name, fast, bar, twin))
    topk = ratio(add, lambda: torch.topk(x.abs(), k, sorted=False), 3)
    rows.append(Row("torch.topk of the magnitudes", topk))
    report("Time over that of one add_", rows, chosen)


Case = tuple[Callable[[], Any], Callable[[], Any], float | None, int]


class Bench:
    """Vectors, and what the kernels do to them."""

    def __init__(self, n: int, k: int, x: Tensor, threshold: float) -> None:
        self.n, self.k, self.x, self.threshold = n, k, x, threshold
        self.full, self.out, self.residual = x.clone(), torch.zeros(n), torch.zeros(n)
        self.turns = cycle([x, -x])
        self.r, self.v, self.square = torch.zeros(n), torch.ones(n), torch.zeros(n)
        self.index = kernels.top_k(x, k)
        self.sizes = [n // GROUPS] * (GROUPS - 1) + [n - n // GROUPS * (GROUPS - 1)]
        part, share = n // WORKERS, k // WORKERS
        self.draws = [kernels.random_k(part, share, seed) + part * seed for seed in range(WORKERS)]
        self.heard = [wire.encode_index(draw, n) for draw in self.draws[1:]]
        self.low_bit = LowBit(x, self.out)

    def cases(self) -> dict[str, Case]:
        def nothing() -> None:
            pass

        return {
            "finite": (lambda: kernels.finite(self.x), nothing, None, 3),
            "select": (lambda: kernels.select(self.x, self.threshold), nothing, None, 3),
            "top_k": (lambda: kernels.top_k(self.x, self.k), nothing, 4.0, 1),
            "quantile": (lambda: kernels.quantile(self.x, DENSITY), nothing, None, 3),
            "random_k": (lambda: kernels.random_k(self.n, self.k, 7), nothing, None, 3),
            "gather": (lambda: kernels.gather(self.x, self.index), nothing, None, 3),
            "take": (lambda: kernels.take(self.full, self.index), self.refill, None, 3),
            "fill_sparse": (lambda: self.fill(self.draws), nothing, None, 3),
            "variance_step": (self.variance_step, nothing, None, 3),
            "pack_signs": (lambda: kernels.pack_signs(self.x), nothing, None, 1),
            "unpack_signs": (self.signs(), nothing, None, 1),
            "encode_blocks, 1 bit": (lambda: self.low_bit.encode(1), nothing, None, 1),
            "encode_blocks, 2 bits": (lambda: self.low_bit.encode(2), nothing, None, 1),
            "decode_blocks, 2 bits": (self.low_bit.write, nothing, None, 1),
            f"LowBit(2)'s local work, {WORKERS} workers": (self.low_bit, nothing, 2.5, 0),
            f"ExDyna's local work, {WORKERS} workers": (self.exdyna, nothing, 2.0, 0),
            f"Variance's local work, {WORKERS} workers": (self.variance, nothing, 3.0, 0),
        }

    def refill(self) -> None:
        self.full[self.index] = self.x[self.index]

    def fill(self, indices: list[Tensor]) -> None:
        parts = [(index, self.x[: index.numel()]) for index in indices]
        kernels.fill_sparse(self.out, parts, 1 / WORKERS)

    def variance_step(self) -> Tensor:
        """r goes to x and back to zero; v stays at one; whoever beats the threshold is sure."""
        return kernels.variance_step(self.r, self.v, next(self.turns), self.square, self.threshold**2, 1.0)

    def signs(self) -> Callable[[], None]:
        """In stretches whose result stays in the cache, as methods do: a whole new vector costs page faults."""
        packed = kernels.pack_signs(self.x)
        stretch = 2**18

        def unpack() -> None:
            for start in range(0, self.n, stretch):
                length = min(stretch, self.n - start)
                kernels.unpack_signs(packed[start // 8 : -(-(start + length) // 8)], length)

        return unpack

    def exdyna(self) -> None:
        """Accumulate, select in the own partition, tell the indices, hear all, take the union, write the mean."""
        kernels.accumulate(self.residual, next(self.turns))
        index = kernels.select(self.residual, self.threshold, 0, self.n // WORKERS)
        message = wire.encode_index(index, self.n)
        union = torch.cat([wire.decode_index(each, self.n) for each in (message, *self.heard)])
        values = kernels.take(self.residual, union)
        kernels.fill_sparse(self.out, [(union, values)])

    def variance(self) -> None:
        """Update, test and decay; encode and clear; decode what all workers sent; write the mean."""
        index = self.variance_step()
        message, kept = wire.encode_words(index, kernels.gather(self.r, index), self.sizes)
        kernels.take(self.r, index[kept])
        heard = [wire.decode_words(message, self.sizes) for _ in range(WORKERS)]
        kernels.fill_sparse(self.out, heard, 1 / WORKERS)


class LowBit:
    """What a worker does in a two-way mean of 2-bit codes: code all, average and code its part, write all.

    The residual is coded over and over: codes of any size take the same time.
    """

    def __init__(self, x: Tensor, out: Tensor) -> None:
        self.residual, self.out, self.part = x.clone(), out, x.numel() // WORKERS
        self.owed = torch.zeros(self.part)
        self.blocks = {bits: kernels.blocks_of(((0, x.numel()),), bits, 512, x.device) for bits in (1, 2)}
        self.message = torch.zeros(self.blocks[2].nbytes, dtype=torch.uint8)
        self.slice = kernels.blocks_of(((0, self.part),), 2, 512, x.device)
        self.heard = torch.zeros(WORKERS, self.slice.nbytes, dtype=torch.uint8)
        for row in self.heard:
            kernels.encode_blocks(x[: self.part].clone(), self.slice, row)
        self.encode(2)

    def encode(self, bits: int) -> None:
        kernels.encode_blocks(self.residual, self.blocks[bits], self.message)

    def write(self) -> None:
        kernels.decode_blocks(self.message.unsqueeze(0), self.blocks[2], self.out)

    def __call__(self) -> None:
        self.encode(2)
        kernels.decode_blocks(self.heard, self.slice, self.owed, 1 / WORKERS, add=True)
        kernels.encode_blocks(self.owed, self.slice, self.heard[0])
        self.write()


if __name__ == "__main__":
    main()
