"""Codes of 1 to 8 bits from entries, and values from codes, in vector instructions.

`thinwire.kernels.low_bit` says what the codes mean, in plain torch. Arrays have a multiple of 64 entries, which the
caller guarantees to exist. TRITS stands for 1.6 bits.
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from thinwire.kernels.cpu.lanes import INT32, INT64, LANES, PIECE, _data, _load, _magnitude, _spread, _store, intrinsic
from thinwire.kernels.cpu.sums import Sums
from thinwire.kernels.low_bit import RATIO

TRITS = 0
WORDS = ir.VectorType(INT32, PIECE)
BYTES = ir.VectorType(ir.IntType(8), PIECE)
HALF = {3: 4, 4: 8, 8: 127}


def _same(vector: Any, number: float) -> Any:
    return ir.Constant(vector, [number] * PIECE)


def _rounding(builder: Any, name: str, x: Any) -> Any:
    kind = f"llvm.{name}.v{PIECE}f{32 if isinstance(x.type.element, ir.FloatType) else 64}"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(x.type, [x.type]), kind)
    return builder.call(function, [x])


def _quantised(builder: Any, bits: int, y: Any, factor: Any, border: Any) -> tuple[Any, Any]:
    """The codes, 32 bits wide, and their levels."""
    kind = y.type
    one, zero = _same(kind, 1.0), _same(kind, 0.0)
    if bits == 1:
        positive = builder.fcmp_ordered(">=", y, zero)
        return builder.zext(positive, WORDS), builder.select(positive, one, _same(kind, -1.0))
    small = builder.fmul(y, factor)
    if bits in HALF:
        half, name = HALF[bits], "rint" if bits == 8 else "floor"
        step = _rounding(builder, name, builder.fmul(small, border))
        low, high = _same(kind, float(-half)), _same(kind, float(half if bits == 8 else half - 1))
        step = builder.select(builder.fcmp_ordered("<", step, low), low, step)
        step = builder.select(builder.fcmp_ordered(">", step, high), high, step)
        codes = builder.add(builder.fptosi(step, WORDS), _same(WORDS, 128 if bits == 8 else half))
        return codes, step if bits == 8 else builder.fadd(step, _same(kind, 0.5))
    outer = builder.fcmp_ordered(">=", _magnitude(builder, small), border)
    positive = builder.fcmp_ordered(">=", small, zero)
    sign = builder.select(positive, one, _same(kind, -1.0))
    if bits == TRITS:
        level = builder.select(outer, sign, zero)
        return builder.add(builder.fptosi(level, WORDS), _same(WORDS, 1)), level
    codes = builder.or_(builder.shl(builder.zext(positive, WORDS), _same(WORDS, 1)), builder.zext(outer, WORDS))
    far = builder.select(positive, _same(kind, RATIO), _same(kind, -RATIO))
    return codes, builder.select(outer, far, sign)


def _level(builder: Any, bits: int, codes: Any, kind: Any) -> Any:
    """The levels of codes that are 32 bits wide."""
    if bits == 2:
        outer = builder.icmp_unsigned("!=", builder.and_(codes, _same(WORDS, 1)), _same(WORDS, 0))
        positive = builder.icmp_unsigned("!=", builder.and_(codes, _same(WORDS, 2)), _same(WORDS, 0))
        size = builder.select(outer, _same(kind, RATIO), _same(kind, 1.0))
        return builder.select(positive, size, builder.select(outer, _same(kind, -RATIO), _same(kind, -1.0)))
    if bits == 1:
        positive = builder.icmp_unsigned("!=", codes, _same(WORDS, 0))
        return builder.select(positive, _same(kind, 1.0), _same(kind, -1.0))
    middle = {TRITS: 1.0, 3: 3.5, 4: 7.5, 8: 128.0}[bits]
    return builder.fsub(builder.sitofp(codes, kind), _same(kind, middle))


def _load_codes(builder: Any, data: Any, at: Any) -> Any:
    place = builder.bitcast(builder.gep(data, [at]), BYTES.as_pointer())
    return builder.zext(builder.load(place, align=1), WORDS)


def _quantiser(bits: int) -> Any:
    @intrinsic
    def quantise(typing: Any, y: Any, size: Any, factor: Any, border: Any, codes: Any) -> Any:
        """Write the codes; the sums of level * y and of level^2 (2 bits: how many levels are the outer ones)."""

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data, target = (_data(context, builder, signature, args, place) for place in (0, 4))
            kind = ir.VectorType(data.type.pointee, PIECE)
            factors, borders = _spread(builder, args[2]), _spread(builder, args[3])
            products, squares = Sums(builder, kind), Sums(builder, kind)
            with cgutils.for_range_slice(builder, INT64(0), args[1], INT64(LANES)) as (start, _):
                for number in range(LANES // PIECE):
                    at = builder.add(start, INT64(number * PIECE))
                    entries = _load(builder, data, at)
                    chosen, level = _quantised(builder, bits, entries, factors, borders)
                    place = builder.bitcast(builder.gep(target, [at]), BYTES.as_pointer())
                    builder.store(builder.trunc(chosen, BYTES), place, align=1)
                    products.add(number, builder.fmul(level, entries))
                    if bits == 2:
                        outer = builder.and_(chosen, _same(WORDS, 1))
                        squares.add(number, builder.sitofp(outer, kind))
                    else:
                        squares.add(number, builder.fmul(level, level))
            return context.make_tuple(builder, signature.return_type, (products.folded(), squares.folded()))

        return types.UniTuple(y.dtype, 2)(y, types.int64, y.dtype, y.dtype, codes), code

    return quantise


def _adder(bits: int, fresh: bool) -> Any:
    @intrinsic
    def add(typing: Any, codes: Any, size: Any, scale: Any, target: Any) -> Any:
        """Add scale * level to the target, or write it there."""

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data, sums = (_data(context, builder, signature, args, place) for place in (0, 3))
            kind, unit = ir.VectorType(sums.type.pointee, PIECE), _spread(builder, args[2])
            with cgutils.for_range_slice(builder, INT64(0), args[1], INT64(LANES)) as (start, _):
                for number in range(LANES // PIECE):
                    at = builder.add(start, INT64(number * PIECE))
                    value = builder.fmul(unit, _level(builder, bits, _load_codes(builder, data, at), kind))
                    if not fresh:
                        value = builder.fadd(_load(builder, sums, at), value)
                    _store(builder, sums, at, value)
            return context.get_dummy_value()

        return types.void(codes, types.int64, target.dtype, target), code

    return add


quantise_1, quantise_trits, quantise_2 = _quantiser(1), _quantiser(TRITS), _quantiser(2)
quantise_3, quantise_4, quantise_8 = _quantiser(3), _quantiser(4), _quantiser(8)
add_1, add_trits, add_2, add_3, add_4, add_8 = (_adder(bits, False) for bits in (1, TRITS, 2, 3, 4, 8))
set_1, set_trits, set_2, set_3, set_4, set_8 = (_adder(bits, True) for bits in (1, TRITS, 2, 3, 4, 8))
