"""The index codec: bytes against the entropy bound log2 C(n, k), time against one `add_` over the same entries.

    python benchmarks/codec.py --json codec.json

Sixteen bytes of each message are not counted against the bound: the header, and bits that fill up a byte. Right after
an `add_` over a large vector no cache holds the codec's code, nor the interpreter's; in a row they do. A step has both.
"""

import math
from collections.abc import Callable
from itertools import cycle

import torch
from _ratio import Row, arguments, ratio, report

from thinwire import kernels
from thinwire.exchange import bytes as wire

DENSITIES = [0.1, 0.01, 0.001, 0.0001]


def entropy_bytes(n: int, k: int) -> float:
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2) / 8


def main() -> None:
    chosen = arguments(__doc__)
    n = chosen.entries
    target = torch.zeros(n)
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    turns = cycle([x, -x])

    def add() -> None:
        target.add_(next(turns))

    kernels.warm()
    sizes, times = [], []
    for density in DENSITIES:
        k = int(density * n)
        index = kernels.random_k(n, k, 1)
        values = x[index]
        message = wire.encode_index(index, n)
        bound = entropy_bytes(n, k)
        note = f"{8 * message.numel() / k:.2f} bits an index, {8 * bound / k:.2f} at least"
        sizes.append(Row(f"bytes at density {density:g}", (message.numel() - 16) / bound, 1.1, note=note))

        def both(index: torch.Tensor = index) -> None:
            wire.decode_index(wire.encode_index(index, n), n)

        def whole(index: torch.Tensor = index, values: torch.Tensor = values) -> None:
            wire.decode(wire.encode(index, values, n), n)

        def again(both: Callable[[], None] = both) -> None:
            for _ in range(10):
                both()

        bar = 0.05 if density == 0.001 else None
        name = f"encode and decode {k:,}"
        times.append(Row(f"{name} indices, one of ten in a row", ratio(add, again, chosen.rounds) / 10, bar))
        times.append(Row(f"{name} indices, right after the add_", ratio(add, both, chosen.rounds)))
        times.append(Row(f"{name} indices and values, right after", ratio(add, whole, chosen.rounds)))
    report("Bytes over the entropy bound, and time over that of one add_", [*sizes, *times], chosen)


if __name__ == "__main__":
    main()
