"""Work on 64 neighbouring entries at once, with a test of each answered as the 64 bits of one word.

LLVM's loop vectoriser is good at sums and poor at anything that leaves a loop early, so the one thing that selection
needs, "which of these lanes pass?", is written as vector instructions. They are LLVM's own, not a processor's: each
target lowers them to what it has (a compare and a mask register, a compare and movmskps, ...).
The caller guarantees that the 64 entries exist.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending
from numba.core import cgutils, types

LANES = 64
ONE, NONE, WIDTH = np.uint64(1), np.uint64(0), np.uint64(LANES)  # numba makes floats of mixed signs
PIECE = 16  # entries in one vector: wide enough for AVX-512, and every narrower target splits it well

intrinsic: Any = extending.intrinsic
INT1, INT32, INT64 = ir.IntType(1), ir.IntType(32), ir.IntType(64)


def _piece(builder: Any, data: Any, start: Any) -> tuple[Any, int]:
    kind = data.type.pointee
    vector = ir.VectorType(kind, PIECE).as_pointer()
    return builder.bitcast(builder.gep(data, [start]), vector), 4 if isinstance(kind, ir.FloatType) else 8


def _load(builder: Any, data: Any, start: Any) -> Any:
    place, alignment = _piece(builder, data, start)
    return builder.load(place, align=alignment)


def _store(builder: Any, data: Any, start: Any, vector: Any) -> None:
    place, alignment = _piece(builder, data, start)
    builder.store(vector, place, align=alignment)


def _spread(builder: Any, scalar: Any) -> Any:
    empty = ir.Constant(ir.VectorType(scalar.type, PIECE), ir.Undefined)
    first = builder.insert_element(empty, scalar, ir.Constant(INT32, 0))
    return builder.shuffle_vector(first, empty, ir.Constant(ir.VectorType(INT32, PIECE), [0] * PIECE))


def _magnitude(builder: Any, vector: Any) -> Any:
    name = f"llvm.fabs.v{PIECE}f{32 if isinstance(vector.type.element, ir.FloatType) else 64}"
    function = ir.FunctionType(vector.type, [vector.type])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), [vector])


def _word(builder: Any, start: Any, test: Callable[[Any], Any]) -> Any:
    """The answers of `test`, a vector of bits for the piece that begins at its argument, side by side."""
    word = ir.Constant(INT64, 0)
    for lane in range(0, LANES, PIECE):
        bits = builder.bitcast(test(builder.add(start, ir.Constant(INT64, lane))), ir.IntType(PIECE))
        word = builder.or_(word, builder.shl(builder.zext(bits, INT64), ir.Constant(INT64, lane)))
    return word


def _data(context: Any, builder: Any, signature: Any, args: Any, place: int) -> Any:
    return context.make_array(signature.args[place])(context, builder, args[place]).data


@intrinsic
def at_least(typing: Any, x: Any, start: Any, threshold: Any) -> Any:
    """|x[i]| >= threshold; never for NaN."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data, bound = _data(context, builder, signature, args, 0), _spread(builder, args[2])

        def test(at: Any) -> Any:
            return builder.fcmp_ordered(">=", _magnitude(builder, _load(builder, data, at)), bound)

        return _word(builder, args[1], test)

    return types.uint64(x, types.uint64, x.dtype), code


@intrinsic
def not_finite(typing: Any, x: Any, start: Any) -> Any:
    """x[i] is NaN or infinite."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = _data(context, builder, signature, args, 0)
        infinity = _spread(builder, ir.Constant(data.type.pointee, math.inf))

        def test(at: Any) -> Any:
            return builder.fcmp_unordered(">=", _magnitude(builder, _load(builder, data, at)), infinity)

        return _word(builder, args[1], test)

    return types.uint64(x, types.uint64), code


@intrinsic
def below_zero(typing: Any, x: Any, start: Any) -> Any:
    """x[i] < 0; not for -0 nor NaN."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = _data(context, builder, signature, args, 0)
        zero = _spread(builder, ir.Constant(data.type.pointee, 0.0))
        return _word(builder, args[1], lambda at: builder.fcmp_ordered("<", _load(builder, data, at), zero))

    return types.uint64(x, types.uint64), code


@intrinsic
def add_test_decay(typing: Any, r: Any, v: Any, mean: Any, square: Any, start: Any, alpha: Any, zeta: Any) -> Any:
    """r[i] += mean[i], v[i] += square[i]; then r[i] * r[i] > alpha * v[i], each rounded; if not, v[i] *= zeta."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums, noises, means, squares = (_data(context, builder, signature, args, place) for place in range(4))
        factor, decay = _spread(builder, args[5]), _spread(builder, args[6])

        def test(at: Any) -> Any:
            total = builder.fadd(_load(builder, sums, at), _load(builder, means, at))
            noise = builder.fadd(_load(builder, noises, at), _load(builder, squares, at))
            sure = builder.fcmp_ordered(">", builder.fmul(total, total), builder.fmul(factor, noise))
            _store(builder, sums, at, total)
            _store(builder, noises, at, builder.select(sure, noise, builder.fmul(noise, decay)))
            return sure

        return _word(builder, args[4], test)

    return types.uint64(r, v, mean, square, types.uint64, r.dtype, r.dtype), code


@intrinsic
def lowest(typing: Any, word: Any) -> Any:
    """The place of the lowest set bit of a word that is not zero."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(INT1, 1))

    return types.uint64(types.uint64), code
