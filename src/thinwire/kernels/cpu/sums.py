"""Sums and the largest magnitude of a stretch of entries, in vector instructions and in one defined order.

LLVM does not reorder sums of floating-point numbers by itself, and so does not vectorise them. Here 64 sums run side by
side and are folded in halves at the end, as `thinwire.kernels.low_bit` does in plain torch.
The number of entries is a multiple of 64, and the caller guarantees that they exist.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from thinwire.kernels.cpu.lanes import INT32, INT64, LANES, PIECE, _data, _load, _magnitude, _spread, intrinsic

Combine = Callable[[Any, Any], Any]


class Sums:
    """64 sums side by side, as vectors of 16."""

    def __init__(self, builder: Any, kind: Any, combine: Combine | None = None):
        self.builder, self.combine = builder, combine or builder.fadd
        nothing = ir.Constant(kind, [0.0] * PIECE)
        self.totals = [cgutils.alloca_once_value(builder, nothing) for _ in range(LANES // PIECE)]
        for total in self.totals:  # the first time is at the function's entry, and this code may lie in a loop
            builder.store(nothing, total)

    def add(self, number: int, term: Any) -> None:
        total = self.totals[number]
        self.builder.store(self.combine(self.builder.load(total), term), total)

    def folded(self) -> Any:
        lanes = [self.builder.load(total) for total in self.totals]
        while len(lanes) > 1:
            half = len(lanes) // 2
            lanes = [self.combine(a, b) for a, b in zip(lanes[:half], lanes[half:], strict=True)]
        folded, width = lanes[0], PIECE
        while width > 1:
            width //= 2
            low, high = (self._part(folded, start, width) for start in (0, width))
            folded = self.combine(low, high)
        return self.builder.extract_element(folded, ir.Constant(INT32, 0))

    def _part(self, vector: Any, start: int, width: int) -> Any:
        places = ir.Constant(ir.VectorType(INT32, width), list(range(start, start + width)))
        return self.builder.shuffle_vector(vector, vector, places)


def _reduced(builder: Any, kind: Any, size: Any, term: Callable[[Any], Any], combine: Combine | None = None) -> Any:
    sums = Sums(builder, ir.VectorType(kind, PIECE), combine)
    with cgutils.for_range_slice(builder, INT64(0), size, INT64(LANES)) as (start, _):
        for number in range(LANES // PIECE):
            sums.add(number, term(builder.add(start, INT64(number * PIECE))))
    return sums.folded()


@intrinsic
def largest(typing: Any, x: Any, size: Any) -> Any:
    """The largest |x[i]|."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = _data(context, builder, signature, args, 0)

        def term(at: Any) -> Any:
            return _magnitude(builder, _load(builder, data, at))

        def combine(a: Any, b: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", b, a), b, a)

        return _reduced(builder, data.type.pointee, args[1], term, combine)

    return x.dtype(x, types.int64), code


@intrinsic
def sum_of_squares(typing: Any, x: Any, size: Any, factor: Any) -> Any:
    """The sum of (factor * x[i])^2."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data, scale = _data(context, builder, signature, args, 0), _spread(builder, args[2])

        def term(at: Any) -> Any:
            small = builder.fmul(_load(builder, data, at), scale)
            return builder.fmul(small, small)

        return _reduced(builder, data.type.pointee, args[1], term)

    return x.dtype(x, types.int64, x.dtype), code
